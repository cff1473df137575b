"""What was foretold and what came: the trials that a law named before they were sent.

A record of predictions is written before its prompts are sent: `{"record": "predictions", "round": 1, "law": "…",
"prompts": [{"trial_id": "…", "p_loss": 0.97, "expects": "lost"}, …]}`.
`expects` is "lost" or "found": the side of the law on which the prompt lies; `p_loss` is the law's own chance of a loss
there, so that a law of "one in five" is held to one in five.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

DOUBT = 0.01  # a count rarer than this under the law refutes it
SURE = 0.02  # no law is surer of one answer than this
NOT_SENT = "transport"


@dataclass(frozen=True)
class Judged:
    """`expected_lost` and `expected_found` are (lost, answered) on each side of the law; `p_value` of the less likely.

    steady   the law speaks of always, not of now and then
    broken   trial ids of the prompts that came out on the other side, unlikeliest first
    passed   None where fewer than `needed` of the prompts were answered
    """

    law: str
    asked: int
    expected_lost: tuple[int, int]
    expected_found: tuple[int, int]
    likely: tuple[int, int]  # losses among expected_lost that the law calls likely, 98 %
    p_value: float
    steady: bool
    broken: tuple[str, ...]
    passed: bool | None

    @property
    def answered(self) -> int:
        return self.expected_lost[1] + self.expected_found[1]

    @property
    def as_predicted(self) -> int:
        return self.answered - len(self.broken)

    def __str__(self) -> str:
        (lost, inside), (wrong, outside), (low, high) = self.expected_lost, self.expected_found, self.likely
        if self.passed is None:
            return f"{self.answered} of {self.asked} predicted prompts were answered: too few to say."
        if self.steady:
            said = f"{self.as_predicted} of {self.answered} as predicted"
        else:
            said = f"{lost} of {inside} lost where {low} to {high} were predicted"
            said += f", {wrong} of {outside} where none was" if outside else ""
        return f"{said[0].upper()}{said[1:]}" + ("." if self.passed else ": the law is refuted.")


def judge(record: Mapping[str, Any], trials: pd.DataFrame) -> Judged:
    """Hold a record of predictions against the trials that it names. Raises ValueError for a record of another kind."""
    try:
        told = {str(p["trial_id"]): (float(p["p_loss"]), p["expects"] == "lost") for p in record["prompts"]}
        law = str(record["law"])
    except (KeyError, TypeError, ValueError):
        raise ValueError("a record of predictions names no law, or prompts without p_loss and expects") from None
    rows = trials[trials["trial_id"].isin(list(told)) & trials["outcome"].notna() & (trials["outcome"] != NOT_SENT)]
    lost = {str(i): outcome != "exact" for i, outcome in zip(rows["trial_id"], rows["outcome"], strict=True)}
    sides = [[(i, told[i][0]) for i in lost if told[i][1] is side] for side in (True, False)]
    counts = [(sum(lost[i] for i, _ in side), len(side)) for side in sides]
    inside, outside = (_chances(np.clip([p for _, p in side], SURE, 1 - SURE)) for side in sides)
    tails = [inside[: counts[0][0] + 1].sum(), inside[counts[0][0] :].sum(), outside[counts[1][0] :].sum()]
    cumulative = inside.cumsum()
    likely = int((cumulative < DOUBT).sum()), int((cumulative < 1 - DOUBT).sum())
    wrong = [(p if expected else 1 - p, i) for side, expected in zip(sides, (True, False), strict=True)
             for i, p in side if lost[i] is not expected and (p > 0.5) is expected]  # fmt: skip
    enough = len(lost) >= max(2, 0.75 * len(told))
    steady = not sides[0] or float(np.mean([p for _, p in sides[0]])) > 0.6
    passed = bool(min(tails) >= DOUBT and (not counts[0][1] or counts[0][0] > 0))
    broken = tuple(i for _, i in sorted(wrong, reverse=True))
    p_value = float(min(1.0, 2 * min(tails)))
    return Judged(law, len(told), counts[0], counts[1], likely, p_value, steady, broken, passed if enough else None)


def last(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The predictions that count: those made last."""
    found = [record for record in records if record.get("record") == "predictions"]
    return found[-1] if found else None


def _chances(p: np.ndarray) -> np.ndarray:
    """Probability of 0 … n losses among prompts lost with chances `p` [n]."""
    out = np.ones(1)
    for each in p:
        out = np.convolve(out, [1 - each, each])
    return out
