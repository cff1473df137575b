"""What every instrument returns: a frozen result with its trials, one honest sentence, and a short table."""

from __future__ import annotations

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


def unmeasured(rows: list[Row]) -> str:
    """A sentence on rows that measured nothing, by kind and first reason, or ""."""
    from needlework.analysis.trials import NO_MEASUREMENT

    kinds: dict[str, int] = {}
    reason = ""
    for row in rows:
        if row["outcome"] in NO_MEASUREMENT:
            kinds[row["outcome"]] = kinds.get(row["outcome"], 0) + 1
            reason = reason or (row.get("error") or "")
    if not kinds:
        return ""
    listed = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items()))
    return f"{sum(kinds.values())} of {len(rows)} trials measured nothing ({listed}{': ' + reason if reason else ''})."
