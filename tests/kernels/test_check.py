"""check() catches every mutant, and finds nothing wrong with a good kernel."""

from __future__ import annotations

import pytest
import torch
from mutants import MUTANTS, logits, stores, top
from mutants_attention import decodes, finishes, merges, routes
from mutants_attention import top as highest
from mutants_long import LONG, LONG_MUTANTS, MANY
from needlework.kernels import check
from needlework.kernels import reference as ref
from needlework.kernels.check.cases import DecodeCase, LogitsCase, PlainCase, TopkCase
from needlework.kernels.check.operations import OPERATIONS, extent
from needlework.kernels.check.suites import suite


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_is_caught(mutant):
    result = check(mutant.function, mutant.operation, fail_fast=True, device="cpu")
    assert result.passed is False, f"{mutant} was not caught"
    detail = result.failures["detail"].iloc[0]
    assert not detail.startswith("raises"), f"{mutant} broke instead of being wrong: {detail}"


def beyond(case):
    """Does a case pass 32,768 keys or 16 rows?"""
    size = extent(case.inputs())
    return size["row"] > LONG or max(size["batch"], 0 if size["batch"] or size["page"] else size["row"]) > MANY


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_long_rows_and_large_batches_show_these_mutants(operation):
    cases = {case: beyond(case) for case in suite(operation)}
    far = [case for case, long in cases.items() if long]
    near = [case for case, long in cases.items() if not long and "high pages" not in case.covers][-2:]
    for mutant in (m for m in LONG_MUTANTS if m.operation == operation):
        caught = check(mutant.function, operation, far, fail_fast=True, device="cpu")
        assert caught.passed is False, f"{mutant} was not caught"
        assert not caught.failures["detail"].iloc[0].startswith("raises"), str(caught)
        missed = check(mutant.function, operation, near, fail_fast=True, device="cpu")
        assert missed.passed, f"{mutant} shows on short rows already: {missed}"


GOOD = {
    "store_index_keys": stores(lambda *written: written),
    "indexer_logits": logits(),
    "select_topk": top(lambda scores: scores),
    "sparse_mla_decode": decodes(),
    "merge_partials": merges(lambda lses: torch.exp(lses - highest(lses))),
    "finish_index_keys": finishes(),
    "router_topk": routes(ref.router_scores),
}


@pytest.mark.parametrize("operation", GOOD)
def test_what_mutants_are_made_of_passes_without_the_fault(operation):
    assert check(GOOD[operation], operation, device="cpu").passed is True


def test_there_are_many_mutants_of_many_operations():
    assert len(MUTANTS) >= 40 and len(LONG_MUTANTS) >= 20
    assert {m.operation for m in MUTANTS} == set(OPERATIONS)
    assert len({str(m) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_good_kernel_gives_no_alarm(operation):
    result = check("reference", operation, seed=3, device="cpu")
    assert result.passed is True, str(result)
    assert "agrees with the reference" in str(result)
    if operation in ("indexer_logits", "select_topk"):
        assert "up to rows of 65,537 keys, batches of 33, page " in str(result)


def test_good_runs_over_many_seeds_give_no_alarm():
    """A good kernel that computes in another order, over many seeds; benchmarks/kernel_check.py does 500 of each."""
    for seed in range(4):
        for operation in ("select_topk", "merge_partials"):
            cases = [case for case in suite(operation, seed=seed) if "long" not in case.covers]
            assert check(GOOD[operation], operation, cases, device="cpu").passed is True, (operation, seed)


def test_missing_and_foreign_candidates_are_said_not_raised():
    result = check("deep_gemm", "select_topk")
    assert result.passed is None and "not checked" in str(result)
    result = check("triton", "router_topk", device="cpu")
    assert result.passed is None and "offers" in str(result)
    with pytest.raises(ValueError, match="unknown operation"):
        check("reference", "flash_attention")


def test_a_refusal_counts_only_where_a_case_allows_it():
    def refuses(q, pool, indices, **more):
        raise ValueError("I take nothing")

    must = check(refuses, "sparse_mla_decode", [DecodeCase("plain", 1)], device="cpu")
    may = check(refuses, "sparse_mla_decode", [DecodeCase("plain", 1, optional="anything")], device="cpu")
    assert must.passed is False and "I take nothing" in str(must)
    assert may.passed is None and set(may.table["status"]) == {"refused"}  # nothing ran: neither a pass nor a failure


def test_coverage_and_the_verdict_say_how_large_the_cases_were_that_ran():
    cases = [LogitsCase("x", 1, lengths=(70, 130)), LogitsCase("refused", 2, lengths=(9999,), heads=8, optional="it")]

    def no_eight_heads(q, *rest, **more):
        if q.shape[-2] == 8:
            raise ValueError("not 8 heads")
        return ref.indexer_logits(q, *rest, **more)

    result = check(no_eight_heads, "indexer_logits", cases, device="cpu")
    coverage = result.coverage.set_index("topic")["how"]
    assert coverage["longest row, in keys"] == "130" and coverage["largest batch, in rows"] == "2"
    assert f"up to rows of 130 keys, batches of 2, page {coverage['highest page id']}." in str(result)


def test_coverage_says_what_could_not_be_seen_here():
    result = check("reference", "merge_partials", device="cpu")
    coverage = result.coverage.set_index("topic")
    assert not coverage.loc["captured in a CUDA graph and replayed with other lengths", "covered"]
    assert coverage.loc["run twice, in another order, and compared bit for bit", "covered"]
    assert not coverage[coverage.index.str.startswith("timing, races")]["covered"].any()
    assert "no CUDA device" in coverage["how"].tolist()


def test_a_fault_in_the_launch_for_many_rows_passes_few_rows_and_is_caught():
    def many_rows_skip_the_last_block(q, pool, indices, **more):
        if len(q) > 16:
            indices = indices[:, : indices.shape[1] // 128 * 128 - 128]
        return ref.sparse_mla_decode(q, pool, indices, **more)

    cases = {case.kind: case for case in suite("sparse_mla_decode", "full")}
    few, many = (check(many_rows_skip_the_last_block, "sparse_mla_decode", [cases[kind]], device="cpu", fail_fast=True)
                 for kind in ("16 rows", "17 rows"))  # fmt: skip
    assert few.passed and many.passed is False
    assert cases["V3.2, 64 rows of 2,048"].batch > 16 > cases["V3.2, 4 rows of 2,048"].batch


def test_uninitialised_memory_is_seen():
    def reads_fresh_memory(logits, lengths, k, page_table=None, *, page_tokens=64):
        fresh = torch.empty((len(logits), k), dtype=torch.int32)
        return ref.select_topk(logits, lengths, k, page_table, page_tokens=page_tokens) + (fresh > 0x40000000)

    assert check(reads_fresh_memory, "select_topk", [TopkCase("x", 1, lengths=(600,))], device="cpu").passed is False


def test_a_kernel_that_depends_on_what_it_may_not_read_differs_bit_for_bit():
    def peeks(q, weights, pool, page_table, lengths, **more):
        out = ref.indexer_logits(q, weights, pool, page_table, lengths, **more)
        return out * (1.0 + 1e-6 * (pool[0, 0] == 0xFF))

    result = check(peeks, "indexer_logits", [LogitsCase("x", 1, lengths=(70,))], device="cpu")
    assert result.passed is False and "two runs differ" in str(result)


def test_a_doubtful_difference_is_judged_in_float64():
    def coarse(q, pool, indices, **more):
        out, lse = ref.sparse_mla_decode(q, pool, indices, **more)
        return (out * 1.003).bfloat16(), lse

    result = check(coarse, "sparse_mla_decode", [DecodeCase("x", 1)], device="cpu")
    assert result.passed is True and "float64" in set(result.table["precision"])


def test_a_hostile_message_is_escaped_and_bounded():
    def shouts(**inputs):
        raise RuntimeError("<script>alert(1)</script>" + "x" * 10_000)

    result = check(shouts, "router_topk", device="cpu")
    html = result._repr_html_()
    assert "<script>" not in html and len(html) < 20_000


def test_cases_are_the_same_for_the_same_seed_and_vary_with_it():
    one, same = suite("indexer_logits", seed=1)[0].inputs(), suite("indexer_logits", seed=1)[0].inputs()
    other = suite("indexer_logits", seed=2)[0].inputs()
    assert torch.equal(one["pool"], same["pool"]) and torch.equal(one["weights"], same["weights"])
    assert not torch.equal(one["weights"], other["weights"])
    with pytest.raises(ValueError, match="size must be"):
        suite("indexer_logits", "huge")


def test_plain_cases_make_their_inputs_from_the_seed():
    case = PlainCase("x", 7, make=lambda g: {"x": torch.rand(2, generator=g)})
    assert torch.equal(case.inputs()["x"], case.inputs()["x"])
    assert not torch.equal(case.inputs()["x"], case.varied().inputs()["x"])
