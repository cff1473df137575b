"""What bytes lie in a KV cache: layouts, encode and decode, findings."""

from .findings import diagnose, page_digests
from .inspect import identify
from .layouts import LAYOUTS, Field, Layout, layout_of

__all__ = ["LAYOUTS", "Field", "Layout", "diagnose", "identify", "layout_of", "page_digests"]
