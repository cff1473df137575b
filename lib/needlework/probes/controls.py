"""Controls in every batch: questions whose answer is known whatever the deployment does to long contexts.

* short      a prompt of a few lines: does the model fit the task at all?
* in_question the fact stands in the question itself: is the answer's format understood and graded?
* at_end     the fact is the last line of a short prompt
* absent     the fact is not given: a right answer here would mean that the value leaks some other way
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .asks import Ask, Row
from .bench import Bench
from .result import outcomes
from .specs import PromptSpec, digest, facts_of

SHORT_TOKENS = 256


@dataclass(frozen=True)
class Controls:
    """`passed` False means that the harness or the model's fit is in doubt; `why` says which control and how."""

    passed: bool
    why: str
    invents: int  # absent facts answered with some value: misses may then be inventions
    rows: tuple[Row, ...]

    @property
    def sentence(self) -> str:
        """What an instrument says whose controls failed."""
        return (
            f"Harness, not recall: {self.why}. Even {SHORT_TOKENS} tokens are not answered, so either the harness does "
            "not fit this model or the deployment fails at any length; nothing is said about recall against length."
        )


def control_asks(probe: str, base: PromptSpec, *, arm: str = "", concurrency: int = 1) -> list[Ask]:
    """Four controls in the run's own genre and kind of needle."""
    specs = [
        replace(
            base, target_tokens=SHORT_TOKENS, control=kind, depth=0.5, from_start=None, from_end=None, needles=1, ask=0
        )
        for kind in ("short", "in_question", "at_end", "absent")
    ]
    seeded = [replace(s, seed=int(digest(["control", i, base.seed], 7), 16)) for i, s in enumerate(specs)]
    return [Ask(probe, s, arm=arm, concurrency=concurrency, label="control") for s in seeded]


def again_at_most(asks: list[Ask]) -> tuple[int, int]:
    """(requests, prompt tokens) of controls that are asked once more because the line failed."""
    return len(asks), sum(a.prompt.target_tokens for a in asks)


def run_controls(bench: Bench, asks: list[Ask]) -> Controls:
    """Send the controls (or read them back) and judge them."""
    rows = bench.ask(asks)
    if any(r["outcome"] == "transport" for r in rows) and not bench.replay:
        rows = bench.ask(asks)  # one stray failure of the line is no failure of the harness: ask those again, once
    failed: list[str] = []
    invents = 0
    for ask, row in zip(asks, rows, strict=True):
        kind = ask.prompt.control
        if kind == "absent":
            withheld = facts_of(replace(ask.prompt, control=""))[2] or ""
            if withheld and withheld in (row.get("answer") or ""):
                failed.append("a value that was never given was answered")
            elif row["outcome"] not in ("refusal", "empty", "transport", "cut", "reasoning_only"):
                invents += 1
            continue
        hits, measured = outcomes([row])
        if str(row.get("answered_from") or "").startswith("trial:"):
            bench.warn("a control was answered with the value of another request")  # a finding, not a harness fault
        elif hits == 0:
            what = row["outcome"] if measured else f"{row['outcome']}, no measurement"
            failed.append(f"{kind.replace('_', ' ')} ({what})")
    if invents:
        bench.warn("asked for a fact that was not given, the model invents one: a wrong value may be an invention")
    why = f"the controls failed: {'; '.join(failed)}" if failed else ""
    return Controls(not failed, why, invents, tuple(rows))
