"""Index keys and logits in Triton: twins of `reference.store_index_keys` and `reference.indexer_logits`.

A page of P index keys is P * 128 bytes of e4m3 codes, then P float32 scales (sglang 0.5.23
kernels/ops/kvcache/dsa_index_k_cache.py). Page offsets are computed in 64 bits: a pool may pass 2^31 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.kernels.triton.runtime import INTERPRETED, LAUNCH, check_device, check_pool, multiprocessors

import triton  # isort: skip  # after the runtime, which chooses between compiler and interpreter
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

DIM = 128


@triton.jit
def _e4m3_code(x):
    """Bits of the e4m3fn code nearest to float32 x, |x| <= 448, ties to even: the same integers on every backend."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # normal: keep 3 of 23 mantissa bits, exponent bias 127 -> 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are multiples of 2^-9; adding 2^23 rounds the quotient to an integer
    steps = (size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0x3C800000, steps, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store_kernel(pool, slots, keys, count, page_stride, key_stride, PAGE: tl.constexpr, DIM: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)
    live = slot >= 0
    key = tl.load(keys + row.to(tl.int64)[:, None] * key_stride + dim[None, :], mask=live[:, None], other=0.0)
    key = key.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(key), axis=1), 1e-4), tl.full((BLOCK,), 448.0, tl.float32))
    scaled = key * tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    page = pool + tl.where(live, slot, 0) // PAGE * page_stride
    offset = tl.where(live, slot, 0) % PAGE
    tl.store(page[:, None] + offset[:, None] * DIM + dim[None, :], _e4m3_code(scaled), mask=live[:, None])
    tl.store((page + PAGE * DIM + offset * 4).to(tl.pointer_type(tl.float32)), scale, mask=live)


def store_index_keys(pool: Tensor, slots: Tensor, keys: Tensor, page_tokens: int = 64) -> None:
    """Quantise keys [N, 128] (float32 or bfloat16) and write codes and scales at slots [N] of `pool`, in place.

    pool uint8 [pages, page bytes]; slot = page * page_tokens + offset, -1 is skipped; scale = max(amax, 1e-4) / 448.
    The bytes equal those of `reference.store_index_keys`. Raises ValueError for shapes or devices that do not fit.
    """
    if keys.ndim != 2 or keys.shape[1] != DIM or slots.shape != keys.shape[:1]:
        raise ValueError(f"keys [N, {DIM}] need slots [N], got {tuple(keys.shape)} and {tuple(slots.shape)}")
    check_device(pool, slots, keys)
    check_pool(pool, page_tokens * (DIM + 4), 4)
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    block = 256 if INTERPRETED else 16
    if len(keys):
        _store_kernel[(triton.cdiv(len(keys), block),)](
            pool, slots.contiguous(), keys, len(keys), pool.stride(0), keys.stride(0),
            PAGE=page_tokens, DIM=DIM, BLOCK=block,
        )  # fmt: skip


@triton.jit(do_not_specialize=["steps"])
def _logits_kernel(pool, q, weights, table, lengths, out, rows_per_request, width, page_stride, table_stride, steps,
                   HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                   BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program scores `steps` blocks of BLOCK keys for one query row. ROWS = HEADS padded to a size the matrix unit
    takes. The loop ends at the row's length; the rest of the program's columns become -inf."""
    if PDL:  # let the next kernel start its launch while this one runs; it waits in its turn
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * steps * BLOCK
    last = tl.minimum(first + steps * BLOCK, width)
    ids = table + (row // rows_per_request) * table_stride
    out_row = out + row * width
    block = tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    head = tl.arange(0, ROWS)
    # page ids are read one block ahead and whatever the length, so that the keys wait for one load only
    page = tl.load(ids + (first + block) // PAGE, mask=first + block < width, other=-1)
    query = tl.load(q + row * HEADS * DIM + head[None, :] * DIM + dim[:, None], mask=head[None, :] < HEADS, other=0)
    if query.dtype == tl.uint8:
        query = query.to(tl.float8e4nv, bitcast=True)
    weight = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
    length = tl.load(lengths + row)
    stop = tl.maximum(tl.minimum(last, length), first)
    codes = pool.to(tl.pointer_type(tl.float8e4nv))
    scales = (pool + PAGE * DIM).to(tl.pointer_type(tl.float32))
    for start in tl.range(first, stop, BLOCK, num_stages=STAGES):
        column = start + block
        live = (column < length) & (page >= 0)
        base = tl.where(live, page, 0).to(tl.int64) * page_stride
        offset = column % PAGE
        page = tl.load(ids + (column + BLOCK) // PAGE, mask=column + BLOCK < last, other=-1)
        key = tl.load(codes + (base + offset * DIM)[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        scale = tl.load(scales + base // 4 + offset, mask=live, other=0.0)
        if query.dtype != tl.float8e4nv:
            key = key.to(query.dtype)
        dots = tl.maximum(tl.dot(key, query, input_precision="ieee"), 0.0, propagate_nan=tl.PropagateNan.ALL)
        logit = tl.sum(dots * weight[None, :], axis=1) * scale
        tl.store(out_row + column, tl.where(live, logit, float("-inf")), mask=column < width)
    for start in tl.range(first + tl.cdiv(stop - first, BLOCK) * BLOCK, last, BLOCK):
        tl.store(out_row + start + block, tl.full((BLOCK,), float("-inf"), tl.float32), mask=start + block < width)


@triton.jit(do_not_specialize=["steps"])
def _logits_by_page_kernel(codes, scales, q, weights, table, lengths, out, rows_per_request, width, table_stride, steps,
                           HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                           STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """As `_logits_kernel`, one page a step, moved by the copy engine: codes fp8 [pages * (P + P / 32), 128] and scales
    float32 [pages * (P + P / 32) / 2, 64] describe the same pool, where a page is P rows of codes, then its scales. A
    hole is a row outside the pool, which reads as zeros."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * steps
    last = tl.minimum(first + steps, width // PAGE)
    ids = table + (row // rows_per_request) * table_stride
    out_row = out + row * width
    block = tl.arange(0, PAGE)
    dim = tl.arange(0, DIM)
    head = tl.arange(0, ROWS)
    page = tl.load(ids + first)
    query = tl.load(q + row * HEADS * DIM + head[None, :] * DIM + dim[:, None], mask=head[None, :] < HEADS, other=0)
    query = query.to(tl.float8e4nv, bitcast=True)
    weight = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
    length = tl.load(lengths + row)
    stop = tl.maximum(tl.minimum(last, tl.cdiv(length, PAGE)), first)
    for at in tl.range(first, stop, num_stages=STAGES):
        key = codes.load([page * (PAGE + PAGE // 32), 0])
        scale = tl.reshape(scales.load([page * ((PAGE + PAGE // 32) // 2) + PAGE // 2, 0]), (PAGE,))
        column = at * PAGE + block
        live = (column < length) & (page >= 0)
        page = tl.load(ids + at + 1, mask=at + 1 < last, other=-1)
        dots = tl.maximum(tl.dot(key, query), 0.0, propagate_nan=tl.PropagateNan.ALL)
        logit = tl.sum(dots * weight[None, :], axis=1) * scale
        tl.store(out_row + column, tl.where(live, logit, float("-inf")))
    for at in tl.range(stop, last):
        tl.store(out_row + at * PAGE + block, tl.full((PAGE,), float("-inf"), tl.float32))


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
    config: dict[str, int] | None = None,
) -> Tensor:
    """Score every index key of each request: s_k * sum_h w_h * max(0, q_h . k).

    q [B, H, 128] (or [B, N, H, 128]) float8_e4m3fn, its bits as uint8, bfloat16 or float32; weights [B, H] float32;
    pool uint8 [pages, page bytes]; page_table int32 [B, max_pages], -1 = hole; lengths int32 [B] (or [B, N]).
    -> float32 [B, max_pages * page_tokens] (or [B, N, ...]), -inf at and past the length and in holes. The launch
    depends on shapes alone, so a CUDA graph replays with changed lengths. `config` overrides the tuned block sizes.
    Raises ValueError for other layouts, output types, shapes or devices.
    """
    if layout != "dsa-index-fp8" or dtype != torch.float32:
        raise ValueError(f"this kernel reads dsa-index-fp8 pages and writes float32, not {layout} and {dtype}")
    batch, heads, dim = q.shape[0], q.shape[-2], q.shape[-1]
    shape = q.shape[:-2]
    if dim != DIM or weights.shape != q.shape[:-1] or lengths.shape != shape or page_table.shape[0] != batch:
        raise ValueError(
            f"q [B, H, {DIM}] or [B, N, H, {DIM}] needs weights {tuple(q.shape[:-1])} and lengths {tuple(shape)}, "
            f"got q {tuple(q.shape)}, weights {tuple(weights.shape)}, lengths {tuple(lengths.shape)}, page table "
            f"{tuple(page_table.shape)}"
        )
    check_device(q, weights, pool, page_table, lengths)
    check_pool(pool, page_tokens * (DIM + 4), 4)
    if q.dtype == torch.float8_e4m3fn:
        q = q.view(torch.uint8)
    elif INTERPRETED and q.dtype == torch.bfloat16:
        q = q.to(torch.float32)  # the interpreter's bf16 product is wrong
    width = page_table.shape[1] * page_tokens
    out = torch.empty((*shape, width), dtype=torch.float32, device=q.device)
    rows = out.numel() // width if width else 0
    if not rows:
        return out
    chosen = dict(config or logits_config(rows, width, multiprocessors(q.device)))
    steps, block = chosen.pop("STEPS"), chosen.pop("BLOCK")
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    inputs = (q.contiguous(), weights.contiguous(), table, lengths.contiguous(), out, rows // batch, width)
    sizes = {"HEADS": heads, "ROWS": max(16, triton.next_power_of_2(heads)), "DIM": DIM, "PAGE": page_tokens}
    grid = (triton.cdiv(width, block * steps), rows)
    if block == page_tokens == 64 and q.dtype == torch.uint8 and pool.is_contiguous() and pool.data_ptr() % 16 == 0:
        codes = pool.view(torch.float8_e4m3fn).view(-1, DIM)
        _logits_by_page_kernel[grid](
            TensorDescriptor.from_tensor(codes, [page_tokens, DIM]),
            TensorDescriptor.from_tensor(pool.view(torch.float32).view(-1, page_tokens), [1, page_tokens]),
            *inputs, table.stride(0), steps, **sizes, **LAUNCH, **chosen,
        )  # fmt: skip
    else:
        _logits_kernel[grid](
            pool, *inputs, pool.stride(0), table.stride(0), steps, BLOCK=block, **sizes, **LAUNCH, **chosen
        )
    return out


def logits_config(rows: int, width: int, processors: int) -> dict[str, int]:
    """Block sizes for a launch of `rows` x `width`, as measured on an H200 (benchmarks/kernels.py --sweep).

    Page by page where the copy engine can: as many programs as the device holds at once (eight a multiprocessor), so
    that all start together; with more than 16 pages for each, deeper buffers and two rounds of six a multiprocessor.
    """
    if INTERPRETED:
        return {"BLOCK": 256 if width <= 8192 else 4096, "STEPS": 64, "STAGES": 1}  # a step costs much, a key little
    if not LAUNCH["PDL"]:  # no copy engine either
        return {"BLOCK": 128, "STEPS": 8, "STAGES": 3, "num_warps": 4}
    pages = triton.cdiv(width, 64)
    stages, programs = (2, 8 * processors) if rows * pages <= 16 * 8 * processors else (3, 12 * processors)
    steps = max(1, triton.cdiv(pages, max(1, programs // rows)))
    return {"BLOCK": 64, "STEPS": steps, "STAGES": stages, "num_warps": 4}
