"""Tables: fixed ids, numbers readable, text from servers and logs escaped, bounded and without control characters."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from needlework.workbook import tables

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></table><h1>gone</h1>",
    "[click](javascript:alert(1))",
    '" onmouseover="alert(1)',
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\x1b[2J\x1b[31mred\x1b[0m",
    "safe\u202egnp.exe",
    "a" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_in_cells_headers_and_caption(text: str) -> None:
    frame = pd.DataFrame({text: [text]})
    page = tables.to_html(tables.table(frame, f"Caption {text[:200]}"))
    soup = BeautifulSoup(page, "html.parser")
    assert not soup.find(["script", "img", "h1", "a"]) and len(soup.find_all("table")) == 1
    assert not [k for tag in soup.find_all() for k in tag.attrs if k.startswith("on")]
    assert "\x1b" not in page and "\u202e" not in page and len(page) < 5000


def test_a_format_function_cannot_bring_markup_in() -> None:
    page = tables.to_html(tables.table(pd.DataFrame({"x": [1]}), "C", formats={"x": lambda v: f"<b>{v}</b>"}))
    assert "&lt;b&gt;1&lt;/b&gt;" in page


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    page = tables.to_html(tables.table(pd.DataFrame({"a": ["x"], "b": [1.5], "c": [True], "d": [2]}), "C"))
    styles = page[: page.index("</style>")].split("}")
    right = " ".join(rule for rule in styles if "right" in rule)
    assert ".col1" in right and ".col3" in right and ".col0" not in right and ".col2" not in right
    assert any("td {" in rule and "left" in rule for rule in styles)


def test_same_bytes_twice_and_another_id_for_another_caption() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    first, again, other = (tables.to_html(tables.table(frame, c)) for c in ("C", "C", "D"))
    assert first == again and first.split("</style>")[0] != other.split("</style>")[0]


def test_numbers_are_readable_and_missing_is_a_dash() -> None:
    frame = pd.DataFrame({"v": [65536, np.nan, 0.98765, 1e-9, 3.0, None]}, dtype=object)
    cells = [td.text for td in BeautifulSoup(tables.to_html(tables.table(frame, "C")), "html.parser").find_all("td")]
    assert cells == ["65,536", "–", "0.988", "1e-09", "3", "–"]


def test_long_tables_are_cut_and_say_so() -> None:
    page = tables.to_html(tables.table(pd.DataFrame({"a": range(1000)}), "Many"))
    assert "Many (first 60 of 1,000 rows)" in page and page.count("<tr>") == 61


def test_repeated_labels_do_not_break_a_table() -> None:
    frame = pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"], index=["x", "x"])
    page = tables.to_html(tables.table(frame, "C"))
    assert "a (2)" in page


def test_empty_table_is_a_table() -> None:
    assert "<caption>None yet</caption>" in tables.to_html(tables.table(pd.DataFrame({"a": []}), "None yet"))
