"""Which law of loss explains a table? Marginal likelihoods in closed form, averaged over each law's parameters.

Inside a law's set requests are lost at an unknown rate: nearly all (Beta(6, 0.7)) or some (Beta(1, 1.5)); outside
only by lapses (Beta(1, 60), one deployment in ten Beta(1, 9)). Kinds of wrong answers are multinomial, with a Dirichlet
prior of 1/2 a kind, inside and outside apart. A law's prior is what the classes of faults.toml make of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import betaln, gammaln, xlogy

from needlework.analysis import families, mechanisms
from needlework.analysis.conditions import KINDS, conditions
from needlework.analysis.families import BY_NAME, FAMILIES, Gate, Marks, Rows
from needlework.analysis.mechanisms import CODES

HARD, SOFT, LAPSE, WEAK_MODEL = (6.0, 0.7), (1.0, 1.5), (1.0, 60.0), (1.0, 9.0)
RATES = {True: HARD, False: SOFT}
KIND_INDEX = {name: i for i, name in enumerate(KINDS)}
WEAK = 0.1  # deployments whose lapses are those of a weak model
DIRICHLET = 0.5
SECOND = 0.05  # of deployments with one fault: a second one
FORESEEN = 32  # likeliest values of a law's parameters that predict
KEPT = 1e-4  # share of a law's weight below which a value of its parameters is not kept
_UNPLACED_WORDS = {
    "free": "losses that no law explains", "arms": "at a rate of its own on each arm",
    "prompts": "particular prompts, whenever they are asked",
}  # fmt: skip
UNPLACED = tuple(_UNPLACED_WORDS)  # laws that do not say which requests yet to be sent are lost
SEVERAL = 4  # lengths at which something is lost, before a residue of them is looked for
LIKELIEST = 3  # laws whose remainder is searched for a second one
FADES = np.array([0.7, 1.2, 2.0, 3.5])
SIZES = ("topk", "ratio", "window", "page", "chunk", "context_limit")
_SAME = {
    **dict.fromkeys(("index_topk", "top_k"), "topk"),
    **dict.fromkeys(("page_size", "page_tokens"), "page"),
    **dict.fromkeys(("chunk_size", "chunk_tokens", "chunked_prefill_size"), "chunk"),
    **dict.fromkeys(("context_length", "max_model_len", "max_context"), "context_limit"),
    **dict.fromkeys(("sliding_window", "swa_window"), "window"), "compress_ratio": "ratio",
}  # fmt: skip


__all__ = ["Fit", "Law", "conditions", "fit", "sizes"]


@dataclass(frozen=True)
class Law:
    """What is lost, in words; parameters and rates are (low, best, high), 95 %; counts are (lost, of)."""

    name: str
    sentence: str
    share: float
    parameters: dict[str, tuple[float, float, float]]
    rate_inside: tuple[float, float, float]
    rate_outside: tuple[float, float, float]
    inside: tuple[int, int]
    outside: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.sentence} ({100 * self.share:.0f} %)"


@dataclass
class _Hypothesis:
    """One family behind one gate at one rate: log evidence, and the values of its parameters that matter."""

    family: str
    gate: Gate
    hard: bool
    evidence: float
    values: list[tuple[float, ...]] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.ones(1))
    counts: np.ndarray = field(default_factory=lambda: np.zeros((1, 4)))  # lost, n inside; lost, n outside
    kinds: np.ndarray = field(default_factory=lambda: np.zeros(8))
    second: _Hypothesis | None = None

    @property
    def where(self) -> str:
        return self.gate.where if self.gate.where == "any" else f"{self.gate.where}={self.gate.value[1]}"  # type: ignore[index]

    @property
    def name(self) -> str:
        gate = ", ".join(x for x in (self.where, self.gate.state) if x != "any")
        own = f"{gate}: {self.family}" if gate else self.family
        own = {"free": "unexplained"}.get(own, own)
        return f"{own} + {self.second.name}" if self.second else own

    def loss(self, c: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Expected loss [rows] and expected entropy of it in nats, over the values of the parameters."""
        gate = self.gate.mask(c)
        if self.family.startswith("fade"):
            x = c[self.family.split()[1]]
            each = np.stack([_fade(x, m, s) for m, s in self.values])
            each = np.where(gate & np.isfinite(x), each, 0.01)
            return self.weights @ each, self.weights @ _entropy(each)
        if self.family in UNPLACED:
            each = np.full(len(c), (self.counts[0, 0] + 0.5) / (self.counts[0, 1] + 1))
            return each, _entropy(each)
        a, b = RATES[self.hard]
        mean, entropy = np.zeros(len(c)), np.zeros(len(c))
        x, n, y, m = self.counts[:FORESEEN].T
        inside, outside = (x + a) / (n + a + b), _lapse_mean(y, m)
        high, low = _entropy(inside), _entropy(outside)
        rest, rest_entropy = self.second.loss(c) if self.second else (None, None)
        weights = self.weights[:FORESEEN] / self.weights[:FORESEEN].sum()
        for i, w in enumerate(weights):
            part = BY_NAME[self.family].mask(c, self.values[i]) * gate
            mean += w * (part * inside[i] + (1 - part) * (outside[i] if rest is None else rest))
            entropy += w * (part * high[i] + (1 - part) * (low[i] if rest is None else rest_entropy))
        return mean, entropy


@dataclass(frozen=True)
class Fit:
    """shares: law -> posterior share ("healthy" and "unexplained" among them); laws likeliest first; classes: class of
    fault -> share, with "healthy" and "open" (none that is known)."""

    shares: dict[str, float]
    laws: tuple[Law, ...]
    classes: dict[str, float]
    second: dict[str, float]  # classes behind the second law, where two are likeliest
    through: dict[str, tuple[str, ...]]  # class -> the laws through which it is likely
    hypotheses: tuple[tuple[float, Any], ...]  # (share, what predicts); None predicts as a healthy one
    lost: int
    measured: int

    def predict(self, c: pd.DataFrame) -> pd.DataFrame:
        """p_loss and information_bits (expected, about which explanation holds) of requests yet to be sent."""
        rows = Rows.of(c.assign(order=float(self.measured)))
        safe = np.full(len(c), _lapse_mean(self.lost if self.shares.get("healthy", 0) > 0.5 else 0, self.measured))
        mean, entropy, weight = np.zeros(len(c)), np.zeros(len(c)), 0.0
        for share, h in self.hypotheses:
            p, e = (safe, _entropy(safe)) if h is None else h.loss(rows)
            mean, entropy, weight = mean + share * p, entropy + share * e, weight + share
        mean, entropy = mean / weight, entropy / weight
        bits = np.maximum(0.0, _entropy(mean) - entropy) / math.log(2)
        return pd.DataFrame({"p_loss": mean, "information_bits": bits}, index=c.index)

    def __str__(self) -> str:
        lines = [f"{self.lost} of {self.measured} lost; healthy {100 * self.shares.get('healthy', 0):.0f} %"]
        return "\n".join([*lines, *(f"  {law}" for law in self.laws[:5])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(law.sentence)}</td><td>{100 * law.share:.0f} %</td></tr>" for law in self.laws[:8]
        )
        head = "<tr><th scope='col'>what is lost</th><th scope='col'>share</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def sizes(stated: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Stated sizes by our names, each a list of positive numbers; what says something else ("auto") is not used."""
    out: dict[str, list[float]] = {}
    for key, value in (stated or {}).items():
        several = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
        good = [float(v) for v in several if isinstance(v, (int, float, np.number)) and not isinstance(v, bool)]
        good = [v for v in good if math.isfinite(v) and 1 <= v < 1e15]
        if good:
            out.setdefault(_SAME.get(str(key), str(key)), good)
    return out


def fit(c: pd.DataFrame, *, stated: Mapping[str, Any] | None = None, window: int | None = None,
        inside: Mapping[str, float] | None = None) -> Fit:  # fmt: skip
    """Posterior shares of all laws, and of the classes behind them, for rows of `conditions`.

    stated   sizes of the deployment (topk, ratio, window, page, chunk, context_limit), where it tells them; window: its
             stated context in tokens; inside: log likelihood of each class from what was seen inside
    Rows that never reached the model are left out. Raises ValueError when the rows are not those of `conditions`.
    """
    if not {"length", "kind", "lost", "since_abort"} <= set(c):
        raise ValueError("fit takes the rows of analysis.conditions(trials)")
    known = sizes(stated)
    if window:
        known.setdefault("context_limit", [float(window)])
    rows = Rows.of(c[c["kind"] >= 0], known.get("chunk", ()))
    lost, n = int(rows["lost"].sum()), len(rows)
    calm = _calm(rows["kind"])
    hypotheses = _hypotheses(rows) if n else []
    if lost >= 6:
        hypotheses += _pairs(rows, hypotheses)
    return _posterior(rows, hypotheses, calm, known, inside or {}, lost, n)


def _posterior(c: Rows, hypotheses: list[_Hypothesis], calm: float, known: dict[str, list[float]],
               inside: Mapping[str, float], lost: int, n: int) -> Fit:  # fmt: skip
    laws = tuple((h.family, h.gate.state, h.where, h.hard) for h in hypotheses)
    single = tuple(dict.fromkeys(law for law, h in zip(laws, hypotheses, strict=True) if h.second is None))
    arms = tuple(dict.fromkeys(c["arm"])) if len(c) else ()
    replicas = len(set(c["replica"])) if len(c) else 0
    table = mechanisms.prior(single, arms, replicas if replicas > 1 else 0)
    unseen = float((1 - table.sum(0)) @ mechanisms.classes())  # cases that this table could not show: as if healthy
    rows = {law: k for k, law in enumerate(single)}
    groups: dict[Any, float] = {}  # gates of several levels share the prior of their law
    for law, h in zip(laws, hypotheses, strict=True):
        groups[law, h.second and h.second.name] = groups.get((law, h.second and h.second.name), 0.0) + h.gate.share
    best = max((h.evidence for h in hypotheses), default=0.0)
    hypotheses = [h for h in hypotheses if h.evidence > max(best, calm) - 40]
    joint = np.full((len(hypotheses), len(CODES)), -np.inf)
    for i, h in enumerate(hypotheses):
        law = (h.family, h.gate.state, h.where, h.hard)
        scale = h.gate.share / groups[law, h.second and h.second.name]
        own = table[rows[law]] * mechanisms.classes() * scale
        if h.second is not None:
            other = (h.second.family, h.second.gate.state, h.second.where, h.second.hard)
            own = own * (table[rows[other]] @ mechanisms.classes() if other in rows else 0) * h.second.gate.share
        joint[i] = h.evidence + np.log(np.maximum(own, 1e-300)) + [_fits(h, code, known, c) for code in CODES]
    joint += np.array([inside.get(code, 0.0) for code in CODES])
    healthy = calm + math.log(mechanisms.HEALTHY + unseen) + inside.get("healthy", 0.0)
    total = _lse(np.append(joint.ravel(), healthy))
    each = np.exp(joint - total)
    share_of = each.sum(1)
    classes = {"healthy": float(np.exp(healthy - total))} | dict(zip(CODES, each.sum(0).tolist(), strict=True))
    shares: dict[str, float] = {"healthy": classes["healthy"], "unexplained": 0.0}
    for h, share in zip(hypotheses, share_of, strict=True):
        shares[h.name] = shares.get(h.name, 0.0) + float(share)
    members: dict[str, list[tuple[float, _Hypothesis]]] = {}
    for h, share in zip(hypotheses, share_of, strict=True):
        members.setdefault(h.name, []).append((float(share), h))
    ranked = sorted((k for k in members if shares[k] > 1e-3), key=lambda k: -shares[k])
    told = tuple(_law(k, shares[k], members[k], c) for k in ranked[:6])
    keep = [(float(s), h) for s, h in zip(share_of, hypotheses, strict=True) if s > 1e-4]
    second = _second(hypotheses, share_of, table, rows, known, c)
    return Fit(shares, told, classes, second, _through(hypotheses, each), ((classes["healthy"], None), *keep), lost, n)


def _second(hypotheses: list[_Hypothesis], share: np.ndarray, table: np.ndarray, rows: dict[Any, int],
            known: dict[str, list[float]], c: Rows) -> dict[str, float]:  # fmt: skip
    """Classes behind the second of two laws, weighed over all pairs."""
    out = dict.fromkeys(CODES, 0.0)
    for h, s in zip(hypotheses, share, strict=True):
        if h.second is not None and s > 1e-4:
            law = (h.second.family, h.second.gate.state, h.second.where, h.second.hard)
            own = table[rows[law]] * mechanisms.classes() * np.exp([_fits(h.second, code, known, c) for code in CODES])
            for code, p in zip(CODES, own / own.sum(), strict=True):
                out[code] += float(s * p)
    total = sum(out.values())
    return {code: p / total for code, p in out.items()} if total > 0 else {}


def _through(hypotheses: list[_Hypothesis], each: np.ndarray) -> dict[str, tuple[str, ...]]:
    out = {}
    for j, code in enumerate(CODES):
        by: dict[str, float] = {}
        for h, p in zip(hypotheses, each[:, j], strict=True):
            by[h.name] = by.get(h.name, 0.0) + float(p)
        order = sorted((name for name in by if by[name] > 1e-3), key=lambda name: -by[name])
        out[code] = tuple(order[:3])
    return out


def _fits(h: _Hypothesis, code: str, known: dict[str, list[float]], c: Rows) -> float:
    """Log likelihood ratio of a class against any other that loses by this law: where its edge lies, how it answers."""
    if code == "open":
        return 0.0
    m, ratio = mechanisms.MECHANISMS[code], 0.0
    answers = h.kinds[1 : KIND_INDEX["unknown"]]
    if answers.any() and m.answers:  # every second case shows one of the listed kinds, as if two had been seen before
        plain = np.full(len(answers), DIRICHLET)
        each = [_dirichlet(answers, plain + 2 * (np.arange(len(answers)) == KIND_INDEX[k] - 1)) for k in m.answers]
        listed = _lse(each) - math.log(len(each)) - _dirichlet(answers, plain)
        ratio += float(np.logaddexp(listed, 0.0)) - math.log(2)
    places = _places(m.at, known)
    if places and h.family in ("length", "place", "left", "suffix"):  # one case in ten has its edge at the size
        x = c[h.family][np.isfinite(c[h.family])]
        wide = math.log(max(x.max(), 2.0) / max(x.min(), 1.0)) if len(x) else 0.0
        near = 0.0
        for (low, high), w in zip(h.values, h.weights, strict=True):
            low, high = max(low, 1.0), max(high, 1.5)
            for p in places:
                inside = math.log(min(high, p * 1.015 + 8) / max(low, p * 0.985 - 8, 1.0)) / max(
                    math.log(high / low), 1e-9
                )
                near += w * max(inside, 0.0)
        expected = max(
            sum(math.log((p * 1.015 + 8) / (p * 0.985 - 8)) for p in places if p > 16) / max(wide, 1e-9), 1e-6
        )
        ratio += math.log(0.9 + 0.1 * near / expected)
    elif "chunk" in m.at and known.get("chunk") and "pass" in h.family:  # one case in ten has another unit
        at = sum(w * (v[0] in known["chunk"]) for v, w in zip(h.values, h.weights, strict=True))
        ratio += math.log(0.1 + 0.9 * at * len(families.CHUNKS))
    return ratio


def _places(at: Sequence[str], known: dict[str, list[float]]) -> list[float]:
    out: list[float] = []
    for name in at:
        if name == "budget" and "topk" in known:
            out += [k * r for k in known["topk"] for r in known.get("ratio", [1.0]) if k * r > 1]
        elif name == "limit":
            out += known.get("context_limit", [])
        else:
            out += known.get(name, [])
    return out


def _hypotheses(c: Rows) -> list[_Hypothesis]:
    kind = c["kind"].astype(int)
    present = [0, *sorted(set(kind.tolist()) - {0})]
    gates = families.gates(c)
    masks = np.stack([g.mask(c) for g in gates])
    own = np.stack([kind == k for k in present], 1)
    every = own.sum(0)
    score = _Score(len(c), every)
    out: list[_Hypothesis] = []
    several = [len(np.unique(c["length"][m & (kind > 0)])) >= SEVERAL for m in masks]  # one length is no residue
    few = [i for i, g in enumerate(gates) if g.state in ("any", "warm", "cold") and several[i]]
    marks = {"residue": Marks.of(masks[few], own)} if few else {}  # a comb is not crossed with what cannot carry one
    every_gate = Marks.of(masks, own)
    for family in FAMILIES:
        mine = few if family.name == "residue" else list(range(len(gates)))
        counts = family.count(c, marks.get(family.name, every_gate)) if mine else None
        if counts is not None:
            inside = counts.inside.reshape(-1, len(mine), len(present)).astype(np.int32)
            unclear = 0 if counts.unclear is None else counts.unclear.reshape(inside.shape).astype(np.int32)
            chosen = [gates[i] for i in mine]
            out += _family(family.name, inside, unclear, counts.prior, counts.values, chosen, present, every, score)
    known = c["length"][np.isfinite(c["length"])]
    cuts = np.quantile(known, (0.25, 0.5, 0.75)) if len(known) else ()
    grounds = [*masks[1:], *(c["length"] > q for q in cuts)]
    alone, either = _one_kind(kind), _kinds_apart(kind, grounds)
    out = [replace(h, evidence=h.evidence + either - alone) if h.name == "any" else h for h in out]
    where = [g for g in gates if g.state == "any"]
    out += _fading(c, where, kind) + _free(c, kind, gates[0]) + _prompts(c, kind, gates[0])
    return out


def _family(name: str, inside: np.ndarray, unclear: np.ndarray | int, prior: np.ndarray, values: np.ndarray,
            gates: list[Gate], present: list[int], every: np.ndarray, score: _Score) -> list[_Hypothesis]:  # fmt: skip
    n, met = inside.sum(2), inside + unclear
    ok = (n > 0) & ((n < every.sum()) | (name == "any"))
    weight = np.where(ok, prior[:, None], 0)
    share = weight.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        base = np.log(weight / np.where(share > 0, share, 1)) + score.outside(met) + score.kinds(met)
    if np.any(unclear):
        base = base + score.any_rate(np.asarray(unclear))
    rates = {hard: base + score.rate(inside, hard) for hard in (True, False)}
    out = []
    for hard, log in rates.items():
        peak = np.max(log, 0)
        weights = np.exp(log - np.where(np.isfinite(peak), peak, 0))
        sums = weights.sum(0)
        for g in np.flatnonzero(share > 0):
            gate, evidence, w = gates[g], float(peak[g] + math.log(sums[g])), weights[:, g] / sums[g]
            top = np.flatnonzero(w > KEPT)
            top = top[np.argsort(-w[top])[:200]]
            some = inside[top, g]
            x, m = some[:, 1:].sum(1), some.sum(1)
            outer = every - met[top, g]
            counts = np.stack([x, m, outer[:, 1:].sum(1), outer.sum(1)], 1)
            kinds = np.zeros(len(KIND_INDEX))
            kinds[present] = some[0]
            out.append(
                _Hypothesis(
                    name,
                    gate,
                    hard,
                    evidence,
                    [tuple(v) for v in values[top].tolist()],
                    w[top] / w[top].sum(),
                    counts,
                    kinds,
                )
            )
    return out


class _Score:
    """Beta-binomial and Dirichlet-multinomial terms of whole counts, by tables of log-gamma."""

    def __init__(self, rows: int, every: np.ndarray) -> None:
        self.every, self.rows = every, rows
        self._tables: dict[float, np.ndarray] = {}

    def _lg(self, a: float, n: np.ndarray) -> np.ndarray:
        if a not in self._tables:
            self._tables[a] = gammaln(np.arange(self.rows + 1) + a) - gammaln(a)
        return self._tables[a][n]

    def _beta(self, x: np.ndarray, n: np.ndarray, prior: tuple[float, float]) -> np.ndarray:
        a, b = prior
        return self._lg(a, x) + self._lg(b, n - x) - self._lg(a + b, n)

    def rate(self, inside: np.ndarray, hard: bool) -> np.ndarray:
        n = inside.sum(2)
        return self._beta(n - inside[..., 0], n, RATES[hard])

    def any_rate(self, unclear: np.ndarray) -> np.ndarray:
        n = unclear.sum(2)
        return self._beta(n - unclear[..., 0], n, (1.0, 1.0))

    def outside(self, inside: np.ndarray) -> np.ndarray:
        n = self.every.sum() - inside.sum(2)
        x = n - (self.every[0] - inside[..., 0])
        usual, weak = self._beta(x, n, LAPSE), self._beta(x, n, WEAK_MODEL)
        return np.logaddexp(usual + math.log(1 - WEAK), weak + math.log(WEAK))

    def kinds(self, inside: np.ndarray) -> np.ndarray:
        """Kinds of wrong answers inside and outside."""
        if len(self.every) <= 2:
            return np.zeros(inside.shape[:2])
        return self._dirichlet(inside[..., 1:]) + self._dirichlet(self.every[1:] - inside[..., 1:])

    def _dirichlet(self, counts: np.ndarray) -> np.ndarray:
        each = self._lg(DIRICHLET, counts).sum(-1)
        return each - self._lg(DIRICHLET * counts.shape[-1], counts.sum(-1))


def _calm(kind: np.ndarray) -> float:
    """Log evidence of a healthy deployment: lapses alone."""
    return float(_bb((kind > 0).sum(), len(kind), LAPSE)) + _one_kind(kind)


def _one_kind(kind: np.ndarray) -> float:
    counts = np.bincount(kind[kind > 0])
    counts = counts[counts > 0]
    return _dirichlet(counts, np.full(len(counts), DIRICHLET)) if len(counts) > 1 else 0.0


def _kinds_apart(kind: np.ndarray, grounds: Sequence[np.ndarray]) -> float:
    """Kinds of wrong answers alike everywhere, or (every second case) of their own on one of several grounds: how an
    answer is wrong may hang on the load or the length where what is lost does not."""
    counts = np.bincount(kind)
    present = np.flatnonzero(counts[1:]) + 1
    if len(present) < 2:
        return 0.0
    each = [_two_kinds(kind, ground, present) for ground in grounds] or [_one_kind(kind)]
    return float(np.logaddexp(_one_kind(kind), _lse(each) - math.log(len(each))) - math.log(2))


def _two_kinds(kind: np.ndarray, ground: np.ndarray, present: np.ndarray) -> float:
    plain = np.full(len(present), DIRICHLET)
    return sum(_dirichlet(np.bincount(kind[m], minlength=len(KIND_INDEX))[present], plain) for m in (ground, ~ground))


def _dirichlet(counts: np.ndarray, alpha: np.ndarray) -> float:
    a, n = alpha.sum(), counts.sum()
    return float(gammaln(a) - gammaln(a + n) + (gammaln(alpha + counts) - gammaln(alpha)).sum())


def _bb(x: Any, n: Any, prior: tuple[float, float]) -> Any:
    a, b = prior
    return betaln(a + x, b + n - x) - betaln(a, b)


def _lapses(x: Any, n: Any) -> Any:
    return np.logaddexp(_bb(x, n, LAPSE) + math.log(1 - WEAK), _bb(x, n, WEAK_MODEL) + math.log(WEAK))


def _lapse_mean(x: Any, n: Any) -> Any:
    w = np.exp(_bb(x, n, WEAK_MODEL) + math.log(WEAK) - _lapses(x, n))
    return (1 - w) * (LAPSE[0] + x) / (sum(LAPSE) + n) + w * (WEAK_MODEL[0] + x) / (sum(WEAK_MODEL) + n)


def _fade(x: np.ndarray, middle: Any, slope: Any) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.clip(1 - 0.98 / (1 + (np.maximum(x, 1) / middle) ** slope), 0.01, 0.99)


def _fading(c: Rows, gates: list[Gate], kind: np.ndarray) -> list[_Hypothesis]:
    """Recall that falls gradually, 1 / (1 + (x / middle) ** slope), with length, place or distance from the end."""
    out = []
    lost, same = kind > 0, _one_kind(kind)
    for column in ("length", "left", "place"):
        x = c[column]
        ok = np.isfinite(x)
        if ok.sum() < 8 or len(np.unique(x[ok])) < 5:
            continue
        middles = np.geomspace(max(64, np.quantile(x[ok], 0.02)), 4 * max(x[ok].max(), 128), 40)
        values = [(float(m), float(s)) for m in middles for s in FADES]
        steps, step = np.unique(np.rint(100 * np.log(np.maximum(x[ok], 1))), return_inverse=True)  # of one per cent
        p = _fade(np.exp(steps / 100), *(np.array(v)[:, None] for v in zip(*values, strict=True)))
        gain, loss = np.log1p(-p), np.log(p)
        for gate in gates:
            inside = gate.mask(c) & ok
            mine, hit = inside[ok], lost[inside]
            gone = np.bincount(step, mine & lost[ok], len(steps))
            log = loss @ gone + gain @ (np.bincount(step, mine, len(steps)) - gone)
            rest = lost[~inside]
            log = log - math.log(len(values)) + _lapses(rest.sum(), len(rest)) + same
            evidence = _lse(log)
            w = np.exp(log - evidence)
            top = np.argsort(-w)[:40]
            counts = np.tile([hit.sum(), len(hit), rest.sum(), len(rest)], (len(top), 1))
            kinds = np.bincount(kind[inside], minlength=len(KIND_INDEX)).astype(float)
            kept, weights = [values[i] for i in top], w[top] / w[top].sum()
            out.append(_Hypothesis(f"fade {column}", gate, False, evidence, kept, weights, counts, kinds))
    return out


def _free(c: Rows, kind: np.ndarray, gate: Gate) -> list[_Hypothesis]:
    """No law: a rate of its own in each of a few cells of length, depth, time or two of them; or in each arm."""

    def cells(column: str, parts: int) -> np.ndarray:
        x = c[column]
        ok = np.isfinite(x)
        if not ok.any():
            return np.zeros(len(x), int)
        edges = np.unique(np.quantile(x[ok], np.linspace(0, 1, parts + 1)[1:-1]))
        return np.where(ok, np.searchsorted(edges, np.nan_to_num(x), side="right"), parts)

    length, depth = cells("length", 4), cells("depth", 3)
    schemes = [cells("length", n) for n in (3, 6, 10)] + [cells("depth", n) for n in (3, 5, 8)]
    schemes += [cells("left", 6), cells("order", 4), length * 4 + depth, length * 2 + c["warm"].astype(int)]
    lost = kind > 0
    log = [_apart(scheme, lost) for scheme in schemes]
    evidence = {"free": _lse(log) - math.log(len(log))}
    arms = pd.factorize(c["arm"] + "\x1f" + c["replica"])[0]
    if arms.max(initial=0) > 0:
        evidence["arms"] = _apart(arms, lost)
    counts = np.array([[lost.sum(), len(lost), 0, 0]])
    kinds = np.bincount(kind, minlength=len(KIND_INDEX)).astype(float)
    same = _one_kind(kind)
    return [_Hypothesis(n, gate, False, e + same, [()], np.ones(1), counts, kinds) for n, e in evidence.items()]


def _apart(scheme: np.ndarray, lost: np.ndarray) -> float:
    """Log evidence of a loss rate of its own in each cell."""
    return float(_bb(np.bincount(scheme, weights=lost), np.bincount(scheme), (0.5, 0.5)).sum())


def _prompts(c: Rows, kind: np.ndarray, gate: Gate) -> list[_Hypothesis]:
    """Some prompts fail whenever they are asked, the others never: seen only where prompts were asked again."""
    _, group = np.unique(c["prompt"], return_inverse=True)
    n, x = np.bincount(group).astype(float), np.bincount(group, weights=c["lost"])
    if (n > 1).sum() < 4:
        return []
    bad, good = _bb(x, n, HARD), _bb(x, n, LAPSE)
    q = (np.arange(20) + 0.5) / 20
    log = np.logaddexp(np.log(q)[:, None] + bad, np.log1p(-q)[:, None] + good).sum(1)
    weight = _lse(log) - math.log(len(q))
    counts = np.array([[x.sum(), n.sum(), 0, 0]])
    kinds = np.bincount(kind, minlength=len(KIND_INDEX)).astype(float)
    return [_Hypothesis("prompts", gate, False, weight + _one_kind(kind), [()], np.ones(1), counts, kinds)]


def _pairs(c: Rows, hypotheses: list[_Hypothesis]) -> list[_Hypothesis]:
    """Two causes: what the likeliest laws leave unexplained, explained by a second law of their remainder."""
    kind = c["kind"].astype(int)
    plain = [h for h in hypotheses if h.family in BY_NAME and h.name != "any"]
    best: dict[tuple[str, str, str], _Hypothesis] = {}
    for h in sorted(plain, key=lambda h: -h.evidence):
        best.setdefault((h.family, h.gate.state, h.where), h)
    out = []
    if not best or c["lost"].mean() > 0.97:  # where all is lost nothing is left behind
        return []
    first = next(iter(best.values()))
    plainest = max((h.evidence for h in hypotheses if h.name == "any"), default=-np.inf)
    left = first.counts[0]
    if left[2] < 3 or left[2] <= 0.03 * left[3] or first.evidence < max(plainest, _calm(kind)) + 5:
        return []
    for h in list(best.values())[:LIKELIEST]:
        rest = BY_NAME[h.family].mask(c, h.values[0]) * h.gate.mask(c) < 0.5
        lost = int((kind[rest] > 0).sum())
        if lost < 3 or lost <= 0.03 * rest.sum():
            continue
        calm = float(_lapses(lost, rest.sum())) + _one_kind(kind[rest])
        out += [
            replace(h, evidence=h.evidence - calm + second.evidence + math.log(SECOND), second=second)
            for second in _hypotheses(c.take(rest))
            if second.family in BY_NAME and second.evidence > calm and second.name != h.name
        ]
    return sorted(out, key=lambda h: -h.evidence)[:40]


def _law(name: str, share: float, members: list[tuple[float, _Hypothesis]], c: Rows) -> Law:
    """A law in words, its parameters over all members that bear its name."""
    members = sorted(members, key=lambda m: -m[0])
    first = members[0][1]
    total = sum(s for s, _ in members) or 1.0
    values = [(s / total * w, h, v) for s, h in members for v, w in zip(h.values, h.weights, strict=True)]
    parameters = _parameters(first, [(w, v) for w, h, v in values if h.family == first.family])
    if first.gate.state == "load":
        levels = [(s / total, float(h.gate.value[0])) for s, h in members]  # type: ignore[index]
        parameters["in_flight"] = _interval(levels)
    inside = [(s / total * w, h.hard, *k[:2]) for s, h in members for w, k in zip(h.weights, h.counts, strict=True)]
    x, n, y, m = (int(v) for v in first.counts[0])
    outside = _beta_interval([(1.0, y + 0.5, m - y + 0.5)])
    rate = _beta_interval(
        [(w, a + x_, b + n_ - x_) for w, hard, x_, n_ in sorted(inside, reverse=True)[:12] for a, b in [RATES[hard]]]
    )
    if first.family in UNPLACED or first.family.startswith("fade"):
        rate = _beta_interval([(1.0, x + 0.5, n - x + 0.5)])
    sentence = _sentence(first, parameters)
    if (second := first.second) is not None:
        sentence += f"; and {_sentence(second, _parameters(second, _weighed(second)))}"
    counted = f": {n - x:,} of {n:,} found; everything else: {m - y:,} of {m:,}" if m else f": {n - x:,} of {n:,} found"
    if (unclear := len(c) - n - m) > 0:
        counted += f"; {unclear:,} whose value was cached or whose pass was shared not counted"
    return Law(name, sentence + counted, share, parameters, rate, outside, (x, n), (y, m))


def _sentence(h: _Hypothesis, parameters: dict[str, tuple[float, float, float]]) -> str:
    """Where and when first, then what, and how often where it is not nearly always."""
    if h.family in _UNPLACED_WORDS:
        return _UNPLACED_WORDS[h.family]
    if h.family.startswith("fade"):
        what = {"length": "length", "left": "distance from the end", "place": "the value's place"}[h.family.split()[1]]
        low, best, high = parameters["middle"]
        said = f"recall fades with {what}, half of it at {best:,.0f} tokens ({low:,.0f} to {high:,.0f})"
    else:
        x, n = h.counts[0, :2]
        often = Fraction(0 if h.hard or not n else float(x / n)).limit_denominator(5)
        said = BY_NAME[h.family].say(parameters)
        if 0 < often < 1:
            said = f"about {often.numerator} in {often.denominator} {said}"
    return f"{h.gate.words}, {said}" if h.gate.words else said


def _weighed(h: _Hypothesis) -> list[tuple[float, tuple[float, ...]]]:
    return list(zip(h.weights.tolist(), h.values, strict=True))


def _parameters(h: _Hypothesis, values: list[tuple[float, tuple[float, ...]]]) -> dict[str, tuple[float, float, float]]:
    if h.family.startswith("fade"):
        return {"middle": _interval([(w, v[0]) for w, v in values]), "slope": _interval([(w, v[1]) for w, v in values])}
    if h.family not in BY_NAME or not values or not values[0][1]:
        return {}
    names = BY_NAME[h.family].parameters
    if names == ("edge",):
        return {"edge": _gaps(values)}
    best = max(values)[1]
    out = {}
    for i, name in enumerate(names):
        low, _, high = _interval([(w, v[i]) for w, v in values])
        out[name] = (low, float(best[i]), high)
    return out


def _gaps(values: list[tuple[float, tuple[float, ...]]]) -> tuple[float, float, float]:
    """2.5 %, half and 97.5 % of an edge that lies in gaps, log-uniform within each."""
    merged: dict[tuple[float, ...], float] = {}
    for w, gap in values:
        merged[gap] = merged.get(gap, 0.0) + w
    gaps = sorted(merged)
    weight = np.array([merged[g] for g in gaps])
    weight = np.cumsum(weight / weight.sum())
    out = []
    for q in (0.025, 0.5, 0.975):
        i = min(int(np.searchsorted(weight, q)), len(gaps) - 1)
        before = weight[i - 1] if i else 0.0
        part = (q - before) / max(weight[i] - before, 1e-12)
        low, high = gaps[i]
        out.append(
            max(low, 1e-9) * (max(high, 1e-9) / max(low, 1e-9)) ** part if low > 0 else low + (high - low) * part
        )
    return out[0], out[1], out[2]


def _interval(values: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Extremes of the likeliest values that together hold 95 %, and the likeliest."""
    merged: dict[float, float] = {}
    for w, v in values:
        merged[v] = merged.get(v, 0.0) + w
    order = sorted(merged, key=lambda v: -merged[v])
    total, kept = sum(merged.values()), []
    for v in order:
        kept.append(v)
        if sum(merged[k] for k in kept) >= 0.95 * total:
            break
    return float(min(kept)), float(order[0]), float(max(kept))


def _beta_interval(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """2.5 %, half and 97.5 % of a mixture of Beta distributions (weight, a, b)."""
    from scipy.special import betainc

    grid = np.linspace(0, 1, 401)
    total = sum(w for w, _, _ in parts)
    cdf = sum(w / total * betainc(max(a, 1e-3), max(b, 1e-3), grid) for w, a, b in parts)
    low, half, high = (float(np.interp(q, cdf, grid)) for q in (0.025, 0.5, 0.975))
    return low, half, high


def _lse(log: Any) -> float:
    log = np.asarray(log)
    top = float(np.max(log))
    return top + math.log(float(np.exp(log - top).sum())) if math.isfinite(top) else top


def _entropy(p: Any) -> Any:
    p = np.clip(p, 1e-9, 1 - 1e-9)
    return -(xlogy(p, p) + xlogy(1 - p, 1 - p))
