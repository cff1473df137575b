"""What bytes lie in a KV cache: layouts, encode and decode, findings."""

from .layouts import LAYOUTS, Field, Layout, layout_of

__all__ = ["LAYOUTS", "Field", "Layout", "layout_of"]
