"""What an instrument announces is an upper bound: a server that counts never sees more requests or tokens."""

from __future__ import annotations

import time

import pytest
from mock_endpoint import mock_endpoint, render
from needlework import probes
from needlework.__main__ import main as needlework
from needlework.probes.bench.budget import Budget, Limits, Meter

# the worst course of each: what is lost makes a search go on, a scan suspect, and an abort come too late
WORK = {
    "recall": (probes.recall, {"lengths": (300, 900), "depths": (0.2, 0.8)}),
    "cliff": (probes.find_cliff, {"low": 300, "high": 2400, "max_requests": 12}),
    "residues": (probes.scan_residues, {"start": 300, "period": 4}),
    "depth": (probes.depth_profile, {"length": 600, "depths": (0.1, 0.9)}),
    "warm": (probes.warm_cold, {"lengths": (300, 900), "repeats": 2}),
    "turns": (probes.turns, {"length": 600, "repeats": 1}),
    "abort": (probes.abort, {"length": 600, "rounds": 1, "stages": ("prefill", "decode")}),
    "echo": (probes.echo, {"trials": 4, "concurrency": 2, "lengths": (300,)}),
    "drift": (probes.drift, {"canaries": 8, "between": 1, "length": 300}),
    "coherence": (probes.coherence, {"lengths": (300, 900), "repeats": 1}),
    "pool": (probes.pool, {"sends": 3}),
    "reload": (probes.reload, {"fill_tokens": 900, "prompts": 2, "length": 300}),
}
GUESSED = ("recall", "cliff", "turns")  # also where lengths are estimates


MANY = 10**7
HUGE = [
    ("recall", {"repeats": MANY}),
    ("recall", {"lengths": range(1000, MANY)}),
    ("recall", {"lengths": (10**9,)}),
    ("depth", {"repeats": MANY}),
    ("cliff", {"high": 10**9}),
    ("cliff", {"max_requests": MANY}),
    ("cliff", {"batch": MANY}),
    ("cliff", {"from_end": MANY}),
    ("residues", {"period": MANY}),
    ("residues", {"distance": MANY}),
    ("warm", {"repeats": MANY}),
    ("warm", {"warm_sends": MANY}),
    ("turns", {"repeats": MANY}),
    ("abort", {"rounds": MANY}),
    ("echo", {"trials": MANY}),
    ("drift", {"canaries": MANY}),
    ("drift", {"between": MANY}),
    ("coherence", {"repeats": MANY}),
    ("pool", {"sends": MANY}),
    ("reload", {"prompts": MANY}),
    ("reload", {"fill_tokens": 10**12}),
]


@pytest.mark.parametrize(
    ("name", "options"), HUGE, ids=lambda part: part if isinstance(part, str) else next(iter(part))
)
def test_a_huge_number_is_one_sentence_before_anything_is_listed(name, options):
    function, usual = WORK[name]
    began = time.process_time()
    with pytest.raises(ValueError, match=r"trials, more than|longer than any window|a period of 2 to 256|lies? in"):
        function("http://127.0.0.1:9", **usual | options)
    assert time.process_time() - began < 1


def test_a_huge_number_for_two_arms_or_in_the_shell_is_one_sentence(capsys):
    for options in ({"repeats": MANY}, {"aa_pairs": MANY}):
        with pytest.raises(ValueError, match=r"trials, more than the 50,000"):
            probes.compare_arms({"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:9"}, **options)
    assert needlework(["probe", "recall", "http://127.0.0.1:9", "--repeats", str(MANY)]) == 2
    assert capsys.readouterr().err.startswith("needlework probe: that is 150,000,000 trials, more than the 50,000")
    assert needlework(["calibrate", "--seeds", str(MANY), "--out", "nowhere"]) == 2
    assert "at most 100,000 cases" in capsys.readouterr().err


class Count:
    """Confirms the budget, and reads from there on what the servers received."""

    def __init__(self, *mocks):
        self.mocks, self.budget = mocks, None

    def __call__(self, budget):
        self.budget, self.before = budget, [len(m.requests) for m in self.mocks]
        return True

    @property
    def received(self):
        return [r for m, n in zip(self.mocks, self.before, strict=True) for r in m.requests[n:]]

    def check(self):
        tokens = sum(len(render(r["messages"])) for r in self.received)
        assert 0 < len(self.received) <= self.budget.requests, (len(self.received), self.budget)
        assert tokens <= self.budget.prompt_tokens, (tokens, self.budget)


@pytest.mark.parametrize(("name", "dialect"), [*((n, "sglang") for n in WORK), *((n, "openai") for n in GUESSED)])
def test_no_instrument_sends_more_than_it_announces(name, dialect):
    function, options = WORK[name]
    with mock_endpoint(dialect, lose=lambda n, place, c, o: n > 350 and o % 3 == 0) as mock:
        count = Count(mock)
        result = function(mock.base_url, **options, confirm=count)
    count.check()
    assert count.budget == result.details.get("budget", count.budget)
    assert name == "cliff" or not result.stopped, str(result)  # what is announced is enough


def test_two_arms_share_one_budget_and_one_limit():
    with mock_endpoint() as one, mock_endpoint(lose=lambda n, place, c, o: n > 500) as two:
        arms, options = {"one": one.base_url, "two": two.base_url}, {"lengths": (300, 900), "depths": (0.5,)}
        count = Count(one, two)
        probes.compare_arms(arms, **options, aa_pairs=2, cache=("cold", "warm"), confirm=count)
        count.check()
        asked = [r for r in count.received if "secret code" in str(r)]
        assert len(asked) == 8 + 4 + 16  # controls, A/A, and 4 prompts x 2 arms x 2 sends
        before = len(one.chats) + len(two.chats)
        few = probes.compare_arms(arms, **options, limits=Limits(requests=9))
        assert "limit of 9 requests" in few.stopped and len(one.chats) + len(two.chats) - before <= 9


@pytest.mark.parametrize("measure", ["arms", "investigation"])
def test_lengths_are_learned_inside_the_budget_and_once(measure):
    """Where nothing counts tokens, two prompts teach their lengths: announced, and not once more for a second arm."""
    with mock_endpoint("openai") as one, mock_endpoint("openai") as two:
        arms, count = {"one": one.base_url, "two": two.base_url}, Count(one, two)
        if measure == "arms":
            result = probes.compare_arms(arms, lengths=(300, 900), depths=(0.5,), aa_pairs=2, confirm=count)
            assert not result.stopped
        else:
            found = probes.investigate(arms, requests=30, window=1500, confirm=count)
            assert found.finished, found.ended
        count.check()
        if measure == "arms":  # controls, A/A and 4 prompts; calibration alone for the first
            assert (len(one.chats), len(two.chats)) == (2 + 4 + 4 + 4, 4 + 4)
        few = Count(one)
        probes.recall(one.base_url, lengths=(300,), depths=(0.5,), limits=Limits(requests=2), confirm=few)
        assert sum("secret code" in str(r) for r in few.received) == 2


def test_a_resumed_run_knows_the_lengths_that_it_has_learned(tmp_path):
    asked = {"depths": (0.5,), "controls": False}
    with mock_endpoint("openai") as mock:
        probes.recall(mock.base_url, tmp_path / "run", lengths=(300,), **asked)
        before = len(mock.chats)
        more = probes.recall(mock.base_url, tmp_path / "run", lengths=(300, 1800), **asked)
        assert len(mock.chats) == before + 1
        assert abs(more.trials["prompt_tokens"].max() - 1800) < 90


def test_a_search_that_never_settles_ends_at_its_budget():
    """No measurement at all (every answer is cut), so the search learns nothing: the announced number ends it."""
    with mock_endpoint(answer_instead=lambda key, value: "Let us see what the notes say about this one") as mock:
        count = Count(mock)
        result = probes.find_cliff(
            mock.base_url, low=300, high=1200, max_requests=2, batch=1, walk=False, controls=False, max_tokens=8,
            confirm=count,
        )  # fmt: skip
    count.check()
    assert result.verdict == "not proven" and "announced" in result.stopped


def test_a_meter_stops_before_a_request_that_passes_what_was_announced():
    meter = Meter(Limits())
    meter.count(500)  # before the announcement: not part of it
    meter.announce(Budget(requests=2, prompt_tokens=1000))
    assert meter.refused(1000) is None and "1,000 prompt tokens" in str(meter.refused(1001))
    meter.count(400)
    meter.correct(400, 700)  # the server has counted more
    assert meter.refused(300) is None and meter.refused(301) is not None
    meter.count(300)
    assert "announced 2 requests" in str(meter.refused(1))


def test_the_default_place_finds_an_edge_in_place():
    """A fault that keeps the first tokens hides from a needle at a fixed share of the prompt, not from this one."""
    with mock_endpoint(lose=lambda n, place, c, o: place > 900) as mock:
        found = probes.find_cliff(mock.base_url, low=400, high=4000, tolerance=0.1)
    assert found.cliff.state == "cliff" and found.edge is not None and not found.stopped, str(found)
    assert 880 <= found.details["place"] <= 920
