"""The wire between a prefill and a decode server: rooms, frames and states, over ZeroMQ.

Two planes, as in SGLang's disaggregation (sglang srt/disaggregation/common/conn.py): the decode server opens a
*control* connection to the prefill server's bootstrap port and registers a room with the rows it has set aside in each
of its buffers; the prefill server connects back to the decode server's *data* port and sends, chunk by chunk, the
bytes of each buffer with the rows they belong to. A room moves through Bootstrapping, WaitingForInput, Transferring to
Success, or to Failed from anywhere; it never moves back, and a concluded room stays concluded, so that a late frame
can neither revive it nor write into rows that belong to somebody else by then.

Frames are length-prefixed by ZeroMQ; integers are fixed-width little-endian (a room is 63 bits: never a float); names
and numbers of a frame travel as JSON. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_ROOM = 2**63 - 1
REMEMBERED_ROOMS = 4096
MAX_FRAME_BYTES = 1 << 30


class State(IntEnum):
    """States of a room; values as in SGLang's KVPoll."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


@dataclass(frozen=True)
class Part:
    """Rows of one buffer: where they go, and their bytes (`rows` int32 [n], `payload` n equal pieces)."""

    buffer: str
    rows: np.ndarray
    payload: bytes


@dataclass(frozen=True)
class Packet:
    """One chunk of a transfer. `index` counts from 0; `meta` is null but on the last chunk."""

    room: int
    index: int
    last: bool
    parts: tuple[Part, ...]
    meta: dict[str, Any] | None = None


@dataclass(frozen=True)
class Registration:
    """What the decode server asks for: the rows that it has set aside, by the group of buffers that they address.

    `rows[group][i]` takes logical page `first_page[group] + i`; pages before that are at the decode server already, or
    not needed. `prompt_tokens` and `signature` (layouts, page sizes, model) must be equal on both sides.
    """

    room: int
    prompt_tokens: int
    rows: dict[str, np.ndarray]
    first_page: dict[str, int]
    signature: str = ""


def pack_room(room: int) -> bytes:
    """Eight little-endian bytes; raises ValueError for anything but an integer of at most 63 bits."""
    if isinstance(room, bool) or not isinstance(room, int) or not 0 <= room <= MAX_ROOM:
        raise ValueError(f"a bootstrap room is an integer from 0 to 2^63-1, not {str(room)[:40]}")
    return struct.pack("<Q", room)


def unpack_room(frame: bytes) -> int:
    (room,) = struct.unpack("<Q", frame)
    return room


class RoomTable:
    """States of rooms, monotone. Thread-safe; `advance` says whether the step was taken."""

    def __init__(self) -> None:
        self._states: OrderedDict[int, State] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, room: int) -> State | None:
        with self._lock:
            return self._states.get(room)

    def advance(self, room: int, state: State) -> bool:
        with self._lock:
            now = self._states.get(room)
            if now in (State.FAILED, State.SUCCESS) or (state is not State.FAILED and now is not None and state < now):
                return False
            self._states[room] = state
            concluded = [r for r, s in self._states.items() if s in (State.FAILED, State.SUCCESS)]
            for old in concluded[: max(0, len(concluded) - REMEMBERED_ROOMS)]:
                del self._states[old]
            return True


def encode_registration(registration: Registration, data_endpoint: str) -> list[bytes]:
    head = {
        "prompt_tokens": registration.prompt_tokens,
        "first_page": registration.first_page,
        "signature": registration.signature,
        "data": data_endpoint,
        "groups": list(registration.rows),
    }
    rows = [np.ascontiguousarray(r, dtype="<i4").tobytes() for r in registration.rows.values()]
    return [b"REGISTER", pack_room(registration.room), json.dumps(head).encode(), *rows]


def decode_registration(frames: Sequence[bytes]) -> tuple[Registration, str]:
    """Raises one of `MALFORMED` when the frames are no registration."""
    room, head = unpack_room(frames[1]), json.loads(frames[2])
    groups, rows = head["groups"], frames[3:]
    registration = Registration(
        room=room,
        prompt_tokens=int(head["prompt_tokens"]),
        rows={str(group): np.frombuffer(frame, dtype="<i4") for group, frame in zip(groups, rows, strict=True)},
        first_page={str(group): int(head["first_page"][group]) for group in groups},
        signature=str(head["signature"]),
    )
    return registration, str(head["data"])


def encode_packet(packet: Packet) -> list[bytes]:
    head = {
        "index": packet.index,
        "last": packet.last,
        "buffers": [part.buffer for part in packet.parts],
        "meta": packet.meta,
    }
    frames = [b"DATA", pack_room(packet.room), json.dumps(head).encode()]
    for part in packet.parts:
        frames += [np.ascontiguousarray(part.rows, dtype="<i4").tobytes(), part.payload]
    return frames


def decode_packet(frames: Sequence[bytes]) -> Packet:
    """Raises one of `MALFORMED` when the frames are no packet."""
    head = json.loads(frames[2])
    names, body = head["buffers"], frames[3:]
    if len(body) != 2 * len(names):
        raise ValueError("a chunk names other buffers than it carries")
    parts = tuple(
        Part(str(name), np.frombuffer(body[2 * i], dtype="<i4"), body[2 * i + 1]) for i, name in enumerate(names)
    )
    meta = head["meta"]
    return Packet(
        unpack_room(frames[1]), int(head["index"]), bool(head["last"]), parts, None if meta is None else dict(meta)
    )


@dataclass
class TransferCounters:
    """What /metrics reports about transfers; `recent` keeps the last 256 (bytes, seconds)."""

    succeeded: int = 0
    failed: int = 0
    bytes_total: int = 0
    chunks_total: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=256))

    @property
    def latency_ms(self) -> float:
        return 1e3 * sum(s for _, s in self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def speed_gb_s(self) -> float:
        seconds = sum(s for _, s in self.recent)
        return sum(b for b, _ in self.recent) / seconds / 1e9 if seconds else 0.0


MALFORMED = (ValueError, KeyError, TypeError, IndexError, struct.error)


class Loop(threading.Thread):
    """One thread that owns all sockets of a side; other threads reach it through `post`."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[Any], None]] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._on(self._wake_out.fileno(), lambda _: self._drain())
        self._running = True

    def _on(self, source: Any, handler: Callable[[Any], None]) -> None:
        self.poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def _off(self, source: Any) -> None:
        self.poller.unregister(source)
        self._handlers.pop(source, None)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self.context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        return sock

    def _watch(self, sock: zmq.Socket[bytes], on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with a reason when the peer of a connecting socket goes away or is not there."""
        reasons: dict[int, str] = {
            zmq.EVENT_DISCONNECTED: "the connection to the peer was lost",
            zmq.EVENT_CONNECT_RETRIED: "nobody listens at the peer's address",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak this protocol",
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak this protocol",
        }
        events = 0
        for event in reasons:
            events |= int(event)
        monitor = sock.get_monitor_socket(events)

        def handle(_: Any) -> None:
            while True:
                try:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    return
                on_lost(reasons.get(event["event"], "the connection to the peer was lost"))

        self._on(monitor, handle)

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop's thread, soon and in order. After `stop` it is dropped."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # stopped
            self._wake_in.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is None:
                self._running = False
                return
            call()

    def tick(self) -> None:
        """Called about four times a second in the loop's thread."""

    def run(self) -> None:
        next_tick = time.monotonic() + 0.25
        while self._running:
            for source, _ in self.poller.poll(250):
                handler = self._handlers.get(source)
                if handler is not None:
                    handler(source)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + 0.25
                self.tick()
        self.context.destroy(linger=0)

    def stop(self) -> None:
        self._calls.put(None)
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        if self.is_alive():
            self.join(3.0)
        self._wake_in.close()
        self._wake_out.close()


def address_of(sock: zmq.Socket[bytes]) -> str:
    """The address a socket was bound to, for example tcp://127.0.0.1:40123."""
    endpoint = sock.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def receive_all(sock: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
    """Hand every waiting multipart message to `handle`."""
    while True:
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        handle(frames)
