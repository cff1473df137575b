"""Needles whose answer is known: ranks follow the prediction, faults cost answers, healthy formats do not."""

from __future__ import annotations

import pytest
import torch
from needlework.kernels import needles, precision
from needlework.kernels import reference as ref


def test_a_strong_needle_is_found_at_every_depth_and_length():
    for tokens in (256, 4096, 20_000):
        for depth in (0.0, 0.5, 1.0):
            found = needles.look_up(needles.plant(tokens, strength=1.0, depth=depth, seed=tokens))
            assert found.kept and found.right and found.margin > 0.1 and found.rank <= 64


def test_a_needle_is_kept_exactly_when_its_rank_is_within_the_budget():
    table = needles.sweep([8192], strengths=[0.3], repeats=12, k=64)
    assert ((table["rank"] <= 64) == table["kept"]).all() and 0 < table["kept"].sum() < 12
    assert not table.loc[~table["kept"], "right"].any()


def test_measured_recall_follows_the_prediction():
    ranks = needles.sweep([16384], strengths=[0.6], repeats=16)["rank"]
    for k in (64, 512):
        assert abs((ranks <= k).mean() - needles.predicted_recall(4096, 0.6, k)) < 0.3
    assert needles.predicted_recall(512, 0.1, 512) == 1.0
    assert needles.predicted_rank(4096, 0.9) < needles.predicted_rank(4096, 0.5)


def test_keys_that_never_arrived_lose_the_needle_and_keys_of_the_wrong_rotation_do_too():
    hay = needles.plant(8192, strength=1.0, seed=3)
    keys = hay.index_keys()
    gone = keys.clone()
    gone[hay.entry] = 0.0
    assert not needles.look_up(hay, keys=gone).kept
    assert needles.look_up(hay, 64, keys=ref.hadamard(keys)).rank > 64
    assert needles.look_up(hay, 64, keys=keys).right


def test_the_budget_is_measured_not_read():
    def built_in(logits, lengths, k, page_table=None, *, page_tokens=64):
        out = torch.full((len(logits), k), -1, dtype=torch.int32)
        out[:, :32] = ref.select_topk(logits, lengths, 32, page_table, page_tokens=page_tokens)
        return out

    hay = needles.plant(2048, seed=4)
    assert set(needles.budget_in_use(hay, 48).values()) == {48}
    assert needles.budget_in_use(hay, 48, select=built_in) == {
        "asked": 48,
        "written": 48,
        "selected": 32,
        "attended": 32,
    }


def test_a_haystack_out_of_range_is_refused():
    for wrong in ({"tokens": 3}, {"tokens": 64, "strength": 1.5}, {"tokens": 64, "depth": -0.1}):
        with pytest.raises(ValueError, match="haystack needs"):
            needles.plant(**wrong)


def test_a_small_stack_shows_formats_in_order_and_keeps_the_answers():
    small = precision.Stack(layers=4, hidden=64, experts=8)
    exact = precision.replace(small, gemm="float64", streams=torch.float64).run(256)
    f32 = precision.replace(small, gemm="float32", streams=torch.float32).run(256)
    bf16 = small.run(256)
    assert precision.relative_error(f32, exact) < 1e-5 < precision.relative_error(bf16, exact) < 0.2
    found = precision.ask_after(exact, exact, strength=0.9, seed=1, k=32)
    assert found.kept and found.rank <= 32


def test_scale_errors_and_index_formats_come_as_tables():
    scales = precision.scale_errors((1.0, 0.0), 4096, needles=2).set_index("factor")
    assert scales.loc[1.0, "answered"] == 2 and scales.loc[0.0, "kept"] == 0
    index = precision.index_formats({"fp8": lambda hay: {}}, 2048, strength=0.9, needles=3)
    assert index.groupby("format").size().to_dict() == {"exact": 3, "fp8": 3}
    assert index[index["format"] == "fp8"]["right"].all()
