"""Tables: pandas Styler with a fixed id, escaped and bounded text, and a caption. No script."""

from __future__ import annotations

import hashlib
import html
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler

from needlework.serving.scrub import MAX_CHARS, plain

MAX_ROWS = 60
DIGITS = 3  # behind the point


def escape(text: object, max_chars: int = MAX_CHARS) -> str:
    """`plain`, then escaped for HTML text and attributes."""
    return html.escape(plain(text, max_chars))


def _shown(value: Any) -> str:
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return "–"
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        small_or_huge = not 10.0**-DIGITS <= abs(float(value)) < 1e15
        return f"{value:.{DIGITS}g}" if small_or_huge else f"{value:,.{DIGITS}f}".rstrip("0").rstrip(".")
    return escape(value)


def table(
    frame: pd.DataFrame | pd.Series,
    caption: str,
    *,
    formats: Mapping[str, str | Callable[[Any], str]] | None = None,
) -> Styler:
    """A table for notebook and report: `frame` under `caption`.

    formats: column -> format string ("{:.1%}") or function returning text (escaped here too). At most MAX_ROWS rows are
    shown and the caption says so.
    Every cell, header and index label is stripped of ANSI and control characters, cut at 240 characters, and
    HTML-escaped.
    """
    data = frame.to_frame() if isinstance(frame, pd.Series) else frame
    total = len(data)
    data = data.head(MAX_ROWS).reset_index(drop=True)
    data.columns = pd.Index(_unique(plain(c, 80) for c in data.columns))
    note = f" (first {MAX_ROWS:,} of {total:,} rows)" if total > MAX_ROWS else ""
    uuid = hashlib.sha256(f"{caption}|{data.to_csv()}".encode()).hexdigest()[:8]
    styler = Styler(data, uuid=uuid, cell_ids=False).set_caption(escape(caption + note, 300))
    styler = styler.format(_shown, subset=list(data.columns))
    for column, wanted in (formats or {}).items():
        styler = styler.format(_formatter(wanted), subset=[column])
    styler = styler.format_index(escape, axis=1)
    return styler.hide(axis="index").set_table_styles(_alignment(data))


def power(value: float) -> str:
    """A small number with its power of ten: 1.3e-04; exactly zero is 0."""
    return f"{value:.1e}" if value else "0"


def _alignment(data: pd.DataFrame) -> list[Any]:
    """Heads stand over their cells: numbers to the right, text to the left, in the report and in JupyterLab alike."""
    of_numbers = [
        f".col{n}"
        for n, kind in enumerate(data.dtypes)
        if pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
    ]
    rules = [{"selector": "th,td", "props": "text-align:left"}]
    if of_numbers:
        rules.append({"selector": ",".join(of_numbers), "props": "text-align:right;min-width:0;white-space:nowrap"})
    return rules


def _formatter(wanted: str | Callable[[Any], str]) -> Callable[[Any], str]:
    def render(value: Any) -> str:
        if pd.api.types.is_scalar(value) and pd.isna(value):
            return "–"
        return escape(wanted.format(value) if isinstance(wanted, str) else wanted(value))

    return render


def _unique(labels: Any) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        unique.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return unique


def to_html(styler: Styler) -> str:
    """The table as an HTML fragment with its own small style block."""
    return styler.to_html()
