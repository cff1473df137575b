"""docs/classes.md lists every class that a diagnosis can name, in the words of the library."""

from __future__ import annotations

from pathlib import Path

from needlework import analysis

PAGE = Path(__file__).resolve().parents[2] / "docs" / "classes.md"


def test_the_page_has_one_row_for_each_class_in_the_librarys_words() -> None:
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in PAGE.read_text().splitlines()]
    classes = analysis.MECHANISMS
    said = [row for row in rows if row[0] in classes]
    assert sorted(said) == sorted((code, one.title, one.test, one.meanwhile) for code, one in classes.items())
