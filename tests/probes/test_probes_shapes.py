"""What a cliff search and a comparison make of shapes that are none of theirs: holes, combs, flips."""

import numpy as np
from needlework.probes import arms, cliff
from needlework.probes.bench.result import discordant


def row(tokens, found, **more):
    place = max(0, tokens - 256)
    outcome = "exact" if found else "garbage"
    place = {"prompt_tokens": tokens, "target_tokens": tokens, "needle_token": place}
    return {"probe": "cliff", "label": "ladder", "expected": str(50000 + tokens), "outcome": outcome, **place, **more}


def test_lengths_between_the_rungs_leave_no_wide_gap_and_differ_by_seed():
    ladder = cliff._ladder(256, 8192)
    one, two = cliff._between(ladder, 1), cliff._between(ladder, 2)
    assert one != two and len(one) == 16 and not set(one) & set(ladder)
    every = np.array(sorted([*ladder, *one]))
    assert (every[1:] / every[:-1]).max() < 1.4
    assert any(2000 < n < 3000 for n in one), "recall may be gone there"


def test_a_hole_and_a_comb_are_told_and_a_step_is_left_to_the_search():
    lengths = [*cliff._ladder(256, 8192), *cliff._between(cliff._ladder(256, 8192), 3), *range(300, 8000, 301)]
    assert not cliff._other_law([row(n, n < 3000) for n in lengths])
    assert not cliff._other_law([row(n, True) for n in lengths])
    comb = cliff._other_law([row(n, n % 4 != 3) for n in [*lengths, *range(401, 440)]])
    assert "modulo 4 is 3" in comb
    from needlework.analysis.cliff import Cliff
    from needlework.analysis.intervals import Interval

    none = Cliff("no cliff", 0, Interval(0, 0), 0, Interval(0, 0), 1, 0, 40, 256, 8192, Interval(0, 0))
    holed = [row(n, not 2000 < n < 3000) for n in lengths]
    assert cliff._describe(none, None, None, (), holed, "at depth 0.5")[1] == "finding"
    whole = [row(n, True) for n in lengths]
    assert cliff._describe(none, None, None, (), whole, "at depth 0.5")[1] == "healthy"


def compared(first, second, pairs, seed, flips=(0, 8)):
    r = np.random.default_rng(seed)
    found = [tuple(row(1000 + i, r.random() < p, wanted_cache="cold") for p in (first, second)) for i in range(pairs)]
    details = {**discordant(found), "aa": flips}
    return arms._describe(["one", "two"], found, details, "")


def test_a_twenty_point_difference_is_found_and_flips_are_not_accused():
    found = [compared(0.95, 0.75, 80, seed, flips=(1, 8))[1] for seed in range(40)]
    assert found.count("finding") >= 24
    equal = [compared(0.97, 0.97, 80, seed, flips=(1, 8)) for seed in range(40)]
    said = [verdict for _, verdict in equal]
    assert (
        said.count("finding") <= 1 and said.count("healthy") >= 30 and any("Alike within" in text for text, _ in equal)
    )
