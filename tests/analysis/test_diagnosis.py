import time

import numpy as np
import pandas as pd
import pytest
from needlework.analysis.diagnosis import Evidence, Ranked, _verdict, diagnose
from needlework.analysis.features import Feature, extract
from needlework.analysis.next_tests import TESTS
from needlework.analysis.signatures import BACKGROUND, BY_CODE, SIGNATURES
from needlework.analysis.view import best_split, settings
from simulator import CLASSES, CONFIG, battery, simulate


@pytest.mark.parametrize("code", CLASSES)
def test_each_class_is_found_from_outside(code):
    result = diagnose(simulate(code, 1), {"config": CONFIG})
    assert code in [r.code for r in result.ranked[:3]]
    assert result.verdict in ("named", "not proven") and str(result)  # one fault is never two causes


def test_healthy_is_called_healthy():
    for seed in (1, 2, 3):
        result = diagnose(simulate("healthy", seed), {"config": CONFIG})
        assert result.verdict == "healthy" and result.ranked[0].code == "healthy" and "Healthy" in str(result)


def test_two_causes_are_both_named():
    result = diagnose(simulate("F14", 1, second="F09"), {"config": CONFIG})
    assert result.verdict == "two causes" and set(result.causes) == {"F14", "F09"}
    assert {r.code for r in result.ranked[:2]} == {"F14", "F09"} and "Two causes" in str(result)


def test_inside_evidence_decides_between_twins():
    frame = simulate("F01", 2)
    digest = diagnose(frame, {"config": CONFIG, "pages": ["layout: scales read as codes"], "logs": {"truncated": 0}})
    assert digest.ranked[0].code == "F01" and digest.ranked[0].posterior > 0.9
    assert (
        diagnose(frame[frame["arm"] == "single"], {"flags": {"--disable-cuda-graph": False}, "config": CONFIG})
        .ranked[0]
        .code
        != "F17"
    )


@pytest.mark.parametrize(
    "columns", [["outcome"], ["prompt_tokens", "outcome"], ["target_tokens", "score"], ["arm", "answer"], []]
)
def test_few_columns_give_an_answer_with_its_limits(columns):
    frame = simulate("F01", 3).assign(score=lambda f: (f["outcome"] == "exact").astype(float))[columns]
    result = diagnose(frame)
    assert result.confidence != "strong" and result.missing and str(result)


def test_ten_rows_one_arm_and_contradiction_prove_nothing():
    ten = pd.DataFrame({"prompt_tokens": range(1000, 11000, 1000), "outcome": ["exact"] * 2 + ["garbage"] * 8})
    result = diagnose(ten, {"config": CONFIG})
    assert result.verdict == "not proven" and "too few" in str(result)
    assert diagnose(ten.iloc[:2].assign(outcome="exact")).verdict == "not proven"
    both = pd.concat([ten.assign(outcome="exact"), ten.assign(outcome="garbage")] * 3)
    assert diagnose(both, {"config": CONFIG}).confidence != "strong"
    assert diagnose(pd.DataFrame()).verdict == "not proven"
    nothing = pd.DataFrame({"outcome": ["transport"] * 40})
    assert "measured nothing" in str(diagnose(nothing))
    with pytest.raises(ValueError, match="table of trials"):
        diagnose([1])
    with pytest.raises(ValueError, match="mapping"):
        diagnose(ten, 7)


def test_next_tests_say_what_each_hypothesis_expects_and_were_not_run():
    frame = simulate("F14", 1, asks=[a for a in battery(1) if a["probe"] in ("recall", "cliff", "arms")])
    result = diagnose(frame, {"config": CONFIG})
    assert len(result.next_tests) >= 2
    assert all(len(t.outcomes) >= 2 for t in result.next_tests)
    titles = {t.title for t in result.next_tests}
    assert "PD against combined" not in titles and any("warm" in spot for spot in result.missing)


def test_an_instrument_that_ran_is_not_proposed_again():
    asked = {"warm proved by cached tokens", "locate and walk the edge", "residue scan", "concurrency echo"}
    assert not asked & {t.title for t in diagnose(simulate("F14", 1), {"config": CONFIG}).next_tests}
    few = simulate("F14", 1, asks=[a for a in battery(1) if a["probe"] == "recall"])
    assert asked & {t.title for t in diagnose(few, {"config": CONFIG}).next_tests}, "nothing but recall ran"


def test_once_the_decisive_finding_is_there_the_cure_is_next():
    outside, inside = ({"config": CONFIG, **more} for more in ({}, {"digests": {"kv": True, "index": False}}))
    frame = simulate("F14", 1)
    assert diagnose(frame, outside).next_tests[-1].title == "the decisive test of F14"
    last = diagnose(frame, inside).next_tests[-1]
    assert last.title == "the cure of F14" and "index" in last.how and last.outcomes["F14"] == "nothing lost"


def test_large_table_is_fast():
    frame = pd.concat([simulate("F05", s) for s in range(2)] * 11, ignore_index=True).iloc[:10_000]
    frame["seed"] = np.arange(len(frame))
    diagnose(frame.iloc[:50])
    start = time.process_time()
    diagnose(frame, {"config": CONFIG})
    assert len(frame) == 10_000 and time.process_time() - start < 2.0


def test_hostile_text_is_escaped_and_bounded():
    frame = simulate("F01", 1).assign(answer="<img src=x onerror=alert(1)>" * 400, arm="<b>")
    frame.attrs["notes"] = ["<script>"]
    html = diagnose(frame)._repr_html_()
    assert "<img" not in html and "<script>" not in html and len(html) < 20_000


def test_signatures_are_consistent():
    names = set(
        extract(
            simulate("F11", 1),
            {
                "config": CONFIG,
                "digests": {"index": False, "kv": True},
                "pages": ["x", "pages out of order"],
                "selected": {"indexer": 256},
                "logs": {"a": 1},
                "flags": dict.fromkeys(
                    ("graph", "draft", "radix", "chunk", "dtype", "topk", "serial", "wait", "combined"), True
                ),
            },
        )
    )
    known = names | set(BACKGROUND)
    assert SIGNATURES[0].code == "healthy" and len(BY_CODE) == 26
    for signature in SIGNATURES:
        assert all(set(face.expects) <= known for _, face in signature.faces), signature.code
        assert signature.decisive and (signature.code == "healthy" or signature.citations)
    assert all(set(test.shows) <= known for test in TESTS)


_ODD = (
    *(3, 3.5, True, -1, "text", b"bytes", float("nan"), object(), [1], [None], ["a"], (1, 2, 3), set()),
    *({1: 2}, {"a": "b"}, {"a": [1]}, {"a": None}, np.zeros(2), pd.Series([1.5]), pd.DataFrame({"a": [1]})),
    pd.DataFrame(),
)


@pytest.mark.parametrize("part", ["config", "digests", "pages", "placement", "logs", "flags"])
def test_malformed_evidence_is_told_in_one_sentence_or_used(part):
    frame, refused = simulate("F01", 1).iloc[:60], 0
    for odd in _ODD:
        try:
            assert str(diagnose(frame, {part: odd}))
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and repr(part) in str(error) and len(str(error)) < 200
    assert refused >= 5
    right = {"digests": {"a": False}, "pages": [], "placement": [(1, 1)], "logs": {"x": 0}, "flags": {}, "config": {}}
    assert str(diagnose(frame, {part: right[part]}))


def test_settings_that_are_no_numbers_are_left_out():
    odd = {
        "page_size": float("nan"),
        "top_k": "auto",
        "window": None,
        "ratio": [4, 0, "x"],
        "chunk": [0],
        "limit": 1e300,
    }
    assert settings({"config": odd})["config"] == {"ratio": [4]}
    assert settings({"config": {"sliding_window": [128, 128]}})["config"] == {"window": 128}


def test_odd_cells_give_an_answer():
    frame = simulate("F04", 2).iloc[:40]
    for column in frame.columns:
        odd = [None, [1], {"a": 1}, "x", float("inf"), -1, object()]
        mixed = [odd[i % len(odd)] for i in range(len(frame))]
        assert str(diagnose(frame.assign(**{column: mixed}), {"config": CONFIG}))


def test_a_table_of_cut_answers_points_at_the_budget():
    frame = simulate("healthy", 3).assign(outcome="cut", finish_reason="length")
    result = diagnose(frame, {"config": CONFIG})
    assert result.ranked[0].code == "N3" and result.measured == 0 and "measured nothing" in str(result)


def test_best_split_finds_a_step_and_nothing_in_noise():
    x = np.arange(40.0)
    split = best_split(x, (x < 20).astype(float))
    assert (split.low, split.high, split.top, split.bottom) == (19, 20, 1, 0)
    assert best_split(x, np.ones(40)) is None and best_split(x[:3], np.array([1, 0, 1.0])) is None
    assert settings({"page_size": 64, "max_model_len": 100})["config"] == {"page": 64, "context_limit": 100}


def test_what_an_indexer_selects_is_held_against_what_is_configured():
    frame = simulate("healthy", 3)
    for seen, presence in (({"indexer": 256, "other": 512}, 1.0), ({"indexer": 512}, 0.0)):
        found = extract(frame, {"config": {"topk": 512}, "selected": seen})["other_topk"]
        assert found.presence == presence and found.value == min(seen.values())
    assert "other_topk" not in extract(frame, {"selected": {"indexer": 256}})
    with pytest.raises(ValueError, match="'selected'"):
        extract(frame, {"selected": {"indexer": "all"}})


def test_a_handful_of_misses_is_neither_strong_health_nor_more_than_a_weak_name():
    n = np.linspace(400, 6400, 120).round()
    frame = pd.DataFrame({"prompt_tokens": n, "needle_token": n / 2, "outcome": "exact", "probe": "recall"})
    assert diagnose(frame, {"config": CONFIG}).confidence == "strong"
    stray = diagnose(frame.assign(outcome=["refusal" if i in (17, 60, 95) else "exact" for i in range(120)]))
    assert (stray.verdict, stray.confidence) == ("healthy", "moderate")
    seen = {"position_edge": Feature("position_edge", 1.0, "recall falls")}
    for weight, missed, confidence in ((1.0, 3, "weak"), (1.0, 4, "moderate"), (3.0, 3, "moderate")):
        ranked = (Ranked("F02", "unit", 0.75, 0.0, (Evidence("position_edge", "recall falls", weight),), ()),)
        assert _verdict(ranked, seen, 105, missed) == ("named", ("F02",), confidence)
