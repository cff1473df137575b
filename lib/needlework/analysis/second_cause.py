"""Is one cause enough? What the first one explains is taken away, and what is left is judged like a table of its own.

The rows taken away are all those in which the first cause loses (beyond its edge, at its residues, on its arm, after a
hit, in a crowd …), hits included, so that no choice is made by outcome. A second cause is said only when the rest
departs from healthy by a sign that is clear in itself (`CLEAR`: p of about 0.001), that the first cause does not bring,
and that is of another kind than the rows taken away: two edges in the length, say, are never told apart in this way.
Where a cause loses everywhere, nothing is left and nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis.features import Feature, extract
from needlework.analysis.odds import Signature
from needlework.analysis.view import View, settings

CLEAR = 0.9  # presence of a sign from which on it stands for a second cause
PRESENT = 0.5  # presence of a sign from which on the first cause's rows are taken away by it
LEFT = 24  # measured rows that must be left
BRINGS = 0.4  # odds from which on a class is said to bring a sign; below SILENT it does not
SILENT = 0.2

Rows = Callable[[View, Any], np.ndarray]


def _beyond(x: Callable[[View], np.ndarray]) -> Rows:
    """Rows past the last value that the data surely allow to be good; where it is not known, a row counts as past."""
    return lambda v, low: ~(x(v) <= low)


def _tooth(v: View, value: Any) -> np.ndarray:
    period, residues = value
    return np.isin(np.round(v.length) % (period or 1), residues)


def _aborted(v: View, _: Any) -> np.ndarray:
    return v.probe == "abort"


def _crowd(v: View, _: Any) -> np.ndarray:
    return (v.load > 1) & (v.probe != "abort")


def _warm(v: View, _: Any) -> np.ndarray:
    return v.warm | (v.turn > 1)


# sign -> (kind, the rows in which it loses); the kinds of place come first: where one is known, it bounds the loss
PLACES: dict[str, tuple[str, Rows]] = {
    "edge": ("length", _beyond(lambda v: v.length)),
    "position_ceiling": ("length", _beyond(lambda v: v.needle)),
    "far_from_end": ("length", _beyond(lambda v: v.length - v.needle)),
    # requests in flight together share a pass, which ends anywhere in a prompt
    "last_chunk_only": ("length", lambda v, chunk: ~(v.needle // chunk == (v.length - 1) // chunk) | (v.load > 1)),
    "comb": ("residue", _tooth),
    "comb_warm": ("residue", _tooth),
    "truncated": ("truncated", lambda v, _: v.number("prompt_tokens") < 0.93 * v.sent),
}
CONDITIONS: dict[str, tuple[str, Rows]] = {
    "warm_loss": ("warm", _warm),
    "continue_loss": ("warm", _warm),
    "false_hit": ("warm", _warm),
    "crossed_identity": ("warm", _warm),
    "reload_loss": ("warm", _warm),
    "abort_poison": ("abort", _aborted),
    "abort_loss": ("abort", _aborted),
    "load_loss": ("crowd", _crowd),
    "padded_loss": ("crowd", _crowd),
    "batch_numerics": ("crowd", _crowd),
    "pd_loss": ("arm", lambda v, _: v.pd_arm),
    "budget": ("budget", lambda v, _: np.isin(v.outcome, ["cut", "reasoning_only"])),
}
FALLS = ("edge", "position_ceiling", "far_from_end")  # their value is (last surely good, first surely bad)
SIGNS = {"warm_vacuous": "vacuous", "draft_accept": "draft"}  # they lose no row
KINDS = {name: kind for name, (kind, _) in (PLACES | CONDITIONS).items()} | SIGNS


@dataclass(frozen=True)
class Rest:
    """What remains of a table without the rows of a first cause: its features, and the kinds that were taken away."""

    features: Mapping[str, Feature]
    taken: int
    kinds: frozenset[str]


def rest_of(trials: pd.DataFrame, evidence: Any, first: Signature, seen: Mapping[str, Feature]) -> Rest | None:
    """The table without what `first` explains; None where that can not be told, or where too little is left."""
    view = View(trials, settings(evidence))
    by = {name: seen[name] for name in (*PLACES, *CONDITIONS, *SIGNS) if _brings(first, name, seen)}
    places = [name for name in by if name in PLACES]
    if not by:
        return None
    gone = np.zeros(view.n, bool)
    budget = int(view.config.get("topk", 0)) * int(np.max(view.config.get("ratio", 1)))
    soft = (seen["soft_fall"].presence or 0.0) >= PRESENT if "soft_fall" in seen else False
    for name in places or [name for name in by if name in CONDITIONS]:
        value = by[name].value
        if name in FALLS:
            low, high = value
            if name == "edge" and budget and high >= budget:  # it may begin as soon as there is a choice, not before
                value = min(low, budget)
            else:  # what falls gradually begins to before that is seen: an octave
                value = low / (2 if soft else 1)
        gone |= (PLACES | CONDITIONS)[name][1](view, value)
    if places and "pd_loss" in by:
        gone &= view.pd_arm
    if view.rate(~gone)[1] < LEFT:
        return None
    features = extract(view.frame[~gone], {"config": view.config})
    return Rest(features, int(gone.sum()), frozenset(KINDS[name] for name in by))


def clear_signs(rest: Rest, first: Signature) -> list[str]:
    """Signs of the rest that stand for a second cause."""
    return [
        name
        for name, kind in KINDS.items()
        if name in rest.features
        and (rest.features[name].presence or 0.0) >= CLEAR
        and kind not in rest.kinds
        and all(face.odds(name) <= SILENT for _, face in first.faces)
    ]


def _brings(first: Signature, name: str, seen: Mapping[str, Feature]) -> bool:
    if name not in seen or (seen[name].presence or 0.0) < PRESENT or first.expects.get(name, 0.0) < BRINGS:
        return False
    return seen[name].value is not None or name not in PLACES or name == "truncated"
