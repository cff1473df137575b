"""A browser of trials: what was asked, expected and answered, misses first. Live with filters, still as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from needlework.probes.bench import prompts
from needlework.workbook import onepage, tables
from needlework.workbook.explorers import Explorer, Markup

MOST_ROWS = 12  # of the still table
MOST_LISTED = 400  # of the live list
MOST_TOKENS = 1 << 18  # a prompt that is written once more; a hostile row may claim any length
AROUND = 2  # lines shown on either side of the asked fact
SHOWN = {
    "arm": "arm", "prompt_tokens": "tokens", "needle_token": "place", "expected": "expected", "answer": "answer",
    "outcome": "kind", "cached_tokens": "cached", "logprob": "log-prob", "latency_s": "seconds",
}  # fmt: skip
FORMATS = {"tokens": "{:,.0f}", "place": "{:,.0f}", "cached": "{:,.0f}", "log-prob": "{:.3f}", "seconds": "{:.2f}"}


def prompt_of(row: Mapping[str, Any]) -> prompts.Prompt | None:
    """The prompt of a row once more, the very bytes that were sent; None where the row does not tell how."""
    try:
        names = ("target_tokens", "depth", "genre", "needle", "seed", "control")
        given = {n: v for n in names if (v := row.get(n)) is not None and v == v}
        whole = ("target_tokens", "seed")
        given |= {n: int(given[n]) for n in whole} | json.loads(row.get("spec") or "{}")
        spec = prompts.PromptSpec(**given)
        size = sum(int(part) for part in str(row.get("layout")).split("+"))
        long = max(spec.target_tokens, size, spec.from_start or 0, spec.from_end or 0) > MOST_TOKENS
        return None if long or max(spec.needles, spec.distractors) > 64 else prompts.again(spec, dict(row))
    except (TypeError, ValueError, KeyError, IndexError, RecursionError):
        return None


def excerpt(row: Mapping[str, Any]) -> str:
    """The prompt's beginning, the lines around the asked value, and the question; or why it cannot be shown."""
    if (prompt := prompt_of(row)) is None:
        return "This row does not tell how its prompt was laid out, so it cannot be written once more."
    lines = prompt.text.split("\n")
    asked = next((i for i, line in enumerate(lines) if prompt.expected and prompt.expected in line), None)
    keep = {0, 1, 2, len(lines) - 1}
    keep |= set(range(asked - AROUND, asked + AROUND + 1)) if asked is not None else set()
    out, last = [], -1
    for i in sorted(n for n in keep if 0 <= n < len(lines)):
        out += [f"… {i - last - 1:,} lines …"] * (i > last + 1) + [lines[i]]
        last = i
    return "\n".join(out)


class Trials(Explorer):
    """Trials of a table, misses first. `.value` is the row's number in `.rows`."""

    def __init__(self, trials: pd.DataFrame, title: str = "Trials"):
        rows = onepage.graded(trials)
        order = [name for name in ("hit", "arm", "prompt_tokens", "needle_token") if name in rows]
        self.rows = rows.sort_values(order, kind="stable", ignore_index=True)
        super().__init__(title, self._drawn, choices=range(len(self.rows)))

    def _drawn(self, number: int) -> Markup:
        row = {str(name): value for name, value in self.rows.iloc[number].items()}
        twin = self.rows.get("prompt_sha")
        same = self.rows[twin.eq(row["prompt_sha"])] if twin is not None and row.get("prompt_sha") else self.rows[:0]
        shown = pd.concat([self.rows.iloc[[number]], same.drop(index=number, errors="ignore")]).head(MOST_ROWS)
        told = self._table(shown, "This trial, and others that got the same prompt")
        question = tables.escape(row.get("question") or "", 400)
        return Markup(f"<p>{question}</p>{told}<pre tabindex='0'>{tables.escape(excerpt(row), 4000)}</pre>")

    @staticmethod
    def _table(rows: pd.DataFrame, caption: str) -> str:
        shown = rows[[name for name in SHOWN if name in rows]].rename(columns=SHOWN)
        formats = {name: form for name, form in FORMATS.items() if name in shown}
        return tables.to_html(tables.table(shown, caption, formats=formats))

    def still(self) -> str:
        """The misses as a table, and the first with its prompt; a sentence where there is none."""
        missed = self.rows[self.rows["hit"] == 0]
        if missed.empty:
            return f"<p>{tables.escape(self)}</p>"
        listed = missed.head(MOST_ROWS)
        caption = f"{self.name}: {len(missed):,} of {len(self.rows):,} are misses, the first {len(listed)} of them"
        first = f"<details><summary>The first of them with its prompt</summary>{self.frame(0)}</details>"
        return f"{self._table(listed, caption)}{first}"

    def live(self) -> Any:
        """Filters over a list of trials, and the chosen one."""
        import ipywidgets as w

        wide = {"description_width": "initial"}
        arms = sorted(self.rows["arm"].dropna().astype(str).unique()) if "arm" in self.rows else []
        misses = w.Checkbox(value=bool((self.rows["hit"] == 0).any()), description="misses only", indent=False)
        arm = w.Dropdown(options=["every arm", *arms], description="arm")
        ends = {n: (int(v.min()), int(v.max())) for n in ("prompt_tokens", "needle_token")
                if n in self.rows and len(v := self.rows[n].dropna())}  # fmt: skip
        ranges = {n: w.IntRangeSlider(value=e, min=e[0], max=e[1], description=SHOWN[n], style=wide)
                  for n, e in ends.items()}  # fmt: skip
        chosen = w.Select(rows=8, layout={"width": "40rem"})
        count, view = w.HTML(), w.HTML()

        def filtered(_: Any = None) -> None:
            rows = self.rows
            for name, slider in ranges.items():
                if slider.value != ends[name]:
                    rows = rows[rows[name].between(*slider.value)]
            rows = rows[rows["hit"].eq(0)] if misses.value else rows
            rows = rows[rows["arm"].astype(str).eq(arm.value)] if arm.value in arms else rows
            spans = "; ".join(f"{SHOWN[n]} {r.value[0]:,} to {r.value[1]:,}" for n, r in ranges.items())
            count.value = f"{len(rows):,} of {len(self.rows):,} trials: {tables.escape(arm.value)}; {spans}"
            chosen.options = [(self.label(n), n) for n in rows.index[:MOST_LISTED]]
            chosen.value = next((n for _, n in chosen.options if n == self.value), next(iter(rows.index), None))
            show()

        def show(_: Any = None) -> None:
            if chosen.value is not None:
                self.value = chosen.value
            view.value = self.frame(chosen.value) if chosen.value is not None else "<p>No trial is like this.</p>"

        for control in (misses, arm, *ranges.values()):
            control.observe(filtered, names="value")
        chosen.observe(show, names="value")
        filtered()
        return w.VBox([w.HBox([misses, arm, *ranges.values()]), count, chosen, view])

    def label(self, choice: Any) -> str:
        """One line of the list: hit or miss, arm, length, place, and what was answered."""
        row = self.rows.iloc[choice]
        numbers = [
            f"{row[n]:,.0f}" if n in row and row[n] == row[n] else "?" for n in ("prompt_tokens", "needle_token")
        ]
        word = "right" if row["hit"] else "miss"
        answer = tables.plain(row.get("answer") or "(empty)", 40)
        return f"{word} · {tables.plain(row.get('arm') or '', 20)} · {' tokens, at '.join(numbers)} · {answer}"

    def __str__(self) -> str:
        missed = int((self.rows["hit"] == 0).sum())
        return f"{self.name}: {missed:,} of {len(self.rows):,} answers are misses"


def trials(found: Any, title: str = "Trials") -> Trials | str:
    """The browser over a result's trials (or a table of them): its live form has filters, its still lists the misses.

    A sentence takes its place where nothing was measured.
    """
    table = found if isinstance(found, pd.DataFrame) else found.trials
    return Trials(table, title) if len(onepage.graded(table)) else "No trial measured anything."
