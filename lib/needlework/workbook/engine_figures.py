"""Figures of the notebooks that read a recorded engine."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from needlework.workbook import figures

OPEN_MARKS = ("o", "x", "+")  # open, so that points in one place stay visible
COLOURS = figures.OKABE_ITO[2:]  # a comparison is no arm: not the colours that mean `combined` and `pd`


def first_step_distances(tables: Mapping[str, pd.DataFrame], *, budget: int, title: str = "") -> Figure:
    """How far apart two answers to one prompt are in their first step, against prompt length; the budget is drawn.

    tables: what is compared -> a table of `analysis.distances` (target_tokens, first_step in nats); at most three.
    """
    fig, axes = figures.new()
    for (name, table), mark, colour in zip(tables.items(), OPEN_MARKS, COLOURS, strict=False):
        shown = figures.label(name)
        axes.plot(table["target_tokens"], table["first_step"], mark, color=colour, label=shown, fillstyle="none")
    axes.axvline(budget, color="#555555", ls=":", lw=1)
    # beside the line, where no point lies: distances are small up to the budget
    axes.annotate(
        f"index_topk = {budget:,}",
        (budget, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    figures.log_tokens(axes)
    axes.set(xlabel="prompt tokens", ylabel="first-step distance (nats)", title=figures.label(title, 90))
    axes.legend(loc="upper left")
    return fig
