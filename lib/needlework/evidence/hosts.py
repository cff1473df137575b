"""How a command reaches a host. Three ways, one interface: run one command of a fixed list, get bytes or a reason.

Nothing here can write: `COMMANDS` is the whole list, each is a reader, and every value that goes into one was checked
by the plan and is quoted.
"""

from __future__ import annotations

import bz2
import collections
import contextlib
import gzip
import io
import lzma
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from needlework.evidence.plan import Host, Role
from needlework.processes import Child, output_of, stop

MAX_OUTPUT_BYTES = 64 << 20
MAX_FILE_BYTES = 4 << 20
MAX_HTTP_BYTES = 16 << 20

# name -> argv with {slots}. Readers only; `head -c` bounds what a file may give.
COMMANDS: dict[str, tuple[str, ...]] = {
    "unit-show": (
        "systemctl", "show", "--no-pager",
        "--property=Id,LoadState,ActiveState,SubState,UnitFileState,FragmentPath,DropInPaths,MainPID,User,Environment,"
        "EnvironmentFiles,ExecStart,ActiveEnterTimestamp,NRestarts", "--", "{unit}",
    ),
    "unit-cat": ("systemctl", "cat", "--no-pager", "--", "{unit}"),
    "journal": ("journalctl", "--no-pager", "-o", "json", "-n", "{lines}", "-u", "{unit}"),
    "journal-since": ("journalctl", "--no-pager", "-o", "json", "-n", "{lines}", "--since={since}", "-u", "{unit}"),
    "environ": ("head", "-c", str(1 << 20), "--", "/proc/{pid}/environ"),
    "cmdline": ("head", "-c", str(1 << 20), "--", "/proc/{pid}/cmdline"),
    "stat": ("stat", "-c", "%s %Y", "--", "{path}"),
    "sha256": ("sha256sum", "--", "{path}"),
    "file": ("head", "-c", str(MAX_FILE_BYTES), "--", "{path}"),
    "log": ("tail", "-n", "{lines}", "--", "{path}"),
    "packed": ("head", "-c", str(MAX_OUTPUT_BYTES), "--", "{path}"),
    "container": ("docker", "container", "inspect", "--", "{container}"),
    "container-log": ("docker", "logs", "--timestamps", "--tail", "{lines}", "--", "{container}"),
    "container-log-since": (
        "docker", "logs", "--timestamps", "--tail", "{lines}", "--since", "{since}", "--", "{container}",
    ),
    "pod": ("kubectl", "get", "pod", "-o", "yaml", "--", "{pod}"),
    "pod-log": ("kubectl", "logs", "--timestamps", "--tail={lines}", "--all-containers", "--prefix", "--", "{pod}"),
    "pod-log-since": (
        "kubectl", "logs", "--timestamps", "--tail={lines}", "--since-time={since}", "--all-containers", "--prefix",
        "--", "{pod}",
    ),
    "kernel": ("uname", "-sr"),
    "gpu": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
    "packages": ("{python}", "-m", "pip", "freeze", "--disable-pip-version-check"),
     "http": (
        "curl", "-sS", "--fail", "--globoff", "--max-time", "10", "--max-redirs", "0",
        "--max-filesize", str(MAX_HTTP_BYTES), "--", "{url}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one command gave: bytes, or the reason why not. `missing` says that the thing asked for is not there."""

    data: bytes = b""
    error: str | None = None
    missing: bool = False

    @property
    def state(self) -> str:
        """missing, failed, empty or ok."""
        if self.missing or self.error:
            return "missing" if self.missing else "failed"
        return "ok" if self.data.strip() else "empty"


def argv_of(command: str, **slots: str) -> list[str]:
    return [part.format(**slots) for part in COMMANDS[command]]


class Shell:
    """Runs the fixed commands here or, with a target, through the system's ssh and the user's own configuration.

    Within `connected` all commands of a host share one ssh connection, unless that configuration shares one already.
    """

    def __init__(self, host: Host, role: Role | None = None) -> None:
        self.host = host
        self.deadline = time.monotonic() + host.timeout_s
        self._role = role
        self._sharing: list[str] = []
        self._refused: Answer | None = None

    def inside(self, role: Role) -> Shell:
        """The same commands, run in the role's container or pod."""
        shell = Shell(self.host, role)
        shell.deadline = self.deadline
        return shell

    def _placed(self, command: str, argv: list[str]) -> list[str]:
        """A command as it is run where the role lives: by docker or kubectl themselves, or inside by their `exec`."""
        role = self._role
        if role is None:
            return argv
        if self.host.via == "docker":
            where = ["--host", self.host.target] if self.host.target else []
            inside = ["docker", *where, "exec", role.container or ""]
        else:
            where = [f"--context={self.host.target}"] if self.host.target else []
            where += [f"--namespace={self.host.namespace}"] if self.host.namespace else []
            where += [f"--request-timeout={max(1, int(self.host.timeout_s))}s"]
            inside = [
                "kubectl",
                *where,
                "exec",
                role.pod or "",
                *(["-c", role.container] if role.container else []),
                "--",
            ]
        return [argv[0], *where, *argv[1:]] if argv[0] in ("docker", "kubectl") else [*inside, *argv]

    def _ssh(self, *options: str) -> list[str]:
        assert self.host.target is not None
        return [
            "ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ClearAllForwardings=yes",
            "-o", f"ConnectTimeout={max(1, int(min(10, self.host.timeout_s)))}", "-T", *options, "--", self.host.target,
        ]  # fmt: skip

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Hold the one connection; it and its socket are gone with the block, and with this process however it ends.

        Where sharing does not come about, each command connects by itself and says what is wrong.
        """
        with contextlib.ExitStack() as stack:
            shared = self.host.via == "ssh" and re.search(rb"(?m)^controlpath ", self._run(self._ssh("-G")).data)
            if self.host.via == "ssh" and not shared:
                with contextlib.suppress(OSError):  # no room for a socket
                    self._share(stack)
            yield

    def _share(self, stack: contextlib.ExitStack) -> None:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nw"))) / "s"
        options = ("-o", f"ControlPath={path}", "-o", "ControlPersist=no")
        command = self._ssh(*options, "-o", "ControlMaster=yes", "-N")
        # the guard's second: told to end, ssh removes its socket
        child = Child("ssh", [sys.executable, "-m", "needlework.processes", "{watch}", "1", *command])
        stack.callback(stop, [child])
        while child.alive and not path.exists() and time.monotonic() < self.deadline:
            time.sleep(0.02)
        if path.exists():
            self._sharing = [*options, "-o", "ControlMaster=no"]
        elif child.process.returncode == 255:
            self._refused = _unreached(child.log_tail(1))

    def run(self, command: str, **slots: str) -> Answer:
        """Run one of `COMMANDS`, its slots filled in, within what is left of the host's time."""
        if command == "http" and self.host.via == "local":
            return _get(slots["url"])
        role = self._role
        argv = self._placed(
            command, argv_of(command, **slots, container=(role and role.container) or "", pod=(role and role.pod) or "")
        )
        if self.host.via == "ssh":
            argv = [*self._ssh(*self._sharing), shlex.join(argv)]
        answer = self._refused or self._run(argv)
        if command.startswith("container-log"):  # what the program wrote on either of its outputs, by time
            answer = Answer(b"\n".join(sorted(answer.data.splitlines())), answer.error, answer.missing)
        return answer

    def _run(self, argv: list[str]) -> Answer:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            return Answer(error=f"no time left (the host's {self.host.timeout_s:g} s are used up)")
        try:
            done = output_of(argv, timeout_s=left_s, limit_bytes=MAX_OUTPUT_BYTES)
            if argv[0] == "docker" and "logs" in argv and done.returncode == 0:
                done.stdout += done.stderr
        except FileNotFoundError:
            return Answer(error=f"{argv[0]} is not installed", missing=True)
        except subprocess.TimeoutExpired:
            return Answer(error=f"no answer within the host's {self.host.timeout_s:g} s")
        except OSError as error:
            return Answer(error=f"could not run {argv[0]}: {error.strerror}")
        return _judge(self.host.via, argv[0], done)


def _get(url: str) -> Answer:
    """GET one route of a service on this machine: no redirect, 10 s, bounded."""
    data = b""
    try:
        with httpx.stream("GET", url, timeout=10, follow_redirects=False, trust_env=False) as response:
            for chunk in response.iter_bytes(1 << 16):
                data += chunk
                if len(data) > MAX_HTTP_BYTES:
                    return Answer(error=f"the answer is larger than {MAX_HTTP_BYTES >> 20} MiB")
            if response.status_code != 200:
                return Answer(error=f"HTTP status {response.status_code}", missing=response.status_code == 404)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Answer(error=f"no answer ({type(error).__name__})")
    return Answer(data)


def _judge(via: str, program: str, done: subprocess.CompletedProcess[bytes]) -> Answer:
    text = done.stderr.decode("utf-8", "replace").strip().splitlines()
    said = text[-1][:300] if text else ""
    if via == "ssh" and done.returncode == 255:
        return _unreached(said)
    if len(done.stdout) > MAX_OUTPUT_BYTES:
        return Answer(done.stdout[:MAX_OUTPUT_BYTES], error=f"cut at {MAX_OUTPUT_BYTES >> 20} MiB")
    if done.returncode:
        missing = (
            bool(re.search(r"(?i)no such file|not be found|not found|no files found|command not found", said))
            or done.returncode == 127
        )
        return Answer(done.stdout, error=said or f"{program} ended with status {done.returncode}", missing=missing)
    return Answer(done.stdout)


def _unreached(said: str) -> Answer:
    return Answer(error=f"ssh could not connect: {said.strip()[:300] or 'no reason given'}")


def unpacked(answer: Answer, lines: int) -> Answer:
    """The last lines of a log that came compressed, whatever it unpacks to."""
    opener: Any = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}.get(answer.data[:2])
    if answer.error or opener is None:
        return answer
    try:
        with opener(io.BytesIO(answer.data)) as handle:
            return Answer(last_lines(handle, lines))
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        return Answer(error=f"the compressed log is damaged or was cut ({type(error).__name__})")


def last_lines(handle: IO[bytes], lines: int) -> bytes:
    """The last lines of a file of any size, in bounded memory: of an endless line only what fits."""
    kept: collections.deque[bytes] = collections.deque(maxlen=lines)
    size = 0
    while line := handle.readline(1 << 16):
        size += len(line) - (len(kept[0]) if len(kept) == lines else 0)
        kept.append(line)
        while size > MAX_OUTPUT_BYTES:
            size -= len(kept.popleft())
    return b"".join(kept)


class Folder:
    """The same questions answered from a saved tree: absolute paths below the folder, journals read by journalctl.

    `<folder>/etc/systemd/system/UNIT` and `UNIT.d/*.conf`, `<folder>/var/log/journal/**/*.journal` (or `UNIT.jsonl`,
    the output of `journalctl -o json`), `<folder>/proc/UNIT/environ`, `<folder>/http/ROLE/server_info`, any other file
    under its own path.
    """

    UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")

    def __init__(self, host: Host) -> None:
        assert host.folder is not None
        self.host, self.root = host, host.folder.resolve()
        if not self.root.is_dir():
            raise OSError(f"the saved folder of host {host.name} does not exist")

    def _inside(self, path: str) -> Path | None:
        """The file under the root, or None when it is missing or a link leads outside."""
        real = (self.root / path.lstrip("/")).resolve()
        return real if real.is_file() and real.is_relative_to(self.root) else None

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is held: the files are here."""
        return contextlib.nullcontext()

    def run(self, command: str, **slots: str) -> Answer:
        handler = getattr(self, "_" + command.replace("-", "_"), None)
        return handler(**slots) if handler else Answer(error="not in a saved folder", missing=True)

    def _read(self, path: str, limit_bytes: int = MAX_FILE_BYTES) -> Answer:
        real = self._inside(path)
        if real is None:
            return Answer(error="No such file or directory", missing=True)
        with real.open("rb") as handle:
            return Answer(handle.read(limit_bytes))

    def _unit_files(self, unit: str) -> list[str]:
        for folder in self.UNIT_FOLDERS:
            if self._inside(f"{folder}/{unit}"):
                found = [f"{folder}/{unit}"]
                break
        else:
            return []
        drop_ins = {
            p.name: p
            for folder in reversed(self.UNIT_FOLDERS)
            for p in sorted((self.root / folder / f"{unit}.d").glob("*.conf"))
        }
        return found + [str(drop_ins[name].relative_to(self.root)) for name in sorted(drop_ins)]

    def _unit_cat(self, unit: str) -> Answer:
        files = self._unit_files(unit)
        if not files:
            return Answer(error=f"No files found for {unit}.", missing=True)
        return Answer(b"\n".join(f"# /{name}\n".encode() + self._read(name).data for name in files))

    def _unit_show(self, unit: str) -> Answer:
        saved = self._read(f"proc/{unit}/show")
        return (
            saved
            if not saved.error
            else Answer(error="the saved folder has no `systemctl show` of this unit", missing=True)
        )

    def _journal(self, unit: str, lines: str, since: str | None = None) -> Answer:
        for name in (f"var/log/journal/{unit}.jsonl", f"var/log/journal/{unit}.json"):
            if self._inside(name):
                return self._log(name, lines)
        journals = [
            path
            for path in sorted((self.root / "var/log/journal").rglob("*.journal"))
            if path.resolve().is_relative_to(self.root)
        ]
        if not journals:
            return Answer(error="the saved folder holds no journal", missing=True)
        argv = argv_of("journal-since" if since else "journal", unit=unit, lines=lines, since=since or "")
        argv[1:1] = [f"--file={path}" for path in journals]
        try:
            done = output_of(argv, timeout_s=self.host.timeout_s, limit_bytes=MAX_OUTPUT_BYTES)
        except FileNotFoundError:
            return Answer(
                error="journalctl is not installed; export the journal with `journalctl -o json` instead", missing=True
            )
        except subprocess.TimeoutExpired:
            return Answer(error=f"journalctl gave no answer within {self.host.timeout_s:g} s")
        return _judge("folder", "journalctl", done)

    _journal_since = _journal

    def _environ(self, pid: str) -> Answer:
        return self._read(f"proc/{pid}/environ")

    def _cmdline(self, pid: str) -> Answer:
        return self._read(f"proc/{pid}/cmdline")

    def _file(self, path: str) -> Answer:
        return self._read(path)

    def _log(self, path: str, lines: str) -> Answer:
        real = self._inside(path)
        if real is None:
            return Answer(error="No such file or directory", missing=True)
        with real.open("rb") as handle:
            handle.seek(max(0, real.stat().st_size - MAX_OUTPUT_BYTES))
            return Answer(last_lines(handle, int(lines)))

    def _packed(self, path: str) -> Answer:
        return self._read(path, MAX_OUTPUT_BYTES)

    def _stat(self, path: str) -> Answer:
        real = self._inside(path)
        if real is None:
            return Answer(error="No such file or directory", missing=True)
        return Answer(f"{real.stat().st_size} {int(real.stat().st_mtime)}".encode())

    def _packages(self, python: str) -> Answer:
        return self._read("packages.txt")

    def _gpu(self) -> Answer:
        return self._read("gpu.csv")

    def _http(self, url: str) -> Answer:
        return self._read(url)
