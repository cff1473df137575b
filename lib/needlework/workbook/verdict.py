"""The half page at the top of a report: symptom, verdict, evidence, confidence, next step, as the verdict notebook
found them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from needlework.workbook.tables import escape, plain

if TYPE_CHECKING:
    from needlework.workbook.onepage import Brief

MIME = "application/vnd.needlework.summary+json"
FIELDS = ("symptom", "verdict", "evidence", "confidence", "next_step")


@dataclass(frozen=True)
class Summary:
    """What an engineer who was not there reads first; the verdict notebook shows it, the report takes it from there.
    `evidence`: sentences, each with its numbers."""

    symptom: str
    verdict: str
    evidence: Iterable[str]
    confidence: str
    next_step: str
    brief: Brief | None = None  # the page for somebody who was not there; where a diagnosis gave it

    def __post_init__(self) -> None:
        lines = (self.evidence,) if isinstance(self.evidence, str) else self.evidence
        object.__setattr__(self, "evidence", tuple(dict.fromkeys(map(str, lines))))  # each said once

    def __str__(self) -> str:
        return f"{self.verdict} (confidence: {self.confidence}). Next: {self.next_step}"

    def rows(self) -> list[tuple[str, str]]:
        """(heading, HTML) pairs, escaped."""
        evidence = "".join(f"<li>{escape(line, 400)}</li>" for line in list(self.evidence)[:12])
        return [
            ("Symptom", f"<p>{escape(self.symptom, 600)}</p>"),
            ("Verdict", f"<p><strong>{escape(self.verdict, 600)}</strong></p>"),
            ("Evidence", f"<ul>{evidence}</ul>"),
            ("Confidence", f"<p>{escape(self.confidence, 400)}</p>"),
            ("Next step", f"<p>{escape(self.next_step, 600)}</p>"),
        ]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        body = "".join(f"<dt>{html.escape(name)}</dt><dd>{text}</dd>" for name, text in self.rows())
        return {
            MIME: {
                **{f: getattr(self, f) for f in FIELDS},
                "evidence": list(self.evidence),
                **({"brief": self.brief.as_json()} if self.brief else {}),
            },
            "text/html": f'<dl class="nw-summary">{body}</dl>',
            "text/plain": str(self),
        }


def from_mapping(values: Mapping[str, Any]) -> Summary | None:
    """A Summary from JSON (a notebook's output or a ledger's summary); None when it has no verdict."""
    if not isinstance(values, Mapping) or not values.get("verdict"):
        return None
    evidence = values.get("evidence") or ()
    lines = (evidence,) if isinstance(evidence, str) else [plain(e, 400) for e in evidence]
    symptom, verdict, _, confidence, next_step = (str(values.get(f) or "not recorded") for f in FIELDS)
    from needlework.workbook import onepage

    return Summary(symptom, verdict, lines, confidence, next_step, onepage.from_mapping(values.get("brief")))


def from_ledger(values: Mapping[str, Any]) -> Summary | None:
    """A Summary from ledger.json (`analysis.Ledger`): its tests and their results are the evidence, strongest first.

    Returns None when the ledger has no verdict yet.
    """
    if not isinstance(values, Mapping):
        return None
    entries = [e for e in values.get("entries") or () if isinstance(e, Mapping) and e.get("test") != "diagnosis"]
    order = ("strong", "moderate", "weak")
    entries.sort(key=lambda e: order.index(e["strength"]) if e.get("strength") in order else len(order))
    steps = values.get("next_steps") or ("none is left to run",)
    return from_mapping(
        {
            **values,
            "evidence": [f"{e.get('test', 'test')} ({e.get('run', 'run')}): {e.get('result', '')}" for e in entries],
            "next_step": steps[0] if isinstance(steps, (list, tuple)) else steps,
        }
    )
