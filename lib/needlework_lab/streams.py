"""Running one generation request inside the event loop: its events, its client's disconnection, its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from needlework_lab.answers import Writer
from needlework_lab.json_bodies import HttpError, refuse
from needlework_lab.requests import Generation
from needlework_lab.types import Event, Request
from needlework_lab.worker import Worker


class Json(Response):
    """JSON in ASCII: any text a model can produce can be sent, lone surrogates included."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


class Feed:
    """The events of one running request, inside the event loop.

    whole   they come together, when the request has ended: nobody is to see them before
    """

    def __init__(self, worker: Worker, request: Request, *, whole: bool = False):
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | HttpError] = asyncio.Queue()
        self._worker, self._rid, self._ended = worker, request.rid, False
        waiting: list[Event | HttpError] = []

        def emit(item: Event | HttpError) -> None:
            waiting.append(item)
            if whole and isinstance(item, Event) and item.finish_reason is None:
                return
            items = waiting[:]
            waiting.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down
                loop.call_soon_threadsafe(self._put, items)

        worker.submit(request, emit)

    def _put(self, items: list[Event | HttpError]) -> None:
        for item in items:
            self._queue.put_nowait(item)

    async def next(self) -> Event:
        """The next event; raises HttpError when the request failed."""
        item = await self._queue.get()
        if isinstance(item, HttpError):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        """Give the request up unless it has ended."""
        if not self._ended:
            self._ended = True
            self._worker.abort(self._rid)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _next_or_gone(feed: Feed, gone: asyncio.Task[None]) -> Event:
    """The next event, or HttpError(499) when the client closed the connection first."""
    following = asyncio.ensure_future(feed.next())
    try:
        await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also when this wait is given up itself: nobody would end the other one
        following.cancel()
    if not following.done():
        feed.close()
        refuse("the client closed the connection", status=499)
    return following.result()


async def answer(http: HttpRequest, worker: Worker, generation: Generation) -> Response:
    """Run a request to its end, or to its first event when it streams: an error before that has its own HTTP status."""
    feed, writer = (
        Feed(worker, generation.request, whole=not generation.stream),
        Writer(generation, worker.engine.tokenizer),
    )
    gone = asyncio.create_task(_gone(http))
    try:
        event = await _next_or_gone(feed, gone)
        writer.add(event)
        if generation.stream:
            return StreamingResponse(_stream(feed, writer, event), media_type="text/event-stream")
        while not feed.ended:
            writer.add(await _next_or_gone(feed, gone))
        return Json(writer.whole())
    except BaseException:
        feed.close()
        raise
    finally:
        gone.cancel()


def _line(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _stream(feed: Feed, writer: Writer, event: Event) -> AsyncIterator[bytes]:
    try:
        for body in writer.opening() + writer.part(event):
            yield _line(body)
        while not feed.ended:
            event = await feed.next()
            writer.add(event)
            for body in writer.part(event):
                yield _line(body)
    except HttpError as error:
        yield _line({"error": error.body()})
    finally:
        feed.close()
    yield b"data: [DONE]\n\n"
