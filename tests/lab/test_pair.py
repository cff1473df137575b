"""The two halves of a pair in one process, without HTTP: what one half does when the other fails."""

from __future__ import annotations

import itertools
import queue

import pytest
from needlework_lab.decode import DecodeWorker
from needlework_lab.engine import Engine
from needlework_lab.json_bodies import HttpError
from needlework_lab.prefill import PrefillWorker
from needlework_lab.types import Request, Sampling

ROOMS = itertools.count(2**62)


class Halves:
    """A prefill and a decode worker over tiny engines, and requests sent to one or both."""

    def __init__(self, *, timeout_s: float = 10.0, decode_pages: int = 513, faults: tuple[str, ...] = ()):
        self.prefill = PrefillWorker(Engine("tiny", role="prefill", faults=faults), timeout_s=timeout_s)
        self.decode = DecodeWorker(Engine("tiny", role="decode", pages=decode_pages), timeout_s=timeout_s)
        self.workers = {"prefill": self.prefill, "decode": self.decode}
        for worker in self.workers.values():
            worker.start()

    def request(self, tokens: int = 200, first: int = 0, **fields) -> Request:
        room = next(ROOMS)
        ids = tuple(self.prefill.engine.tokenizer.encode("the quick brown fox " * tokens))[first : first + tokens]
        bootstrap = {"host": "127.0.0.1", "port": self.prefill.transfer.port, "room": room}
        return Request(f"r{room}", ids, Sampling(max_tokens=4), bootstrap=bootstrap, **fields)

    def send(self, request: Request, *sides: str) -> dict[str, queue.SimpleQueue]:
        answers: dict[str, queue.SimpleQueue] = {side: queue.SimpleQueue() for side in sides or self.workers}
        for side, answer in answers.items():
            self.workers[side].submit(request, answer.put)
        return answers

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def last(answer: queue.SimpleQueue, timeout_s: float = 10.0):
    """The event or error that ended a request."""
    while True:
        item = answer.get(timeout=timeout_s)
        if isinstance(item, HttpError) or item.finish_reason is not None:
            return item


@pytest.fixture
def halves():
    halves = Halves()
    yield halves
    halves.stop()


def test_a_request_goes_through(halves):
    answers = halves.send(halves.request())
    assert last(answers["prefill"]).finish_reason == "length"
    assert last(answers["decode"]).completion_tokens == 4


def test_an_engine_that_fails_is_told_to_both_clients(halves):
    def fail(value, **_):
        raise RuntimeError("planted")

    halves.prefill.engine.hooks.install("step_begins", fail)
    answers = halves.send(halves.request())
    for side in ("prefill", "decode"):
        error = last(answers[side])
        assert isinstance(error, HttpError) and error.status == 500 and "planted" in error.message
    later = halves.send(halves.request())
    assert last(later["prefill"]).status == 503 and "planted" in last(later["decode"]).message
    assert halves.decode.engine.metrics()["kv_used_tokens"] == 0


def test_prompts_that_differ_are_refused_by_both(halves):
    request = halves.request()
    shorter = Request(request.rid, request.tokens[:-1], request.sampling, bootstrap=request.bootstrap)
    prefill, decode = halves.send(shorter, "prefill")["prefill"], halves.send(request, "decode")["decode"]
    assert "199 prompt tokens" in last(prefill).message and "200" in last(decode).message


def test_a_room_serves_one_request(halves):
    request = halves.request()
    twin = Request("twin", request.tokens, request.sampling, bootstrap=request.bootstrap)
    first, second = halves.send(request, "decode")["decode"], halves.send(twin, "decode")["decode"]
    assert "another request uses this bootstrap room" in last(second).message
    halves.send(request, "prefill")
    assert last(first).finish_reason == "length"
    assert "used before" in last(halves.send(twin, "prefill")["prefill"]).message


def test_metadata_of_another_request_is_not_used(halves):
    import dataclasses

    halves.prefill.engine.hooks.install("handoff", lambda handoff, **_: dataclasses.replace(handoff, room=1))
    error = last(halves.send(halves.request())["decode"])
    assert isinstance(error, HttpError) and "another request" in error.message


def test_a_swallowed_failure_answers_all_the_same():
    """What a fail-open fault does; without it the same request is an error (the test below)."""
    halves = Halves(timeout_s=0.5)
    try:
        halves.decode.engine.hooks.install("transfer_failed", lambda error, **_: None)
        event = last(halves.send(halves.request(), "decode")["decode"])
        assert not isinstance(event, HttpError) and event.completion_tokens >= 1
    finally:
        halves.stop()


def test_a_half_without_the_other_gives_up_in_time():
    halves = Halves(timeout_s=0.5)
    try:
        alone = [last(halves.send(halves.request(), side)[side]) for side in ("prefill", "decode")]
        assert all(isinstance(error, HttpError) and error.status == 500 and "0.5 s" in error.message for error in alone)
        assert halves.decode.engine.metrics()["kv_used_tokens"] == 0
        assert halves.prefill.live() == halves.decode.live() == 0
    finally:
        halves.stop()


def test_requests_wait_for_pages_and_then_run(monkeypatch):
    """600 tokens take 10 pages of 64, so one fits at a time; the others say that they wait, and are not given up."""
    monkeypatch.setattr("needlework_lab.decode.KEEPALIVE_S", 0.05)
    monkeypatch.setattr("needlework_lab.sender.MEETING_S", 0.5)
    halves = Halves(decode_pages=20)
    try:
        answers = [halves.send(halves.request(600, first=i)) for i in range(4)]
        assert [last(a["decode"], 20).completion_tokens for a in answers] == [4] * 4
    finally:
        halves.stop()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_before_the_other_half_came(halves, side):
    request = halves.request()
    answer = halves.send(request, side)[side]
    halves.workers[side].abort(request.rid)
    assert last(answer).finish_reason == "abort"
    other = "decode" if side == "prefill" else "prefill"
    ending = last(halves.send(request, other)[other])
    assert isinstance(ending, HttpError) or ending.finish_reason == "abort"
    assert halves.decode.engine.metrics()["kv_used_tokens"] == 0


def test_pages_written_outside_a_reservation_are_refused(halves):
    import numpy as np
    from needlework_lab.wire import Packet, Part

    buffer = next(iter(halves.decode.engine.pools().values()))
    part = Part(buffer.name, np.array([1], np.int32), bytes(buffer.item_bytes))
    with pytest.raises(ValueError, match="no buffer"):
        halves.decode._write(Packet(5, 0, False, (part,)), part)
