"""Does one name hide several backends?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result
from .bench.trial import Ask, Row, Target, with_seed


@instrument(without=("controls", "needle"))
def pool(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    sends: int = 10,
    length: int = 512,
    **options: Unpack[Options],
) -> Result:
    """Send one prompt `sends` times and group the answers by what the server says about itself.

    Different models, fingerprints, workers or token counts for one prompt mean several backends behind one name; a
    sweep over such a pool measures their mixture. `.table` has one row a group. Different texts alone are weak
    evidence (greedy decoding is not deterministic under load) and are only told.
    """
    common = Common(**options)
    if sends < 2:
        raise ValueError("a pool check needs at least 2 sends")
    check_trials(sends)
    spec = with_seed(common.spec(length), 41)
    asks = [Ask("pool", spec, arm=common.arm, cache="unknown", send=i) for i in range(sends)]
    rows: list[Row] = []
    with common.bench("pool", endpoint, run) as bench:
        bench.plan(asks)
        rows = bench.ask(asks, concurrency=min(4, sends))
    answered = [r for r in rows if r["outcome"] != "transport"]
    marks = Counter((r.get("fingerprint"), r.get("worker"), r.get("prompt_tokens")) for r in answered)
    texts = Counter(r.get("answer") for r in answered)
    said = _describe_pool(marks, texts, len(answered))
    return bench.result(rows, said, _pool_table(marks), {"texts": len(texts)})


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
