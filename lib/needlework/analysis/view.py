"""What observers look at: one table with the columns they ask for again and again, and the measures they share."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import trials as table
from needlework.analysis.paired import Paired, compare_pairs, pair_up
from needlework.names import ours

REFERENCE = re.compile(r"(?i)reference|transformers|oracle|independent|hosted|other.?server")
LAPSE = 0.03  # a healthy deployment may miss this often without a finding
PD_ARM = re.compile(r"(?i)(?:^|[^a-z])pd(?:$|[^a-z])|disagg|split|prefill.*decode|decode.*cold|p\dd\d")


@dataclass(frozen=True)
class Feature:
    """presence: 0 absent … 1 clearly there, None not measured; `n` rows looked at; `value` the number it carries."""

    name: str
    presence: float | None
    text: str
    n: int = 0
    value: Any = None


@dataclass(frozen=True)
class Split:
    """Best division of rows at a threshold: hits at or below it against misses above."""

    gain: float  # log likelihood ratio against one common rate
    low: float  # largest value on the good side that the data allow (profile likelihood)
    high: float
    top: float
    bottom: float


def settings(evidence: Any) -> dict[str, Any]:
    """Evidence as a plain dict; every part is optional.

    config     setting -> number or list of numbers (topk, ratio, window, page, chunk, context_limit)
    digests    buffer -> did it arrive as it was sent (None: not known)?
    pages      findings in pages, words or codes or a table of them; empty when pages were looked at and none was found
    placement  pairs (physical page, hit) of one content in several places
    logs       rule -> number of lines
    flags      flag that was switched -> did that heal (None: not known)?
    selected   who selects -> entries that it was seen to select where more were at hand, or can have selected at most

    Raises ValueError with one sentence for anything else.
    """
    if evidence is None:
        return {}
    if is_dataclass(evidence) and not isinstance(evidence, type):
        evidence = {f.name: getattr(evidence, f.name) for f in fields(evidence)}
    if not isinstance(evidence, Mapping):
        raise ValueError(f"evidence is a mapping or a dataclass with {', '.join(_PARTS)}, each optional")
    found: dict[str, Any] = {}
    for part, read in _PARTS.items():
        if part != "config" and evidence.get(part) is not None:
            found[part] = read(part, evidence[part])
    config = _mapping("config", evidence.get("config") if evidence.get("config") is not None else {})
    found["config"] = _numbers({**{k: v for k, v in evidence.items() if k not in _PARTS}, **config})
    return found


def _mapping(part: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"evidence {part!r} is a mapping from a name to a value, not {_kind(value)}")
    return value


def _marks(part: str, value: Any) -> dict[str, bool]:
    """Name -> yes or no; what is not known is left out."""
    out = {}
    for name, mark in _mapping(part, value).items():
        if mark is None or mark is pd.NA:
            continue
        if not isinstance(mark, (bool, np.bool_)):
            raise ValueError(f"evidence {part!r}: each value is True, False or None, not {_kind(mark)}")
        out[str(name)] = bool(mark)
    return out


def _counts(part: str, value: Any) -> dict[str, int]:
    out = {}
    for name, count in _mapping(part, value).items():
        lines = float(count) if isinstance(count, Real) else -1.0
        if not math.isfinite(lines) or lines < 0:
            raise ValueError(f"evidence {part!r}: each value is a number of zero or more, not {_kind(count)}")
        out[str(name)] = int(lines)
    return out


def _findings(part: str, value: Any) -> list[str]:
    if isinstance(value, pd.DataFrame):
        return [str(row) for row in value.astype(str).agg(" ".join, axis=1)] if value.shape[1] else []
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set, pd.Series, np.ndarray)):
        raise ValueError(f"evidence {part!r} is a list of findings or a table of them, not {_kind(value)}")
    return [str(one) for one in value]


def _places(part: str, value: Any) -> list[tuple[float, float]]:
    if isinstance(value, pd.DataFrame):
        value = value.to_numpy().tolist()
    try:
        pairs = [(float(page), float(hit)) for page, hit in value]
    except (TypeError, ValueError):
        raise ValueError(f"evidence {part!r} is a list of pairs (page, hit), not {_kind(value)}") from None
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


_PARTS: dict[str, Callable[[str, Any], Any]] = {
    "config": _mapping,
    "digests": _marks,
    "pages": _findings,
    "placement": _places,
    "logs": _counts,
    "flags": _marks,
    "selected": _counts,
}
_SEVERAL = ("ratio",)  # layers may differ in it; of any other setting the first value counts


def _numbers(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings that are positive numbers, by our names; what says something else ("auto") is not used."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = ours(str(key)) or str(key)
        if isinstance(value, (list, tuple, np.ndarray)):
            several = [number for number in map(_positive, value) if number and number > 1]
            if several:
                out[name] = several if name in _SEVERAL else several[0]
        elif number := _positive(value):
            out[name] = number
    return out


def _positive(value: Any) -> int | None:
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        return None
    number = float(value)
    return int(number) if 1 <= number < 1e15 else None


def presence_of(p: float) -> float:
    """0 from p = 0.05 up, 1 from p = 0.001 down, straight in the logarithm between."""
    return float(np.clip(math.log(0.05 / max(p, 1e-300)) / math.log(50), 0, 1))


def best_split(x: np.ndarray, hit: np.ndarray) -> Split | None:
    """Threshold on `x` above which hits are lost; None without two distinct values or without both outcomes."""
    keep = np.isfinite(x) & np.isfinite(hit)
    x, hit = x[keep], hit[keep]
    if len(x) < 6 or hit.min() == hit.max() or x.min() == x.max():
        return None
    order = np.argsort(x, kind="stable")
    x, hit = x[order], hit[order]
    ends = np.flatnonzero(np.diff(x) > 0) + 1  # rows on the good side
    good = np.cumsum(hit)[ends - 1]
    n, total = len(x), hit.sum()
    top, bottom = good / ends, (total - good) / (n - ends)
    gain = log_binomial(good, ends) + log_binomial(total - good, n - ends) - log_binomial(total, n)
    gain = np.where(top > bottom, gain, 0.0)
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return None
    allowed = np.flatnonzero(gain >= gain[best] - 2)
    return Split(
        float(gain[best]),
        float(x[ends[allowed[0]] - 1]),
        float(x[ends[allowed[-1]]]),
        float(top[best]),
        float(bottom[best]),
    )


def plain_cells(trials: pd.DataFrame) -> pd.DataFrame:
    """The table without cells that are no text and no number (lists, objects): they say nothing that is read here."""
    odd = {}
    for name in trials.columns:
        column = trials[name]
        if isinstance(column, pd.Series) and column.dtype == object:
            wrong = [not isinstance(cell, (str, Real, type(None))) for cell in column]
            if any(wrong):
                odd[name] = column.mask(pd.Series(wrong, index=column.index), None)
    return trials.assign(**odd) if odd else trials


class View:
    """The table with the columns that observers ask for again and again."""

    def __init__(self, trials: pd.DataFrame, evidence: dict[str, Any]) -> None:
        self.evidence, self.config = evidence, evidence.get("config", {})
        frame = trials.reset_index(drop=True)
        control = table.texts(frame, "control")
        probe = table.texts(frame, "probe")
        self.controls = frame[(control != "") | (probe == "control")]
        frame = frame[(control == "") & (probe != "control")].reset_index(drop=True)
        self.frame, self.n = frame, len(frame)
        self.hit = table.hits(frame).to_numpy(float)
        length = table.lengths(frame).to_numpy(float)
        self.length = np.where(np.isfinite(length) & (length >= 0), length, np.nan)
        sent = self.number("counted_tokens")
        self.sent = np.where(np.isfinite(sent), sent, self.number("target_tokens"))
        # a count far below what was sent is a finding of its own (truncated, tiny_prompt), not a place on the curve
        self.length = np.where(self.length < 0.93 * self.sent, self.sent, self.length)
        self.needle = self.number("needle_token")
        depth = self.number("depth")
        self.needle = np.where(np.isfinite(self.needle), self.needle, depth * self.length)
        self.outcome = self.text("outcome")
        self.probe, self.arm, self.cache, self.label = (self.text(c) for c in ("probe", "arm", "cache", "label"))
        self.cached = self.number("cached_tokens")
        self.wanted = self.text("wanted_cache") if "wanted_cache" in frame.columns else self.cache
        self.warm = (self.cached > 0) | ((self.cache == "warm") & ~np.isfinite(self.cached))
        self.load = self.number("concurrency")
        self.turn = self.number("turn")
        self.pd_arm = np.array([bool(PD_ARM.search(name)) for name in self.arm], bool)
        self.measured = np.isfinite(self.hit)
        aside = self.warm | (self.load > 1) | (self.turn > 1) | np.isin(self.probe, ["abort", "echo", "drift", "turns"])
        plain = self.measured & ~aside
        self.reference_arm = np.array([bool(REFERENCE.search(name)) for name in self.arm], bool)
        if (plain & ~self.reference_arm).sum() >= 12:  # an independent server is a witness, not the examined one
            plain = plain & ~self.reference_arm
        self.base_of_all = plain
        if plain.sum() < 12:
            plain = self.measured
        self.good = np.ones(self.n, bool)  # rows that the effect of length alone would let hit
        self.edge: Split | None = None  # the fall with length, once one is found
        self.worst_arm = self._worst_arm(plain)
        self.base = plain & (self.arm == self.worst_arm) if self.worst_arm is not None else plain

    def number(self, name: str) -> np.ndarray:
        values = pd.to_numeric(table.column(self.frame, name), errors="coerce").to_numpy(float)
        return np.where(np.isfinite(values), values, np.nan)

    def text(self, name: str) -> np.ndarray:
        return table.texts(self.frame, name).to_numpy()

    def rate(self, mask: np.ndarray) -> tuple[int, int]:
        """(misses, measured) in a mask."""
        mask = mask & self.measured
        return int((self.hit[mask] == 0).sum()), int(mask.sum())

    def _worst_arm(self, plain: np.ndarray) -> str | None:
        names = [n for n in dict.fromkeys(self.arm[plain]) if self.rate(plain & (self.arm == n))[1] >= 6]
        worst, strongest = None, 0.15  # four pairs to none will do: it only says where to look
        for one, two in itertools.combinations(names[:6], 2):
            compared = compare_pairs(pair_up(self.frame[plain], "arm", one, two), one, two)
            if compared.p_value < strongest:
                worst, strongest = (two if compared.only_first > compared.only_second else one), compared.p_value
        return worst


def contrast(v: View, name: str, one: np.ndarray, two: np.ndarray, first: str, second: str, tests: int = 1) -> Feature:
    """One-sided Fisher test: `one` misses more often than `two`; the p-value is that of one of `tests` looks."""
    from scipy.stats import binom, fisher_exact

    (a, n), (b, m) = v.rate(one), v.rate(two)
    if not n or not m:
        return Feature(name, None, f"no {first} or no {second} trials", n + m)
    p = float(fisher_exact([[a, n - a], [b, m - b]], alternative="greater")[1])
    if b <= LAPSE * m and m >= 8:  # the other side is healthy: more misses than a healthy deployment has say as much
        p = min(p, float(binom.sf(a - 1, n, LAPSE)) if a else 1.0)
    p = min(1.0, tests * p)
    text = f"{first}: {a} of {n} miss; {second}: {b} of {m} (p = {p:.2g})"
    return Feature(name, presence_of(p), text, n + m)


def one_sided(compared: Paired) -> float:
    """Presence of a paired difference: by the one-sided exact test, or by an e-value on its way to 100."""
    by_e = math.log(max(compared.e_value, 1.0)) / math.log(100)
    return max(presence_of(compared.p_value / 2), min(1.0, by_e))


def one_sided_lapses(v: View, compared: Paired, healthy: np.ndarray) -> float:
    """As `one_sided`; where neither the first side nor the rows of `healthy` miss more than a healthy deployment does,
    more misses of the second side than that say as much, and need no discordant pairs to be weighed against."""
    from scipy.stats import binom

    misses, rows = v.rate(healthy)
    if rows < 24 or misses > LAPSE * rows or compared.only_second + compared.neither > LAPSE * compared.pairs:
        return one_sided(compared)
    return max(one_sided(compared), presence_of(float(binom.sf(compared.only_first - 1, compared.pairs, LAPSE))))


def log_binomial(k: Any, n: Any) -> Any:
    k, n = np.asarray(k, float), np.asarray(n, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.clip(k / n, 1e-9, 1 - 1e-9)
        return np.where(n > 0, k * np.log(p) + (n - k) * np.log(1 - p), 0.0)
