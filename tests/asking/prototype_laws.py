"""A posterior over a few laws of loss behind the names of `analysis.laws`: enough to drive an investigation."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
from scipy.special import betaln, logsumexp

CHUNKS = (512, 1024, 2048, 4096, 8192)
CROWDS = (2, 3, 4, 6, 8)
RESIDUES = [(p, s, w, e) for p in (4, 16, 64, 128) for w in (1, 2, 4, 8, 16) if w <= p // 4
            for s in range(0, p, max(1, w // 2)) for e in (0, 2048)]  # fmt: skip


def conditions(trials: pd.DataFrame) -> pd.DataFrame:
    t = trials.reset_index(drop=True)
    t = t[(t["control"].fillna("") == "") & ~t["label"].str.startswith("victim") & (t["probe"] != "calibration")]
    t = t[t["outcome"] != "transport"].reset_index(drop=True)
    length = t["prompt_tokens"].astype(float).fillna(t["target_tokens"])
    place = t["needle_token"].astype(float).fillna(t["depth"] * length)
    out = pd.DataFrame({
        "length": length, "place": place, "left": length - place, "cached": t["cached_tokens"].astype(float).fillna(0),
        "load": t["concurrency"].fillna(1), "order": np.arange(len(t)), "arm": t["arm"].fillna(""),
        "turn": t["turn"].fillna(1), "since_abort": np.where(t["probe"].eq("abort"), 1.0, np.inf),
        "warm": t["cached_tokens"].astype(float) > 0, "lost": t["outcome"] != "exact", "kind": 0,
    })  # fmt: skip
    out.attrs["rows"] = np.arange(len(t))
    return out


def _laws(t, arms, edges):
    col = lambda x: np.asarray(x)[:, None]  # noqa: E731
    n, p, d = t.length.values, t.place.values, t.left.values
    out = {
        "everywhere, at random": (np.ones((len(t), 1), bool), 0.0, ["-"]),
        "length above": (col(n) > edges, 0.0, edges),
        "place above": ((col(p) > edges) & col(d > 128), 0.0, edges),
        "distance from the end above": (col(d) > edges, 0.0, edges),
        "warm, length above": (col(t.cached.values > 0) & (col(n) > np.r_[0, edges]), 0.0, [0, *edges]),
        "after an abort, length above": (col(t.since_abort.values <= 2) & (col(n) > np.r_[0, edges]), 0.0, [0, *edges]),
        "not in the last chunk of": (np.stack([p < (n - 1) // c * c for c in CHUNKS], 1), 0.0, CHUNKS),
        "in every second chunk": (
            np.stack([(p // c % 2 == r) & (n > c) for c in CHUNKS for r in (0, 1)], 1), -0.5,
            [(c, r) for c in CHUNKS for r in (0, 1)]),
        "residue": (np.stack([((n - s) % q < w) & (n > e) for q, s, w, e in RESIDUES], 1), 0.0, RESIDUES),
        "in flight at least": (np.stack([t.load.values >= k for k in CROWDS], 1), 0.0, CROWDS),
        "from trial": (col(t.order.values) > np.arange(10, 400, 10), -1.0, list(range(10, 400, 10))),
    }  # fmt: skip
    one = {f"{arm} only: {k}": (m & col(t.arm.values == arm), w, p) for arm in arms for k, (m, w, p) in out.items()}
    return out | one if len(arms) > 1 else out


def _bb(x, n, a, b):
    return betaln(a + x, b + n - x) - betaln(a, b)


def _entropy(p):
    p = np.clip(p, 1e-9, 1 - 1e-9)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))


@dataclass
class Fit:
    shares: dict
    laws: dict
    _scored: list
    _total: float
    _safe: float
    _arms: list
    _edges: np.ndarray

    def predict(self, t):
        laws = _laws(t, self._arms, self._edges)
        w = self.shares["healthy"]
        mean, inside = np.full(len(t), w * self._safe), np.full(len(t), w * _entropy(self._safe))
        for k, z, q, s in self._scored:
            weight = np.exp(z - self._total)
            keep = weight > 1e-5
            if keep.any():
                p = np.where(laws[k][0][:, keep], q[keep], s[keep])
                mean, inside = mean + p @ weight[keep], inside + _entropy(p) @ weight[keep]
        return pd.DataFrame({"p_loss": mean, "information_bits": _entropy(mean) - inside}, index=t.index)


def fit(t, *, stated=None, window=None):
    arms = list(dict.fromkeys(t.arm))
    edges = np.geomspace(250, window or t.length.max() * 1.02, 90)
    lost = t.lost.values
    many, n = lost.sum(), len(lost)
    scored, best = [], {}
    for k, (mask, prior, parameters) in _laws(t, arms, edges).items():
        h, size = (mask & lost[:, None]).sum(0), mask.sum(0)
        hard, soft = _bb(h, size, 6, 0.7), _bb(h, size, 1, 1.5)
        z = np.logaddexp(hard, soft) - np.log(2) + _bb(many - h, n - size, 1, 60) + prior - np.log(mask.shape[1])
        w = np.exp(hard - np.logaddexp(hard, soft))
        q = w * (6 + h) / (6.7 + size) + (1 - w) * (1 + h) / (2.5 + size)
        scored.append((k, z, q, (1 + many - h) / (61 + n - size)))
        best[k] = f"{k} {parameters[int(np.argmax(z))]}"
    calm = _bb(many, n, 1, 60) + np.log(4)
    total = logsumexp(np.concatenate([[calm], *[z for _, z, _, _ in scored]]))
    shares = {"healthy": float(np.exp(calm - total))}
    shares |= {k: float(np.exp(logsumexp(z) - total)) for k, z, _, _ in scored}
    told = [SimpleNamespace(name=k, sentence=v) for k, v in best.items()]
    ranked = dict(sorted(shares.items(), key=lambda i: -i[1]))
    return Fit(ranked, told, scored, total, (1 + many) / (61 + n), arms, edges)
