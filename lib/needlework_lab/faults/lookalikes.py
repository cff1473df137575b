"""Not faults of the cache, but easily taken for them."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from .registry import fault


@fault(
    "N1",
    strengths={"mild": {"limit": 8192}, "default": {"limit": 4096}, "severe": {"limit": 1024}},
    limit=4096,
)
def truncated(engine: Any, limit: int) -> None:
    """A prompt longer than `limit` tokens is cut to its beginning and its last half window, without a word. The counted
    prompt tokens tell: they stop growing with what was sent."""

    def cut(tokens: list[int], **_: Any) -> list[int]:
        return tokens if len(tokens) <= limit else tokens[:2] + tokens[-(limit // 2) :]

    engine.hooks.install("prompt", cut)


@fault(
    "N2",
    strengths={"mild": {"size": 0.05}, "default": {"size": 0.2}, "severe": {"size": 0.5}},
    size=0.2,
)
def batch_numerics(engine: Any, size: float) -> None:
    """With more than one request in a pass, other kernels sum in another order, and logits move by about `size`.
    Alone every request is bit-identical to its repetition; together they differ at near-ties, never by foreign
    content."""
    batch, passes = [1], count()

    def note(seqs: list[Any]) -> list[Any]:
        batch[0] = len(seqs)
        return seqs

    def move(logits: torch.Tensor, **_: Any) -> torch.Tensor:
        if batch[0] < 2:
            return logits
        generator = torch.Generator().manual_seed(next(passes))
        return logits + size * torch.randn(logits.shape, generator=generator)

    engine.hooks.install("batch", note)
    engine.hooks.install("logits", move)


@fault(
    "N3",
    strengths={"mild": {"tokens": 16}, "default": {"tokens": 4}, "severe": {"tokens": 1}},
    tokens=4,
)
def budget_cut(engine: Any, tokens: int) -> None:
    """Something before the model lowers max_tokens: answers end with finish reason "length", cut or empty, at every
    length."""
    engine.hooks.install("budget", lambda budget, **_: min(budget, tokens))


@fault(
    "N4",
)
def vacuous_warm(engine: Any) -> None:
    """The prefix cache is on by its configuration and never hits. Every comparison of cold and warm passes, and shows
    nothing; only cached_tokens tells."""
    engine.hooks.install("prefix_hit", lambda chain, **_: [])


@fault(
    "N5",
    strengths={"mild": {"reach": 3000}, "default": {"reach": 1500}, "severe": {"reach": 800}},
    reach=1500,
)
def weak_checkpoint(engine: Any, reach: int) -> None:
    """The model's own attention fades with distance and loses what stands more than `reach` tokens back. The same
    with and without a split, cold and warm, on every server, and in the reference."""
    engine.model.reach = reach
