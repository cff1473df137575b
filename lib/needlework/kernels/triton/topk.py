"""Exact top-k with page-table translation in Triton: twin of `reference.select_topk`, for k <= 2,048.

A row is cut into chunks that fit in registers, and each chunk hands on at most `room` >= k candidates that surely hold
its k best; when one chunk is left, the k best of its candidates are the result. A lower bound for the k-th score comes
from the largest scores of `room` groups of the chunk: at least k scores reach the k-th largest of those. It leaves few
candidates on ordinary rows; where it leaves too many (ties, crowded bins) a search over all keys of the chunk goes on
to the exact k-th score. Nothing is approximated, and two runs give the same bits. Every launch depends on shapes
alone, so a CUDA graph replays with changed lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.kernels.triton.runtime import INTERPRETED, LAUNCH, check_device

import triton  # isort: skip  # after the runtime, which chooses between compiler and interpreter
import triton.language as tl  # isort: skip

MAX_K = 2048
MAX_CHUNK = 16384  # counts of a chunk must fit in 15 bits, twice, in one int32 scan


@triton.jit
def _narrow(keys, low, high, reached, k, enough):
    """Raise `low` (which `reached` >= k keys reach) towards the k-th largest key, which is at most `high`, until at
    most `enough` keys reach it or it is that key: in thirds, since one sum counts for two thresholds. -> low, reached
    """
    while (low < high) & (reached > enough):
        third = (high - low) // 3
        lower, upper = low + third + 1, high - third
        both = tl.sum((keys >= lower).to(tl.int32) | ((keys >= upper).to(tl.int32) << 16))
        lower_reached, upper_reached = both & 0xFFFF, both >> 16
        high = tl.where(upper_reached >= k, high, tl.where(lower_reached >= k, upper - 1, lower - 1))
        low = tl.where(upper_reached >= k, upper, tl.where(lower_reached >= k, lower, low))
        reached = tl.where(upper_reached >= k, upper_reached, tl.where(lower_reached >= k, lower_reached, reached))
    return low, reached


@triton.jit(do_not_specialize=["column_stride", "unit"])
def _select_kernel(scores, lengths, from_keys, from_positions, to_keys, to_positions, table, out, width, score_stride,
                   column_stride, unit, table_stride, k, DEPTH: tl.constexpr, ROOM: tl.constexpr,
                   LISTED: tl.constexpr, LAST: tl.constexpr, TRANSLATE: tl.constexpr, PAGE: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """One program narrows a chunk of DEPTH x ROOM entries of one row to at most ROOM candidates, and, if it is the
    LAST round, picks the k best of them.

    LISTED: the entries are keys and positions [rows, width] of an earlier round (key 0 = none), not the scores. `unit`
    is 1, which the compiler must not know: for a known stride it lays entries out for wide loads, which the masks rule
    out anyway, and reshuffles all of them before each scattered store.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    length = tl.load(lengths + row)
    rank = tl.arange(0, ROOM)
    start = chunk * (DEPTH * ROOM)
    place = start + tl.arange(0, DEPTH)[None, :] * ROOM + rank[:, None]
    if not LISTED:
        # a row of one chunk is read whole, past its length too (and not used there), before the length is known
        end = width if LAST else length
        score = tl.load(scores + row * score_stride + place * column_stride, mask=place < end, other=0.0)
    # a row of at most k keys is 0, 1, ... in order, whatever its scores
    if LAST and length <= k:
        picked = tl.where(rank < length, rank, -1)
        if TRANSLATE:
            picked = _slot(picked, table + row * table_stride, PAGE)
        tl.store(out + row * k + rank, picked, mask=rank < k)
    elif length > k:
        if LISTED:
            key = tl.load(from_keys + row * width + place * unit, mask=place < width, other=0).to(
                tl.uint32, bitcast=True
            )
            position = tl.load(from_positions + row * width + place * unit, mask=place < width, other=0)
            reached = tl.sum((key > 0).to(tl.int32))
        else:
            position = place
            bits = score.to(tl.int32, bitcast=True)
            # an unsigned key that orders like the score; NaN is the largest, as in torch.topk; 0 marks "not a key"
            bits = tl.where(bits < 0, ~bits, bits | -2147483648)
            reached = tl.maximum(tl.minimum(length - start, DEPTH * ROOM), 0)
            key = tl.where(place < length, tl.where(score != score, -1, bits), 0).to(tl.uint32, bitcast=True)
        best = tl.max(key, axis=1)
        high = tl.max(best, axis=0)
        low = tl.full((), 1, tl.uint32)
        if reached > ROOM:
            # the groups are strided, so that a run of large scores spreads over many of them
            filled = tl.sum((best > 0).to(tl.int32)) if LISTED else tl.minimum(reached, ROOM)
            if filled >= k:
                least = tl.min(tl.where(best == 0, high, best), axis=0)
                low, filled = _narrow(best, least, high, filled, k, k + k // 8)
                reached = tl.sum((key >= low).to(tl.int32))
            low, reached = _narrow(key, low, high, reached, k, ROOM)
        # the keys above the bound, then as many of those at it as there is room for
        over = (key > low).to(tl.int32)
        both = over | ((key == low).to(tl.int32) << 16)
        group = tl.sum(both, axis=1)
        before = tl.cumsum(group, axis=0) - group
        both = tl.cumsum(both, axis=1) + before[:, None]
        above = tl.sum(group, axis=0) & 0xFFFF
        slot = tl.where(over != 0, (both & 0xFFFF) - 1, above + (both >> 16) - 1)
        chosen = (key >= low) & (slot < ROOM)
        mine = (row * tl.num_programs(1) + chunk) * ROOM
        tl.store(to_keys + mine + slot, key.to(tl.int32, bitcast=True), mask=chosen)
        tl.store(to_positions + mine + slot, position, mask=chosen)
        if LAST:
            tl.debug_barrier()  # the candidates come back to other threads of this program than wrote them
            some = rank < reached
            key = tl.load(to_keys + mine + rank * unit, mask=some, other=0).to(tl.uint32, bitcast=True)
            position = tl.load(to_positions + mine + rank * unit, mask=some, other=0)
            low, reached = _narrow(key, low, high, tl.minimum(reached, ROOM), k, k)
            over = (key > low).to(tl.int32)
            both = tl.cumsum(over | ((key == low).to(tl.int32) << 16), axis=0)
            slot = tl.where(over != 0, (both & 0xFFFF) - 1, tl.sum(over, axis=0) + (both >> 16) - 1)
            chosen = (key >= low) & (slot < k)
            if TRANSLATE:
                position = _slot(tl.where(chosen, position, -1), table + row * table_stride, PAGE)
            tl.store(out + row * k + slot, position, mask=chosen)
        else:
            tl.store(to_keys + mine + rank, tl.zeros((ROOM,), tl.int32), mask=rank >= reached)


@triton.jit
def _slot(position, row_table, PAGE: tl.constexpr):
    there = position >= 0
    page = tl.load(row_table + tl.where(there, position, 0) // PAGE, mask=there, other=-1)
    return tl.where(page >= 0, page * PAGE + position % PAGE, -1)


def select_topk(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    page_table: Tensor | None = None,
    *,
    page_tokens: int = 64,
    config: dict[str, int] | None = None,
) -> Tensor:
    """The k best of the first lengths[b] logits of each row, as positions, or as slots where a page table is given.

    logits float32 [B, L]; lengths int32 [B]; page_table int32 [B, max_pages] -> int32 [B, k], unsorted, -1 padded; a
    row with at most k keys gives 0, 1, ... length-1 in order. Columns at or past the length are never used. `config`
    overrides the tuned CHUNK and num_warps. Raises ValueError for k over 2,048, shapes or devices that do not fit.
    """
    if logits.ndim != 2 or lengths.shape != logits.shape[:1]:
        raise ValueError(f"logits [B, L] with lengths [B], got {tuple(logits.shape)} and {tuple(lengths.shape)}")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must lie in 1 to {MAX_K}, got {k}")
    if page_table is not None and (page_table.ndim != 2 or len(page_table) != len(logits)):
        raise ValueError(f"a page table is [B, max_pages], got {tuple(page_table.shape)} for {len(logits)} rows")
    check_device(logits, lengths, page_table)
    lengths = lengths.to(torch.int32).contiguous()
    table = lengths if page_table is None else page_table.contiguous()
    rows, width = logits.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    room = max(16, 2 * triton.next_power_of_2(k))
    keys = positions = lengths  # stand in for the candidates, which the first round does not read
    while rows:
        chosen = dict(config or topk_config(rows, width))
        depth = max(2, min(chosen.pop("CHUNK"), triton.next_power_of_2(width)) // room)
        chunks = triton.cdiv(width, depth * room) or 1
        last = chunks == 1
        found = torch.empty((2, rows, chunks * room), dtype=torch.int32, device=logits.device)
        _select_kernel[(rows, chunks)](
            logits, lengths, keys, positions, found[0], found[1], table, out, width, logits.stride(0), logits.stride(1),
            1, table.stride(0), k, DEPTH=depth, ROOM=room, LISTED=keys is not lengths, LAST=last,
            TRANSLATE=last and page_table is not None, PAGE=page_tokens, **LAUNCH, **chosen,
        )  # fmt: skip
        if last:
            break
        (keys, positions), width = found, chunks * room
    return out


def topk_config(rows: int, width: int) -> dict[str, int]:
    """Chunk and warps, as measured on an H200 (benchmarks/kernels.py --sweep): small chunks where one holds the row, or
    where few long rows would leave most multiprocessors idle."""
    if INTERPRETED:
        return {"CHUNK": MAX_CHUNK}
    if width <= 8192 or (rows <= 4 and width > MAX_CHUNK):
        return {"CHUNK": 8192, "num_warps": 8}
    return {"CHUNK": MAX_CHUNK, "num_warps": 16}
