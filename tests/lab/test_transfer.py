"""The transfer between two servers, without a model: bytes arrive where they belong, and every failure is told to
both sides.
"""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
import zmq
from needlework_lab import sender
from needlework_lab.receiver import Receiver
from needlework_lab.sender import Sender
from needlework_lab.wire import (
    MAX_ROOM,
    Packet,
    Part,
    Registration,
    RoomTable,
    State,
    decode_packet,
    encode_packet,
    pack_room,
)

ITEM_BYTES = 96


class Pair:
    """A sender and a receiver in one process, with a pool on each side and a record of what was reported."""

    def __init__(self, signature: str = "same", timeout_s: float = 60.0):
        self.source = np.random.default_rng(0).integers(0, 256, (32, ITEM_BYTES), dtype=np.uint8)
        self.target = np.zeros((32, ITEM_BYTES), dtype=np.uint8)
        self.reports: list[tuple] = []
        self.changed = threading.Condition()
        self.sender = Sender(
            "same",
            lambda registration: self.note("registered", registration),
            lambda room: self.note("sent", room),
            lambda room, reason: self.note("send failed", room, reason),
            timeout_s=timeout_s,
        )
        self.receiver = Receiver(
            signature,
            self.write,
            lambda room, meta: self.note("received", room, meta),
            lambda room, reason: self.note("receive failed", room, reason),
            timeout_s=timeout_s,
        )
        self.sender.start()
        self.receiver.start()

    def write(self, packet: Packet, part: Part) -> None:
        if len(part.payload) != len(part.rows) * ITEM_BYTES:
            raise ValueError(f"{len(part.payload)} bytes for {len(part.rows)} rows of {ITEM_BYTES}")
        self.target[part.rows] = np.frombuffer(part.payload, np.uint8).reshape(-1, ITEM_BYTES)

    def note(self, *report) -> None:
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def wait(self, kind: str, timeout_s: float = 5.0) -> tuple:
        def found():
            return next((r for r in self.reports if r[0] == kind), None)

        with self.changed:
            assert self.changed.wait_for(found, timeout_s), f"no {kind!r} in {self.reports}"
            return found()

    def register(self, room: int, rows: list[int]) -> None:
        registration = Registration(room, 9, {"full": np.array(rows, dtype=np.int32)}, {"full": 0})
        self.receiver.register("127.0.0.1", self.sender.port, registration)

    def chunk(self, room: int, index: int, rows: list[int], source: list[int], last: bool = False) -> Packet:
        part = Part("pages", np.array(rows, dtype=np.int32), self.source[source].tobytes())
        return Packet(room, index, last, (part,), {"token": 7} if last else None)

    def close(self) -> None:
        self.sender.stop()
        self.receiver.stop()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("room", [0, 1, 2**53 + 1, MAX_ROOM])
def test_rows_arrive_permuted_and_rooms_keep_63_bits(pair, room):
    pair.register(room, [9, 4, 30])
    pair.sender.expect(room)
    assert pair.wait("registered")[1].room == room
    pair.sender.send(pair.chunk(room, 0, [9, 4], [0, 1]))
    pair.sender.send(pair.chunk(room, 1, [30], [2], last=True))
    assert pair.wait("received")[1:] == (room, {"token": 7})
    assert pair.wait("sent")[1] == room
    assert (pair.target[[9, 4, 30]] == pair.source[:3]).all()
    assert pair.target.any(axis=1).sum() == 3, "other rows were written"
    assert pair.receiver.counters.bytes_total == pair.sender.counters.bytes_total == 3 * ITEM_BYTES


def test_either_side_may_come_first(pair):
    pair.sender.expect(5)
    time.sleep(0.05)
    pair.register(5, [1])
    pair.wait("registered")


@pytest.mark.parametrize("room", [-1, 2**63, 1.5, "7", True, None])
def test_a_room_is_an_integer_of_63_bits(room):
    with pytest.raises(ValueError, match="bootstrap room"):
        pack_room(room)


def test_states_never_move_back():
    table = RoomTable()
    assert table.advance(1, State.TRANSFERRING) and not table.advance(1, State.WAITING)
    assert table.advance(1, State.FAILED)
    assert not table.advance(1, State.SUCCESS) and table.get(1) is State.FAILED


def test_cancel_is_silence_and_tells_the_sender(pair):
    pair.register(3, [1, 2])
    pair.sender.expect(3)
    pair.wait("registered")
    pair.receiver.cancel(3, "the client went away")
    assert "client went away" in pair.wait("send failed")[2]
    pair.sender.send(pair.chunk(3, 0, [1, 2], [0, 1], last=True))
    time.sleep(0.2)
    assert not pair.target.any(), "bytes were written for a cancelled room"


def test_a_failed_prefill_is_told_to_decode(pair):
    pair.register(4, [1])
    pair.sender.expect(4)
    pair.wait("registered")
    pair.sender.fail(4, "aborted by the client")
    assert pair.wait("receive failed")[1:] == (4, "aborted by the client")
    pair.register(4, [1])
    time.sleep(0.1)
    assert pair.receiver.rooms.get(4) is State.FAILED, "a concluded room was revived"


def test_a_skipped_chunk_is_a_failure_not_an_answer(pair):
    pair.register(6, [1, 2])
    pair.sender.expect(6)
    pair.wait("registered")
    pair.sender.send(pair.chunk(6, 1, [2], [1], last=True))
    assert "chunk 1 came where chunk 0 was due" in pair.wait("receive failed")[2]
    assert "chunk 1" in pair.wait("send failed")[2]


def test_a_part_of_the_wrong_size_is_a_failure(pair):
    pair.register(8, [1])
    pair.sender.expect(8)
    pair.wait("registered")
    pair.sender.send(Packet(8, 0, True, (Part("pages", np.array([1], np.int32), b"short"),), {}))
    assert "does not fit" in pair.wait("receive failed")[2]


def test_a_lost_prefill_server_is_a_failure(pair):
    pair.register(10, [1])
    pair.sender.expect(10)
    pair.wait("registered")
    pair.sender.stop()
    assert "connection to the peer was lost" in pair.wait("receive failed")[2]


def test_a_lost_decode_server_is_a_failure(pair):
    pair.register(11, [1])
    pair.sender.expect(11)
    pair.wait("registered")
    pair.sender.send(pair.chunk(11, 0, [1], [0]))
    time.sleep(0.1)
    pair.receiver.stop()
    assert "connection to the peer was lost" in pair.wait("send failed")[2]


def test_nobody_at_the_bootstrap_port(pair):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    pair.receiver.register("127.0.0.1", port, Registration(12, 9, {}, {}))
    assert "nobody listens" in pair.wait("receive failed")[2]


def test_other_layouts_are_refused():
    pair = Pair(signature="other")
    try:
        pair.register(13, [1])
        assert "different cache layouts" in pair.wait("receive failed")[2]
    finally:
        pair.close()


def test_silence_ends_in_a_failure_on_both_sides():
    pair = Pair(timeout_s=0.5)
    try:
        pair.register(14, [1])
        reason = pair.wait("receive failed")[2]
        assert "request did not arrive" in reason or "nothing was heard" in reason  # both clocks run out together
        pair.sender.expect(15)
        deadline = time.monotonic() + 3
        while not any(r[:2] == ("send failed", 15) for r in pair.reports) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ("send failed", 15, "no decode server registered within 0.5 s") in pair.reports
    finally:
        pair.close()


def test_two_sides_that_keep_each_other_waiting_are_ended(monkeypatch):
    monkeypatch.setattr(sender, "KEEPALIVE_S", 0.05)
    pair = Pair(timeout_s=0.5)  # each hears the other in time, and the pages never come
    try:
        pair.sender.expect(16)
        pair.register(16, [1])
        pair.wait("registered")
        assert "nothing was heard" not in pair.wait("receive failed")[2]
        assert "within 2 s" in pair.wait("receive failed")[2] and "within 2 s" in pair.wait("send failed")[2]
    finally:
        pair.close()


def test_frames_from_strangers_change_nothing(pair):
    context = zmq.Context()
    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    dealer.connect(f"tcp://127.0.0.1:{pair.sender.port}")
    push.connect(pair.receiver.endpoint)
    for frames in (
        [b""],
        [b"REGISTER"],
        [b"REGISTER", b"\0" * 8, b"{"],
        [b"DATA", b"x", b"{}"],
        [b"ABORT"],
        [b"DONE", b"1"],
    ):
        dealer.send_multipart(frames)
        push.send_multipart(frames)
    time.sleep(0.1)
    pair.register(16, [1])
    pair.sender.expect(16)
    pair.wait("registered")
    context.destroy(linger=0)
    assert pair.sender.is_alive() and pair.receiver.is_alive()


def test_a_chunk_survives_the_wire():
    chunk = Packet(
        MAX_ROOM,
        3,
        True,
        (Part("a", np.array([1, 2], np.int32), b"1234"), Part("b", np.array([], np.int32), b"")),
        {"x": 1},
    )
    back = decode_packet(encode_packet(chunk))
    assert (back.room, back.index, back.last, back.meta) == (MAX_ROOM, 3, True, {"x": 1})
    assert [(p.buffer, p.rows.tolist(), p.payload) for p in back.parts] == [("a", [1, 2], b"1234"), ("b", [], b"")]
