"""Number formats of KV pages: what one stored byte, or a few, is worth, and how a value becomes a code.

Byte order is little-endian. `decode` is exact for every code, NaN codes included. Rounding is to nearest even
unless said otherwise; values beyond the largest code saturate, as the public writers' explicit clamps do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class Format:
    """One way to store numbers; `largest` is the clamp that writers use, not always the format's maximum."""

    name: str
    bits: int
    largest: float
    meaning: str
    stored: torch.dtype  # what `Layout.decode` hands out for the field itself


FORMATS = {
    f.name: f
    for f in (
        Format("e4m3fn", 8, 448.0, "1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN", torch.uint8),
        Format("e4m3fnuz", 8, 224.0, "1 sign, 4 exponent (bias 8), 3 mantissa bits; 0x80 is the only NaN", torch.uint8),
        Format("e2m1", 4, 6.0, "1 sign, 2 exponent, 1 mantissa bit; even element in the low half", torch.uint8),
        Format("ue8m0", 8, 2.0**127, "power of two, 2^(byte-127); 0xFF is NaN", torch.uint8),
        Format("f32", 32, float("inf"), "IEEE single", torch.float32),
        Format("bf16", 16, float("inf"), "the upper half of an IEEE single", torch.bfloat16),
        Format("raw", 8, float("inf"), "bytes without meaning", torch.uint8),
    )
}


@cache
def table(name: str, device: str = "cpu") -> Tensor:
    """float32 value of each of the 256 bytes of a format: shape [256], or [256, 2] for `e2m1` (low half first)."""
    codes = torch.arange(256, dtype=torch.uint8)
    match name:
        case "e4m3fn":
            values = codes.view(torch.float8_e4m3fn).float()
        case "e4m3fnuz":
            values = codes.view(torch.float8_e4m3fnuz).float()
        case "ue8m0":
            # 2^-127 (byte 0) is a subnormal single; byte 255 is NaN, as in the OCP microscaling text
            bits = codes.int() << 23
            bits[0], bits[255] = 0x00400000, 0x7FC00000
            values = bits.view(torch.float32)
        case "e2m1":
            half = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
            values = torch.stack([half[(codes & 15).long()], half[(codes >> 4).long()]], -1)
        case _:
            raise ValueError(f"{name!r} has no table of byte values; formats with one: e4m3fn, e4m3fnuz, ue8m0, e2m1")
    return values.to(device)


def decode(stored: Tensor, name: str) -> Tensor:
    """float32 values of stored numbers. `stored` is uint8 [..., n] (or float32/bfloat16 for `f32`/`bf16`).

    Returns [..., n], or [..., 2n] for `e2m1`.
    """
    match name:
        case "e4m3fn" | "e4m3fnuz" if stored.is_cuda:
            return stored.view(getattr(torch, f"float8_{name}")).to(torch.float32)
        case "e4m3fn" | "e4m3fnuz":
            return _e4m3_halves(stored, name).to(torch.float32).mul_(256.0 if name == "e4m3fn" else 128.0)
        case "e2m1":
            # one lookup moves a pair of values: eight bytes, seen as one double
            pairs = table(name, str(stored.device)).view(torch.float64).flatten()
            return pairs[stored.int()].view(torch.float32)
        case "ue8m0":
            return table(name, str(stored.device))[stored.int()]
        case "f32" | "bf16":
            return stored.to(torch.float32)
        case _:
            raise ValueError(f"{name!r} holds no numbers")


def _e4m3_halves(codes: Tensor, name: str, out: Tensor | None = None) -> Tensor:
    """float16 [...] of e4m3 codes times 2^-8 (2^-7 for FNUZ), NaN codes included; `out` int16 is overwritten.

    Moved into the upper bits of a half, sign, exponent and mantissa of an e4m3 code read as the same number under
    another exponent bias, subnormals too. torch's own conversion on a CPU goes code by code and takes about ten times
    as long.
    """
    codes = codes.contiguous()
    bits = torch.empty(codes.shape, dtype=torch.int16, device=codes.device) if out is None else out
    bits.copy_(codes.view(torch.int8)).mul_(128).bitwise_and_(-16385)  # drop the copy of the sign in the exponent
    if name == "e4m3fnuz":
        if int(codes.view(torch.int8).min()) == -128:
            bits[codes == 0x80] = 0x7E00
    elif int(codes.max()) == 255 or int(codes.view(torch.int8).max()) == 127:
        bits[(codes & 0x7F) == 0x7F] = 0x7E00
    return bits.view(torch.float16)


def _e2m1_halves(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """float16 [..., 2n] of n bytes of e2m1 pairs, times 2^-14; `out` int16 [..., 2n] is overwritten.

    A byte becomes one 32-bit word of two halves: a multiplication puts one copy of it where each half wants exponent
    and mantissa, an addition then carries the sign, which lies next to them, up into the top bit.
    """
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    bits = torch.empty(shape, dtype=torch.int16, device=codes.device) if out is None else out
    word = bits.view(torch.int32).copy_(codes)
    word.mul_(0x00200200).bitwise_and_(0x1E001E00).add_(0x70007000).bitwise_and_(0x8E008E00 - (1 << 32))
    return bits.view(torch.float16)


def dequantise(codes: Tensor, name: str, scales: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Write code value x scale into float32 `out` [..., n], in place after one widening pass.

    codes uint8 [..., bytes] and `out` of any strides, scales float32 [..., groups]; `scratch` int16 [..., n] saves an
    allocation. The power of two by which the halves are off goes into the scale where that leaves it finite.
    """
    if not codes.numel():
        return
    bias, halves = _HALVES[name]
    out.copy_(halves(codes, scratch))
    if float(scales.abs().max()) * bias < 3e38:
        scales = scales * bias
    else:  # NaN, infinite, or so large that it leaves no room
        out.mul_(bias)
    out.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])


_HALVES: dict[str, tuple[float, Callable[[Tensor, Tensor | None], Tensor]]] = {
    "e4m3fn": (2.0**8, lambda codes, out: _e4m3_halves(codes, "e4m3fn", out)),
    "e4m3fnuz": (2.0**7, lambda codes, out: _e4m3_halves(codes, "e4m3fnuz", out)),
    "e2m1": (2.0**14, _e2m1_halves),
}


def encode_e4m3(values: Tensor, name: str = "e4m3fn") -> Tensor:
    """uint8 codes nearest to float32 `values`, saturating at the writers' clamp (448, or 224 for FNUZ).

    FNUZ has no negative zero (0x80 is NaN): a negative value that rounds to zero becomes +0.
    """
    largest = FORMATS[name].largest
    clamped = values.clamp(-largest, largest)
    if name == "e4m3fn":
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = clamped.to(torch.float8_e4m3fnuz).view(torch.uint8)
    return torch.where((codes == 0x80) & ~values.isnan(), 0, codes)


def encode_e2m1(values: Tensor, ties: str = "even", negative_zero: bool = True) -> Tensor:
    """uint8 [..., n/2] pairs of 4-bit codes of float32 `values` [..., n].

    ties: "even" as the hardware conversion rounds, "down" = to the smaller magnitude (SGLang's threshold comparison,
    sglang 0.5.23 kernels/ops/quantization/fp4_indexer_quant.py, which also writes no negative zero).
    """
    midpoints = torch.tensor(E2M1_MIDPOINTS, device=values.device)
    magnitude = values.abs()
    code = torch.bucketize(magnitude, midpoints, out_int32=True)
    if ties == "even":
        above = torch.bucketize(magnitude, midpoints, out_int32=True, right=True)
        code = torch.where(code % 2 == 0, code, above)
    sign = torch.signbit(values)
    if not negative_zero:
        sign = sign & (code > 0)
    code = (code + 8 * sign).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def ceil_exponent(scale: Tensor) -> Tensor:
    """uint8 ue8m0 byte of the smallest power of two >= a positive float32 `scale` (from the bits, so exact)."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254).to(torch.uint8)
