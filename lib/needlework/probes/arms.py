"""Two arms on identical prompts: interleaved ABBA, an A/A run first, cold and warm proved by cached tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .bench.bench import Bench, Common, Options, control_asks, instrument, run_controls
from .bench.budget import check_trials
from .bench.journal import Journal
from .bench.prompts import PromptSpec
from .bench.result import Result, discordant, hit, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

CACHES = ("cold", "warm")
FOUND = 0.02  # p-value of discordant pairs that is a finding
ALIKE = 0.15  # a difference that may be left open where the arms are called alike


@instrument(without=("arm",))
def compare_arms(
    arms: Mapping[str, Target],
    run: str | Path | None = None,
    *,
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    repeats: int = 2,
    aa_pairs: int = 8,
    aa_lengths: Sequence[int] = (),
    cache: Sequence[str] = ("cold",),
    tolerance: int = 0,
    stop_early: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Send the same bytes to both arms and compare answer by answer.

    arms        two names with an endpoint each; the first builds the prompts with its tokenizer
    aa_pairs    identical prompts sent to the first arm twice, before everything else: its own flip noise; aa_lengths:
                of these prompts (default: lengths)
    cache       "cold" sends each prompt once; with "warm" it is sent again at once and must show cached tokens
    stop_early  stop as soon as the always-valid test is decided (e-value of at least 20)

    `.table` has one row a length and cache state; `.details` holds `aa` (flips among A/A pairs), `p_value` (exact
    McNemar), `e_value`, `discordant` = (only first hit, only second hit) and `pairs`.
    """
    common = Common(**options)
    if len(arms) != 2:
        raise ValueError("compare_arms needs exactly two arms")
    if not set(cache) <= set(CACHES) or not cache:
        raise ValueError("cache is cold, warm, or both")
    check_trials(2 * aa_pairs + len(arms) * len(lengths) * len(depths) * repeats * (1 + ("warm" in cache)))
    names = list(arms)
    specs = [
        with_seed(common.spec(n, d), i, j, r)
        for r in range(repeats)
        for i, n in enumerate(lengths)
        for j, d in enumerate(depths)
    ]
    sends = [("cold", 0), ("warm", 1)] if "warm" in cache else [("cold", 0)]

    def asks_of(name: str, spec: PromptSpec) -> list[Ask]:
        return [Ask("arms", spec, arm=name, cache=state, send=send) for state, send in sends]

    twice = aa_lengths or lengths
    aa = [
        [Ask("aa", with_seed(common.spec(twice[i % len(twice)]), 7, i), arm=names[0], send=send) for send in (0, 2)]
        for i in range(aa_pairs)
    ]
    checks = {n: control_asks("arms", common.spec(lengths[0]), arm=n) if common.controls else [] for n in names}
    failed = ""
    pairs: list[tuple[Row, ...]] = []
    with (
        common.bench("arms", arms[names[0]], run, arm=names[0], tolerance=tolerance) as first,
        Bench(arms[names[1]], probe="arms", arm=names[1], journal=first.journal, builder=first) as second,
    ):
        benches = dict(zip(names, (first, second), strict=True))
        asks = [a for pair in aa for a in pair] + [a for s in specs for n in names for a in asks_of(n, s)]
        first.plan([*checks[names[0]], *checks[names[1]], *asks])
        for name in names:
            judged = run_controls(benches[name], checks[name]) if checks[name] else None
            if judged is not None and not judged.passed and not failed:
                failed = f"Arm {name}: {judged.sentence}"
        for pair in aa:
            first.ask(pair)
        for i, spec in enumerate(specs):
            order = names if i % 4 in (0, 3) else names[::-1]  # ABBA
            got = {name: benches[name].ask(asks_of(name, spec)) for name in order}
            pairs += [tuple(got[n][k] for n in names) for k in range(len(sends)) if sends[k][0] in cache]
            if stop_early and discordant(pairs)["e_value"] >= 20:
                break
    if failed:
        first.warn(failed)
    for sentence in _cache_proof([r for p in pairs for r in p]):
        first.warn(sentence)
    first.used |= second.used
    first.warnings |= second.warnings
    details = {**discordant(pairs), "aa": _flips(first.journal, aa), "pairs": len(pairs), "budget": first.budget}
    said = _describe(names, pairs, details, failed)
    return first.result([r for p in pairs for r in p], said, _table(names, pairs), details)


def _flips(journal: Journal, aa: list[list[Ask]]) -> tuple[int, int]:
    """(pairs that differ, pairs measured) when the first arm was asked the same twice."""
    differ = measured = 0
    for pair in aa:
        rows = [journal.rows.get(a.trial_id) for a in pair]
        marks = [hit(r) for r in rows if r is not None]
        if len(marks) == 2 and all(m == m for m in marks):
            measured += 1
            differ += marks[0] != marks[1]
    return differ, measured


def _describe(names: list[str], pairs: list, details: dict[str, Any], failed: str) -> tuple[str, str]:
    from needlework.analysis.paired import newcombe, odds

    if failed:
        return failed, "harness"
    if not details["measured_pairs"]:
        return "No pair was measured.", "not proven"
    sides = [[p[k] for p in pairs] for k in (0, 1)]
    (a_only, b_only), p, e = details["discordant"], details["p_value"], details["e_value"]
    flips, aa = details["aa"]
    text = (
        f"On {details['measured_pairs']} identical prompts {names[0]} answers {share(sides[0])}; {names[1]} answers "
        f"{share(sides[1])}."
    )
    noise = f" {names[0]} against itself: {flips} of {aa} pairs differ." if aa else ""
    differ = a_only + b_only
    if differ == 0:
        from needlework.analysis.intervals import wilson

        rarest = wilson(0, details["measured_pairs"])[1]
        text += f" No pair differs: a difference in more than {100 * rarest:.0f} % of prompts is excluded."
        both = outcomes(sides[0])
        return text + noise, "healthy" if both[0] == both[1] else "not proven"
    worse = names[1] if a_only > b_only else names[0]
    text += f" {differ} pairs differ, {max(a_only, b_only)} of them against {worse} "
    text += f"(exact McNemar p = {p:.2g}, e = {odds(e)})."
    if p < FOUND or e >= 20:  # flips of an arm against itself go both ways: they favour neither arm
        return text + noise, "finding"
    apart = max(map(abs, newcombe(details["both"], a_only, b_only, details["neither"])))
    text += f" Alike within {100 * apart:.0f} points."
    whole = not surprising(*outcomes(sides[0]))
    return text + noise, "healthy" if apart <= ALIKE and whole else "not proven"


def _table(names: list[str], pairs: list) -> pd.DataFrame:
    by = ["target_tokens", "wanted_cache"]
    whole = tally([p[0] for p in pairs], by, {"pairs": len})[[*by, "pairs"]]
    for k, name in enumerate(names):
        side = tally([p[0] | {"outcome": p[k]["outcome"]} for p in pairs], by)
        whole = whole.assign(**{f"{name} {column}": side[column] for column in ("hits", "low", "high")})
    return whole.rename(columns={"wanted_cache": "cache"})


def _cache_proof(rows: list[Row]) -> list[str]:
    """Sentences on trials whose cache state is not what was wanted: a warm arm that was in fact cold proves nothing."""
    said = []
    for state in CACHES:
        wanted = [r for r in rows if r["wanted_cache"] == state and r["outcome"] != "transport"]
        proved = [r for r in wanted if r["cache"] == state]
        other = [r for r in wanted if r["cache"] not in (state, "unknown")]
        if wanted and other:
            said.append(f"{len(other)} of {len(wanted)} trials meant to be {state} were not, by their cached tokens")
        elif wanted and not proved:
            said.append(f"{state} is not proved: the endpoint does not report cached tokens")
    return said
