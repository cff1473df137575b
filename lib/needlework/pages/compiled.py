"""Values of a large pool on CPU threads: one compiled pass that reads each byte and writes each value once.

Like the fused kernel for GPUs (device.py) it knows no layout: addresses and formats come from the record as numbers.
Sixteen values at a time are widened, scaled and stored past the cache, so that no line of the output is read first;
torch has no such store. Import this module only where it runs: it imports numba (half a second) and compiles once on a
machine (seconds; numba keeps the result in __pycache__, beside the .pyc files).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import formats, slices

if TYPE_CHECKING:
    from torch import Tensor

    from .layout import Layout

WIDTH = 16  # values of one store: a cache line of 64 bytes
SLICE_VALUES = 1 << 22  # of one call: long beside the time a call takes, short beside a pool
# (mantissa bits, exponent bias, which code is NaN: mask and what is left); what formats.FORMATS says in words
MINIFLOATS = {"e4m3fn": (3, 7, 0x7F, 0x7F), "e4m3fnuz": (3, 8, 0xFF, 0x80), "e2m1": (1, 1, 0, 1)}

INT, FLOAT = ir.VectorType(ir.IntType(32), WIDTH), ir.VectorType(ir.FloatType(), WIDTH)


def _all(value: Any, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * WIDTH)


def _bytes(builder: ir.IRBuilder, place: ir.Value, count: int, bits: int = 8) -> ir.Value:
    """`count` integers of `bits` bits from any address."""
    kind = ir.VectorType(ir.IntType(bits), count)
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def _minifloat(builder: ir.IRBuilder, code: ir.Value, name: str) -> ir.Value:
    """float32 of codes in the low bits of 32: exponent and mantissa move to where a single keeps them, subnormal codes
    are counted in units of the least one (as singles they would be subnormal too, and slow)."""
    mantissa, bias, mask, nan = MINIFLOATS[name]
    top = formats.FORMATS[name].bits - 1
    size = builder.and_(code, _all((1 << top) - 1, INT))
    lifted = builder.add(builder.shl(size, _all(23 - mantissa, INT)), _all(127 - bias << 23, INT))
    small = builder.fmul(builder.uitofp(size, FLOAT), _all(2.0 ** (1 - bias - mantissa), FLOAT))
    is_small = builder.icmp_unsigned("<", size, _all(1 << mantissa, INT))
    bits = builder.select(is_small, builder.bitcast(small, INT), lifted)
    sign = builder.shl(builder.and_(code, _all(1 << top, INT)), _all(31 - top, INT))
    is_nan = builder.icmp_unsigned("==", builder.and_(code, _all(mask, INT)), _all(nan, INT))
    return builder.bitcast(builder.select(is_nan, _all(0x7FC00000, INT), builder.or_(bits, sign)), FLOAT)


def _widen(builder: ir.IRBuilder, place: ir.Value, name: str) -> ir.Value:
    """Sixteen float32 values of a format from the bytes at `place`."""
    if name == "bf16":
        half = builder.zext(_bytes(builder, place, WIDTH, 16), INT)
        return builder.bitcast(builder.shl(half, _all(16, INT)), FLOAT)
    if formats.FORMATS[name].bits == 8:
        return _minifloat(builder, builder.zext(_bytes(builder, place, WIDTH), INT), name)
    pair = _bytes(builder, place, WIDTH // 2)
    order = [number // 2 + number % 2 * (WIDTH // 2) for number in range(WIDTH)]  # low half first
    high = builder.lshr(pair, ir.Constant(pair.type, [4] * (WIDTH // 2)))
    code = builder.shuffle_vector(pair, high, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), order))
    return _minifloat(builder, builder.and_(builder.zext(code, INT), _all(15, INT)), name)


def _writer(name: str) -> Any:
    """An intrinsic (pool, at, out, to, scale): sixteen values of a format, from byte `at` of uint8 `pool`, times
    `scale`, to number `to` of float32 `out`, a multiple of 16 in an array that starts at a multiple of 64 bytes."""

    @intrinsic
    def write(typing, pool, at, out, to, scale):
        def generate(context, builder, signature, arguments):
            start, end = (context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 2))
            value = _widen(builder, builder.gep(start, [arguments[1]]), name)
            if name != "bf16":
                one = builder.insert_element(_all(ir.Undefined, FLOAT), arguments[4], ir.IntType(32)(0))
                value = builder.fmul(value, builder.shuffle_vector(one, one, _all(0, INT)))
            place = builder.bitcast(builder.gep(end, [arguments[3]]), FLOAT.as_pointer())
            stored = builder.store(value, place, align=4 * WIDTH)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.void(pool, types.int64, out, types.int64, types.float32), generate

    return write


@intrinsic
def _drain(typing):
    """Stores past the cache are visible to other threads before this returns."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_E4M3FN, _E4M3FNUZ, _E2M1, _BF16 = (_writer(name) for name in ("e4m3fn", "e4m3fnuz", "e2m1", "bf16"))


@njit
def _scale(pool, at, table):
    return table[pool[at]]


@njit
def _single(pool, at):
    word = np.uint32(pool[at]) | np.uint32(pool[at + 1]) << 8 | np.uint32(pool[at + 2]) << 16
    return np.uint32(word | np.uint32(pool[at + 3]) << 24).view(np.float32)


def _decode(pool, page_stride, out, first, last, dim, code_format, codes, scales, table, rope):
    """Pages `first` to `last` of a flat pool into flat `out`. The numbers are those of `plan`."""
    start, stride, tiles, rows, tile_stride, stores, a_scale, a_run, part_bytes, gap = codes
    scale_start, scale_stride, scale_bytes = scales
    rope_start, rope_stride, rope_stores = rope
    for page in range(first, last):
        base = page * page_stride
        scale_row = base + scale_start
        rope_row = base + rope_start
        to = page * tiles * rows * dim
        for tile in range(tiles):
            for row in range(rows):
                at = base + start + tile * tile_stride + row * stride
                scale_at = scale_row
                scale = np.float32(1.0)
                scale_left, run_left = 0, a_run
                for _ in range(stores):
                    if scale_left == 0:
                        scale = _scale(pool, scale_at, table) if scale_bytes == 1 else _single(pool, scale_at)
                        scale_at += scale_bytes
                        scale_left = a_scale
                    if code_format == 0:
                        _E4M3FN(pool, at, out, to, scale)
                    elif code_format == 1:
                        _E4M3FNUZ(pool, at, out, to, scale)
                    else:
                        _E2M1(pool, at, out, to, scale)
                    to += WIDTH
                    at += part_bytes
                    scale_left -= 1
                    run_left -= 1
                    if run_left == 0:  # the next tile of this entry's bytes
                        at += gap
                        run_left = a_run
                for part in range(rope_stores):
                    _BF16(pool, rope_row + part * 2 * WIDTH, out, to, np.float32(1.0))
                    to += WIDTH
                scale_row += scale_stride
                rope_row += rope_stride
    _drain()  # type: ignore[call-arg]  # numba supplies the first argument


try:
    _compiled = njit(nogil=True, cache=True)(_decode)
except RuntimeError:  # no folder that it may write to: compiled anew in each process
    _compiled = njit(nogil=True)(_decode)


def takes(layout: Layout, out: Tensor) -> bool:
    """Whether the pass can write this layout's values into `out`: all runs multiples of 16 values, lines aligned."""
    codes, scales = layout["codes"], layout["scales"]
    run = codes.tile[1] * codes.count // codes.bytes if codes.tile else codes.count
    counts = (codes.count // scales.count, run, layout.dim - codes.count)
    return out.data_ptr() % (4 * WIDTH) == 0 and not any(count % WIDTH for count in counts)


def plan(layout: Layout, page_tokens: int) -> dict[str, Any]:
    """A record in numbers. codes: first byte, bytes from entry to entry, tiles a page, entries a tile, bytes from tile
    to tile, stores an entry, stores a scale, stores a run of bytes, bytes of a store, bytes between runs; scales and
    rope: first byte, bytes from entry to entry, bytes of a scale or stores an entry."""
    codes, scales = layout["codes"], layout["scales"]
    rope = next((item for item in layout.fields if item.name == "rope"), None)
    rows, run_bytes = codes.tile or (1, codes.bytes)
    stores = codes.count // WIDTH
    part_bytes = codes.bytes // stores
    return {
        "code_format": list(MINIFLOATS).index(codes.format),
        "codes": (
            codes.start(page_tokens), run_bytes if codes.tile else 0, page_tokens // rows, rows, rows * codes.stride,
            stores, stores // scales.count, run_bytes // part_bytes, part_bytes, (rows - 1) * run_bytes,
        ),
        "scales": (scales.start(page_tokens), scales.stride, scales.bytes // scales.count),
        "table": (torch.zeros(256) if scales.format == "f32" else formats.table(scales.format)).numpy(),
        "rope": (rope.start(page_tokens), rope.stride, rope.count // WIDTH) if rope else (0, 0, 0),
    }  # fmt: skip


def values(layout: Layout, pool: Tensor, page_tokens: int, out: Tensor) -> None:
    """Write float32 values of `pool` uint8 [pages, page_bytes] into contiguous `out` [pages, page_tokens, dim].

    As many threads as torch is set to use; no memory of its own. Equal to the torch path bit for bit (a NaN's sign and
    payload apart). The caller has checked shapes (`Layout.values`) and asked `takes`.
    """
    flat = pool.as_strided(((len(pool) - 1) * pool.stride(0) + pool.shape[1],), (1,)).numpy()
    target, record = out.view(-1).numpy(), tuple(plan(layout, page_tokens).values())

    def work(firsts: Iterator[int], step: int) -> None:
        for first in firsts:
            _compiled(flat, pool.stride(0), target, first, min(first + step, len(pool)), layout.dim, *record)

    slices.share(work, len(pool), max(1, SLICE_VALUES // (page_tokens * layout.dim)), torch.get_num_threads())
