"""Deployments with a known law of loss: tables of trials as a journal would hold them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

WINDOW, CROWDS = 32768, (2, 3, 4, 6, 8)
KINDS = np.array(["garbage", "refusal", "near"])


def asked(n: int = 200, *, arms: tuple[str, ...] = ("single",), seed: int = 0, window: int = WINDOW) -> pd.DataFrame:
    """Prompts drawn over the whole space, in the order of sending; `outcome` is still "exact" everywhere."""
    r = np.random.default_rng(seed)
    length = np.round(np.exp(r.uniform(np.log(300), np.log(window), n)))
    depth = np.where(r.random(n) < 0.3, r.choice([0.02, 0.97], n), r.random(n))
    warm = r.random(n) < 0.25
    dropped = r.random(n) < 0.05
    return pd.DataFrame(
        {
            "trial_id": [f"{seed}-{i}" for i in range(n)],
            "time": [f"2026-01-01T{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}" for i in range(n)],
            "probe": "ask",
            "arm": r.choice(arms, n),
            "prompt_tokens": length,
            "counted_tokens": length,
            "needle_token": np.floor(depth * length),
            "cached_tokens": np.where(warm, np.maximum(length - 64, 0), 0),
            "concurrency": np.where(r.random(n) < 0.3, r.choice(CROWDS, n), 1),
            "turn": np.where(r.random(n) < 0.1, 2, 1),
            "aborted": np.where(dropped, "by disconnect", None),
            "expected": [f"{10000 + 7 * i + seed}" for i in range(n)],
            "outcome": "exact",
        }
    )


def lost(t: pd.DataFrame, p: Callable[[pd.DataFrame], object], *, seed: int = 0, outcome: str = "") -> pd.DataFrame:
    """The table with losses: p(table) -> probability of loss, one a row."""
    r = np.random.default_rng(seed + 5000)
    gone = r.random(len(t)) < np.broadcast_to(np.asarray(p(t), float), len(t))
    kind = np.full(len(t), outcome) if outcome else r.choice(KINDS, len(t), p=[0.6, 0.3, 0.1])
    return t.assign(outcome=np.where(gone, kind, "exact"))
