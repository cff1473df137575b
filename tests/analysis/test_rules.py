"""What separates two classes: one observable each, present for the one and absent for the other."""

import numpy as np
import pandas as pd
import pytest
from needlework.analysis.diagnosis import diagnose
from needlework.analysis.features import extract
from needlework.analysis.second_cause import clear_signs, rest_of
from needlework.analysis.signatures import BY_CODE
from needlework.analysis.view import View, settings
from simulator import CONFIG, battery, simulate

TINY = {"topk": 128, "ratio": 4, "window": 32, "page": 64, "chunk": 768}


def rows(lengths, hit, **more) -> pd.DataFrame:
    """Plain cold trials of these lengths; `hit(length, i)` says whether trial i is right."""
    lengths = list(lengths)
    right = [bool(hit(n, i)) for i, n in enumerate(lengths)]
    base = {
        "probe": "recall",
        "arm": "single",
        "prompt_tokens": lengths,
        "outcome": ["exact" if r else "refusal" for r in right],
        "needle_token": [n // 2 for n in lengths],
        "cached_tokens": 0,
        "cache": "cold",
        "concurrency": 1,
        "turn": 1,
        "prompt_sha": [f"{n}/{i}" for i, n in enumerate(lengths)],
    }
    return pd.DataFrame(base | more)


def presence(frame: pd.DataFrame, name: str, config=TINY) -> float:
    return extract(frame, {"config": config})[name].presence or 0.0


LADDER = [n for n in (110, 170, 300, 490, 540, 1000, 2700) for _ in range(3)] * 2


def test_short_prompts_that_a_found_edge_explains_are_no_short_loss():
    """F05 with a budget below the configured one against F20: prompts under 512 tokens miss in both, an edge in one."""
    edge = rows(LADDER, lambda n, i: n < 200)
    everywhere = rows(LADDER, lambda n, i: i % 4 == 0)
    assert presence(edge, "edge") > 0.9 and presence(edge, "short_loss") < 0.1
    assert presence(everywhere, "short_loss") > 0.9 and presence(everywhere, "edge") < 0.5


SIGNS = ("past_budget", "far_lost", "worse_than_blind", "below_budget")
CHOICES = {  # seen hits at a length -> signs beside the budget of 512: past it, far beyond it, below it
    "an index that says nothing": (lambda n, i: n <= 512 or (n <= 600 and i % 3), set(SIGNS[:3])),
    "a list that is cut at 128": (lambda n, i: n < 200, set(SIGNS)),
    "a blind choice": (lambda n, i: i % 6 < 6 * 512 / n, set()),
    "candidates overflow at 1,024": (lambda n, i: n <= 1024, {"far_lost"}),
    "scores that still say something": (lambda n, i: n <= 1024 or i % 2, set()),
    "nothing is lost": (lambda n, i: True, set()),
}


@pytest.mark.parametrize("what", CHOICES)
def test_misses_beside_the_budget_part_the_faults_of_the_selection(what):
    """F01, F05, F04 and F06 all lose with length; where they begin and what is left far out differs."""
    hit, expected = CHOICES[what]
    lengths = [n for n in (110, 170, 300, 490, 540, 600, 1000, 1400, 2700, 4600) for _ in range(6)]
    found = extract(rows(lengths, hit), {"config": TINY})
    assert {name for name in SIGNS if (found[name].presence or 0.0) >= 0.5} == expected


@pytest.mark.parametrize(("differ", "low", "high"), [(0, 0, 0), (1, 0, 0.1), (4, 0.9, 1)])
def test_a_prompt_that_changes_its_answer_alone_is_chance_of_the_server(differ, low, high):
    """F03 and F04 lose by chance (page, thread), F05, F06 and F20 by content: the same prompt twice tells."""
    lengths = [n for n in range(400, 1400, 100) for _ in range(2)]
    frame = rows(lengths, lambda n, i: not (i % 2 and i // 2 < differ), prompt_sha=[str(n) for n in lengths])
    assert low <= presence(frame, "flips_serial") <= high


TWICE = [n for n in (200, 300, 400, 1400, 1800, 2400, 4600) for _ in range(4)]


@pytest.mark.parametrize(
    ("hit", "low", "high"),
    [
        (lambda n, i: n <= 400 or i // 2 % 2, 0.95, 1),  # half of the long ones, each the same again
        (lambda n, i: n <= 400, None, None),  # a step: nothing that could change
        (lambda n, i: n <= 400 or i % 2, None, None),  # they change: flips_serial says so
    ],
)
def test_partial_loss_that_repeats_itself_is_no_chance(hit, low, high):
    """F06 against F04: both lose some of the long prompts, one by what they say, the other by the order of arrival."""
    found = extract(rows(TWICE, hit, prompt_sha=[str(i // 2) for i in range(len(TWICE))]), {"config": TINY})
    if low is None:
        assert "repeats_agree" not in found
    else:
        assert low <= found["repeats_agree"].presence <= high
    assert (found["flips_serial"].presence > 0.9) == bool(hit(2400, 0) != hit(2400, 1))


def test_a_constant_is_read_off_a_step():
    lengths = [n for n in (300, 500, 700, 1000, 1400, 1800, 2700, 4600) for _ in range(6)]
    step, slope = (rows(lengths, lambda n, i, k=k: n <= 1000 or i % 6 < k) for k in (0, 2))
    assert presence(step, "edge_at_stash") > 0.7 and presence(slope, "edge_at_stash") < 0.5
    assert presence(slope, "edge") > 0.9 and presence(slope, "soft_fall") > 0.9


def test_a_ceiling_loses_nothing_below_itself():
    needle = np.tile([100, 300, 500, 1500, 2500], 10)
    below = {"prompt_tokens": 3000, "needle_token": needle}
    whole = rows(needle, lambda n, i: n <= 500, **below)
    leaky = rows(needle, lambda n, i: n <= 500 and i % 4, **below)
    assert presence(whole.assign(prompt_tokens=2800 + needle % 7), "position_ceiling") > 0.9
    assert presence(leaky.assign(prompt_tokens=2800 + needle % 7), "position_ceiling") < 0.5


def test_nothing_beyond_the_budget_is_a_face_of_several_classes():
    """F01, F04 and F06 can each leave nothing beyond the budget: no one of them is named with more than weak evidence,
    while a loss that begins later or keeps a share is told apart."""
    lengths = [n for n in (110, 170, 300, 490, 540, 600, 1000, 1400, 2700, 4600) for _ in range(6)]
    found = diagnose(rows(lengths, lambda n, i: n <= 512), {"config": TINY})
    assert {"F01", "F04", "F06"} <= {r.code for r in found.ranked[:4]} and found.confidence == "weak"
    share = {r.code: r.posterior for r in found.ranked}
    assert share["F01"] < 0.75 and share["F04"] > 0.05 and share["F06"] > 0.05
    partial = diagnose(rows(lengths, lambda n, i: n <= 1000 or i % 2), {"config": TINY})
    assert partial.ranked[0].code == "F06"


def test_faces_of_a_class_share_its_weight():
    for signature in BY_CODE.values():
        assert abs(sum(share for share, _ in signature.faces) - 1) < 1e-9 and signature.faces[0][0] > 0.5
        assert signature.faces[0][1] is signature and all(face.code == signature.code for _, face in signature.faces)


def test_arms_are_compared_where_the_place_decides():
    """F14 beyond its second chunk against F02: few needles lie there, four in the other arm's prompts."""
    needle = np.tile([200, 400, 600, 800, 1000, 1200, 1500, 2200], 6)
    pair = rows([2700] * 48, lambda n, i: needle[i] <= 1536, needle_token=needle, arm="pd")
    pair["prompt_tokens"] += needle % 7
    few = {"needle_token": [300, 1400, 1800, 2000, 2300, 2500], "probe": "arms"}
    whole = rows([2700] * 6, lambda n, i: True, arm="combined", **few)
    lost = rows([2700] * 6, lambda n, i: few["needle_token"][i] <= 1536, arm="pd", **few)
    assert presence(pd.concat([pair, whole, lost], ignore_index=True), "pd_loss") > 0.85
    assert presence(pd.concat([pair, lost.assign(arm="combined"), lost], ignore_index=True), "pd_loss") < 0.1


def test_requests_in_flight_together_share_a_pass():
    """F08: alone, the last chunk begins at a known place; in a crowd or beside an abort it does not, and its losses
    there are no second cause."""
    needle = np.tile([100, 700, 780], 16)
    alone = rows([800, 1000, 1300, 1500] * 12, lambda n, i: needle[i] >= 768, needle_token=needle)
    beside = rows([1000] * 24, lambda n, i: i % 2, needle_token=900, probe="abort", label="after/prefill/call")
    short = rows([300] * 24, lambda n, i: True)
    frame = pd.concat([alone, beside.assign(concurrency=2), short], ignore_index=True)
    seen = extract(frame, {"config": TINY})
    assert seen["last_chunk_only"].presence > 0.9 and "abort_loss" not in seen
    assert diagnose(frame, {"config": TINY}).causes == ("F08",)


def crowd(lost: dict[int, int]) -> pd.DataFrame:
    parts = [rows([300] * 24, lambda n, i: True)]
    parts += [
        rows([300] * 12, lambda n, i, k=k: i >= k, concurrency=size, probe="echo", prompt_sha=f"crowd {size}")
        for size, k in lost.items()
    ]
    return pd.concat(parts, ignore_index=True)


def test_only_padded_batches_lose_by_padding():
    """F17 against any other loss under load: two in flight fill their batch to the end, three do not."""
    assert presence(crowd({2: 0, 3: 5, 6: 4}), "padded_loss") > 0.9
    assert presence(crowd({2: 5, 3: 5, 6: 4}), "padded_loss") < 0.1 < presence(crowd({2: 5, 3: 5, 6: 4}), "load_loss")


def test_what_the_client_cut_off_is_no_budget():
    cut = rows([300] * 20, lambda n, i: True)
    cut.loc[:3, "outcome"] = "cut"
    assert presence(cut, "budget") > 0.9
    assert presence(cut.assign(aborted=[*["by disconnect"] * 4, *[None] * 16]), "budget") == 0


@pytest.mark.parametrize(
    ("cold_misses", "warm_misses", "low", "high"), [(0, 6, 0.99, 1), (0, 1, 0, 0.1), (0, 0, 0, 0), (12, 6, 0.5, 0.7)]
)
def test_few_repetitions_are_enough_where_everything_cold_is_right(cold_misses, warm_misses, low, high):
    """What is left of a comb with F09 beside it: six prompts, right when cold, lost when they come from the cache."""
    same = {"prompt_sha": [f"pair {i}" for i in range(6)], "probe": "residues"}
    cold = rows(range(322, 328), lambda n, i: True, **same)
    warm = rows(range(322, 328), lambda n, i: i >= warm_misses, cache="warm", cached_tokens=320, **same)
    plain = rows([200] * 40, lambda n, i: i >= cold_misses)
    assert low <= presence(pd.concat([plain, cold, warm], ignore_index=True), "warm_loss") <= high


@pytest.mark.parametrize(("one", "two"), [("F02", "F09"), ("F07", "F17"), ("N1", "F17")])
def test_two_causes_of_different_kinds_are_both_said(one, two):
    result = diagnose(simulate(one, 1, second=two), {"config": CONFIG})
    assert result.verdict == "two causes" and set(result.causes) == {one, two} == {r.code for r in result.ranked[:2]}


def test_what_the_first_cause_explains_is_taken_away_whole():
    """The rest of a table with one fault is healthy; rows go by condition, right or wrong, and never by outcome."""
    frame = simulate("F02", 3)
    seen = {name: f for name, f in extract(frame, {"config": CONFIG}).items() if f.presence is not None}
    rest = rest_of(frame, {"config": CONFIG}, BY_CODE["F02"], seen)
    assert rest is not None and rest.kinds == {"length"} and not clear_signs(rest, BY_CODE["F02"])
    view = View(frame, settings({"config": CONFIG}))
    assert rest.taken == int((~(view.needle <= seen["position_ceiling"].value[0])).sum())
    assert rest.taken > int((view.hit == 0).sum()) * 0.8 and (rest.features["loss"].presence or 0) < 0.5


def test_where_everything_is_lost_nothing_is_said_of_a_second_cause():
    asks = [{**a, "length": a["length"] + 60_000} for a in battery(1)]
    result = diagnose(simulate("F05", 1, asks=asks, second="F09"), {"config": CONFIG})
    assert result.verdict != "two causes"
    everywhere = rows(LADDER, lambda n, i: False)
    seen = {name: f for name, f in extract(everywhere).items() if f.presence is not None}
    assert rest_of(everywhere, None, BY_CODE["F20"], seen) is None
    assert np.isfinite(diagnose(everywhere).ranked[0].posterior)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (["kv changed scales", "kv stale page"], {"page_stale"}),  # another owner's page has other scales
        (["kv changed scales", "kv stale page", "scale-out-of-range"], {"page_scale"}),  # F20: no owner writes those
        (["row-format", "kv stale page", "scale-out-of-range"], {"page_layout"}),  # F01: both are its shadow
    ],
)
def test_one_page_finding_is_the_shadow_of_another(pages, expected):
    found = extract(rows([300] * 12, lambda n, i: True), {"pages": pages})
    assert {n for n in ("page_layout", "page_scale", "page_stale") if found[n].presence} == expected
