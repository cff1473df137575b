"""The one comparison of a kernel's output with what it should be: shape, NaN and infinity places, norm, worst element.

A limit says how far apart two numbers may lie, and why so far: the reason is the number format that the public
kernels compute in. Two measures are held at once: the whole-tensor distance catches a small error everywhere, the
worst element catches one wrong entry among millions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limit:
    """norm: largest ||got - want|| / ||want||; element: largest |got - want| in units of `max(|want|, row rms)`."""

    norm: float
    element: float
    reason: str


LIMITS = {
    "logits": Limit(
        1e-3, 1e-2, "fp8 products in tensor cores keep about 14 bits of the sum (DeepGEMM against torch: 1.4e-4)"
    ),
    "attention": Limit(
        5e-3, 4e-2, "bf16 output and bf16 probabilities: 2^-9 an element (FlashMLA and sm120 Triton: 1.9e-3)"
    ),
    "attention-v32": Limit(
        1e-2, 8e-2, "keys pass through bf16, which loses bits of scales that are no power of two (FlashMLA: 4.2e-3)"
    ),
    "lse": Limit(2e-5, 1e-4, "float32 sums (FlashMLA and sm120 Triton against torch: 1e-6)"),
    "lse-v32": Limit(4e-3, 1e-2, "scores of keys that passed through bf16 (FlashMLA: 3.6e-3)"),
    "float32": Limit(2e-5, 2e-4, "float32 arithmetic in another order"),
    "codes": Limit(2e-3, 0.13, "a tie in e4m3 may fall to either neighbour: one step of 2^-3"),
}


@dataclass(frozen=True)
class Comparison:
    """One output held against its reference. `passed` follows from the numbers; `detail` says in words what is
    wrong."""

    what: str
    passed: bool
    norm_error: float
    element_error: float
    limit: Limit
    worst: str
    detail: str
    precision: str = "float32"

    def __str__(self) -> str:
        verdict = "agrees" if self.passed else f"FAILS: {self.detail}"
        return (
            f"{self.what} {verdict}; norm error {self.norm_error:.1e} (limit {self.limit.norm:.0e}), worst element "
            f"{self.element_error:.1e} (limit {self.limit.element:.0e}) at {self.worst}"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


def _failed(what: str, limit: Limit, detail: str, worst: str = "") -> Comparison:
    return Comparison(what, False, float("inf"), float("inf"), limit, worst, detail)


def compare_values(
    what: str,
    got: Tensor,
    want: Tensor,
    limit: Limit,
    *,
    valid: Tensor | None = None,
    locate: Callable[[Sequence[int]], str] = str,
) -> Comparison:
    """Hold `got` against `want`, both [..., n], at the places where `valid` (same shape) is true.

    Infinities must stand at the same places with the same sign, NaN nowhere. `locate` turns the index of the worst
    element into words (its request, page, slot, head). The last axis is a row for the element measure.
    """
    if tuple(got.shape) != tuple(want.shape):
        return _failed(what, limit, f"shape {tuple(got.shape)} where {tuple(want.shape)} was due")
    if got.dtype.is_floating_point != want.dtype.is_floating_point:
        return _failed(what, limit, f"type {got.dtype} where {want.dtype} was due")
    a, b = got.detach().to("cpu", torch.float64), want.detach().to("cpu", torch.float64)
    inside = torch.ones_like(b, dtype=torch.bool) if valid is None else valid.to("cpu").expand_as(b)
    if not bool(inside.any()):
        return Comparison(what, True, 0.0, 0.0, limit, "nothing to compare", "")
    odd = inside & ((torch.isnan(a) != torch.isnan(b)) | ((torch.isinf(a) | torch.isinf(b)) & (a != b)))
    if bool(odd.any()):
        place = tuple(torch.nonzero(odd)[0].tolist())
        count = f"{int(odd.sum())} of {int(inside.sum())} elements"
        detail = f"{count} are {float(a[place])} where {float(b[place]):.6g} was due"
        return _failed(what, limit, detail, locate(place))
    finite = inside & torch.isfinite(b)
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    error = (a - b).abs()
    norm = float(error.norm() / b.norm().clamp_min(1e-30)) if bool(error.any()) else 0.0
    in_row = finite.sum(dim=-1, keepdim=True).clamp_min(1)
    rms = (b.square().sum(dim=-1, keepdim=True) / in_row).sqrt()
    scaled = error / torch.maximum(b.abs(), rms).clamp_min(1e-30)
    place = tuple(int(i) for i in torch.unravel_index(scaled.argmax(), scaled.shape))
    element = float(scaled[place])
    passed = norm <= limit.norm and element <= limit.element
    detail = "" if passed else f"got {float(a[place]):.6g} where {float(b[place]):.6g} was due"
    return Comparison(what, passed, norm, element, limit, locate(place), detail)


EXACT = Limit(0.0, 0.0, "the choice and the bytes are exact; only equal scores may be swapped")


def compare_exact(what: str, got: Tensor, want: Tensor, *, locate: Callable[[Sequence[int]], str] = str) -> Comparison:
    """Bytes or indices that must be equal."""
    if tuple(got.shape) != tuple(want.shape):
        return _failed(what, EXACT, f"shape {tuple(got.shape)} where {tuple(want.shape)} was due")
    wrong = got.cpu() != want.cpu()
    if not bool(wrong.any()):
        return Comparison(what, True, 0.0, 0.0, EXACT, "every element", "")
    place = tuple(torch.nonzero(wrong)[0].tolist())
    detail = f"{int(wrong.sum())} of {wrong.numel()} differ; first {int(got[place])} where {int(want[place])} was due"
    return _failed(what, EXACT, detail, locate(place))


def positions_of(slots: Tensor, page_table: Tensor, page_tokens: int) -> Tensor:
    """Slots [B, k] back to positions through the inverse page table: -1 stays, a slot of no page of the row becomes
    -2."""
    out = torch.full_like(slots, -2)
    for b in range(len(slots)):
        pages = page_table[b].tolist()
        inverse = {page: column for column, page in reversed(list(enumerate(pages))) if page >= 0}
        column = torch.tensor([inverse.get(s // page_tokens, -1) if s >= 0 else -1 for s in slots[b].tolist()])
        found = column * page_tokens + slots[b] % page_tokens
        out[b] = torch.where(slots[b] < 0, slots[b], torch.where(column >= 0, found, -2))
    return out


def compare_topk(got: Tensor, logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None, page_tokens: int):
    """A selection int32 [B, k] against its contract, as a multiset of scores: -> Comparison.

    Each row must hold min(k, length) distinct positions below its length whose scores are the largest ones bit for
    bit; the rest is -1. A row with at most k keys must be 0, 1, … in order. Dropped winners are counted, and the
    first one is named.
    """
    what = "selection"
    if tuple(got.shape) != (len(logits), k):
        return _failed(what, EXACT, f"shape {tuple(got.shape)} where {(len(logits), k)} was due")
    if got.dtype not in (torch.int32, torch.int64):
        return _failed(what, EXACT, f"type {got.dtype} where int32 was due")
    picked = got.cpu().long()
    if page_table is not None:
        picked = positions_of(picked, page_table.cpu().long(), page_tokens)
    for b, length in enumerate(lengths.tolist()):
        row, want = picked[b], min(k, length)
        valid = row[row != -1]
        where = f"row {b} of length {length}"
        if bool((valid == -2).any()):
            bad = int(got[b, int(torch.nonzero(row == -2)[0])])
            return _failed(what, EXACT, f"slot {bad} belongs to no page of the row", where)
        if bool(((valid < 0) | (valid >= length)).any()):
            bad = int(valid[(valid < 0) | (valid >= length)][0])
            return _failed(what, EXACT, f"position {bad} lies at or past the length", where)
        if len(valid) != want:
            return _failed(what, EXACT, f"{len(valid)} positions where min(k, length) = {want} were due", where)
        if length <= k:
            if not torch.equal(row[:length], torch.arange(length)):
                return _failed(what, EXACT, "a row of at most k keys must be 0, 1, … in order", where)
            continue
        if len(valid.unique()) != want:
            return _failed(what, EXACT, f"{want - len(valid.unique())} positions appear twice", where)
        scores = logits[b, :length].detach().cpu()
        best = torch.topk(scores, want)
        if not torch.equal(scores[valid].sort(descending=True).values, best.values):
            below = torch.nan_to_num(scores, nan=torch.inf)  # torch.topk takes NaN for the largest
            last, mine, theirs = below[best.indices].min(), below[valid], below[best.indices]
            lost = max(int((mine < last).sum()), int((theirs > last).sum()) - int((mine > last).sum()))
            missing = sorted(set(best.indices.tolist()) - set(valid.tolist()), key=lambda p: (-float(below[p]), p))
            first = missing[0]
            page = "" if page_table is None else f", page {int(page_table[b, first // page_tokens])}"
            rank = int((scores > scores[first]).sum()) + 1
            first_lost = f"position {first} (rank {rank}, score {float(scores[first]):.6g}{page})"
            detail = f"{lost} winners dropped, the best is {first_lost}"
            return _failed(what, EXACT, detail, where)
    return Comparison(what, True, 0.0, 0.0, EXACT, "every row", "")
