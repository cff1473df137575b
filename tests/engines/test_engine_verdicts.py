"""The recorded validation part of a real engine: verdicts from outside are held to what they reached."""

from __future__ import annotations

import runpy
from pathlib import Path

import pandas as pd
import pytest
from needlework.analysis import diagnose, load_trials
from needlework.analysis.conditions import conditions

ROOT = Path(__file__).resolve().parents[2]
PART = ROOT / "data/engines/vllm/validation"
TRUTH = {"shared pass": "rf6e474", "cut": "r9eaba2", "dropped": "r1fc3a3"}


@pytest.fixture(scope="module")
def bench() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks/engine_verdicts.py"))


def test_validation_is_never_sure_and_wrong_and_accuses_nobody(bench):
    rows = bench["verdicts"](PART)
    counts = bench["summary"](rows)
    assert (counts["faults"], counts["healthy"], counts["faults with 5 losses"]) == (18, 6, 16)
    assert [counts[f"another class named, {c}"] for c in ("weak", "moderate", "strong")] == [0, 0, 0]
    assert counts["healthy accused"] == 0 and counts["healthy called healthy"] == 6
    assert counts["… right class first or in the group named"] >= 12 and counts["… in the first three"] >= 13
    assert counts["… called healthy"] == 0
    law = {r["fault"]: r["law"] for r in rows}
    assert "last prefill pass of 2,048 tokens: 0 of 130 found; everything else: 75 of 75" in law["own-chunk"]
    assert law["early-read"].startswith("on pd, values in the second-last of several passes of 1,024 tokens")
    assert "from the end" in law["window"] and "with a cached prefix" in law["hit-stale-tail"]


def test_a_wrong_name_would_be_counted(bench):
    row = {
        "causes": ["F13"],
        "confidence": "strong",
        "verdict": "named",
        "first": ["F13", "F08"],
        "losses": 9,
        "requests": 90,
    }
    scored = [bench["score"](row, {"class": c, "fault": "x"}) for c in ("F08", "F13", "healthy")]
    assert [s["place"] for s in scored] == ["of three", "first", "accused"]
    assert bench["summary"](scored)["another class named, strong"] == 1 == bench["summary"](scored)["healthy accused"]


def test_what_the_rows_do_not_say_at_first_sight():
    """A glued value is no hit, a prompt that ends before its value was cut, what was dropped too late is no loss."""
    glued = conditions(load_trials(PART / TRUTH["shared pass"]))
    assert int(glued["lost"].sum()) == 218 and not glued["misjudged"].any()
    cut = conditions(load_trials(PART / TRUTH["cut"]))
    assert cut["cut"][cut["lost"]].mean() > 0.9 and not (cut["place"] > cut["length"]).any()
    assert not conditions(load_trials(PART / TRUTH["dropped"]))["lost"].any()
    spoken = pd.DataFrame(
        {"expected": ["AB-12-CD"] * 24, "answer": ["It is **AB 12 CD**."] * 24, "outcome": ["miss"] * 24}
    )
    assert diagnose(spoken.assign(seed=range(24))).causes == ("N3",)
