"""Does recall depend on the length's residue? Every length of a period, cold and warm, from both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from needlework.analysis.comb import Comb, ResidueScan

from .bench.bench import Bench, Common, Options, instrument
from .bench.prompts import PromptSpec
from .bench.result import Result, hit, share
from .bench.trial import Ask, Row, Target, with_seed

ANCHORS = ("start", "end")
CACHES = ("cold", "warm")


@dataclass(frozen=True)
class ResidueResult(Result):
    """`combs[anchor, cache]` is the scan's answer for a needle fixed from that end, on cold or repeated prompts."""

    combs: dict[tuple[str, str], Comb] | None = None


@instrument()
def scan_residues(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    start: int = 1024,
    period: int = 128,
    anchors: Sequence[str] = ("start",),
    cache: Sequence[str] = CACHES,
    distance: int = 200,
    batch: int = 4,
    max_tokens: int = 48,
    **options: Unpack[Options],
) -> ResidueResult:
    """Ask a whole period of consecutive lengths from `start` on, then each suspect class again at fresh lengths.

    anchors   keep the needle `distance` tokens from the "start" or from the "end" while the length grows; which of the
              two carries a comb tells prefill grouping from decode grouping
    cache     "warm" sends every prompt a second time; the repeat is judged by itself and must show cached tokens
    period    longest period looked for, 2 to 256; all its divisors are found too

    Lengths must be exact to the token: an endpoint without a tokenise route is refused with ValueError.
    """
    common = Common(**options)
    if not set(anchors) <= set(ANCHORS) or not anchors:
        raise ValueError("anchors are start, end, or both")
    if not set(cache) <= set(CACHES) or "cold" not in cache:
        raise ValueError("cache is cold, or cold and warm")
    if not 0 <= distance < start:
        raise ValueError(f"a needle {distance} tokens from an end does not lie in a prompt of {start}")
    ResidueScan(start, period)  # refuses a period that it cannot scan, before a budget is shown
    base = common.spec(start)
    rows: list[Row] = []
    combs: dict[tuple[str, str], Comb] = {}
    with common.bench("residues", endpoint, run) as bench:
        fresh = 3 * ResidueScan.LIMIT + period // 4  # lengths to ask classes again that missed: some true, some stray
        usual, spare = len(anchors) * len(cache) * period, len(anchors) * fresh * (3 if "warm" in cache else 1)
        longest = start + (2 + ResidueScan.LIMIT) * period  # of a suspect of the full period, at its last length
        tokens = usual * (start + period) + spare * longest
        if common.begin(bench, base, more=usual, spare=spare, tokens=tokens, exact=True):
            for anchor in anchors:
                combs |= _scan(bench, base, anchor, cache, period, distance, batch, max_tokens, rows)
    done = bench.result(rows, _describe(combs, rows), _table(combs), {"budget": bench.budget})
    return ResidueResult(**vars(done), combs=combs)


def _scan(
    bench: Bench, base: PromptSpec, anchor: str, cache: Sequence[str], period: int, distance: int, batch: int,
    max_tokens: int, rows: list[Row],
) -> dict[tuple[str, str], Comb]:  # fmt: skip
    """One planner for cold and one for warm outcomes; each length is sent cold and, for the warm planner, again."""
    planners = {state: ResidueScan(base.target_tokens, period) for state in cache}
    asked: dict[tuple[str, int], int] = {}
    warm_unproved = 0
    for state, planner in planners.items():
        while not planner.done:
            lengths = planner.propose(batch)
            asks = []
            for n in lengths:
                again = asked[state, n] = asked.get((state, n), 0) + 1
                spec = _spec(base, anchor, distance, n, again)
                asks.append(Ask("residues", spec, arm=bench.arm, repeat=again, label=anchor, max_tokens=max_tokens))
            got = bench.ask(asks, concurrency=batch)
            if "warm" in cache:  # at once, before the cache can forget; the warm planner then reads most rows back
                again_rows = bench.ask([replace(a, cache="warm", send=1) for a in asks], concurrency=batch)
                got = again_rows if state == "warm" else got
            if state == "warm":
                warm_unproved += sum(r["cache"] != "warm" for r in got if r["outcome"] != "transport")
            rows += got
            planner.update(lengths, [hit(r) for r in got])
    if warm_unproved:
        bench.warn(f"{warm_unproved} repeated prompts did not show cached tokens, so their warm state is not proved")
    return {(anchor, state): planner.result() for state, planner in planners.items()}


def _spec(base: PromptSpec, anchor: str, distance: int, tokens: int, again: int) -> PromptSpec:
    """The same haystack and needle for all lengths of a pass, so that only the length differs; fresh when repeated."""
    near = (
        {"from_start": distance, "pad": "before_question"}
        if anchor == "start"
        else {"from_end": distance, "pad": "start"}
    )
    spec = replace(base, target_tokens=int(tokens), **near)  # type: ignore[arg-type]
    return with_seed(spec, again) if again > 1 else spec


def _describe(combs: dict[tuple[str, str], Comb], rows: list[Row]) -> tuple[str, str]:
    found = {k: c for k, c in combs.items() if c.state == "comb"}
    if found:
        parts = [f"needle fixed from the {anchor}, {state}: {comb}" for (anchor, state), comb in found.items()]
        healthy = [f"{a}/{s}" for (a, s), c in combs.items() if c.state == "none"]
        text = "A comb in the lengths: " + "; ".join(parts) + "."
        return text + (f" None seen in {', '.join(healthy)}." if healthy else ""), "finding"
    if not combs or any(c.state != "none" for c in combs.values()):
        reason = "; ".join(sorted({str(c) for c in combs.values() if c.state != "none"})) or "the scan is not finished"
        return f"No statement about residues: {reason}.", "not proven"
    return f"No residue class of the length stands out ({share(rows)}).", "healthy"


def _table(combs: dict[tuple[str, str], Comb]) -> Any:
    import pandas as pd

    columns = ["needle from", "cache", "state", "period", "residues", "p_value", "requests"]
    entries = [
        (*key, c.state, c.period, ", ".join(map(str, c.residues[:8])), c.p_value, c.requests)
        for key, c in combs.items()
    ]
    return pd.DataFrame(entries, columns=columns)
