"""What bytes lie in a KV cache: layouts, encode and decode, findings. Findings load on first use (they need pandas)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .dumps import Dump, page_digests, read, write_dump
from .layouts import LAYOUTS, Field, Layout, layout_of

if TYPE_CHECKING:
    from .findings import diagnose, identify
    from .transfer import compare, compare_dumps

__all__ = [
    "LAYOUTS",
    "Dump",
    "Field",
    "Layout",
    "compare",
    "compare_dumps",
    "diagnose",
    "identify",
    "layout_of",
    "page_digests",
    "read",
    "write_dump",
]

_HOMES = {
    "compare": "transfer",
    "compare_dumps": "transfer",
    "diagnose": "findings",
    "identify": "findings",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
