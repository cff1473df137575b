"""Where does recall fall? A coarse ladder, adaptive batches, confirmation on both sides, then a walk to the token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Unpack

import numpy as np

from needlework.analysis.cliff import Cliff, CliffSearch, Constant, EdgeWalk, constants_in

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.prompts import digest
from .bench.result import Result, hit, outcomes, share, surprising
from .bench.trial import Ask, Row, Target, with_seed

LADDER = 8  # coarse lengths asked first: they show the gross shape
BETWEEN, NARROW = 16, 1.12  # lengths asked between them where nothing falls, down to gaps of this ratio
USUAL = 30  # requests of a search
CONFIRM = 5  # fresh trials on each side of the edge
WALK = 30  # requests of a walk at most
DEPTH, FROM_END = 0.1, 256  # where the fact lies when neither is asked for: so far from the question


@dataclass(frozen=True)
class CliffResult(Result):
    """`cliff` is the search's answer; `edge` the longest length that hits, if walked; `constants` what explains it."""

    cliff: Cliff | None = None
    edge: int | None = None
    constants: tuple[Constant, ...] = ()


@instrument()
def find_cliff(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    low: int = 512,
    high: int = 32768,
    depth: float | None = None,
    from_end: int | None = None,
    tolerance: float = 0.05,
    batch: int = 1,
    walk: bool = True,
    config: Mapping[str, float] | None = None,
    max_requests: int = 60,
    max_tokens: int = 48,
    thinking: bool = False,
    **options: Unpack[Options],
) -> CliffResult:
    """Find the length at which a planted fact stops being found, to `tolerance`, then to the token if it is a step.

    from_end  tokens kept between needle and question (256 when no depth is given): the fact moves with the length, so
              an edge in its place shows as well as one in the length; the walk then moves the needle one token at a
              time, and constants are looked for in the place of its value as well as in the length
    depth     keep the fact at this share of the prompt instead: an edge in its place then shows at place / depth tokens
    max_requests  of the search; confirming takes 10 more, and the walk at most 30
    config  constants of the deployment to look for in the interval: topk, ratio, window, page, chunk, context_limit
    batch   lengths in flight at a time; the placement accounts for it. Several are quicker where requests are slow, but
            share the engine's passes: an edge at a chunk then lies where the neighbours let it
    walk    follow a step to the exact token (only where lengths are counted by the server's tokenizer)

    Deterministic for a seed and the outcomes, so a resumed or recorded run asks the same questions. Raises ValueError
    for a bad range, RuntimeError when the endpoint does not answer.
    """
    common = Common(**options)
    seed = common.seed
    if depth is None and from_end is None:
        from_end = FROM_END
    from_end = from_end or None  # 0 asks for the depth
    if from_end is not None and from_end >= high:
        raise ValueError(f"a fact {from_end} tokens before the question lies in no prompt of {high}")
    check_trials(max_requests + batch)
    common.spec(high)  # refuses a length that no window has
    search = CliffSearch(int(low), int(high), tolerance=tolerance, limit=max_requests, seed=seed)
    asked: dict[int, int] = {}
    rows: list[Row] = []
    walked = None
    with common.bench("cliff", endpoint, run, thinking=thinking) as bench:

        def send(lengths: list[int], label: str, planner: CliffSearch | EdgeWalk = search) -> list[Row]:
            asks = []
            for n in lengths:  # fresh text each time: the count of earlier asks at this length goes into the seed
                asked[n] = asked.get(n, 0) + 1
                spec = common.spec(n, DEPTH if depth is None else depth, from_end=from_end)
                if label == "walk" and from_end is not None:
                    # one haystack, so that nothing but the needle's place moves; only the first line is new
                    spec = replace(spec, pad="start", salt=digest([seed, n, asked[n]], 12))
                else:
                    spec = with_seed(spec, n, asked[n])
                asks.append(Ask("cliff", spec, arm=common.arm, repeat=asked[n], label=label, max_tokens=max_tokens))
            got = bench.ask(asks, concurrency=batch)
            rows.extend(got)
            planner.update(lengths, [hit(r) for r in got])
            return got

        ladder = _ladder(int(low), int(high))
        # nobody knows where the search will go: the budget is that of a cliff at three quarters of the range
        usual, most = min(USUAL, max_requests), max_requests + batch - 1 + 2 * CONFIRM + (WALK if walk else 0)
        tokens = sum(ladder) + max(0, most - len(ladder)) * (3 * int(high) + int(low)) // 4
        if common.begin(bench, common.spec(low), more=usual, spare=most - usual, tokens=tokens):
            send(ladder, "ladder")
            while not search.done:
                send(search.propose(batch), "search")
            if search.result().state == "no cliff":  # a hole between two rungs is no healthy ground
                send(_between([r["target_tokens"] for r in rows], seed), "between")
            found = search.result()
            if found.state == "cliff":
                below, above = _beside(found, int(low), int(high))
                send([below] * CONFIRM + [above] * CONFIRM, "confirm")
                found = search.result()
                exact = bench.capabilities.tokenize != "usage"
                if walk and exact and found.state == "cliff" and _is_step(found) and not _other_law(rows):
                    walked = _walk(found, send)
    found = search.result()
    edge = walked.edge if walked is not None and walked.state == "edge" else None
    place = _place(rows, edge) if edge is not None and from_end is not None else None
    interval = (edge, edge + 1) if edge is not None else found.interval
    constants = tuple(constants_in(interval, config)) if found.state == "cliff" else ()
    if place is not None:  # the value covers some tokens from its place on, and keys are made of groups of tokens
        width = len(rows[-1]["expected"] or "") + int(np.max((config or {}).get("ratio", 1)))
        near = constants_in((place, place + width), config)
        constants = (*(c._replace(formula=f"place of the value, {c.formula}") for c in near), *constants)
    where = (
        f"{from_end:,} tokens before the question" if from_end else f"at depth {DEPTH if depth is None else depth:g}"
    )
    said = _describe(found, edge, place, constants, rows, where)
    details = {"walk": walked, "place": place, "budget": bench.budget}
    done = bench.result(rows, said, _table(found, edge, constants), details)
    return CliffResult(**vars(done), cliff=found, edge=edge, constants=constants)


def _ladder(low: int, high: int) -> list[int]:
    steps = [round(low * (high / low) ** (i / (LADDER - 1))) for i in range(LADDER)]
    return sorted(set(steps))


def _between(asked: list[int], seed: int) -> list[int]:
    """Lengths in the widest gaps (by ratio) between those asked, off the grid: any residue, no fixed rung."""
    lengths, random = sorted(set(asked)), Random(f"between/{seed}")
    for _ in range(BETWEEN):
        ratio, i = max((b / a, i) for i, (a, b) in enumerate(itertools.pairwise(lengths)))
        if ratio < NARROW:
            break
        low, high = lengths[i], lengths[i + 1]
        lengths.insert(i + 1, round(low * (high / low) ** random.uniform(0.35, 0.65)))
    return sorted(set(lengths) - set(asked))


def _other_law(rows: list[Row]) -> str:
    """What is lost, where another law than a fall with length, place or distance explains these trials better."""
    import pandas as pd

    from needlework.analysis import laws

    fit = laws.fit(laws.conditions(pd.DataFrame(rows)))
    law = fit.laws[0] if fit.laws else None
    # passes counted from the end: while a prompt is one pass nothing is lost, so its edge is one in length as well
    falls = ("length", "place", "left", "last pass", "late pass", "fade length", "fade left", "fade place")
    told = law is not None and law.name not in falls and law.share > 0.5
    return law.sentence if told and law is not None else ""


def _beside(found: Cliff, low: int, high: int) -> tuple[int, int]:
    """Lengths just outside the bracket, where a step must hit and must miss."""
    margin = max(1.0, 0.02 * found.threshold)
    below = max(low, int(found.bracket.low - margin))
    above = min(high, int(found.bracket.high + margin) + 1)
    return below, above


def _is_step(found: Cliff) -> bool:
    return (
        found.width_interval.low < 0.2 and found.top - found.bottom > 0.3 and found.interval.high > found.interval.low
    )


def _walk(found: Cliff, send: Callable[..., Any]) -> EdgeWalk:
    """Noisy bisection over single tokens, in a bracket a little wider than the search's; where the edge lies beyond
    its end (in the search the needle stood between whole records, some tokens off), once more beyond that end.
    """
    low, high = found.bracket
    low, high = int(low - 0.5 * (high - low)) - 2, int(high + 0.5 * (high - low)) + 3
    shape = {"top": max(found.top, 0.9), "bottom": min(found.bottom, 0.6)}
    walk = EdgeWalk(max(found.low, low), min(found.high, high), **shape, limit=WALK)
    for _ in range(2):
        while not walk.done:
            send(walk.propose(), "walk", walk)
        wide = 2 * (walk.high - walk.low)
        beyond = {"below range": (walk.low - wide, walk.low + 1), "above range": (walk.high - 1, walk.high + wide)}
        if walk.state not in beyond or walk.requests >= WALK:
            break
        low, high = max(found.low, beyond[walk.state][0]), min(found.high, beyond[walk.state][1])
        if high <= low:
            break
        asked, walk = walk.asked, EdgeWalk(low, high, **shape, limit=WALK)
        walk.update([n for n, _ in asked], [h for _, h in asked])
    return walk


def _place(rows: list[Row], edge: int) -> int | None:
    """Token of the asked value at the edge: the last place that still hit."""
    hits = [r for r in rows if r["label"] == "walk" and r["target_tokens"] == edge and hit(r) == 1.0]
    place = hits[-1]["needle_token"] if hits else None
    return None if place is None else int(place)


def _describe(
    found: Cliff, edge: int | None, place: int | None, constants: tuple[Constant, ...], rows: list[Row], where: str
) -> tuple[str, str]:
    if not outcomes(rows)[1]:
        return "Nothing was measured.", "not proven"
    text = str(found)
    text = f"{text[0].upper()}{text[1:]}."
    other = _other_law(rows)
    if other and found.state != "no cliff":
        return f"{text} But another law explains these trials better: {other}.", "finding"
    if found.state == "no cliff":
        if other:
            return f"Recall does not fall with length, and yet it is not whole: {other}.", "finding"
        if surprising(*outcomes(rows)):
            return f"{text} But recall is not whole at any length: {share(rows)}.", "finding"
        return f"{text} Trials: {share(rows)}, with the fact {where}.", "healthy"
    if found.state == "unsettled":
        return (
            f"{text} The fact lay {where}; another place, a larger tolerance or more requests may settle it.",
            "not proven",
        )
    if edge is not None:
        text += f" Walked token by token: {edge:,} tokens still hit, {edge + 1:,} miss"
        text += f"; the value then stands at token {place:,}." if place is not None else "."
        if place is not None and not found.interval.low <= edge <= found.interval.high:
            text += " (In the search the needle lies between whole records, some tokens off the wished place.)"
    if constants:
        text += " In the interval: " + "; ".join(f"{c.value:,} ({c.formula})" for c in constants[:3]) + "."
    elif found.state == "cliff":
        text += " No known constant lies in the interval."
    return text, "finding" if found.state in ("cliff", "below range") else "not proven"


def _table(found: Cliff, edge: int | None, constants: tuple[Constant, ...]) -> Any:
    import pandas as pd

    low, high = found.interval
    entries = [("state", found.state), ("requests", found.requests)]
    if found.state == "cliff":
        wide = found.width_interval
        entries += [
            ("threshold_tokens", f"{found.threshold:,.0f} ({low:,.0f} to {high:,.0f})"),
            ("width_octaves", f"{found.width_octaves:.2f} ({wide.low:.2f} to {wide.high:.2f})"),
            ("recall_before", f"{found.top:.2f}"),
            ("recall_after", f"{found.bottom:.2f}"),
            ("edge_tokens", "not walked" if edge is None else f"{edge:,}"),
        ]
        entries += [("constant", f"{c.value:,}: {c.formula}") for c in constants[:5]]
    return pd.DataFrame(entries, columns=["quantity", "value"])
