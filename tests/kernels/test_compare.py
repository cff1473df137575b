"""The comparison helper, the references' contracts at their edges, candidates and the command line."""

from __future__ import annotations

import pytest
import torch
from needlework.kernels import candidates
from needlework.kernels import reference as ref
from needlework.kernels.check.compare import LIMITS, compare_exact, compare_topk, compare_values
from needlework.kernels.cli import main


def test_equal_values_agree_and_the_worst_element_is_named():
    want = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    assert compare_values("x", want, want, LIMITS["float32"]).passed
    got = want.clone()
    got[1, 7] += 0.5
    found = compare_values("x", got, want, LIMITS["float32"], locate=lambda i: f"row {i[0]}, column {i[1]}")
    assert not found.passed and found.worst == "row 1, column 7"
    assert "FAILS" in str(found) and "<p>" in found._repr_html_()


def test_one_wrong_element_among_many_is_found_though_the_norm_hides_it():
    want = torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(2))
    got = want.clone()
    got[0, 123_456] += 0.05
    found = compare_values("x", got, want, LIMITS["logits"])
    assert found.norm_error < found.limit.norm and not found.passed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_must_stand_where_the_reference_has_them(value):
    want = torch.ones(2, 4)
    got = want.clone()
    got[0, 2] = value
    assert not compare_values("x", got, want, LIMITS["float32"]).passed
    want[0, 2] = value
    assert compare_values("x", got, want, LIMITS["float32"]).passed
    assert compare_values("x", torch.ones(2, 4), want, LIMITS["float32"], valid=torch.isfinite(want)).passed


def test_shape_and_type_are_part_of_the_comparison():
    want = torch.ones(2, 4)
    assert "shape" in compare_values("x", torch.ones(4, 2), want, LIMITS["float32"]).detail
    assert "type" in compare_values("x", torch.ones(2, 4, dtype=torch.int32), want, LIMITS["float32"]).detail
    assert not compare_exact("x", torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)).passed
    assert "shape" in compare_exact("x", torch.zeros(3), torch.zeros(4)).detail


def test_a_selection_may_swap_ties_and_order_but_not_lose_a_winner():
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]])
    lengths = torch.tensor([5])

    def hold(*picked):
        return compare_topk(torch.tensor([picked], dtype=torch.int32), logits, lengths, 3, None, 64)

    assert hold(0, 2, 1).passed and hold(3, 0, 2).passed
    lost = hold(0, 1, 3)
    assert not lost.passed and "1 winners dropped, the best is position 2 (rank 2" in lost.detail
    assert "twice" in hold(0, 0, 2).detail and "past the length" in hold(0, 2, 7).detail
    assert "positions where" in hold(0, 2, -1).detail


def test_short_and_empty_rows_have_one_right_answer():
    logits = torch.randn(3, 10)
    picked = ref.select_topk(logits, torch.tensor([0, 2, 4]), 4)
    assert (
        picked.tolist()[0] == [-1] * 4 and picked.tolist()[1] == [0, 1, -1, -1] and picked.tolist()[2] == [0, 1, 2, 3]
    )
    table = torch.tensor([[5], [6], [-1]], dtype=torch.int32)
    slots = ref.select_topk(logits, torch.tensor([0, 2, 4]), 4, table)
    assert slots.tolist()[1] == [384, 385, -1, -1] and slots.tolist()[2] == [-1] * 4
    with pytest.raises(ValueError, match="passes the"):
        ref.select_topk(logits, torch.tensor([11, 1, 1]), 4)
    with pytest.raises(ValueError, match="at least 1"):
        ref.select_topk(logits, torch.tensor([1, 1, 1]), 0)


def test_references_refuse_shapes_that_do_not_fit():
    q, w = torch.zeros(1, 4, 128), torch.zeros(1, 4)
    pool, table = torch.zeros(2, 8448, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit"):
        ref.indexer_logits(q, w, pool, table, torch.tensor([65]))
    with pytest.raises(ValueError, match="needs weights"):
        ref.indexer_logits(q, w[:, :2], pool, table, torch.tensor([5]))
    with pytest.raises(ValueError, match="one slot per key"):
        ref.store_index_keys(pool, torch.tensor([1]), torch.zeros(2, 128))
    with pytest.raises(ValueError, match="holds 512 numbers"):
        ref.sparse_mla_decode(torch.zeros(1, 4, 576), torch.zeros(1, 37440, dtype=torch.uint8), torch.zeros(1, 2).int())
    with pytest.raises(ValueError, match="go together"):
        ref.sparse_mla_decode(
            torch.zeros(1, 4, 512), torch.zeros(1, 37440, dtype=torch.uint8), torch.zeros(1, 2).int(), extra_pool=pool
        )


def _cache():
    g = torch.Generator().manual_seed(3)
    pool = torch.full((5, 37440), 0xFF, dtype=torch.uint8)
    from needlework.pages import LAYOUTS

    LAYOUTS["v4-mla-fp8"].scatter(pool, torch.arange(64, 256), torch.randn(192, 512, generator=g))
    q = torch.randn(2, 8, 512, generator=g)
    indices = torch.randperm(192, generator=g)[:100].repeat(2, 1).int() + 64
    indices[0, 10:20] = -1
    return q, pool, indices


def test_attention_invariants_split_sink_permutation_convexity():
    q, pool, indices = _cache()
    out, lse = ref.sparse_mla_decode(q, pool, indices, dtype=torch.float64)
    for splits in (1, 2, 7, 100, 130):
        merged, total = ref.merge_partials(*ref.sparse_mla_partials(q, pool, indices, splits, dtype=torch.float64))
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(total, lse)
    shuffled = indices[:, torch.randperm(100)]
    torch.testing.assert_close(ref.sparse_mla_decode(q, pool, shuffled, dtype=torch.float64)[0], out)
    sink = torch.linspace(-3, 9, 8).double()
    sunk, same = ref.sparse_mla_decode(q, pool, indices, sink=sink, dtype=torch.float64)
    torch.testing.assert_close(sunk, out * torch.sigmoid(lse - sink)[..., None])
    assert torch.equal(same, lse)
    two = ref.sparse_mla_decode(
        q, pool, indices[:, :40], extra_pool=pool, extra_indices=indices[:, 40:], dtype=torch.float64
    )
    torch.testing.assert_close(two[0], out)
    entries = ref.gather_entries(pool, indices, "v4-mla-fp8", 64, torch.float64)[1]
    assert bool(((out[1] <= entries.amax(0) + 1e-9) & (out[1] >= entries.amin(0) - 1e-9)).all())


def test_empty_rows_give_zero_and_plus_infinity():
    q, pool, indices = _cache()
    out, lse = ref.sparse_mla_decode(q, pool, torch.full_like(indices, -1), sink=torch.zeros(8))
    assert float(out.abs().max()) == 0.0 and bool(torch.isposinf(lse).all())
    nothing = ref.sparse_mla_decode(q, pool, indices, topk_length=torch.tensor([0, 5]))
    assert float(nothing[0][0].abs().max()) == 0.0 and float(nothing[0][1].abs().max()) > 0
    with pytest.raises(ValueError, match="outs"):
        ref.merge_partials(out, lse[:, :2])


def test_a_hole_in_the_page_table_scores_minus_infinity():
    g = torch.Generator().manual_seed(4)
    pool = torch.zeros(4, 8448, dtype=torch.uint8)
    ref.store_index_keys(pool, torch.arange(64, 256), torch.randn(192, 128, generator=g))
    table = torch.tensor([[2, -1, 1]], dtype=torch.int32)
    q, w = torch.randn(1, 8, 128, generator=g), torch.rand(1, 8, generator=g)
    row = ref.indexer_logits(q, w, pool, table, torch.tensor([150]))[0]
    assert bool(torch.isneginf(row[64:128]).all()) and bool(torch.isfinite(row[:64]).all())
    assert bool(torch.isfinite(row[128:150]).all()) and bool(torch.isneginf(row[150:]).all())
    assert ref.visible_keys(torch.tensor([0, 2, 3, 6, 7]), 4).tolist() == [0, 0, 1, 1, 2]


USER = """
import torch
from needlework.kernels import reference

def good(q, weights, pool, page_table, lengths, **more):
    return reference.indexer_logits(q, weights, pool, page_table, lengths, **more)

def no_relu(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
    return -reference.indexer_logits(q, weights, pool, page_table, lengths, page_tokens=page_tokens, layout=layout)
"""


def test_a_users_file_is_checked_through_the_command(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    assert main(["indexer_logits", "--candidate", f"{path}:good", "--device", "cpu"]) == 0
    assert "agrees with the reference" in capsys.readouterr().out
    assert main(["indexer_logits", "--candidate", f"{path}:no_relu", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and "covered" in said and str(tmp_path) not in said


def test_the_command_lists_and_says_what_is_missing(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "def decode(q, pool, indices" in capsys.readouterr().out
    assert main(["--list"]) == 0
    assert "sglang-sm120-triton" in capsys.readouterr().out
    assert main(["select_topk", "--candidate", "deep_gemm"]) == 2
    assert "install" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense", "unknown candidate"),
        ("nowhere.py:f", "no file"),
        ("{path}:missing", "no function"),
        ("{bad}:f", "does not import"),
    ],
)
def test_bad_specs_are_one_sentence(tmp_path, spec, said):
    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "bad.py").write_text("raise OSError('no such library')")
    with pytest.raises(ValueError, match=said) as error:
        candidates.load(spec.format(path=tmp_path / "mine.py", bad=tmp_path / "bad.py"))
    assert "\n" not in str(error.value)


def test_every_named_candidate_loads_or_says_why_not():
    for name in candidates.names():
        candidate = candidates.load(name)
        assert candidate.functions or "install" in candidate.missing or "CUDA" in candidate.missing
        assert name in str(candidate)
    assert {c.name for c in candidates.available("select_topk")} >= {"reference", "triton", "sglang-topk-v1"}
