"""Planted faults: each acts at the place where a public report found it, and changes bytes, order or bookkeeping."""

from . import lifetime, lookalikes, memory, selection, tiers, transfer  # each registers its faults
from .registry import FAULTS, Fault, Planted, install, needs, parse

__all__ = [
    "FAULTS",
    "Fault",
    "Planted",
    "install",
    "lifetime",
    "lookalikes",
    "memory",
    "needs",
    "parse",
    "selection",
    "tiers",
    "transfer",
]
