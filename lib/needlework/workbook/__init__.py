"""What a person sees: the start of a notebook, figures, tables, targets, explorers, the runner and the report.

A notebook needs `workbook.start(title)`, `workbook.figures`, `workbook.tables`, `workbook.open_target(spec)`,
`workbook.incident(name)` and `workbook.explorers`; everything here is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# nbformat's validator (jsonschema) compiles a grammar of web addresses as it is loaded, which takes seconds and checks
# nothing in a notebook. It does without where this optional package is not there.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

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
    "incidents",
    "machine",
    "need",
    "open_target",
    "report",
    "runner",
    "source",
    "start",
    "summary",
    "tables",
    "targets",
]

_HOME = {
    "CannotAnswer": "cannot",
    "advice": "remedies",
    "deployed": "about",
    "need": "cannot",
    "start": "session",
    "source": "session",
    "summary": "verdict",
    "Incident": "incidents",
    "incident": "incidents",
    "open_target": "targets",
    "Target": "targets",
    "TargetError": "targets",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
