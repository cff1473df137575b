"""The recorded run of SGLang: re-read from the bundle, and what a damaged copy of it would say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pack_sglang
import pytest
import record_sglang
import record_vllm
import torch
from needlework import analysis, pages
from needlework.evidence import Bundle
from needlework.kernels import reference

BUNDLE = Path(__file__).resolve().parents[2] / "data/incidents/sglang-dsv32"


def dump(name: str) -> pages.Dump:
    return pages.read(BUNDLE / "pages" / f"{name}.bin")[0]


def test_the_bundle_is_sealed_small_and_its_ledger_is_what_it_says():
    bundle = Bundle(BUNDLE)
    assert bundle.problems() == [] and sum(path.stat().st_size for path in bundle.files()) < 4e6
    kept = analysis.Ledger.load(BUNDLE / "ledger.json")
    assert str(kept) == str(pack_sglang.ledger(BUNDLE))
    assert {h.code: h.status for h in kept.hypotheses} == {"split": "exonerated", "order": "supported"}
    built = json.loads((BUNDLE / "evidence/checkpoint.json").read_text())
    assert built == json.loads((BUNDLE.parent / "vllm-dsv32/evidence/checkpoint.json").read_text()), "other weights"


def test_the_runs_hold_every_edge_and_the_pair_is_equal_up_to_the_budget():
    trials = analysis.load_trials(BUNDLE / "runs/equality")
    assert set(trials["target_tokens"]) == set(record_sglang.EDGES["v32"]) and len(trials) == 126
    for row in trials[trials["target_tokens"] <= 300].to_dict("records"):
        ids = record_vllm.prompt(int(row["target_tokens"]), row["edit"])
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == row["prompt_sha"]
    cold = {arm: trials[(trials["arm"] == arm) & (trials["send"] == 0)] for arm in ("combined", "pd")}
    apart = analysis.distances(cold["pd"], cold["combined"])
    low = apart["target_tokens"] <= 2048
    assert (apart[low]["first_step"] == 0).all() and (apart[~low]["first_step"] > 0).all()
    assert (trials["cached_tokens"] == np.where(trials["send"] == 1, (trials["target_tokens"] - 1) // 64 * 64, 0)).all()


@pytest.mark.parametrize("name", ["index.0", "index.1", "index.2", "mla.1"])
def test_healthy_pages_arrive_whole_and_a_wrong_page_or_a_shifted_scale_does_not(name):
    sent, received = dump(f"prefill-{name}-none"), dump(f"decode-{name}-none")
    assert pages.identify(received.raw.flatten()).iloc[0]["layout"] == sent.layout
    assert pages.compare_dumps([sent], [received]).empty
    assert pages.diagnose(received.raw, received.layout, live=received.live).empty
    wrong = received.raw.clone()
    wrong[3] = received.raw[4]
    found = pages.compare_dumps([sent], [replace(received, raw=wrong)])
    assert list(found["page"].unique()) == [3]
    wrong = received.raw.clone()
    start, width = (64 * 128, 4) if name.startswith("index") else (512, 4)
    wrong[2, start : start + 4 * width] = wrong[2, start + width : start + 5 * width].clone()
    found = pages.compare_dumps([sent], [replace(received, raw=wrong)])
    assert list(found["page"].unique()) == [2]


def test_exchanged_pages_are_found_where_they_were_exchanged():
    for layer in range(3):
        damaged = dump(f"decode-index.{layer}-index-swap")
        found = pages.compare_dumps([dump(f"prefill-index.{layer}-none")], [damaged])
        assert set(found["name"]) == {"permuted"} and sorted(found["page"].unique()) == list(record_sglang.SWAPPED)


def test_the_noise_begins_where_entries_are_selected():
    differing = []
    for layer in range(3):
        one, two = (dump(f"long-{role}-index.{layer}") for role in ("prefill", "combined"))
        values = [side.record.decode(side.raw)["values"].flatten(0, 1)[: side.entries] for side in (one, two)]
        differing.append((pack_sglang.TAIL * 64 + (values[0] != values[1]).any(-1).nonzero().flatten()).tolist())
    assert differing[0] == [] and all(place and min(place) >= 2048 for place in differing[1:])


def test_the_engines_scores_follow_from_its_pages_and_from_no_others():
    with np.load(BUNDLE / "evidence/step.npz", allow_pickle=False) as step:
        q = torch.from_numpy(step["q"]).view(torch.float8_e4m3fn).float()
        weights, pool, there = (torch.from_numpy(step[name]) for name in ("weights", "pages", "logits"))
        length = torch.tensor([int(step["length"])], dtype=torch.int32)
    table = torch.arange(len(pool), dtype=torch.int32)[None]
    for pages_read, low, high in ((pool, 0, 2e-4), (pool.roll(1, 0), 0.1, 9)):
        ours = reference.indexer_logits(q, weights, pages_read, table, length)[0, : len(there)]
        assert low <= float((ours - there).norm() / there.norm()) < high


@pytest.mark.parametrize(("name", "layout", "entries"), [
    ("window.1", "v4-mla-fp8", 332), ("c4.0", "v4-mla-fp8", 275), ("c128.0", "v4-mla-fp8", 8),
    ("index.0", "dsa-index-fp8", 275),
])  # fmt: skip
def test_every_pool_of_v4_arrives_whole_and_a_wrong_entry_is_seen(name, layout, entries):
    sent, received = dump(f"v4/prefill-{name}"), dump(f"v4/decode-{name}")
    assert (received.layout, received.entries) == (layout, entries)
    assert pages.identify(received.raw.flatten()).iloc[0]["layout"] == layout
    assert pages.compare_dumps([sent], [received]).empty
    assert pages.diagnose(received.raw, layout, received.page_tokens, live=received.live).empty
    wrong = received.raw.clone()
    wrong[0] = received.raw[1]
    assert list(pages.compare_dumps([sent], [replace(received, raw=wrong)])["page"].unique()) == [0]


def test_states_and_what_was_not_shipped_are_the_same_on_both_sides():
    for name in pack_sglang.V4_KEPT:
        if "state" in name:
            kept = []
            for role in ("prefill", "decode"):
                with np.load(BUNDLE / "pages/v4" / f"{role}-{name}.npz", allow_pickle=False) as file:
                    kept.append(file["arr_0"])
            assert (kept[0] == kept[1]).all() and np.isfinite(kept[0].view(np.float32)).all() and kept[0].any()
    for family in ("v32", "v4"):
        found = json.loads((BUNDLE / "evidence" / f"{family}-digests.json").read_text())
        moved = {stem for stem, pools in found.items() for one in pools.values() if one["prefill"] != one["decode"]}
        assert moved == ({"short-index-swap"} if family == "v32" else set())
