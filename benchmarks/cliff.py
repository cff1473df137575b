"""Requests needed to locate a cliff, against a 200-request grid. Usage: cliff.py [endpoints] [batch] [first seed]

Simulated endpoints only: a curve with known parameters and a seeded coin; thresholds are log-uniform over the middle
six octaves of 1,000 to 128,000 tokens and do not lie on the search's grid.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from needlework.analysis.cliff import LOGISTIC, CliffSearch

LOW, HIGH = 1_000, 128_000
SHAPES = {  # name -> (top, bottom, width in octaves, tolerance)
    "sharp 0.98 -> 0.02": (0.98, 0.02, 0.0, 0.05),
    "partial 0.95 -> 0.30": (0.95, 0.30, 0.0, 0.05),
    "logistic, one octave": (0.97, 0.03, 1.0, 0.15),
}


def curve(length, threshold, top, bottom, width):
    distance = np.log2(threshold) - np.log2(length)
    shape = (distance >= 0).astype(float) if width == 0 else 1 / (1 + np.exp(-distance * LOGISTIC / width))
    return bottom + (top - bottom) * shape


def adaptive(shape, threshold, seed, batch=1):
    """(result, seconds of the slowest update and proposal)"""
    top, bottom, width, tolerance = shape
    coin = np.random.default_rng([seed, 1])
    search, slowest = CliffSearch(LOW, HIGH, tolerance=tolerance, seed=seed), 0.0
    while not search.done:
        start = time.perf_counter()
        lengths = np.array(search.propose(batch))
        middle = time.perf_counter()
        hits = coin.random(len(lengths)) < curve(lengths, threshold, top, bottom, width)
        again = time.perf_counter()
        search.update(lengths, hits)
        slowest = max(slowest, middle - start + time.perf_counter() - again)
    return search.result(), slowest


def grid200(shape, threshold, seed):
    """20 lengths x 10 trials, read by the best step or logistic (maximum likelihood over a fine grid)."""
    top, bottom, width, _ = shape
    coin = np.random.default_rng([seed, 2])
    lengths = np.geomspace(LOW, HIGH, 20)
    hits = coin.binomial(10, curve(lengths, threshold, top, bottom, width))
    candidates = np.geomspace(LOW, HIGH, 500)
    best = (-np.inf, LOW)
    for a in (0.99, 0.95, 0.9):
        for b in (0.01, 0.1, 0.3):
            for w in (0.0, 0.3, 1.0, 2.0):
                p = curve(lengths[None], candidates[:, None], a, b, w)
                likelihood = (hits * np.log(p) + (10 - hits) * np.log(1 - p)).sum(axis=1)
                top_value = likelihood.max()
                level = candidates[likelihood >= top_value - 1e-9]
                if top_value > best[0] + 1e-9:
                    best = (top_value, float(np.exp(np.log(level).mean())))
    return best[1]


def measure(name, endpoints, batch=1, grid=True, first=0):
    """One row: mean requests, 90th percentile, share right, coverage of threshold and width, slowest step, grid's share
    right.
    """
    shape = SHAPES[name]
    rng = np.random.default_rng(20_260 + first)
    thresholds = 2 ** rng.uniform(np.log2(LOW) + 0.5, np.log2(HIGH) - 0.5, endpoints)
    rows = []
    for seed, threshold in enumerate(thresholds, first):
        result, slowest = adaptive(shape, threshold, seed, batch)
        right = abs(np.log2(result.threshold / threshold)) <= np.log2(1 + shape[3])
        grid_right = (
            abs(np.log2(grid200(shape, threshold, seed) / threshold)) <= np.log2(1 + shape[3]) if grid else False
        )
        covered = threshold in result.interval, shape[2] in result.width_interval
        rows.append((result.requests, right, *covered, slowest, grid_right))
    table = np.array(rows, dtype=float)
    return {
        "requests": table[:, 0].mean(),
        "p90": np.percentile(table[:, 0], 90),
        "right": table[:, 1].mean(),
        "coverage": table[:, 2].mean(),
        "coverage_width": table[:, 3].mean(),
        "step_ms": 1000 * np.median(table[:, 4]),
        "grid200": table[:, 5].mean(),
    }


if __name__ == "__main__":
    endpoints = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    print(f"{endpoints} simulated endpoints, batches of {batch}; a grid of 20 lengths x 10 = 200 requests beside it")
    print("cover, width: share of 95 % intervals that hold the true threshold, and the true width of the fall")
    heads = {"requests": 10, "p90": 6, "right": 8, "cover": 8, "width": 8, "ms": 7, "grid right": 12}
    print(f"{'shape':24}{'tol':>5}" + "".join(f"{name:>{size}}" for name, size in heads.items()))
    for name, shape in SHAPES.items():
        row = measure(name, endpoints, batch, first=first)
        print(
            f"{name:24}{shape[3]:5.2f}{row['requests']:10.1f}{row['p90']:6.0f}{row['right']:8.1%}"
            f"{row['coverage']:8.1%}{row['coverage_width']:8.1%}{row['step_ms']:7.1f}{row['grid200']:12.1%}",
            flush=True,
        )
