"""Figures in one style: one helper per kind, each returns a matplotlib Figure; `show(fig, alt=…)` displays it.

Classes use the Okabe-Ito colours with a marker of their own, order uses cividis, sign a diverging map centred
on zero.
Nothing here touches pyplot, so no figure is kept alive or shown twice.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from needlework.workbook.tables import escape, plain

# Okabe and Ito, "Color Universal Design" (2008), without the yellow that is too faint on white
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# an arm keeps its colour and marker in every figure, also where it stands alone; other arms share what is left
ARMS = {"combined": 0, "a": 0, "pd": 1, "b": 1, "all": 6}
ORDER_MAP = "cividis"
MAX_SVG_BYTES = 160_000
# column of a trial table -> what its axis says
AXES = {
    "target_tokens": "prompt tokens",
    "first_turn": "first turn (tokens)",
    "mode": "how the messages are sent",
    "depth": "needle depth (0 start, 1 end)",
}
# words that say nothing about what is seen; an alt text needs at least four others
FILLER = frozenset(("a", "alt", "been", "chart", "description", "figure", "for", "graph", "has", "image", "no",
                    "of", "picture", "plot", "provided", "text", "the", "this", "todo"))  # fmt: skip
STYLE: Any = {
    "figure.figsize": (7.2, 3.6),
    "figure.dpi": 100,
    "savefig.dpi": 110,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=OKABE_ITO),
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "image.cmap": ORDER_MAP,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "needlework",  # ids from content: two executions give the same bytes
}


def use_style() -> None:
    """Set the one style; `workbook.start` and every helper here call it."""
    matplotlib.rcParams.update(STYLE)


def new(width_in: float = 7.2, height_in: float = 3.6, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure in the workbook's style and its axes (one Axes, or an array of them), sizes in inches."""
    use_style()
    fig = Figure(figsize=(width_in, height_in), layout="constrained")
    return fig, fig.subplots(rows, columns)


def label(text: object, max_chars: int = 60) -> str:
    """Text for a label or legend: no control characters, bounded, never read as mathematics.

    A leading underscore would hide a legend entry, so it gets a hair space before it.
    """
    value = plain(text, max_chars)
    if "$" in value:  # a backslash before an escaped dollar would free it again
        value = value.replace("\\", "\u2216").replace("$", "\\$")
    return "\u200a" + value if value.startswith("_") else value


def arm_numbers(names: Iterable[object]) -> dict[str, int]:
    """Arm -> its place in OKABE_ITO and MARKERS: the usual names have theirs everywhere, others take what is left, in
    the order of their names."""
    wanted = sorted({str(name) for name in names})
    free = [n for n in range(len(OKABE_ITO)) if n not in ARMS.values()]
    others = [name for name in wanted if name not in ARMS]
    taken = {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: ARMS[name] if name in ARMS else taken[name] for name in wanted}


# ---- display ----


@dataclass(frozen=True)
class Picture:
    """A drawn figure: SVG, or PNG with 64 colours where the SVG would be larger than 160 kB. Carries its alt text."""

    mime: str
    data: str
    alt: str

    def to_img(self) -> str:
        """The picture as an HTML img element with a data address: nothing is fetched, nothing in it can run."""
        packed = self.data.strip() if self.mime == "image/png" else base64.b64encode(self.data.encode()).decode("ascii")
        return f'<img src="data:{self.mime};base64,{packed}" alt="{escape(self.alt, 1000)}">'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        return {self.mime: self.data, "text/plain": f"[figure] {self.alt}"}, {self.mime: {"alt": self.alt}}


def check_alt(alt: str) -> str:
    """The alt text, stripped; ValueError when it says nothing (too short, or a filler word)."""
    text = " ".join(plain(alt, 1000).split())
    words = text.lower().strip(". ").split()
    if len(text) < 25 or len(set(words) - FILLER) < 4:
        raise ValueError(f"alt text must say what is seen in the figure (at least five words), not {text[:60]!r}")
    return text


def show(fig: Figure, alt: str) -> None:
    """Display `fig` with its alt text: what is seen (axes, shape, the finding), not the title."""
    from IPython.display import display

    display(picture(fig, alt))  # type: ignore[no-untyped-call]


def picture(fig: Figure, alt: str) -> Picture:
    """`fig` drawn to a Picture with the same bytes every time."""
    text = check_alt(alt)
    svg = to_svg(fig)
    if len(svg) <= MAX_SVG_BYTES:
        return Picture("image/svg+xml", svg, text)
    return Picture("image/png", to_png(fig), text)


def to_svg(fig: Figure) -> str:
    """The figure as an SVG document without date or creator."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _small(buffer.getvalue())


def _small(svg: str) -> str:
    """The same drawing in fewer bytes: no comments, no metadata, coordinates to a hundredth of a point."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, flags=re.S)
    head, *pieces = re.split(r'( (?:d|x|y|points)="[^"]*")', svg)
    short = [re.sub(r"(-?\d+\.\d{2})\d+", r"\1", p) if i % 2 == 0 else p for i, p in enumerate(pieces)]
    return re.sub(r"\s*\n\s*", "\n", head + "".join(short)).strip() + "\n"


def to_png(fig: Figure) -> str:
    """The figure as base64 PNG with at most 64 colours."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(raw, format="png", metadata={"Software": None})
    raw.seek(0)
    image = Image.open(raw).convert("RGB")
    image.quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode("ascii") + "\n"


# ---- one helper per kind of figure ----


def recall_table(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and target length: realised median prompt_tokens, hits, n (measurements only), no_measurement,
    recall, low, high.

    Trials without a target length are grouped by the counted one. Raises ValueError when no trial has an outcome (nor a
    score), or none a length."""
    from needlework.analysis.intervals import wilson
    from needlework.analysis.trials import hits, lengths

    data = trials.copy()
    if "arm" not in data or data["arm"].isna().all():
        data["arm"] = "all"
    data["_x"], found = lengths(data), hits(data)
    known = [name for name in ("outcome", "score") if name in data and data[name].notna().any()]
    if not known or data["_x"].isna().all():
        lacking = "a length (target_tokens or prompt_tokens)" if known else "an outcome or a score"
        raise ValueError(f"there is no recall to draw: none of {len(data):,} trials has {lacking}")
    wished = "target_tokens" in data and data["target_tokens"].notna().any()
    data["_length"] = data["target_tokens"] if wished else data["_x"]
    data["_hit"], data["_lost"] = found.eq(1), found.isna()
    rows = data.groupby(["arm", "_length"], dropna=False, sort=True).agg(
        prompt_tokens=("_x", "median"), hits=("_hit", "sum"), asked=("_hit", "size"), no_measurement=("_lost", "sum")
    )
    table = rows.reset_index()
    table["n"] = table["asked"] - table["no_measurement"]
    table["recall"] = table["hits"] / table["n"].where(table["n"] > 0)
    bounds = [wilson(h, n) if n else (0.0, 1.0) for h, n in zip(table["hits"], table["n"], strict=True)]
    table["low"], table["high"] = [float(b[0]) for b in bounds], [float(b[1]) for b in bounds]
    return table[["arm", "prompt_tokens", "hits", "n", "no_measurement", "recall", "low", "high"]]


def recall_curve(
    trials: pd.DataFrame,
    *,
    edges: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Recall against realised prompt tokens, one line per arm, Wilson 95 % bars that fade as they widen (a wide bar is
    weak evidence). Arms after the first are drawn 2.5 % to the right of the one before, so that no bar hides another.
    An arm has the same colour in every figure (see `arm_numbers`).

    trials: a trial table, or a table that `recall_table` made. edges: name -> token count, drawn as dotted vertical
    lines.
    """
    table = trials if {"recall", "low", "high", "n"} <= set(trials.columns) else recall_table(trials)
    fig, axes = new()
    numbers = arm_numbers(table["arm"].dropna())
    for i, (name, rows) in enumerate(table.groupby("arm", sort=True)):
        colour, marker = OKABE_ITO[numbers[str(name)]], MARKERS[numbers[str(name)]]
        rows = rows[rows["n"] > 0].sort_values("prompt_tokens")
        # two arms stand side by side, each point on its own bar
        places = rows["prompt_tokens"].astype(float) * (1 + 0.025 * i)
        axes.plot(places, rows["recall"], marker=marker, ms=5, lw=1.4, color=colour, label=label(name))
        for x, low, high in zip(places, rows["low"], rows["high"], strict=True):
            strength = float(np.clip(1.15 - (high - low), 0.15, 1.0))
            axes.plot(
                [x] * 2,
                [low, high],
                color=colour,
                lw=4,
                alpha=0.75 * strength,
                solid_capstyle="butt",
            )
    for i, (name, tokens) in enumerate((edges or {}).items()):
        axes.axvline(tokens, color="#555555", lw=1, ls=":")
        axes.annotate(
            label(name, 30),
            (tokens, 0.02 + 0.09 * (i % 3)),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8,
            color="#333333",
        )
    log_tokens(axes)
    axes.set(
        xlabel="prompt tokens, as counted by the endpoint",
        ylabel="recall (exact answers)",
        ylim=(-0.04, 1.06),
        title=label(title, 90),
    )
    if set(numbers) - {"all"}:  # one arm too: its colour means something
        axes.legend(loc="best")
    return fig


def log_tokens(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.tick_params(axis="x", labelrotation=0, labelsize=9)


def _tick(value: object) -> object:
    return f"{value:,}" if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else value


def heat_map(
    frame: pd.DataFrame,
    *,
    value: str = "",
    limits: tuple[float, float] | None = None,
    fmt: str = "{:.2g}",
    title: str = "",
) -> Figure:
    """A heat map of a small table (index down, columns across) with each number printed. Token counts on an axis get
    their commas, and a trial table's column name its words."""
    values = frame.to_numpy(float)
    fig, ax = new(max(4.0, 1.6 + 0.62 * values.shape[1]), max(2.2, 1.2 + 0.36 * values.shape[0]))
    finite = values[np.isfinite(values)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    norm = Normalize(low, high if high > low else low + 1e-12)
    image = ax.imshow(values, norm=norm, cmap=ORDER_MAP, aspect="auto")
    ax.grid(False)
    ax.set_xticks(
        range(values.shape[1]), [label(_tick(c), 20) for c in frame.columns], rotation=30 if values.shape[1] > 8 else 0
    )
    ax.set_yticks(range(values.shape[0]), [label(_tick(c), 30) for c in frame.index])
    if values.size <= 400:
        for (row, column), number in np.ndenumerate(values):
            text = fmt.format(number) if np.isfinite(number) else "–"
            dark = np.isfinite(number) and norm(number) < 0.55
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    down, across = (AXES.get(str(name), name) for name in (frame.index.name or "", frame.columns.name or ""))
    ax.set(title=label(title, 90), xlabel=label(across), ylabel=label(down))
    fig.colorbar(image, ax=ax, label=label(value), shrink=0.9)
    return fig


def paired_table(
    both: int, only_first: int, only_second: int, neither: int, *, first: str, second: str, title: str = ""
) -> Figure:
    """The 2 × 2 table of one prompt asked in two arms: counts printed, shaded by count; the off-diagonal cells carry
    the difference."""
    counts = np.array([[both, only_first], [only_second, neither]])
    fig, ax = new(5.2, 2.9)
    ax.imshow(counts, cmap="Greys", vmin=0, vmax=max(1, counts.max()) * 2.6, aspect="auto")
    ax.grid(False)
    for (row, column), count in np.ndenumerate(counts):
        ax.text(
            column,
            row,
            f"{count:,}",
            ha="center",
            va="center",
            fontsize=15,
            fontweight="bold" if row != column else "normal",
        )
    ax.set_xticks([0, 1], [f"{label(second, 24)}\nright", f"{label(second, 24)}\nwrong"])
    ax.set_yticks([0, 1], [f"{label(first, 24)}\nright", f"{label(first, 24)}\nwrong"])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if title:
        ax.set_xlabel(label(title, 90))
    return fig
