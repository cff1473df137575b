"""Coherence of generated text, and why it cannot see lost context; and whether one name hides several backends."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needlework.serving import Endpoint

from .asks import Ask, Row, Target, with_seed
from .budget import check_trials
from .instrument import Common, instrument
from .prompts import Messages, Prompt
from .result import Result, finish, outcomes, share

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
    common: Common,
) -> Result:
    """On the same notes, ask for free text and for the fact: how repetitive is the text, and is the fact still known?

    `.table` has one row a length: gzip ratio and repetition of the text (medians), share of loops, and recall with its
    interval. A deployment can be perfectly coherent and remember nothing: only the last columns tell.
    """
    check_trials(2 * len(lengths) * repeats)
    specs = [with_seed(common.spec(n, depth), i, r) for i, n in enumerate(lengths) for r in range(repeats)]
    texts = [Ask("coherence", s, arm=common.arm, label="text", max_tokens=max_tokens) for s in specs]
    facts = [Ask("coherence", s, arm=common.arm, label="fact") for s in specs]
    written: list[Row] = []
    rows: list[Row] = []
    with common.bench("coherence", endpoint, run) as bench:
        bench.note(lengths=list(lengths), repeats=repeats, max_tokens=max_tokens, seed=common.seed)
        with bench.until_stopped():
            bench.plan([*texts, *facts])
            for text, fact in zip(texts, facts, strict=True):
                rows += bench.ask([fact])  # first: asked second, its prompt would share a cached prefix
                written += bench.ask([text], prepare=_free_text, graded=False)
        table = _coherence_table(written, rows)
        sentence, verdict = _describe(table, written, rows)
        return finish(bench, rows, sentence=sentence, verdict=verdict, table=table)


async def _free_text(ask: Ask, prompt: Prompt, endpoint: Endpoint) -> tuple[Messages, dict[str, Any]]:
    body = prompt.text.rpartition("\n\n")[0]
    return [{"role": "user", "content": f"{body}\n\n{CREATE}"}], {
        "question": CREATE,
        "expected": None,
        "outcome": None,
        "score": None,
    }


def _coherence_table(written: list[Row], rows: list[Row]) -> Any:
    import statistics

    import pandas as pd

    from needlework.analysis.intervals import wilson

    out = []
    for length in sorted({r["target_tokens"] for r in [*written, *rows]}):
        texts = [r.get("answer") or "" for r in written if r["target_tokens"] == length and r["outcome"] != "transport"]
        hits, measured = outcomes([r for r in rows if r["target_tokens"] == length])
        low, high = wilson(hits, measured)
        ratios = [gzip_ratio(t) for t in texts] or [float("nan")]
        entry = {"target_tokens": length, "gzip_ratio": statistics.median(ratios)}
        entry |= {"repetition": statistics.median([repetition(t) for t in texts] or [float("nan")])}
        entry |= {"loops": sum(r > REPETITIVE_RATIO for r in ratios), "texts": len(texts)}
        out.append(entry | {"hits": hits, "measured": measured, "low": low, "high": high})
    return pd.DataFrame(out)


def _describe(table: Any, written: list[Row], rows: list[Row]) -> tuple[str, str]:
    if not outcomes(rows)[1]:
        return "Nothing was measured.", "not proven"
    loops, texts = int(table["loops"].sum()), int(table["texts"].sum())
    worst = float(table["gzip_ratio"].max())
    text = f"{loops} of {texts} texts are loops (gzip ratio at most {worst:.1f} in the median); "
    text += f"the fact on the same notes: {share(rows)}."
    from .recall import surprising

    lost = any(
        surprising(*outcomes([r for r in rows if r["target_tokens"] == n]), tests=len(table))
        for n in table["target_tokens"]
    )
    if lost and not loops:
        text += " The text is coherent and the context is lost: coherence cannot see this failure."
    return text, "finding" if lost or loops * 2 > texts else "healthy"


@instrument(without=("controls", "needle"))
def pool(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    sends: int = 10,
    length: int = 512,
    common: Common,
) -> Result:
    """Send one prompt `sends` times and group the answers by what the server says about itself.

    Different models, fingerprints, workers or token counts for one prompt mean several backends behind one name; a
    sweep over such a pool measures their mixture. `.table` has one row a group. Different texts alone are weak
    evidence (greedy decoding is not deterministic under load) and are only told.
    """
    if sends < 2:
        raise ValueError("a pool check needs at least 2 sends")
    check_trials(sends)
    spec = with_seed(common.spec(length), 41)
    asks = [Ask("pool", spec, arm=common.arm, cache="unknown", send=i) for i in range(sends)]
    rows: list[Row] = []
    with common.bench("pool", endpoint, run) as bench:
        bench.note(sends=sends, length=length, seed=common.seed)
        with bench.until_stopped():
            bench.plan(asks)
            rows = bench.ask(asks, concurrency=min(4, sends))
        answered = [r for r in rows if r["outcome"] != "transport"]
        marks = Counter((r.get("fingerprint"), r.get("worker"), r.get("prompt_tokens")) for r in answered)
        texts = Counter(r.get("answer") for r in answered)
        sentence, verdict = _describe_pool(marks, texts, len(answered))
        return finish(
            bench, rows, sentence=sentence, verdict=verdict, table=_pool_table(marks), details={"texts": len(texts)}
        )


def _describe_pool(marks: Counter, texts: Counter, answered: int) -> tuple[str, str]:
    if answered < 2:
        return "Nothing was measured.", "not proven"
    told = f"{len(texts)} different texts" if len(texts) > 1 else "with one text"
    if len(marks) > 1:
        return (
            f"{len(marks)} kinds of backend answered {answered} identical requests ({told}): pin one before any sweep.",
            "finding",
        )
    silent = all(m[0] is None and m[1] is None for m in marks)
    missed = 100 * 0.05 ** (1 / answered)
    text = f"{answered} identical requests were answered alike ({told}); a second backend that takes more than "
    text += f"{100 - missed:.0f} % of the requests would have shown"
    return text + (", if it marked itself: this server sends no fingerprint." if silent else "."), "healthy"


def _pool_table(marks: Counter) -> Any:
    import pandas as pd

    rows = [
        {"fingerprint": m[0], "worker": m[1], "prompt_tokens": m[2], "answers": n}
        for m, n in sorted(marks.items(), key=lambda i: -i[1])
    ]
    return pd.DataFrame(rows, columns=["fingerprint", "worker", "prompt_tokens", "answers"])
