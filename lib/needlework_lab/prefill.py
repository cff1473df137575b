"""The prefill half of a pair: see `needlework_lab.pair`."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import numpy as np

from needlework_lab.captured_pages import Span
from needlework_lab.json_bodies import HttpError
from needlework_lab.pair import GIVEN_UP, ending, room_of, signature_of
from needlework_lab.sender import Sender
from needlework_lab.types import Chunk, Event, Handoff, Request
from needlework_lab.wire import Packet, Part, Registration
from needlework_lab.worker import Worker


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, engine: Any, *, listener: socket.socket | None = None, timeout_s: float = 60.0):
        super().__init__(engine)
        self._rooms: dict[int, Request] = {}
        self._registrations: dict[int, Registration] = {}
        self._indices: dict[int, int] = {}
        self._handoffs: dict[int, Handoff] = {}
        self.transfer = Sender(
            signature_of(engine),
            lambda registration: self.post(lambda: self._registered(registration)),
            lambda room: self.post(lambda: self._done(room)),
            lambda room, reason: self.post(lambda: self._failed(room, reason)),
            listener=listener,
            timeout_s=timeout_s,
        )
        engine.on_chunk = self._on_chunk

    def start(self) -> None:
        self.transfer.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self.transfer.stop()

    def begin(self, request: Request) -> None:
        room = room_of(request)
        if room in self._rooms:
            raise ValueError("another request uses this bootstrap room")
        self._rooms[room] = request
        self.transfer.expect(room)

    def _registered(self, registration: Registration) -> None:
        room = registration.room
        request = self._rooms.get(room)
        if request is None:
            self.transfer.fail(room, GIVEN_UP)
            return
        try:
            if registration.prompt_tokens != len(request.tokens):
                raise ValueError(
                    f"prefill counts {len(request.tokens)} prompt tokens and decode {registration.prompt_tokens}"
                )
            self._registrations[room], self._indices[room] = registration, 0
            self.engine.add(request)
        except ValueError as error:
            self._forget(room)
            self.refused(request, str(error))
            self.conclude(request.rid, HttpError(400, str(error)))

    def _on_chunk(self, chunk: Chunk) -> None:
        """Read a chunk's pages and send them. Runs inside the engine's step; the bytes are copies when it returns."""
        room = chunk.room
        registration = self._registrations.get(-1 if room is None else room)
        if room is None or registration is None:
            return  # given up meanwhile
        buffers = self.engine.pools()
        names = self.engine.hooks.apply("chunk_buffers", tuple(buffers), chunk=chunk)
        pages = {"full": Span(chunk.first_page, chunk.full_pages)}
        if chunk.last:
            pages["swa"] = Span(chunk.swa_first_page, chunk.swa_pages)
        parts = []
        for name in names:
            buffer = buffers[name]
            if buffer.group not in pages:
                continue
            source, target = _match(pages[buffer.group], registration, buffer.group)
            if source:
                raw = self.engine.read_pages(name, source)
                parts.append(Part(name, np.array(target, dtype=np.int32), raw))
        meta = None
        if chunk.last:
            assert chunk.handoff is not None
            handoff = dataclasses.replace(chunk.handoff, room=room)
            self._handoffs[room] = handoff
            meta = self.engine.hooks.apply("handoff", handoff, chunk=chunk).to_json()
        index = self._indices[room]
        self._indices[room] = index + 1
        self.transfer.send(Packet(room, index, chunk.last, tuple(parts), meta))

    def _done(self, room: int) -> None:
        request, handoff, registration = self._rooms.get(room), self._handoffs.get(room), self._registrations.get(room)
        self._forget(room)
        if request is None or handoff is None or registration is None:
            return
        spans = {group: Span(*pages) for group, pages in self.engine.pages_of(request.rid).items()}
        spans = {group: _from_page(span, registration.first_page.get(group, 0)) for group, span in spans.items()}
        self.captures.take(self.engine, self.role, request, spans, self.engine.pools().values(), room)
        self.engine.release(request.rid)
        self.conclude(
            request.rid,
            Event(
                request.rid,
                handoff.token,
                text=self.engine.tokenizer.decode([handoff.token]),
                logprob=handoff.logprob,
                top_logprobs=handoff.top_logprobs,
                finish_reason="length",
                prompt_tokens=handoff.prompt_tokens,
                completion_tokens=1,
                cached_tokens=handoff.cached_tokens,
            ),
        )

    def _failed(self, room: int, reason: str) -> None:
        request = self._rooms.get(room)
        started = room in self._registrations
        self._forget(room)
        if request is None or request.rid not in self._requests:
            return
        self.conclude(request.rid, ending(request.rid, reason, "Prefill"))
        if started:
            self.engine.abort(request.rid)

    def give_up(self, rid: str) -> bool:
        room = room_of(self._requests[rid])
        started = room in self._registrations
        self._forget(room)
        self.transfer.fail(room, GIVEN_UP)
        return started

    def refused(self, request: Request, reason: str) -> None:
        """The decode server must not wait for a prompt that will not come."""
        if request.bootstrap is not None and self._rooms.get(room_of(request), request) is request:
            self.transfer.fail(room_of(request), reason)

    def first_token(self, request: Request) -> None:
        """Pages are captured when the transfer is over."""

    def queues(self) -> dict[str, int]:
        """Requests by the stage they wait in, under SGLang's metric names."""
        return {
            "num_prefill_bootstrap_queue_reqs": len(self._rooms) - len(self._registrations),
            "num_prefill_inflight_queue_reqs": len(self._handoffs),
        }

    def _forget(self, room: int) -> None:
        for table in (self._rooms, self._registrations, self._indices, self._handoffs):
            table.pop(room, None)  # type: ignore[attr-defined]


def _match(span: Span, registration: Registration, group: str) -> tuple[list[int], list[int]]:
    """Source and target page ids of the logical pages that both sides name."""
    first, rows = registration.first_page[group], registration.rows[group]
    low = max(span.first_page, first)
    high = min(span.first_page + len(span.ids), first + len(rows))
    source = [span.ids[page - span.first_page] for page in range(low, high)]
    return source, [int(rows[page - first]) for page in range(low, high)]


def _from_page(span: Span, first_page: int) -> Span:
    """The part of a span from logical page `first_page` on."""
    skip = max(0, first_page - span.first_page)
    return Span(span.first_page + skip, span.ids[skip:])
