"""The c4 and c128 compressors, in plain torch: many tokens pooled into one cache entry.

Per channel, a softmax over the scores of a group (plus a learned position bias, `ape`) weighs the projected tokens
(official V4 script `inference/model.py`; sglang 0.5.23 `kernels/jit/csrc/deepseek_v4/c4_v2.cuh`, `c128_v2.cuh`).
c4 overlaps: its projections are 2*d wide, and entry j pools eight rows: the first d channels of tokens 4(j-1) … 4j-1
and the last d channels of tokens 4j … 4j+3; before the first group the overlap rows have score -inf. c128 pools its
own 128 tokens. The token that completes a group emits the entry; the tokens of an unfinished group wait in the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.kernels.indexing import hadamard


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


class RingCompressor:
    """The decode form: one token a call against a ring of raw rows, as an engine keeps it (sglang 0.5.23 compress
    states).

    c4 holds 8 rows at position mod 8, c128 holds 128. `step` returns the entry when the token completes a group, else
    None. Another formulation of the same arithmetic, so that the three forms can be held against one another.
    """

    def __init__(self, ape: Tensor, *, overlap: bool) -> None:
        ratio, width = ape.shape
        self.ape, self.ratio, self.overlap = ape, ratio, overlap
        self.kv = ape.new_zeros((2 * ratio if overlap else ratio, width))
        self.scores = torch.full_like(self.kv, -torch.inf)
        self.position = 0

    def step(self, kv: Tensor, scores: Tensor) -> Tensor | None:
        """kv, scores [width] of one token -> entry [d], or None while the group is unfinished."""
        size = len(self.kv)
        self.kv[self.position % size], self.scores[self.position % size] = kv, scores
        self.position += 1
        if self.position % self.ratio:
            return None
        row = torch.arange(self.position - size, self.position) % size
        rows, logits = self.kv[row], self.scores[row] + self.ape.repeat(size // self.ratio, 1)
        if self.overlap:
            d = rows.shape[1] // 2
            rows = torch.cat((rows[: self.ratio, :d], rows[self.ratio :, d:]))
            logits = torch.cat((logits[: self.ratio, :d], logits[self.ratio :, d:]))
        return (torch.softmax(logits, dim=0) * rows).sum(dim=0)


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
