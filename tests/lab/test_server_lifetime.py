"""Starting and ending: clear sentences for what cannot start, and no process left behind, however the end comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import needlework_lab as lab
import pytest
from lab_client import until
from needlework.processes import Child, stop
from needlework_lab.main import _arguments, build_worker
from needlework_lab.processes import listening_socket
from needlework_lab.starting import _wait

PARENT = """
import sys, time
import needlework_lab as lab
with lab.start(mode="pd", geometry="tiny") as deployment:
    print(*[child.pid for child in deployment.children.values()], flush=True)
    time.sleep(60)
"""


def descendants(pid: int) -> set[int]:
    """Process ids below `pid`, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # ended while we looked
    found, level = set(), {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def hear_ctrl_c():
    """A test run in the background inherits an ignored SIGINT; a terminal's program does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc").exists(), reason="process tables are read from /proc")
def test_nothing_is_left_when_the_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and len(parent.stdout.readline().split()) == 3
    family = descendants(parent.pid)
    assert len(family) >= 4, "prefill, decode, the router and its guard"
    parent.kill()
    parent.wait()
    assert until(lambda: not any(map(alive, family)), 5.0), [pid for pid in family if alive(pid)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="process tables are read from /proc")
def test_the_command_runs_until_ctrl_c():
    command = [sys.executable, "-m", "needlework", "lab", "--geometry", "tiny"]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)
    assert shell.stdout is not None
    head = [shell.stdout.readline() for _ in range(5)]
    assert "combined deployment, geometry tiny, healthy" in head[0] and "http://127.0.0.1:" in head[1]
    family = descendants(shell.pid)
    shell.send_signal(signal.SIGINT)
    _, errors = shell.communicate(timeout=10)
    assert shell.returncode == 0 and errors.splitlines()[-1] == "stopped"
    assert not any(map(alive, family))


def test_an_exception_in_the_block_ends_the_processes_quickly():
    began = 0.0
    with pytest.raises(ZeroDivisionError), lab.start(geometry="tiny") as deployment:
        pid, began = deployment.children["combined"].pid, time.monotonic()
        assert alive(pid)
        raise ZeroDivisionError
    assert not alive(pid) and time.monotonic() - began < 4.0


def test_a_port_in_use_is_said_in_one_sentence(capfd):
    from needlework.__main__ import main

    with listening_socket() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} cannot be used"), lab.start(geometry="tiny", port=port):
            pass
        with (
            pytest.raises(RuntimeError, match=f"port {port} cannot be used"),
            lab.start("pd", geometry="tiny", port=port),
        ):
            pass
        assert main(["lab", "--geometry", "tiny", "--port", str(port)]) == 2
    starting, *told = capfd.readouterr().err.splitlines()
    assert starting.startswith("starting") and len(told) == 1 and f"port {port}" in told[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "both"}, "mode must be one of"),
        ({"geometry": "v9"}, "geometry must be one of"),
        ({"router": "nginx"}, "router must be one of"),
        ({"port": 99999}, "a port is a number"),
    ],
)
def test_settings_that_do_not_exist(settings, words):
    with pytest.raises((ValueError, lab.LabError)) as caught, lab.start(**settings):
        pass
    assert words in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (["--fault", "F99"], "no fault named 'F99'"),
        (["--fault", "F14:colour=1"], "no parameter 'colour'"),
        (["--options", '{"no_such_option": 1}'], "no_such_option"),
    ],
)
def test_a_server_refuses_what_does_not_exist(setting, words):
    arguments = _arguments(["--role", "prefill", "--geometry", "tiny", "--http-fd", "0", "--watch-fd", "0", *setting])
    with pytest.raises(ValueError, match=words):
        build_worker(arguments)


def test_a_refusal_is_passed_on_as_one_sentence():
    child = Child("prefill", [sys.executable, "-c", "print('log'); print('no fault named F99'); raise SystemExit(2)"])
    try:
        with pytest.raises(lab.LabError) as caught:
            _wait({"prefill": child}, {"prefill": 1}, timeout_s=20)
        assert str(caught.value) == "no fault named F99"
    finally:
        stop([child])


def test_a_process_that_dies_while_starting_shows_its_last_words():
    child = Child("prefill", [sys.executable, "-c", "print('first'); print('no memory left'); raise SystemExit(3)"])
    try:
        with pytest.raises(lab.LabError, match="prefill process ended with status 3") as caught:
            _wait({"prefill": child}, {"prefill": 1}, timeout_s=20)
        assert "no memory left" in str(caught.value)
    finally:
        stop([child])


def test_a_process_that_never_answers_is_given_up():
    child = Child("decode", [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"])
    try:
        with pytest.raises(lab.LabError, match="decode process was not ready within 1 s"):
            _wait({"decode": child}, {"decode": 1}, timeout_s=1)
    finally:
        stop([child], grace_s=0.1)
    assert not alive(child.pid)
