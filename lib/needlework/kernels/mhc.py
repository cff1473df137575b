"""Manifold-constrained hyper-connections (mHC), in plain torch: how V4 mixes its four residual streams.

From the streams R [T, 4, hidden] one small projection gives 24 numbers a token: how each stream enters the layer
(pre), how the layer's output enters each stream (post), and how the streams mix (comb, made doubly stochastic by
Sinkhorn rounds). Sources: official V4 script `inference/model.py`; vllm 0.33.0
`vllm/model_executor/kernels/mhc/torch.py`. The official projection is float32; deployed kernels use tf32, split bf16
or plain bf16, and that difference is what `gemm` measures.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAMS = 4
ITERATIONS = 20  # hc_sinkhorn_iters of V4-Flash and V4-Pro; library examples default to 10
EPS = 1e-6
GEMMS = ("float64", "float32", "tf32", "bfloat16")


def mhc_project(residual: Tensor, weight: Tensor, *, gemm: str = "float32", eps: float = EPS) -> Tensor:
    """The normalised projection of the flattened streams.

    residual [T, 4, hidden]; weight [M, 4 * hidden] (M 24, or 4 for the output head) -> [T, M] float32 (float64 if
    asked). gemm: "float32"; "float64"; "tf32" (weight cut to 10 mantissa bits, float32 sums); "bfloat16" (both
    operands and the result rounded to bf16, as a bf16 matrix product in torch). Raises ValueError for an unknown
    gemm.
    """
    if gemm not in GEMMS:
        raise ValueError(f"gemm must be one of {', '.join(GEMMS)}, got {gemm!r}")
    dtype = torch.float64 if gemm == "float64" else torch.float32
    x = residual.flatten(1).to(dtype)
    w = weight.to(dtype)
    if gemm == "bfloat16":
        mixed = (x.to(torch.bfloat16) @ w.to(torch.bfloat16).T).to(dtype)
    else:
        if gemm == "tf32":  # round half up on the 13 dropped bits, as the tensor core's input rounding does
            w = ((w.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        mixed = x @ w.T
    return mixed * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)


def sinkhorn(logits: Tensor, *, iterations: int = ITERATIONS, eps: float = EPS) -> Tensor:
    """Row softmax + eps, then columns, then iterations - 1 further (row, column) rounds: [..., 4, 4], columns last.

    Row = last axis, column = sum over the first of the two axes. Column sums end at S / (S + eps); row sums only
    converge to 1.
    """
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mhc_mix(
    mixed: Tensor, scale: Tensor, bias: Tensor, *, iterations: int = ITERATIONS, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The 24 projected numbers as weights: mixed [T, 24], scale [3], bias [24] -> pre [T, 4], post [T, 4], comb [T,
    4, 4].

    pre = sigmoid + eps, post = 2 * sigmoid, comb[i, j] = number 8 + 4i + j through `sinkhorn`.
    """
    n = STREAMS
    pre = torch.sigmoid(mixed[:, :n] * scale[0] + bias[:n]) + eps
    post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + bias[n : 2 * n])
    logits = (mixed[:, 2 * n :] * scale[2] + bias[2 * n :]).reshape(-1, n, n)
    return pre, post, sinkhorn(logits, iterations=iterations, eps=eps)


def mhc_enter(residual: Tensor, pre: Tensor) -> Tensor:
    """What the layer reads: sum_i pre_i R_i, [T, hidden] in the residual's dtype."""
    return (pre[:, :, None] * residual.to(pre.dtype)).sum(dim=1).to(residual.dtype)


def mhc_leave(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams: R'_j = post_j * output + sum_i comb[i, j] R_i, [T, 4, hidden] in the residual's dtype."""
    mixed = torch.einsum("tij,tih->tjh", comb, residual.to(comb.dtype))
    return (post[:, :, None] * output.to(post.dtype)[:, None] + mixed).to(residual.dtype)


def mhc_head(
    residual: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, *, gemm: str = "float32", eps: float = EPS
) -> Tensor:
    """The streams as one before the output head: weight [4, 4 * hidden], scale [1], bias [4] -> [T, hidden]."""
    return mhc_enter(residual, torch.sigmoid(mhc_project(residual, weight, gemm=gemm, eps=eps) * scale + bias) + eps)


def mhc_weights(
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    gemm: str = "float32",
    iterations: int = ITERATIONS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projection and mixing weights in one step: residual [T, 4, hidden] -> pre [T, 4], post [T, 4], comb [T, 4, 4]."""
    return mhc_mix(mhc_project(residual, weight, gemm=gemm), scale, bias, iterations=iterations)
