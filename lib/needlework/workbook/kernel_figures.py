"""Figures of the kernel notebooks: error along the length, recall against the budget, ranks, and recorded GPU
results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from pandas.io.formats.style import Styler

from needlework.evidence.incidents import root
from needlework.workbook import figures, tables
from needlework.workbook.cannot import CannotAnswer, need

GPU_COLUMNS = (
    *("shape", "kernel", "median_us", "p10_us", "p90_us", "error", "TB_per_s", "share_of_copy", "TFLOP_per_s"),
    *("ours_over_this", "bar", "met", "problem"),
)


def under_test(spec: str, operation: str) -> Callable[..., Any]:
    """The function of a candidate; one that cannot be loaded or cannot run here ends the notebook with a sentence."""
    from needlework.kernels import candidates

    try:
        chosen = candidates.load(spec)
    except ValueError as error:
        raise CannotAnswer(str(error)) from None
    need(not chosen.missing, f"{chosen.name} cannot run here: {chosen.missing}")
    need(operation in chosen.functions, f"{chosen.name} offers {', '.join(chosen.functions)}, not {operation}")
    return chosen.functions[operation]


def accuracy(rows: pd.DataFrame, limits: dict[str, float]) -> Figure:
    """Norm error against row length, one panel a layout: a colour a kernel (its band spans the distributions, its line
    is their median), a marker a distribution. rows: layout, kernel, data, keys, norm_error (an exact result is not
    drawn); limits: the check's limit of each layout."""
    fig, panels = figures.new(7.2, 4.2, columns=len(limits))
    panels = [panels] if len(limits) == 1 else list(panels)
    rows = rows[rows["norm_error"] > 1e-12]
    markers = dict(zip(dict.fromkeys(rows["data"]), figures.MARKERS, strict=False))
    looks = dict(
        zip(dict.fromkeys(rows["kernel"]), zip(figures.OKABE_ITO, ("-", "--", ":") * 3, strict=False), strict=False)
    )
    for axes, (layout, limit) in zip(panels, limits.items(), strict=True):
        here = rows[rows["layout"] == layout]
        for name, of in here.groupby("kernel", sort=False):
            (colour, line), error = looks[name], of.groupby("keys")["norm_error"]
            axes.fill_between(error.min().index, error.min(), error.max(), color=colour, alpha=0.1, lw=0)
            axes.plot(error.median(), color=colour, ls=line, lw=1.4, label=figures.label(name))
            for data, points in of.groupby("data", sort=False):
                axes.plot(
                    points["keys"], points["norm_error"], ls="", marker=markers[data], ms=4, color=colour, mfc="none"
                )
        axes.axhline(limit, color="#555555", ls=":", lw=1)
        axes.annotate("limit", (here["keys"].min(), limit), xytext=(2, 3), textcoords="offset points", fontsize=8)
        figures.log_tokens(axes)
        axes.set(
            yscale="log", xlabel="keys in the row", ylabel="norm error against float64", title=figures.label(layout)
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0e}"))
        kernels = axes.legend(fontsize=7, loc="center left")
    shapes = [panels[-1].plot([], [], ls="", marker=m, ms=4, color="#555555", mfc="none", label=figures.label(kind))[0]
              for kind, m in markers.items()]  # fmt: skip
    panels[-1].add_artist(kernels)
    panels[-1].legend(handles=shapes, fontsize=7, loc="center right")
    return fig


def recall_by_budget(
    ranks: pd.DataFrame, budgets: Sequence[int], predicted: Callable[[int, int], float], *, mark: int = 512
) -> Figure:
    """Share of needles within the budget k: measured (points, Wilson 95 % bars) and predicted (lines), one colour a
    length.

    ranks: tokens, entries, rank; predicted(entries, k) -> share.
    """
    from needlework.analysis.intervals import wilson

    fig, axes = figures.new()
    for i, (_, rows) in enumerate(ranks.groupby("tokens")):
        colour, n = figures.OKABE_ITO[i], len(rows)
        tokens, entries = (int(rows[name].iloc[0]) for name in ("tokens", "entries"))
        hits = [int((rows["rank"] <= k).sum()) for k in budgets]
        shift = [k * 1.06**i for k in budgets]
        axes.plot(budgets, [predicted(entries, k) for k in budgets], color=colour, lw=1.2)
        for x, h in zip(shift, hits, strict=True):
            low, high = (float(v) for v in wilson(h, n)[:2])
            axes.plot([x, x], [low, high], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
        marker = figures.MARKERS[i]
        axes.plot(shift, [h / n for h in hits], ls="", marker=marker, color=colour, label=f"{tokens:,} tokens")
    axes.plot([], [], color="#555555", lw=1.2, label="predicted")
    axes.axvline(mark, color="#555555", ls=":", lw=1)
    axes.annotate(f"k = {mark}", (mark, 0.02), xytext=(3, 0), textcoords="offset points", fontsize=8)
    figures.log_tokens(axes)
    axes.set(xlabel="budget k, in entries of four tokens", ylabel="needles with rank ≤ k", ylim=(-0.04, 1.06))
    axes.legend()
    return fig


def rank_shift(table: pd.DataFrame, *, by: str, exact: str, mark: int | None = None) -> Figure:
    """Each needle's rank in a coarser format against its exact rank; table: needle, rank, and `by`."""
    fig, axes = figures.new(6.0, 4.2)
    base = table[table[by] == exact].set_index("needle")["rank"]
    top = float(table["rank"].max()) * 1.3
    axes.plot([0.9, top], [0.9, top], color="#999999", lw=1, label="unchanged")
    for i, (name, rows) in enumerate(table[table[by] != exact].groupby(by, sort=False)):
        pair = rows.set_index("needle")["rank"]
        x = base.loc[pair.index]
        axes.plot(
            x,
            pair,
            ls="",
            marker=figures.MARKERS[i],
            ms=5 + 1.5 * i,  # open and of different sizes: formats that agree lie on one another
            fillstyle="none",
            mew=1.3,
            color=figures.OKABE_ITO[i],
            label=figures.label(name),
        )
    if mark:
        axes.axhline(mark, color="#555555", ls=":", lw=1)
        axes.annotate(f"k = {mark}", (1, mark), xytext=(2, 3), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="rank in exact arithmetic", ylabel="rank in the coarser format")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)
    return fig


def _recorded(name: str) -> dict[str, Any]:
    """A file of data/kernels, or an empty record where none is kept."""
    path = root() / "data" / "kernels" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _said(setting: dict[str, Any], command: str) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in setting["versions"].items() if v != "absent")
    driver = f", driver {setting['driver']}" if "driver" in setting else ""
    return f"{setting['card']}{driver}, {versions}; {command}"


def recorded_gpu(operation: str, name: str = "h200") -> tuple[pd.DataFrame, str]:
    """Recorded benchmark rows of one operation, and a sentence with card, versions and command; empty where none is
    kept."""
    recorded = _recorded(name)
    if not recorded:
        return pd.DataFrame(), "No GPU result is recorded here: benchmarks/kernels.py writes one."
    rows = pd.DataFrame([row for row in recorded["rows"] if row["operation"] == operation])
    return rows[[column for column in GPU_COLUMNS if column in rows]], _said(recorded["setting"], recorded["command"])


def recorded_accuracy(operation: str, name: str = "h200") -> tuple[pd.DataFrame, str]:
    """Recorded errors against float64 of one operation's main output: kernel, layout, data, keys, norm_error,
    element_error; and card, versions and command."""
    recorded = _recorded(f"accuracy_{name}")
    if not recorded:
        return pd.DataFrame(), "No accuracy is recorded here: benchmarks/kernel_accuracy.py writes it."
    rows = pd.DataFrame([r for r in recorded["rows"] if r["operation"] == operation and r["output"] != "log-sum-exp"])
    return rows, _said(recorded["setting"], recorded["setting"]["command"])


# column of a recorded row -> its head, and how its numbers are written
GPU_HEADS: dict[str, tuple[str, Any]] = {
    "median_us": ("µs", "{:,.1f}"),
    "p10_us": ("µs, p10–p90", None),
    "error": ("error", tables.power),
    "TB_per_s": ("TB/s", "{:.3g}"),
    "share_of_copy": ("of copy", "{:.2g}"),
    "TFLOP_per_s": ("TFLOP/s", "{:.3g}"),
    "ours_over_this": ("ours/this", "{:.3g}"),
    "bar": ("bar", "{:.1f}"),
}


def gpu_table(rows: pd.DataFrame) -> Styler:
    """Rows of `recorded_gpu` as a table that fits a page: short heads with their units; columns that say nothing of
    this operation (no floating-point work, no problem) are left out."""
    spread = [f"{low:,.1f}–{high:,.1f}" for low, high in zip(rows["p10_us"], rows["p90_us"], strict=True)]
    shown = rows.assign(p10_us=spread, met=rows["met"].map({True: "yes", False: "no"})).drop(columns="p90_us")
    silent = [name for name in ("TFLOP_per_s", "problem") if name in rows and not rows[name].fillna(0).any()]
    shown = shown.drop(columns=silent)
    caption = "Recorded: microseconds a call (median; 10th to 90th percentile), and our time over theirs"
    formats = {head: form for name, (head, form) in GPU_HEADS.items() if form and name in shown}
    heads = {name: head for name, (head, _) in GPU_HEADS.items()}
    return tables.table(shown.rename(columns=heads), caption, formats=formats)


def recorded_checks(operation: str, name: str = "h200") -> pd.DataFrame:
    """What check() said of each kernel of an operation on a GPU, as recorded: candidate, size, verdict, failures
    first (no rows: none kept)."""
    results = _recorded(f"checks_{name}").get("results", [])
    rows = [
        (r["candidate"], r["size"], r["says"].split(". Not covered")[0]) for r in results if r["operation"] == operation
    ]
    rows.sort(key=lambda row: "FAILS" not in row[2])
    return pd.DataFrame(rows, columns=["candidate", "size", "verdict"])


def recorded_rows(name: str) -> pd.DataFrame:
    """The rows of another recording of one H200, such as "v32_counters" (what the hardware counted in one call)."""
    return pd.DataFrame(_recorded(f"{name}_h200")["rows"])
