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
from needlework.evidence import absences, collect, effective, findings, load_plan, read_log
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


def stand_in(folder, name, script):
    """A program of this name that notes how it was called and answers as the real one does."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\n{script}\n')
    path.chmod(0o755)


INSPECT = """[{"Id": "abc", "Name": "/vllm", "Path": "vllm", "Args": ["serve", "/m", "--block-size", "16"], "Config": {
"Image": "vllm/vllm-openai:v0.25.1", "Entrypoint": ["vllm"], "Cmd": ["serve", "/m", "--block-size", "16"],
"Env": ["HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzABCD", "VLLM_LOGGING_LEVEL=INFO"]}}]"""
POD = """apiVersion: v1
kind: Pod
metadata: {name: vllm-0}
spec:
  nodeName: gpu-node-17
  containers:
  - {name: main, image: 'vllm/vllm-openai:v0.25.1', args: [--model, /m, --block-size=64]}
  - {name: sidecar, image: envoy, args: [--level, info]}
"""
FAILED = "2026-11-30T10:00:01.5Z ERROR 11-30 [worker.py:767] NIXL transfer failure: handshake_failed on gpu-node-17"


def test_containers_are_read_through_docker(tmp_path, monkeypatch):
    (tmp_path / "inspect.json").write_text(INSPECT)
    script = f"""case "$*" in
*inspect*) cat {tmp_path}/inspect.json ;;
*logs*) echo '2026-11-30T10:00:02Z INFO vLLM API server version 0.25.1'; echo '{FAILED}' >&2 ;;
*exec*environ*) printf 'PATH=/x\\0' ;;
*exec*stat*) echo '5 1' ;;
*exec*head*) printf 'X=1\\n' ;;
*) echo "OCI runtime exec failed: exec: not found" >&2; exit 126 ;;
esac"""
    stand_in(tmp_path, "docker", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = (
        "[[hosts]]\nname='box'\nvia='docker'\n[[hosts.roles]]\nrole='decode'\ncontainer='vllm'\nfiles=['/etc/x.env']\n"
    )
    (tmp_path / "incident.toml").write_text(plan)
    result = collect(load_plan(tmp_path / "incident.toml"))
    said = findings(result).rows
    assert [(row.name, row.count) for row in said if row.kind == "log"] == [("handshake", 1), ("transfer", 1)]
    log = read_log(result, "box", "decode")
    assert log["message"].str.contains("transfer failure").tolist() == [True, False], "both outputs, by time"
    table = effective(result).set_index("setting")
    assert table.loc["page_size", ["value", "source"]].tolist() == ["16", "manifest"]
    assert table.loc["X", "source"] == "environment file" and "hf_abcdef" not in str(result.texts)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "container inspect -- vllm" in calls and "logs --timestamps --tail 4000 -- vllm" in calls
    assert all(call.split()[0] in ("container", "logs", "exec") for call in calls)
    assert {call.split()[2] for call in calls if call.startswith("exec")} <= {"head", "stat", "sha256sum"}


def test_pods_are_read_through_kubectl(tmp_path, monkeypatch):
    (tmp_path / "pod.yaml").write_text(POD)
    script = f"""case "$*" in
*" get pod"*) cat {tmp_path}/pod.yaml ;;
*" logs "*) echo "[pod/vllm-0/main] {FAILED}" ;;
*) echo "error: unable to upgrade connection: pod does not exist" >&2; exit 1 ;;
esac"""
    stand_in(tmp_path, "kubectl", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = "[[hosts]]\nname='cluster'\nvia='kubectl'\ntarget='prod'\nnamespace='llm'\n"
    plan += "[[hosts.roles]]\nrole='decode'\npod='vllm-0'\ncontainer='main'\n"
    (tmp_path / "incident.toml").write_text(plan)
    result = collect(load_plan(tmp_path / "incident.toml"))
    table = effective(result).set_index("setting")
    assert table.loc["page_size", "value"] == "64" and table.loc["sidecar/level", "value"] == "info"
    assert "gpu-node-17" not in str(result.texts) + str(result.items)
    assert [row.name for row in findings(result).rows if row.kind == "log"] == ["handshake", "transfer"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.startswith("--context=prod --namespace=llm --request-timeout=60s ") for call in calls)
    assert {call.split()[3] for call in calls} == {"get", "logs", "exec"}
    assert any(call.endswith("exec vllm-0 -c main -- head -c 1048576 -- /proc/1/environ") for call in calls)


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_a_docker_without_its_daemon_is_one_sentence(tmp_path):
    plan = f"[[hosts]]\nname='box'\nvia='docker'\ntarget='unix://{tmp_path}/no.sock'\n[[hosts.roles]]\nrole='decode'\ncontainer='x'\n"
    (tmp_path / "incident.toml").write_text(plan)
    said = absences(collect(load_plan(tmp_path / "incident.toml")))["finding"]
    assert said.str.contains("daemon|no.sock|not be").any()


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("via='docker'\n[[hosts.roles]]\nrole='decode'\ncontainer='--privileged'", "not the name of one"),
        ("via='docker'\n[[hosts.roles]]\nrole='decode'\ncontainer='a;b'", "not the name of one"),
        ("via='docker'\n[[hosts.roles]]\nrole='decode'", "needs a container"),
        ("via='docker'\ntarget='-H'\n[[hosts.roles]]\nrole='decode'\ncontainer='a'", "not a docker host"),
        ("via='kubectl'\nnamespace='-n'\n[[hosts.roles]]\nrole='decode'\npod='a'", "namespace must be"),
        ("via='kubectl'\n[[hosts.roles]]\nrole='decode'\ncontainer='a'", "needs a pod"),
        ("via='local'\n[[hosts.roles]]\nrole='decode'\npod='a'", "needs via"),
        ("via='ssh'\ntarget='a'\nnamespace='x'\n[[hosts.roles]]\nrole='decode'", "namespace must be"),
    ],
)
def test_a_plan_for_containers_is_read_strictly(tmp_path, host, sentence):
    (tmp_path / "incident.toml").write_text("[[hosts]]\n" + host)
    with pytest.raises(ValueError, match=sentence):
        load_plan(tmp_path / "incident.toml")
