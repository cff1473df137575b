"""Does recall depend on the length's residue? A two-stage scan that finds the class.

A comb (one length in 4, in 64, in 128 fails, its neighbours are healthy) is invisible to a grid of round lengths. The
scan asks a whole period of consecutive lengths once and then asks each suspect class again at fresh lengths, with
a sequential likelihood-ratio test, so that random misses are not taken for a class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

DEAD_MISS = 0.95  # a dead class misses this often under the alternative
WRONG_COMB = 0.002  # chance of accepting any class when misses are random


@dataclass(frozen=True)
class Comb:
    """Result of a scan. `residues` are modulo `period`, of the full length in tokens."""

    state: str  # "comb", "none", "too many misses", "unfinished"
    period: int | None
    residues: tuple[int, ...]
    p_value: float
    requests: int
    misses_elsewhere: float  # share of misses outside the comb

    def __str__(self) -> str:
        tail = f"{self.requests} requests, {100 * self.misses_elsewhere:.0f} % misses elsewhere"
        if self.state == "comb":
            shown = ", ".join(map(str, self.residues[:8])) + (", …" if len(self.residues) > 8 else "")
            what = f"lengths that are {shown} modulo {self.period} fail and their neighbours do not"
            return f"{what} (p = {self.p_value:.2g}; {tail})"
        if self.state == "too many misses":
            return f"most lengths fail here, so a comb can not be seen; scan below the cliff ({tail})"
        return f"{'no residue class stands out' if self.state == 'none' else 'the scan is not finished'} ({tail})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


@dataclass
class _Suspect:
    """A class of lengths that missed in the first stage; `fresh` are the outcomes at lengths not asked before."""

    modulus: int
    residue: int  # offset from the scan's start
    members: int
    base: float  # chance of a random miss
    fresh: list[int] = field(default_factory=list)
    asked: int = 0
    verdict: bool | None = None

    @property
    def log_ratio(self) -> float:
        misses = self.fresh.count(0)
        hits = len(self.fresh) - misses
        return misses * math.log(DEAD_MISS / self.base) + hits * math.log((1 - DEAD_MISS) / (1 - self.base))


class ResidueScan:
    """Planner of a residue scan; `propose(batch)`, `update(lengths, hits)`, `done`, `result()`. Deterministic.

    start   first length in tokens; the scan needs lengths up to about start + 8 * period, all below any cliff
    period  longest period to look for (2 to 256); every divisor is found too
    """

    LIMIT = 10  # fresh lengths for one suspect at most

    def __init__(self, start: int, period: int = 128) -> None:
        if start < 1 or not 2 <= period <= 256:
            raise ValueError(f"a scan needs start >= 1 and a period of 2 to 256, not {start} and {period}")
        self.start, self.period = int(start), int(period)
        self.first: dict[int, int] = {}  # offset -> hit
        self._open: dict[int, int] = {}  # length -> how often it is still wanted
        self._tries: dict[int, int] = {}
        self._queue: list[int] = [self.start + offset for offset in range(self.period)]
        self._suspects: list[_Suspect] | None = None
        self._owner: dict[int, _Suspect] = {}
        self.requests = 0

    def propose(self, batch: int = 1) -> list[int]:
        """The next lengths (tokens), at most `batch`; empty while outcomes of earlier ones are needed first."""
        if batch < 1:
            raise ValueError("a batch holds at least one length")
        if self._suspects:
            self._refill()
        lengths, self._queue = self._queue[:batch], self._queue[batch:]
        for length in lengths:
            self._open[length] = self._open.get(length, 0) + 1
        return lengths

    def update(self, lengths: Sequence[int], hits: Sequence[float]) -> None:
        """Takes outcomes of proposed lengths. No measurement (NaN, None) is asked again twice, then left out."""
        if len(lengths) != len(hits):
            raise ValueError(f"{len(lengths)} lengths but {len(hits)} outcomes")
        for length, hit in zip(lengths, hits, strict=True):
            length = int(length)
            if not self._open.get(length):
                raise ValueError(f"length {length} was not asked for; give back only proposed lengths")
            self._open[length] -= 1
            if hit is None or hit != hit:
                self._tries[length] = self._tries.get(length, 0) + 1
                if self._tries[length] <= 2:
                    self._queue.append(length)
                continue
            self.requests += 1
            if self._suspects is None:
                self.first[length - self.start] = int(bool(hit))
            else:
                self._owner[length].fresh.append(int(bool(hit)))
        if self._suspects is None and not self._queue and not any(self._open.values()):
            self._suspects = self._find_suspects()
        self._judge()

    @property
    def done(self) -> bool:
        if self._suspects is None or self._queue or any(self._open.values()):
            return False
        return self._hopeless() or all(s.verdict is not None for s in self._suspects)

    def result(self) -> Comb:
        """The answer so far; the p-value counts fresh lengths only and pays for every suspect that was tried."""
        suspects = self._suspects or []
        bad = [s for s in suspects if s.verdict]
        covered = {o for o in self.first for s in bad if o % s.modulus == s.residue}
        rest = [hit for offset, hit in self.first.items() if offset not in covered]
        elsewhere = 1 - float(np.mean(rest)) if rest else 0.0
        if not self.done:
            return Comb("unfinished", None, (), 1.0, self.requests, elsewhere)
        if self._hopeless():
            return Comb("too many misses", None, (), 1.0, self.requests, elsewhere)
        if not bad:
            return Comb("none", None, (), 1.0, self.requests, elsewhere)
        from scipy.stats import binom

        tails = [float(binom.sf(s.fresh.count(0) - 1, len(s.fresh), s.base)) * len(suspects) for s in bad]
        period = max(s.modulus for s in bad)
        residues = {(self.start + s.residue + s.modulus * k) % period for s in bad for k in range(period // s.modulus)}
        return Comb("comb", period, tuple(sorted(residues)), min(1.0, *tails, 1.0), self.requests, elsewhere)

    def _hopeless(self) -> bool:
        return self.period > 4 and bool(self.first) and sum(self.first.values()) < 0.3 * len(self.first)

    def _find_suspects(self) -> list[_Suspect]:
        missed = {offset for offset, hit in self.first.items() if not hit}
        suspects: list[_Suspect] = []
        if self._hopeless():
            return suspects
        covered: set[int] = set()
        for modulus in [m for m in range(2, self.period) if self.period % m == 0]:
            for residue in range(modulus):
                members = [o for o in range(residue, self.period, modulus) if o in self.first]
                gone = [o for o in members if o in missed]
                others = len(self.first) - len(members)
                if len(members) < 2 or set(members) <= covered or not others:
                    continue
                base = self._base(len(missed) - len(gone), others)
                # as many misses as this in a class of this size must be rare among all classes of this modulus
                if len(gone) >= max(2, 0.8 * len(members)) and modulus * base ** len(gone) < 0.5:
                    suspects.append(_Suspect(modulus, residue, len(members), base))
                    covered |= set(members)
        return suspects + [self._single(offset, missed, covered) for offset in sorted(missed - covered)]

    def _single(self, offset: int, missed: set[int], covered: set[int]) -> _Suspect:
        rest = missed - covered - {offset}
        return _Suspect(self.period, offset, 1, self._base(len(rest), len(self.first) - len(covered) - 1))

    @staticmethod
    def _base(misses: int, trials: int) -> float:
        # shrunk towards 5 % by ten imaginary trials: one other miss among three lengths says little
        return float(np.clip((misses + 0.5) / (trials + 10), 0.05, 0.6))

    def _accept(self) -> float:
        return math.log(max(1, len(self._suspects or ())) / WRONG_COMB)

    def _judge(self) -> None:
        if not self._suspects:
            return
        missed = {offset for offset, hit in self.first.items() if not hit}
        for suspect in list(self._suspects):
            if suspect.verdict is not None:
                continue
            if suspect.log_ratio >= self._accept():
                suspect.verdict = True
            elif suspect.log_ratio <= -4 or suspect.asked >= self.LIMIT + 2:
                suspect.verdict = False
                if suspect.modulus < self.period:  # not the whole class; perhaps one member with the longer period
                    known = {s.residue for s in self._suspects if s.modulus == self.period}
                    members = {o for o in missed if o % suspect.modulus == suspect.residue} - known
                    self._suspects += [self._single(o, missed, set()) for o in sorted(members)]

    def _refill(self) -> None:
        waiting = {id(self._owner[length]) for length in self._queue if length in self._owner}
        waiting |= {id(self._owner[length]) for length, count in self._open.items() if count and length in self._owner}
        for suspect in self._suspects or ():
            if suspect.verdict is not None or id(suspect) in waiting:
                continue
            needed = 3 if not suspect.fresh else 1
            while needed:
                # beyond the scanned period, and through every sub-class of it in turn
                length = self.start + suspect.residue + self.period + suspect.modulus * suspect.asked
                suspect.asked += 1
                if length in self._owner:  # another suspect has asked this very length
                    continue
                self._owner[length] = suspect
                self._queue.append(length)
                needed -= 1
