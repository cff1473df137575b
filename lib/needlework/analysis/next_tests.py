"""What to test next: tests that are not in the table yet, by how much the leading classes disagree on their outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from needlework.analysis.signatures import BY_CODE, SIGNATURES
from needlework.analysis.view import Feature

RAN = 6  # trials of an instrument from which on it counts as run
# what decisive tests look for: once it is found, the cure is what is left to test
SEEN_INSIDE = (
    *("side_buffer_differs", "main_buffer_differs", "all_buffers_differ", "page_layout", "page_scale"),
    *("page_nonfinite", "page_stale", "page_order", "placement", "other_topk", "crossed_identity"),
    *("reference_same", "log_failed_load"),
)  # fmt: skip


class Rank(Protocol):
    """What is asked of a ranked class."""

    @property
    def code(self) -> str: ...
    @property
    def posterior(self) -> float: ...


@dataclass(frozen=True)
class Test:
    """A test somebody can run, the features it would measure, and the instruments of ours (probes) that run it."""

    title: str
    how: str
    shows: tuple[str, ...]
    probes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NextTest:
    """A test that is not in the table yet, with what each hypothesis lets one expect."""

    title: str
    how: str
    outcomes: dict[str, str]
    power: float

    def __str__(self) -> str:
        expected = "; ".join(f"{code}: {text}" for code, text in self.outcomes.items())
        return f"{self.title}: {self.how}. Expected: {expected}"


TESTS: tuple[Test, ...] = (
    Test(
        "sent against evaluated tokens",
        "compare prompt_tokens with the tokens sent, on both sides of the limit",
        ("truncated", "tiny_prompt", "length_estimate"),
    ),
    Test(
        "read the misses by hand", "print answers, finish reasons and budgets of every miss", ("judge_wrong", "budget")
    ),
    Test(
        "warm proved by cached tokens",
        "warm_cold: each prompt cold, then again until cached_tokens shows a hit",
        ("warm_loss", "comb_warm", "warm_vacuous", "long_suffix_heals"),
        ("warm_cold",),
    ),
    Test(
        "PD against combined",
        "compare_arms on identical prompts, interleaved, with A/A pairs first",
        ("pd_loss", "both_arms_lose"),
        ("arms",),
    ),
    Test(
        "buffer digests across the transfer",
        "digest each registered buffer at the source and at the destination",
        ("side_buffer_differs", "all_buffers_differ", "buffers_equal"),
    ),
    Test(
        "needle position sweep",
        "depth profile at one length above the edge; needles at chunk and page edges",
        ("position_ceiling", "far_from_end", "last_chunk_only"),
        ("depth",),
    ),
    Test(
        "locate and walk the edge",
        "find_cliff, then walk token by token and compare with the constants of the configuration",
        ("edge", "sharp", "edge_at_topk", "edge_at_other_k", "edge_at_chunk", "edge_at_window", "edge_at_stash"),
        ("cliff",),
    ),
    Test("residue scan", "scan_residues over a full period, cold and warm", ("comb", "comb_warm"), ("residues",)),
    Test(
        "concurrency echo",
        "echo with known answers, 1 against N in flight, several batch sizes, 200 trials",
        ("load_loss", "padded_loss", "foreign", "flips_loaded"),
        ("echo",),
    ),
    Test(
        "abort and its aftermath",
        "abort at each stage, then bystanders, follow-ups and the prefix left behind",
        ("abort_loss", "abort_poison"),
        ("abort",),
    ),
    Test(
        "canary over time",
        "drift: the same kind of question after every few requests, with a CUSUM",
        ("drift",),
        ("drift",),
    ),
    Test(
        "follow-up turns",
        "turns: continue the session against re-sending the same text cold",
        ("continue_loss",),
        ("turns",),
    ),
    Test(
        "evict and reload",
        "fill the cache until the prefix leaves the device, then ask it again, for each tier",
        ("reload_loss",),
        ("reload",),
    ),
    Test(
        "repeat identical prompts",
        "20 prompts twice, one at a time, nothing else in flight",
        ("flips_serial",),
        ("aa",),
    ),
    Test(
        "page round trip",
        "write entry-number patterns with the deployed writer, read with the deployed reader; decode a dump",
        ("page_layout", "page_scale", "page_nonfinite", "page_stale"),
    ),
    Test("placement by page", "the same content in low and in high physical pages", ("placement",)),
    Test(
        "two identities, one text",
        "the same tokens under two adapters or salts; the hit counter must stay at zero",
        ("crossed_identity",),
    ),
    Test(
        "acceptance length",
        "record the draft acceptance for each tier and turn, and compare greedy output without drafts",
        ("draft_accept", "heals_drafts"),
    ),
    Test(
        "logs joined with answers",
        "join request ids of wrong answers with warnings and failure counters",
        ("log_failed_load", "log_nan", "log_truncated"),
    ),
    Test("graphs off", "run the failing batch sizes with captured graphs switched off", ("heals_graphs",)),
    Test("exact top-k", "replace the top-k by an exact one, or compare selected scores with it", ("heals_topk",)),
    Test("wider KV dtype", "the same prompts with a wider KV cache dtype", ("heals_dtype",)),
    Test("prefix cache off", "the same turns with the prefix cache off", ("heals_cache",)),
    Test("chunk-size sweep", "one fixed prompt with several chunk sizes, one of them a single pass", ("heals_chunk",)),
    Test("force the wait", "make the copy synchronous (or add delay) and compare rates", ("heals_wait",)),
    Test(
        "an independent server",
        "the same prompts against another engine with the reference prompt encoder",
        ("reference_same",),
    ),
)


def next_tests(ranked: Sequence[Rank], seen: Mapping[str, Feature], rows: Mapping[str, int]) -> list[NextTest]:
    """Tests on which the leading classes disagree, best first, and last the decisive one of the first class; where what
    that one looks for was found, the cure.

    rows    trials in the table by probe: an instrument that ran is not proposed again, unless it could show nothing
    """
    rivals = [r for r in ranked[:4] if r.posterior >= 0.01 or r is ranked[0] or r is ranked[1]]
    weight = np.array([max(r.posterior, 0.02) for r in rivals])
    weight = weight / weight.sum()
    found = []
    for test in TESTS:
        unseen = [name for name in test.shows if name not in seen]
        ran = any(rows.get(probe, 0) >= RAN for probe in test.probes)
        if not unseen or (ran and len(unseen) < len(test.shows)):
            continue
        odds = np.array([[BY_CODE[r.code].odds(name) for name in unseen] for r in rivals])
        spread = weight @ (odds - weight @ odds) ** 2
        best = int(np.argmax(spread))
        outcomes = {r.code: _expectation(odds[i, best], unseen[best]) for i, r in enumerate(rivals)}
        how = f"again with more trials: {test.how}" if ran else test.how
        found.append(NextTest(test.title, how, outcomes, float(spread[best])))
    found.sort(key=lambda t: -t.power)
    top = BY_CODE[ranked[0].code]
    shown = [
        n for n in SEEN_INSIDE if n in seen and (seen[n].presence or 0.0) >= 0.9 and top.expects.get(n, 0.0) >= 0.6
    ]
    if shown:
        how = f"mend what the inside shows ({seen[shown[0]].text}), then send the same prompts again"
        kind, expected, otherwise = "cure", "nothing lost", "as before"
    else:
        how = top.decisive
        kind, expected, otherwise = "decisive test", "as it predicts", "not"
    decisive = NextTest(f"the {kind} of {top.code}", how, {top.code: expected, "any other class": otherwise}, 1.0)
    useful = [t for t in found if t.power > 0.004][:4]
    return [*useful, decisive] if useful else [decisive]


def _expectation(odds: float, feature: str) -> str:
    words = feature.replace("_", " ")
    return f"{words} expected" if odds >= 0.5 else f"{words} possible" if odds >= 0.2 else f"no {words}"


def missing(seen: Mapping[str, Feature]) -> list[str]:
    """What the table could not show, with the classes that hang on it."""
    out = []
    for test in TESTS:
        if any(name in seen for name in test.shows):
            continue
        codes = [s.code for s in SIGNATURES if any(s.expects.get(name, 0) >= 0.6 for name in test.shows)]
        if codes:
            out.append(f"{test.title} ({', '.join(codes)})")
    return out
