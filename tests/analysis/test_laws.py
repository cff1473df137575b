"""Each planted law comes first, with its parameters; healthy deployments stay healthy."""

import time
from pathlib import Path

import numpy as np
import pytest
from needlework.analysis import laws
from worlds import asked, lost

PAIR = ("combined", "pd")
PLANTED = {
    "length": (("single",), lambda t: 0.97 * (t.prompt_tokens > 4096)),
    "place": (
        ("single",),
        lambda t: 0.9 * ((t.needle_token > 4096) & (t.prompt_tokens - t.needle_token > 128)),
    ),
    "left": (("single",), lambda t: 0.98 * (t.prompt_tokens - t.needle_token > 8192)),
    "last pass": (("single",), lambda t: 0.9 * (t.needle_token < (t.prompt_tokens - 1) // 1024 * 1024)),
    "residue": (("single",), lambda t: 0.9 * (t.prompt_tokens % 4 == 3)),
    "warm: length": (("single",), lambda t: 0.9 * ((t.cached_tokens > 0) & (t.prompt_tokens > 2048))),
    "load: any": (("single",), lambda t: 0.3 * (t.concurrency >= 4)),
    "any": (("single",), lambda t: 0.4),
    "turn: any": (("single",), lambda t: 0.8 * (t.turn > 1)),
    "arm=pd: length": (PAIR, lambda t: 0.97 * ((t.arm == "pd") & (t.prompt_tokens > 2060))),
    "arm=r3: any": (tuple(f"r{i}" for i in range(8)), lambda t: 0.8 * (t.arm == "r3")),
    "healthy": (PAIR, lambda t: 0.01),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_law_comes_first(name):
    arms, p = PLANTED[name]
    fit = laws.fit(laws.conditions(lost(asked(220, arms=arms, seed=3), p, seed=3)))
    assert max(fit.shares, key=fit.shares.get) == name
    assert sum(fit.shares.values()) == pytest.approx(1, abs=1e-6)


def test_an_edge_has_an_interval_and_rates():
    t = lost(asked(250, seed=6), PLANTED["length"][1], seed=6)
    law = laws.fit(laws.conditions(t)).laws[0]
    low, best, high = law.parameters["edge"]
    assert low <= 4096 <= high and low <= best <= high and high < 1.2 * low
    assert law.rate_inside[0] < 0.97 < law.rate_inside[2] and law.rate_outside[2] < 0.06
    assert "prompts above" in law.sentence


def test_what_is_predicted_and_which_prompt_tells_most():
    t = lost(asked(80, seed=7), PLANTED["length"][1], seed=7)
    fit = laws.fit(laws.conditions(t))
    fresh = laws.conditions(asked(250, seed=8).drop(columns="aborted"))
    begin = time.perf_counter()
    told = fit.predict(fresh)
    assert time.perf_counter() - begin < 1.5
    assert told.p_loss[fresh.length > 9000].min() > 0.8 and told.p_loss[fresh.length < 2000].max() < 0.2
    low, _, high = fit.laws[0].parameters["edge"]
    best = fresh.length[told.information_bits.idxmax()]
    assert 0.8 * low < best < 1.25 * high
    assert (told.information_bits >= 0).all() and np.isfinite(told.to_numpy()).all()


def test_ten_thousand_rows_take_seconds_at_most():
    t = lost(asked(10_000, arms=PAIR, seed=2), lambda t: 0.9 * (t.prompt_tokens > 9000), seed=2)
    c = laws.conditions(t)
    begin = time.process_time()
    fit = laws.fit(c)
    assert time.process_time() - begin < 3
    assert fit.laws[0].name == "length"


def test_the_example_that_docs_follow_with_a_pencil():
    t = asked(10).assign(prompt_tokens=np.arange(1000, 11000, 1000), outcome=["exact"] * 4 + ["garbage"] * 6)
    c = laws.conditions(t[["prompt_tokens", "outcome"]])
    rows = laws.Rows.of(c)
    assert np.exp(laws._calm(rows["kind"])) == pytest.approx(7.2e-9, rel=0.01)
    found = {(h.family, h.hard): np.exp(h.evidence) for h in laws._hypotheses(rows) if h.name == h.family}
    assert found["length", True] == pytest.approx(0.060, abs=5e-4)
    assert found["any", False] == pytest.approx(4.1e-4, rel=0.01)
    assert laws.fit(c).shares["length"] == pytest.approx(0.94, abs=0.01)
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")
    assert all(word in page for word in ("7.2 · 10⁻⁹", "**0.060**", "4.1 · 10⁻⁴", "94 %"))
