"""What the device computes from KV pages: references, Triton twins, candidates, and the check that holds them
together."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Case", "CheckResult", "candidates", "check", "reference", "suite", "twins", "verdicts"]

_WHERE = {"Case": "cases", "CheckResult": "check", "check": "check", "suite": "suites", "verdicts": "check"}
_MODULES = {"candidates", "reference", "twins"}


def __getattr__(name: str) -> Any:
    """Names on first use: torch and Triton take seconds to import."""
    if name in _MODULES:
        return importlib.import_module(f"needlework.kernels.{name}")
    if name in _WHERE:
        value = getattr(importlib.import_module(f"needlework.kernels.{_WHERE[name]}"), name)
        globals()[name] = value  # the function `check` stands before the module of the same name
        return value
    raise AttributeError(f"module 'needlework.kernels' has no attribute {name!r}")
