"""Instruments: one file, one question. Each sends prompts to an endpoint, keeps a journal, and returns a result."""

from .abort import abort
from .arms import compare_arms
from .battery import QUICK, Plan, battery
from .bench import Bench
from .budget import Budget, Limits
from .cliff import find_cliff
from .journal import Journal, Recorded
from .load import drift, echo
from .recall import depth_profile, recall
from .reload import reload
from .residues import scan_residues
from .result import Result
from .specs import PromptSpec
from .text import coherence, pool
from .turns import turns
from .warmth import warm_cold

__all__ = [
    "QUICK",
    "Bench",
    "Budget",
    "Journal",
    "Limits",
    "Plan",
    "PromptSpec",
    "Recorded",
    "Result",
    "abort",
    "battery",
    "coherence",
    "compare_arms",
    "depth_profile",
    "drift",
    "echo",
    "find_cliff",
    "pool",
    "recall",
    "reload",
    "scan_residues",
    "turns",
    "warm_cold",
]
