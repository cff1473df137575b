"""Coherence of generated text, and why it cannot see lost context."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from needlework.serving import Endpoint

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.prompts import Messages, Prompt
from .bench.result import Result, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

REPETITIVE_RATIO = 4.0  # text that compresses better than this is a loop
CREATE = "Continue these notes in the same style with four more lines."


def gzip_ratio(text: str) -> float:
    """Length of the text in bytes over its length deflated; prose is about 1 to 2.5, a loop 5 to 100."""
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw) / len(zlib.compress(raw, 9)) if raw else 0.0


def repetition(text: str, n: int = 4) -> float:
    """Share of n-grams of words that occurred before: 0 for text without repetition."""
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@instrument(without=("controls",))
def coherence(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    lengths: Sequence[int] = (512, 2048, 8192),
    repeats: int = 3,
    depth: float = 0.2,
    max_tokens: int = 120,
    **options: Unpack[Options],
) -> Result:
    """On the same notes, ask for free text and for the fact: how repetitive is the text, and is the fact still known?

    `.table` has one row a length: gzip ratio and repetition of the text (medians), share of loops, and recall with its
    interval. A deployment can be perfectly coherent and remember nothing: only the last columns tell.
    """
    common = Common(**options)
    check_trials(2 * len(lengths) * repeats)
    specs = [with_seed(common.spec(n, depth), i, r) for i, n in enumerate(lengths) for r in range(repeats)]
    texts = [Ask("coherence", s, arm=common.arm, label="text", max_tokens=max_tokens) for s in specs]
    facts = [Ask("coherence", s, arm=common.arm, label="fact") for s in specs]
    written: list[Row] = []
    rows: list[Row] = []
    with common.bench("coherence", endpoint, run) as bench:
        bench.plan([*texts, *facts])
        for text, fact in zip(texts, facts, strict=True):
            rows += bench.ask([fact])  # first: asked second, its prompt would share a cached prefix
            written += bench.ask([text], prepare=_free_text, graded=False)
    table = _coherence_table(written, rows)
    return bench.result(rows, _describe(table, written, rows), table)


async def _free_text(ask: Ask, prompt: Prompt, endpoint: Endpoint) -> tuple[Messages, dict[str, Any]]:
    body = prompt.text.rpartition("\n\n")[0]
    return [{"role": "user", "content": f"{body}\n\n{CREATE}"}], {
        "question": CREATE,
        "expected": None,
        "outcome": None,
        "score": None,
    }


def _coherence_table(written: list[Row], rows: list[Row]) -> pd.DataFrame:
    import statistics

    def texts(group: list[Row]) -> list[str]:
        length = group[0]["target_tokens"]
        return [r.get("answer") or "" for r in written if r["target_tokens"] == length and r["outcome"] != "transport"]

    def middle(of: Callable[[str], float]) -> Callable[[list[Row]], float]:
        return lambda group: statistics.median([of(t) for t in texts(group)] or [float("nan")])

    return tally(rows, ("target_tokens",), {
        "gzip_ratio": middle(gzip_ratio), "repetition": middle(repetition),
        "loops": lambda group: sum(gzip_ratio(t) > REPETITIVE_RATIO for t in texts(group)),
        "texts": lambda group: len(texts(group)),
    })  # fmt: skip


def _describe(table: Any, written: list[Row], rows: list[Row]) -> tuple[str, str]:
    if not outcomes(rows)[1]:
        return "Nothing was measured.", "not proven"
    loops, texts = int(table["loops"].sum()), int(table["texts"].sum())
    worst = float(table["gzip_ratio"].max())
    text = f"{loops} of {texts} texts are loops (gzip ratio at most {worst:.1f} in the median); "
    text += f"the fact on the same notes: {share(rows)}."
    lost = any(
        surprising(*outcomes([r for r in rows if r["target_tokens"] == n]), tests=len(table))
        for n in table["target_tokens"]
    )
    if lost and not loops:
        text += " The text is coherent and the context is lost: coherence cannot see this failure."
    return text, "finding" if lost or loops * 2 > texts else "healthy"
