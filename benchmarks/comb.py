"""Residue scans on simulated endpoints. Usage: python benchmarks/comb.py [endpoints]

Each endpoint has one dead class (or none), and every length misses at random with the given chance.
"""

from __future__ import annotations

import sys

import numpy as np
from needlework.analysis.comb import ResidueScan


def scan(period, dead, start, random_miss, seed, dead_hit=0.0, batch=8):
    """Runs one scan of `period` over an endpoint whose lengths in `dead` = (period, residue) fail; None: healthy."""
    rng = np.random.default_rng([seed, 3])
    planner = ResidueScan(start, period)
    while not planner.done:
        lengths = np.array(planner.propose(batch))
        chance = np.full(len(lengths), 1 - random_miss)
        if dead is not None:
            chance[lengths % dead[0] == dead[1]] = dead_hit
        planner.update(lengths, rng.random(len(lengths)) < chance)
    return planner.result()


def measure(period, scanned, endpoints, random_miss, healthy=False, dead_hit=0.0):
    """Shares: found, right class; mean requests. For a healthy endpoint `found` is the false alarm rate."""
    rng = np.random.default_rng(77)
    rows = []
    for seed in range(endpoints):
        start, residue = int(rng.integers(1_000, 9_000)), int(rng.integers(period))
        result = scan(scanned, None if healthy else (period, residue), start, random_miss, seed, dead_hit)
        right = result.period == period and result.residues == (residue,)
        rows.append((result.state == "comb", right, result.requests))
    return np.array(rows, float).mean(axis=0)


if __name__ == "__main__":
    endpoints = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{endpoints} simulated endpoints a row")
    print(f"{'comb':>6}{'scan':>6}{'random misses':>15}{'found':>9}{'right class':>13}{'requests':>10}")
    for miss in (0.0, 0.05):
        for period, scanned in ((4, 4), (16, 16), (64, 64), (128, 128), (4, 128), (16, 128), (64, 128)):
            found, right, requests = measure(period, scanned, endpoints, miss)
            print(f"{period:6}{scanned:6}{miss:15.0%}{found:9.1%}{right:13.1%}{requests:10.1f}", flush=True)
        for scanned in (4, 16, 64, 128):
            found, _, requests = measure(scanned, scanned, endpoints, miss, healthy=True)
            print(f"{'none':>6}{scanned:6}{miss:15.0%}{found:9.1%}{'':13}{requests:10.1f}", flush=True)
