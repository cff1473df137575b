"""The decode half of a pair: see `needlework_lab.pair`."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import numpy as np

from needlework_lab.captured_pages import Span
from needlework_lab.json_bodies import HttpError
from needlework_lab.pair import GIVEN_UP, ending, room_of, signature_of
from needlework_lab.receiver import Receiver
from needlework_lab.sender import KEEPALIVE_S
from needlework_lab.types import Handoff, Request, Reservation
from needlework_lab.wire import Packet, Part, Registration
from needlework_lab.worker import Worker


class DecodeWorker(Worker):
    role = "decode"

    def __init__(self, engine: Any, *, timeout_s: float = 60.0):
        super().__init__(engine)
        self._queue: deque[Request] = deque()  # waiting for pages
        self._reassured = 0.0
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
        room = room_of(request)
        if self._owner(room) is not None:
            raise ValueError("another request uses this bootstrap room")
        self._queue.append(request)

    def after_step(self) -> None:
        while self._queue:
            request = self._queue[0]
            try:
                reservation = self.engine.reserve(request)
            except RuntimeError:  # the pools are full; a running request will free some
                self._reassure()
                return
            except ValueError as error:
                self._queue.popleft()
                self.conclude(request.rid, HttpError(400, str(error)))
                continue
            self._queue.popleft()
            assert request.bootstrap is not None
            room = room_of(request)
            self._rooms[room], self._reservations[room] = request, reservation
            rows = {"full": reservation.full_pages, "swa": reservation.swa_pages}
            registration = Registration(
                room,
                len(request.tokens),
                {group: np.array(pages, dtype=np.int32) for group, pages in rows.items()},
                {"full": reservation.prefix_pages, "swa": reservation.swa_first_page},
            )
            self.transfer.register(request.bootstrap["host"], request.bootstrap["port"], registration)

    def _reassure(self) -> None:
        """Once a second: requests that wait for pages are not lost."""
        if time.monotonic() - self._reassured > KEEPALIVE_S:
            self._reassured = time.monotonic()
            for request in self._queue:
                assert request.bootstrap is not None
                self.transfer.queued(request.bootstrap["host"], request.bootstrap["port"], room_of(request))

    def _write(self, packet: Packet, part: Part) -> None:
        """Put one buffer's pages in place. Runs in the transfer thread, as a remote write would."""
        buffer, reservation = self.engine.pools().get(part.buffer), self._reservations.get(packet.room)
        if buffer is None or reservation is None:
            raise ValueError(f"no buffer {part.buffer[:40]!r} for this room")
        allowed = reservation.full_pages if buffer.group == "full" else reservation.swa_pages
        if len(part.payload) != len(part.rows) * buffer.item_bytes or not set(part.rows.tolist()) <= set(allowed):
            raise ValueError(f"{part.buffer}: {len(part.payload)} bytes for pages that were not set aside so")
        self.engine.write_pages(part.buffer, part.rows.tolist(), part.payload)

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
        self.conclude(request.rid, ending(request.rid, reason, "Decode"))
        self.engine.abort(request.rid)

    def give_up(self, rid: str) -> bool:
        request = self._requests[rid]
        if request in self._queue:
            self._queue.remove(request)
            self.refused(request, GIVEN_UP)
            return False
        room = room_of(request)
        if self._rooms.pop(room, None) is not None:
            self.transfer.cancel(room, GIVEN_UP)
            self._reservations.pop(room, None)
        return True

    def refused(self, request: Request, reason: str) -> None:
        """The prefill server must not wait for a registration that will not come."""
        if request.bootstrap is None or self._owner(room_of(request)) not in (None, request):
            return
        room = room_of(request)
        if room in self._rooms:
            self.transfer.cancel(room, reason)
        else:
            self.transfer.disown(request.bootstrap["host"], request.bootstrap["port"], room, reason)

    def _owner(self, room: int) -> Request | None:
        waiting = [request for request in self._queue if room_of(request) == room]
        return self._rooms.get(room) or (waiting[0] if waiting else None)

    def first_token(self, request: Request) -> None:
        """Pages are captured when they have arrived."""

    def queues(self) -> dict[str, int]:
        """Requests by the stage they wait in, under SGLang's metric names."""
        return {
            "num_decode_prealloc_queue_reqs": len(self._queue),
            "num_decode_transfer_queue_reqs": len(self._reservations),
        }
