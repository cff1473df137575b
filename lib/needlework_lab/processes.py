"""Ports without races, and Python processes that end with the one that started them.

A listening socket is bound in the parent and handed to the child by number, so that no other program can take the port
between choosing it and using it (foreign programs are the exception: they bind their own ports).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.connection import Connection

LOOPBACK = "127.0.0.1"


def listening_socket(port: int = 0) -> socket.socket:
    """A listening TCP socket on the loopback address; `port` 0 lets the system choose.

    Raises RuntimeError with one clear sentence when the port is taken or not allowed.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 (any free one) to 65535, not {port!r}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise RuntimeError(
            f"port {port} cannot be used ({error.strerror}); choose another one, or 0 for any free one"
        ) from None
    return listener


def free_port() -> int:
    """A port that is free now, for a program that insists on binding it itself, perhaps a minute later.

    It lies below the range from which systems take ports for outgoing connections (Linux from 32768, others from
    49152), so that no connection takes it in the meantime.
    """
    for _ in range(100):
        with (
            contextlib.suppress(RuntimeError),
            listening_socket(random.SystemRandom().randrange(15000, 32000)) as probe,
        ):
            return probe.getsockname()[1]
    raise RuntimeError("no free port was found on the loopback address")


def die_with_parent(pipe_fd: int) -> None:
    """Exit this process as soon as the pipe `pipe_fd` ends, that is, when the process that started it is gone."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe_fd, 1):
                pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """`workers` fresh Python processes to give work to; they end at once with the block and with this process, however
    either ends, and whatever they or the queue were at.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")  # torch and threads do not survive a fork
    watch, pipe = context.Pipe(duplex=False)
    with watch, ProcessPoolExecutor(workers, context, _watch_in_worker, (watch,)) as executor, pipe:
        yield executor


def _watch_in_worker(pipe: Connection) -> None:
    die_with_parent(os.dup(pipe.fileno()))
