"""Intervals for a proportion that stay honest at n = 1: Wilson, Jeffreys, and one for trials that share a haystack."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def jeffreys(hits: float, trials: float, *, level: float = 0.95) -> Interval:
    """Equal-tailed interval of the Beta(hits + 1/2, misses + 1/2) posterior; the ends are 0 and 1 at 0 and all hits."""
    from scipy.stats import beta

    _check(hits, trials)
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits + 0.5, trials - hits + 0.5))
    high = 1.0 if hits == trials else float(beta.ppf(1 - tail, hits + 0.5, trials - hits + 0.5))
    return Interval(low, high)


def clustered(hit: Sequence[float], cluster: Sequence, *, z: float = Z95) -> Interval:
    """Interval of a proportion when trials of one cluster (a haystack, a session) are not independent.

    `hit` is 0/1 a trial (NaN is left out), `cluster` names its haystack. The variance between clusters gives a design
    effect; Wilson's interval is taken with the effective number of trials, never with more than there are. With one
    cluster nothing can be said about the spread between clusters, so it counts as a single trial.
    """
    value = np.asarray(hit, dtype=float)
    names = np.asarray(cluster, dtype=object)
    if value.shape != names.shape:
        raise ValueError(f"{value.size} hits but {names.size} cluster names; give one name for each trial")
    names, value = names[~np.isnan(value)], value[~np.isnan(value)]
    if not value.size:
        return Interval(0.0, 1.0)
    _, index = np.unique(names.astype(str), return_inverse=True)
    groups = int(index.max()) + 1
    share, n = float(value.mean()), value.size
    if groups == 1:
        return wilson(share, 1, z=z)
    residual = np.bincount(index, weights=value - share)
    naive = share * (1 - share) / n
    robust = groups / (groups - 1) * float((residual**2).sum()) / n**2
    if naive > 0:
        effective = n * min(1.0, naive / robust) if robust > 0 else float(n)
    else:  # all alike: the spread can not be seen, so the cautious reading is one trial for each cluster
        effective = float(groups)
    effective = max(effective, 1.0)
    return wilson(share * effective, effective, z=z)


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
