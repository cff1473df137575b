"""Greedy answers to identical prompts, compared by their log-probabilities: finer than equal or different tokens.

A trial carries `tops`, one dictionary {token: log-probability} a step with the likeliest tokens only, and `answer`, the
token ids in order. Two answers have the same context up to and including the first step at which they choose
differently; later steps are answers to different questions and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Step = Mapping[str, float]


def step_distance(one: Step, other: Step) -> float:
    """Largest difference between two steps' log-probabilities (nats). A token listed on one side only counts with the
    least it can differ by: its own log-probability less the smallest that the other side lists. Raises ValueError for
    a step without tokens."""
    if not one or not other:
        raise ValueError("a step without log-probabilities cannot be compared; ask the server for them")
    worst = 0.0
    for here, there in ((one, other), (other, one)):
        least = min(there.values())
        for token, value in here.items():
            worst = max(worst, abs(value - there[token]) if token in there else value - least)
    return worst


def common_steps(one: str, other: str) -> int:
    """How many leading tokens two answers (ids separated by blanks) share."""
    count = 0
    for a, b in zip(one.split(), other.split(), strict=False):
        if a != b:
            break
        count += 1
    return count


def distances(trials: pd.DataFrame, reference: pd.DataFrame, by: str = "prompt_sha") -> pd.DataFrame:
    """Each trial against the reference trial of the same prompt (same value in `by`): the trials' columns and
    `common_tokens`, `first_step` (distance at the first step, nats) and `worst_step` (largest up to where they part).

    Trials without a reference are left out. Raises ValueError where the reference holds a prompt twice.
    """
    if reference[by].duplicated().any():
        raise ValueError("the reference holds a prompt twice; choose one answer for each")
    known: dict[str, Any] = {row[by]: row for row in reference.to_dict("records")}
    rows = []
    for row in trials.to_dict("records"):
        other = known.get(row[by])
        if other is None:
            continue
        same = common_steps(row["answer"], other["answer"])
        steps: Sequence[float] = [
            step_distance(a, b) for a, b in zip(row["tops"][: same + 1], other["tops"][: same + 1], strict=True)
        ]
        rows.append({**row, "common_tokens": same, "first_step": steps[0], "worst_step": max(steps)})
    return pd.DataFrame(rows, columns=[*trials.columns, "common_tokens", "first_step", "worst_step"])
