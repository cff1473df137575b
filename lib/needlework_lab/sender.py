"""The transfer of a request's cache from a prefill to a decode server: the sending half, and what both halves promise.

`Sender` lives in the prefill process and `Receiver` (module `receiver`) in the decode process; both are one thread
that owns its sockets (see `wire`). The engine calls `expect`, `send`, `fail` on one side and `register`, `cancel` on
the other, and is told what happened through callbacks, which run in the transfer thread.

What is guaranteed: a room ends in exactly one of done and failed, on both sides; a lost peer, a refused layout, a
missing request, silence beyond `timeout_s` and a room older than four times that are failures with a reason (two sides
that keep telling each other to wait would wait for ever); after `cancel` returns, or after a failure was reported, no
byte is written for that room any more, so that its rows may be given to somebody else.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from .wire import (
    MALFORMED,
    Loop,
    Packet,
    Registration,
    RoomTable,
    State,
    TransferCounters,
    address_of,
    decode_registration,
    encode_packet,
    pack_room,
    receive_all,
    unpack_room,
)

KEEPALIVE_S = 1.0
REMEMBERED_REASONS = 256
ROOM_TIMEOUTS = 4  # a room lasts at most so many times `timeout_s`
MEETING_S = 10.0  # the two halves of a request must hear of each other within this time


@dataclass
class _Outgoing:
    """What the sender knows of a room. It is complete when both the request and the registration have come."""

    expected: bool = False
    identity: bytes | None = None
    endpoint: str = ""
    registration: Registration | None = None
    since: float = field(default_factory=time.monotonic)
    pinged: float = 0.0
    began: float = field(default_factory=time.monotonic)


class Sender(Loop):
    """The prefill side. `on_registered(registration)`, `on_done(room)`, `on_failed(room, reason)` tell the engine."""

    def __init__(
        self,
        signature: str,
        on_registered: Callable[[Registration], None],
        on_done: Callable[[int], None],
        on_failed: Callable[[int, str], None],
        *,
        listener: socket.socket | None = None,
        timeout_s: float = 60.0,
    ):
        """`listener` is a listening loopback socket to take over as the bootstrap port; without it the system
        chooses.
        """
        super().__init__("transfer-sender")
        port = listener.getsockname()[1] if listener is not None else 0
        self.signature, self.timeout_s = signature, timeout_s
        self.on_registered, self.on_done, self.on_failed = on_registered, on_done, on_failed
        self.counters = TransferCounters()
        self.rooms = RoomTable()
        self._known: dict[int, _Outgoing] = {}
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._reasons: OrderedDict[int, str] = OrderedDict()  # why rooms failed, for the half that comes later
        self._control = self._socket(zmq.ROUTER)
        if listener is not None:
            self._control.setsockopt(zmq.USE_FD, listener.detach())
        self._control.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(address_of(self._control).rsplit(":", 1)[1])
        self._on(self._control, lambda sock: receive_all(sock, self._control_message))

    # ---- called by the engine, from any thread ----

    def expect(self, room: int) -> None:
        """A request with this room is here; fail it if no decode server registers within `timeout_s`."""
        pack_room(room)
        self.post(lambda: self._expect(room))

    def send(self, packet: Packet) -> None:
        self.post(lambda: self._send(packet))

    def fail(self, room: int, reason: str) -> None:
        """Conclude a room as failed and tell the decode server; `on_failed` is not called, the caller knows."""
        self.post(lambda: self._conclude(room, reason, tell_engine=False))

    # ---- in the loop's thread ----

    def _expect(self, room: int) -> None:
        self.rooms.advance(room, State.BOOTSTRAPPING)
        if self.rooms.get(room) in (State.FAILED, State.SUCCESS):
            self.on_failed(room, self._reasons.get(room, "this bootstrap room was used before"))
            return
        known = self._known.setdefault(room, _Outgoing())
        known.expected, known.since = True, time.monotonic()
        self._match(room, known)

    def _control_message(self, frames: list[bytes]) -> None:
        identity, kind = frames[0], frames[1] if len(frames) > 1 else b""
        try:
            if kind == b"REGISTER":
                self._register(identity, frames[1:])
                return
            room = unpack_room(frames[2])
            if kind == b"DONE":
                self._done(room)
            elif kind == b"QUEUED" and room in self._known:  # decode waits for free pages: not silence
                self._known[room].since = time.monotonic()
            elif kind == b"ABORT":
                self._conclude(room, frames[3].decode("utf-8", "replace")[:300], tell_peer=False)
        except MALFORMED:
            return  # a frame that is not ours changes nothing

    def _register(self, identity: bytes, frames: list[bytes]) -> None:
        registration, endpoint = decode_registration(frames)
        room = registration.room
        if registration.signature != self.signature:
            self._status(identity, room, State.FAILED, "the two servers have different cache layouts")
            return
        if not endpoint.startswith("tcp://127.0.0.1:"):
            self._status(identity, room, State.FAILED, "the data address is not on the loopback interface")
            return
        if self.rooms.get(room) in (State.FAILED, State.SUCCESS):
            reason = self._reasons.get(room, "the prefill server has served this bootstrap room before")
            self._status(identity, room, State.FAILED, reason)
            return
        self.rooms.advance(room, State.BOOTSTRAPPING)
        known = self._known.setdefault(room, _Outgoing())
        known.identity, known.endpoint, known.registration = identity, endpoint, registration
        known.since = time.monotonic()
        self._peer(endpoint)
        self._match(room, known)

    def _match(self, room: int, known: _Outgoing) -> None:
        if known.expected and known.registration is not None and self.rooms.advance(room, State.WAITING):
            assert known.identity is not None
            self._status(known.identity, room, State.WAITING, "")
            self.on_registered(known.registration)

    def _peer(self, endpoint: str) -> zmq.Socket[bytes]:
        if endpoint not in self._peers:
            push = self._socket(zmq.PUSH)
            self._watch(push, lambda reason: self._lost(endpoint, reason))
            push.connect(endpoint)
            self._peers[endpoint] = push
        return self._peers[endpoint]

    def _send(self, packet: Packet) -> None:
        known = self._known.get(packet.room)
        if known is None or not known.endpoint or not self.rooms.advance(packet.room, State.TRANSFERRING):
            return  # given up meanwhile
        size = sum(len(part.payload) for part in packet.parts)
        self.counters.bytes_total += size
        self.counters.chunks_total += 1
        self._peer(known.endpoint).send_multipart(encode_packet(packet))

    def _done(self, room: int) -> None:
        if self.rooms.advance(room, State.SUCCESS):
            self._known.pop(room, None)
            self.counters.succeeded += 1
            self.on_done(room)

    def _lost(self, endpoint: str, reason: str) -> None:
        for room in [r for r, k in self._known.items() if k.endpoint == endpoint]:
            self._conclude(room, f"decode server: {reason}", tell_peer=False)
        self.post(lambda: self._drop(endpoint))  # not here: the lost connection is being read from

    def _drop(self, endpoint: str) -> None:
        push = self._peers.pop(endpoint, None)
        if push is not None:  # what was queued for the lost server goes with its socket
            self._off(push.get_monitor_socket())
            push.disable_monitor()
            push.close(linger=0)

    def _conclude(self, room: int, reason: str, *, tell_peer: bool = True, tell_engine: bool = True) -> None:
        known = self._known.pop(room, None)
        if not self.rooms.advance(room, State.FAILED):
            return
        self._reasons[room] = reason
        if len(self._reasons) > REMEMBERED_REASONS:
            self._reasons.popitem(last=False)
        self.counters.failed += 1
        if tell_peer and known is not None and known.identity is not None:
            self._status(known.identity, room, State.FAILED, reason)
        if tell_engine:
            self.on_failed(room, reason)

    def _status(self, identity: bytes, room: int, state: State, reason: str) -> None:
        self._control.send_multipart([identity, b"STATUS", pack_room(room), bytes([state]), reason.encode()[:300]])

    def tick(self) -> None:
        now = time.monotonic()
        for room, known in list(self._known.items()):
            matched = known.expected and known.registration is not None
            limit_s = min(self.timeout_s, MEETING_S)
            if not matched and now - known.since > limit_s:
                missing = "no decode server registered" if known.expected else "the request did not arrive"
                self._conclude(room, f"{missing} within {limit_s:g} s")
            elif now - known.began > ROOM_TIMEOUTS * self.timeout_s:
                self._conclude(room, f"the request was not served within {ROOM_TIMEOUTS * self.timeout_s:g} s")
            elif matched and known.identity is not None and now - known.pinged > KEEPALIVE_S:
                known.pinged = now
                self._status(known.identity, room, State.WAITING, "")
