"""Long series of what tests keep short: pages identified, healthy pools left in peace, damage found and rightly named.

    python benchmarks/page_findings.py [--pages 72] [--healthy 400] [--places 24] [--seed 1000]

The pools, kinds of damage and journeys are those of tests/pages, under seeds that no test uses.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from needlework.pages import LAYOUTS, compare, diagnose, identify
from needlework.pages.findings import NONE

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pages import journeys, planting
from tests.pages.test_findings import JOURNEY_LAYOUTS

NAMES = list(LAYOUTS)
KINDS = ("normalised", "correlated", "outlier channels", "mixed sizes", "repetitive text")


def identified(name: str, seed: int) -> bool:
    """One full page of realistic keys, 64 entries, unlabelled."""
    generator = torch.Generator().manual_seed(seed)
    x = planting.keys(KINDS[seed % len(KINDS)], 64, LAYOUTS[name].dim, generator)
    if name.endswith("fnuz"):
        x[11] = 0.0  # without a zero entry FNUZ and FN are the same bytes
    best = identify(LAYOUTS[name].encode({"values": x.view(1, 64, -1)})).iloc[0]
    return (best["layout"], best["page_tokens"]) == (name, 64)


def refused(name: str, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    size = LAYOUTS[name].page_bytes(64)
    return identify(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))["layout"][0] == NONE


def silent(name: str, seed: int) -> bool:
    dump = planting.healthy(LAYOUTS[name], seed)
    journey = journeys.healthy(LAYOUTS[name], seed)
    return diagnose(dump.raw, dump.layout, live=dump.live).empty and journey.findings(compare).empty


def damaged(fault: str, seed: int) -> tuple[bool, bool]:
    """(found, rightly named) of one kind of damage at one random place."""
    dump = planting.planted(fault, seed)
    table = diagnose(dump.raw, dump.layout, live=dump.live, **dump.extra)
    places = [dump.page, (dump.page + 1) % 4] if fault == "repeated page" else [dump.page]  # equal pages: which is it?
    here = table[table["page"].isin(places)]
    return not here.empty, not here.empty and set(here["name"]) <= set(planting.FAULTS[fault][2])


def lost(loss: str, seed: int) -> tuple[bool, bool]:
    journey = journeys.planted(loss, LAYOUTS[JOURNEY_LAYOUTS[seed % len(JOURNEY_LAYOUTS)]], seed)
    table = journey.findings(compare, **({"before": journey.before} if seed % 2 else {}))
    here = table[table["page"] == journey.page]
    return not here.empty, not here.empty and set(here["name"]) <= set(journeys.LOSSES[loss][1])


def judged(
    judge: Callable[[str, int], tuple[bool, bool]], kind: str, first: int, count: int
) -> list[tuple[bool, bool]]:
    """`count` places from seed `first` on; a seed whose damage changes no byte (equal scales) is left."""
    pairs: list[tuple[bool, bool]] = []
    seeds = itertools.count(first)
    while len(pairs) < count:
        with contextlib.suppress(AssertionError):  # how the planting says so
            pairs.append(judge(kind, next(seeds)))
    return pairs


def row(what: str, right: Iterable[bool]) -> float:
    marks = list(right)
    print(f"| {what} | {len(marks):,} | {sum(marks):,} | {100 * sum(marks) / len(marks):.1f} % |", flush=True)
    return sum(marks) / len(marks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=72, help="of each layout, to identify")
    parser.add_argument("--healthy", type=int, default=400, help="pools and journeys without damage")
    parser.add_argument("--places", type=int, default=24, help="of each kind of damage")
    parser.add_argument("--seed", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.pages)
    print("| what | cases | right | share |\n|---|---|---|---|")
    known = row("layout named from one full page", (identified(name, seed) for name in NAMES for seed in seeds))
    none = row("random bytes: none of these", (refused(name, seed) for name in NAMES for seed in seeds))
    still = row(
        "healthy pool and journey: no finding",
        (silent(NAMES[n % len(NAMES)], options.seed + n) for n in range(options.healthy)),
    )
    every = [(f"damage: {f}", damaged, f) for f in planting.FAULTS] + [
        (f"journey: {x}", lost, x) for x in journeys.LOSSES
    ]
    marks = []
    for what, judge, kind in every:
        pairs = judged(judge, kind, options.seed, options.places)
        row(f"{what}: named", [named for _, named in pairs])
        marks += pairs
    found = row("all damage: found", [one for one, _ in marks])
    named = row("all damage: rightly named", [one for _, one in marks])
    return 0 if known >= 0.99 and none == still == 1 and found >= 0.99 and named >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
