"""Planted faults: each acts at the place where a public report found it, and changes bytes, order or bookkeeping only."""

from . import pair, selection  # each module registers its faults
from .registry import FAULTS, Fault, Planted, install, parse

__all__ = ["FAULTS", "Fault", "Planted", "install", "parse"]
