"""What every instrument returns: a frozen result with its trials, one honest sentence, and a short table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from .trial import Row

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """Base of all results.

    trials     the instrument's rows in the contract's columns, without the controls
    controls   rows of the controls (an absent fact is rightly refused: such rows are no misses)
    table      what the sentence rests on, a few rows
    sentence   what was seen, with its interval; never more than the trials allow
    verdict    "healthy", "finding", "harness" (the controls failed) or "not proven"
    warnings   what a reader must know before believing the numbers
    stopped    why the run ended early, or ""
    """

    probe: str
    sentence: str
    verdict: str
    trials: pd.DataFrame = field(repr=False)
    table: pd.DataFrame = field(repr=False)
    warnings: tuple[str, ...] = ()
    stopped: str = ""
    details: dict[str, Any] = field(default_factory=dict, repr=False)
    controls: pd.DataFrame | None = field(default=None, repr=False)

    def __str__(self) -> str:
        parts = [self.sentence]
        if self.stopped:
            parts.append(f"Stopped early: {self.stopped}.")
        return " ".join(parts)

    @property
    def healthy(self) -> bool:
        return self.verdict == "healthy"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(w)}</li>" for w in self.warnings)
        table = (
            self.table.to_html(index=False, border=0, escape=True, float_format="{:.3g}".format)
            if len(self.table)
            else ""
        )
        return f"<p>{escape(str(self))}</p>{table}{f'<ul>{notes}</ul>' if notes else ''}"


def outcomes(rows: list[Row]) -> tuple[int, int]:
    """(hits, measured) of rows: what was cut, thought or never answered is no measurement."""
    from needlework.analysis.trials import NO_MEASUREMENT

    measured = [r for r in rows if r["outcome"] not in NO_MEASUREMENT]
    return sum(r["outcome"] == "exact" for r in measured), len(measured)


def hit(row: Row) -> float:
    """1.0 hit, 0.0 miss, NaN no measurement."""
    hits, measured = outcomes([row])
    return float(hits) if measured else float("nan")


def share(rows: list[Row]) -> str:
    """ "6 of 6: above 61 %"."""
    from needlework.analysis.intervals import sentence

    hits, measured = outcomes(rows)
    return sentence(hits, measured)


def tally(
    rows: list[Row], by: Mapping[str, Callable[[Row], Any]] | Sequence[str],
    more: Mapping[str, Callable[[list[Row]], Any]] | None = None, *, ordered: bool = True,
) -> pd.DataFrame:  # fmt: skip
    """Hits with Wilson intervals (95 %): one row a group, with hits, measured, low, high, and the columns of `more`.

    by       columns whose values make the groups, or names with a function of a row
    more     further columns, each with a function of a group's rows
    ordered  groups in the order of their values; False: as they come
    """
    import pandas as pd

    from needlework.analysis.intervals import wilson

    keys = by if isinstance(by, Mapping) else {name: (lambda row, name=name: row[name]) for name in by}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(key(row) for key in keys.values()), []).append(row)
    out = []
    for values in sorted(groups) if ordered else groups:
        members = groups[values]
        hits, measured = outcomes(members)
        low, high = wilson(hits, measured)
        entry = dict(zip(keys, values, strict=True)) | {"hits": hits, "measured": measured, "low": low, "high": high}
        out.append(entry | {name: of(members) for name, of in (more or {}).items()})
    return pd.DataFrame(out, columns=[*keys, "hits", "measured", "low", "high", *(more or {})])


def discordant(pairs: Sequence[tuple[Row, ...]]) -> dict[str, Any]:
    """Pairs in which one side alone hits, with both tests; a pair in which either side measured nothing is left out.

    discordant      (only the first hits, only the second hits); both and neither: hits of both sides, of none
    p_value         exact McNemar; e_value: always valid, however often one looks
    measured_pairs  pairs with both sides measured
    """
    from needlework.analysis.paired import e_value, mcnemar

    hits = [(hit(p[0]), hit(p[1])) for p in pairs]
    first, second, both, neither = (sum(h == want for h in hits) for want in ((1, 0), (0, 1), (1, 1), (0, 0)))
    return {
        "discordant": (first, second),
        "both": both,
        "neither": neither,
        "p_value": mcnemar(first, second),
        "e_value": e_value(first, second),
        "measured_pairs": sum(a == a and b == b for a, b in hits),
    }


def foreign(rows: list[Row]) -> int:
    """Answers that hold the value of another request: no numerical noise can produce them."""
    return sum(str(r.get("answered_from") or "").startswith("trial:") for r in rows)


def surprising(hits: int, measured: int, *, lapse: float = 0.02, tests: int = 1) -> bool:
    """Are there more misses than stray ones at a rate of `lapse`? One-sided binomial test at 1 % over `tests`."""
    from scipy.stats import binom

    return bool(measured and binom.sf(measured - hits - 1, measured, lapse) < 0.01 / tests)


def least_cached(rows: list[Row]) -> int | None:
    return min((r["cached_tokens"] for r in rows if r.get("cached_tokens") is not None), default=None)


def unmeasured(rows: list[Row]) -> str:
    """A sentence on rows that measured nothing: by kind, with the length above which nothing was answered if there is
    one, and the first reason; "" without such rows.
    """
    from needlework.analysis.trials import NO_MEASUREMENT

    lost = [r for r in rows if r["outcome"] in NO_MEASUREMENT]
    if not lost:
        return ""
    kinds = Counter(r["outcome"].replace("_", " ") for r in lost)
    listed = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    reason = next((r["error"] for r in lost if r.get("error")), "")
    if thought := sum(bool(r.get("in_reasoning")) for r in lost):
        reason = f"in {thought} the value stands in the thoughts"
    failed = [r for r in lost if r["outcome"] == "transport"]
    held = [r["prompt_tokens"] for r in rows if r["outcome"] not in NO_MEASUREMENT and r.get("prompt_tokens")]
    above = max(held, default=0)
    where = ""
    if held and len(failed) >= 3 and all((r.get("sent_high") or r["target_tokens"]) > above for r in failed):
        where = f": every prompt above {above:,} tokens"
    return f"{len(lost)} of {len(rows)} trials measured nothing ({listed}{': ' + reason if reason else ''}){where}."
