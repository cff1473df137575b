"""Sparse MLA decode in Triton, split over the index list: twin of `reference.sparse_mla_decode`, `merge_partials`.

Entries are read from their pages by slot and dequantised in registers. V4: 448 e4m3 numbers in seven tiles of 64 with
an exponent byte each (in the page's footer), then 64 bf16 numbers; all 512 are key and value. V3.2: 512 e4m3 numbers in
four tiles of 128 with a float32 scale each, then 64 bf16 numbers that only the score uses (FlashMLA 9241ae3 README).
On a GPU products are bf16 with float32 sums, as in FlashMLA; in the interpreter they are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.kernels.triton.runtime import (
    INTERPRETED,
    LAUNCH,
    check_device,
    check_pool,
    multiprocessors,
    shared_bytes,
)
from needlework.pages import LAYOUTS

import triton  # isort: skip  # after the runtime, which chooses between compiler and interpreter
import triton.language as tl  # isort: skip

VALUE_DIM = 512
QUERY_DIM = {"v4-mla-fp8": 512, "v32-mla-fp8": 576}
LOG2_E = 1.4426950408889634


@triton.jit
def _quantised(pool, entry, scale_at, live, V4: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr,
               WORK: tl.constexpr):  # fmt: skip
    """TILES tiles of the entries from tile FIRST on, dequantised: [BLOCK, TILES * tile]. entry and scale_at are byte
    offsets in the pool."""
    TILE: tl.constexpr = 64 if V4 else 128
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, TILE)
    within = (FIRST + tile)[:, None] * TILE + lane[None, :]
    code = tl.load(pool + entry[:, None, None] + within[None, :, :], mask=live[:, None, None], other=0)
    if V4:
        # four exponent bytes in one word: 2^(byte - 127) is the float32 whose exponent field is the byte
        words = pool.to(tl.pointer_type(tl.int32))
        word = tl.load(words + scale_at // 4 + FIRST // 4, mask=live, other=0)
        byte = (word[:, None] >> ((FIRST % 4 + tile) * 8)[None, :]) & 0xFF
        scale = (byte << 23).to(tl.float32, bitcast=True)
        value = code.to(tl.float8e4nv, bitcast=True).to(WORK) * scale.to(WORK)[:, :, None]  # exact in bf16
    else:
        floats = pool.to(tl.pointer_type(tl.float32))
        scale = tl.load(floats + (scale_at // 4)[:, None] + (FIRST + tile)[None, :], mask=live[:, None], other=0.0)
        value = (code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]).to(WORK)
    return tl.reshape(value, (live.shape[0], TILES * TILE))


@triton.jit
def _attend(q, pool, indices, limits, sink, out, lse, row, split, head, heads, entries, rows, page_stride, index_stride,
            scale_log2, LOW: tl.constexpr, HIGH: tl.constexpr, V4: tl.constexpr, PAGE: tl.constexpr,
            HEADS: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr, SINK: tl.constexpr, WORK: tl.constexpr,
            STAGES: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Attend HEADS heads of one row to one split of its index list, for the low and/or high 256 output dims.

    An entry is dequantised in parts of 256, 128, 64 and 64 numbers (V4) or 256, 256 and 64 (V3.2)."""
    real = (head < heads)[:, None]
    QUERY: tl.constexpr = 512 if V4 else 576
    ROPE_AT: tl.constexpr = 448 if V4 else 512
    ROW: tl.constexpr = 576 if V4 else 656
    WIDE: tl.constexpr = 128 if V4 else 256
    first = q + (row * heads + head)[:, None] * QUERY
    q0 = tl.load(first + tl.arange(0, 256)[None, :], mask=real, other=0.0).to(WORK)
    q1 = tl.load(first + 256 + tl.arange(0, WIDE)[None, :], mask=real, other=0.0).to(WORK)
    q3 = tl.load(first + ROPE_AT + tl.arange(0, 64)[None, :], mask=real, other=0.0).to(WORK)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if LOW:
        sum0 = tl.zeros((HEADS, 256), tl.float32)
    if HIGH:
        sum1 = tl.zeros((HEADS, WIDE), tl.float32)
    if V4:
        q2 = tl.load(first + 384 + tl.arange(0, 64)[None, :], mask=real, other=0.0).to(WORK)
        if HIGH:
            sum2 = tl.zeros((HEADS, 64), tl.float32)
            sum3 = tl.zeros((HEADS, 64), tl.float32)
    limit = entries
    if LIMITED:
        limit = tl.minimum(tl.load(limits + row), entries)
    length = tl.cdiv(tl.cdiv(entries, BLOCK), tl.num_programs(1)) * BLOCK
    start = split * length
    stop = tl.minimum(start + length, limit)
    listed = indices + row * index_stride
    if AHEAD:
        column = start + tl.arange(0, BLOCK)
        following = tl.load(listed + column, mask=column < stop, other=-1)
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        if AHEAD:  # slots are read one block ahead, so that the entries wait for one load only
            slot = following
            column = at + BLOCK + tl.arange(0, BLOCK)
            following = tl.load(listed + column, mask=column < stop, other=-1)
        else:
            column = at + tl.arange(0, BLOCK)
            slot = tl.load(listed + column, mask=column < stop, other=-1)
        live = slot >= 0
        slot = tl.where(live, slot, 0)
        page = (slot // PAGE).to(tl.int64) * page_stride
        entry = page + (slot % PAGE) * ROW
        scale_at = (page + PAGE * ROW + (slot % PAGE) * 8) if V4 else (entry + 512)
        halves = (pool + (ROPE_AT if V4 else 528)).to(tl.pointer_type(tl.bfloat16)) + (entry // 2)[:, None]
        if AHEAD:
            k3 = tl.load(halves + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0).to(WORK)
        k0 = _quantised(pool, entry, scale_at, live, V4, 0, 4 if V4 else 2, WORK)
        k1 = _quantised(pool, entry, scale_at, live, V4, 4 if V4 else 2, 2, WORK)
        if not AHEAD:
            k3 = tl.load(halves + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0).to(WORK)
        scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        scores = tl.dot(q3, tl.trans(k3), scores, input_precision="ieee")
        if V4:
            k2 = _quantised(pool, entry, scale_at, live, V4, 6, 1, WORK)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale_log2, float("-inf"))
        raised = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(raised == float("-inf"), 0.0, raised)  # no entry so far: avoid inf - inf
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        top = raised
        p = p.to(WORK)
        if LOW:
            sum0 = tl.dot(p, k0, sum0 * shrink[:, None], input_precision="ieee")
        if HIGH:
            sum1 = tl.dot(p, k1, sum1 * shrink[:, None], input_precision="ieee")
            if V4:
                sum2 = tl.dot(p, k2, sum2 * shrink[:, None], input_precision="ieee")
                sum3 = tl.dot(p, k3, sum3 * shrink[:, None], input_precision="ieee")
    none = total == 0.0
    norm = tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))
    natural = tl.where(none, float("inf"), (top + tl.log2(tl.where(none, 1.0, total))) * 0.6931471805599453)
    if SINK:
        level = tl.load(sink + head, mask=head < heads, other=float("-inf"))
        norm = norm / (1.0 + tl.exp(level - tl.where(none, 0.0, natural)))
    place = (split * rows + row) * heads + head
    mine = out + place[:, None] * 512
    if LOW:
        tl.store(lse + place, natural, mask=head < heads)
        tl.store(mine + tl.arange(0, 256)[None, :], sum0 * norm[:, None], mask=real)
    if HIGH:
        tl.store(mine + 256 + tl.arange(0, WIDE)[None, :], sum1 * norm[:, None], mask=real)
        if V4:
            tl.store(mine + 384 + tl.arange(0, 64)[None, :], sum2 * norm[:, None], mask=real)
            tl.store(mine + 448 + tl.arange(0, 64)[None, :], sum3 * norm[:, None], mask=real)


@triton.jit
def _decode_kernel(q, pool, indices, limits, sink, out, lse, heads, entries, page_stride, index_stride, scale_log2,
                   V4: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
                   HALVES: tl.constexpr, LIMITED: tl.constexpr, SINK: tl.constexpr,
                   WORK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid (rows, splits, head blocks * HALVES). out [S, B, H, 512] and lse [S, B, H] hold a softmax of each
    split alone; SINK scales a lone split's output. HALVES = 2 gives each half of the output dims a program of its own,
    so that the sums of 64 heads fit the registers of four warps."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    split = tl.program_id(1)
    head = tl.program_id(2) // HALVES * HEADS + tl.arange(0, HEADS)
    if HALVES == 1:
        _attend(q, pool, indices, limits, sink, out, lse, row, split, head, heads, entries, rows, page_stride,
                index_stride, scale_log2, True, True, V4, PAGE, HEADS, BLOCK, LIMITED, SINK, WORK, STAGES,
                AHEAD)  # fmt: skip
    elif tl.program_id(2) % 2 == 0:
        _attend(q, pool, indices, limits, sink, out, lse, row, split, head, heads, entries, rows, page_stride,
                index_stride, scale_log2, True, False, V4, PAGE, HEADS, BLOCK, LIMITED, SINK, WORK, STAGES,
                AHEAD)  # fmt: skip
    else:
        _attend(q, pool, indices, limits, sink, out, lse, row, split, head, heads, entries, rows, page_stride,
                index_stride, scale_log2, False, True, V4, PAGE, HEADS, BLOCK, LIMITED, SINK, WORK, STAGES,
                AHEAD)  # fmt: skip


@triton.jit
def _part(outs, lses, i, row, rows, dim, base, column, mine):
    """One part of some rows, weighted; nothing where it is empty."""
    weight = tl.load(lses + i * rows + row, mask=mine, other=float("-inf"))
    used = mine & (tl.abs(weight) != float("inf"))
    weight = tl.where(used, tl.exp(weight - base), 0.0)
    address = outs + (i * rows + row).to(tl.int64)[:, None] * dim + column[None, :]
    return weight[:, None] * tl.load(address, mask=used[:, None] & (column < dim)[None, :], other=0.0)


@triton.jit
def _merge_kernel(outs, lses, sink, out, lse, parts, rows, heads, dim, SINK: tl.constexpr, PARTS: tl.constexpr,
                  DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program merges BLOCK (request, head) rows: rows = B * H; outs [parts, rows, dim], lses [parts, rows]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = row < rows
    part = tl.arange(0, PARTS)
    column = tl.arange(0, DIM)
    where = (part < parts)[:, None] & mine[None, :]
    level = tl.load(lses + part[:, None] * rows + row[None, :], mask=where, other=float("-inf"))
    level = tl.where(level == float("inf"), float("-inf"), level)  # an empty part, in either convention
    top = tl.max(level, axis=0)
    none = top == float("-inf")
    base = tl.where(none, 0.0, top)
    total = tl.sum(tl.exp(level - base[None, :]), axis=0)
    natural = tl.where(none, float("inf"), base + tl.log(tl.where(none, 1.0, total)))
    norm = 1.0 / tl.where(none, 1.0, total)
    if SINK:
        norm = norm / (1.0 + tl.exp(tl.load(sink + row % heads, mask=mine, other=0.0) - tl.where(none, 0.0, natural)))
    merged = tl.zeros((BLOCK, DIM), tl.float32)
    if PARTS <= 8:  # all parts are asked for before the first is used
        for i in tl.static_range(PARTS):
            merged += _part(outs, lses, i, row, rows, dim, base, column, mine & (row * 0 + i < parts))
    else:
        for i in range(parts):
            merged += _part(outs, lses, i, row, rows, dim, base, column, mine)
    tl.store(lse + row, natural, mask=mine)
    address = out + row.to(tl.int64)[:, None] * dim + column[None, :]
    tl.store(address, merged * norm[:, None], mask=mine[:, None] & (column < dim)[None, :])


def merge_partials(
    outs: Tensor, lses: Tensor, sink: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """One softmax from its parts: outs [S, B, H, D] and lses [S, B, H] float32 (natural log; an infinite lse marks an
    empty part, whose outs are not read); sink float32 [H] or None.

    -> (out [B, H, D] in `dtype`, lse [B, H] float32), lse without the sink, +inf where no part had an entry (out 0).
    Raises ValueError for shapes or devices that do not fit.
    """
    if outs.ndim != 4 or outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs [S, B, H, D] with lses [S, B, H], got {tuple(outs.shape)} and {tuple(lses.shape)}")
    check_device(outs, lses, sink)
    parts, batch, heads, dim = outs.shape
    rows, width = batch * heads, triton.next_power_of_2(dim)
    out = torch.empty((batch, heads, dim), dtype=dtype, device=outs.device)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=outs.device)
    chosen = {"BLOCK": 4, "num_warps": 8} if rows > 1024 else {"BLOCK": 1, "num_warps": 4}
    chosen = {"BLOCK": 64} if INTERPRETED else chosen
    if rows:
        _merge_kernel[(triton.cdiv(rows, chosen["BLOCK"]),)](
            outs.contiguous(), lses.contiguous(), lses if sink is None else sink.contiguous(), out, lse, parts, rows,
            heads, dim, SINK=sink is not None, PARTS=triton.next_power_of_2(parts), DIM=width,
            **chosen, **LAUNCH,
        )  # fmt: skip
    return out, lse


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
    config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One decode step over selected entries of one or two paged caches.

    q [B, H, D], D 512 (v4-mla-fp8) or 576 (v32-mla-fp8); pool uint8 [pages, page bytes]; indices int32 [B, K] slots,
    -1 = hole; sink float32 [H]; topk_length int32 [B]: only the first n indices count. -> out [B, H, 512] in `dtype`,
    lse [B, H] float32: natural log, without the sink, +inf where a row has no entry (its out is 0). `config` overrides
    the tuned BLOCK, SPLITS, HALVES, STAGES, AHEAD, num_warps. Raises ValueError for other layouts, shapes or devices.
    """
    caches = [(pool, indices, layout, page_tokens, topk_length)]
    if (extra_pool is None) != (extra_indices is None):
        raise ValueError("extra_pool and extra_indices go together")
    if extra_pool is not None and extra_indices is not None:
        caches.append((extra_pool, extra_indices, extra_layout or layout, extra_page_tokens, extra_topk_length))
    check_device(q, sink, *(cache[i] for cache in caches for i in (0, 1, 4)))  # type: ignore[arg-type]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    q = q.contiguous()
    batch, heads, _ = q.shape
    plans = [_plan(q, *cache[:4], config) for cache in caches]
    splits = sum(plan["SPLITS"] for plan in plans)
    lone = splits == 1
    outs = torch.empty((splits, batch, heads, VALUE_DIM), dtype=dtype if lone else torch.float32, device=q.device)
    lses = torch.empty((splits, batch, heads), dtype=torch.float32, device=q.device)
    at = 0
    for (cache, slots, name, tokens, limit), plan in zip(caches, plans, strict=True):
        parts = plan.pop("SPLITS")
        block_heads = 64 if heads > 32 else max(16, triton.next_power_of_2(heads))
        slots = slots if slots.stride(1) == 1 else slots.contiguous()
        if batch:
            _decode_kernel[(batch, parts, triton.cdiv(heads, block_heads) * plan["HALVES"])](
                q, cache, slots, limit if limit is not None else slots, sink if sink is not None else lses,
                outs[at:], lses[at:], heads, slots.shape[1], cache.stride(0), slots.stride(0), scale * LOG2_E,
                V4=name == "v4-mla-fp8", PAGE=tokens, HEADS=block_heads, LIMITED=limit is not None,
                SINK=lone and sink is not None, WORK=tl.float32 if INTERPRETED else tl.bfloat16, **LAUNCH, **plan,
            )  # fmt: skip
        at += parts
    return (outs[0], lses[0]) if lone else merge_partials(outs, lses, sink, dtype=dtype)


def _plan(
    q: Tensor, pool: Tensor, indices: Tensor, layout: str, page_tokens: int, config: dict[str, int] | None
) -> dict[str, int]:
    """Check one cache against the query, and choose how to launch over it."""
    if layout not in QUERY_DIM:
        raise ValueError(f"this kernel reads {' and '.join(QUERY_DIM)} pages, not {str(layout)[:60]!r}")
    width = QUERY_DIM[layout]
    if q.ndim != 3 or q.shape[-1] != width or indices.ndim != 2 or len(indices) != len(q):
        raise ValueError(
            f"{layout} needs q [B, H, {width}] and indices [B, K], got {tuple(q.shape)} and {tuple(indices.shape)}"
        )
    check_pool(pool, LAYOUTS[layout].page_bytes(page_tokens), 16)
    programs = q.shape[0] * triton.cdiv(q.shape[1], 64)
    return {"AHEAD": False} | (config or decode_config(programs, indices.shape[1], q.device, layout))


def decode_config(programs: int, entries: int, device: torch.device, layout: str = "v4-mla-fp8") -> dict[str, int]:
    """Block and split counts for `programs` (rows x blocks of 64 heads) over `entries` indices each."""
    if INTERPRETED:
        return {"BLOCK": 128, "SPLITS": 1 if entries <= 128 else 2, "HALVES": 1, "STAGES": 1}
    processors = multiprocessors(device)
    if shared_bytes(device) < 200_000:  # not the data-centre parts the sizes below were measured on
        splits = max(1, min(triton.cdiv(entries, 64), processors // programs))
        return {"BLOCK": 16, "SPLITS": splits, "HALVES": 2, "STAGES": 1, "num_warps": 4}
    if layout == "v4-mla-fp8" and programs * 8 <= processors:  # few rows; V3.2 keeps its wide blocks there
        splits = max(1, min(triton.cdiv(entries, 64), processors // (2 * programs)))
        return {"BLOCK": 64, "SPLITS": splits, "HALVES": 2, "STAGES": 2, "num_warps": 4}
    splits = max(1, min(triton.cdiv(entries, 128), processors // programs))
    if layout != "v4-mla-fp8" and programs * 8 > processors:
        return {"BLOCK": 64, "SPLITS": splits, "HALVES": 1, "STAGES": 2, "AHEAD": True, "num_warps": 8}
    return {"BLOCK": 128, "SPLITS": splits, "HALVES": 1, "STAGES": 1, "num_warps": 8}
