"""A canary against request count: does recall fall with what a deployment has served?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result, hit, outcomes, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd


@instrument()
def drift(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    canaries: int = 60,
    between: int = 0,
    length: int = 1024,
    depth: float = 0.3,
    **options: Unpack[Options],
) -> Result:
    """Ask the same kind of question again and again, with `between` other requests between canaries; CUSUM on the hits.

    Each canary is fresh text of equal length, so a fall is not a matter of length or cache. `.details["drift"]` is the
    CUSUM's answer; the alarm threshold rings falsely about once in 3,700 canaries.
    """
    common = Common(**options)
    from needlework.analysis.drift import drift as judge

    if canaries < 8 or between < 0:
        raise ValueError("drift needs at least 8 canaries")
    check_trials(canaries * (1 + between))
    specs = [with_seed(common.spec(length, depth), i) for i in range(canaries)]
    fills = [
        [Ask("drift_load", with_seed(common.spec(length), 5000 + i, k), arm=common.arm) for k in range(between)]
        for i in range(canaries)
    ]
    asks = [Ask("drift", s, arm=common.arm, ordinal=i * (between + 1)) for i, s in enumerate(specs)]
    rows: list[Row] = []
    with common.bench("drift", endpoint, run) as bench:
        common.begin(bench, specs[0], [*asks, *(a for f in fills for a in f)])
        for a, fill in zip(asks, fills, strict=True):
            rows += bench.ask([a])
            bench.ask(fill, concurrency=4)
    found = judge([hit(r) for r in rows])
    said = "Nothing was measured.", "not proven"
    if outcomes(rows)[1]:
        text = f"{str(found)[0].upper()}{str(found)[1:]}; one canary in {between + 1} requests."
        said = text, "finding" if found.alarm is not None else "healthy"
    return bench.result(rows, said, _drift_table(rows), {"drift": found})


def _drift_table(rows: list[Row], blocks: int = 6) -> pd.DataFrame:
    size = max(1, -(-len(rows) // blocks))
    parts = {id(row): rows[i - i % size : i - i % size + size] for i, row in enumerate(rows)}

    def block(row: Row) -> str:
        part = parts[id(row)]
        return f"{part[0]['ordinal']} to {part[-1]['ordinal']}"

    return tally(rows, {"requests": block}, ordered=False)
