"""Intervals for a proportion that stay honest at n = 1: Wilson's."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution


class Interval(NamedTuple):
    """Lower and upper limit."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float, np.number)) and self.low <= float(value) <= self.high


def wilson(hits: float, trials: float, *, z: float = Z95) -> Interval:
    """Wilson's score interval of `hits` in `trials` (both may be fractional, as effective counts are).

    No trials give (0, 1). Raises ValueError when hits do not lie in 0..trials.
    """
    _check(hits, trials)
    if trials == 0:
        return Interval(0.0, 1.0)
    share, z2 = hits / trials, z * z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return Interval(0.0 if hits == 0 else max(0.0, middle - half), 1.0 if hits == trials else min(1.0, middle + half))


def sentence(hits: int, trials: int, *, what: str = "") -> str:
    """The cell in words: "6 of 6: above 61 %", "0 of 6: below 39 %", "9 of 10: between 60 % and 98 %"."""
    start = f"{hits} of {trials}" + (f" {what}" if what else "")
    if trials == 0:
        return f"{start}: nothing was measured"
    low, high = wilson(hits, trials)
    if hits == trials:
        return f"{start}: above {100 * low:.0f} %"
    if hits == 0:
        return f"{start}: below {100 * high:.0f} %"
    return f"{start}: between {100 * low:.0f} % and {100 * high:.0f} %"


def _check(hits: float, trials: float) -> None:
    if not 0 <= hits <= trials + 1e-9:
        raise ValueError(f"{hits} hits in {trials} trials can not be; give 0 <= hits <= trials")
