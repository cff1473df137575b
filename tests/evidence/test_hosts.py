"""Collection over a real sshd on loopback: eight hosts, of which one is dead, one slow, one refusing."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from evidence_image import MISSING, SOURCE, build_image
from needlework.evidence import absences, collect, load_plan
from needlework.evidence import hosts as reading

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
GOOD, SLOW, REFUSING, DEAD = range(5), 5, 6, 7
needs_sshd = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh")), reason="sshd or ssh is not installed (Debian: openssh-server)"
)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def machine(folder: Path, slow: bool) -> Path:
    """A command that answers as one machine would: its own systemctl and journalctl, its files under an image."""
    image = build_image(folder / "image", lines=60)
    tools = folder / "bin"
    tools.mkdir()
    journal = next(iter((image / "var/log/journal").glob("*.journal")), None)
    unit = f"unit=$(eval echo \\${{$#}}); base={image}/etc/systemd/system"
    scripts = {
        "systemctl": f'#!/bin/sh\n{unit}\n[ -f $base/$unit ] || {{ echo "No files found for $unit." >&2; exit 1; }}\n'
        f'[ "$1" = show ] && exec cat {image}/proc/$unit/show\nfor f in $base/$unit $base/$unit.d/*.conf; do [ -f $f ] && echo "# $f" && cat $f; done; true\n',
        "journalctl": f'#!/bin/sh\nexec {shutil.which("journalctl")} --file={journal} "$@"\n'
        if journal
        else "#!/bin/sh\nexit 1\n",
        "nvidia-smi": f"#!/bin/sh\ncat {image}/gpu.csv\n",
    }
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    # Paths of the plan are absolute; the image stands for "/" through this prefix.
    login = folder / "login.sh"
    delay = "sleep 60\n" if slow else ""
    login.write_text(
        f"#!/bin/sh\n{delay}export PATH={tools}:$PATH\n"
        f'exec sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed "s# /root/# {image}/root/#g")"\n'
    )
    login.chmod(0o755)
    return login


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    root = tmp_path_factory.mktemp("ssh")
    ports = free_ports(8)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True)
    shutil.copy(root / "user_key.pub", root / "authorized_keys")
    lines = [f"HostKey {root}/host_key", "UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no",
             "KbdInteractiveAuthentication no", f"AuthorizedKeysFile {root}/authorized_keys", "PidFile none", "MaxStartups 100", "MaxSessions 100"]  # fmt: skip
    # a quick handshake, and a shell that does not read the start-up files of whoever runs the tests (bash does at level 1)
    lines += ["KexAlgorithms curve25519-sha256", "SetEnv SHLVL=2"]
    lines += [f"ListenAddress 127.0.0.1:{port}" for number, port in enumerate(ports) if number != DEAD]
    for number in (*GOOD, SLOW):
        lines += [
            f"Match LocalPort {ports[number]}",
            f"  ForceCommand {machine(root / f'host{number}', slow=number == SLOW) if (root / f'host{number}').mkdir() is None else ''}",
        ]
    lines += [f"Match LocalPort {ports[REFUSING]}", "  AuthorizedKeysFile none"]
    (root / "sshd_config").write_text("\n".join(lines) + "\n")
    known = (root / "host_key.pub").read_text().split()[:2]
    (root / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {' '.join(known)}\n" for port in ports))
    config = "".join(
        f"Host sim{number}\n  HostName 127.0.0.1\n  Port {port}\n" for number, port in enumerate(ports)
    ) + f"Host *\n  User {getpass.getuser()}\n  IdentityFile {root}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {root}/known_hosts\n"  # fmt: skip
    (root / "ssh_config").write_text(config)
    tools = root / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {root}/ssh_config "$@"\n')
    (tools / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (root / "sshd.log").open("wb") as log:
        server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(root / "sshd_config")], stderr=log)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", ports[0])) == 0:
                break
        time.sleep(0.05)
    yield tools, ports
    server.terminate()
    server.wait(timeout=10)


@needs_sshd
def test_eight_hosts_one_dead_one_slow_one_refusing(hosts, tmp_path, monkeypatch):
    tools, _ = hosts
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    text = "[window]\nlines = 50\n"
    for number in range(8):
        text += (
            f"[[hosts]]\nname='sim{number}'\nvia='ssh'\ntarget='sim{number}'\ntimeout_s={4 if number == SLOW else 40}\n"
        )
        text += f"[[hosts.roles]]\nrole='decode'\nunit='sglang-dsv4-decode.service'\nfiles=['{SOURCE}', '{MISSING}']\n"
        text += "[[hosts.roles]]\nrole='combined'\nunit='sglang-dsv4.service'\n"
    (tmp_path / "incident.toml").write_text(text)
    progress = []
    start = time.monotonic()
    result = collect(load_plan(tmp_path / "incident.toml"), progress.append)
    assert time.monotonic() - start < 42 and len(progress) == 9
    log = (tools.parent / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 6, "one connection for each host that answers, and for the slow one"
    for number in GOOD:
        rows = {
            (i["role"], i["item"].partition(":")[0]): i["state"]
            for i in result.items
            if (i["host"] == f"sim{number}" and "flash_mla" in i["item"])
            or (i["host"] == f"sim{number}" and ":" not in i["item"])
        }
        assert (
            rows["decode", "unit-cat"]
            == rows["decode", "journal"]
            == rows["decode", "file"]
            == rows["combined", "unit-show"]
            == "ok"
        ), (number, rows)
        assert len(result.text(f"sim{number}", "decode", "journal").splitlines()) == 50
        assert "SGLANG_OPT_USE_TILELANG_INDEXER" in result.text(f"sim{number}", "decode", "unit-cat")
        assert "SGLANG_SM120_FLASHMLA_BACKEND=triton" in "".join(
            result.texts.values()
        )  # the wrapper script ExecStart names
    said = absences(result)
    for number, reason in (
        (SLOW, "no answer within"),
        (REFUSING, "ssh could not connect"),
        (DEAD, "ssh could not connect"),
    ):
        assert reason in " ".join(said[said["host"] == f"sim{number}"]["finding"])
        assert not any(key[0] == f"sim{number}" for key in result.texts)
    assert said[said["host"] == "sim0"]["item"].str.contains("indexer.py").any()


COLLECT = """
import sys
from needlework.evidence import collect, load_plan
collect(load_plan(sys.argv[1]))
"""


def running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # ended, and nobody has asked for its status
    except psutil.NoSuchProcess:
        return False


@needs_sshd
def test_nothing_is_left_when_a_collection_is_killed(hosts, tmp_path):
    """The host takes a minute to answer; what holds the connection and what waits for the answer both end."""
    tools, _ = hosts
    (tmp_path / "incident.toml").write_text(
        f"[[hosts]]\nname='slow'\nvia='ssh'\ntarget='sim{SLOW}'\ntimeout_s=60\n[[hosts.roles]]\nrole='decode'\nunit='a.service'\n"
    )
    short = tempfile.mkdtemp(prefix="nw")  # a socket's path has a hundred characters at most
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": short}
    parent = psutil.Popen([sys.executable, "-c", COLLECT, tmp_path / "incident.toml"], env=environment)
    try:
        deadline = time.monotonic() + 20
        while len(family := parent.children(recursive=True)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)  # the guard, the connection, and the command that waits
        assert len(family) == 3 and list(Path(short).rglob("s"))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 5
        while (left := list(filter(running, family))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left and not list(Path(short).rglob("s"))
    finally:
        shutil.rmtree(short)


def test_output_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_OUTPUT_BYTES", 1 << 20)
    monkeypatch.setitem(reading.COMMANDS, "kernel", ("yes",))
    host = load_plan(_local(tmp_path)).hosts[0]
    answer = reading.Shell(host).run("kernel")
    assert (answer.state, answer.error, len(answer.data)) == ("failed", "cut at 1 MiB", 1 << 20)


def _local(folder):
    path = folder / "incident.toml"
    path.write_text(
        "[[hosts]]\nname='here'\nvia='local'\ntimeout_s=5\n[[hosts.roles]]\nrole='combined'\nfiles=['/x']\n"
    )
    return path


@needs_sshd
def test_an_unknown_host_key_is_refused(hosts, tmp_path, monkeypatch):
    tools, ports = hosts
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    known = tools.parent / "known_hosts"
    before = known.read_text()
    try:
        known.write_text("")
        (tmp_path / "incident.toml").write_text(
            "[[hosts]]\nname='sim0'\nvia='ssh'\ntarget='sim0'\ntimeout_s=10\n[[hosts.roles]]\nrole='decode'\nunit='sglang-dsv4-decode.service'\n"
        )
        result = collect(load_plan(tmp_path / "incident.toml"))
    finally:
        known.write_text(before)
    assert not result.texts and "ssh could not connect" in absences(result)["finding"].iloc[0]
    assert not any(secret in str(result.items) for secret in ("127.0.0.1", str(ports[0])))


def test_this_machine_is_read_without_ssh(tmp_path):
    (tmp_path / "kernel.py").write_text("x = 1\n")
    (tmp_path / "incident.toml").write_text(
        f"[[hosts]]\nname='here'\nvia='local'\n[[hosts.roles]]\nrole='combined'\nfiles=['{tmp_path}/kernel.py']\nendpoint='http://127.0.0.1:9'\n"
    )
    result = collect(load_plan(tmp_path / "incident.toml"))
    states = {item["item"].partition(":")[0]: item["state"] for item in result.items if item["role"] == "combined"}
    assert states["file"] == states["sha256"] == "ok" and states["http-server_info"] == "failed"
