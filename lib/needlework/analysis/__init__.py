"""What the measurements say: pure functions on tables of trials. Names load on first use, so the import is cheap."""

from __future__ import annotations

import importlib
from typing import Any

# name -> module of this room that defines it
_HOMES = {
    "COLUMNS": "trials",
    "OUTCOMES": "trials",
    "NO_MEASUREMENT": "trials",
    "load_trials": "trials",
    "hits": "trials",
    "wilson": "intervals",
    "jeffreys": "intervals",
    "clustered": "intervals",
    "sentence": "intervals",
    "Cliff": "cliff",
    "CliffSearch": "cliff",
    "EdgeWalk": "cliff",
    "constants_in": "cliff",
    "Comb": "comb",
    "ResidueScan": "comb",
    "comb_test": "comb",
    "Paired": "paired",
    "compare": "paired",
    "e_process": "paired",
    "e_value": "paired",
    "flip_noise": "paired",
    "mcnemar": "paired",
    "newcombe": "paired",
    "permutation_test": "paired",
    "Drift": "drift",
    "cusum": "drift",
    "Diagnosis": "diagnosis",
    "diagnose": "diagnosis",
    "extract": "features",
    "SIGNATURES": "signatures",
    "BY_CODE": "signatures",
    "concat": "trials",
    "lengths": "trials",
    "Ledger": "ledger",
    "Hole": "monotone",
    "falling_fit": "monotone",
    "hole": "monotone",
    "holm": "monotone",
    "distances": "logprobs",
    "step_distance": "logprobs",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"needlework.analysis has no {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
