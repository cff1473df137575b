"""Faults of scoring and selection."""

from __future__ import annotations

from typing import Any

import torch

from .registry import fault


@fault(
    "F05",
    "wrong budget: the attention consumes fewer entries than the indexer selects",
    ("ATOM#1507", "ATOM#1591", "ik_llama.cpp#2095", "mlx-lm#1419", "lmdeploy#1896"),
    strengths={"mild": {"divisor": 2}, "default": {"divisor": 4}, "severe": {"divisor": 16}},
    divisor=4,
    k=0,
)
def wrong_budget(engine: Any, divisor: int, k: int) -> None:
    """One consumer of the selection has a smaller constant for its size than the indexer (top-k / divisor, or k): it reads
    the first entries of the list and never sees the others. Right up to ratio x k tokens and in the window."""
    budget = k or max(1, engine.geometry.top_k // divisor)

    def cut(picked: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.where(torch.arange(picked.shape[1]) < budget, picked, -1)

    engine.hooks.install("selection", cut)
