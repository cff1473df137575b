"""Recall against length and depth: a grid with Wilson intervals on the realised length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.1, 0.5, 0.9)


@instrument()
def recall(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    repeats: int = 1,
    distractors: int = 0,
    style: str = "literal",
    concurrency: int = 1,
    tolerance: int = 0,
    max_tokens: int = 48,
    thinking: bool = False,
    probe: str = "recall",
    **options: Unpack[Options],
) -> Result:
    """Ask for one fact at every length, depth and repeat, each in fresh text; returns hits with Wilson intervals.

    `.table` has one row a length: hits, measured, low, high (95 %), and the realised tokens. Cells of lengths and
    depths are in `.details["cells"]`. Trials are sent in a seeded random order, so drift cannot pose as an effect of
    length.
    Raises ValueError for bad parameters, RuntimeError when the endpoint does not answer at all.
    """
    common = Common(**options)
    if not lengths or not depths or repeats < 1:
        raise ValueError("recall needs at least one length, one depth and one repeat")
    check_trials(len(lengths) * len(depths) * repeats)
    more: dict[str, Any] = {"distractors": distractors, "style": style}
    asks = [
        Ask(
            probe,
            with_seed(common.spec(n, d, **more), i, j, r),
            arm=common.arm,
            repeat=r,
            concurrency=concurrency,
            max_tokens=max_tokens,
        )
        for i, n in enumerate(lengths)
        for j, d in enumerate(depths)
        for r in range(repeats)
    ]
    with common.bench(probe, endpoint, run, tolerance=tolerance, thinking=thinking) as bench:
        common.begin(bench, common.spec(lengths[0], **more), asks)
        bench.ask(_shuffled(asks, common.seed), concurrency=concurrency)
    rows = [bench.journal.rows[a.trial_id] for a in asks if a.trial_id in bench.journal.rows]
    details = {"cells": by_length(rows, "depth"), "budget": bench.budget}
    return bench.result(rows, describe(rows), by_length(rows), details)


def depth_profile(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    length: int = 4096,
    depths: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    repeats: int = 2,
    **options: Any,
) -> Result:
    """Recall against the needle's place at one length; options as of `recall`. `.table` has one row a depth."""
    result = recall(endpoint, run, lengths=[length], depths=depths, repeats=repeats, probe="depth", **options)
    table = result.details["cells"]
    sentence = result.sentence
    if result.verdict == "finding":
        lost = table[(table["hits"] == 0) & (table["measured"] > 0)]
        held = table[(table["hits"] == table["measured"]) & (table["measured"] > 0)]
        if len(lost) and len(held):
            places = ", ".join(f"{d:.2f}" for d in lost["depth"])
            sentence = f"At {length:,} tokens recall depends on the place: lost at depth {places}. {sentence}"
    return replace(result, table=table, sentence=sentence)


def by_length(rows: list[Row], *more: str) -> pd.DataFrame:
    """Hits with Wilson intervals by target length (and more columns), with the mean of the realised lengths."""
    return tally(rows, ("target_tokens", *more), {
        "prompt_tokens": lambda group: _mean([r["prompt_tokens"] for r in group if r.get("prompt_tokens")]),
        "not_measured": lambda group: len(group) - outcomes(group)[1],
    })  # fmt: skip


def _mean(counts: list[int]) -> int | None:
    return round(sum(counts) / len(counts)) if counts else None


def describe(rows: list[Row]) -> tuple[str, str]:
    """(sentence, verdict) of a grid: all found; or where it is found, where it is lost, and by which kind of answer."""
    hits, measured = outcomes(rows)
    if not measured:
        return "Nothing was measured.", "not proven"
    by: dict[int, list[Row]] = {}
    for row in rows:
        by.setdefault(row["target_tokens"], []).append(row)
    if hits == measured:
        silent = [n for n, members in sorted(by.items()) if not outcomes(members)[1]]
        if silent:
            said = f"Nothing was measured at {_listed(silent)} tokens; elsewhere recall holds: {share(rows)}."
            return said, "not proven"
        return f"Recall holds at every length and depth tried: {share(rows)}.", "healthy"
    if not any(surprising(*outcomes(r), tests=len(by) + 1) for r in (rows, *by.values())):
        return (
            f"Recall holds as far as {measured} trials can tell ({share(rows)}); a stray miss proves nothing.",
            "healthy",
        )
    cells = {n: outcomes(r) for n, r in sorted(by.items())}
    parts = []
    whole = [n for n, (h, m) in cells.items() if m and h == m]
    lost = [n for n, (h, m) in cells.items() if m and h == 0]
    partly = [n for n, (h, m) in cells.items() if 0 < h < m]
    for lengths, word in ((whole, "Recall holds"), (partly, "is partly lost"), (lost, "is lost")):
        if lengths:
            members = [r for n in lengths for r in by[n]]
            parts.append(f"{word} at {_listed(lengths)} tokens ({share(members)})")
    text = "; ".join(parts)
    kinds: dict[str, int] = {}
    for row in rows:
        if row["outcome"] != "exact":
            kinds[row["outcome"]] = kinds.get(row["outcome"], 0) + 1
    text += ". Misses: " + ", ".join(
        f"{n} {k.replace('_', ' ')}" for k, n in sorted(kinds.items(), key=lambda i: -i[1])
    )
    return (text if text.startswith("Recall") else f"Recall {text}") + ".", "finding"


def _listed(lengths: list[int]) -> str:
    if len(lengths) <= 3:
        return ", ".join(f"{n:,}" for n in lengths)
    return f"{lengths[0]:,} … {lengths[-1]:,} ({len(lengths)} lengths)"


def _shuffled(asks: list[Ask], seed: int) -> list[Ask]:
    from random import Random

    order = list(asks)
    Random(f"order/{seed}").shuffle(order)
    return order
