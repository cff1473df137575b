"""Evict and reload: is a prefix still right after it has left the device and come back from a slower tier?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

FILL_LENGTH = 4000  # tokens of a prompt that only pushes others out


@instrument(without=("controls",))
def reload(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    fill_tokens: int,
    prompts: int = 8,
    length: int = 1024,
    depth: float = 0.3,
    **options: Unpack[Options],
) -> Result:
    """Ask `prompts` facts cold and again (a device hit), then push them out with fresh prompts, then ask once more.

    fill_tokens  prompt tokens sent in between: the size of the device's pool, as /server_info or the log states it

    A prompt counts as reloaded only when the last send reports cached tokens; without a slower tier it is cold again,
    and nothing is said. `.details` holds `reloaded` (how many were).
    """
    common = Common(**options)
    if fill_tokens < 1 or prompts < 1:
        raise ValueError("reload needs at least one prompt and a number of tokens that fill the device's pool")
    check_trials(3 * prompts + fill_tokens // FILL_LENGTH)
    specs = [with_seed(common.spec(length, depth), 61, i) for i in range(prompts)]
    size = min(FILL_LENGTH, fill_tokens)
    fills = [
        Ask("reload", with_seed(common.spec(size, depth), 62, i), arm=common.arm, label="fill")
        for i in range(-(-fill_tokens // size))
    ]
    states = (("cold", "first", 0), ("warm", "device", 1), ("warm", "reload", 2))
    first, device, back = (
        [Ask("reload", spec, arm=common.arm, cache=cache, label=label, send=send) for spec in specs]
        for cache, label, send in states
    )
    rows: list[Row] = []
    with common.bench("reload", endpoint, run) as bench:
        bench.plan([*first, *device, *fills, *back])
        for cold, again in zip(first, device, strict=True):
            rows += bench.ask([cold, again])
        for part in (fills, back):
            rows += bench.ask(part)
    held, came = ([r for r in rows if r["label"] == label and r["cached_tokens"]] for label in ("device", "reload"))
    return bench.result(rows, _describe(held, came), _table(rows), {"reloaded": len(came)})


def _table(rows: list[Row]) -> pd.DataFrame:
    """One row a state, and how many prompts had cached tokens."""
    asked = [r for r in rows if r["label"] in ("first", "device", "reload")]
    more = {"with cached tokens": lambda group: sum(bool(r["cached_tokens"]) for r in group)}
    return tally(asked, {"state": lambda row: row["label"]}, more, ordered=False)


def _describe(held: list[Row], came: list[Row]) -> tuple[str, str]:
    if not came:
        return "No prompt came back from a slower tier: nothing is said about reloading.", "not proven"
    text = f"Hits on the device: {share(held)}; the same prompts after they were pushed out: {share(came)}."
    bad = surprising(*outcomes(came)) and not surprising(*outcomes(held))
    return text, "finding" if bad else "healthy"
