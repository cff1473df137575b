"""Prompts: exact to the token, reproducible, free of accidental needles; mismatch is loud."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from random import Random

import pytest
from mock_endpoint import mock_endpoint, render, tokens_of
from needlework.probes import recall
from needlework.probes.bench import prompts, words
from needlework.probes.bench.prompts import LengthError, LineCounts, PromptSpec, Ratio, build, facts_of


def unique_share(text, n=8):
    """Share of distinct n-grams of words: 1 is text without repetition, near 0 one block repeated."""
    parts = text.split()
    grams = [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
    return len(set(grams)) / len(grams)


async def count(messages):
    return len(render(messages))


def make(spec, counter=count, ratio=None, **options):
    return asyncio.run(build(spec, counter, ratio or Ratio(), **options))


@pytest.mark.parametrize("tokens", [200, 777, 1024, 5000, 20001])
@pytest.mark.parametrize("genre", ["mixed", *words.GENRES])
def test_length_is_exact(tokens, genre):
    prompt = make(PromptSpec(tokens, 0.4, genre, seed=tokens))
    assert prompt.exact and prompt.counted_tokens == len(render(prompt.messages)) == tokens


def test_text_depends_on_the_specification_alone():
    spec = PromptSpec(3000, 0.7, seed=5)
    ratios = Ratio(), Ratio(2.0, 0), Ratio(9.0, 50)
    assert len({make(spec, ratio=r).sha256 for r in ratios}) == 1
    assert make(replace(spec, seed=6)).sha256 != make(spec).sha256


def test_every_consecutive_length_and_fixed_distances():
    for anchor, far in (("from_start", "before_question"), ("from_end", "start")):
        texts = [make(PromptSpec(1000 + i, seed=3, pad=far, **{anchor: 200})) for i in range(70)]
        assert [p.counted_tokens for p in texts] == list(range(1000, 1070))
        place = [p.text.index(p.facts[0].sentence) for p in texts]
        rest = [len(p.text) - at for p, at in zip(texts, place, strict=True)]
        fixed, free = (place, rest) if anchor == "from_start" else (rest, place)
        assert len(set(fixed)) == 1 and len(set(free)) > 20


def test_needle_stands_where_it_should_and_its_token_is_counted():
    for depth in (0.0, 0.25, 0.5, 1.0):
        prompt = make(PromptSpec(4000, depth, seed=9))
        before = prompt.text[: prompt.text.index(f" {prompt.expected}")]
        assert prompt.needle_token == len(tokens_of(before))
        assert abs(prompt.needle_token / 4000 - depth) < 0.06


def test_first_block_differs_between_any_two_prompts():
    heads = {make(PromptSpec(n, d, seed=s)).text[:16] for n in (500, 501) for d in (0.1, 0.2) for s in (0, 1)}
    assert len(heads) == 8


@pytest.mark.parametrize("genre", ["mixed", *(g for g in words.GENRES if g != "noise")])
def test_records_hold_no_needle_and_hardly_repeat(genre):
    text = "".join(prompts.lines(genre, "x", 4000))
    assert not re.search(r"secret|code for|\d{5}|\bis \d", text)
    assert unique_share(text) > 0.65 and unique_share(text[:40_000]) > 0.8
    units = prompts.lines(genre, "x", 4000)
    sizes = [len(tokens_of(u)) for u in units]
    assert min(sizes) >= 15 and max(sizes) <= 60
    assert len(tokens_of("".join(units[:200]))) == sum(sizes[:200])  # units add up
    assert unique_share("".join(prompts.lines("noise", "x", 400))) < 0.01  # the named worst case


def test_a_server_that_cuts_prompts_does_not_make_them_grow():
    """It counts 255 and 256 tokens whatever it is sent: as if a token had thousands of characters."""
    ratio = Ratio()
    ratio.learn("x" * 4_000, 255)
    ratio.learn("x" * 40_000, 256)
    assert ratio.length(8192) <= 16 * 8192


@pytest.mark.parametrize("kind", words.KINDS)
def test_values(kind):
    r = Random(1)
    drawn = [words.draw(kind, r) for _ in range(300)]
    assert len(set(drawn)) > 250
    for value in drawn[:50]:
        other = words.neighbour(value, r)
        assert other != value and len(other) == len(value)
        if kind.startswith("digits"):
            assert value[-1] == words.check_digit(value[:-1]) and other[-1] != words.check_digit(other[:-1])


def test_distractors_needles_and_styles():
    spec = PromptSpec(1500, 0.5, needles=3, ask=1, distractors=4, seed=2)
    facts, question, expected = facts_of(spec)
    assert [f.role for f in facts] == ["needle"] * 3 + ["distractor"] * 4
    assert expected == facts[1].value and facts[1].key in question
    assert len({f.value for f in facts}) == 7
    text = make(spec).text
    assert all(text.count(f.sentence) == 1 for f in facts)
    assert text.index(facts[0].sentence) < text.index(facts[1].sentence) < text.index(facts[2].sentence)
    for style in ("relation", "chain"):
        styled = make(replace(spec, style=style, distractors=0))
        assert styled.facts[1].key not in styled.question and styled.expected in styled.text


def test_controls():
    spec = PromptSpec(900, 0.5, seed=4)
    value = facts_of(spec)[2]
    absent = make(replace(spec, control="absent"))
    assert absent.expected is None and value not in absent.text and absent.needle_token is None
    at_end = make(replace(spec, control="at_end"))
    assert at_end.text.index(value) > 0.6 * len(at_end.text)
    asked = make(replace(spec, control="in_question"))
    assert value in asked.question and value not in asked.text[: asked.text.rindex("\n\n")]


def test_bad_specifications_are_refused():
    for wrong in ({"depth": 1.2}, {"genre": "poems"}, {"needle": "emoji"}, {"pad": "x"}, {"needles": 1, "ask": 1}):
        with pytest.raises(ValueError):
            PromptSpec(100, **wrong)
    with pytest.raises(ValueError, match="too few"):
        make(PromptSpec(40))


def test_a_counter_that_cannot_be_met_is_loud():
    async def coarse(messages):  # counts in sevens: most lengths do not exist
        return (len(render(messages)) // 7) * 7

    with pytest.raises(LengthError, match="exactly 1001"):
        make(PromptSpec(1002 - 1 + 3 - 3, seed=1), counter=lambda m: _plus(coarse(m)))
    assert abs(make(PromptSpec(1001, seed=1), counter=coarse, tolerance=7).counted_tokens - 1001) <= 7


async def _plus(counting):
    return 2 * await counting  # even multiples of seven only: 1001 is odd


def test_estimate_without_a_tokenizer_learns_from_usage():
    ratio = Ratio()
    first = asyncio.run(build(PromptSpec(256, seed=1), None, ratio))
    assert not first.exact
    for spec in (PromptSpec(256, seed=1), PromptSpec(1024, seed=2)):
        prompt = asyncio.run(build(spec, None, ratio))
        ratio.learn(prompt.text, len(render(prompt.messages)))
    later = asyncio.run(build(PromptSpec(8000, seed=3), None, ratio))
    assert abs(len(render(later.messages)) - 8000) < 250


def test_a_long_prompt_is_built_fast():
    text, _ = prompts.assemble(PromptSpec(128_000, seed=1), 10, 0)  # warm the word lists
    started = time.perf_counter()
    text, _ = prompts.assemble(PromptSpec(128_000, 0.5, seed=77), 3800, 20)
    assert len(tokens_of(text)) > 100_000
    assert time.perf_counter() - started < 2  # 0.1 s when idle; the benchmark has the real limit


def test_many_prompts_are_counted_in_few_requests():
    """Lines add up: all lengths exact by 0.3 counts a trial or fewer; one count in seven fails and is asked again."""
    for concurrency, fails in ((1, lambda n: False), (8, lambda n: n % 7 == 6)):
        with mock_endpoint("sglang", count_fails=fails) as mock:
            result = recall(mock.base_url, lengths=(300, 512, 900), depths=(0.1, 0.5), repeats=16,
                            concurrency=concurrency, controls=False)  # fmt: skip
        trials = result.trials
        assert (trials["outcome"] == "exact").all() and len(trials) == 96
        assert (trials["counted_tokens"] == trials["target_tokens"]).all()
        assert (trials["prompt_tokens"] == trials["target_tokens"]).all()
        assert (trials["counted_by"] == "lines").sum() >= 93 and mock.counts <= 0.3 * 96 + 30


def test_lines_that_do_not_add_up_are_counted_whole():
    async def nothing(text: str) -> None:
        return None

    assert not asyncio.run(LineCounts(nothing).begin())
    with mock_endpoint("sglang") as mock:  # sums that are wrong by a constant that moves: the whole count decides
        whole, LineCounts.count = LineCounts.count, lambda self, text: asyncio.sleep(0, len(text) // 7)
        try:
            trials = recall(mock.base_url, lengths=(300, 400), depths=(0.5,), repeats=3, controls=False).trials
        finally:
            LineCounts.count = whole
    assert (trials["counted_tokens"] == trials["prompt_tokens"]).all() and set(trials["counted_by"]) == {"tokenize"}


def test_without_a_tokenizer_only_what_lies_outside_of_an_interval_was_cut():
    with mock_endpoint("openai") as mock:
        whole = recall(mock.base_url, lengths=(256, 512, 2048, 8192), depths=(0.1, 0.9), repeats=3).trials
        mock.defects.truncate_to = 4000
        cut = recall(mock.base_url, lengths=(512, 2048, 8192), depths=(0.1, 0.9), repeats=2).trials
    assert (
        whole["counted_tokens"].isna().all() and whole["sent_low"].notna().all() and whole["length_note"].isna().all()
    )
    assert ((whole["sent_low"] <= whole["prompt_tokens"]) & (whole["prompt_tokens"] <= whole["sent_high"])).all()
    assert (cut["length_note"].notna() == (cut["target_tokens"] == 8192)).all()
