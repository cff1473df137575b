"""Needlework: an investigation workbook for LLM deployments that silently forget their context."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from needlework import analysis, evidence, kernels, pages, probes, serving, workbook

__version__ = "0.1.0"
__all__ = ["analysis", "evidence", "kernels", "pages", "probes", "serving", "workbook"]


def __getattr__(name: str) -> Any:  # a package is loaded when it is first used
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
