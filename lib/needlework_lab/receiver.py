"""The receiving half of a transfer: the decode server's side. See `needlework_lab.sender` for what is guaranteed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from .sender import ROOM_TIMEOUTS
from .wire import (
    MALFORMED,
    Loop,
    Packet,
    Part,
    Registration,
    RoomTable,
    State,
    TransferCounters,
    address_of,
    decode_packet,
    encode_registration,
    pack_room,
    receive_all,
    unpack_room,
)


@dataclass
class _Incoming:
    peer: str
    heard: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    next_index: int = 0
    started: float | None = None
    size: int = 0


class Receiver(Loop):
    """The decode side. `write(packet, part)` puts bytes in place; `on_done(room, meta)` and `on_failed(room, reason)`
    tell the engine.
    """

    def __init__(
        self,
        signature: str,
        write: Callable[[Packet, Part], None],
        on_done: Callable[[int, dict[str, Any]], None],
        on_failed: Callable[[int, str], None],
        *,
        timeout_s: float = 60.0,
    ):
        super().__init__("transfer-receiver")
        self.signature, self.timeout_s = signature, timeout_s
        self.write, self.on_done, self.on_failed = write, on_done, on_failed
        self.counters = TransferCounters()
        self.rooms = RoomTable()
        self._known: dict[int, _Incoming] = {}
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._writing = threading.Lock()  # held while bytes are put in place, so that `cancel` can promise silence
        self._data = self._socket(zmq.PULL)
        self._data.bind("tcp://127.0.0.1:*")
        self.endpoint = address_of(self._data)
        self._on(self._data, lambda sock: receive_all(sock, self._data_message))

    # ---- called by the engine, from any thread ----

    def register(self, host: str, port: int, registration: Registration) -> None:
        """Ask the prefill server at host:port for a room; the rows must already be set aside."""
        registration = dataclasses.replace(registration, signature=self.signature)
        self.post(lambda: self._register(f"tcp://{host}:{port}", registration))

    def cancel(self, room: int, reason: str) -> None:
        """Give a room up and tell the prefill server. When this returns no byte is written for it any more."""
        with self._writing:
            changed = self.rooms.advance(room, State.FAILED)
        if changed:
            self.post(lambda: self._forget(room, reason))

    def queued(self, host: str, port: int, room: int) -> None:
        """Tell the prefill server at host:port that this room is waiting for pages here."""
        self._send_later(f"tcp://{host}:{port}", [b"QUEUED", pack_room(room)])

    def disown(self, host: str, port: int, room: int, reason: str) -> None:
        """Tell the prefill server at host:port that a room will not be registered."""
        address = f"tcp://{host}:{port}"
        if self.rooms.advance(room, State.FAILED):
            self._send_later(address, [b"ABORT", pack_room(room), reason.encode()[:300]])

    def _send_later(self, address: str, frames: list[bytes]) -> None:
        def send() -> None:
            self._peer(address).send_multipart(frames)

        self.post(send)

    # ---- in the loop's thread ----

    def _register(self, address: str, registration: Registration) -> None:
        room = registration.room
        if not self.rooms.advance(room, State.BOOTSTRAPPING):
            self.on_failed(room, "this bootstrap room was used before")
            return
        self._known[room] = _Incoming(address)
        self._peer(address).send_multipart(encode_registration(registration, self.endpoint))

    def _peer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._peers:
            dealer = self._socket(zmq.DEALER)
            self._watch(dealer, lambda reason: self._lost(address, reason))
            dealer.connect(address)
            self._on(dealer, lambda sock: receive_all(sock, self._control_message))
            self._peers[address] = dealer
        return self._peers[address]

    def _tell(self, address: str, frames: list[bytes]) -> None:
        peer = self._peers.get(address)
        if peer is not None:
            peer.send_multipart(frames)

    def _control_message(self, frames: list[bytes]) -> None:
        try:
            if frames[0] != b"STATUS":
                return
            room, state, reason = unpack_room(frames[1]), State(frames[2][0]), frames[3].decode("utf-8", "replace")
        except MALFORMED:
            return
        known = self._known.get(room)
        if known is None:
            return
        known.heard = time.monotonic()
        if state is State.FAILED:
            self._fail(room, reason[:300] or "the prefill server gave no reason", tell_peer=False)
        else:
            self.rooms.advance(room, state)

    def _data_message(self, frames: list[bytes]) -> None:
        try:
            packet = decode_packet(frames)
        except MALFORMED:
            return
        known = self._known.get(packet.room)
        if known is None:
            return  # concluded; its rows may belong to somebody else by now
        if packet.index != known.next_index:
            self._fail(packet.room, f"chunk {packet.index} came where chunk {known.next_index} was due")
            return
        known.next_index += 1
        known.heard = time.monotonic()
        known.started = known.started or known.heard
        with self._writing:
            if not self.rooms.advance(packet.room, State.TRANSFERRING):
                return
            try:
                for part in packet.parts:
                    self.write(packet, part)
                    known.size += len(part.payload)
            except ValueError as error:
                problem: str | None = str(error)[:200]
            else:
                problem = None
        if problem is not None:
            self._fail(packet.room, f"chunk {packet.index} does not fit: {problem}")
        elif packet.last:
            self._finish(packet, known)

    def _finish(self, packet: Packet, known: _Incoming) -> None:
        if not self.rooms.advance(packet.room, State.SUCCESS):
            return
        self._known.pop(packet.room, None)
        self.counters.succeeded += 1
        self.counters.bytes_total += known.size
        self.counters.chunks_total += known.next_index
        self.counters.recent.append((known.size, time.monotonic() - (known.started or time.monotonic())))
        self._tell(known.peer, [b"DONE", pack_room(packet.room)])
        self.on_done(packet.room, packet.meta or {})

    def _lost(self, address: str, reason: str) -> None:
        for room in [r for r, k in self._known.items() if k.peer == address]:
            self._fail(room, f"prefill server: {reason}", tell_peer=False)

    def _fail(self, room: int, reason: str, *, tell_peer: bool = True) -> None:
        if self.rooms.advance(room, State.FAILED):
            self._forget(room, reason, tell_peer=tell_peer)
            self.on_failed(room, reason)

    def _forget(self, room: int, reason: str, *, tell_peer: bool = True) -> None:
        known = self._known.pop(room, None)
        self.counters.failed += 1
        if tell_peer and known is not None:
            self._tell(known.peer, [b"ABORT", pack_room(room), reason.encode()[:300]])

    def tick(self) -> None:
        now = time.monotonic()
        for room, known in list(self._known.items()):
            if now - known.heard > self.timeout_s:
                self._fail(room, f"nothing was heard from the prefill server for {self.timeout_s:g} s")
            elif now - known.began > ROOM_TIMEOUTS * self.timeout_s:
                self._fail(room, f"the pages did not come within {ROOM_TIMEOUTS * self.timeout_s:g} s")
