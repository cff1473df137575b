"""Text in a CSV file that a spreadsheet must not run as a formula: one rule for every table that is written as CSV."""

from __future__ import annotations

from typing import Any


def _formula(text: str) -> bool:
    return text[:1] in {"=", "+", "-", "@", "\t", "\r", "'"}


def quoted(cell: Any) -> Any:
    """The cell; text that would run as a formula gets a leading apostrophe (text that has one gets another)."""
    return f"'{cell}" if isinstance(cell, str) and _formula(cell) else cell


def unquoted(text: str) -> str:
    """The inverse of `quoted` for text."""
    return text[1:] if text[:1] == "'" and _formula(text[1:]) else text
