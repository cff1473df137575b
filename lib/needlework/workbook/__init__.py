"""What a person sees in a notebook: its start, figures, tables, explorers and the summary; and what it opens.

A notebook needs `workbook.start(title)`, `workbook.figures`, `workbook.tables`, `workbook.open_target(spec)`,
`workbook.incident(name)` and `workbook.explorers`; everything here is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "CannotAnswer",
    "Incident",
    "Target",
    "TargetError",
    "advice",
    "deployed",
    "explorers",
    "figures",
    "incident",
    "kind_of",
    "machine",
    "need",
    "open_target",
    "root",
    "source",
    "start",
    "summary",
    "tables",
]

_HOME = {
    "CannotAnswer": "workbook.cannot",
    "advice": "workbook.remedies",
    "deployed": "serving.settings",
    "need": "workbook.cannot",
    "start": "workbook.session",
    "source": "workbook.session",
    "summary": "workbook.verdict",
    "Incident": "evidence.incidents",
    "incident": "evidence.incidents",
    "root": "evidence.incidents",
    "kind_of": "serving.target",
    "open_target": "serving.target",
    "Target": "serving.target",
    "TargetError": "serving.target",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"needlework.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
