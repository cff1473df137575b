"""Families of laws: which requests are lost, as sets of trials with a parameter, counted for all values at once.

A family yields the outcomes inside its set for each value of its parameter. What is counted is a matrix: one column for
each gate (all requests, warm ones, those of one arm …) and outcome, so that a law and all its conjunctions with a gate
cost one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

NEAR_END_TOKENS = 128  # a value so near the end stands in every window: laws of place say nothing about it
MOST_EDGES = 384
CHUNKS = tuple(2**k for k in range(5, 16))
PERIODS = (*range(2, 17), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))


@dataclass(frozen=True)
class Rows:
    """Conditions as plain arrays, and the prefill passes that the deployment states."""

    columns: dict[str, np.ndarray]
    passes: tuple[float, ...] = ()

    @classmethod
    def of(cls, c: pd.DataFrame, passes: Iterable[float] = ()) -> Rows:
        return cls({str(name): c[name].to_numpy() for name in c}, tuple(passes))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["length"])

    def take(self, rows: np.ndarray) -> Rows:
        return Rows({name: values[rows] for name, values in self.columns.items()}, self.passes)


@dataclass(frozen=True)
class Marks:
    """Gates and outcome of each row: a few patterns [patterns, gates x outcomes], and the pattern that each row has."""

    patterns: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, gates: np.ndarray, outcomes: np.ndarray) -> Marks:
        """gates [gates, rows] and outcomes [rows, outcomes], bool."""
        packed = np.ascontiguousarray(np.packbits(np.concatenate([gates.T, outcomes], 1), 1))
        keys = packed.view(f"V{packed.shape[1]}").ravel()
        _, first, row = np.unique(keys, return_index=True, return_inverse=True)
        patterns = gates.T[first][:, :, None] & outcomes[first][:, None, :]
        return cls(patterns.reshape(len(first), -1).astype(np.float32), row.ravel())

    def sums(self, group: np.ndarray, groups: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Outcomes of the rows (default: all) in each of `groups` groups [groups, gates x outcomes]."""
        row, size = self.row if rows is None else self.row[rows], len(self.patterns)
        table = np.bincount(group * size + row, minlength=groups * size).reshape(groups, size)
        return np.rint(table.astype(np.float32) @ self.patterns)


@dataclass(frozen=True)
class Counts:
    """Outcomes inside the set [values, columns], the prior of each value, and what tells a value: (low, high) or so;
    `unclear`: outcomes of requests of which the law cannot say whether they are inside, where there are any."""

    inside: np.ndarray
    prior: np.ndarray
    values: np.ndarray
    unclear: np.ndarray | None = None


@dataclass(frozen=True)
class Family:
    """count(conditions, marks) -> Counts or None; mask(conditions, value) -> share inside the set, float [rows]."""

    name: str
    count: Callable[[Rows, Marks], Counts | None]
    mask: Callable[[Rows, tuple[float, ...]], np.ndarray]
    say: Callable[[dict[str, tuple[float, float, float]]], str]
    parameters: tuple[str, ...] = ()


def _threshold(name: str, column: str, say: str, *, above: bool = True, log: bool = True, among: str = "") -> Family:
    """Lost above (or below) an edge in one column. The edge lies anywhere between two neighbouring values of the table,
    log-uniform (uniform for times): each gap is one value, its width the prior."""

    def read(c: Rows) -> tuple[np.ndarray, np.ndarray]:
        x = c[column]
        ok = np.isfinite(x)
        if among == "far":
            ok &= c["left"] > NEAR_END_TOKENS
        return np.where(ok, x, np.nan), ok

    def count(c: Rows, marks: Marks) -> Counts | None:
        x, ok = read(c)
        rows = np.flatnonzero(ok)
        rows = rows[np.argsort(x[rows], kind="stable")]
        if not len(rows) or x[rows[0]] == x[rows[-1]]:
            return None
        ends = np.flatnonzero(np.diff(x[rows]) > 0) + 1
        if len(ends) > MOST_EDGES:
            ends = ends[np.unique(np.linspace(0, len(ends) - 1, MOST_EDGES).astype(int))]
        low, high = x[rows[ends - 1]], x[rows[ends]]
        sizes = np.diff(np.concatenate([[0], ends, [len(rows)]]))
        parts = marks.sums(np.repeat(np.arange(len(sizes)), sizes), len(sizes), rows)
        below = np.cumsum(parts, 0)
        inside = below[-1] - below[:-1] if above else below[:-1]
        scale = np.log(np.maximum(low, 1)), np.log(np.maximum(high, 1.5))
        width = scale[1] - scale[0] if log else high - low
        width = np.maximum(width, 1e-9)
        return Counts(inside, width / width.sum(), np.stack([low, high], 1))

    def mask(c: Rows, value: tuple[float, ...]) -> np.ndarray:
        low, high = value
        x, ok = read(c)
        x = np.where(ok, x, -np.inf if above else np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.log(np.maximum(x, 1e-9) / max(low, 1e-9)) / np.log(max(high, 1e-9) / max(low, 1e-9))
        part = np.clip(np.nan_to_num(part, nan=0.5, posinf=1, neginf=0), 0, 1)
        return part if above else np.where(ok, 1 - part, 0.0)

    return Family(name, count, mask, lambda p: say.format(edge=_span(p["edge"])), ("edge",))


def _span(p: tuple[float, float, float]) -> str:
    low, high = int(np.floor(p[0])), int(np.ceil(p[2]))
    return f"{low:,}" if high - low <= 1 else f"{low:,} to {high:,}"


def _masks(
    name: str,
    options: Callable[[Rows], Iterable[tuple[float, ...]]],
    inside: Callable[[Rows, tuple[float, ...]], np.ndarray],
    say: Callable[[dict[str, tuple[float, float, float]]], str],
    parameters: tuple[str, ...] = (),
    unclear: Callable[[Rows, tuple[float, ...]], np.ndarray] | None = None,
) -> Family:
    """A family given by a set for each of a few values, all equally likely before. Where of some requests it is
    `unclear` whether they were inside, a value ends in 0 (they share the fate of the clear ones) or 1 (they do not:
    their rate is their own), which are equally likely too."""

    def count(c: Rows, marks: Marks) -> Counts | None:
        values = list(options(c))
        if not values:
            return None
        same = np.full(len(values), 1 / len(values))
        if unclear is None:
            return Counts(np.stack([marks.sums(inside(c, v) * 1, 2)[1] for v in values]), same, np.array(values, float))
        sums = [marks.sums(inside(c, v) + 2 * unclear(c, v), 4) for v in values]
        _, clear, outer, inner = np.stack(sums, 1)
        told = np.array([(*v, own) for own in (0, 1) for v in values], float)
        return Counts(np.concatenate([clear + inner, clear]), np.tile(same / 2, 2), told,
                      np.concatenate([0 * inner, inner + outer]))  # fmt: skip

    def mask(c: Rows, value: tuple[float, ...]) -> np.ndarray:
        share = inside(c, value).astype(float)
        return np.where(unclear(c, value), 0.5, share) if unclear is not None and value[-1] else share

    return Family(name, count, mask, say, parameters)


def _passes(c: Rows) -> list[int]:
    """Sizes of a prefill pass that the table can tell apart; a stated one with them."""
    longest = np.max(c["length"], where=np.isfinite(c["length"]), initial=0)
    return sorted({n for n in (*CHUNKS, *map(int, c.passes)) if 16 <= n < longest})


def _in_pass(c: Rows, size: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pass of the value, last pass, and place within the pass; a cached prefix is not prefilled again."""
    start = np.where(c["warm"] & (c["cached"] < c["place"]), c["cached"], 0)
    place, length = c["place"] - start, c["length"] - start
    return place // size, (length - 1) // size, place % size


def _shared(c: Rows, sure: np.ndarray | bool = False) -> np.ndarray:
    """A pass shared with other requests ends sooner, and a cached value was in a pass of a request before."""
    return (((c["load"] > 1) & ~np.asarray(sure)) | (c["warm"] & (c["cached"] >= c["place"]))) & np.isfinite(c["place"])


def _last(c: Rows, v: tuple[float, ...]) -> np.ndarray:
    mine, last, _ = _in_pass(c, v[0])
    return (mine < last) & np.isfinite(mine)


def _first(c: Rows, v: tuple[float, ...]) -> np.ndarray:
    mine, last, _ = _in_pass(c, v[0])
    return (mine == 0) & (last > 0)


def _from_end(c: Rows, v: tuple[float, ...]) -> np.ndarray:
    mine, last, _ = _in_pass(c, v[0])
    return (last > 0) & (last - mine == v[1])


def _alternate(c: Rows, v: tuple[float, ...]) -> np.ndarray:
    mine, last, _ = _in_pass(c, v[0])
    return (mine % 2 == v[1]) & (last > 0)


def _border(c: Rows, v: tuple[float, ...]) -> np.ndarray:
    mine, last, within = _in_pass(c, v[0])
    near = ((within >= v[0] - v[1]) & (mine < last)) | ((within < v[1]) & (mine > 0))
    return (last > 0) & near


def _all(c: Rows, v: tuple[float, ...] = ()) -> np.ndarray:
    return np.ones(len(c), bool)


def _residues() -> Family:
    edges = (0, 1024, 4096)

    def widths(period: int) -> list[int]:
        return [w for w in (1, 2, 4, 8, 16, 32, 64, 128) if w <= period // 2] or [1]

    def count(c: Rows, marks: Marks) -> Counts | None:
        length = c["length"]
        known = np.isfinite(length) & (length == np.rint(length))
        if known.sum() < 8 or len(np.unique(length[known])) < 6:
            return None
        n = length[known].astype(int)
        periods = [p for p in PERIODS if len(np.unique(n % p)) > 1]
        if not periods:
            return None
        inside, values, prior = [], [], []
        tried = [e for e in edges if (n > e).any()]
        for edge in tried:
            rows = n > edge
            chosen, late = np.flatnonzero(known)[rows], n[rows]
            for period in periods:
                sums = marks.sums(late % period, period, chosen)
                ring = np.cumsum(np.concatenate([np.zeros_like(sums[:1]), sums, sums]), 0)
                for width in widths(period):
                    starts = np.arange(0, period, max(1, width // 4))
                    inside.append(ring[starts + width] - ring[starts])
                    same = np.ones(len(starts))
                    values.append(np.stack([period * same, starts, width * same, edge * same], 1))
                    power = 0.5 / 8 if period & (period - 1) == 0 else 0.5 / (len(PERIODS) - 8)
                    prior.append(same * power / len(widths(period)) / len(starts) / len(tried))
        weight = np.concatenate(prior)
        return Counts(np.concatenate(inside), weight / weight.sum(), np.concatenate(values).astype(float))

    def mask(c: Rows, v: tuple[float, ...]) -> np.ndarray:
        length = c["length"]
        return (((length - v[1]) % v[0] < v[2]) & (length > v[3])).astype(float)

    def say(p: dict[str, tuple[float, float, float]]) -> str:
        period, start, width, edge = (int(p[k][1]) for k in ("period", "start", "width", "edge"))
        rest = f"{start}" if width == 1 else f"{start} to {(start + width - 1) % period}"
        return f"prompts whose length modulo {period} is {rest}" + (f", beyond {edge:,} tokens" if edge else "")

    return Family("residue", count, mask, say, ("period", "start", "width", "edge"))


def _sizes(c: Rows) -> list[tuple[float, ...]]:
    found = sorted({int(n) for n in c["load"] if n > 1})
    return [(n,) for n in found[:12]] if len(found) > 1 else []


def _cut(c: Rows, *, tiny: bool = False) -> np.ndarray:
    return c["cut"] & ((c["evaluated"] <= 8) == tiny)


def _pass_size(p: dict[str, tuple[float, float, float]]) -> str:
    return f"{p['chunk'][1]:,.0f} tokens"


ANY = _masks("any", lambda c: [()], _all, lambda p: "prompts of any length and place")
FAMILIES: tuple[Family, ...] = (
    ANY,
    _threshold("length", "length", "prompts above {edge} tokens"),
    _threshold("short", "length", "prompts of at most {edge} tokens", above=False),
    _threshold("place", "place", f"values beyond token {{edge}}, not in the last {NEAR_END_TOKENS}", among="far"),
    _threshold("left", "left", "values more than {edge} tokens from the end"),
    _threshold("head", "place", "values within the first {edge} tokens", above=False),
    _threshold("near end", "left", "values within {edge} tokens of the end", above=False),
    _threshold("cached", "cached", "prompts with more than {edge} tokens cached"),
    _threshold("suffix", "suffix", "prompts with at most {edge} tokens after the cached ones", above=False),
    _threshold("time", "order", "requests from number {edge} on", log=False),
    _threshold("page", "page", "values in physical pages above {edge}", log=False),
    _residues(),
    _masks("last pass", lambda c: [(n,) for n in _passes(c)], _last,
           lambda p: f"values outside the last prefill pass of {_pass_size(p)}", ("chunk",),
           lambda c, v: _shared(c, c["left"] > v[0])),
    _masks("first pass", lambda c: [(n,) for n in _passes(c)], _first,
           lambda p: f"values in the first of several prefill passes of {_pass_size(p)}", ("chunk",),
           lambda c, v: _shared(c, _in_pass(c, v[0])[0] > 0)),
    _masks("late pass", lambda c: [(n, back) for n in _passes(c) for back in (0, 1)], _from_end,
           lambda p: f"values in the {('', 'second-')[int(p['back'][1])]}last of several passes of {_pass_size(p)}",
           ("chunk", "back"),
           lambda c, v: _shared(c, c["left"] > (v[1] + 1) * v[0])),
    _masks("alternate pass", lambda c: [(n, odd) for n in _passes(c) for odd in (0, 1)], _alternate,
           lambda p: f"values in every second prefill pass of {_pass_size(p)}", ("chunk", "odd"),
           lambda c, v: _shared(c)),
    _masks("pass border", lambda c: [(n, w) for n in _passes(c) for w in (16, 64, 256) if w <= n // 4], _border,
           lambda p: f"values within {p['border'][1]:.0f} tokens of a border of prefill passes of {_pass_size(p)}",
           ("chunk", "border"),
           lambda c, v: _shared(c)),
    _masks("in flight exactly", _sizes, lambda c, v: (c["load"] == v[0]),
           lambda p: f"requests with exactly {p['size'][1]:.0f} in flight", ("size",)),
    _masks("uneven batch", lambda c: [()] if len(_sizes(c)) > 1 else [],
           lambda c, v: ((c["load"] > 1) & (np.log2(c["load"]) % 1 > 0)),
           lambda p: "requests in flight in numbers that are no power of two"),
    _masks("cut", lambda c: [()] if _cut(c).any() else [], lambda c, v: _cut(c),
           lambda p: "prompts that were evaluated shorter than they were sent"),
    _masks("tiny", lambda c: [()] if _cut(c, tiny=True).any() else [], lambda c, v: _cut(c, tiny=True),
           lambda p: "prompts that were evaluated as next to nothing"),
)  # fmt: skip
BY_NAME = {f.name: f for f in FAMILIES}


@dataclass(frozen=True)
class Gate:
    """A condition that a law may ask for besides: `state` of the request and `where` (arm, replica) it was served."""

    state: str  # any, warm, cold, load, turn, abort
    where: str  # any, arm, replica
    value: float | str | tuple[float | str, ...]
    words: str
    share: float  # among gates of its kind

    def mask(self, c: Rows) -> np.ndarray:
        level, name = self.value  # type: ignore[misc,str-unpack]
        ok = np.ones(len(c), bool) if self.where == "any" else (c[self.where] == name)
        if self.state == "load":
            return ok & (c["load"] >= level)
        if self.state == "abort":
            return ok & (c["since_abort"] <= level)
        if self.state == "turn":
            return ok & (c["turn"] > 1)
        return ok & c["warm"] if self.state == "warm" else ok & ~c["warm"] if self.state == "cold" else ok


def gates(c: Rows) -> list[Gate]:
    """All gates that split this table: states, arms and replicas, and a state on one arm."""
    states: list[tuple[str, float, str, float]] = [("any", 0, "", 1.0)]
    if c["warm"].any() and not c["warm"].all():
        states += [("warm", 0, "with a cached prefix", 1.0), ("cold", 0, "without a cached prefix", 1.0)]
    sizes = sorted({float(n) for n in c["load"] if n > 1 and not (c["load"] >= n).all()})
    sizes = [sizes[i] for i in np.unique(np.linspace(0, len(sizes) - 1, 5).astype(int))] if sizes else []
    states += [("load", n, f"with {n:.0f} or more in flight", 1 / len(sizes)) for n in sizes]
    if (c["turn"] > 1).any() and not (c["turn"] > 1).all():
        states.append(("turn", 0, "in follow-up turns", 1.0))
    steps = [n for n in (0, 1, 2, 4, 16, 1e9) if (c["since_abort"] <= n).any() and not (c["since_abort"] <= n).all()]
    told = {0: "beside a dropped request", 1: "right after a dropped request", 1e9: "ever after a dropped request"}
    states += [("abort", n, told.get(n, f"within {n:.0f} requests of a dropped one"), 1 / len(steps)) for n in steps]
    places: list[tuple[str, str, str, float]] = [("any", "", "", 1.0)]
    for column in ("arm", "replica"):
        names = [str(n) for n in dict.fromkeys(c[column])]
        if 2 <= len(names) <= 30:
            places += [(column, n, f"on {n or 'an unnamed ' + column}", 1 / len(names)) for n in names]
    crossed = {"warm": (0,), "cold": (0,), "turn": (0,), "load": (sizes[:1] or (0,)), "abort": steps[-2:-1]}
    found = [
        Gate(state, where, (level, name), ", ".join(filter(None, (place, words))), share * part)
        for where, name, place, part in places
        for state, level, words, share in states
        if where == "any" or state == "any" or (len(places) <= 3 and level in crossed.get(state, ()))
    ]
    return [g for g in found if (m := g.mask(c)).any() and (not m.all() or (g.state, g.where) == ("any", "any"))]
