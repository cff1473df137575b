"""What a person sees in a notebook: its start, figures, tables, explorers and the summary; and what it opens.

A notebook needs `workbook.start(title)`, `workbook.figures`, `workbook.tables`, `workbook.open_target(spec)`,
`workbook.incident(name)` and `workbook.explorers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from needlework.evidence.incidents import incident, root
from needlework.serving.settings import deployed
from needlework.serving.target import Target, TargetError, kind_of, open_target
from needlework.workbook.cannot import CannotAnswer, need
from needlework.workbook.onepage import brief
from needlework.workbook.session import digests, measured, source, start
from needlework.workbook.verdict import Summary as summary

if TYPE_CHECKING:
    from needlework.workbook import explorers, figures, machine, tables
    from needlework.workbook.browse import trials

__all__ = [
    "CannotAnswer",
    "Target",
    "TargetError",
    "brief",
    "deployed",
    "digests",
    "explorers",
    "figures",
    "incident",
    "kind_of",
    "machine",
    "measured",
    "need",
    "open_target",
    "root",
    "source",
    "start",
    "summary",
    "tables",
    "trials",
]


def __getattr__(name: str) -> Any:  # the modules that draw need matplotlib; they are loaded when first used
    if name == "trials":
        return importlib.import_module(f"{__name__}.browse").trials
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
