"""Programs that this process starts: bounded output, last log lines on failure, and nothing left behind.

A child holds the reading end of a pipe whose writing end only the parent has; when the parent goes, however it goes,
the pipe ends and the child exits. Its output goes to an unnamed temporary file: its last lines can be shown in an
error, and nothing stays on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOG_TAIL_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.PyDLL(None) if sys.platform == "linux" else None  # loaded here: little is safe after a fork


def bound_to(starter: int) -> Callable[[], None]:
    """For Popen's `preexec_fn`: the Linux kernel kills the program when the thread that starts it in process `starter`
    ends. Elsewhere it does nothing.
    """

    def bind() -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != starter:  # it went between fork and here
                os._exit(1)

    return bind


def output_of(
    command: Sequence[str], *, timeout_s: float, limit_bytes: int = 64 << 20
) -> subprocess.CompletedProcess[bytes]:
    """Run a program without a shell and without input, and return its status and what it wrote; on Linux it does not
    outlive this process.

    Of standard output at most `limit_bytes` and one byte more, which tells that there was more: the program is killed
    there. Of standard error as much; what comes after that is read and dropped. Raises OSError when it cannot be
    started and subprocess.TimeoutExpired, after killing it, when it runs for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=bound_to(os.getpid()),
        ) as program,
        selectors.DefaultSelector() as ready,
    ):  # fmt: skip
        assert program.stdout is not None and program.stderr is not None
        wrote = {program.stdout.fileno(): bytearray(), program.stderr.fileno(): bytearray()}
        out, err = wrote.values()
        for number in wrote:
            ready.register(number, selectors.EVENT_READ)
        try:
            while ready.get_map() and len(out) <= limit_bytes:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                for key, _ in ready.select(left_s):
                    if chunk := os.read(key.fd, 1 << 16):
                        wrote[key.fd] += chunk[: limit_bytes + 1 - len(wrote[key.fd])]
                    else:
                        ready.unregister(key.fd)
            if len(out) <= limit_bytes:
                program.wait(max(0.0, deadline - time.monotonic()))
        finally:
            program.kill()
    return subprocess.CompletedProcess(command, program.returncode, bytes(out), bytes(err))


class Child:
    """A started child process: its role, its log, and a way to end it.

    `command` is run without a shell, in its own session (so that Ctrl-C reaches only the parent, which then stops its
    children in order). `"{watch}"` in the command is replaced by the number of the pipe end that `die_with_parent`
    needs.
    """

    def __init__(
        self, role: str, command: Sequence[str], *, pass_fds: Sequence[int] = (), env: dict[str, str] | None = None
    ):
        self.role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child, and has no name on disk
        watch, self._pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                [part.replace("{watch}", str(watch)) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(watch, *pass_fds),
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            self._log.close()
            raise
        finally:
            os.close(watch)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self, lines: int = 15) -> str:
        """The last `lines` lines of what the child wrote, at most 64 KiB."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        raw = os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return "\n".join(raw.decode("utf-8", "replace").splitlines()[-lines:])

    def read_log(self, offset: int = 0) -> bytes:
        """What the child has written from byte `offset` on, at most 64 KiB."""
        return b"" if self._log.closed else os.pread(self._log.fileno(), LOG_TAIL_BYTES, offset)

    def rss_bytes(self) -> int:
        """Resident memory of the process in bytes (0 where /proc is not offered, or after its end)."""
        try:
            with open(f"/proc/{self.pid}/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return 0

    def signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.alive:
            self.process.send_signal(number)

    def close(self) -> None:
        """Release the pipe and the log; the process itself must have ended (see `stop`)."""
        with contextlib.suppress(OSError):
            os.close(self._pipe)
        self._log.close()


def stop(children: Sequence[Child], grace_s: float = 3.0) -> None:
    """End all children: ask all at once, wait `grace_s` together, then kill what is left. Safe to call twice."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.signal(signal.SIGKILL)
    for child in children:
        child.process.wait()
        child.close()


def guard(argv: list[str]) -> int:
    """Run a foreign program so that it, too, ends with its parent: `python -m needlework.processes PIPE_FD GRACE_S
    COMMAND…`.

    A foreign program does not watch our pipe (a router keeps Python's lock for its whole life, so a thread inside it
    never runs). This guard watches for it: when the pipe ends, when the guard is asked to stop, or when the program has
    ended by itself, the program gets GRACE_S seconds to tidy up (0 for one whose own shutdown waits for open
    connections), and then everything in its process group, an engine's workers too, is killed. On Linux the kernel ends
    the program with the guard, and what the group leaves in shared memory is removed.
    """
    pipe_fd, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    ending: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one queue that a signal handler may fill
    signal.signal(signal.SIGTERM, lambda *_: ending.put(None))
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=bound_to(os.getpid()), process_group=0)

    def watch_pipe() -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe_fd, 1):
                pass
        ending.put(None)

    def watch_program() -> None:
        program.wait()
        ending.put(None)

    for watch in (watch_pipe, watch_program):
        threading.Thread(target=watch, daemon=True).start()
    ending.get()
    held = shared_memory(program.pid)
    if grace_s:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(grace_s)
    held |= shared_memory(program.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    status = program.wait()
    for path in held - shared_memory():
        path.unlink(missing_ok=True)
    return status


def shared_memory(group: int | None = None) -> set[Path]:
    """Files in /dev/shm that are mapped by a process (of the process group `group`, or any); empty where there is no
    /proc. A process that is killed leaves its segments and semaphores there.
    """
    found: set[Path] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if group is None or os.getpgid(int(entry.name)) == group:
                lines = (entry / "maps").read_text("utf-8", "replace").splitlines()
                found |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if path.is_file()}


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
