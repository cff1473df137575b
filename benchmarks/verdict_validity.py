"""Is what a verdict states true as often as it says? Tables of simulated requests whose law is known.

    python benchmarks/verdict_validity.py [nonsense intervals shares healthy] [--runs 200] [--seed 0]

nonsense   outcomes that no fault makes: how often is a fault named with more than weak evidence?
intervals  how often does a stated 95 % interval hold the truth?
shares     laws drawn at random (where, how far, for which requests, how many of them): of the laws that are stated with
           this share, how many are the planted one? A law that loses the same requests counts as the planted one
healthy    deployments with lapses alone, 0 to 2 %: how many are accused?

The tables are those of the tests (`tests/analysis/worlds.py`): a development set for seeds that were looked at.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from needlework.analysis import OUTCOMES, laws
from needlework.analysis.conditions import conditions
from needlework.analysis.diagnosis import Diagnosis, diagnose

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analysis"))
from worlds import asked, lost

PAIR = ("combined", "pd")
EDGES = np.array([0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
SAME = 0.95  # two laws that agree on so many of the requests they lose are one


def _middle(t: pd.DataFrame) -> np.ndarray:
    return 0.6 * np.exp(-(((t.needle_token / t.prompt_tokens - 0.5) * 4.5) ** 2))


def _swapped(t: pd.DataFrame, s: int) -> pd.DataFrame:
    sick = lost(t, lambda t: 0.9 * (t.prompt_tokens > 6000), seed=s)
    return sick.assign(outcome=np.random.default_rng(s).permutation(sick["outcome"]))


def _pasted(t: pd.DataFrame, s: int) -> pd.DataFrame:
    few = lost(t.head(15), lambda t: 0.3, seed=s).drop(columns=["trial_id", "time"])
    return pd.concat([few] * 12, ignore_index=True)


NONSENSE: dict[str, Callable[[pd.DataFrame, int], pd.DataFrame]] = {
    "outcomes at random": lambda t, s: t.assign(outcome=np.random.default_rng(s).choice(OUTCOMES, len(t))),
    "coin flips": lambda t, s: lost(t, lambda t: (0.5, 0.9)[s % 2], seed=s),
    "a fading model": lambda t, s: lost(t, lambda t: 1 - 1 / (1 + (t.prompt_tokens / 5000) ** 1.2), seed=s),
    "lost in the middle": lambda t, s: lost(t, _middle, seed=s),
    "swapped labels": _swapped,
    "pasted rows": _pasted,
}


def accused(d: Diagnosis, *, least: tuple[str, ...] = ("moderate", "strong")) -> bool:
    """A fault is named, with such evidence; lookalikes accuse nobody."""
    return d.confidence in least and any(code.startswith("F") for code in d.causes)


def nonsense(runs: int, seed: int) -> Iterator[str]:
    for name, make in NONSENSE.items():
        told = [
            diagnose(make(asked(160, arms=PAIR if s % 3 else ("one",), seed=s), s)) for s in range(seed, seed + runs)
        ]
        bad = [d for d in told if accused(d)]
        said = Counter("/".join(d.causes) for d in bad)
        yield f"{name}: a fault with more than weak evidence in {len(bad)} of {runs} {dict(said) or ''}"


def intervals(runs: int, seed: int) -> Iterator[str]:
    r = np.random.default_rng(seed)
    truth = {"edge in length": "length", "edge in place": "place", "period": "residue"}
    for name, family in truth.items():
        inside, rates, right = 0, 0, 0
        for s in range(seed, seed + runs):
            edge, rate = float(np.exp(r.uniform(np.log(1500), np.log(14000)))), r.uniform(0.5, 1)
            period = int(r.choice([4, 8, 16, 32]))
            p = {
                "length": lambda t, e=edge, q=rate: q * (t.prompt_tokens > e),
                "place": lambda t, e=edge, q=rate: (
                    q * ((t.needle_token > e) & (t.prompt_tokens - t.needle_token > 128))
                ),
                "residue": lambda t, m=period, q=rate: q * (t.prompt_tokens % m < m // 4),
            }[family]
            law = laws.fit(conditions(lost(asked(200, seed=s), p, seed=s))).laws[0]
            if law.name != family:
                continue
            right += 1
            name_of, true = ("period", period) if family == "residue" else ("edge", edge)
            low, _, high = law.parameters[name_of]
            inside += low <= true <= high
            rates += law.rate_inside[0] <= rate <= law.rate_inside[2]
        yield (f"{name}: found in {right} of {runs}; its interval holds the truth in {inside / max(1, right):.1%}, "
               f"the interval of the rate inside in {rates / max(1, right):.1%}")  # fmt: skip


def planted(r: np.random.Generator) -> tuple[str, Callable[[pd.DataFrame], pd.Series], float]:
    """A law that somebody may plant: its words, what it loses, and at which rate."""
    edge, chunk = float(np.exp(r.uniform(np.log(900), np.log(16000)))), int(r.choice([1024, 2048, 4096, 8192]))
    period = int(r.choice([4, 16, 64]))
    start = int(r.integers(period))
    rest = lambda t: t.prompt_tokens - t.needle_token  # noqa: E731
    mine = lambda t: t.needle_token // chunk  # noqa: E731
    last = lambda t: (t.prompt_tokens - 1) // chunk  # noqa: E731
    sets: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
        "length": lambda t: t.prompt_tokens > edge,
        "place": lambda t: (t.needle_token > edge) & (rest(t) > 128),
        "left": lambda t: rest(t) > edge,
        "last pass": lambda t: mine(t) < last(t),
        "first pass": lambda t: (mine(t) == 0) & (last(t) > 0),
        "late pass": lambda t: (mine(t) == last(t)) & (last(t) > 0),
        "alternate pass": lambda t: (mine(t) % 2 == 1) & (last(t) > 0),
        "residue": lambda t: (t.prompt_tokens - start) % period < max(1, period // 4),
        "any": lambda t: t.prompt_tokens > 0,
    }
    gates: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
        "": lambda t: t.prompt_tokens > 0,
        "on pd": lambda t: t.arm == "pd",
        "warm": lambda t: t.cached_tokens > 0,
        "crowd": lambda t: t.concurrency >= 4,
        "turn": lambda t: t.turn > 1,
    }
    name, gate = str(r.choice(list(sets))), str(r.choice(list(gates), p=[0.4, 0.3, 0.1, 0.1, 0.1]))
    rate = float(r.uniform(0.9, 1) if r.random() < 0.5 else r.uniform(0.25, 0.7))
    return f"{name} {gate}".strip(), lambda t: sets[name](t) & gates[gate](t), rate


def shares(runs: int, seed: int) -> Iterator[str]:
    stated, right, sharp, missed = [], [], [], []
    probe = asked(4000, arms=PAIR, seed=10**6)
    rows = laws.Rows.of(conditions(probe.drop(columns="aborted")))
    for s in range(seed, seed + runs):
        name, law, rate = planted(np.random.default_rng([s, 77]))
        t = asked(240, arms=PAIR, seed=s)
        fit = laws.fit(conditions(lost(t, lambda t, law=law, rate=rate: rate * law(t), seed=s)))
        first = max(fit.shares, key=fit.shares.get)
        heads = [h for _, h in fit.hypotheses if h is not None and h.name == first]
        same = False
        if heads and heads[0].family in laws.BY_NAME:
            h = heads[0]
            mask = laws.BY_NAME[h.family].mask(rows, h.values[0]) * h.gate.mask(rows) > 0.5
            truth = law(probe).to_numpy()
            same = (mask & truth).sum() >= SAME * max(1, (mask | truth).sum()) or first == _told(name)
        stated.append(fit.shares[first])
        right.append(bool(same))
        sharp.append(rate > 0.8)
        if fit.shares[first] > 0.9 and not same:
            missed.append(f"seed {s}: {name} at {rate:.2f} is called {first} ({fit.shares[first]:.3f})")
    x, y, q = np.array(stated), np.array(right), np.array(sharp)
    for words, some in (("sharp", q), ("mild", ~q)):
        for low, high in itertools.pairwise(EDGES):
            here = some & (x > low) & (x <= high)
            if here.any():
                yield (f"{words}: stated {low:.2f} to {high:.2f} ({x[here].mean():.3f} on average): "
                       f"{y[here].sum()} of {here.sum()} right")  # fmt: skip
    yield f"right {y.sum()} of {runs}; log score {np.log(np.where(y, x, 1 - x).clip(1e-6)).mean():.3f} nats"
    yield from missed


def _told(name: str) -> str:
    family, _, gate = name.rpartition(" ")
    gates = {"pd": "arm=pd", "warm": "warm", "crowd": "load", "turn": "turn"}
    return f"{gates[gate]}: {family.removesuffix(' on')}" if gate in gates else name


def healthy(runs: int, seed: int) -> Iterator[str]:
    told = []
    for s in range(seed, seed + runs):
        t = asked(240, arms=PAIR if s % 2 else ("single",), seed=s)
        told.append(diagnose(lost(t, lambda t, s=s: (0.0, 0.005, 0.01, 0.02)[s % 4], seed=s)))
    bad = sum(accused(d, least=("weak", "moderate", "strong")) for d in told)
    yield f"healthy: accused {bad} of {runs}; called healthy {sum(d.verdict == 'healthy' for d in told)}"


PARTS = {"nonsense": nonsense, "intervals": intervals, "shares": shares, "healthy": healthy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow it")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for part in args.parts:
        for line in PARTS[part](args.runs, args.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
