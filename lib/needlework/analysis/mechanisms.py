"""The classes of fault as faults.toml tells them, and how likely each lets a law be before any trial is seen."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

HEALTHY = 0.5  # before any trial: every second deployment that is asked is whole
ELSEWHERE = 0.02  # of a class's cases: a law that faults.toml does not list for it
OPEN = 2.0  # causes that nobody has described yet, counted in classes
USUAL = {"state": {"any": 0.9, "cold": 0.05, "warm": 0.05}, "where": {"any": 0.7, "arm": 0.2, "replica": 0.1}}
PD_ARM = re.compile(r"(?i)(?:^|[^a-z])pd(?:$|[^a-z])|disagg|split|prefill.*decode|p\dd\d")


@dataclass(frozen=True)
class Mechanism:
    """A class of fault, or a lookalike: `title` in words, `test` decides, `meanwhile` and `look` advise."""

    code: str
    title: str
    test: str
    meanwhile: str
    look: str
    citations: tuple[str, ...]
    laws: Mapping[str, float]
    state: Mapping[str, float]
    where: Mapping[str, float]
    rate: str
    answers: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    inside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lookalike(self) -> bool:
        return self.code.startswith("N")

    def law(self, name: str, state: str, where: str, hard: bool) -> float:
        """Share of this class's cases that lose by this law, on listed grounds."""
        rate = {"all": 0.8, "some": 0.2, "either": 0.5}[self.rate]
        known = self.laws.get(name, 0.0) * self.state.get(state, 0.0) * self.where.get(where, 0.0)
        return known * (rate if hard else 1 - rate)


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _read() -> dict[str, Mechanism]:
    told = tomllib.loads((files("needlework.analysis") / "faults.toml").read_text(encoding="utf-8"))
    out = {}
    for code, one in told.items():
        parts = USUAL | one
        weighed = {k: _shares(parts[k]) for k in ("laws", "state", "where")}
        lists = {k: tuple(parts.get(k, ())) for k in ("citations", "answers", "at")}
        out[code] = Mechanism(code, **{**parts, **weighed, **lists})
    return out


MECHANISMS: dict[str, Mechanism] = _read()
CODES = (*MECHANISMS, "open")  # "open": none of these


@functools.cache
def prior(laws: tuple[tuple[str, str, str, bool], ...], arms: tuple[str, ...], replicas: int) -> np.ndarray:
    """P(law | class) [laws, classes] for the laws (family, state, where, hard) that a table can show.

    What a class loses on one arm only needs arms: with one arm its cases there count as cases anywhere. Among several
    arms of which some are named after a split, classes of transfers (`where.arm` above all else) mean those. Where none
    is, arms are servers of their own, and whatever the class, every second case is one server's. A column adds to less
    than one by the cases that this table could not show.
    """
    splits = [a for a in arms if PD_ARM.search(a)]
    families = len({law[0] for law in laws})
    spread = np.array([_anywhere(law, arms, replicas) for law in laws]) / families
    out = np.empty((len(laws), len(CODES)))
    for j, code in enumerate(CODES):
        listed = np.zeros(len(laws))
        if code != "open":
            m = MECHANISMS[code]
            for i, (family, state, where, hard) in enumerate(laws):
                kind, _, name = where.partition("=")
                share = m.law(family, state, kind, hard)
                if kind == "any" and len(arms) < 2:
                    share += m.law(family, state, "arm", hard)
                elif not splits and kind in ("any", "arm"):
                    share = (m.law(family, state, "any", hard) + m.law(family, state, "arm", hard)) / 2
                if kind == "any" and not replicas:
                    share += m.law(family, state, "replica", hard)
                if kind == "arm":
                    meant = splits if m.where.get("arm", 0) > m.where["any"] and splits else arms
                    share *= (name in meant) / len(meant)
                elif kind == "replica":
                    share /= max(replicas, 1)
                listed[i] = share
        out[:, j] = (1 - ELSEWHERE) * listed + ELSEWHERE * spread if code != "open" else spread
    return out


def _anywhere(law: tuple[str, str, str, bool], arms: tuple[str, ...], replicas: int) -> float:
    """Share of a law among those of its family, where nothing is known of the cause."""
    _, state, where, _ = law
    places = {"arm": len(arms), "replica": max(replicas, 1)}
    kind = where.partition("=")[0]
    return 0.5 * USUAL["state"].get(state, 0.02) * USUAL["where"][kind] / places.get(kind, 1)


def classes() -> np.ndarray:
    """Share of each of CODES before any trial; with HEALTHY they add to one."""
    weight = np.array([OPEN if code == "open" else 1.0 for code in CODES])
    return (1 - HEALTHY) * weight / weight.sum()


def named(codes: Iterable[str]) -> str:
    """ "F01, F04 or F06"."""
    codes = list(codes)
    return codes[0] if len(codes) == 1 else ", ".join(codes[:-1]) + " or " + codes[-1]
