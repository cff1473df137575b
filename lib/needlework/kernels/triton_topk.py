"""Exact top-k with page-table translation in Triton: twin of `reference.select_topk`, for k <= 2,048.

A radix select, one bit a round, over keys that order like the scores: a row is cut into chunks that fit in registers,
each chunk names its k best positions, and the same kernel then selects among those, until one chunk is left. Nothing is
approximated, so crowded bins, ties and -inf cost no accuracy; among equal scores the smaller position wins, so that two
runs give the same bits. Every launch depends on shapes alone (CUDA graphs replay with changed lengths).
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.kernels.triton_runtime import INTERPRETED, check_device, multiprocessors

import triton  # isort: skip  # after the runtime, which chooses between compiler and interpreter
import triton.language as tl  # isort: skip

MAX_K = 2048
MAX_CHUNK = 16384  # counts of a chunk must fit in 15 bits, twice, in one int32 scan


def _select(scores, lengths, candidates, table, out, width, score_stride, column_stride, table_stride, out_stride, k,
            room, CHUNK: tl.constexpr, ROOM: tl.constexpr, LISTED: tl.constexpr, LAST: tl.constexpr,
            TRANSLATE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """One program selects from one chunk of one row: at least its k best (where it has so many), at most `room`.

    LISTED: the chunk is a piece of a candidate list int32 [rows, width] (-1 = none) rather than of the row itself.
    LAST: the result is the row's, with room = k, else a list for the next round. ROOM: a power of two, >= room.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.arange(0, CHUNK)
    rank = tl.arange(0, ROOM)
    length = tl.load(lengths + row)
    out_row = out + row * out_stride + chunk * room
    if LISTED:
        entry = chunk * CHUNK + place
        position = tl.load(candidates + row * width + entry, mask=entry < width, other=-1)
        inside = position >= 0
    else:
        position = chunk * CHUNK + place
        inside = position < length
    count = tl.sum(inside.to(tl.int32), axis=0)
    # a row of at most k keys is 0, 1, ... in order, whatever its scores
    if LAST and length <= k:
        picked = tl.where(rank < length, rank, -1)
        if TRANSLATE:
            picked = _slot(picked, table + row * table_stride, PAGE)
        tl.store(out_row + rank, picked, mask=rank < k)
    elif length > k:
        score = tl.load(scores + row * score_stride + position * column_stride, mask=inside, other=0.0)
        bits = score.to(tl.int32, bitcast=True)
        # an unsigned key that orders like the score; NaN is the largest, as in torch.topk; 0 marks "not a key"
        key = tl.where(bits < 0, ~bits, bits | -2147483648)
        key = tl.where(score != score, -1, key).to(tl.uint32, bitcast=True)
        key = tl.where(inside, key, 0)
        # the largest threshold that at least k keys reach, bit by bit; done once those that reach it fit
        threshold = tl.full((), 0, tl.uint32)
        reached = count
        bit = tl.full((), 31, tl.int32)
        while (bit >= 0) & (reached > room):
            raised = threshold | (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))
            above = tl.sum((key >= raised).to(tl.int32), axis=0)
            threshold = tl.where(above >= k, raised, threshold)
            reached = tl.where(above >= k, above, reached)
            bit -= 1
        # the keys above the threshold, then as many of those at it as there is room for
        over = inside & (key > threshold)
        tied = inside & (key == threshold)
        both = tl.cumsum(over.to(tl.int32) | (tied.to(tl.int32) << 16), axis=0)
        above = tl.sum(over.to(tl.int32), axis=0)
        slot = tl.where(over, (both & 0xFFFF) - 1, above + (both >> 16) - 1)
        chosen = over | (tied & (slot < room))
        if TRANSLATE:
            position = _slot(tl.where(chosen, position, -1), table + row * table_stride, PAGE)
        tl.store(out_row + slot, position, mask=chosen)
        if not LAST:
            tl.store(out_row + rank, tl.full((ROOM,), -1, tl.int32), mask=(rank >= reached) & (rank < room))


_select_kernels = (triton.jit(_select), triton.jit(_select, do_not_specialize=["column_stride"]))


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
    row with at most k keys gives 0, 1, ... length-1 in order. Columns at or past the length are never read. `config`
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
    listed = logits  # stands in for the candidate list, which the first round does not read
    while rows:
        chosen = dict(config or topk_config(rows, width, k, multiprocessors(logits.device)))
        chunk = min(chosen.pop("CHUNK"), max(16, triton.next_power_of_2(width)))
        chunks = triton.cdiv(width, chunk) or 1
        last = chunks == 1
        room = k * chosen.pop("ROOM", 1) if not last else k
        kernel = _select_kernels[chosen.pop("OPAQUE", 0)]
        found = out if last else torch.empty((rows, chunks * room), dtype=torch.int32, device=logits.device)
        kernel[(rows, chunks)](
            logits, lengths, listed, table, found, width, logits.stride(0), logits.stride(1), table.stride(0),
            found.stride(0), k, room, CHUNK=chunk, ROOM=triton.next_power_of_2(room), LISTED=listed is not logits,
            LAST=last, TRANSLATE=last and page_table is not None, PAGE=page_tokens, **chosen,
        )  # fmt: skip
        if last:
            break
        listed, width = found, chunks * room
    return out


def topk_config(rows: int, width: int, k: int, processors: int) -> dict[str, int]:
    """Chunk and warps for one round over `rows` x `width`; a chunk holds at least 4 k so that lists shrink."""
    if INTERPRETED:
        return {"CHUNK": MAX_CHUNK}
    return {"CHUNK": max(8192, min(MAX_CHUNK, 4 * triton.next_power_of_2(k))), "num_warps": 16}
