"""Progress in a live notebook: what an instrument has measured so far, drawn while it runs and gone when it ends.

`workbook.start` registers it where a person looks on. The runner draws nothing of it: an executed notebook holds
results only.
"""

from __future__ import annotations

import os
import time
from html import escape
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from needlework.probes.bench.progress import Status, set_default
from needlework.workbook import figures

EVERY_S = 1.0


def partial(status: Status) -> Figure:
    """Recall against length as far as it is measured; at one length, the share of hits against the trials made."""
    from needlework.analysis.intervals import wilson
    from needlework.analysis.trials import NO_MEASUREMENT

    rows = [r for r in status.rows if not r.get("control") and r.get("outcome") not in (None, *NO_MEASUREMENT)]
    if len({r["target_tokens"] for r in rows}) > 1:
        fig = figures.recall_curve(pd.DataFrame(rows), title=f"{status.probe} so far")
        fig.set_size_inches(7.2, 2.6)
        return fig
    fig, axes = figures.new(7.2, 2.6)
    hits = pd.Series([float(r["outcome"] == "exact") for r in rows]).cumsum()
    bounds = [wilson(int(h), n) for n, h in enumerate(hits, 1)]
    trials = range(1, len(rows) + 1)
    axes.fill_between(trials, [b.low for b in bounds], [b.high for b in bounds], alpha=0.25, lw=0)
    axes.plot(trials, [h / n for n, h in enumerate(hits, 1)], marker="o", ms=3)
    axes.set(xlabel="trials", ylabel="share found", ylim=(-0.03, 1.03), title=f"{status.probe} so far")
    return fig


class Drawing:
    """One state of an instrument at work, for a notebook's display."""

    def __init__(self, status: Status | None):
        self.status = status

    def __repr__(self) -> str:
        return str(self.status or "")

    def _repr_html_(self) -> str:
        if self.status is None:
            return ""
        head = f"<p>{escape(str(self.status))}</p>"
        if not self.status.by_length():
            return head
        alt = f"Partial plot of a running instrument: {self.status}"
        return head + figures.picture(partial(self.status), alt).to_img()


class PlotWatch:
    """Draws each state in place of the one before, at most once a second; `close` leaves nothing to be seen."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._show(Drawing(status))
        self._next = time.monotonic() + EVERY_S

    def close(self) -> None:
        if self._handle is not None:
            self._show(Drawing(None))

    def _show(self, drawing: Drawing) -> None:
        if self._handle is None:
            from IPython.display import display

            self._handle = display(drawing, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(drawing)


def enable() -> bool:
    """Draw the progress of every instrument in this notebook; False where nobody looks on (no kernel; the runner)."""
    if os.environ.get("NEEDLEWORK_NOTEBOOK"):
        return False
    from IPython import get_ipython  # type: ignore[attr-defined]

    if getattr(get_ipython(), "kernel", None) is None:  # type: ignore[no-untyped-call]
        return False
    set_default(PlotWatch)
    return True
