"""The V4 expert router, in plain torch: square root of softplus, a bias that only selects, hash layers that do not
score.

Sources: official V4 scripts `inference/model.py`; sglang 0.5.23 `srt/layers/moe/hash_topk.py`; vllm 0.33.0
`router/fused_topk_bias_router.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logits)), softplus = max(x, 0) + log1p(exp(-|x|)): [T, E] in the logits' dtype (float32 at
    least)."""
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    return torch.sqrt(x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())))


def router_topk(
    logits: Tensor, bias: Tensor, k: int = 6, *, scaling: float = 1.5, scaling_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Pick k experts by score + bias, weigh them by score alone.

    logits [T, E]; bias [E] float32 -> ids int64 [T, k], weights [T, k] summing to `scaling` (1.5 Flash, 2.5 Pro). With
    `scaling_dtype` the normalised weights are rounded to that type and scaled in it, as some fused kernels do.
    """
    scores = router_scores(logits)
    ids = torch.topk(scores + bias, k, dim=-1).indices
    return ids, _weights(scores, ids, scaling, scaling_dtype)


def router_hash(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    *,
    scaling: float = 1.5,
    scaling_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The first layers' router: experts from the token id alone (table int32 [vocab, k]), weights still from the
    scores."""
    ids = table[token_ids.long()].long()
    return ids, _weights(router_scores(logits), ids, scaling, scaling_dtype)


def _weights(scores: Tensor, ids: Tensor, scaling: float, scaling_dtype: torch.dtype | None) -> Tensor:
    picked = scores.gather(-1, ids)
    weights = picked / picked.sum(dim=-1, keepdim=True)
    if scaling_dtype is None:
        return weights * scaling
    return (weights.to(scaling_dtype) * torch.tensor(scaling, dtype=scaling_dtype)).to(scores.dtype)
