"""What was seen inside a deployment (digests of a transfer, pages, places, logs, switches), as odds of the classes.

A class shows what faults.toml lists for it in nine cases of ten, and anything else in one of fifty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import trials as table
from needlework.analysis.mechanisms import MECHANISMS

LISTED, UNLISTED = 0.9, 0.02
SIDE = re.compile(r"(?i)index|scale|draft|window|swa|state|side")
# findings in pages by what they speak of; the layout comes first, for its scales and stale entries are only its shadow
FINDINGS = {
    "layout": r"layout|interleav|tiled|packed|transposed|row-format|wrong-format",
    "nonfinite": r"\bnan\b|\binf\b|non.?finite|uninitiali|absurd",
    "scale": r"scale|rounding|power of two",
    "stale": r"stale|previous owner|unchanged|not written|never-written|missing|zero page|swapped|foreign",
}
ORDER = r"permuted|out of order"
LOGS = {
    "load": r"(?i)fail.*(load|store|transfer|retriev)|(load|store|transfer|retriev).*fail|fail.?open",
    "truncated": r"(?i)truncat|exceed.*context|context shift",
    "nan": r"(?i)\bnan\b|\binf\b|non.?finite",
}
CACHE_TYPE = re.compile(r"(?i)(?:^|[^a-z0-9])(?:b?f(?:p|loat)?\d+|i?q\d+|u?int\d+|nvfp4|e\dm\d)(?:$|[^a-z0-9])")
SWITCHES = {
    "graphs": r"(?i)graph|eager", "drafts": r"(?i)draft|specul|mtp|eagle", "cache": r"(?i)radix|prefix.?cach|flush",
    "chunk": r"(?i)chunk", "dtype": r"(?i)dtype|bf16|precision", "topk": r"(?i)top.?k",
    "serial": r"(?i)serial|concurren|batch|max.?running", "wait": r"(?i)wait|sync|async|overlap",
    "combined": r"(?i)combined|disagg|\bpd\b",
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One observation: `text` in words; `odds` class -> probability of seeing it; `alarm`: no healthy one shows it."""

    text: str
    odds: Mapping[str, float]
    alarm: bool


def observed(evidence: Mapping[str, Any]) -> list[Seen]:
    """The observations in evidence as `settings` returns it."""
    out = []
    if digests := evidence.get("digests"):
        differ = [name for name, equal in digests.items() if not equal]
        kind = "equal" if not differ else "all" if len(differ) == len(digests) > 1 else "side"
        kind = "main" if kind == "side" and not all(SIDE.search(name) for name in differ) else kind
        text = f"buffers that differ across the transfer: {', '.join(differ) or 'none'}"
        out.append(_seen("digests", [kind], text, bool(differ)))
    if (pages := evidence.get("pages")) is not None:
        kinds = _findings(" ".join(pages).lower()) if pages else ["none"]
        text = f"pages show {', '.join(kinds)}" if pages else "pages show nothing wrong"
        out += [_seen("pages", kinds, text, bool(pages))] if kinds else []
    placed = evidence.get("placement") or []
    if len(placed) >= 8 and (split := _by_page(placed)) is not None:
        apart, text = split
        out.append(_seen("placement", [apart], text, apart))
    selected, own = evidence.get("selected"), evidence.get("config", {}).get("topk")
    own = int(own[0] if isinstance(own, list) else own or 0)
    if selected and own:
        fewest = min(selected.values())
        text = f"{fewest:,} entries selected where {own:,} are configured"
        out.append(_seen("selected", [fewest < own], text, fewest < own))
    for name, pattern in LOGS.items():
        if count := sum(n for rule, n in (evidence.get("logs") or {}).items() if re.search(pattern, rule)):
            out.append(_seen("logs", [name], f"{count} log lines tell of {name}", False))
    for flag, heals in (evidence.get("flags") or {}).items():
        if word := next((n for n, pattern in SWITCHES.items() if re.search(pattern, flag)), None):
            seen = _seen("heals", [word], f"switching {flag} {'heals' if heals else 'changes nothing'}", heals)
            odds = seen.odds if heals else {code: 1 - p for code, p in seen.odds.items()}
            out.append(Seen(seen.text, odds, bool(heals)))
    return out


def counted(trials: pd.DataFrame, c: pd.DataFrame) -> list[Seen]:
    """What replies tell beside the answer: values left in the reasoning, no token at all, prompts evaluated shorter
    than they were sent, tokens that drafts win."""
    out = []
    lost = c[c["lost"]]
    thought, silent = lost["thought"], lost["made"] == 0
    if thought.sum() >= max(3, 0.5 * len(lost)):  # what was thought was remembered
        ends = " or ".join(sorted(set(lost["finish"][thought].str.slice(0, 20)) - {""}))
        text = f"{thought.sum()} of {len(lost)} lost values stand in the reasoning, with no answer after it"
        out.append(Seen(text + (f" (finish reason {ends})" if ends else ""), _only(LISTED, 0.001, "N3"), True))
    if silent.sum() >= max(3, 0.5 * len(lost)):  # a model that ends at once has still made one token
        text = f"{silent.sum()} of {len(lost)} lost prompts were answered with nothing (0 completion tokens)"
        out.append(Seen(text, _only(0.5, UNLISTED, "N1", "N3", "F16"), True))
    known = c["lost"] & (c["made"] != 0)  # nothing made, nothing known to be evaluated
    known &= c["evaluated"].notna() & c["sent_low"].notna() & ~(c["cut"] & (c["evaluated"] <= 8))
    cut = int((c["cut"] & known).sum())
    if known.sum() >= 3 and cut in (0, *range(3, len(c))):
        odds = dict.fromkeys(MECHANISMS, 0.98 if not cut else 0.02) | {"N1": 0.02 if not cut else 0.9}
        out.append(
            Seen(f"{cut} of {known.sum()} lost prompts were evaluated shorter than they were sent", odds, cut > 0)
        )
    arms = c.groupby("arm")["lost"].sum()
    if len(arms) == 2 and arms.min() == 0 and arms.max() >= 3 and all(map(CACHE_TYPE.search, arms.index.astype(str))):
        text = f"arms are types of cache: {arms.idxmin()} loses nothing, {arms.idxmax()} does"
        out.append(_seen("heals", ["dtype"], text, False))
    accept = pd.to_numeric(table.column(trials, "accept_length"), errors="coerce")
    if accept.notna().sum() < 10:
        return out
    late = pd.Series(range(len(trials)), trials.index) > len(trials) / 2
    parts: list[pd.Series] = [late, *(trials[n].astype(str) for n in ("cache", "turn", "arm") if n in trials)]
    means = [m for part in parts for m in accept.groupby(part).median()[accept.groupby(part).count() >= 4]]
    low, high = min(means, default=2.0), max(means, default=2.0)
    alarm = bool(low < 0.7 * high or high <= 1.001)
    text = f"draft acceptance runs from {low:.2f} to {high:.2f}"
    return [*out, _seen("drafts", ["low"], text, alarm)] if alarm else out


def _only(shown: float, else_: float, *codes: str) -> dict[str, float]:
    return dict.fromkeys(MECHANISMS, else_) | dict.fromkeys(codes, shown)


def likelihoods(seen: Sequence[Seen]) -> dict[str, float]:
    """Log likelihood of each class, "healthy" and "open" (none that is known) among them."""
    out = {code: sum(math.log(one.odds[code]) for one in seen) for code in MECHANISMS}
    quiet = {True: math.log(0.01), False: math.log(LISTED)}
    return out | {"healthy": sum(quiet[one.alarm] for one in seen), "open": sum(math.log(0.3) for _ in seen)}


def _seen(part: str, kinds: Sequence[Any], text: str, alarm: bool) -> Seen:
    odds = {}
    for code, m in MECHANISMS.items():
        listed = m.inside.get(part, ())
        listed = (True,) if listed is True else listed
        if part in ("placement", "selected"):  # yes or no: what a class does not list it does not show
            odds[code] = LISTED if kinds[0] == (True in listed) else UNLISTED
        else:
            share = listed if isinstance(listed, Mapping) else dict.fromkeys(listed, LISTED)
            odds[code] = max(share.get(kind, UNLISTED) for kind in kinds)
    return Seen(text, odds, alarm)


def _findings(words: str) -> list[str]:
    found = [name for name, pattern in FINDINGS.items() if re.search(pattern, words)]
    if "layout" in found:
        found = ["layout"]
    elif "scale" in found and "stale" in found:  # no owner of a page writes a scale that its format cannot hold
        found.remove("stale" if "out-of-range" in words else "scale")
    return found + (["order"] if re.search(ORDER, words) else [])


def _by_page(placed: Sequence[tuple[float, float]]) -> tuple[bool, str] | None:
    """Do misses lie above one page and hits below it, or the other way round?"""
    from scipy.special import betaln

    page, hit = (np.array(column, float) for column in zip(*sorted(placed), strict=True))
    ends = np.flatnonzero(np.diff(page) > 0) + 1
    if not len(ends):
        return None
    low = np.cumsum(1 - hit)[ends - 1]
    n, total = len(hit), (1 - hit).sum()
    two = betaln(low + 0.5, ends - low + 0.5) + betaln(total - low + 0.5, n - ends - (total - low) + 0.5)
    gain = two - 2 * betaln(0.5, 0.5) - (betaln(total + 0.5, n - total + 0.5) - betaln(0.5, 0.5))
    best = int(np.argmax(gain))
    apart = bool(gain[best] > math.log(20))
    at = f"{page[ends[best] - 1]:,.0f} to {page[ends[best]]:,.0f}"
    return apart, f"the same content is lost {f'on one side of page {at}' if apart else 'at no page number'}"


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
    found = {
        part: read(part, evidence[part])
        for part, read in _PARTS.items()
        if part != "config" and evidence.get(part) is not None
    }
    config = _mapping("config", evidence.get("config") if evidence.get("config") is not None else {})
    return {**found, "config": {**{k: v for k, v in evidence.items() if k not in _PARTS}, **config}}


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


def _words(part: str, value: Any) -> list[str]:
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
    "config": _mapping, "digests": _marks, "pages": _words, "placement": _places, "logs": _counts, "flags": _marks,
    "selected": _counts,
}  # fmt: skip
