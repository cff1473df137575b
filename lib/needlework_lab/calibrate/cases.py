"""What is calibrated: which faults, how strong, on which deployment, with which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STRENGTHS = ("mild", "default", "severe")
PAIR_ONLY = ("F13", "F14", "F16")  # faults of the transfer: the examined deployment is a prefill/decode pair
# Two causes at once, of different kinds and in different places of the stack, neither of which hides the other from
# every instrument. Left out for that: N3 with anything (a budget of four tokens leaves no answer), F11 with anything (a
# key of four bits gives nearly every fresh prompt another one's pages), F05+F12 (nothing longer than 130 tokens is
# right, and what follows an abort is longer).
PAIRS = ("F01+F17", "F02+F09", "F02+F10", "F07+F09", "F07+F17", "F14+F09", "F08+F09", "N1+F17")
# Edges must lie apart and within reach of short prompts: top-k at 4 x 128 = 512 tokens, a pass at 768, a page at 64.
GEOMETRY: dict[str, Any] = {"geometry": "tiny", "top_k": 128, "chunk_tokens": 768, "pages": 129}


@dataclass(frozen=True)
class Effort:
    """How much a case is asked: requests at most, of up to `window` tokens; fill_tokens push prompts out of the device
    where there is a tier behind it, so that they reload (0: not tried)."""

    requests: int = 300
    window: int = 5000
    fill_tokens: int = 8200


EFFORT = Effort()


@dataclass(frozen=True)
class Case:
    """`faults` are codes ("F07"), none for a healthy deployment; `strength` one of STRENGTHS; `mode` combined or pd."""

    faults: tuple[str, ...]
    strength: str = "default"
    seed: int = 0
    mode: str = "combined"

    @property
    def label(self) -> str:
        return "+".join(self.faults) or "healthy"

    @property
    def options(self) -> dict[str, int]:
        """Engine options beside the geometry. Healthy deployments differ, so that no option itself looks like a fault:
        every second one has a host tier behind its prefix cache, every second pair of seeds drafts tokens."""
        if self.faults:
            return {}
        return {"host_pages": 512 * (self.seed % 2), "draft_tokens": 4 * (self.seed // 2 % 2)}

    @property
    def planted(self) -> tuple[str, ...]:
        return tuple(f"{code}@{self.strength}" for code in self.faults)


def key(case: Case, effort: Effort = EFFORT) -> str:
    """Name of a case's folder: says what it is, and changes with the effort and the geometry."""
    how = hashlib.sha256(repr((sorted(GEOMETRY.items()), asdict(effort))).encode()).hexdigest()[:6]
    return f"{case.label}-{case.strength}-{case.mode}-{case.seed}-{how}"


def cases(classes: Iterable[str], strengths: Sequence[str], seeds: Iterable[int], *, healthy: int = 0) -> list[Case]:
    """Every class ("F07", "F01+F17", "healthy") at every strength it has and every seed, and `healthy` more of those.

    In an order that may be left at any point: every class has its first seed before any has its second, and pairs and
    healthy deployments come in proportion. Strengths that plant the same parameters as another one are left out. Raises
    ValueError for unknown names.
    """
    from needlework_lab.faults import FAULTS

    out = []
    seeds = list(seeds)
    for name in classes:
        codes = () if name == "healthy" else tuple(name.split("+"))
        for code in codes:
            if code not in FAULTS:
                raise ValueError(f"no fault named {code[:20]!r}; the lab has {', '.join(sorted(FAULTS))}")
        mode = "pd" if any(code in PAIR_ONLY for code in codes) else "combined"
        known = [s for s in strengths if all(s in FAULTS[c].strengths for c in codes)] if codes else ["default"]
        if len(codes) > 1:
            known = [s for s in known if s == "default"]
        for strength in known:
            out += [Case(codes, strength, seed, mode) for seed in seeds]
    first = max(seeds, default=-1) + 1
    out += [Case((), "default", first + i, ("combined", "pd")[i % 2]) for i in range(healthy)]
    return _interleaved(list(dict.fromkeys(out)))


def _interleaved(cases: list[Case]) -> list[Case]:
    place: dict[Case, float] = {}
    for faults in range(3):
        stream = sorted((case for case in cases if len(case.faults) == faults), key=lambda case: case.seed)
        place |= {case: (i + 0.5) / len(stream) for i, case in enumerate(stream)}
    return sorted(cases, key=lambda case: place[case])
