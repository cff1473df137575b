"""Known answers at concurrency 1 against N: does a crowd change an answer, or mix two of them up?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .bench.bench import Common, Options, instrument
from .bench.budget import check_trials
from .bench.result import Result, discordant, foreign, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd


@instrument()
def echo(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    concurrency: int = 8,
    trials: int = 32,
    lengths: Sequence[int] = (512, 1024, 2048),
    **options: Unpack[Options],
) -> Result:
    """Ask `trials` known answers with `concurrency` in flight, and the same prompts one at a time; compare by pair.

    Blocks alternate (crowd, alone, alone, crowd) so that drift is not read as load. `.details` holds `discordant` (only
    alone hit, only in the crowd hit), `p_value`, and `foreign`: answers that hold another request's value, which no
    numerical noise can produce.
    """
    common = Common(**options)
    if concurrency < 2 or trials < concurrency:
        raise ValueError("echo needs a concurrency of at least 2 and at least as many trials")
    check_trials(2 * trials)
    specs = [with_seed(common.spec(lengths[i % len(lengths)], (i % 5) / 4), i) for i in range(trials)]
    crowd = [Ask("echo", s, arm=common.arm, concurrency=concurrency, label="crowd") for s in specs]
    alone = [Ask("echo", s, arm=common.arm, concurrency=1, send=1, label="alone") for s in specs]
    pairs: list[tuple[Row, Row]] = []
    with common.bench("echo", endpoint, run) as bench:
        common.begin(bench, common.spec(lengths[0]), [*crowd, *alone])
        for a in crowd:
            bench.remember(a)
        for block, start in enumerate(range(0, trials, concurrency)):
            part = slice(start, start + concurrency)
            if block % 2 == 0:
                many, single = bench.ask(crowd[part], concurrency=concurrency), bench.ask(alone[part])
            else:
                single, many = bench.ask(alone[part]), bench.ask(crowd[part], concurrency=concurrency)
            pairs += list(zip(single, many, strict=True))
    rows = [r for p in pairs for r in p]
    details = discordant(pairs) | {"foreign": foreign(rows), "concurrency": concurrency}
    return bench.result(rows, _describe_echo(pairs, details), _echo_table(pairs), details)


def _describe_echo(pairs: list[tuple[Row, Row]], details: dict[str, Any]) -> tuple[str, str]:
    if not pairs or not outcomes([m for _, m in pairs])[1]:
        return "Nothing was measured.", "not proven"
    alone, crowd = [s for s, _ in pairs], [m for _, m in pairs]
    text = f"{details['concurrency']} in flight: {share(crowd)}; the same prompts one at a time: {share(alone)}."
    if details["foreign"]:
        return f"{text} {details['foreign']} answers hold the value of another request.", "finding"
    only_alone, only_crowd = details["discordant"]
    if only_alone + only_crowd == 0:
        bad = surprising(*outcomes(crowd))
        return text + " No pair differs and no answer is foreign.", "finding" if bad else "healthy"
    text += f" {only_alone} pairs are lost only in the crowd, {only_crowd} only alone (p = {details['p_value']:.2g}); "
    text += "no answer is foreign."
    return text, "finding" if details["p_value"] < 0.01 else "not proven"


def _echo_table(pairs: list[tuple[Row, Row]]) -> pd.DataFrame:
    rows = [row | {"arm": name} for k, name in enumerate(("alone", "crowd")) for row in (p[k] for p in pairs)]
    return tally(rows, ("arm",), {"foreign": foreign})
