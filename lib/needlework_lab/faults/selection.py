"""Faults of scoring and selection."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from .registry import fault


@fault(
    "F04",
    strengths={"mild": {"stash": 4}, "default": {"stash": 2}, "severe": {"stash": 1}},
    stash=2,
)
def stash_overflows(engine: Any, stash: int) -> None:
    """A first, coarse pass puts nearly all scores of a real row in one bucket; the list for that bucket holds `stash`
    times k candidates, and later arrivals vanish. Arrival is by thread, so it changes from run to run. Exact up to
    the list's size."""
    size, runs = stash * engine.geometry.top_k, count()

    def lose(picked: torch.Tensor, *, scores: torch.Tensor, lengths: torch.Tensor, **_: Any) -> torch.Tensor:
        picked = picked.clone()
        for row, length in enumerate(lengths.tolist()):
            if length > size:
                order = torch.randperm(length, generator=torch.Generator().manual_seed(next(runs)))[:size]
                best = torch.topk(scores[row, order], picked.shape[1]).indices
                picked[row] = order[best].to(picked.dtype)
        return picked

    engine.hooks.install("selection", lose)


@fault(
    "F05",
    strengths={"mild": {"divisor": 2}, "default": {"divisor": 4}, "severe": {"divisor": 16}},
    divisor=4,
    k=0,
    scattered=1,
)
def wrong_budget(engine: Any, divisor: int, k: int, scattered: int) -> None:
    """One consumer of the selection has a smaller constant for its size than the indexer (top-k / divisor, or k): it
    reads the first entries of the list and never sees the others. A parallel selection gives its list in no order, so
    any entry may be lost. Right up to ratio x k tokens and in the window. With scattered=0 the list stays as it is:
    while the indexer still takes every entry that is the order of the text, and what stands after ratio x k tokens is
    lost, to the token."""
    budget = k or max(1, engine.geometry.top_k // divisor)

    def cut(picked: torch.Tensor, **_: Any) -> torch.Tensor:
        if not scattered:
            return torch.where(torch.arange(picked.shape[1]) < budget, picked, -1)
        order = (picked.long() * 2654435761 >> 7) % 65521  # scattered over positions, the same for each step
        order = order.masked_fill(picked < 0, 1 << 20).argsort(dim=1, stable=True)
        return torch.where(torch.arange(picked.shape[1]) < budget, picked.gather(1, order), -1)

    engine.hooks.install("selection", cut)


@fault(
    "F06",
    strengths={"mild": {"dims": 72}, "default": {"dims": 80}, "severe": {"dims": 120}},
    dims=80,
)
def rotated_apart(engine: Any, dims: int) -> None:
    """The query's first `dims` numbers are paired in halves where the keys' are interleaved, so their product says
    nothing. What stays of the score decides: near needles and short prompts survive, long ones are lost gradually."""

    def pair(queries: tuple[torch.Tensor, torch.Tensor], **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, index_q = queries[0], queries[1].clone()
        part = index_q[..., :dims]
        index_q[..., :dims] = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
        return q, index_q

    engine.hooks.install("queries", pair)


@fault(
    "F07",
    strengths={
        "mild": {"period": 128, "residue": 127},
        "default": {"period": 4, "residue": 3},
        "severe": {"period": 2, "residue": 1},
    },
    period=4,
    residue=3,
)
def residue_of_the_length(engine: Any, period: int, residue: int) -> None:
    """Where the prompt's length leaves `residue` in `period`, the last, incomplete tile is taken for the whole row:
    complete tiles before it are skipped. Neighbouring lengths are healthy, and every length gives the same result
    each time."""
    entries = engine.geometry.page_entries

    def tail(lengths: torch.Tensor, *, seqs: list[Any], **_: Any) -> torch.Tensor:
        hit = torch.tensor([len(seq.request.tokens) % period == residue for seq in seqs])
        return torch.where(hit, lengths % entries, lengths)

    engine.hooks.install("lengths", tail)
