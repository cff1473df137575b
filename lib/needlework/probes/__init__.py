"""Instruments: one file, one question. Each sends prompts to an endpoint, keeps a journal, and returns a result."""

from .abort import abort
from .arms import compare_arms
from .bench.bench import Bench
from .bench.budget import Budget, Limits
from .bench.journal import Journal, Recorded
from .bench.prompts import PromptSpec, assemble
from .bench.result import Result
from .bench.trial import Stopped
from .cliff import find_cliff
from .coherence import coherence
from .drift import drift
from .echo import echo
from .investigate import QUICK_REQUESTS, REQUESTS, Investigation, investigate
from .pool import pool
from .recall import depth_profile, recall
from .reload import reload
from .residues import scan_residues
from .turns import turns
from .warm import warm_cold

__all__ = [
    "QUICK_REQUESTS",
    "REQUESTS",
    "Bench",
    "Budget",
    "Investigation",
    "Journal",
    "Limits",
    "PromptSpec",
    "Recorded",
    "Result",
    "Stopped",
    "abort",
    "assemble",
    "coherence",
    "compare_arms",
    "depth_profile",
    "drift",
    "echo",
    "find_cliff",
    "investigate",
    "pool",
    "recall",
    "reload",
    "scan_residues",
    "turns",
    "warm_cold",
]
