"""Small, named observations on a table of trials. Each says how present it is, in how many rows, and in which words.

A feature that the table can not show (no warm row, no second arm, too few rows) has presence None: that is not the same
as absent. Class signatures (signatures.py) speak of nothing but these names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import trials as table
from needlework.analysis.cliff import constants_in
from needlework.analysis.comb import comb_test
from needlework.analysis.drift import drift
from needlework.analysis.monotone import falling_fit
from needlework.analysis.paired import Paired, compare_pairs, pair_up

LAPSE = 0.03  # a healthy deployment may miss this often without a finding
PD_ARM = re.compile(r"(?i)(?:^|[^a-z])pd(?:$|[^a-z])|disagg|split|prefill.*decode|decode.*cold|p\dd\d")
RELOAD = re.compile(r"(?i)evict|reload|host|storage|tier|offload|disk")
REFERENCE = re.compile(r"(?i)reference|transformers|oracle|independent|hosted|other.?server")
TENANT = ("tenant", "adapter", "salt", "lora")
PLACE = ("page_id", "first_page", "block_id", "max_page")
LOOP = re.compile(r"(.{2,40}?)\1{5,}", re.DOTALL)


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


def extract(trials: pd.DataFrame, evidence: Any = None) -> dict[str, Feature]:
    """All features of a table and of optional evidence from inside (see `settings`)."""
    view = _View(trials, settings(evidence))
    features: dict[str, Feature] = {}
    for observe in OBSERVERS:
        for feature in observe(view):
            features[feature.name] = feature
    _raise_loss(features)
    return features


_PLAIN = {"comb", "edge", "position_ceiling", "last_chunk_only"}
_ELSEWHERE = {"comb_warm", "warm_loss", "reload_loss", "pd_loss", "load_loss", "abort_loss", "continue_loss"} | {
    "crossed_identity"
}


def _raise_loss(features: dict[str, Feature]) -> None:
    """A loss that is clear in one place is a loss, even where most trials of the table were never exposed to it."""
    for name, places in (("plain_loss", _PLAIN), ("loss", _PLAIN | _ELSEWHERE)):
        clearest = max((features[p].presence or 0.0 for p in places if p in features), default=0.0)
        if name in features and (features[name].presence or 0.0) < clearest:
            features[name] = replace(features[name], presence=clearest)


def settings(evidence: Any) -> dict[str, Any]:
    """Evidence as a plain dict; every part is optional.

    `config` (topk, ratio, window, page, chunk, context_limit), `digests` (buffer -> equal?), `pages` (words or codes of
    page findings), `logs` (rule -> count), `flags` (flag that was switched -> True when that heals).
    """
    if evidence is None:
        return {}
    if is_dataclass(evidence) and not isinstance(evidence, type):
        evidence = asdict(evidence)
    if not isinstance(evidence, Mapping):
        raise ValueError(
            "evidence is a mapping or a dataclass with config, digests, pages, logs, flags; each is optional"
        )
    known = {"config", "digests", "pages", "logs", "flags"}
    found = {key: evidence[key] for key in known if evidence.get(key) is not None}
    flat = {key: value for key, value in evidence.items() if key not in known}
    found["config"] = _numbers({**flat, **dict(found.get("config", {}))})
    return found


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
    gain = _binomial(good, ends) + _binomial(total - good, n - ends) - _binomial(total, n)
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


class _View:
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


def _loss(v: _View) -> list[Feature]:
    from scipy.stats import binom

    strata: dict[tuple, np.ndarray] = {}
    for key in set(zip(v.probe, v.arm, v.warm, v.load > 1, v.turn > 1, strict=True)) if v.n else ():
        mask = (v.probe == key[0]) & (v.arm == key[1]) & (v.warm == key[2])
        strata[key] = mask & ((v.load > 1) == key[3]) & ((v.turn > 1) == key[4])
    misses, n = v.rate(np.ones(v.n, bool))
    counts = [(misses, n), *(v.rate(mask) for mask in strata.values())]
    tails = [float(binom.sf(m - 1, k, LAPSE)) for m, k in counts if m]
    p = min(1.0, min(tails, default=1.0) * (1 if len(counts) <= 2 else len(counts)))
    base_misses, base_n = v.rate(v.base)
    out = [Feature("loss", presence_of(p) if n >= 6 else None, f"{misses} of {n} measured trials miss", n, misses)]
    if base_n >= 12:
        share = base_misses / base_n
        rest = float(binom.sf(base_misses - 1, base_n, LAPSE)) if base_misses else 1.0
        out.append(
            Feature("plain_loss", presence_of(rest), f"{base_misses} of {base_n} plain cold trials miss", base_n, share)
        )
        rare = presence_of(p) * float(misses / max(n, 1) < 0.15)
        out.append(Feature("rare_loss", rare, f"misses are rare: {misses} of {n}", n))
    if len(v.controls) >= 3:
        hit = table.hits(v.controls)[table.column(v.controls, "control", "") != "absent"]
        bad, all_ = int((hit == 0).sum()), int(hit.notna().sum())
        if all_ >= 3:
            out.append(Feature("controls_fail", float(bad > 0.34 * all_), f"{bad} of {all_} controls fail", all_))
    return out


def _length(v: _View) -> list[Feature]:
    x, y, needle = v.length[v.base], v.hit[v.base], v.needle[v.base]
    out: list[Feature] = []
    if len(y) < 12 or len(np.unique(x)) < 3:
        return out
    whole = best_split(x, y)
    rivals = {
        "edge": whole,
        "position_ceiling": best_split(needle, y),
        "far_from_end": best_split(x - needle, y),
    }
    chunk, last = _last_chunk(v, x, y, needle)
    gains = {name: split.gain if split else 0.0 for name, split in rivals.items()}
    gains["last_chunk_only"] = last
    by_time = best_split(v.number("ordinal")[v.base], y)
    best = max(*gains.values(), by_time.gain if by_time else 0.0)
    varied = np.isfinite(needle).sum() >= 12 and len(np.unique(np.round(needle / x, 1))) >= 3
    for name, gain in gains.items():
        if name != "edge" and not varied:
            continue
        strength = float(np.clip((gain - 3) / 4, 0, 1)) * float(np.exp(min(0.0, gain - best + 0.5) / 2.0))
        split = rivals.get(name)
        if name == "last_chunk_only":
            text = f"hits need the needle in the last {chunk} tokens' chunk or a single pass"
            out.append(Feature(name, strength, text, len(y), chunk))
            continue
        if split is not None:
            strength *= float(split.top - split.bottom >= 0.25)
        what = {"edge": "length", "position_ceiling": "needle position", "far_from_end": "distance from the end"}[name]
        where = f"between {split.low:,.0f} and {split.high:,.0f}" if split else "at no threshold"
        rates = f" ({100 * split.top:.0f} % below, {100 * split.bottom:.0f} % above)" if split else ""
        value = (split.low, split.high) if split else None
        out.append(Feature(name, strength, f"recall falls with {what} {where} tokens{rates}", len(y), value))
    if max(gains.values()) >= best - 0.5:
        _predict(v, gains, rivals, chunk)
    if whole is not None and gains["edge"] > max(5, best - 6):
        below, above = y[x <= whole.low], y[x >= whole.high]
        clean = min(below.mean() if len(below) else 0.5, 1 - above.mean() if len(above) else 0.5)
        narrow = math.log2(max(whole.high, 1) / max(whole.low, 1))
        sharp = float(np.clip((clean - 0.75) / 0.15, 0, 1))
        out.append(
            Feature("sharp", sharp, f"the fall is {'a step' if sharp > 0.5 else 'gradual or partial'}", len(y), narrow)
        )
        out.append(
            Feature("soft_fall", 1 - sharp, f"{100 * clean:.0f} % of trials lie on the right side of the edge", len(y))
        )
        out += _constants(v, whole, narrow)
    elif v.rate(v.base)[0] > 0:
        out += [
            Feature("sharp", 0.0, "no step with length", len(y)),
            Feature("soft_fall", 0.0, "no fall with length", len(y)),
        ]
    return out


def _predict(v: _View, gains: dict[str, float], rivals: dict[str, Split | None], chunk: int) -> None:
    """Marks the rows that length and needle position alone would let hit, so that other effects are sought there."""
    best = max(gains, key=lambda name: gains[name])
    if gains[best] < 5:
        return
    if best == "last_chunk_only":
        v.good = v.needle // chunk == (v.length - 1) // chunk
        return
    x = {"edge": v.length, "position_ceiling": v.needle, "far_from_end": v.length - v.needle}[best]
    at, fit = falling_fit(x[v.base], v.hit[v.base])
    held = at[fit >= 0.85]
    v.good = x <= (held.max() if len(held) else at.min())


def _constants(v: _View, edge: Split, narrow: float) -> list[Feature]:
    if narrow > 1.2:
        return []
    out = []
    found = constants_in((edge.low, edge.high), v.config)
    weight = float(np.clip(1.25 - narrow / 1.2, 0.15, 1))
    kinds = {
        "edge_at_topk": lambda c: c.formula.startswith("top-k") and "stash" not in c.formula,
        "edge_at_other_k": lambda c: c.formula.startswith("another"),
        "edge_at_window": lambda c: c.formula.startswith("window"),
        "edge_at_chunk": lambda c: "chunk" in c.formula and c.specific,
        "edge_at_limit": lambda c: "context limit" in c.formula,
        "edge_at_stash": lambda c: "stash" in c.formula,
    }
    for name, test in kinds.items():
        if name == "edge_at_topk" and "topk" not in v.config:
            continue
        if name in ("edge_at_window", "edge_at_chunk", "edge_at_limit") and _CONFIG[name] not in v.config:
            continue
        match = [c for c in found if test(c)]
        if name == "edge_at_stash" and narrow > 0.2:
            continue
        text = (
            f"the edge fits {match[0].formula}"
            if match
            else f"the edge fits no {name.removeprefix('edge_at_')} constant"
        )
        out.append(Feature(name, weight if match else 0.0, text, 0, match[0].value if match else None))
    return out


_CONFIG = {"edge_at_window": "window", "edge_at_chunk": "chunk", "edge_at_limit": "context_limit"}


def _last_chunk(v: _View, x: np.ndarray, y: np.ndarray, needle: np.ndarray) -> tuple[int, float]:
    sizes = [int(v.config["chunk"])] if v.config.get("chunk") else [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    best = (sizes[0], 0.0)
    keep = np.isfinite(needle) & np.isfinite(x)
    if keep.sum() < 12:
        return best
    x, y, needle = x[keep], y[keep], needle[keep]
    for size in sizes:
        inside = needle // size == (x - 1) // size
        n, k = inside.sum(), y[inside].sum()
        if not 0 < n < len(y) or k / n <= (y.sum() - k) / (len(y) - n):
            continue
        gain = float(_binomial(k, n) + _binomial(y.sum() - k, len(y) - n) - _binomial(y.sum(), len(y)))
        gain -= 0.0 if v.config.get("chunk") else math.log(len(sizes))
        if gain > best[1]:
            best = (size, gain)
    return best


def _residues(v: _View) -> list[Feature]:
    out = []
    cold = v.base
    warm = v.measured & v.warm & (v.turn <= 1 if np.isfinite(v.turn).any() else True)
    found = {}
    for name, mask in (("comb", cold), ("comb_warm", warm)):
        x, y = v.length[mask], v.hit[mask]
        if len(np.unique(x)) < 12:
            continue
        result = comb_test(x, y, permutations=200 if len(y) <= 1500 else 0)
        if result.p_value < 0.01 and len(y) <= 1500:
            result = comb_test(x, y, permutations=1000)
        inside = np.isin(np.round(x) % (result.period or 1), result.residues)
        dead = 1 - y[inside].mean() if result.state == "comb" and inside.any() else 0.0
        strength = presence_of(result.p_value) * float(dead >= 0.6 and dead - result.misses_elsewhere >= 0.4)
        found[name] = strength
        out.append(Feature(name, strength, str(result), len(y), (result.period, result.residues)))
    return out


def _cache(v: _View) -> list[Feature]:
    out = []
    asked_warm = (v.wanted == "warm") | np.char.endswith(v.label.astype(str), "/continue")
    if (asked := asked_warm & np.isfinite(v.cached)).sum() >= 4:
        cold = int((v.cached[asked] == 0).sum())
        share = cold / asked.sum()
        text = f"{cold} of {int(asked.sum())} trials meant to be warm had no cached token"
        out.append(Feature("warm_vacuous", float(np.clip((share - 0.3) / 0.4, 0, 1)), text, int(asked.sum())))
    state = np.where(v.warm, "warm", np.where((v.cached == 0) | (v.cache == "cold"), "cold", ""))
    frame = v.frame.assign(_state=state)
    single = ~(v.load > 1)
    pairs = pair_up(frame[single].drop(columns=[c for c in ("cache",) if c in frame]), "_state", "cold", "warm")
    compared = compare_pairs(pairs, "cold", "warm")
    if compared.pairs >= 5:
        one = compared.only_first > compared.only_second
        out.append(Feature("warm_loss", _one_sided(compared) * one, str(compared), compared.pairs))
        out.append(Feature("cold_loss_only", _one_sided(compared) * (not one), str(compared), compared.pairs))
    elif min(v.rate(v.warm & single)[1], v.rate(v.base & ~v.warm)[1]) >= 8:
        out.append(_contrast(v, "warm_loss", v.warm & single, v.base & ~v.warm, "warm", "cold"))
    words = [f"{a} {b} {c}" for a, b, c in zip(v.arm, v.cache, v.label, strict=True)]
    reload = np.array([bool(RELOAD.search(word)) for word in words], bool)
    if min(v.rate(reload)[1], v.rate(v.warm & ~reload)[1]) >= 5:
        out.append(_contrast(v, "reload_loss", reload, v.warm & ~reload, "reloaded", "device hits"))
    if any(f.name == "warm_loss" and (f.presence or 0) > 0.5 for f in out) and v.rate(v.warm & single)[1] >= 12:
        mask = v.warm & single & v.good & v.measured & np.isfinite(v.cached) & np.isfinite(v.length)
        split = best_split(-(v.length - v.cached)[mask], v.hit[mask])  # lost when the suffix is short
        gain = split.gain if split else 0.0
        where = f"about {-split.high:,.0f}" if split else "no"
        text = f"warm requests with a suffix of more than {where} tokens are right"
        out.append(Feature("long_suffix_heals", float(np.clip((gain - 3) / 4, 0, 1)), text, int(mask.sum())))
    kept, sent = (np.char.endswith(v.label.astype(str), "/" + end) for end in ("continue", "resend"))
    if min(v.rate(kept)[1], v.rate(sent)[1]) >= 4:
        out.append(_contrast(v, "continue_loss", kept, sent, "continued", "re-sent"))
    elif min(v.rate(v.turn > 1)[1], v.rate(v.base)[1]) >= 6:
        out.append(_contrast(v, "continue_loss", v.turn > 1, v.base, "later turns", "first turns"))
    return out


def _arms(v: _View) -> list[Feature]:
    out = []
    if v.pd_arm.any() and (~v.pd_arm & (v.arm != "")).any():
        frame = v.frame.assign(_side=np.where(v.pd_arm, "PD", "combined"))
        compared = compare_pairs(pair_up(frame, "_side", "combined", "PD"), "combined", "PD")
        if compared.pairs >= 6:
            one = compared.only_first > compared.only_second
            lost = v.pd_arm & (v.hit == 0)
            low, high = (v.length[lost].min(), v.length[lost].max()) if lost.any() else (0, 0)
            like = v.base_of_all & ~v.pd_arm & (v.length >= 0.9 * low) & (v.length <= 1.1 * high)
            unpaired = _contrast(v, "pd_loss", v.pd_arm & (v.length >= low), like, "PD", "other arms").presence or 0.0
            strength = max(_one_sided(compared), min(unpaired, 0.9)) * one
            out.append(Feature("pd_loss", strength, str(compared), compared.pairs))
            misses = min(compared.only_second + compared.neither, compared.only_first + compared.neither)
            both = presence_of(max(compared.neither / compared.pairs < 0.06, 1e-4)) * float(misses >= 3)
            both *= float(compared.neither >= 2 * (compared.only_first + compared.only_second))
            out.append(Feature("both_arms_lose", both, str(compared), compared.pairs))
        else:
            out.append(_contrast(v, "pd_loss", v.pd_arm, ~v.pd_arm, "PD", "combined"))
    other = np.array([bool(REFERENCE.search(name)) for name in v.arm], bool)
    if min(v.rate(other)[1], v.rate(~other)[1]) >= 6:
        m, n = v.rate(other)
        mine, k = v.rate(~other)
        same = float(m / n >= 0.6 * mine / k and m >= 3)
        out.append(
            Feature("reference_same", same, f"an independent server misses {m} of {n}, this one {mine} of {k}", n + k)
        )
    return out


def _order(v: _View) -> list[Feature]:
    order = v.number("ordinal")
    mask = v.measured & np.isfinite(order) & ~(v.load > 1) & ~v.warm & (v.probe != "abort") & v.good
    if mask.sum() < 20:
        return []
    x, y, length = order[mask], v.hit[mask], v.length[mask]
    rank = np.argsort(x, kind="stable")
    y, length, x = y[rank], length[rank], x[rank]
    result = drift(y.tolist())
    # a change of the question over time is no drift: within each half-octave of length the order must matter too
    stratum = np.floor(2 * np.log2(np.maximum(np.nan_to_num(length, nan=1), 1)))
    p = _ordered_p(y, stratum)
    split = best_split(x, y)
    late = float(split is not None and split.gain > 4 and split.top - split.bottom > 0.25)
    text = (
        f"recall falls with the number of requests ({result})"
        if p < 0.05
        else f"no trend with request order (p = {p:.2g})"
    )
    return [Feature("drift", presence_of(p) * late, text, len(y), result.onset)]


def _load(v: _View) -> list[Feature]:
    out = []
    many, alone = (v.load > 1) & v.good, (v.load <= 1) & ~v.warm & v.good & v.base
    if min(v.rate(many)[1], v.rate(alone)[1]) >= 8:
        out.append(_contrast(v, "load_loss", many, alone, "concurrent", "serial"))
        sizes = v.load[many]
        if len(np.unique(sizes)) >= 3:
            captured = np.isin(v.load, [1, 2, 4, 8, 16, 24, 32, 48, 64, 128])
            if min(v.rate(many & captured)[1], v.rate(many & ~captured)[1]) >= 6:
                out.append(
                    _contrast(v, "padded_loss", many & ~captured, many & captured, "padded sizes", "captured sizes")
                )
    ask, before = (v.probe == "abort") & v.good, v.base & v.good
    if v.rate(ask)[1] >= 4 and v.rate(before)[1] >= 6:
        out.append(_contrast(v, "abort_loss", ask, before, "after aborts", "without aborts"))
    for name in PLACE:
        if name in v.frame.columns and np.isfinite(v.number(name)).sum() >= 12:
            split = best_split(v.number(name), v.hit)
            gain = split.gain if split else 0.0
            where = f"above page {split.low:,.0f} to {split.high:,.0f}" if split else "with no page number"
            out.append(Feature("placement", float(np.clip((gain - 3) / 4, 0, 1)), f"recall is lost {where}", v.n))
            break
    for name in TENANT:
        column = v.text(name)
        if len(set(column)) >= 2:
            crossed = v.warm & (column != "") & v.good
            if v.rate(crossed)[1] >= 4 and v.rate(v.base & v.good)[1] >= 6:
                out.append(_contrast(v, "crossed_identity", crossed, v.base & v.good, f"hits across {name}s", "plain"))
            break
    return out


def _answers(v: _View) -> list[Feature]:
    out = []
    missed = v.measured & (v.hit == 0)
    answer, expected, source = v.text("answer"), v.text("expected"), v.text("answered_from")
    n = int(missed.sum())
    foreign = missed & np.char.startswith(source.astype(str), "trial:")
    if not (source != "").any():
        foreign = missed & (v.outcome != "near") & _foreign(answer, expected)
    answered = v.measured.sum()
    if answered >= 12:
        count = int(foreign.sum())
        out.append(
            Feature("foreign", float(np.clip(count / 2, 0, 1)), f"{count} answers hold another prompt's value", n)
        )
    if n >= 3:
        kinds = {k: float((v.outcome[missed] == k).mean()) for k in (*table.OUTCOMES, "miss")}
        told = 1 - kinds["miss"]
        if told > 0.5:
            for name, share, text in (
                ("near_misses", kinds["near"], "near (a digit or a swap away)"),
                ("empty", kinds["empty"], "empty"),
                ("refusals", kinds["refusal"], "refusals"),
                ("wrong_needle", kinds["other_needle"] + kinds["distractor"], "another statement of the same prompt"),
            ):
                out.append(
                    Feature(
                        name,
                        float(np.clip((share - 0.2) / 0.4, 0, 1)) * min(1.0, (n - 2) / 6),
                        f"{100 * share:.0f} % of {n} misses are {text}",
                        n,
                        share,
                    )
                )
            variety = sum(share > 0.1 for share in kinds.values())
            out.append(Feature("many_faces", float(n >= 5 and variety >= 3), f"{variety} kinds of wrong answers", n))
        if (answer[missed] != "").any():
            texts = [a for a in answer[missed] if a]
            mark = np.array(
                [
                    bool(re.fullmatch(r"\s*(\S)\1{3,}\s*", a)) or "\ufffd" in a or a.strip() in ("<s>", "<unk>", "0")
                    for a in texts
                ]
            )
            out.append(
                Feature(
                    "token_zero",
                    float(np.clip((mark.mean() - 0.2) / 0.4, 0, 1)),
                    f"{int(mark.sum())} of {len(texts)} wrong answers are one token over and over",
                    n,
                )
            )
            loop = np.array([bool(LOOP.search(a[:400])) for a in texts])
            out.append(
                Feature(
                    "loops",
                    float(np.clip((loop.mean() - 0.3) / 0.4, 0, 1)),
                    f"{int(loop.sum())} of {len(texts)} wrong answers loop",
                    n,
                )
            )
            known = missed & (expected != "") & (answer != "") & (v.outcome != "near")
            if known.sum() >= 4:
                start = np.array([_starts(a, e) for a, e in zip(answer[known], expected[known], strict=True)])
                text = f"{int(start.sum())} of {int(known.sum())} wrong answers begin right and then fail"
                out.append(
                    Feature("first_right", float(np.clip((start.mean() - 0.25) / 0.35, 0, 1)), text, int(known.sum()))
                )
    judged = (expected != "") & (answer != "") & missed
    if answered >= 8 and ((expected != "") & (answer != "")).any():
        inside = sum(_bare(e) in _bare(a) for a, e in zip(answer[judged], expected[judged], strict=True))
        out.append(
            Feature(
                "judge_wrong",
                float(np.clip(inside / max(2, 0.3 * max(n, 1)), 0, 1)),
                f"{inside} answers graded wrong hold the expected value",
                n,
            )
        )
    lost = int(np.isin(v.outcome, ["cut", "reasoning_only"]).sum()) + int(
        ((v.text("finish_reason") == "length") & (v.hit == 0)).sum()
    )
    if v.n >= 8:
        share = lost / v.n
        out.append(
            Feature(
                "budget",
                float(np.clip((share - 0.03) / 0.1, 0, 1)),
                f"{lost} of {v.n} answers ended at the token budget",
                v.n,
            )
        )
    return out


def _usage(v: _View) -> list[Feature]:
    out = []
    wished, counted, got = v.number("target_tokens"), v.number("counted_tokens"), v.number("prompt_tokens")
    sent = np.where(np.isfinite(counted), counted, wished)
    both = np.isfinite(sent) & np.isfinite(got) & (sent > 0)
    if both.sum() >= 8:
        ratio = got[both] / sent[both]
        tiny = (got[both] <= 4) & (sent[both] >= 64)
        less = (ratio < 0.93) & ~tiny
        top = np.sort(got[both])[-max(2, int(0.1 * both.sum())) :]
        ceiling = less.sum() >= 3 and got[both][less].std() <= 0.02 * got[both][less].mean() + 2
        text = f"{int(less.sum())} of {int(both.sum())} prompts were counted shorter than they were sent"
        text += f", all near {got[both][less].mean():,.0f} tokens" if ceiling else ""
        out.append(Feature("truncated", float(np.clip(less.sum() / 3, 0, 1)), text, int(both.sum()), float(top.mean())))
        out.append(
            Feature(
                "tiny_prompt",
                float(np.clip(tiny.sum() / 2, 0, 1)),
                f"{int(tiny.sum())} prompts were counted as at most 4 tokens",
                int(both.sum()),
            )
        )
        if not np.isfinite(counted).any():
            typical = float(np.median(ratio))
            out.append(
                Feature(
                    "length_estimate",
                    float(np.clip((abs(typical - 1) - 0.1) / 0.08, 0, 1)) * (less.sum() < 3),
                    f"prompts are {typical:.2f} times as long as they were wished",
                    int(both.sum()),
                )
            )
    accept = v.number("accept_length")
    if np.isfinite(accept).sum() >= 10:
        values = accept[np.isfinite(accept)]
        one = float((values <= 1.001).mean())
        groups = [accept[m & np.isfinite(accept)] for m in (v.warm, ~v.warm, v.turn > 1, v.pd_arm, ~v.pd_arm)]
        means = [float(np.median(g)) for g in groups if len(g) >= 4] or [float(np.median(values))]
        high, low = max(means), min(means)
        apart = low < 0.7 * high
        right = float(np.nanmean(v.hit)) if v.measured.any() else 0.0
        strength = max(one, float(apart)) * (1.0 if right > 0.85 else 0.7)
        out.append(
            Feature(
                "draft_accept",
                strength,
                f"draft acceptance runs from {low:.2f} to {high:.2f} ({100 * right:.0f} % of answers right)",
                len(values),
            )
        )
    return out


def _repeatability(v: _View) -> list[Feature]:
    keys = [k for k in ("prompt_sha", "trial_key") if k in v.frame.columns] or [
        k
        for k in ("target_tokens", "depth", "needle_token", "question", "expected", "seed", "turn")
        if k in v.frame.columns
    ]
    if not keys or not v.measured.any():
        return []
    frame = pd.DataFrame(
        {"hit": v.hit, "answer": v.text("answer"), "load": np.where(v.load > 1, 1, 0), "warm": v.warm, "arm": v.arm}
    )
    for key in keys:
        frame[key] = v.frame[key].astype("object").where(v.frame[key].notna(), "")
    from scipy.stats import binom

    frame = frame[v.measured]
    out = []
    for name, part in (("flips_serial", frame[frame["load"] == 0]), ("flips_loaded", frame[frame["load"] == 1])):
        groups = part.groupby([*keys, "arm", "warm"], sort=False)["hit"].agg(["size", "min", "max"])
        groups = groups[groups["size"] >= 2]
        if len(groups) >= 6:
            differ = int((groups["min"] != groups["max"]).sum())
            p = float(binom.sf(differ - 1, len(groups), 2 * LAPSE)) if differ else 1.0
            out.append(
                Feature(
                    name,
                    presence_of(p),
                    f"{differ} of {len(groups)} repeated prompts change between hit and miss ({name.split('_')[1]})",
                    len(groups),
                )
            )
    return out


def _inside(v: _View) -> list[Feature]:
    out = []
    digests = v.evidence.get("digests") or {}
    if digests:
        differ = [name for name, equal in digests.items() if equal is False]
        side = [name for name in differ if re.search(r"(?i)index|scale|draft|window|swa|state|side", str(name))]
        text = f"buffers that differ across the transfer: {', '.join(map(str, differ)) or 'none'}"
        out.append(Feature("side_buffer_differs", float(bool(side) and len(differ) < len(digests)), text, len(digests)))
        out.append(Feature("all_buffers_differ", float(len(differ) == len(digests)), text, len(digests)))
        out.append(Feature("buffers_equal", float(not differ), text, len(digests)))
    pages = v.evidence.get("pages")
    if pages is not None:
        rows = (
            pages.astype(str).agg(" ".join, axis=1).tolist()
            if isinstance(pages, pd.DataFrame)
            else [str(p) for p in pages]
        )
        words = " ".join(rows).lower()
        for name, pattern in (
            ("page_layout", r"layout|interleav|tiled|packed|transposed"),
            ("page_scale", r"scale|rounding|power of two"),
            ("page_nonfinite", r"\bnan\b|\binf\b|non.?finite|uninitiali"),
            ("page_stale", r"stale|previous owner|unchanged|not written|zero page|swapped|foreign"),
        ):
            out.append(
                Feature(
                    name,
                    float(bool(re.search(pattern, words))),
                    f"page findings {'' if re.search(pattern, words) else 'do not '}name {name.removeprefix('page_')}",
                    len(rows),
                )
            )
    logs = v.evidence.get("logs")
    if logs:
        for name, pattern in (
            (
                "log_failed_load",
                r"(?i)fail.*(load|store|transfer|retriev)|(load|store|transfer|retriev).*fail|fail.?open",
            ),
            ("log_truncated", r"(?i)truncat|exceed.*context"),
            ("log_nan", r"(?i)\bnan\b|\binf\b|non.?finite"),
        ):
            count = sum(int(value) for key, value in logs.items() if re.search(pattern, str(key)))
            out.append(
                Feature(
                    name,
                    float(count > 0),
                    f"{count} log lines match {name.removeprefix('log_').replace('_', ' ')}",
                    count,
                )
            )
    for flag, heals in (v.evidence.get("flags") or {}).items():
        word = next((n for n, pattern in FLAGS.items() if re.search(pattern, str(flag))), None)
        if word and heals is not None:
            out.append(
                Feature(
                    f"heals_{word}",
                    float(bool(heals)),
                    f"switching {flag} {'heals' if heals else 'changes nothing'}",
                    1,
                )
            )
    return out


FLAGS = {
    "graphs": r"(?i)graph|eager",
    "drafts": r"(?i)draft|specul|mtp|eagle",
    "cache": r"(?i)radix|prefix.?cach|flush",
    "chunk": r"(?i)chunk",
    "dtype": r"(?i)kv.?(cache)?.?dtype|bf16|precision",
    "topk": r"(?i)top.?k",
    "serial": r"(?i)serial|concurren|batch|max.?running",
    "wait": r"(?i)wait|sync|async|overlap",
    "combined": r"(?i)combined|disagg|\bpd\b",
}
OBSERVERS: tuple[Callable[[_View], list[Feature]], ...] = (
    _loss, _length, _residues, _cache, _arms, _order, _load, _answers, _usage, _repeatability, _inside,
)  # fmt: skip


def _contrast(v: _View, name: str, one: np.ndarray, two: np.ndarray, first: str, second: str) -> Feature:
    """One-sided Fisher test: `one` misses more often than `two`."""
    from scipy.stats import fisher_exact

    (a, n), (b, m) = v.rate(one), v.rate(two)
    if not n or not m:
        return Feature(name, None, f"no {first} or no {second} trials", n + m)
    p = float(fisher_exact([[a, n - a], [b, m - b]], alternative="greater")[1])
    text = f"{first}: {a} of {n} miss; {second}: {b} of {m} (p = {p:.2g})"
    return Feature(name, presence_of(p), text, n + m)


def _one_sided(compared: Paired) -> float:
    """Presence of a paired difference: by the one-sided exact test, or by an e-value on its way to 100."""
    by_e = math.log(max(compared.e_value, 1.0)) / math.log(100)
    return max(presence_of(compared.p_value / 2), min(1.0, by_e))


def _ordered_p(y: np.ndarray, stratum: np.ndarray, rounds: int = 400) -> float:
    """One-sided permutation p-value: within strata, later trials miss more often than earlier ones."""
    rank = np.arange(len(y), dtype=float)
    _, stratum = np.unique(stratum, return_inverse=True)
    size = np.bincount(stratum)
    centred = rank - (np.bincount(stratum, weights=rank) / size)[stratum]
    seen = float((centred * y).sum())
    rng = np.random.default_rng(0xD41F)
    order = np.argsort(stratum, kind="stable")
    smaller = 0
    for _ in range(rounds):
        shuffled = np.empty(len(y))
        shuffled[order] = y[np.lexsort((rng.random(len(y)), stratum))]
        smaller += float((centred * shuffled).sum()) <= seen + 1e-9
    return (smaller + 1) / (rounds + 1)


def _binomial(k: Any, n: Any) -> Any:
    k, n = np.asarray(k, float), np.asarray(n, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.clip(k / n, 1e-9, 1 - 1e-9)
        return np.where(n > 0, k * np.log(p) + (n - k) * np.log(1 - p), 0.0)


def _foreign(answer: np.ndarray, expected: np.ndarray) -> np.ndarray:
    values = {e for e in expected if len(e) >= 4}
    out = np.zeros(len(answer), bool)
    for i, (a, e) in enumerate(zip(answer, expected, strict=True)):
        if a and len(a) < 400:
            out[i] = any(word != e and word in values for word in re.findall(r"[\w-]+", a))
    return out


def _starts(answer: str, expected: str) -> bool:
    return len(expected) >= 3 and expected[:2].lower() in answer.lower() and expected.lower() not in answer.lower()


def _bare(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower() or "\0"


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
