"""What an instrument asks for, whom, and how it stops early."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from needlework.serving import Endpoint

from .budget import Budget
from .journal import Recorded
from .prompts import GENERATOR, Messages, Prompt
from .specs import PromptSpec, digest

Target = Endpoint | Recorded | str
Row = dict[str, Any]
# of a row that another tool wrote, or that was cut down before it was passed on: nothing is known here
UNKNOWN: Row = {
    "prompt_tokens": None,
    "cached_tokens": None,
    "cache": "unknown",
    "needle_token": None,
    "expected": None,
}
Confirm = Callable[[Budget], bool]
# Earlier turns of a conversation: sends them, returns the final messages and columns to add to the trial's row.
Prepare = Callable[["Ask", Prompt, Endpoint], Awaitable[tuple[Messages, dict[str, Any]]]]


class Stopped(RuntimeError):
    """An instrument stopped early: the reason is one sentence; what was measured is in the journal."""


@dataclass(frozen=True)
class Ask:
    """One trial to be made. All fields are part of its identity, so change one and it is another trial.

    arm     which deployment or condition answers; cache: the state that is wanted ("cold", "warm", "unknown")
    send    a number that tells repeated sends of one prompt apart (0 = first)
    label   anything else that makes it another question
    """

    probe: str
    prompt: PromptSpec
    arm: str = ""
    repeat: int = 0
    cache: str = "cold"
    send: int = 0
    turn: int = 1
    concurrency: int = 1
    ordinal: int | None = None
    label: str = ""
    max_tokens: int = 48
    temperature: float = 0.0

    @cached_property
    def trial_id(self) -> str:
        """Hash of what is asked."""
        names = (f.name for f in fields(self) if f.name != "ordinal")  # which says when, not what
        identity = {name: getattr(self, name) for name in names} | {"prompt": self.prompt.as_dict()}
        return digest({"generator": GENERATOR, **identity})

    def whole(self, row: Row, *, graded: bool = True) -> Row:
        """A row of this trial with every column that an instrument reads: what a journal lacks follows from what was
        asked, or is unknown. Raises ValueError when a graded trial has no outcome.
        """
        if graded and row.get("outcome") is None:
            raise ValueError(f"the journal has no outcome for the {self}; mend its line of trials.jsonl or remove it")
        of = self.prompt
        asked = {"target_tokens": of.target_tokens, "depth": of.depth, "label": self.label, "wanted_cache": self.cache,
                 "ordinal": self.ordinal or 0, "outcome": None}  # fmt: skip
        return row | {name: value for name, value in (UNKNOWN | asked).items() if row.get(name) is None}

    def __str__(self) -> str:
        arm = f", arm {self.arm}" if self.arm else ""
        of = self.prompt
        return f"{self.probe} trial of {of.target_tokens} tokens at depth {of.depth:g} (seed {of.seed}{arm})"


def resolve(endpoint: Target) -> tuple[Endpoint | None, Recorded | None]:
    """(live endpoint, None) or (None, recorded run) from what the user named; raises ValueError for anything else."""
    if isinstance(endpoint, Recorded):
        return None, endpoint
    if isinstance(endpoint, str):
        if endpoint.startswith("recorded:"):
            return None, Recorded(endpoint.removeprefix("recorded:"))
        return Endpoint(endpoint), None
    if isinstance(endpoint, Endpoint):
        return endpoint, None
    raise ValueError("give an Endpoint, a URL that starts with http, or a Recorded run")


def with_seed(spec: PromptSpec, *parts: int) -> PromptSpec:
    """The same specification with a seed mixed from its own and `parts`: fresh text, reproducible."""
    return replace(spec, seed=int(digest([spec.seed, *parts], 7), 16))
