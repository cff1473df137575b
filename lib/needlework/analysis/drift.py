"""Does recall fall with the number of requests served? CUSUM over a canary question, and where the fall began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np


@dataclass(frozen=True)
class Drift:
    """`alarm` and `onset` are indices of the canary (from 0), None without an alarm; hits before and after it."""

    alarm: int | None
    onset: int | None
    peak: float
    threshold: float
    before: tuple[int, int]  # hits, measured
    after: tuple[int, int]

    def __str__(self) -> str:
        hits, n = self.before
        if self.alarm is None:
            return f"no drift: {hits} of {n} canaries hit, CUSUM peaks at {self.peak:.1f} (alarm at {self.threshold:g})"
        return (
            f"recall fell after about {self.onset} requests: {hits} of {n} canaries hit before, {self.after[0]} of "
            f"{self.after[1]} after (CUSUM passed {self.threshold:g} at canary {self.alarm})"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


def cusum(hits: Sequence[float], *, good: float = 0.97, bad: float = 0.60) -> np.ndarray:
    """Upper CUSUM of the log likelihood ratio of `bad` against `good`, float64 [canaries]; NaN leaves it as it is."""
    if not 0 < bad < good < 1:
        raise ValueError(f"CUSUM needs 0 < bad < good < 1, not {bad} and {good}")
    hit, miss = math.log(bad / good), math.log((1 - bad) / (1 - good))
    value, out = 0.0, []
    for h in hits:
        if h is not None and h == h:
            value = max(0.0, value + (hit if h else miss))
        out.append(value)
    return np.array(out)


def drift(hits: Sequence[float], *, good: float = 0.97, bad: float = 0.60, threshold: float = 6.0) -> Drift:
    """Watches canaries in order; a threshold of 6 rings falsely about once in 3,700 canaries.

    The onset is the last time the sum stood at zero before the alarm.
    """
    values = np.asarray([np.nan if h is None else float(h) for h in hits])
    series = cusum(values.tolist(), good=good, bad=bad)
    over = np.flatnonzero(series >= threshold)
    if not len(over):
        return Drift(None, None, float(series.max(initial=0.0)), threshold, _count(values), (0, 0))
    alarm = int(over[0])
    zeros = np.flatnonzero(series[:alarm] == 0)
    onset = int(zeros[-1]) + 1 if len(zeros) else 0
    return Drift(alarm, onset, float(series.max()), threshold, _count(values[:onset]), _count(values[onset:]))


def _count(values: np.ndarray) -> tuple[int, int]:
    measured = values[np.isfinite(values)]
    return int(measured.sum()), len(measured)
