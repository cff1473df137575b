"""What observers look at: one table with the columns they ask for again and again, and the measures they share."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import trials as table
from needlework.analysis.paired import Paired, compare_pairs, pair_up

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

    `config` (topk, ratio, window, page, chunk, context_limit), `digests` (buffer -> equal?), `pages` (words or codes of
    page findings; empty when pages were looked at and nothing was found), `placement` ((physical page, hit) of one
    content in several places), `logs` (rule -> count), `flags` (flag that was switched -> True when that heals).
    """
    if evidence is None:
        return {}
    if is_dataclass(evidence) and not isinstance(evidence, type):
        evidence = asdict(evidence)
    if not isinstance(evidence, Mapping):
        raise ValueError(
            "evidence is a mapping or a dataclass with config, digests, pages, placement, logs, flags; each is optional"
        )
    known = {"config", "digests", "pages", "placement", "logs", "flags"}
    found = {key: evidence[key] for key in known if evidence.get(key) is not None}
    flat = {key: value for key, value in evidence.items() if key not in known}
    found["config"] = _numbers({**flat, **dict(found.get("config", {}))})
    return found


_SETTING = {
    **dict.fromkeys(("index_topk", "top_k"), "topk"),
    **dict.fromkeys(("page_size", "page_tokens"), "page"),
    **dict.fromkeys(("chunk_size", "chunk_tokens", "chunked_prefill_size"), "chunk"),
    **dict.fromkeys(("context_length", "max_model_len", "max_context"), "context_limit"),
    **dict.fromkeys(("sliding_window", "swa_window"), "window"),
    "compress_ratio": "ratio",
}


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = _SETTING.get(str(key), str(key))
        if isinstance(value, (list, tuple)):
            value = [int(x) for x in value if isinstance(x, (int, float)) and x > 1]
            if value:
                out[name] = value
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            out[name] = int(value)
    return out


def presence_of(p: float) -> float:
    """0 from p = 0.05 up, 1 from p = 0.0005 down, straight in the logarithm between."""
    return float(np.clip(math.log(0.05 / max(p, 1e-300)) / math.log(100), 0, 1))


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


class View:
    """The table with the columns that observers ask for again and again."""

    def __init__(self, trials: pd.DataFrame, evidence: dict[str, Any]) -> None:
        self.evidence, self.config = evidence, evidence.get("config", {})
        frame = trials.reset_index(drop=True)
        control = table.column(frame, "control", "").fillna("").astype(str)
        probe = table.column(frame, "probe", "").fillna("").astype(str)
        self.controls = frame[(control != "") | (probe == "control")]
        frame = frame[(control == "") & (probe != "control")].reset_index(drop=True)
        self.frame, self.n = frame, len(frame)
        self.hit = table.hits(frame).to_numpy(float)
        self.length = table.lengths(frame).to_numpy(float)
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
        self.base_of_all = plain
        if plain.sum() < 12:
            plain = self.measured
        self.good = np.ones(self.n, bool)  # rows that the effect of length alone would let hit
        self.worst_arm = self._worst_arm(plain)
        self.base = plain & (self.arm == self.worst_arm) if self.worst_arm is not None else plain

    def number(self, name: str) -> np.ndarray:
        return pd.to_numeric(table.column(self.frame, name), errors="coerce").to_numpy(float)

    def text(self, name: str) -> np.ndarray:
        return table.column(self.frame, name, "").fillna("").astype(str).to_numpy()

    def rate(self, mask: np.ndarray) -> tuple[int, int]:
        """(misses, measured) in a mask."""
        mask = mask & self.measured
        return int((self.hit[mask] == 0).sum()), int(mask.sum())

    def _worst_arm(self, plain: np.ndarray) -> str | None:
        names = [n for n in dict.fromkeys(self.arm[plain]) if self.rate(plain & (self.arm == n))[1] >= 6]
        worst, strongest = None, 0.05
        for one, two in itertools.combinations(names[:6], 2):
            compared = compare_pairs(pair_up(self.frame[plain], "arm", one, two), one, two)
            if compared.p_value < strongest:
                worst, strongest = (two if compared.only_first > compared.only_second else one), compared.p_value
        return worst


def contrast(v: View, name: str, one: np.ndarray, two: np.ndarray, first: str, second: str) -> Feature:
    """One-sided Fisher test: `one` misses more often than `two`."""
    from scipy.stats import binom, fisher_exact

    (a, n), (b, m) = v.rate(one), v.rate(two)
    if not n or not m:
        return Feature(name, None, f"no {first} or no {second} trials", n + m)
    p = float(fisher_exact([[a, n - a], [b, m - b]], alternative="greater")[1])
    if b <= LAPSE * m and m >= 8:  # the other side is healthy: more misses than a healthy deployment has say as much
        p = min(p, float(binom.sf(a - 1, n, LAPSE)) if a else 1.0)
    text = f"{first}: {a} of {n} miss; {second}: {b} of {m} (p = {p:.2g})"
    return Feature(name, presence_of(p), text, n + m)


def one_sided(compared: Paired) -> float:
    """Presence of a paired difference: by the one-sided exact test, or by an e-value on its way to 100."""
    by_e = math.log(max(compared.e_value, 1.0)) / math.log(100)
    return max(presence_of(compared.p_value / 2), min(1.0, by_e))


def log_binomial(k: Any, n: Any) -> Any:
    k, n = np.asarray(k, float), np.asarray(n, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.clip(k / n, 1e-9, 1 - 1e-9)
        return np.where(n > 0, k * np.log(p) + (n - k) * np.log(1 - p), 0.0)
