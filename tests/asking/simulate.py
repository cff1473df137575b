"""Investigations of simulated endpoints with a planted law of loss: no text, no server, only who loses what.

python tests/asking/simulate.py RUNS [NAME …]
"""

from __future__ import annotations

import sys
import time

import numpy as np
from needlework.probes.investigate import Course
from needlework.probes.screen import space_for

TRUTH = {  # name -> (laws that are right, arms, probability of a loss)
    "edge 4096": ("length", 1, lambda t: 0.97 * (t["n"] > 4096)),
    "edge 17000": ("length", 1, lambda t: 0.97 * (t["n"] > 17000)),
    "half above 6000": ("length", 1, lambda t: 0.5 * (t["n"] > 6000)),
    "place 4096": ("place", 1, lambda t: 0.9 * (t["place"] > 4096 and t["n"] - t["place"] > 128)),
    "from end 8192": ("left", 1, lambda t: 0.98 * (t["n"] - t["place"] > 8192)),
    "last chunk 1024": ("last pass", 1, lambda t: 0.9 * (t["place"] < (t["n"] - 1) // 1024 * 1024)),
    "second chunk 2048": ("alternate pass", 1, lambda t: 0.8 * (t["place"] // 2048 % 2 and t["n"] > 2048)),
    "residue 1..8 of 64": ("residue", 1, lambda t: 0.65 * ((t["n"] - 1) % 64 < 8 and t["n"] > 2048)),
    "warm 2048": ("warm: length", 1, lambda t: 0.9 * (t["cached"] > 0 and t["n"] > 2048)),
    "crowd 4, one in five": ("load: any", 1, lambda t: 0.2 * (t["load"] >= 4)),
    "one in five": ("any", 1, lambda t: 0.2),
    "one in ten": ("any", 1, lambda t: 0.1),
    "from 100 on": ("time", 1, lambda t: 0.9 * (t["order"] > 100)),
    "pd edge 2060": ("arm=pd: length", 2, lambda t: 0.97 * (t["arm"] == "pd" and t["n"] > 2060)),
    "pd one in five": ("arm=pd: any", 2, lambda t: 0.2 * (t["arm"] == "pd")),
    "pd last chunk 8192": ("arm=pd: last pass", 2,
                           lambda t: 0.9 * (t["arm"] == "pd" and t["place"] < (t["n"] - 1) // 8192 * 8192)),
    "healthy": ("healthy", 1, lambda t: 0.0),
    "healthy pair": ("healthy", 2, lambda t: 0.0),
    "lapses 1 %": ("healthy", 1, lambda t: 0.01),
}  # fmt: skip


def course(name: str, seed: int, *, requests: int = 300, **options) -> Course:
    _, arms, chance = TRUTH[name]
    r = np.random.default_rng(seed)
    space = space_for(["combined", "pd"][-arms:], window=32768, requests=requests, tokens=10**9, seed=seed)
    order = 0

    def ask(step):
        nonlocal order
        rows = step.foreseen(space)
        for row in rows:
            facts = {"n": row["prompt_tokens"], "place": row["needle_token"], "cached": row["cached_tokens"],
                     "load": row["concurrency"], "arm": row["arm"], "order": order}  # fmt: skip
            row["outcome"] = "refusal" if r.random() < float(chance(facts)) else "exact"
            row["time"] = f"2030-01-01T{order // 3600:02}:{order // 60 % 60:02}:{order % 60:02}+00:00"
            row["latency_s"] = 0.1 + 1e-4 * (row["prompt_tokens"] - row["cached_tokens"])
            order += 1
        return rows

    return Course(space, ask, options.pop("record", lambda entry: None), requests=requests, **options)


def judged(name: str, seed: int, **options):
    """(right law first, sure, requests, law, predictions passed, why it ended)."""
    one = course(name, seed, **options)
    one.run()
    law = max(one.fit.shares, key=one.fit.shares.get)
    rounds = one.rounds
    sure = bool(rounds and rounds[-1].passed) or (law == "healthy" and one.fit.shares[law] > 0.95)
    return law == TRUTH[name][0], sure, one.sent, law, rounds, one.ended


if __name__ == "__main__":
    runs, names = int(sys.argv[1]), sys.argv[2:] or list(TRUTH)
    for name in names:
        begin = time.perf_counter()
        found = [judged(name, 1000 + s) for s in range(runs)]
        wrong = sorted({f[3] for f in found if not f[0]})
        sure, bad = sum(f[1] for f in found), sum(f[1] and not f[0] for f in found)
        print(f"{name:22} right {sum(f[0] for f in found)}/{runs}, sure {sure}, sure and wrong {bad}, "
              f"requests {int(np.median([f[2] for f in found]))}, {(time.perf_counter() - begin) / runs:.1f} s a run; "
              f"{'; '.join(str(p) for p in found[0][4])} {found[0][5]} {wrong or ''}", flush=True)  # fmt: skip
