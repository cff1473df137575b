"""Small, named observations on a table of trials. Each says how present it is, in how many rows, and in which words.

A feature that the table can not show (no warm row, no second arm, too few rows) has presence None or is left out: that
is not the same as absent. Class signatures (signatures.py) speak of nothing but these names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd

from needlework.analysis.observe_conditions import arms, cache, load, order, repeatability
from needlework.analysis.observe_content import answers, inside, usage
from needlework.analysis.observe_length import budget, length, loss, residues, short
from needlework.analysis.view import Feature, View, plain_cells, settings

# Lengths come early: they mark the rows that length alone would let hit, and later observers look at those.
OBSERVERS: tuple[Callable[[View], list[Feature]], ...] = (
    *(loss, length, short, budget, residues),
    *(cache, arms, order, load),
    *(answers, usage, repeatability, inside),
)


def extract(trials: pd.DataFrame, evidence: Any = None) -> dict[str, Feature]:
    """All features of a table and of optional evidence from inside (see `settings`)."""
    view = View(plain_cells(trials), settings(evidence))
    features: dict[str, Feature] = {}
    for observe in OBSERVERS:
        for feature in observe(view):
            known = features.get(feature.name)
            if known is None or (known.presence or 0.0) <= (feature.presence or 0.0):  # of two looks the clearer one
                features[feature.name] = feature
    _raise_loss(features)
    return features


_PLAIN = {"comb", "edge", "position_ceiling", "last_chunk_only"}
_ELSEWHERE = {
    "comb_warm",
    "warm_loss",
    "reload_loss",
    "pd_loss",
    "load_loss",
    "abort_loss",
    "abort_poison",
    "continue_loss",
} | {"crossed_identity"}


def _raise_loss(features: dict[str, Feature]) -> None:
    """A loss that is clear in one place is a loss, even where most trials of the table were never exposed to it."""
    for name, places in (("plain_loss", _PLAIN), ("loss", _PLAIN | _ELSEWHERE)):
        clearest = max((features[p].presence or 0.0 for p in places if p in features), default=0.0)
        if name in features and (features[name].presence or 0.0) < clearest:
            features[name] = replace(features[name], presence=clearest)
