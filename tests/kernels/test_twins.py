"""The Triton twins against the references, at small shapes (in the interpreter where no CUDA device is there)."""

from __future__ import annotations

import pytest
import torch
from needlework.kernels import reference
from needlework.kernels import triton as twins
from needlework.pages import LAYOUTS

DEVICE = "cpu" if twins.INTERPRETED else "cuda"
# float32 products in the interpreter, bf16 on a GPU (8 bits of mantissa)
OUT_LIMIT = 1e-5 if twins.INTERPRETED else 6e-3
# on a GPU fp8 products are summed in the tensor core's shortened accumulator
LOGIT_LIMIT = 1e-6 if twins.INTERPRETED else 1e-3


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm, with infinities at the same places required."""
    found, wanted = found.float().cpu(), wanted.float().cpu()
    finite = torch.isfinite(wanted)
    assert torch.equal(found[~finite], wanted[~finite])
    return float((found - wanted)[finite].norm() / wanted[finite].norm().clamp(min=1e-30))


def index_case(seed: int = 0, page_tokens: int = 64, heads: int = 64):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 64, 65, 200, 0], dtype=torch.int32)
    pages, columns = 24, -(-200 // page_tokens)
    pages = max(pages, 5 * columns)
    pool = torch.full((pages, 132 * page_tokens), 0x7F, dtype=torch.uint8)  # NaN codes wherever nothing is written
    table = torch.randperm(pages, generator=rng)[: 5 * columns].reshape(5, columns).int()
    for b, n in enumerate(lengths.tolist()):
        at = torch.arange(n)
        slots = table[b, at // page_tokens] * page_tokens + at % page_tokens
        reference.store_index_keys(pool, slots, torch.randn(n, 128, generator=rng), page_tokens)
    q = torch.randn(5, heads, 128, generator=rng).to(torch.float8_e4m3fn)
    weights = torch.randn(5, heads, generator=rng)
    return [x.to(DEVICE) for x in (q, weights, pool, table, lengths)]


def test_where_says_what_runs():
    assert ("interpreter" in twins.where()) == twins.INTERPRETED


@pytest.mark.parametrize(("page_tokens", "dtype"), [(64, torch.float32), (16, torch.bfloat16)])
def test_store_writes_the_same_bytes_as_the_reference(page_tokens, dtype):
    rng = torch.Generator().manual_seed(1)
    keys = torch.randn(90, 128, generator=rng) * torch.logspace(-7, 4, 90)[:, None]
    keys[3] = 0
    keys[4, 5] = 1e30
    before = torch.randint(0, 256, (8, page_tokens * 132), generator=rng, dtype=torch.uint8)
    slots = torch.randperm(8 * page_tokens, generator=rng)[:90].int()
    slots[7] = -1
    wanted, found = before.clone(), before.clone().to(DEVICE)
    reference.store_index_keys(wanted, slots, keys.to(dtype), page_tokens)
    twins.store_index_keys(found, slots.to(DEVICE), keys.to(dtype).to(DEVICE), page_tokens)
    assert torch.equal(found.cpu(), wanted)


def test_store_rounds_every_code_boundary_to_even():
    # 448 in each row makes the scale 1, so the other values are rounded as they are
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(torch.tensor(0.0))])
    values = torch.cat([values, -values])
    rows = torch.zeros(-(-len(values) // 127), 127)
    rows.view(-1)[: len(values)] = values
    keys = torch.cat([rows, torch.full((len(rows), 1), 448.0)], 1)
    pool = torch.zeros(1, 8448, dtype=torch.uint8, device=DEVICE)
    twins.store_index_keys(pool, torch.arange(len(keys), device=DEVICE), keys.to(DEVICE))
    stored = pool[0, : 128 * len(keys)].view(-1, 128).cpu()
    assert torch.equal(stored, keys.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(("page_tokens", "heads"), [(64, 64), (16, 32), (64, 5)])
def test_logits_match_the_reference(page_tokens, heads):
    q, weights, pool, table, lengths = index_case(2, page_tokens, heads)
    found = twins.indexer_logits(q, weights, pool, table, lengths, page_tokens=page_tokens)
    wanted = reference.indexer_logits(q, weights, pool, table, lengths, page_tokens=page_tokens)
    assert found.shape == wanted.shape and relative(found, wanted) < LOGIT_LIMIT


@pytest.mark.filterwarnings("ignore:overflow encountered")  # garbage behind the length is multiplied, then masked
def test_logits_by_whole_pages_match_the_reference():
    q, weights, pool, table, lengths = index_case(6)
    table[3, 2] = -1
    found = twins.indexer_logits(
        q, weights, pool, table, lengths, config={"BLOCK": 64, "STEPS": 3, "STAGES": 2, "num_warps": 4}
    )
    wanted = reference.indexer_logits(q, weights, pool, table, lengths)
    assert relative(found, wanted) < LOGIT_LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_logits_take_other_query_types(dtype):
    q, weights, pool, table, lengths = index_case(3)
    given = q.view(torch.uint8) if dtype == torch.uint8 else q.to(dtype)
    found = twins.indexer_logits(given, weights, pool, table, lengths)
    assert relative(found, reference.indexer_logits(q, weights, pool, table, lengths)) < LOGIT_LIMIT


def test_logits_with_two_rows_per_request_and_a_hole():
    q, weights, pool, table, lengths = index_case(4)
    table[3, 1] = -1
    q, weights = torch.stack([q, q.flip(0)], 1), torch.stack([weights, -weights], 1)
    lengths = torch.stack([(lengths - 1).clamp(min=0), lengths], 1)
    found = twins.indexer_logits(q, weights, pool, table, lengths)
    wanted = reference.indexer_logits(q, weights, pool, table, lengths)
    assert relative(found, wanted) < LOGIT_LIMIT
    assert torch.isinf(found[3, :, 64:128]).all()


def test_logits_accept_padded_pages_and_refuse_other_layouts():
    q, weights, pool, table, lengths = index_case(5)
    wide = torch.full((len(pool), 8640), 0x7F, dtype=torch.uint8, device=DEVICE)
    wide[:, :8448] = pool
    found = twins.indexer_logits(q, weights, wide[:, :8448], table, lengths)
    assert torch.equal(found, twins.indexer_logits(q, weights, pool, table, lengths))
    with pytest.raises(ValueError, match="dsa-index-fp8"):
        twins.indexer_logits(q, weights, pool, table, lengths, layout="dsa-index-fp4")
    with pytest.raises(ValueError, match="pool is uint8"):
        twins.indexer_logits(q, weights, pool[:, :100], table, lengths)


def rows_of(kind: str, width: int, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(width, generator=rng)
    match kind:
        case "ties":
            return x.round()
        case "one bin":
            return 1 + x * 1e-6
        case "zeros":
            return torch.where(torch.rand(width, generator=rng) < 0.9, torch.zeros(()), x)
        case "rising":
            return torch.arange(width).float()
        case "equal":
            return torch.full((width,), -2.5)
        case "masked":
            return torch.where(torch.arange(width) % 7 == 0, x, -torch.inf)
        case "not a number":
            return torch.where(torch.arange(width) % 97 == 0, torch.nan, x)
    return x


KINDS = ("normal", "ties", "one bin", "zeros", "rising", "equal", "masked", "not a number")


def check_topk(scores: torch.Tensor, lengths: torch.Tensor, k: int, found: torch.Tensor) -> None:
    found, scores = found.cpu(), scores.cpu()
    wanted = reference.select_topk(scores, lengths.cpu(), k)
    for row, (a, b, n) in enumerate(zip(found, wanted, lengths.tolist(), strict=True)):
        kept = a[a >= 0].long()
        assert len(kept) == min(k, n) == len(kept.unique()), row
        assert len(kept) == 0 or int(kept.max()) < n
        if n <= k:
            assert torch.equal(a, b)
        best, best_wanted = (scores[row, i].nan_to_num(nan=9e9).sort().values for i in (kept, b[b >= 0].long()))
        assert torch.equal(best, best_wanted), row


@pytest.mark.parametrize(
    ("width", "k", "chunk"),
    [(3000, 512, 16384), (513, 512, 16384), (5000, 512, 4096), (9000, 2048, 8192), (700, 16, 512)],
)
def test_topk_is_exact_on_every_kind_of_row(width, k, chunk):
    rng = torch.Generator().manual_seed(width)
    scores = torch.stack([rows_of(kind, width, rng) for kind in KINDS])
    lengths = torch.full((len(KINDS),), width, dtype=torch.int32)
    found = twins.select_topk(scores.to(DEVICE), lengths.to(DEVICE), k, config={"CHUNK": chunk})
    check_topk(scores, lengths, k, found)


def test_topk_edges_of_the_length_and_garbage_past_it():
    rng = torch.Generator().manual_seed(5)
    lengths = torch.tensor([0, 1, 511, 512, 513, 1023, 1025, 2000], dtype=torch.int32)
    scores = torch.randn(8, 2048, generator=rng)
    for b, n in enumerate(lengths.tolist()):
        scores[b, n:] = torch.nan if b % 2 else torch.inf
    found = twins.select_topk(scores.to(DEVICE), lengths.to(DEVICE), 512, config={"CHUNK": 1024})
    check_topk(scores, lengths, 512, found)


def test_topk_takes_the_larger_before_equal_scores_and_repeats_bit_for_bit():
    scores = torch.zeros(1, 4000, device=DEVICE)
    scores[0, 3000:3010] = 1
    lengths = torch.tensor([4000], device=DEVICE)
    found = [twins.select_topk(scores, lengths, 512, config={"CHUNK": 2048}) for _ in range(2)]
    assert torch.equal(*found)
    assert {*range(3000, 3010)} < set(found[0][0].tolist())


def test_topk_translates_positions_to_slots():
    rng = torch.Generator().manual_seed(6)
    scores = torch.randn(3, 1280, generator=rng)
    table = torch.stack([torch.randperm(90, generator=rng)[:20] for _ in range(3)]).int()
    table[1, 3] = -1
    lengths = torch.tensor([1280, 700, 100], dtype=torch.int32)
    found = twins.select_topk(scores.to(DEVICE), lengths.to(DEVICE), 512, table.to(DEVICE)).cpu()
    wanted = reference.select_topk(scores, lengths, 512, table)
    assert torch.equal(found.sort().values, wanted.sort().values)
    assert torch.equal(found[2], wanted[2])


def mla_case(layout: str, page_tokens: int, heads: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    dim = LAYOUTS[layout].dim
    pages = 512 // page_tokens
    pool = torch.full((pages, LAYOUTS[layout].page_bytes(page_tokens)), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(512, generator=rng)[:300]
    LAYOUTS[layout].scatter(pool, slots, torch.randn(300, dim, generator=rng), page_tokens=page_tokens)
    indices = torch.stack([slots[torch.randperm(300, generator=rng)[:150]] for _ in range(3)]).int()
    indices[0, ::5] = -1
    indices[1] = -1
    q = torch.randn(3, heads, dim, generator=rng).to(torch.bfloat16)
    return [x.to(DEVICE) for x in (q, pool, indices)]


@pytest.mark.parametrize(
    ("layout", "page_tokens", "heads"),
    [("v4-mla-fp8", 64, 64), ("v4-mla-fp8", 16, 4), ("v32-mla-fp8", 64, 128), ("v32-mla-fp8", 64, 8)],
)
@pytest.mark.parametrize("extras", ["plain", "sink", "lengths", "two caches"])
def test_decode_matches_the_reference(layout, page_tokens, heads, extras):
    q, pool, indices = mla_case(layout, page_tokens, heads)
    more: dict = {"layout": layout, "page_tokens": page_tokens}
    if extras in ("sink", "two caches"):
        more["sink"] = torch.linspace(-3, 3, heads, device=DEVICE)
        more["sink"][0] = -torch.inf
    if extras == "lengths":
        more["topk_length"] = torch.tensor([70, 10, 0], dtype=torch.int32, device=DEVICE)
    if extras == "two caches":
        _, other, more["extra_indices"] = mla_case(layout, 64, heads, seed=1)
        more |= {"extra_pool": other, "extra_layout": layout, "extra_page_tokens": 64}
    out, lse = twins.sparse_mla_decode(q, pool, indices, **more)
    wanted_out, wanted_lse = reference.sparse_mla_decode(q, pool, indices, **more)
    assert relative(out, wanted_out) < OUT_LIMIT and relative(lse, wanted_lse) < OUT_LIMIT


@pytest.mark.parametrize(("splits", "halves"), [(1, 2), (2, 1), (5, 2)])
def test_any_number_of_splits_gives_the_same_answer(splits, halves):
    q, pool, indices = mla_case("v4-mla-fp8", 64, 16, seed=2)
    sink = torch.full((16,), 0.5, device=DEVICE)
    out, lse = twins.sparse_mla_decode(
        q,
        pool,
        indices,
        sink=sink,
        config={"BLOCK": 32, "SPLITS": splits, "HALVES": halves, "STAGES": 1, "num_warps": 4},
    )
    wanted_out, wanted_lse = reference.sparse_mla_decode(q, pool, indices, sink=sink)
    assert relative(out, wanted_out) < OUT_LIMIT and relative(lse, wanted_lse) < OUT_LIMIT
    assert torch.isinf(lse[1]).all() and (out[1] == 0).all()


def test_merge_matches_the_reference_and_ignores_empty_parts():
    rng = torch.Generator().manual_seed(7)
    outs, lses = torch.randn(5, 2, 8, 512, generator=rng), torch.randn(5, 2, 8, generator=rng) * 9
    lses[1, 0], lses[2, 1], lses[:, 1, 3] = torch.inf, -torch.inf, torch.inf
    outs[1, 0], outs[2, 1] = torch.nan, torch.nan  # an empty part's output is not read
    for sink in (None, torch.linspace(-20, 20, 8)):
        found = twins.merge_partials(outs.to(DEVICE), lses.to(DEVICE), None if sink is None else sink.to(DEVICE))
        wanted = reference.merge_partials(outs, lses, sink)
        assert relative(found[0], wanted[0]) < 1e-5 and relative(found[1], wanted[1]) < 1e-6


def test_bad_input_is_refused_in_one_sentence():
    q, pool, indices = mla_case("v4-mla-fp8", 64, 16)
    with pytest.raises(ValueError, match="v4-mla-fp8 and v32-mla-fp8"):
        twins.sparse_mla_decode(q, pool, indices, layout="v41-mla-fp8")
    with pytest.raises(ValueError, match="go together"):
        twins.sparse_mla_decode(q, pool, indices, extra_pool=pool)
    with pytest.raises(ValueError, match="2048"):
        twins.select_topk(torch.zeros(1, 10), torch.tensor([10]), 4096)
    with pytest.raises(ValueError, match="slots"):
        twins.store_index_keys(pool, indices[0], torch.zeros(3, 128))
