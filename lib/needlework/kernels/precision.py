"""What a coarser number format costs at the end of a stack of layers: in the streams, in needle rank, in answers.

A stack is the residual part of V4 with small random experts: each layer reads the four streams through mHC weights,
routes every token to six experts, and writes back through mHC. Only the format of one step changes between runs; the
weights, tokens and everything else stay equal, so what differs at the end is that format's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from needlework.kernels.needles import KEY, Found, Haystack, exact_rank, look_up, plant
from needlework.kernels.reference import mhc_enter, mhc_leave, mhc_weights, router_topk


@dataclass(frozen=True)
class Stack:
    """layers, hidden, experts of the stack; gemm: format of the mHC projection; scaling: of the routed scaling (None:
    float32)."""

    layers: int = 43
    hidden: int = 128
    experts: int = 16
    gemm: str = "float32"
    scaling: torch.dtype | None = None
    streams: torch.dtype = torch.bfloat16
    seed: int = 0

    def run(self, tokens: int) -> Tensor:
        """The last layer's input [tokens, hidden] in float64 for `tokens` random tokens."""
        g = torch.Generator().manual_seed(self.seed)
        h, dtype = self.hidden, torch.float64 if self.streams == torch.float64 else torch.float32
        residual = torch.randn(tokens, 1, h, generator=g).expand(-1, 4, -1).to(self.streams)
        y = residual[:, 0]
        for _ in range(self.layers):
            weight = torch.randn(24, 4 * h, generator=g) * (4 * h) ** -0.5
            scale, bias = torch.tensor([1.0, 0.5, 1.0]), torch.randn(24, generator=g) * 0.5
            gate = torch.randn(self.experts, h, generator=g) * h**-0.5
            experts = torch.randn(self.experts, h, h, generator=g) * h**-0.5
            pre, post, comb = mhc_weights(residual, weight, scale.to(dtype), bias.to(dtype), gemm=self.gemm)
            y = mhc_enter(residual, pre)
            x = y.to(dtype)
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
            ids, w = router_topk(x @ gate.T.to(dtype), torch.zeros(self.experts), 6, scaling_dtype=self.scaling)
            dense = torch.zeros(tokens, self.experts, dtype=dtype).scatter_(1, ids, w.to(dtype))
            out = torch.einsum("te,teh->th", dense, torch.einsum("th,ehk->tek", torch.tanh(x), experts.to(dtype)))
            residual = mhc_leave((0.3 * out).to(self.streams), residual, post, comb)
        return y.double()


EXACT = Stack(gemm="float64", streams=torch.float64)
VARIANTS = {
    "float32 streams": replace(EXACT, gemm="float32", streams=torch.float32),
    "bf16 streams (as deployed)": Stack(),
    "+ tf32 mHC projection": Stack(gemm="tf32"),
    "+ bf16 mHC projection": Stack(gemm="bfloat16"),
    "+ bf16 routed scaling": Stack(scaling=torch.bfloat16),
}


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


def haystack_of(features: Tensor, base: Haystack) -> Haystack:
    """A haystack whose token keys are features [T, hidden] seen through a fixed projection to 64 numbers, unit
    length."""
    g = torch.Generator().manual_seed(30)
    keys = features.float() @ torch.randn(features.shape[1], KEY, generator=g)
    keys = keys - keys.mean(0)
    return replace(base, keys=torch.nn.functional.normalize(keys, dim=1))


def ask_after(exact: Tensor, features: Tensor, *, strength: float, seed: int, k: int = 512) -> Found:
    """Plant a question for one token of the exact stack, and look it up among keys from another run of the stack.

    The question is the needle's exact key turned away until the cosine is `strength`: the harder, the more a small
    error can move its rank.
    """
    base = plant(len(exact), strength=1.0, depth=((seed * 37) % 100) / 100, seed=seed)
    truth, seen = haystack_of(exact, base), haystack_of(features, base)
    away = base.question - (base.question @ truth.keys[base.needle]) * truth.keys[base.needle]
    question = strength * truth.keys[base.needle] + (1 - strength**2) ** 0.5 * torch.nn.functional.normalize(
        away, dim=0
    )
    return look_up(replace(seen, question=question), k)


def index_formats(
    ways: Mapping[str, Callable[[Haystack], dict[str, Any]]], tokens: int, *, strength: float, needles: int
) -> pd.DataFrame:
    """The same needles through several index formats: ways gives the options of `look_up` for a haystack, by name.

    -> format, needle, rank, right; the format "exact" holds the rank among unrounded keys (right is then missing).
    """
    rows: list[tuple[str, int, int, bool | None]] = []
    for seed in range(needles):
        hay = plant(tokens, strength=strength, depth=(seed + 0.5) / needles, seed=seed)
        rows.append(("exact", seed, exact_rank(hay), None))
        for name, options in ways.items():
            found = look_up(hay, **options(hay))
            rows.append((name, seed, found.rank, found.right))
    return pd.DataFrame(rows, columns=["format", "needle", "rank", "right"])


def scale_errors(factors: Sequence[float], tokens: int, *, needles: int = 5) -> pd.DataFrame:
    """A perfect needle whose index scale is off by each factor: worst rank, how many were kept and answered."""
    rows = []
    for factor in factors:
        found = []
        for seed in range(needles):
            hay = plant(tokens, strength=1.0, seed=seed)
            keys = hay.index_keys()
            keys[hay.entry] *= factor
            found.append(look_up(hay, keys=keys))
        rows.append((factor, max(f.rank for f in found), sum(f.kept for f in found), sum(f.right for f in found)))
    return pd.DataFrame(rows, columns=["factor", "worst rank", "kept", "answered"])


def compare_variants(tokens: int, *, k: int, needles: int, strength: float = 0.6) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every variant of the stack over the same tokens and questions.

    -> one row a variant (format, norm_error against the exact stack, kept, answered), one row a needle (format,
    needle, rank).
    """
    exact = EXACT.run(tokens)
    rows, ranks = [], []
    for name, stack in {"exact": EXACT, **VARIANTS}.items():
        features = exact if name == "exact" else stack.run(tokens)
        found = [ask_after(exact, features, strength=strength, seed=seed, k=k) for seed in range(needles)]
        rows.append((name, relative_error(features, exact), sum(f.kept for f in found), sum(f.right for f in found)))
        ranks += [(name, seed, f.rank) for seed, f in enumerate(found)]
    per_variant = pd.DataFrame(rows, columns=["format", "norm_error", "kept", "answered"])
    return per_variant, pd.DataFrame(ranks, columns=["format", "needle", "rank"])
