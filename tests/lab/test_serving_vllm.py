"""Starting a real engine where there is none, or a broken one: one sentence, the last log lines, nothing left."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from needlework import workbook
from needlework.processes import Child, stop
from needlework_lab import vllm
from needlework_lab.processes import free_port


def test_an_engine_that_is_not_set_up_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_ROOT", str(tmp_path))
    with pytest.raises(vllm.EngineError, match="run `make engine` first"), vllm.start():
        pass
    with pytest.raises(workbook.TargetError, match="run `make engine` first"), workbook.open_target("vllm"):
        pass


def test_modes_and_arms_that_do_not_exist_are_refused(fake):
    with pytest.raises(ValueError, match="combined, pd"), vllm.start("both"):
        pass
    with pytest.raises(workbook.TargetError, match="combined and pd, not 'both'"), workbook.open_target("vllm:both"):
        pass


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """An engine that is set up by its files, and whose interpreter is a script of the test."""
    monkeypatch.setenv("NEEDLEWORK_ROOT", str(tmp_path))
    interpreter = tmp_path / ".venv-vllm/bin/python"
    interpreter.parent.mkdir(parents=True)
    model = tmp_path / "build/models/smollm2"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write(interpreter, "echo loading; echo 'no such kernel' >&2; exit 3")
    return interpreter


def write(script: Path, body: str) -> None:
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def test_a_server_that_ends_shows_its_last_lines(fake):
    with (
        pytest.raises(vllm.EngineError, match=r"(?s)combined process ended with status 3.*no such kernel"),
        vllm.start(),
    ):
        pass


def test_a_server_that_never_answers_is_given_up_and_ended(fake, tmp_path):
    write(fake, f"echo $$ > {tmp_path}/pid; sleep 60 & echo $! > {tmp_path}/worker; trap '' TERM; echo waiting; wait")
    with (
        pytest.raises(vllm.EngineError, match=r"(?s)not ready within 1.5 s.*waiting"),
        vllm.start(start_timeout_s=1.5),
    ):
        pass
    for name in ("pid", "worker"):
        assert not running(int((tmp_path / name).read_text())), f"the {name} process is still there"


@pytest.mark.parametrize("grace", ["0", "5"])
def test_the_guard_ends_the_whole_group_when_its_pipe_ends(tmp_path, grace):
    script = tmp_path / "program"
    write(script, f"sleep 60 & echo $! > {tmp_path}/worker; echo $$ > {tmp_path}/pid; wait")
    parent = (
        "import sys, os, time\nfrom needlework.processes import Child\n"
        "child = Child('x', [sys.executable, '-m', 'needlework.processes', '{watch}', *sys.argv[1:]])\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, grace, str(script)])
    assert until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), 30)
    pids = [int((tmp_path / name).read_text()) for name in ("pid", "worker")]
    assert all(map(running, pids)), "the planted processes must run before they can be ended"
    process.kill()
    process.wait()
    assert until(lambda: not any(map(running, pids)), 10)


HOLDER = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(block._name, "shared_memory")  # as a worker whose tracker was killed with it
print(block.name, flush=True)
time.sleep(60)
"""


def test_what_a_killed_group_leaves_in_shared_memory_is_removed(tmp_path):
    mine = shared_memory.SharedMemory(create=True, size=4096)
    try:
        child = Child("x", [sys.executable, "-m", "needlework.processes", "{watch}", "0", sys.executable, "-c", HOLDER])
        name = until(lambda: child.read_log().decode().strip(), 30)
        assert name and (Path("/dev/shm") / name).exists()
        stop([child], 10)
        assert not (Path("/dev/shm") / name).exists(), "the segment of the killed program is still there"
        assert (Path("/dev/shm") / mine.name).exists(), "another program's segment was removed"
    finally:
        mine.close()
        mine.unlink()


def test_ports_for_slow_programs_lie_outside_the_range_of_outgoing_connections():
    assert all(15000 <= free_port() < 32000 for _ in range(20))


def until(condition, timeout_s: float):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
