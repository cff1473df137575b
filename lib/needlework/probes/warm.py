"""Cold against warm: the same bytes sent twice, the second time proved warm by cached tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result, discordant, least_cached, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd


@instrument()
def warm_cold(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
    repeats: int = 4,
    warm_sends: int = 1,
    depth: float = 0.3,
    **options: Unpack[Options],
) -> Result:
    """Send each prompt cold, then `warm_sends` times again; compare answers pair by pair (exact McNemar).

    A pair counts as warm only when the repeat reports cached tokens for at least half of the prompt, and as cold only
    when the first send reports none beyond the chat template's. `.details` holds `proved` (pairs), `discordant` (only
    cold hit, only warm hit), `p_value`, and `page` (the largest power of two that divides all cached counts).
    """
    common = Common(**options)
    check_trials(len(lengths) * repeats * (1 + warm_sends))
    specs = [with_seed(common.spec(n, depth), i, r) for i, n in enumerate(lengths) for r in range(repeats)]
    asks = [
        [
            Ask("warm_cold", s, arm=common.arm, cache="cold" if send == 0 else "warm", send=send)
            for send in range(warm_sends + 1)
        ]
        for s in specs
    ]
    pairs: list[tuple[Row, Row]] = []
    with common.bench("warm_cold", endpoint, run) as bench:
        common.begin(bench, common.spec(lengths[0]), (a for group in asks for a in group))
        for group in asks:
            cold, *warm = bench.ask(group)
            pairs += [(cold, w) for w in warm]
    proved = [(c, w) for c, w in pairs if c["cache"] == "cold" and w["cache"] == "warm"]
    details = discordant(proved) | {"proved": len(proved), "pairs": len(pairs), "page": page_of(proved)}
    rows = [r for pair in pairs for r in pair]
    return bench.result(rows, _describe(pairs, proved, details), _table(pairs), details)


def page_of(pairs: Sequence[tuple[Row, Row]]) -> int | None:
    """The granule of the prefix cache as the counts show it: the largest power of two dividing all cached counts."""
    from math import gcd

    common = 0
    for _, warm in pairs:
        cached = warm["cached_tokens"] or 0
        if cached != (warm["prompt_tokens"] or 0) - 1:  # a full hit leaves one token to compute and is no multiple
            common = gcd(common, cached)
    return common & -common or None


def _describe(pairs: list, proved: list, details: dict[str, Any]) -> tuple[str, str]:
    if not pairs:
        return "Nothing was measured.", "not proven"
    if not proved:
        if {w["cached_tokens"] for _, w in pairs} == {None}:
            why = "Warm was not reached, so nothing is said about it: the endpoint does not report cached tokens."
        elif any(w["cache"] == "warm" for _, w in pairs):
            why = "Cold was not reached, so nothing is said about it: prompts that were never sent have cached tokens."
        else:
            why = "Warm was not reached, so nothing is said about it: repeated prompts were not served warm."
        return why, "not proven"
    cold, warm = [c for c, _ in proved], [w for _, w in proved]
    text = (
        f"{len(proved)} of {len(pairs)} pairs are proved cold then warm by cached tokens. Cold: {share(cold)}; "
        f"warm: {share(warm)}."
    )
    cold_only, warm_only = details["discordant"]
    if cold_only + warm_only == 0:
        bad = surprising(*outcomes(cold))
        lost = " What is lost is lost in both states, so the cache's state is not the matter." if bad else ""
        return f"{text} No pair differs.{lost}", "finding" if bad else "healthy"
    text += f" {cold_only} pairs are lost only when warm, {warm_only} only when cold (p = {details['p_value']:.2g})."
    return text, "finding" if details["p_value"] < 0.05 and cold_only + warm_only >= 4 else "not proven"


def _table(pairs: list) -> pd.DataFrame:
    rows = [row | {"cache": state, "_proved": row["cache"] == state}
            for pair in pairs for state, row in zip(("cold", "warm"), pair, strict=True)]  # fmt: skip
    more = {"cached_tokens": least_cached, "proved": lambda group: sum(r["_proved"] for r in group)}
    return tally(rows, ("target_tokens", "cache"), more)
