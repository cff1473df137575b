"""A deployment within this process ends its requests before it stops: nothing is left that waits for a dead engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import pytest
from needlework.serving import TransportError, run
from needlework.serving.sync import background_loop
from needlework_lab.calibrate.cases import GEOMETRY
from needlework_lab.calibrate.in_process import start_in_process
from needlework_lab.json_bodies import HttpError
from needlework_lab.streams import _next_or_gone

NOTES = [{"role": "user", "content": "This line says nothing of interest. " * 200}]


def test_a_prefill_whose_decode_never_comes_ends_with_the_deployment(caplog):
    caplog.set_level(logging.ERROR, "asyncio")
    with start_in_process("pd", (), **GEOMETRY) as pair:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.transport.port, "bootstrap_room": 7}
        asking = pair.servers["prefill"].chat(NOTES, max_tokens=8, fields=room)
        asked = asyncio.run_coroutine_threadsafe(asking, background_loop())
        deadline = time.monotonic() + 20
        while not run(waiting()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert run(waiting())
    assert not run(waiting())
    with pytest.raises(TransportError, match="the client closed the connection"):
        asked.result(5)
    gc.collect()
    assert "Task was destroyed" not in caplog.text


async def waiting():
    """Requests of this process that wait for their next event."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Feed.next"]


@pytest.mark.parametrize("client_leaves", [True, False])
def test_a_wait_that_is_given_up_leaves_no_task(client_leaves):
    class Silent:
        closed = False

        async def next(self):
            await asyncio.Event().wait()

        def close(self):
            self.closed = True

    async def given_up():
        feed, left = Silent(), asyncio.Event()
        gone = asyncio.create_task(left.wait())
        given = asyncio.create_task(_next_or_gone(feed, gone))
        await asyncio.sleep(0)
        if client_leaves:
            left.set()
        else:
            given.cancel()
        with pytest.raises((HttpError, asyncio.CancelledError)):
            await given
        gone.cancel()
        await asyncio.sleep(0.01)
        assert feed.closed is client_leaves
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(given_up())
