"""What bytes lie in a KV cache: layouts, encode and decode, findings."""

from .findings import diagnose, page_digests
from .inspect import identify
from .io import Dump, read, write_dump
from .layouts import LAYOUTS, Field, Layout, layout_of
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
