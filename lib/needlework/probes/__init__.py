"""Instruments: one file, one question. Each sends prompts to an endpoint, keeps a journal, and returns a result."""

from .arms import compare_arms
from .budget import Budget, Limits
from .journal import Journal, Recorded
from .prompts import PromptSpec
from .recall import depth_profile, recall
from .result import Result
from .turns import turns

__all__ = [
    "Budget",
    "Journal",
    "Limits",
    "PromptSpec",
    "Recorded",
    "Result",
    "compare_arms",
    "depth_profile",
    "recall",
    "turns",
]
