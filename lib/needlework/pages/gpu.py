"""One Triton kernel that decodes the values of every layout in one pass over a pool on a CUDA device.

The kernel knows no layout: addresses and formats come from the record as compile-time numbers. Codes are widened by
integer arithmetic alone, so the compiled kernel and Triton's interpreter (which reads fp8 NaN codes as numbers; triton
3.9.0) do the same. Import this module only where it runs: it imports triton, and without a CUDA device it asks for the
interpreter, which is right and slow.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # isort: skip  # it chooses between compiler and interpreter at once
import triton.language as tl  # isort: skip

if TYPE_CHECKING:
    from .layouts import Layout

# 16 values a thread, the fastest of 15 settings on an H200: loads in flight, then wide stores of neighbouring threads
VALUES_A_PROGRAM = 1024
WARPS = 2


@triton.jit
def _widen(code, FORMAT: tl.constexpr):
    """float32 value of 8-bit codes, or of 4-bit ones in the low half.

    Sign, exponent and mantissa land where a half keeps them; the half is the number under another exponent bias, and
    subnormal codes become subnormal halves. Widening to float32 is exact, and so is the power of two.
    """
    code = code.to(tl.int32)
    if FORMAT == "e2m1":
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    bits = ((code & 127) << 7) | ((code & 128) << 8)
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if FORMAT == "e4m3fnuz":
        return tl.where(code == 128, float("nan"), value * 128.0)
    return tl.where((code & 127) == 127, float("nan"), value * 256.0)


@triton.jit
def _values_kernel(pool, out, rows, page_stride, PAGE: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr,
                   CODE: tl.constexpr, CODE_START: tl.constexpr, CODE_STRIDE: tl.constexpr,
                   TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr,
                   SCALE: tl.constexpr, SCALE_START: tl.constexpr, SCALE_STRIDE: tl.constexpr, GROUP: tl.constexpr,
                   ROPE_START: tl.constexpr, ROPE_STRIDE: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """One program writes COLUMNS values of ROWS entries, as ROWS x (COLUMNS / INNER) x INNER: an inner run shares one
    scale. Neighbouring programs take neighbouring columns of the same entries."""
    parts: tl.constexpr = DIM // COLUMNS
    first = tl.program_id(0) % parts * COLUMNS
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None, None]
    offset = row % PAGE
    base = (row // PAGE).to(tl.int64) * page_stride
    run = first + tl.arange(0, COLUMNS // INNER) * INNER
    column = run[None, :, None] + tl.arange(0, INNER)[None, None, :]
    target = out + row.to(tl.int64)[:, None, None] * DIM + column
    if first < COUNT:
        if CODE == "e2m1":
            byte = run[None, :, None] // 2 + tl.arange(0, INNER // 2)[None, None, :]
        else:
            byte = column
        if TILE_ROWS > 1:
            entry = offset // TILE_ROWS * (CODE_STRIDE * TILE_ROWS) + offset % TILE_ROWS * TILE_WIDTH
            byte = byte // TILE_WIDTH * (TILE_ROWS * TILE_WIDTH) + byte % TILE_WIDTH
        else:
            entry = offset * CODE_STRIDE
        # a thread takes the codes of one 16-byte store, so that no value changes threads
        place = (base + CODE_START + entry)[:, None, None] + byte
        place = tl.max_contiguous(place, (1, 1, 2 if CODE == "e2m1" else 4))
        stored = tl.load(pool + place, mask=live, other=0)
        if CODE == "e2m1":
            value = tl.interleave(_widen(stored, CODE), _widen(stored >> 4, CODE))
        else:
            value = _widen(stored, CODE)
        at = (base + SCALE_START + offset * SCALE_STRIDE)[:, None]
        number = (run // GROUP)[None, :]
        known = (row < rows)[:, None]
        if SCALE == "f32":
            scale = tl.load((pool + at).to(tl.pointer_type(tl.float32)) + number, mask=known, other=0.0)
        elif SCALE == "ue8m0":
            exponent = tl.load(pool + at + number, mask=known, other=0).to(tl.int32)
            bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a subnormal single
            scale = tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))
        else:
            scale = _widen(tl.load(pool + at + number, mask=known, other=0), SCALE)
        tl.store(target, value * scale[:, :, None], mask=live)
    else:
        number_at = (base + ROPE_START + offset * ROPE_STRIDE)[:, None, None] // 2 + (column - COUNT)
        number_at = tl.max_contiguous(number_at, (1, 1, 4))
        half = tl.load(pool.to(tl.pointer_type(tl.uint16)) + number_at, mask=live, other=0)
        tl.store(target, (half.to(tl.int32) << 16).to(tl.float32, bitcast=True), mask=live)


def values(layout: Layout, pool: Tensor, page_tokens: int, out: Tensor) -> None:
    """Write float32 values of `pool` uint8 [pages, page_bytes] into contiguous `out` [pages, page_tokens, dim].

    Equal to the torch path in every code, scale and NaN (a NaN's sign and payload apart). One launch, no memory of its
    own. The caller has checked shapes and that pages start at multiples of 4 bytes (`Layout.values`).
    """
    names, grid = launch(layout, page_tokens, len(pool))
    _values_kernel[(grid,)](pool, out, len(pool) * page_tokens, pool.stride(0), num_warps=WARPS, **names)


def launch(layout: Layout, page_tokens: int, pages: int) -> tuple[dict[str, int | str], int]:
    """The kernel's compile-time numbers for a layout and a page size, and how many programs `pages` pages take."""
    codes, scales = layout["codes"], layout["scales"]
    rope = next((item for item in layout.fields if item.name == "rope"), None)
    width = math.gcd(codes.count, rope.count if rope else codes.count)
    columns = width & -width  # the largest power of two that divides both
    rows = VALUES_A_PROGRAM // columns
    group = codes.count // scales.count
    tile = codes.tile or (1, codes.bytes)
    names: dict[str, int | str] = {
        "PAGE": page_tokens, "DIM": layout.dim, "COUNT": codes.count,
        "CODE": codes.format, "CODE_START": codes.start(page_tokens), "CODE_STRIDE": codes.stride,
        "TILE_ROWS": tile[0], "TILE_WIDTH": tile[1],
        "SCALE": scales.format, "SCALE_START": scales.start(page_tokens), "SCALE_STRIDE": scales.stride, "GROUP": group,
        "ROPE_START": rope.start(page_tokens) if rope else 0, "ROPE_STRIDE": rope.stride if rope else 0,
        "ROWS": rows, "COLUMNS": columns, "INNER": min(group, columns),
    }  # fmt: skip
    return names, triton.cdiv(pages * page_tokens, rows) * (layout.dim // columns)
