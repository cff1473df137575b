"""Ten outcomes, each with an answer that must get it and look-alikes that must not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from needlework.analysis.trials import OUTCOMES
from needlework.probes.bench.grade import edit_distance, grade, value_logprob
from needlework.probes.bench.prompts import Fact
from needlework.serving import Reply

FACTS = (
    Fact("the a", "81392", "needle", 0.5, ""),
    Fact("the b", "55518", "needle", 0.8, ""),
    Fact("the c", "81393", "distractor", 0.2, ""),
)


def outcome(text, finish="stop", reasoning="", expected="81392", elsewhere=None):
    return grade(Reply(text, reasoning, finish), expected, FACTS, elsewhere).outcome


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("81392", "exact"),
        ("The value is 81392.", "exact"),
        ("81,392", "exact"),
        ("81 392", "exact"),
        ("<think>maybe 55518?</think>81392", "exact"),
        ("maybe 55518?</think>\n81392", "exact"),
        ("813925", "near"),
        ("181392", "near"),
        ("81329", "near"),
        ("8139", "near"),
        ("55518", "other_needle"),
        ("81393", "distractor"),
        ("81392 or 55518", "other_needle"),
        ("I have no prior context for that.", "refusal"),
        ("I don't see a secret code in the notes.", "refusal"),
        ("", "empty"),
        ("   \n", "empty"),
        ("Bananas are yellow.", "garbage"),
        ("10742", "garbage"),
        ("!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", "garbage"),
        ("<think>it was 81392", "reasoning_only"),
    ],
)
def test_outcomes(text, expected):
    assert outcome(text) == expected
    assert expected in OUTCOMES


def test_a_loop_without_end_is_a_miss_and_not_a_cut_answer():
    lost = "The code for the mill is:\n\n"  # as SmolLM2-135M answers at 7,000 tokens
    assert outcome(lost * 3, finish="length") == "garbage"
    assert outcome(lost * 2 + "The answer is:\n\nThe code for the", finish="length") == "garbage"
    assert outcome(lost + "The code is:\n\n" * 4 + "The co", finish="length") == "garbage"
    assert outcome(lost * 2 + "The answer is in the", finish="length") == "cut"  # twice is no loop
    assert outcome("One.\nTwo.\nThree.\nThe count goes on", finish="length") == "cut"


def test_cut_and_reasoning_only_are_no_measurement():
    assert outcome("", finish="length") == "cut"
    assert outcome("Let me think about the", finish="length") == "cut"
    assert outcome("!" * 64, finish="length") == "garbage"  # a loop is a finding, not a short budget
    assert outcome("81392 as the notes say, and", finish="length") == "exact"
    assert outcome("", reasoning="the code is 81392", finish="length") == "reasoning_only"
    assert outcome("81392", reasoning="hm") == "exact"


def test_thoughts_are_taken_out_in_one_pass():
    assert outcome("a <think>12345</think>b <think>c</think> 81392") == "exact"
    assert outcome("<think>81392</think> I do not know.") == "refusal"
    began = time.process_time()
    assert outcome("<think>" * 30_000 + "81392") == "reasoning_only"
    assert time.process_time() - began < 1


def test_foreign_content_is_named():
    result = grade(Reply("It is 70707."), "81392", FACTS, {"70707": "abc123"})
    assert (result.outcome, result.answered_from) == ("other_needle", "trial:abc123")
    assert grade(Reply("55518"), "81392", FACTS).answered_from == "needle@0.80"


def test_absent_fact():
    assert outcome("no prior context", expected=None) == "refusal"
    assert outcome("55518", expected=None) == "other_needle"


def test_score():
    tokens = (("The ", -0.1), ("8", -0.5), ("1392", -0.5), (".", -3.0))
    reply = Reply("The 81392.", token_logprobs=tokens)
    assert value_logprob(reply, "81392") == -1.0
    assert grade(reply, "81392").score == pytest.approx(0.3679, abs=1e-3)
    assert grade(Reply("81392"), "81392").score == 1.0
    near, far = grade(Reply("81399"), "81392").score, grade(Reply("00000"), "81392").score
    assert far < near < 0.5


def test_words_and_uuids():
    assert grade(Reply("the answer: Amber Falcon"), "amber falcon").outcome == "exact"
    assert grade(Reply("amber falcons"), "amber falcon").outcome == "near"
    uuid = "1b4e28ba-2fa1-4d2a-a83f-0016d3cca427"
    assert grade(Reply(uuid.upper()), uuid).outcome == "exact"
    assert grade(Reply(uuid + "-9"), uuid).outcome != "exact"


def test_edit_distance_counts_swaps_once():
    assert edit_distance("12345", "12354") == 1
    assert edit_distance("abc", "") == 3 and edit_distance("", "") == 0


def test_values_in_every_script():
    """Right and wrong answers of models in many languages; the wrong ones hold another value, a longer one, several, or
    hold it in a thought."""
    table = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").open(encoding="utf-8")]
    assert len({row["script"] for row in table}) >= 20
    assert min(sum(row["right"] for row in table), sum(not row["right"] for row in table)) >= 200
    wrong = [
        (row["script"], row["value"], row["answer"])
        for row in table
        if (grade(Reply(row["answer"], "", "stop"), row["value"]).outcome == "exact") != row["right"]
    ]
    assert not wrong


def test_an_answer_that_stands_in_the_thoughts_alone():
    seen = grade(Reply("", "so it is 81392", "stop"), "81392")
    assert (seen.outcome, seen.in_reasoning) == ("reasoning_only", True)
    assert grade(Reply("", "hm", "stop"), "81392").in_reasoning is False
    assert grade(Reply("81392", "", "stop"), "81392").in_reasoning is None


def test_long_and_odd_answers_cost_little():
    for text in (
        "<think></think>" * 60_000,
        "1 " * 500_000,
        "[" * 1_000_000,
        "*1*" * 300_000,
        "٣" * 1_000_000,
        "a-" * 500_000,
    ):
        began = time.process_time()
        assert outcome(text) != "exact"
        assert time.process_time() - began < 5, text[:20]
