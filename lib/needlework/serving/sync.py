"""Running coroutines from synchronous code, inside or outside a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CLOSING_S = 10.0  # after Ctrl-C, for requests to be closed
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The one event loop of this process on which all requests run, in a daemon thread of its own.

    One loop for the whole process, so that connections opened by one call are reused by the next.
    """
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="needlework-requests", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T], *, tick: Callable[[], None] | None = None, every_s: float = 0.5) -> T:
    """Run `coroutine` to its end and return its result; works inside a notebook's running loop.

    `tick` is called in the caller's thread every `every_s` seconds meanwhile. Ctrl-C cancels the coroutine, waits until
    its requests are closed (ten seconds at most), and raises KeyboardInterrupt.
    """
    loop = background_loop()
    try:
        inside = asyncio.get_running_loop() is loop
    except RuntimeError:
        inside = False
    if inside:
        coroutine.close()
        raise RuntimeError("serving.run was called from a coroutine that it runs itself; await the coroutine instead")
    ended = threading.Event()

    async def whole() -> T:
        try:
            return await coroutine
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(whole(), loop)
    try:
        while tick is not None and not ended.wait(every_s):
            tick()
        return future.result()
    except BaseException:
        if not future.done():  # Ctrl-C, or a tick that failed
            future.cancel()
            ended.wait(CLOSING_S)
        raise
