"""Widgets with a still form: one display bundle holds the live ipywidgets view and an HTML still with the same finding.

JupyterLab picks the live view; the report, GitHub and a page without a kernel show the still: radio buttons and CSS,
no script,
operable by keyboard, and every frame is printed. A widget always has a default and a `.value`, and running its cell
again keeps
the value that was chosen.

`Slider` and `Picker` take prepared frames, or a function that draws one and the choices. A frame is a
Figure with alt text
(`frame(fig, alt=…)`), a Styler or anything with `_repr_html_`, or plain text (escaped).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from needlework.evidence import incidents
from needlework.workbook import figures, tables

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_STILLS = 12
MARK = "nw-x"  # begins every explorer id, so that the report can make ids unique on its page
_CHOSEN: dict[str, Any] = {}  # explorer id -> last value, so that a re-run of the cell starts where the reader was


def frame(content: Any, alt: str | None = None) -> str:
    """One frame as an HTML fragment: a Figure or Picture (alt required), an object with `_repr_html_`, or text."""
    if isinstance(content, Figure):
        if alt is None:
            raise ValueError("a figure in an explorer needs alt text; pass alt= or give a Picture")
        content = figures.picture(content, alt)
    if isinstance(content, figures.Picture):
        return content.to_img()
    if hasattr(content, "_repr_html_"):
        return str(content._repr_html_())
    return f"<p>{tables.escape(content, 2000)}</p>"


class Markup(str):
    """HTML that stands as it is."""

    def _repr_html_(self) -> str:
        return str(self)


class Explorer:
    """Base of every explorer: named choices, one HTML frame per choice, a live widget and a still.

    name: what is chosen ("depth", "incident"); it labels the control. frames: choice -> frame (see `frame`), or a
    function of the choice that
    is called when needed. choices: needed with a function. start: the default choice (the first). stills: the choices
    that the still shows
    (all, evenly thinned to 12). note: one sentence under the control, the finding that the frames carry together.
    """

    control = "slider"

    def __init__(
        self,
        name: str,
        frames: Mapping[Any, Any] | Callable[[Any], Any],
        *,
        choices: Iterable[Any] | None = None,
        start: Any = None,
        stills: Iterable[Any] | None = None,
        note: str = "",
    ):
        self.name = name
        self.choices = list(frames) if isinstance(frames, Mapping) and choices is None else list(choices or ())
        if not self.choices:
            raise ValueError(f"the explorer {name!r} has nothing to choose from")
        self._frames = frames
        self._cache: dict[Any, str] = {}
        self.note = note
        self.stills = list(stills) if stills is not None else _thin(self.choices, MAX_STILLS)
        digest = hashlib.sha256("\0".join([type(self).__name__, name, note, *map(str, self.choices)]).encode())
        self.id = f"{MARK}{digest.hexdigest()[:8]}"
        default = self.choices[0] if start is None else start
        if default not in self.choices:
            raise ValueError(f"the explorer {name!r} cannot start at {default!r}")
        self.default = default
        self._value = _CHOSEN.get(self.id, default)

    @property
    def value(self) -> Any:
        """The current choice; setting it moves the live widget too."""
        return self._value

    @value.setter
    def value(self, choice: Any) -> None:
        if choice not in self.choices:
            raise ValueError(f"{self.name} has no choice {choice!r}")
        self._value = _CHOSEN[self.id] = choice

    def frame(self, choice: Any) -> str:
        """The HTML frame of one choice."""
        if choice not in self._cache:
            content = self._frames[choice] if isinstance(self._frames, Mapping) else self._frames(choice)
            self._cache[choice] = frame(content)
        return self._cache[choice]

    # ---- the two forms ----

    def still(self) -> str:
        """The HTML form: a radio button per frame, CSS shows the chosen one; without CSS, and in print, all are
        shown."""
        shown = [c for c in self.choices if c in self.stills or c == self.default]
        buttons, bodies, rules = [], [], []
        for i, choice in enumerate(shown):
            label = tables.escape(self.label(choice), 60)
            checked = " checked" if choice == self.default else ""
            buttons.append(
                f'<input type="radio" name="{self.id}" id="{self.id}-{i}"{checked}>'
                f'<label for="{self.id}-{i}">{label}</label>'
            )
            caption = f"<p class='nw-choice'>{tables.escape(self.name, 80)}: {label}</p>"
            bodies.append(f"<div tabindex='0'>{caption}{self.frame(choice)}</div>")
            rules.append(f"#{self.id}-{i}:checked~.nw-frames>:nth-child({i + 1})")
        style = (
            f"@media screen{{#{self.id} .nw-frames>*{{display:none}}{','.join(rules)}{{display:block}}"
            f"#{self.id} .nw-choice{{display:none}}}}@media print{{#{self.id} input,#{self.id} label{{display:none}}}}"
        )
        left_out = len(self.choices) - len(shown)
        more = f" {left_out} further choices in JupyterLab." if left_out else ""
        note = f"<p>{tables.escape(self.note + more, 600)}</p>" if self.note or more else ""
        return (
            f'<div class="nw-still" id="{self.id}"><style>{style}</style>'
            f"<fieldset><legend>{tables.escape(self.name, 80)}</legend>"
            f'{"".join(buttons)}<div class="nw-frames">{"".join(bodies)}</div></fieldset>{note}</div>'
        )

    def label(self, choice: Any) -> str:
        """How a choice is written on the control."""
        return f"{choice:,}" if isinstance(choice, int) and not isinstance(choice, bool) else str(choice)

    def live(self) -> Any:
        """The ipywidgets form."""
        import ipywidgets

        options = [(tables.plain(self.label(c), 60), c) for c in self.choices]
        kind = ipywidgets.SelectionSlider if self.control == "slider" else ipywidgets.Dropdown
        control = kind(
            options=options,
            value=self.value,
            description=tables.plain(self.name, 80),
            style={"description_width": "initial"},
        )
        picture = ipywidgets.HTML(value=self.frame(self.value))

        def moved(change: Any) -> None:
            self.value = change["new"]
            picture.value = self.frame(self.value)

        control.observe(moved, names="value")
        note = [ipywidgets.HTML(value=f"<p>{tables.escape(self.note, 600)}</p>")] if self.note else []
        return ipywidgets.VBox([control, picture, *note])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self.still(), "text/plain": str(self)}
        live = self.live()._repr_mimebundle_()
        if live and WIDGET_VIEW in live:
            bundle[WIDGET_VIEW] = live[WIDGET_VIEW]
        return bundle

    def __str__(self) -> str:
        return f"[explorer] {self.name}: {len(self.choices)} choices, shown is {self.label(self.value)}"


class Slider(Explorer):
    """An explorer for ordered choices."""

    control = "slider"


class Picker(Explorer):
    """An explorer for unordered choices: a drop-down list."""

    control = "dropdown"


def _thin(choices: list[Any], most: int) -> list[Any]:
    if len(choices) <= most:
        return choices
    return [choices[round(i * (len(choices) - 1) / (most - 1))] for i in range(most)]


# ---- the workbook's own explorers ----


def incident_picker(start: str | None = None) -> Picker:
    """Choose an incident; each frame says what its bundle holds."""
    return Picker("incident", {name: _incident_frame(name) for name in incidents.names()}, start=start)


def _incident_frame(name: str) -> Any:
    bundle = incidents.incident(name)
    ledger = bundle.load_ledger()
    rows = [
        ("title", bundle.title),
        ("recorded runs", ", ".join(bundle.run_names) or "none"),
        ("evidence", "yes" if bundle.has("evidence") else "none"),
        ("page dumps", "yes" if bundle.has("pages") else "none"),
        ("verdict", ledger.get("verdict") or "none yet"),
    ]
    return tables.table(pd.DataFrame(rows, columns=["part", "what the bundle holds"]), f"Incident {name}")


def ledger_explorer(ledger: Any) -> Picker:
    """Choose a hypothesis of an `analysis.Ledger`; each frame lists the tests that bear on it, for and against."""
    overview = ledger.table()[["code", "title", "status", "strength", "runs"]]
    frames: dict[str, Any] = {"all": tables.table(overview, "Hypotheses")}
    for row in ledger.hypotheses:
        tests = [
            (e.run, e.test, e.result, "against" if row.code in e.exonerates else "for", e.strength)
            for e in ledger.entries
            if row.code in (*e.supports, *e.exonerates)
        ]
        found = pd.DataFrame(tests, columns=["run", "test", "result", "speaks", "strength"])
        frames[row.code] = tables.table(found, f"{row.code} {row.title}: {row.status} ({row.strength})")
    return Picker("hypothesis", frames, note=ledger.verdict)


def recall_explorer(trials: pd.DataFrame, by: str = "depth", **options: Any) -> Slider:
    """Recall against length, one frame for all trials and one per value of the column `by`; the note under it says
    where values were lost."""
    values = sorted(trials[by].dropna().unique()) if by in trials else []
    if not values:
        raise ValueError(f"no trial has a value in the column {by!r}")

    def draw(choice: Any) -> figures.Picture:
        rows = trials if choice == "all" else trials[trials[by] == choice]
        what = f"every {by}" if choice == "all" else f"{by} {choice}"
        table = figures.recall_table(rows)
        return figures.picture(figures.recall_curve(table, title=what), recall_alt(table, what))

    options.setdefault("note", _losses(trials, by))
    return Slider(by, draw, choices=["all", *values], **options)


def _losses(trials: pd.DataFrame, by: str) -> str:
    """One sentence: how many values each arm lost, and at which value of `by`."""
    from needlework.analysis.trials import hits

    told = trials.assign(hit=hits(trials), arm=trials.get("arm", "all")).dropna(subset=["hit"])
    counts = told.groupby(["arm", by])["hit"].agg(asked="count", found="sum").reset_index()
    lost = [
        f"{row['arm']} at {by} {row[by]}: {row['asked'] - row['found']:.0f} of {row['asked']}"
        for row in counts[counts["found"] < counts["asked"]].to_dict("records")
    ]
    return f"Lost: {'; '.join(lost)}." if lost else f"Nothing is lost at any {by}."


def recall_alt(table: pd.DataFrame, what: str = "") -> str:
    """Alt text of a recall curve from its numbers: per arm, recall at the shortest and the longest prompt and where it
    first falls below one half."""
    parts = []
    for arm, rows in table[table["n"] > 0].groupby("arm", sort=True):
        rows = rows.sort_values("prompt_tokens")
        first, last = rows.iloc[0], rows.iloc[-1]
        low = rows[rows["recall"] < 0.5]
        fall = f", below one half from {low['prompt_tokens'].iloc[0]:,.0f} tokens" if len(low) else ""
        parts.append(
            f"{arm}: recall {first['recall']:.2f} at {first['prompt_tokens']:,.0f} tokens, "
            f"{last['recall']:.2f} at {last['prompt_tokens']:,.0f}{fall}"
        )
    return (
        f"Recall against prompt tokens{' for ' + what if what else ''}. "
        + ("; ".join(parts) or "No trial was a measurement")
        + "."
    )
