"""The references: what each kernel must compute, in plain torch, float32 by default and float64 on request.

Read from top to bottom: index keys and their scores, selection, attention over what was selected, the compressors that
make the entries, and how the residual streams and experts of V4 are mixed. A pool is uint8 [pages, page_bytes]; a page
table is int32 [B, max_pages] with -1 for a hole; a slot is page_id * page_tokens + offset. Each function says its
shapes, its convention where public kernels differ, and its source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.pages import LAYOUTS, Layout, formats, layout_of

INDEX_DIM = 128
VALUE_DIM = 512
STREAMS = 4
ITERATIONS = 20  # hc_sinkhorn_iters of V4-Flash and V4-Pro; library examples default to 10
EPS = 1e-6
GEMMS = ("float64", "float32", "tf32", "bfloat16")


# ---- index keys and their scores -------------------------------------------------------------------------------------
#     logit[j] = s_k[j] * sum_h w[h] * max(0, q[h] . k8[j])
# q is what the kernel multiplies (fp8 codes as numbers); the query's own scale, 1/sqrt(128) and 1/sqrt(heads) are
# already in w. The key scale stands outside the ReLU, so a broken (negative) scale turns the sign of a logit instead of
# clearing it (sglang 0.5.23 `srt/layers/attention/dsv4/indexer.py`, DeepGEMM `tests/test_attention.py`).
def quantize_index_keys(
    keys: Tensor, *, layout: str = "dsa-index-fp8", writer: str | None = None
) -> tuple[Tensor, Tensor]:
    """Index keys as fp8: one float32 scale for each row of 128 numbers.

    keys [N, 128], any float dtype -> codes uint8 [N, 128] (e4m3fn bits), scales float32 [N]. scale = max(amax, 1e-4) /
    448 (sglang 0.5.23 `kernels/jit/csrc/dsa/fused_store_index_cache.cuh`); layout "dsa-index-fp8-ue8m0" rounds it up to
    a power of two. `writer` picks another public writer of that layout. Raises ValueError for another row width.
    """
    if keys.ndim != 2 or keys.shape[1] != INDEX_DIM:
        raise ValueError(f"index keys must be [N, {INDEX_DIM}], got {tuple(keys.shape)}")
    stored = LAYOUTS[layout].quantise(keys, writer)
    return stored["codes"], stored["scales"][:, 0]


def store_index_keys(pool: Tensor, slots: Tensor, keys: Tensor, page_tokens: int = 64) -> None:
    """Quantise keys [N, 128] and write them at slots [N] of an index pool, uint8 [pages, 8448] for 64-token pages, in
    place.

    slot = page * page_tokens + offset; slot -1 is skipped. Values and scales lie in two blocks of a page: 128 bytes at
    offset * 128 and 4 bytes at page_tokens * 128 + offset * 4. Raises ValueError for shapes that do not fit.
    """
    if slots.ndim != 1 or len(slots) != len(keys):
        raise ValueError(f"one slot per key: {tuple(slots.shape)} slots for {tuple(keys.shape)} keys")
    LAYOUTS["dsa-index-fp8"].scatter(pool, slots, keys.to(torch.float32), page_tokens=page_tokens)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform over the last axis (a power of two long): scaled by 1/sqrt(n), its own
    inverse.

    The official V4 script rotates queries and index keys with it before fp8; done on both sides it leaves every
    dot product as it was, on one side it destroys all of them.
    """
    n = x.shape[-1]
    if n == 0 or n & (n - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got {n}")
    out, width = x, 1
    while width < n:
        pairs = out.reshape(*x.shape[:-1], n // (2 * width), 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out, width = torch.stack((a + b, a - b), dim=-2).reshape(x.shape), width * 2
    return out * n**-0.5


def visible_keys(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed keys a query at each position may score: (p + 1) div ratio. The token that completes a
    group sees it."""
    return (positions + 1) // ratio


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    page_tokens: int = 64,
    layout: str = "dsa-index-fp8",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Score every index key of each request.

    q [B, H, D] (or [B, N, H, D]) float or fp8; weights [B, H] (or [B, N, H]) float32; pool uint8 [pages, page_bytes];
    page_table int32 [B, max_pages], -1 = hole; lengths int32 [B] (or [B, N]): the exclusive end of each row, in keys.
    -> [B, max_pages * page_tokens] (or [B, N, ...]) in `dtype`, -inf at and past the length and in holes.
    Only pages below the longest row of a request are read. Raises ValueError for shapes that do not fit.
    """
    if q.ndim == 3:
        paged = {"page_tokens": page_tokens, "layout": layout, "dtype": dtype}
        return indexer_logits(q[:, None], weights[:, None], pool, page_table, lengths[:, None], **paged)[:, 0]  # type: ignore[arg-type]
    batch, rows, heads, _ = q.shape
    if weights.shape != (batch, rows, heads) or lengths.shape != (batch, rows) or page_table.shape[0] != batch:
        raise ValueError(
            f"q {tuple(q.shape)} needs weights {(batch, rows, heads)} and lengths {(batch, rows)}, "
            f"got {tuple(weights.shape)} and {tuple(lengths.shape)}, page table {tuple(page_table.shape)}"
        )
    width = page_table.shape[1] * page_tokens
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > width:
        raise ValueError(f"length {longest} does not fit in {page_table.shape[1]} pages of {page_tokens} keys")
    out = torch.full((batch, rows, width), -torch.inf, dtype=dtype, device=q.device)
    for b in range(batch):
        used = -(-int(lengths[b].max()) // page_tokens)
        ids = page_table[b, :used].long()
        there = torch.nonzero(ids >= 0).flatten()
        if not len(there):
            continue
        keys, scales = _keys_and_scales(pool, ids[there], layout_of(layout), page_tokens, dtype)
        columns = (there[:, None] * page_tokens + torch.arange(page_tokens, device=q.device)).flatten()
        for n in range(rows):
            dots = torch.relu_(q[b, n].to(dtype) @ keys.T)
            row = (weights[b, n].to(dtype) @ dots) * scales
            out[b, n, columns] = row.masked_fill_(columns >= lengths[b, n], -torch.inf)
    return out


def _keys_and_scales(
    pool: Tensor, pages: Tensor, layout: Layout, page_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys of some pages without their scale [L, D], and the scale [L], where a row has one; else dequantised keys
    and ones."""
    layout.check(pool, page_tokens)
    if layout["scales"].count > 1:
        keys = layout.decode(pool[pages], page_tokens)["values"].reshape(-1, layout.dim).to(dtype)
        return keys, torch.ones(len(keys), dtype=dtype, device=keys.device)
    stored = [
        layout[name].take(pool, page_tokens, pages).reshape(len(pages) * page_tokens, -1)
        for name in ("codes", "scales")
    ]
    keys = formats.decode(stored[0], layout["codes"].format).to(dtype)
    return keys, stored[1].view(torch.float32)[:, 0].to(dtype)


# ---- selection -------------------------------------------------------------------------------------------------------
def slots_of(positions: Tensor, page_table: Tensor, page_tokens: int = 64) -> Tensor:
    """Positions int32 [B, k] (-1 = none) as pool slots: page_table[b, position // page_tokens] * page_tokens +
    position % page_tokens.

    A position in a hole of the table (-1), or past its last column, becomes -1. int32 [B, k].
    """
    column = (positions // page_tokens).long()
    inside = (positions >= 0) & (column < page_table.shape[1])
    page = page_table.gather(1, column.clamp(0, page_table.shape[1] - 1))
    slot = page * page_tokens + positions % page_tokens
    return torch.where(inside & (page >= 0), slot, -1).to(torch.int32)


def select_topk(
    logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None = None, *, page_tokens: int = 64
) -> Tensor:
    """The k best of the first `lengths[b]` logits of each row.

    logits [B, L] float; lengths int [B]; page_table int32 [B, max_pages] -> int32 [B, k], unsorted, -1 padded: slots
    where a page table is given, else positions. A row with at most k keys gives 0, 1, … length-1 in order, then -1
    (its logits are not looked at: sglang 0.5.23 and vllm 0.33.0 skip them). Among equal scores any choice is right.
    Columns at or past the length are never read. NaN counts as the largest score, as in torch.topk. Raises ValueError
    for shapes that do not fit.
    """
    if logits.ndim != 2 or lengths.shape != logits.shape[:1]:
        raise ValueError(f"logits [B, L] with lengths [B], got {tuple(logits.shape)} and {tuple(lengths.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if len(lengths) and int(lengths.max()) > logits.shape[1]:
        raise ValueError(f"a length of {int(lengths.max())} passes the {logits.shape[1]} columns of the logits")
    order = torch.arange(k, dtype=torch.int32, device=logits.device)
    picked = torch.where(order < lengths[:, None], order, -1).to(torch.int32)
    for b in torch.nonzero(lengths > k).flatten().tolist():
        picked[b] = torch.topk(logits[b, : int(lengths[b])], k, sorted=False).indices
    return picked if page_table is None else slots_of(picked, page_table, page_tokens)


# ---- attention over the selected entries -----------------------------------------------------------------------------
# s_j = scale * q . k_j over valid entries; lse = ln sum exp(s_j), natural and without the sink;
# out = sum exp(s_j - lse) v_j, times sigmoid(lse - sink) where a sink is given (FlashMLA `tests/ref.py` conventions).
# K and V are the same bytes: V4 reads all 512 numbers as both, V3.2 scores with 576 and sums the first 512.
def gather_entries(pool: Tensor, slots: Tensor, layout: str, page_tokens: int, dtype: torch.dtype) -> Tensor:
    """Entries of a pool at slots [B, K] as numbers [B, K, dim]; zeros at slot -1, whose bytes are never read."""
    if len(slots) == 1:
        return layout_of(layout).gather(pool, slots, page_tokens=page_tokens).to(dtype)
    flat = slots.reshape(-1).long()
    used, place = torch.unique(flat[flat >= 0], return_inverse=True)  # a slot shared by many rows is decoded once
    out = torch.zeros((len(flat), layout_of(layout).dim), dtype=dtype, device=pool.device)
    if len(used):
        out[flat >= 0] = layout_of(layout).gather(pool, used, page_tokens=page_tokens).to(dtype)[place]
    return out.reshape(*slots.shape, out.shape[1])


def _attend(q: Tensor, entries: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, H, D], entries [B, K, D], valid [B, K] -> out [B, H, 512], lse [B, H] (+inf and 0 where nothing is
    valid)."""
    scores = (q @ entries.transpose(1, 2)).mul_(scale).masked_fill_(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    empty = ~valid.any(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(empty[:, None], 0.0)[..., None])
    return weights @ entries[..., :VALUE_DIM], lse.masked_fill(empty[:, None], torch.inf)


def sparse_mla_decode(
    q: Tensor,
    pool: Tensor,
    indices: Tensor,
    *,
    layout: str = "v4-mla-fp8",
    page_tokens: int = 64,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    extra_pool: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_page_tokens: int = 64,
    extra_layout: str | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One decode step over selected entries.

    q [B, H, D] (D 512, or 576 for v32-mla-fp8); pool uint8 [pages, page_bytes]; indices int32 [B, K] slots, -1 = hole
    anywhere; softmax_scale defaults to D**-0.5; sink float [H], -inf = none; topk_length int [B]: only the first n
    indices count. The extra cache has its own layout and page size; one softmax covers both (V4: the window is the
    main cache, the compressed entries are the extra one; an entry in both counts twice, by design).
    -> out [B, H, 512] and lse [B, H] in `dtype`: natural log, without the sink, +inf where a row has no entry (its
    out is 0). Raises ValueError for a slot outside the pool or shapes that do not fit.
    """
    if q.ndim != 3 or indices.ndim != 2 or len(indices) != len(q):
        raise ValueError(f"q [B, H, D] with indices [B, K], got {tuple(q.shape)} and {tuple(indices.shape)}")
    if q.shape[-1] != layout_of(layout).dim:
        raise ValueError(f"layout {layout} holds {layout_of(layout).dim} numbers an entry, q has {q.shape[-1]}")
    if (extra_pool is None) != (extra_indices is None):
        raise ValueError("extra_pool and extra_indices go together")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    slots = _limited(indices, topk_length)
    entries = gather_entries(pool, slots, layout, page_tokens, dtype)
    if extra_pool is not None and extra_indices is not None:
        extra_slots = _limited(extra_indices, extra_topk_length)
        more = gather_entries(extra_pool, extra_slots, extra_layout or layout, extra_page_tokens, dtype)
        entries, slots = torch.cat((entries, more), dim=1), torch.cat((slots, extra_slots), dim=1)
    out, lse = _attend(q.to(dtype), entries, slots >= 0, scale)
    return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse


def _limited(indices: Tensor, length: Tensor | None) -> Tensor:
    if length is None:
        return indices
    order = torch.arange(indices.shape[1], device=indices.device)
    return torch.where(order < length[:, None], indices, -1)


def sink_factor(lse: Tensor, sink: Tensor) -> Tensor:
    """What a sink leaves of the output: sigmoid(lse - sink), for lse [..., H] and sink [H]; 1 at sink -inf, 0 at
    +inf."""
    empty = torch.isinf(lse) & (lse > 0)
    return torch.sigmoid(lse.masked_fill(empty, 0.0) - sink.to(lse.dtype))


def sparse_mla_partials(
    q: Tensor, pool: Tensor, indices: Tensor, splits: int, *, layout: str = "v4-mla-fp8", page_tokens: int = 64,
    softmax_scale: float | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Split-K: the index list cut into `splits` nearly equal runs, each attended alone.

    -> outs [S, B, H, 512], each normalised by its own softmax, and lses [S, B, H] (natural log, +inf for an empty
    part).
    """
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    options = {"layout": layout, "page_tokens": page_tokens, "softmax_scale": softmax_scale, "dtype": dtype}
    parts = [sparse_mla_decode(q, pool, part, **options) for part in torch.tensor_split(indices, splits, dim=1)]  # type: ignore[arg-type]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def merge_partials(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One softmax from its parts: outs [S, B, H, D], lses [S, B, H] natural log, +inf (or -inf) = that part had no key.

    out = sum_i exp(lse_i - lse) out_i with lse = ln sum_i exp(lse_i); a sink [H] then scales out by sigmoid(lse -
    sink).
    -> (out [B, H, D], lse [B, H]), lse without the sink and +inf where no part had a key.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs [S, B, H, D] with lses [S, B, H], got {tuple(outs.shape)} and {tuple(lses.shape)}")
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    lse = torch.logsumexp(lses, dim=0)
    none = empty.all(dim=0)
    weights = torch.exp(lses - lse.masked_fill(none, 0.0)).masked_fill(empty, 0.0)
    out = (weights[..., None] * outs.masked_fill(empty[..., None], 0.0)).sum(dim=0)
    lse = lse.masked_fill(none, torch.inf)
    return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse


# ---- compressors: many tokens pooled into one entry ------------------------------------------------------------------
# Per channel, a softmax over the scores of a group (plus a learned position bias, `ape`) weighs the projected tokens
# (official V4 script `inference/model.py`; sglang 0.5.23 `kernels/jit/csrc/deepseek_v4/c4_v2.cuh`, `c128_v2.cuh`).
# c4 overlaps: its projections are 2*d wide, and entry j pools eight rows: the first d channels of tokens 4(j-1) … 4j-1
# and the last d channels of tokens 4j … 4j+3; before the first group the overlap rows have score -inf. c128 pools its
# own 128 tokens. The token that completes a group emits the entry; those of an unfinished group wait in the state.
@dataclass(frozen=True)
class CompressorState:
    """What the compressor must remember between two calls: the raw rows of the unfinished group (and of the group
    before, for c4).

    kv, scores [rows, width] without the position bias (sglang's convention; vllm 0.33.0 stores scores with it);
    position: the number of tokens seen so far.
    """

    kv: Tensor
    scores: Tensor
    position: int


def compress_c4(
    kv: Tensor, scores: Tensor, ape: Tensor, state: CompressorState | None = None
) -> tuple[Tensor, CompressorState]:
    """Pool tokens in overlapping groups of four.

    kv, scores [T, 2*d] float (any number of tokens, so also one: a decode step); ape [4, 2*d]; state from the call
    before.
    -> entries [G, d], one for each group completed by these tokens, and the new state. Raises ValueError for other
    shapes.
    """
    return _compress(kv, scores, ape, 4, True, state)


def compress_c128(
    kv: Tensor, scores: Tensor, ape: Tensor, state: CompressorState | None = None
) -> tuple[Tensor, CompressorState]:
    """Pool tokens in groups of 128: kv, scores [T, d], ape [128, d] -> entries [G, d] and the new state."""
    return _compress(kv, scores, ape, 128, False, state)


def _compress(
    kv: Tensor, scores: Tensor, ape: Tensor, ratio: int, overlap: bool, state: CompressorState | None
) -> tuple[Tensor, CompressorState]:
    if kv.ndim != 2 or kv.shape != scores.shape or ape.shape != (ratio, kv.shape[1]) or (overlap and kv.shape[1] % 2):
        raise ValueError(
            f"c{ratio} needs kv and scores [T, {'2*d' if overlap else 'd'}] and ape [{ratio}, same], got "
            f"{tuple(kv.shape)}, {tuple(scores.shape)} and {tuple(ape.shape)}"
        )
    position = 0 if state is None else state.position
    if state is not None:
        kv, scores = torch.cat((state.kv.to(kv), kv)), torch.cat((state.scores.to(scores), scores))
    end = position + len(kv) - (0 if state is None else len(state.kv))
    first = end - len(kv)  # position of the first row at hand
    start = position // ratio * ratio  # of the first group that can complete now
    groups = (end - start) // ratio
    keep_from = max(0, end // ratio * ratio - (ratio if overlap else 0))
    after = CompressorState(kv[keep_from - first :].clone(), scores[keep_from - first :].clone(), end)
    d = kv.shape[1] // 2 if overlap else kv.shape[1]
    if groups <= 0:
        return kv.new_zeros((0, d)), after
    own = slice(start - first, start - first + groups * ratio)
    rows, logits = kv[own].reshape(groups, ratio, -1), scores[own].reshape(groups, ratio, -1) + ape
    if overlap:
        before_kv, before = torch.zeros_like(rows), torch.full_like(logits, -torch.inf)
        before_kv[1:], before[1:] = rows[:-1], logits[:-1]
        if start > 0:
            previous = slice(start - ratio - first, start - first)
            before_kv[0], before[0] = kv[previous], scores[previous] + ape
        rows = torch.cat((before_kv[..., :d], rows[..., d:]), dim=1)
        logits = torch.cat((before[..., :d], logits[..., d:]), dim=1)
    return (torch.softmax(logits, dim=1) * rows).sum(dim=1), after


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight; computed in x's dtype."""
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def rope_frequencies(
    dim: int = 64,
    theta: float = 160_000.0,
    *,
    factor: float = 1.0,
    original: int = 65_536,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Rotary angles per position, float64 [dim / 2]; factor > 1 stretches the slow ones (YaRN, as compressed V4
    layers use it)."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factor == 1.0:
        return frequencies

    def turn(rotations: float) -> float:
        log = torch.log(torch.tensor([original / (rotations * 2 * torch.pi), theta], dtype=torch.float64))
        return float(dim * log[0] / (2 * log[1]))

    low, high = max(int(turn(beta_fast)), 0), min(int(-(-turn(beta_slow) // 1)), dim // 2 - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, *, interleaved: bool = True, last: bool = True) -> Tensor:
    """Rotate the last (or first) 2 * len(frequencies) numbers of x [..., T, dim] by its position.

    interleaved pairs (0,1), (2,3), … (V4); else half against half (V3.2 serving code). The rest of x passes unchanged.
    """
    width = 2 * len(frequencies)
    angle = (positions.to(torch.float64)[:, None] * frequencies).to(x.device)
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    part = x[..., -width:] if last else x[..., :width]
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = part[..., : width // 2], part[..., width // 2 :]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((x[..., :-width], turned), dim=-1) if last else torch.cat((turned, x[..., width:]), dim=-1)


def finish_index_keys(pooled: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """A pooled index key made ready for fp8: RMSNorm, rotation of the last 64 numbers, Hadamard (official V4 script).

    pooled [G, 128]; weight [128]; positions int [G], the first token of each group; frequencies [32] -> [G, 128]. The
    rotation pairs neighbours. sglang 0.5.23 applies the Hadamard transform, vllm 0.33.0 applies it on neither side.
    """
    return hadamard(rotate(rms_norm(pooled, weight), positions, frequencies))


# ---- hyper-connections: how V4 mixes its four residual streams -------------------------------------------------------
# From the streams R [T, 4, hidden] one small projection gives 24 numbers a token: how each stream enters the layer
# (pre), how the layer's output enters each stream (post), and how the streams mix (comb, made doubly stochastic by
# Sinkhorn rounds). Official V4 script `inference/model.py`; vllm 0.33.0 `vllm/model_executor/kernels/mhc/torch.py`. The
# official projection is float32; deployed kernels use tf32, split bf16 or plain bf16: `gemm` measures that difference.
def mhc_project(residual: Tensor, weight: Tensor, *, gemm: str = "float32", eps: float = EPS) -> Tensor:
    """The normalised projection of the flattened streams.

    residual [T, 4, hidden]; weight [M, 4 * hidden] (M 24, or 4 for the output head) -> [T, M] float32 (float64 if
    asked). gemm: "float32"; "float64"; "tf32" (weight cut to 10 mantissa bits, float32 sums); "bfloat16" (both
    operands and the result rounded to bf16, as a bf16 matrix product in torch). Raises ValueError for an unknown
    gemm.
    """
    if gemm not in GEMMS:
        raise ValueError(f"gemm must be one of {', '.join(GEMMS)}, got {gemm!r}")
    dtype = torch.float64 if gemm == "float64" else torch.float32
    x = residual.flatten(1).to(dtype)
    w = weight.to(dtype)
    if gemm == "bfloat16":
        mixed = (x.to(torch.bfloat16) @ w.to(torch.bfloat16).T).to(dtype)
    else:
        if gemm == "tf32":  # round half up on the 13 dropped bits, as the tensor core's input rounding does
            w = ((w.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        mixed = x @ w.T
    return mixed * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)


def sinkhorn(logits: Tensor, *, iterations: int = ITERATIONS, eps: float = EPS) -> Tensor:
    """Row softmax + eps, then columns, then iterations - 1 further (row, column) rounds: [..., 4, 4], columns last.

    Row = last axis, column = sum over the first of the two axes. Column sums end at S / (S + eps); row sums only
    converge to 1.
    """
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mhc_mix(
    mixed: Tensor, scale: Tensor, bias: Tensor, *, iterations: int = ITERATIONS, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The 24 projected numbers as weights: mixed [T, 24], scale [3], bias [24] -> pre [T, 4], post [T, 4], comb [T,
    4, 4].

    pre = sigmoid + eps, post = 2 * sigmoid, comb[i, j] = number 8 + 4i + j through `sinkhorn`.
    """
    n = STREAMS
    pre = torch.sigmoid(mixed[:, :n] * scale[0] + bias[:n]) + eps
    post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + bias[n : 2 * n])
    logits = (mixed[:, 2 * n :] * scale[2] + bias[2 * n :]).reshape(-1, n, n)
    return pre, post, sinkhorn(logits, iterations=iterations, eps=eps)


def mhc_enter(residual: Tensor, pre: Tensor) -> Tensor:
    """What the layer reads: sum_i pre_i R_i, [T, hidden] in the residual's dtype."""
    return (pre[:, :, None] * residual.to(pre.dtype)).sum(dim=1).to(residual.dtype)


def mhc_leave(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams: R'_j = post_j * output + sum_i comb[i, j] R_i, [T, 4, hidden] in the residual's dtype."""
    mixed = torch.einsum("tij,tih->tjh", comb, residual.to(comb.dtype))
    return (post[:, :, None] * output.to(post.dtype)[:, None] + mixed).to(residual.dtype)


def mhc_weights(
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    gemm: str = "float32",
    iterations: int = ITERATIONS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projection and mixing weights in one step: residual [T, 4, hidden] -> pre [T, 4], post [T, 4], comb [T, 4, 4]."""
    return mhc_mix(mhc_project(residual, weight, gemm=gemm), scale, bias, iterations=iterations)


# ---- the expert router -----------------------------------------------------------------------------------------------
# Square root of softplus, and a bias that only selects (official V4 script; vllm 0.33.0
# `router/fused_topk_bias_router.py`). The hash layers before it choose by token id alone and are weighed the same way.
def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logits)), softplus = max(x, 0) + log1p(exp(-|x|)): [T, E] in the logits' dtype (float32 at
    least)."""
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    return torch.sqrt(x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())))


def router_topk(
    logits: Tensor, bias: Tensor, k: int = 6, *, scaling: float = 1.5, scaling_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Pick k experts by score + bias, weigh them by score alone.

    logits [T, E]; bias [E] float32 -> ids int64 [T, k], weights [T, k] summing to `scaling` (1.5 Flash, 2.5 Pro). With
    `scaling_dtype` the normalised weights are rounded to that type and scaled in it, as some fused kernels do.
    """
    scores = router_scores(logits)
    ids = torch.topk(scores + bias, k, dim=-1).indices
    picked = scores.gather(-1, ids)
    weights = picked / picked.sum(dim=-1, keepdim=True)
    if scaling_dtype is None:
        return ids, weights * scaling
    return ids, (weights.to(scaling_dtype) * torch.tensor(scaling, dtype=scaling_dtype)).to(scores.dtype)
