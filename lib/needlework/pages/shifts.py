"""Evidence that codes and scales of a page do not belong together, from statistics that every public writer leaves.

A writer divides by the scale, so the size of an entry's codes and its scale are strongly anti-correlated wherever
entries have similar sizes (index keys and latents are normalised). If that correlation is absent at shift 0 and
strong at shift n, the scale block is shifted by n slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from . import formats
from .inspect import Marks
from .layout import Layout


def as_rows(layout: Layout) -> Layout | None:
    """The layout with all fields of a token side by side, as its fictional shape suggests; None if it is so already."""
    if all(item.base == 0 for item in layout.fields):
        return None
    fields, offset = [], 0
    for item in layout.fields:
        fields.append(replace(item, base=0, offset=offset, stride=layout.token_bytes, tile=None))
        offset += item.bytes
    return replace(layout, name=f"{layout.name} as rows", fields=tuple(fields))


def code_sizes(raw: Tensor, layout: Layout, page_tokens: int, groups: int) -> Tensor:
    """float32 [pages, P, groups]: log2 of the norm of each group's codes (NaN where all are zero)."""
    codes = layout["codes"].view(raw, page_tokens).flatten(3).flatten(1, 2)
    values = formats.decode(codes.contiguous(), layout["codes"].format).unflatten(-1, (groups, -1))
    square = values.square_().sum(-1)
    return torch.where(square > 0, square, torch.nan).log2() / 2


def page_sizes(
    raw: Tensor, layout: Layout, page_tokens: int, written: Tensor, facts: Marks
) -> tuple[Tensor, Tensor, Tensor]:
    """Per page: median log2 size of its entries, their middle spread, and whether enough entries are written."""
    size = code_sizes(raw, layout, page_tokens, facts.scale.shape[-1]) + facts.scale.abs().log2()
    size = torch.where(written[..., None] & facts.lawful, size, torch.nan).flatten(1)
    enough = (~size.isnan()).sum(-1) >= 8
    quartiles = torch.nanquantile(size, torch.tensor([0.25, 0.5, 0.75]), dim=-1)
    return quartiles[1].nan_to_num(0.0), (quartiles[2] - quartiles[0]).nan_to_num(9.0), enough


def _correlation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pearson's r along the last axis over places where neither is NaN, and their number."""
    both = ~(a.isnan() | b.isnan())
    n = both.sum(-1)
    a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    a = torch.where(both, a - a.sum(-1, keepdim=True) / n.clamp(min=1)[..., None], 0.0)
    b = torch.where(both, b - b.sum(-1, keepdim=True) / n.clamp(min=1)[..., None], 0.0)
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return torch.where(scale > 1e-6, (a * b).sum(-1) / scale.clamp(min=1e-12), 0.0), n


def shifted(
    raw: Tensor, layout: Layout, page_tokens: int, written: Tensor, facts: Marks
) -> Iterator[tuple[int, int, str]]:
    """(page, shift, evidence) of pages whose scales fit the codes `shift` slots earlier far better than their own."""
    if page_tokens < 16:
        return
    groups = layout["codes"].count // layout.group
    copies = facts.scale.shape[-1] // groups  # a scale stored four times is one piece of evidence
    size = code_sizes(raw, layout, page_tokens, groups)
    odd = facts.zero | facts.negative | facts.absurd | facts.denormal | facts.below
    # where the floor made the scale, the codes shrink with the values and the law does not hold
    usable = (written[..., None] & ~odd & ~facts.free)[..., ::copies]
    scale = torch.where(usable, facts.scale[..., ::copies].log2(), torch.nan)
    size = torch.where((written[..., None] & (odd | ~facts.free))[..., ::copies], size, torch.nan)
    # a group that is loud in every entry says nothing about entries
    scale, size = scale - scale.nanmean(1, keepdim=True), size - size.nanmean(1, keepdim=True)
    at_home, _ = _correlation(size.flatten(1), scale.flatten(1))
    doubtful = ((at_home > -0.35) & (written.sum(-1) >= 12)).nonzero().flatten()
    for page in doubtful.tolist():
        # scales missing at one end of the page already suggest where they went
        missing = (facts.zero & ~facts.silent).all(-1)[page][written[page]].int()
        head, tail = int(missing.cumprod(0).sum()), int(missing.flip(0).cumprod(0).sum())
        hint = head if head >= tail else -tail
        shift, r, z = _best_shift(size[page], scale[page], hint)
        if z < (-2.6 if hint and shift == hint else -5.2) and r < float(at_home[page]) - 0.35:
            yield page, shift, f"correlation {r:.2f} there, {at_home[page]:.2f} at home"


def _best_shift(size: Tensor, scale: Tensor, hint: int = 0) -> tuple[int, float, float]:
    """(shift, r, Fisher's z) at which scales [P, groups] fit sizes [P, groups] best, rolled or cut; or at `hint`."""
    tokens = size.shape[0]
    # repeated text repeats entries: only different ones are evidence
    valid = ~size.isnan()
    distinct = len(torch.unique(size[valid])) / max(1, int(valid.sum()))
    # groups of one entry share its size: they count as two, not as many
    distinct *= min(1.0, 2 / size.shape[1])
    steps = [hint] if hint else [n for n in range(-tokens // 2, tokens // 2 + 1) if n]
    rolled = torch.stack([scale.roll(-n, 0) for n in steps])
    cut = rolled.clone()
    for row, n in enumerate(steps):
        cut[row, slice(tokens - n, None) if n > 0 else slice(0, -n)] = torch.nan
    r, pairs = _correlation(size.flatten()[None], torch.cat([rolled, cut]).flatten(1))
    z = torch.atanh(r.clamp(-0.9999, 0.9999)) * (pairs * distinct - 3).clamp(min=0).sqrt()
    best = int(z.argmin())
    return steps[best % len(steps)], float(r[best]), float(z[best])
