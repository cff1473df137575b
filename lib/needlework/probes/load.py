"""Load and time: known answers at concurrency 1 against N (`echo`), and a canary against request count (`drift`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .asks import Ask, Row, Target, with_seed
from .budget import check_trials
from .instrument import Common, instrument
from .recall import surprising
from .result import Result, finish, hit, outcomes, share


@instrument()
def echo(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    concurrency: int = 8,
    trials: int = 32,
    lengths: Sequence[int] = (512, 1024, 2048),
    common: Common,
) -> Result:
    """Ask `trials` known answers with `concurrency` in flight, and the same prompts one at a time; compare by pair.

    Blocks alternate (crowd, alone, alone, crowd) so that drift is not read as load. `.details` holds `discordant` (only
    alone hit, only in the crowd hit), `p_value`, and `foreign`: answers that hold another request's value, which no
    numerical noise can produce.
    """
    if concurrency < 2 or trials < concurrency:
        raise ValueError("echo needs a concurrency of at least 2 and at least as many trials")
    check_trials(2 * trials)
    specs = [with_seed(common.spec(lengths[i % len(lengths)], (i % 5) / 4), i) for i in range(trials)]
    crowd = [Ask("echo", s, arm=common.arm, concurrency=concurrency, label="crowd") for s in specs]
    alone = [Ask("echo", s, arm=common.arm, concurrency=1, send=1, label="alone") for s in specs]
    pairs: list[tuple[Row, Row]] = []
    with common.bench("echo", endpoint, run) as bench:
        bench.note(concurrency=concurrency, trials=trials, lengths=list(lengths), seed=common.seed)
        with bench.until_stopped():
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
        details = _crowding(pairs) | {"concurrency": concurrency}
        sentence, verdict = _describe_echo(pairs, details)
        rows = [r for p in pairs for r in p]
        return finish(bench, rows, sentence=sentence, verdict=verdict, table=_echo_table(pairs), details=details)


def _crowding(pairs: list[tuple[Row, Row]]) -> dict[str, Any]:
    from needlework.analysis.paired import mcnemar

    hits = [(hit(s), hit(m)) for s, m in pairs]
    only_alone = sum(a == 1 and b == 0 for a, b in hits)
    only_crowd = sum(a == 0 and b == 1 for a, b in hits)
    foreign = [r for p in pairs for r in p if str(r.get("answered_from") or "").startswith("trial:")]
    return {
        "discordant": (only_alone, only_crowd),
        "p_value": mcnemar(only_alone, only_crowd),
        "foreign": len(foreign),
    }


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


def _echo_table(pairs: list[tuple[Row, Row]]) -> Any:
    import pandas as pd

    from needlework.analysis.intervals import wilson

    out = []
    for name, rows in (("alone", [s for s, _ in pairs]), ("crowd", [m for _, m in pairs])):
        hits, measured = outcomes(rows)
        low, high = wilson(hits, measured)
        foreign = sum(str(r.get("answered_from") or "").startswith("trial:") for r in rows)
        out.append({"arm": name, "hits": hits, "measured": measured, "low": low, "high": high, "foreign": foreign})
    return pd.DataFrame(out, columns=["arm", "hits", "measured", "low", "high", "foreign"])


@instrument()
def drift(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    canaries: int = 60,
    between: int = 0,
    length: int = 1024,
    depth: float = 0.3,
    common: Common,
) -> Result:
    """Ask the same kind of question again and again, with `between` other requests between canaries; CUSUM on the hits.

    Each canary is fresh text of equal length, so a fall is not a matter of length or cache. `.details["drift"]` is the
    CUSUM's answer; the alarm threshold rings falsely about once in 3,700 canaries.
    """
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
        bench.note(canaries=canaries, between=between, length=length, seed=common.seed)
        with bench.until_stopped():
            common.begin(bench, specs[0], [*asks, *(a for f in fills for a in f)])
            for a, fill in zip(asks, fills, strict=True):
                rows += bench.ask([a])
                if fill:
                    bench.ask(fill, concurrency=4)
        found = judge([hit(r) for r in rows])
        if not outcomes(rows)[1]:
            sentence, verdict = "Nothing was measured.", "not proven"
        else:
            text = str(found)
            sentence = f"{text[0].upper()}{text[1:]}; one canary in {between + 1} requests."
            verdict = "finding" if found.alarm is not None else "healthy"
        return finish(
            bench, rows, sentence=sentence, verdict=verdict, table=_drift_table(rows), details={"drift": found}
        )


def _drift_table(rows: list[Row], blocks: int = 6) -> Any:
    import pandas as pd

    from needlework.analysis.intervals import wilson

    size = max(1, -(-len(rows) // blocks))
    out = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        hits, measured = outcomes(part)
        low, high = wilson(hits, measured)
        first, last = part[0]["ordinal"], part[-1]["ordinal"]
        out.append({"requests": f"{first} to {last}", "hits": hits, "measured": measured, "low": low, "high": high})
    return pd.DataFrame(out, columns=["requests", "hits", "measured", "low", "high"])
