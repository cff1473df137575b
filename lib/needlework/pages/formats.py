"""Number formats of KV pages: what one stored byte, or a few, is worth, and how a value becomes a code.

Byte order is little-endian. `decode` is exact for every code, NaN codes included. Rounding is to nearest even
unless said otherwise; values beyond the largest code saturate, as the public writers' explicit clamps do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MANY = 4096  # bytes; fewer are looked up in their table at once
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
            widened, bias = halves(stored, name)
            return widened.to(torch.float32).mul_(bias)
        case "e2m1":
            # one lookup moves a pair of values: eight bytes, seen as one double
            pairs = table(name, str(stored.device)).view(torch.float64).flatten()
            return pairs[stored.int()].view(torch.float32)
        case "ue8m0" if (
            not stored.is_cuda and stored.numel() >= MANY and 0 < int(stored.min()) <= int(stored.max()) < 255
        ):
            return stored.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)
        case "ue8m0":
            return table(name, str(stored.device))[stored.int()]
        case "f32" | "bf16":
            return stored.to(torch.float32)
        case _:
            raise ValueError(f"{name!r} holds no numbers")


def halves(codes: Tensor, name: str, out: Tensor | None = None) -> tuple[Tensor, float]:
    """Codes uint8 [...] as float16 of the same shape ([..., 2n] for n bytes of e2m1 pairs), and the power of two they
    are to be multiplied by; NaN codes become NaN. `out`, contiguous int16 of as many values, is overwritten and lends
    the result its shape. Widened in the integers: torch's own conversion on a CPU takes ten times as long.

    e4m3: sign, exponent and mantissa, moved into the upper bits of a half, read as the same number under another
    exponent bias, subnormals too. e2m1: a byte becomes one 32-bit word of two halves: a multiplication puts one copy of
    it where each half wants exponent and mantissa, an addition carries the sign, which lies next to them, into the top.
    """
    if out is None:
        shape = codes.shape if name != "e2m1" else (*codes.shape[:-1], 2 * codes.shape[-1])
        out = torch.empty(shape, dtype=torch.int16, device=codes.device)
    if name == "e2m1":
        word = out.view(torch.int32).view(codes.shape).copy_(codes)
        word.mul_(0x00200200).bitwise_and_(0x1E001E00).add_(0x70007000).bitwise_and_(0x8E008E00 - (1 << 32))
        return out.view(torch.float16), 2.0**14
    signed = codes.view(torch.int8)
    bits = out.view(codes.shape).copy_(signed)
    bits.mul_(128).bitwise_and_(-16385)  # drop the copy of the sign in the exponent
    if name == "e4m3fnuz":
        if codes.numel() and int(signed.min()) == -128:
            bits[codes == 0x80] = 0x7E00
        return out.view(torch.float16), 2.0**7
    if codes.numel() and (_largest(codes) == 255 or _largest(signed) == 127):
        bits[(codes & 0x7F) == 0x7F] = 0x7E00
    return out.view(torch.float16), 2.0**8


def _largest(numbers: Tensor) -> int:
    return int(numbers.max() if numbers.is_cuda else numbers.numpy().max())  # numpy's is done before torch's begins


def scale_up(values: Tensor, scales: Tensor, bias: float) -> None:
    """Multiply float32 `values` [..., n] in place by scales [..., groups] and by the power of two `bias`.

    It goes into the scales where that leaves them finite, so that one pass does both.
    """
    if not scales.numel():
        return
    if float(scales.abs().max() if scales.is_cuda else abs(scales.numpy()).max()) * bias < 3e38:
        scales = scales * bias
    else:  # NaN, infinite, or so large that it leaves no room
        values.mul_(bias)
    values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])


def dequantise(codes: Tensor, name: str, scales: Tensor, out: Tensor) -> None:
    """Write code value x scale into float32 `out` [..., n] of any strides; codes uint8 [..., bytes], scales float32
    [..., groups]."""
    widened, bias = halves(codes, name)
    scale_up(out.copy_(widened), scales, bias)


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
    bits = scale.contiguous().view(torch.int32).clamp(0, 0x7F800000)  # NaN counts as infinite
    return ((bits + 0x7FFFFF) >> 23).clamp_(max=254).to(torch.uint8)
