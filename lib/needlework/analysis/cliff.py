"""Where does recall fall? Adaptive placement of prompt lengths by a grid posterior, then a walk to the exact token.

The curve is `bottom + (top - bottom) * S((log2 threshold - log2 length) / width)`: a step when the width is zero, else
a logistic whose 10-90 % range is `width` octaves. Hypotheses are threshold bins x width x top x bottom, and two more
for "no cliff in the range" and "already below at the shortest length". Each next length is the one that is expected to
tell most about the threshold (nuisance parameters integrated out), which is the marginal form of Kontsevich and Tyler's
psi method (1999) and of QUEST+ (Watson 2017). Nothing here knows an endpoint: lengths out, hits in, deterministic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from needlework.analysis.intervals import Interval

WIDTHS = np.array([0.0, 0.15, 0.35, 0.7, 1.0, 1.5, 2.5])  # octaves from 90 % to 10 % of the fall; 0 is a step
TOPS = np.array([0.99, 0.96, 0.90, 0.75])
BOTTOMS = np.array([0.01, 0.06, 0.15, 0.30, 0.45])
WIDTH_PRIOR = np.array([0.55, 0.06, 0.06, 0.10, 0.11, 0.07, 0.05])
TOP_PRIOR = np.array([0.40, 0.30, 0.20, 0.10])
BOTTOM_PRIOR = np.array([0.35, 0.20, 0.15, 0.20, 0.10])
NO_CLIFF_PRIOR, BELOW_PRIOR = 0.10, 0.05
CERTAIN = 0.95  # posterior at which the search gives up on a cliff in the range
# A posterior that mixes steps with soft falls is wider than a true step needs: where a step is nearly certain a lower
# credible level covers 95 %. It must not act at half-certainty: a soft fall whose first few outcomes look like a step
# stops early, and needs more than 0.95. The numbers are held against simulated endpoints (benchmarks/cliff.py).
SOFT_LEVEL, STEP_LEVEL, STEP_POWER = 0.97, 0.75, 8
# To stop at the first moment that looks certain enough is to stop a little early where the fall is soft: it is asked
# about until this share less is left open. Where a step is at all likely that is next to nothing.
SOFT_SHARE, SOFT_POWER = 0.4, 2
BRACKET_LEVEL = 0.87  # of a step, for the bracket; it decides what is asked next, so recorded runs depend on it
LOGISTIC = 2 * math.log(9.0)  # logits between 90 % and 10 %


@dataclass(frozen=True)
class Cliff:
    """What a search found. Lengths in tokens, widths in octaves; `interval` covers 95 %. In `bracket` a step is to be
    confirmed and walked.
    """

    state: str  # "cliff", "no cliff", "below range", "unsettled"
    threshold: float
    interval: Interval
    width_octaves: float
    width_interval: Interval
    top: float
    bottom: float
    requests: int
    low: int
    high: int
    bracket: Interval

    def __str__(self) -> str:
        if self.state == "no cliff":
            return f"no cliff between {self.low:,} and {self.high:,} tokens ({self.requests} requests)"
        if self.state == "below range":
            return f"recall is already low at {self.low:,} tokens, so a cliff is below that ({self.requests} requests)"
        low, high = self.interval
        shape = "a step" if self.width_interval.high < 0.2 else f"over {_width(self.width_interval)}"
        start = "recall falls" if self.state == "cliff" else "not settled yet: recall may fall"
        return (
            f"{start} at {self.threshold:,.0f} tokens (95 %: {low:,.0f} to {high:,.0f}), {shape}, "
            f"from {100 * self.top:.0f} % to {100 * self.bottom:.0f} %; {self.requests} requests"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


class CliffSearch:
    """Asks for lengths, takes hits, and knows when to stop.

    low, high   shortest and longest length in tokens (low < high)
    tolerance   relative half-width that the answer should have: 0.05 is plus or minus 5 %
    level       posterior probability within the tolerance at which the search stops (of a soft fall a little more)
    limit       stop after this many measured requests in any case
    seed        jitters lengths inside their cell, so that a comb in the residues can not pose as a cliff

    `propose(batch)` gives lengths (int), `update(lengths, hits)` takes them back in any order and number; a hit of NaN
    (no measurement) is ignored. The same seed and outcomes give the same questions.
    """

    def __init__(
        self, low: int, high: int, *, tolerance: float = 0.05, level: float = 0.90, limit: int = 400, seed: int = 0
    ) -> None:
        if not 1 <= low < high:
            raise ValueError(f"a search needs 1 <= low < high, not {low} and {high}")
        if not 0.005 <= tolerance <= 1:
            raise ValueError(f"tolerance is a share of the length between 0.005 and 1, not {tolerance}")
        self.low, self.high, self.tolerance, self.level, self.limit = int(low), int(high), tolerance, level, limit
        self._grid = _grid(float(low), float(high), float(np.clip(math.log2(1 + tolerance) / 4, 0.005, 0.04)))
        self._log = self._grid.log_prior.copy()
        self._random = np.random.default_rng([seed, 0xC11F])
        self.asked: list[tuple[int, int]] = []  # (length, hit)

    @property
    def requests(self) -> int:
        return len(self.asked)

    def propose(self, batch: int = 1) -> list[int]:
        """The next `batch` lengths in tokens; they may be asked in parallel."""
        if batch < 1:
            raise ValueError("a batch holds at least one length")
        grid, weight = self._grid, self._posterior()
        by_bin = weight.sum(axis=1)
        active = np.flatnonzero(by_bin > 1e-5 * by_bin.max())
        candidates = self._candidates(active)
        active, mass, stride = self._thinned(active, weight, by_bin)
        share = mass.sum(axis=(1, 2))
        mass = mass / share[:, None, None]
        floor = mass.sum(axis=1) @ _LEVELS[:, 1]
        drop = mass @ (_LEVELS[:, 0] - _LEVELS[:, 1])  # [bins, widths]
        shape = grid.shape(active, grid.edges[candidates], stride)
        chance = floor[:, None] + (drop[:, None, :] @ shape)[:, 0, :]  # P(hit | bin, length)
        share = share / share.sum()
        chosen: list[int] = []
        joint = np.ones((1, len(active)))  # P(outcomes of the chosen lengths | bin)
        noise = np.zeros(chance.shape[1])
        for _ in range(batch):
            with_hit = joint[:, None, :] * share
            yes = with_hit[:, 0, :] @ chance
            no = with_hit[:, 0, :] @ (1 - chance)
            gain = (
                _entropy(yes).sum(axis=0) + _entropy(no).sum(axis=0) - share @ (_entropy(chance) + _entropy(1 - chance))
            )
            best = int(np.argmax(gain - noise))
            chosen.append(best)
            p = chance[:, best]
            joint = np.concatenate([joint * p, joint * (1 - p)])
            if len(joint) > 64:  # enough memory of the batch; older members act through a crude spread instead
                joint = joint[np.argsort(joint @ share)[-64:]]
                noise[max(0, best - 1) : best + 2] += 0.02
        exponent = grid.edges[candidates[chosen]] + self._random.uniform(-0.25, 0.25, batch) * grid.step
        return [int(np.clip(round(2**e), self.low, self.high)) for e in exponent]

    def update(self, lengths: Sequence[int], hits: Sequence[float]) -> None:
        """Takes outcomes: 1 or True for a hit, 0 or False for a miss, NaN or None for no measurement."""
        if len(lengths) != len(hits):
            raise ValueError(f"{len(lengths)} lengths but {len(hits)} outcomes")
        for length, hit in zip(lengths, hits, strict=True):
            if hit is None or hit != hit:
                continue
            if length < 1:
                raise ValueError(f"a prompt has at least one token, not {length}")
            chance = self._grid.chance(math.log2(length))
            self._log += np.log(chance if hit else 1 - chance)
            self.asked.append((int(length), int(bool(hit))))
        self._log -= self._log.max()

    @property
    def done(self) -> bool:
        """True when the answer has the asked tolerance, when there is no cliff in the range, or at the limit."""
        if self.requests >= self.limit:
            return True
        weight = self._posterior()
        by_bin = weight.sum(axis=1)
        if max(by_bin[0], by_bin[-1]) >= CERTAIN:
            return True
        if by_bin[0] + by_bin[-1] >= 1 - CERTAIN:
            return False
        step = weight[1:-1, : len(_LEVELS)].sum() / by_bin[1:-1].sum()
        left = (1 - self.level) * (1 - SOFT_SHARE * (1 - step) ** SOFT_POWER)
        return bool(self._inside(by_bin) >= 1 - left)

    def result(self) -> Cliff:
        """The answer so far."""
        weight = self._posterior()
        by_bin = weight.sum(axis=1)
        if by_bin[-1] >= 0.5:
            state = "no cliff" if by_bin[-1] >= CERTAIN else "unsettled"
        elif by_bin[0] >= 0.5:
            state = "below range" if by_bin[0] >= CERTAIN else "unsettled"
        else:
            state = "cliff" if self._inside(by_bin) >= min(self.level, 0.9) else "unsettled"
        inner = weight[1:-1] if by_bin[1:-1].sum() > 1e-9 else weight[1:-1] + 1e-12
        inner = inner / inner.sum()
        bins = inner.sum(axis=1)
        nuisance = inner.sum(axis=0).reshape(len(WIDTHS), len(TOPS), len(BOTTOMS))
        widths = nuisance.sum(axis=(1, 2))

        def covering(level: float) -> Interval:
            ends = ((1 - level) / 2, (1 + level) / 2)
            return Interval(*(2.0 ** self._quantile(bins, end) for end in ends))

        return Cliff(
            state=state,
            threshold=2.0 ** self._quantile(bins, 0.5),
            interval=covering(SOFT_LEVEL - (SOFT_LEVEL - STEP_LEVEL) * widths[0] ** STEP_POWER),
            width_octaves=float(widths @ WIDTHS),
            width_interval=_discrete_interval(WIDTHS, widths),
            top=float(nuisance.sum(axis=(0, 2)) @ TOPS),
            bottom=float(nuisance.sum(axis=(0, 1)) @ BOTTOMS),
            requests=self.requests,
            low=self.low,
            high=self.high,
            bracket=covering(0.95 - (0.95 - BRACKET_LEVEL) * widths[0]),
        )

    def _thinned(
        self, active: np.ndarray, weight: np.ndarray, by_bin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """While much is possible, neighbouring bins act as one: (rows, mass [rows, widths, levels], bins in a row)."""
        shape = (-1, len(WIDTHS), len(_LEVELS))
        stride = max(1, len(active) // 90)
        if stride == 1:
            return active, weight[active].reshape(shape), 1
        inner = active[(active > 0) & (active < len(by_bin) - 1)]
        ends = np.setdiff1d(active, inner)
        group = (inner - inner[0]) // stride
        sums = np.zeros((group[-1] + 1, weight.shape[1]))
        np.add.at(sums, group, weight[inner])
        rows = inner[0] + np.arange(len(sums)) * stride + (stride - 1) // 2
        keep = sums.sum(axis=1) > 0
        rows = np.concatenate([np.minimum(rows[keep], len(by_bin) - 2), ends])
        return rows, np.concatenate([sums[keep], weight[ends]]).reshape(shape), stride

    def _candidates(self, active: np.ndarray) -> np.ndarray:
        """Bin edges worth asking: where thresholds are still possible and two octaves around, at most ~120 of them."""
        spare = round(2 / self._grid.step)
        first = max(0, active[0] - 1 - spare)
        last = min(len(self._grid.edges) - 1, active[-1] + spare)
        inner = active[(active > 0) & (active < len(self._grid.edges))]
        fine = np.unique(np.clip(np.concatenate([inner - 1, inner]), 0, len(self._grid.edges) - 1))
        coarse = np.linspace(first, last, 50).round().astype(int)
        return np.unique(np.concatenate([fine[:: 1 + len(fine) // 80], coarse]))

    def _posterior(self) -> np.ndarray:
        weight = np.exp(self._log - self._log.max())
        return weight / weight.sum()

    def _inside(self, by_bin: np.ndarray) -> float:
        bins = by_bin[1:-1] / max(by_bin[1:-1].sum(), 1e-12)
        middle, half = self._quantile(bins, 0.5), math.log2(1 + self.tolerance)
        cumulative = np.concatenate([[0.0], np.cumsum(bins)])
        below, above = np.interp([middle - half, middle + half], self._grid.edges, cumulative)
        return float(above - below)

    def _quantile(self, bins: np.ndarray, level: float) -> float:
        cumulative = np.concatenate([[0.0], np.cumsum(bins)])
        keep = np.concatenate([[True], np.diff(cumulative) > 1e-12])
        return float(np.interp(level * cumulative[-1], cumulative[keep], self._grid.edges[keep]))


class EdgeWalk:
    """Finds the exact token at which a step lies: `edge` is the longest length that still hits.

    A noisy bisection over integers (Horstein's posterior matching): the length that splits the posterior of the edge in
    half is asked next, and a repeated question is one more vote, so a random miss costs a request and not the answer.
    low, high: the edge is expected in low..high-1; edges outside are hypotheses too, and `state` says so.
    """

    def __init__(
        self, low: int, high: int, *, top: float = 0.97, bottom: float = 0.03, level: float = 0.99, limit: int = 120
    ) -> None:
        if not 0 <= low < high:
            raise ValueError(f"a walk needs 0 <= low < high, not {low} and {high}")
        if not top - bottom > 0.1:
            raise ValueError(f"a walk needs a fall of more than 0.1, not {top:.2f} to {bottom:.2f}")
        self.low, self.high, self.level, self.limit = int(low), int(high), level, limit
        self.top, self.bottom = min(top, 0.99), max(bottom, 0.01)
        self.edges = np.arange(self.low - 1, self.high + 1)  # low - 1: below the range; high: above it
        self._log = np.zeros(len(self.edges))
        self.asked: list[tuple[int, int]] = []

    @property
    def requests(self) -> int:
        return len(self.asked)

    def propose(self, batch: int = 1) -> list[int]:
        """Lengths that split the posterior into batch + 1 equal parts; each is a test of the edges on its two sides."""
        cumulative = np.concatenate([[0.0], np.cumsum(self._posterior())])  # before an edge, and after the last
        wanted = np.arange(1, batch + 1) / (batch + 1)
        above = np.clip(np.searchsorted(cumulative, wanted), 1, len(self.edges))
        nearer = wanted - cumulative[above - 1] < cumulative[above] - wanted
        cuts = np.where(nearer, above - 1, above)
        return [int(np.clip(self.edges[min(c, len(self.edges) - 1)], self.low, self.high)) for c in cuts]

    def update(self, lengths: Sequence[int], hits: Sequence[float]) -> None:
        """As `CliffSearch.update`."""
        if len(lengths) != len(hits):
            raise ValueError(f"{len(lengths)} lengths but {len(hits)} outcomes")
        for length, hit in zip(lengths, hits, strict=True):
            if hit is None or hit != hit:
                continue
            chance = np.where(self.edges >= length, self.top, self.bottom)
            self._log += np.log(chance if hit else 1 - chance)
            self.asked.append((int(length), int(bool(hit))))
        self._log -= self._log.max()

    @property
    def done(self) -> bool:
        return self.requests >= self.limit or float(self._posterior().max()) >= self.level

    @property
    def edge(self) -> int:
        """The most probable edge: the longest length that hits."""
        return int(self.edges[int(np.argmax(self._log))])

    @property
    def certainty(self) -> float:
        return float(self._posterior().max())

    @property
    def state(self) -> str:
        """ "edge", "below range", "above range" or "unsettled"."""
        if self.certainty < self.level:
            return "unsettled"
        return {self.low - 1: "below range", self.high: "above range"}.get(self.edge, "edge")

    def _posterior(self) -> np.ndarray:
        weight = np.exp(self._log - self._log.max())
        return weight / weight.sum()


class Constant(NamedTuple):
    """A number of the configuration that may explain an edge."""

    value: int
    formula: str
    specific: bool  # False when a multiple of it lies in almost any interval of this width


def constants_in(interval: Sequence[float], config: Mapping[str, float] | None = None) -> list[Constant]:
    """Constants that lie in `interval` (low, high; tokens, both ends allow one token of counting), most telling first.

    `config` may hold `topk`, `ratio` (one number or several), `window`, `page`, `chunk`, `context_limit`, `stash` and
    `group`; what it does not hold is taken from public defaults only where the formula says "usual". Multiples of a
    page or a chunk are listed, but marked as not specific when the interval is so wide that it must contain one.
    """
    low, high = float(interval[0]) - 1, float(interval[1]) + 1
    if not high >= low:
        raise ValueError(f"an interval runs from low to high, not {interval[0]} to {interval[1]}")
    config = dict(config or {})
    found: dict[tuple[int, str], Constant] = {}

    def add(value: float, formula: str, specific: bool = True) -> None:
        if low <= value <= high and value > 0:
            found.setdefault((int(value), formula), Constant(int(value), formula, specific))

    ratios = np.atleast_1d(config.get("ratio", []) or []).astype(int).tolist()
    topk, window, limit = (int(config.get(name) or 0) for name in ("topk", "window", "context_limit"))
    if topk:
        for ratio in ratios or [1]:
            add(topk * ratio, f"top-k x ratio = {topk} x {ratio}")
            if window:
                add(topk * ratio + window, f"top-k x ratio + window = {topk} x {ratio} + {window}")
        add(topk, f"top-k = {topk}")
    # a hard-coded or overridden budget shows at another k than the configured one
    for k in sorted({128, 256, 512, 1024, 2048} | {topk // d for d in (2, 4, 8, 16) if topk >= 4 * d}):
        for ratio in ratios or [4]:
            if k != topk:
                add(k * ratio, f"another top-k x ratio = {k} x {ratio} (usual)")
    if window:
        add(window, f"window = {window}")
    if limit:
        add(limit, f"context limit = {limit}")
        add(limit // 2 + 2, f"half the context limit + 2 = {limit // 2 + 2}")
        add(limit // 2, f"half the context limit = {limit // 2}")
    for n in (2, 4, 8) if topk else ():
        for ratio in ratios or [1]:
            add(n * topk * ratio, f"top-k candidate stash = {n} x top-k x ratio = {n} x {topk} x {ratio}")
    if config.get("stash"):
        add(int(config["stash"]), f"top-k candidate stash = {int(config['stash'])}")
    for stash in (4096, 16384):
        add(stash, f"top-k candidate stash = {stash} (usual)")
    for name in ("chunk", "page", "group"):
        unit = int(config.get(name) or 0)
        if unit > 1:
            first, last = math.ceil(low / unit), math.floor(high / unit)
            for n in range(max(1, first), min(last, first + 7) + 1):
                add(n * unit, f"{n} x {name} = {n} x {unit}", specific=(high - low) < 0.5 * unit)
    middle = (low + high) / 2
    return sorted(found.values(), key=lambda c: (not c.specific, "usual" in c.formula, abs(c.value - middle)))


_LEVELS = np.array([(top, bottom) for top in TOPS for bottom in BOTTOMS])


@dataclass(frozen=True)
class _Grid:
    edges: np.ndarray  # log2 of the bin edges [bins + 1]; also the candidate lengths
    step: float
    log_prior: np.ndarray  # [bins + 2, widths * levels]; the first row is "below the range", the last "no cliff"

    def shape(self, rows: np.ndarray, exponents: np.ndarray, stride: int = 1) -> np.ndarray:
        """Share of the fall still ahead [rows, widths, lengths]; the threshold is uniform inside its bin."""
        middle = self.edges[0] + (rows - 0.5) * self.step
        above = middle[:, None] - exponents[None, :]
        soft = 1 / (1 + np.exp(-np.clip(above[:, None, :] * (LOGISTIC / WIDTHS[1:])[None, :, None], -40, 40)))
        shape = np.concatenate([np.clip(above / (self.step * stride) + 0.5, 0, 1)[:, None, :], soft], axis=1)
        shape[rows == 0] = 0.0
        shape[rows == len(self.edges)] = 1.0
        return shape

    def chance(self, exponent: float) -> np.ndarray:
        """P(hit) at one log2 length under every hypothesis [bins + 2, widths * levels]."""
        shape = self.shape(np.arange(len(self.edges) + 1), np.array([exponent]))
        chance = _LEVELS[:, 1] + (_LEVELS[:, 0] - _LEVELS[:, 1]) * shape
        return chance.reshape(len(chance), -1)


@functools.lru_cache(maxsize=8)
def _grid(low: float, high: float, step: float) -> _Grid:
    count = max(8, math.ceil(math.log2(high / low) / step))
    edges = np.linspace(math.log2(low), math.log2(high), count + 1)
    nuisance = np.einsum("w,a,b->wab", WIDTH_PRIOR, TOP_PRIOR, BOTTOM_PRIOR).ravel()
    prior = np.full(count + 2, (1 - NO_CLIFF_PRIOR - BELOW_PRIOR) / count)
    prior[0], prior[-1] = BELOW_PRIOR, NO_CLIFF_PRIOR
    return _Grid(edges, float(edges[1] - edges[0]), np.log(np.outer(prior, nuisance / nuisance.sum())))


def _entropy(p: np.ndarray) -> np.ndarray:
    return -p * np.log(np.maximum(p, 1e-12))


def _discrete_interval(values: np.ndarray, weight: np.ndarray) -> Interval:
    first, last = np.searchsorted(np.cumsum(weight), [0.025, 0.975])
    return Interval(float(values[first]), float(values[min(int(last), len(values) - 1)]))


def _width(interval: Interval) -> str:
    return f"{interval.low:.1f} to {interval.high:.1f} octaves"
