"""The two halves of a prefill/decode pair: what happens to a request between its arrival and its first decoded token.

Prefill waits until the decode server has registered the request's room (so that every chunk has a place to go), runs
the forward passes, sends each chunk's pages as soon as they are final, and answers its own HTTP request when the
decode server has confirmed everything. Decode sets pages aside, registers, and starts when the last chunk is in place.
Both conclude with an error when the other side fails, and free their pages. (SGLang: srt/disaggregation/prefill.py,
decode.py.)
"""

from __future__ import annotations

import dataclasses
import socket
from collections import deque
from typing import Any

import numpy as np

from needlework.lab.bodies import HttpError
from needlework.lab.captures import Span
from needlework.lab.receiver import Receiver
from needlework.lab.sender import Sender
from needlework.lab.types import Chunk, Event, Handoff, Request, Reservation
from needlework.lab.wire import Packet, Part, Registration
from needlework.lab.worker import Worker

GIVEN_UP = "the request was aborted"


def signature_of(engine: Any) -> str:
    """What both servers of a pair must agree on, as one line: pools, layouts, page sizes, weights."""
    pools = ",".join(f"{b.name}:{b.group}:{b.layout}:{b.page_entries}:{b.item_bytes}" for b in engine.pools().values())
    return f"{engine.geometry.name};page={engine.geometry.page_tokens};seed={engine.seed};{pools}"


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
        room = _room_of(request)
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
            self.transfer.fail(room, str(error))
            self.conclude(request.rid, HttpError(400, str(error)))

    def _on_chunk(self, chunk: Chunk) -> None:
        """Read a chunk's pages and send them. Runs inside the engine's step; the bytes are copies when it returns."""
        room = chunk.room
        registration = self._registrations.get(-1 if room is None else room)
        if room is None or registration is None:
            return  # given up meanwhile
        buffers = self.engine.pools()
        names = self.engine.hooks.apply("chunk_buffers", tuple(buffers), chunk=chunk, buffers=buffers)
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
                raw = self.engine.hooks.apply("chunk_bytes", raw, chunk=chunk, buffer=name)
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
        self.conclude(request.rid, _ending(request.rid, reason, "Prefill"))
        if started:
            self.engine.abort(request.rid)

    def give_up(self, rid: str) -> bool:
        room = _room_of(self._requests[rid])
        started = room in self._registrations
        self._forget(room)
        self.transfer.fail(room, GIVEN_UP)
        return started

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


class DecodeWorker(Worker):
    role = "decode"

    def __init__(self, engine: Any, *, timeout_s: float = 60.0):
        super().__init__(engine)
        self._queue: deque[Request] = deque()  # waiting for pages
        self._rooms: dict[int, Request] = {}  # pages set aside, transfer under way
        self._reservations: dict[int, Reservation] = {}
        self._row: Handoff | None = None  # the metadata row, as the last finished transfer left it
        self.transfer = Receiver(
            signature_of(engine),
            self._write,
            lambda room, meta: self.post(lambda: self._received(room, meta)),
            lambda room, reason: self.post(lambda: self._failed(room, reason)),
            timeout_s=timeout_s,
        )

    def start(self) -> None:
        self.transfer.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self.transfer.stop()

    def begin(self, request: Request) -> None:
        room = _room_of(request)
        if room in self._rooms or any(_room_of(waiting) == room for waiting in self._queue):
            raise ValueError("another request uses this bootstrap room")
        self._queue.append(request)

    def after_step(self) -> None:
        while self._queue:
            request = self._queue[0]
            try:
                reservation = self.engine.reserve(request)
            except RuntimeError:
                return  # the pools are full; a running request will free some
            except ValueError as error:
                self._queue.popleft()
                self.conclude(request.rid, HttpError(400, str(error)))
                continue
            self._queue.popleft()
            assert request.bootstrap is not None
            room = _room_of(request)
            self._rooms[room], self._reservations[room] = request, reservation
            rows = {"full": reservation.full_pages, "swa": reservation.swa_pages}
            registration = Registration(
                room,
                len(request.tokens),
                {group: np.array(pages, dtype=np.int32) for group, pages in rows.items()},
                {"full": reservation.prefix_pages, "swa": reservation.swa_first_page},
            )
            self.transfer.register(request.bootstrap["host"], request.bootstrap["port"], registration)

    def _write(self, packet: Packet, part: Part) -> None:
        """Put one buffer's pages in place. Runs in the transfer thread, as a remote write would."""
        buffer, reservation = self.engine.pools().get(part.buffer), self._reservations.get(packet.room)
        if buffer is None or reservation is None:
            raise ValueError(f"no buffer {part.buffer[:40]!r} for this room")
        allowed = reservation.full_pages if buffer.group == "full" else reservation.swa_pages
        if len(part.payload) != len(part.rows) * buffer.item_bytes or not set(part.rows.tolist()) <= set(allowed):
            raise ValueError(f"{part.buffer}: {len(part.payload)} bytes for pages that were not set aside so")
        pages = self.engine.hooks.apply(
            "received_pages", part.rows.tolist(), chunk_index=packet.index, buffer=part.buffer
        )
        self.engine.write_pages(part.buffer, pages, part.payload)

    def _received(self, room: int, meta: dict[str, Any]) -> None:
        request, reservation = self._rooms.pop(room, None), self._reservations.pop(room, None)
        if request is None or reservation is None:
            return
        try:
            handoff = Handoff.from_json(meta)
            if handoff.room != room:
                raise ValueError("the metadata row belongs to another request")
        except (ValueError, KeyError, TypeError) as error:
            self._lost(request, f"the metadata cannot be used: {error}")
            return
        spans = {
            "full": Span(reservation.prefix_pages, tuple(reservation.full_pages)),
            "swa": Span(reservation.swa_first_page, tuple(reservation.swa_pages)),
        }
        self.captures.take(self.engine, self.role, request, spans, self.engine.pools().values(), room)
        self._row = handoff
        self.engine.start(request.rid, handoff)

    def _failed(self, room: int, reason: str) -> None:
        request = self._rooms.pop(room, None)
        self._reservations.pop(room, None)
        if request is not None and request.rid in self._requests:
            self._lost(request, reason)

    def _lost(self, request: Request, reason: str) -> None:
        error = self.engine.hooks.apply("transfer_failed", RuntimeError(reason), rid=request.rid)
        if (
            error is None
        ):  # a planted fault swallows the failure: decode goes on with whatever the row and the pages hold
            row = self._row or Handoff(0, 0.0, (), len(request.tokens), 0)
            self.engine.start(request.rid, dataclasses.replace(row, prompt_tokens=len(request.tokens)))
            return
        self.conclude(request.rid, _ending(request.rid, reason, "Decode"))
        self.engine.abort(request.rid)

    def give_up(self, rid: str) -> bool:
        request = self._requests[rid]
        if request in self._queue:
            self._queue.remove(request)
            return False
        room = _room_of(request)
        if self._rooms.pop(room, None) is not None:
            self.transfer.cancel(room, GIVEN_UP)
            self._reservations.pop(room, None)
        return True

    def first_token(self, request: Request) -> None:
        """Pages are captured when they have arrived."""

    def queues(self) -> dict[str, int]:
        """Requests by the stage they wait in, under SGLang's metric names."""
        return {
            "num_decode_prealloc_queue_reqs": len(self._queue),
            "num_decode_transfer_queue_reqs": len(self._reservations),
        }


def _room_of(request: Request) -> int:
    if request.bootstrap is None:
        raise ValueError(
            "this server is one half of a prefill/decode pair: send requests to the router, or give bootstrap_host, "
            "bootstrap_port and bootstrap_room"
        )
    return int(request.bootstrap["room"])


def _ending(rid: str, reason: str, side: str) -> Event | HttpError:
    """How a request ends when its transfer did: an abort asked for on the other side is no server error."""
    if reason == GIVEN_UP and side == "Prefill":
        return Event(rid, None, finish_reason="abort")
    return HttpError(500, f"{side} transfer failed for request {rid}: {reason}")


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
