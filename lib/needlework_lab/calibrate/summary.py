"""From rows of results to their table: per class, what was found, named, accused, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from needlework.analysis.intervals import wilson

from needlework_lab.calibrate.cases import STRENGTHS

if TYPE_CHECKING:
    import pandas as pd

VIEWS = ("outside", "evidence")
TITLES = {
    "outside": "From outside alone: answers, usage, and the sizes that the server states",
    "evidence": "With what a deployment offers inside: digests of transfers, page dumps, physical places",
}


def judged(row: Mapping[str, Any], view: str) -> dict[str, bool]:
    """What is right about one diagnosis. `accused`: a cause is named of which no class was planted; classes that are
    not told apart are one cause."""
    found, truth, ranked = row[view], set(row["faults"]), row[view]["ranked"]
    detected = found["verdict"] in ("named", "two causes") or (
        found["verdict"] == "not proven" and ranked[0] != "healthy"
    )
    both = truth <= set(ranked[:2]) if len(truth) == 2 else False
    return {
        "detected": detected,
        "first": (ranked[0] in truth) if truth else ranked[0] == "healthy",
        "three": truth <= set(ranked[:3]) if truth else "healthy" in ranked[:3],
        "healthy": found["verdict"] == "healthy",
        "accused": any(truth.isdisjoint(group) for group in found["groups"]),
        "both": both,
        "two causes": found["verdict"] == "two causes",
    }


def table(rows: Iterable[Mapping[str, Any]], view: str) -> pd.DataFrame:
    """One row a class and strength: runs, counts of what was right, mean requests. `view` is one of VIEWS."""
    import pandas as pd

    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["strength"]), []).append(row)
    out = []
    for (label, strength), members in sorted(groups.items(), key=lambda item: (len(item[0][0]) > 7, item[0])):
        marks = [judged(row, view) for row in members]
        others: dict[str, int] = {}
        for row, mark in zip(members, marks, strict=True):
            if not mark["first"]:
                others[row[view]["ranked"][0]] = others.get(row[view]["ranked"][0], 0) + 1
        entry: dict[str, Any] = {"class": label, "strength": strength, "runs": len(members)}
        entry |= {name: sum(mark[name] for mark in marks) for name in marks[0]}
        entry["requests"] = round(sum(row["requests"] for row in members) / len(members))
        entry["taken for"] = ", ".join(f"{code} ({n})" for code, n in sorted(others.items(), key=lambda i: -i[1]))
        out.append(entry)
    columns = ["class", "strength", "runs", "detected", "first", "three", "healthy", "accused", "both", "two causes",
               "requests", "taken for"]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


@dataclass(frozen=True, repr=False)
class Summary:
    """The figures of a calibration and how they came about; `facts`: date, command, seeds, versions, minutes."""

    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    facts: Mapping[str, Any]

    def table(self, view: str = "outside") -> pd.DataFrame:
        return table(self.rows, view)

    def totals(self, view: str) -> dict[str, tuple[int, int]]:
        """(right, of) for single classes at each strength, healthy deployments, and pairs."""
        marks = [(row, judged(row, view)) for row in self.rows]
        single = [(row["strength"], m) for row, m in marks if len(row["faults"]) == 1]
        healthy = [m for row, m in marks if not row["faults"]]
        pairs = [m for row, m in marks if len(row["faults"]) == 2]
        out: dict[str, tuple[int, int]] = {}
        for strength in sorted({name for name, _ in single}, key=STRENGTHS.index):
            of = [m for name, m in single if name == strength]
            out |= {
                f"right class first ({strength} strength)": (sum(m["first"] for m in of), len(of)),
                f"right class among the first three ({strength})": (sum(m["three"] for m in of), len(of)),
                f"something found ({strength})": (sum(m["detected"] for m in of), len(of)),
                f"another class named ({strength})": (sum(m["accused"] for m in of), len(of)),
            }
        return out | {
            "healthy called healthy": (sum(m["healthy"] for m in healthy), len(healthy)),
            "healthy accused of something": (sum(m["accused"] for m in healthy), len(healthy)),
            "pairs: both in the first two": (sum(m["both"] for m in pairs), len(pairs)),
            "pairs: two causes said": (sum(m["two causes"] for m in pairs), len(pairs)),
        }

    def markdown(self) -> str:
        """The figures as a page."""
        parts = ["# Calibration", ""]
        parts += [f"* {name}: {value}" for name, value in self.facts.items()]
        for view in VIEWS:
            parts += ["", f"## {TITLES[view]}", "", "| figure | runs | share | 95 % interval |", "|---|---|---|---|"]
            for name, (right, of) in self.totals(view).items():
                if of:
                    low, high = wilson(right, of)
                    share = f"{100 * right / of:.0f} % | {100 * low:.0f} to {100 * high:.0f} %"
                    parts.append(f"| {name} | {right} of {of} | {share} |")
            shown = self.table(view)
            parts += ["", "| " + " | ".join(shown.columns) + " |", "|" + "---|" * len(shown.columns)]
            parts += ["| " + " | ".join(str(v) for v in row) + " |" for row in shown.itertuples(index=False)]
        parts += ["", _LEGEND, ""]
        return "\n".join(parts)

    def __str__(self) -> str:
        lines = []
        for view in VIEWS:
            lines.append(f"{TITLES[view]}:")
            lines += [f"  {name}: {right} of {of}" for name, (right, of) in self.totals(view).items() if of]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return "".join(f"<h4>{escape(TITLES[v])}</h4>{self.table(v).to_html(index=False, escape=True)}" for v in VIEWS)


_LEGEND = """Columns: *runs* with this class planted; *detected*: something other than "healthy" was named or ranked
first; *first*, *three*: the planted class is ranked first, or is (for pairs: both are) among the first three;
*healthy*: the verdict was "healthy"; *accused*: a cause was named of which no class was planted; *both*, *two
causes*: for pairs, both ranked in the first two, and said to be two; *requests* to the examined deployment in one run;
*taken for*: what was ranked first instead. No longer on the list of pairs, because one fault hides the other from every
instrument: N3 or F11 with any other fault, and F05+F12."""


def summarise(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Summary:
    return Summary(rows, facts)
