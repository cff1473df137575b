"""A recall curve should not rise with length: the best falling curve, its holes, and Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Hole:
    """A range of lengths (tokens) with fewer hits than both a falling curve and the lengths beyond it allow."""

    low: int
    high: int
    hits: int
    trials: int
    expected: float
    p_value: float

    def __str__(self) -> str:
        if self.p_value > 0.05:
            return f"recall falls without a hole (p = {self.p_value:.2g})"
        where = f"{self.low:,} to {self.high:,} tokens"
        seen = f"{self.hits} of {self.trials} hit where {self.expected:.1f} are expected"
        return f"a hole at {where}: {seen} (p = {self.p_value:.2g})"


def falling_fit(lengths: Sequence[float], hits: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct lengths (rising) and the best non-rising recall at each (least squares, pool adjacent violators)."""
    from scipy.optimize import isotonic_regression

    x, y = _clean(lengths, hits)
    if not len(x):
        return x, y
    unique, where = np.unique(x, return_inverse=True)
    weight = np.bincount(where).astype(float)
    fit = isotonic_regression(np.bincount(where, weights=y) / weight, weights=weight, increasing=False)
    return unique, fit.x


def hole(lengths: Sequence[float], hits: Sequence[float], *, rounds: int = 200, seed: int = 0) -> Hole:
    """Looks for the range of lengths whose misses a falling curve can explain least.

    The statistic is the largest standardised shortfall of any run of neighbouring length groups (at most 24 groups)
    against the falling fit; its null is the same search on outcomes drawn from the fit.
    """
    x, y = _clean(lengths, hits)
    if len(x) < 4 or y.min() == y.max():
        return Hole(0, 0, 0, len(x), 0.0, 1.0)
    edges = np.unique(np.quantile(x, np.linspace(0, 1, 25), method="lower"))
    group = np.searchsorted(edges, x, side="right") - 1
    _, group = np.unique(group, return_inverse=True)
    size = np.bincount(group).astype(float)
    count = np.bincount(group, weights=y)
    fitted, value, (first, last) = _shortfall(count, size)
    rng = np.random.default_rng([seed, 0x401E])
    larger = sum(_shortfall(rng.binomial(size.astype(int), fitted), size)[1] >= value - 1e-12 for _ in range(rounds))
    inside = (group >= first) & (group <= last)
    expected = float((fitted * size)[first : last + 1].sum())
    p = (larger + 1) / (rounds + 1)
    return Hole(int(x[inside].min()), int(x[inside].max()), int(y[inside].sum()), int(inside.sum()), expected, p)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's step-down adjusted p-values, in the given order (float64); controls the family-wise error."""
    p = np.asarray(p_values, float)
    if p.size and not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p-values lie between 0 and 1")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _shortfall(count: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, float, tuple[int, int]]:
    from scipy.optimize import isotonic_regression

    fitted = np.clip(isotonic_regression(count / size, weights=size, increasing=False).x, 0.02, 0.98)
    gap = np.concatenate([[0.0], np.cumsum(fitted * size - count)])
    spread = np.concatenate([[0.0], np.cumsum(fitted * (1 - fitted) * size)])
    first, last = np.triu_indices(len(size) + 1, 1)
    z = (gap[last] - gap[first]) / np.sqrt(spread[last] - spread[first])
    best = int(np.argmax(z))
    return fitted, float(z[best]), (int(first[best]), int(last[best]) - 1)


def _clean(lengths: Sequence[float], hits: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(lengths, float), np.asarray(hits, float)
    if x.shape != y.shape:
        raise ValueError(f"{x.size} lengths but {y.size} outcomes")
    keep = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[keep], kind="stable")
    return x[keep][order], y[keep][order]
