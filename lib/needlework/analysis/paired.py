"""Two arms on identical prompts: exact, graded and always-valid tests, the difference, an arm's own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import trials as table
from needlework.analysis.intervals import Interval, wilson

Scores = Sequence[float] | np.ndarray

# What must agree for two rows to be the same prompt in two arms; columns that the table lacks are left out.
PROMPT = ["target_tokens", "depth", "needle_token", "question", "expected", "turn", "seed"]
STATE = ["cache", "concurrency"]


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of discordant pairs (a fair coin under no difference); 1 when no pair is discordant."""
    _counts(only_first, only_second)
    n, k = only_first + only_second, min(only_first, only_second)
    if n == 0:
        return 1.0
    from scipy.stats import binom

    return min(1.0, 2 * float(binom.cdf(k, n, 0.5)))


def e_value(only_first: int, only_second: int, *, prior: float = 0.5) -> float:
    """Evidence against "discordant pairs go either way", valid whenever it is looked at: 20 means p < 0.05 at any time.

    The share of pairs that go one way has a Beta(prior, prior) mixture under the alternative; under no difference
    the sequence of these values is a non-negative martingale that starts at 1 (Ville's inequality gives the bound).
    """
    from scipy.special import betaln

    _counts(only_first, only_second)
    log = betaln(only_first + prior, only_second + prior) - betaln(prior, prior)
    return float(np.exp(min(700.0, log + (only_first + only_second) * math.log(2))))


def permutation_test(first: Scores, second: Scores, *, rounds: int = 5000, seed: int = 0) -> float:
    """Two-sided p-value of paired graded scores: signs of the differences are flipped (all ways up to 12 pairs).

    NaN pairs are left out; no pair, or no difference at all, gives 1.
    """
    a, b = _pair(first, second)
    difference = (a - b)[np.isfinite(a - b)]
    difference = difference[difference != 0]
    n = len(difference)
    if n == 0:
        return 1.0
    seen = abs(difference.sum()) - 1e-9 * abs(difference).sum()
    if n <= 12:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ difference) >= seen))
    rng = np.random.default_rng([seed, 0x9A1])
    larger = sum(
        int((np.abs(rng.choice([-1.0, 1.0], (size, n)) @ difference) >= seen).sum()) for size in _chunks(rounds, 500)
    )
    return (larger + 1) / (rounds + 1)


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """95 % interval of (share of the first arm - share of the second) for paired hits (Newcombe 1998, method 10)."""
    _counts(both, only_first, only_second, neither)
    n = both + only_first + only_second + neither
    if n == 0:
        return Interval(-1.0, 1.0)
    one, two = (both + only_first) / n, (both + only_second) / n
    (l1, u1), (l2, u2) = wilson(both + only_first, n), wilson(both + only_second, n)
    margin = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    phi = 0.0
    if margin:
        cross = both * neither - only_first * only_second
        phi = (max(cross - n / 2, 0) if cross > 0 else cross) / math.sqrt(margin)
    low = (one - l1) ** 2 - 2 * phi * (one - l1) * (u2 - two) + (u2 - two) ** 2
    high = (u1 - one) ** 2 - 2 * phi * (u1 - one) * (two - l2) + (two - l2) ** 2
    difference = one - two
    return Interval(max(-1.0, difference - math.sqrt(max(low, 0))), min(1.0, difference + math.sqrt(max(high, 0))))


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


@dataclass(frozen=True)
class Paired:
    """Two arms compared on identical prompts. `difference` is first minus second, with a 95 % interval."""

    first: str
    second: str
    pairs: int
    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float
    e_value: float
    graded_p: float
    difference: float
    interval: Interval

    def __str__(self) -> str:
        if not self.pairs:
            return f"{self.first} and {self.second} share no prompt that both answered"
        hits = (
            f"{self.first} {self.both + self.only_first}, {self.second} {self.both + self.only_second} of {self.pairs}"
        )
        low, high = (100 * x for x in self.interval)
        return (
            f"{hits} identical prompts; discordant {self.only_first} to {self.only_second}, exact McNemar "
            f"p = {self.p_value:.2g}, e = {odds(self.e_value)}; difference {100 * self.difference:+.0f} points "
            f"({low:+.0f} to {high:+.0f})"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


def odds(e_value: float) -> str:
    """An e-value as people write odds: 0.42, 180, 1,270; no more than a million."""
    if e_value < 1000:
        return f"{e_value:.3g}"
    return f"{float(f'{e_value:.3g}'):,.0f}" if e_value < 1e6 else "over 1,000,000"


def pair_up(trials: pd.DataFrame, by: str, first: Any, second: Any) -> pd.DataFrame:
    """Identical prompts of two groups side by side: columns `first`, `second` (hits), `score_first`, `score_second`.

    `by` is the column that tells the groups apart (`arm`, `cache`, `worker` …). Prompts are matched on `PROMPT` and,
    but for `by`, on `STATE`; repeats of one prompt are matched in order. Prompts of one group alone are left out.
    """
    keys = [k for k in PROMPT + STATE if k != by and k in trials.columns and trials[k].notna().any()]
    if by not in trials.columns or not keys:
        return pd.DataFrame(columns=["first", "second", "score_first", "score_second"], dtype=float)
    small = pd.DataFrame(
        {
            "hit": table.hits(trials),
            "score": pd.to_numeric(table.column(trials, "score"), errors="coerce").astype(float),
        }
    )
    for key in keys:
        small[key] = trials[key].astype("object").where(trials[key].notna(), "")
    sides = []
    for value in (first, second):
        side = small[trials[by] == value].copy()
        side["again"] = side.groupby(keys, sort=False).cumcount()
        sides.append(side)
    joined = sides[0].merge(sides[1], on=[*keys, "again"], suffixes=("_first", "_second"))
    names = {"hit_first": "first", "hit_second": "second"}
    return joined.rename(columns=names)[["first", "second", "score_first", "score_second"]].astype(float)


def compare(trials: pd.DataFrame, by: str = "arm", first: Any = None, second: Any = None) -> Paired:
    """Compares two groups of a table on their identical prompts; without names, the first two values that appear.

    Raises ValueError when `by` does not have two values.
    """
    if first is None or second is None:
        values = list(dict.fromkeys(table.column(trials, by).dropna()))
        if len(values) < 2:
            raise ValueError(f"column {by!r} has {len(values)} value(s); a comparison needs two")
        first, second = values[:2]
    pairs = pair_up(trials, by, first, second)
    return compare_pairs(pairs, str(first), str(second))


def compare_pairs(pairs: pd.DataFrame, first: str, second: str) -> Paired:
    """As `compare`, from the table that `pair_up` makes."""
    a, b = pairs["first"].to_numpy(float), pairs["second"].to_numpy(float)
    keep = np.isfinite(a) & np.isfinite(b)
    a, b = a[keep], b[keep]
    one, two = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    both, neither = int(((a == 1) & (b == 1)).sum()), int(((a == 0) & (b == 0)).sum())
    return Paired(
        first,
        second,
        len(a),
        both,
        one,
        two,
        neither,
        mcnemar(one, two),
        e_value(one, two),
        permutation_test(pairs["score_first"].to_numpy(), pairs["score_second"].to_numpy(), rounds=2000),
        (one - two) / len(a) if len(a) else 0.0,
        newcombe(both, one, two, neither),
    )


def _pair(first: Scores, second: Scores) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(first, float), np.asarray(second, float)
    if a.shape != b.shape:
        raise ValueError(f"{a.size} values in the first arm, {b.size} in the second; pairs need as many on both sides")
    return a, b


def _counts(*counts: float) -> None:
    if any(count < 0 or count != int(count) for count in counts):
        raise ValueError("counts of pairs are whole numbers from zero up")


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
