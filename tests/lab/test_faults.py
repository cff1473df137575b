"""Each planted fault breaks what its class predicts and leaves the rest alone; without faults the same questions are
right."""

from __future__ import annotations

import pytest
from needlework_lab.engine import Engine
from needlework_lab.faults import FAULTS, parse

from engines import QUESTION, REFUSAL, Pair, answer, ask, haystack, request, run, text

RIGHT = "81392"
SHORT, LONG = 60, 420  # tokens: below the budget of the selection (16 x 4), and far above it


def engine(*faults: str, **options) -> Engine:
    return Engine("tiny", faults=faults, **options)


def right(one, tokens: int, depth: float = 0.3, **options) -> bool:
    where = one.prefill if isinstance(one, Pair) else one
    prompt = haystack(where, tokens, depth)
    return (one.answer(prompt, **options) if isinstance(one, Pair) else answer(one, prompt, **options)) == RIGHT


@pytest.mark.parametrize("fault", ["F01", "F06:dims=120", "F08", "F04:stash=1"])
def test_right_below_the_budget_and_wrong_above(fault):
    planted = engine(fault)
    assert right(planted, SHORT) and not right(planted, LONG)


def test_a_smaller_budget_is_right_up_to_its_own_edge():
    planted = engine("F05", top_k=64)  # the indexer selects 64 entries, the attention reads 16: 64 tokens
    assert right(planted, SHORT) and not any(right(planted, LONG, depth) for depth in (0.1, 0.5))


def test_rotated_keys_are_lost_gradually():
    planted = engine("F06", top_k=128, chunk_tokens=1024)
    hits = [sum(right(planted, tokens, depth) for depth in (0.1, 0.3, 0.5)) for tokens in (600, 5000)]
    assert hits[0] == 3 and hits[1] < 3


@pytest.mark.parametrize("fault", ["F13", "F14"])
def test_only_the_pair_is_hit_and_only_above_the_budget(fault):
    pair = Pair(faults=(fault,))
    assert right(pair, SHORT) and pair.answer(haystack(pair.prefill, LONG, 0.5)) == REFUSAL
    assert right(engine(fault), LONG)


def test_what_came_with_the_first_chunk_is_still_found():
    pair = Pair(faults=("F14",))
    assert right(pair, LONG, 0.0) and not right(pair, LONG, 0.5)
    assert not right(Pair(faults=("F14:first_chunks=0",)), LONG, 0.5)


def test_v4_pair_forgets_as_in_the_report():
    """Needle at two thirds: right at 2,500 tokens, no prior context at 4,000, right in one engine."""
    pair = Pair("v4", faults=("F14",))
    assert right(pair, 2500, 0.66)
    assert pair.answer(haystack(pair.prefill, 4000, 0.66)) == REFUSAL
    assert right(Engine("v4", faults=("F14",)), 4000, 0.66)


def test_a_swallowed_failure_answers_as_if_nothing_had_been_said():
    pair = Pair(faults=("F16:every=2",))
    assert right(pair, SHORT) and not right(pair, SHORT + 20) and right(pair, SHORT)


def test_a_table_in_the_wrong_unit_has_an_absolute_ceiling():
    planted = engine("F02:divisor=64")  # four columns: 256 tokens
    assert right(planted, 700, 0.1) and not right(planted, 700, 0.6)


def test_a_wrapped_address_follows_the_page_not_the_prompt():
    prompt = haystack(engine(), LONG, 0.3)
    by_placement = {answer(engine("F03", page_seed=seed), prompt) for seed in range(4)}
    assert RIGHT in by_placement and len(by_placement) > 1


def test_a_comb_over_lengths():
    planted = engine("F07")
    prompts = ["x " * extra + haystack(planted, LONG, 0.2) for extra in range(4)]
    wrong = [request(planted, prompt) for prompt in prompts if answer(planted, prompt) != RIGHT]
    assert [len(one.tokens) % 4 for one in wrong] == [3]


def test_a_hit_with_a_stale_window_is_wrong_and_a_long_suffix_heals():
    planted = engine("F09")
    prompt = haystack(planted, LONG, 0.3)
    pad = (8 - len(request(planted, prompt).tokens)) % 64  # eight tokens past a page: the suffix cuts the question
    prompt = "x " * pad + prompt
    assert answer(planted, prompt) == RIGHT and answer(planted, prompt) != RIGHT
    assert answer(planted, prompt + "\n" + "x " * 150 + "\n" + QUESTION) == RIGHT


def test_a_poisoned_prefix_stays_until_a_flush():
    planted = engine("F10")
    prompt = haystack(planted, LONG, 0.3)
    planted.add(request(planted, prompt))
    for _ in range(8):  # past its seventh chunk, all of it in the tree
        planted.step()
    planted.abort(planted.running[0].rid)
    run(planted, [])
    assert answer(planted, haystack(planted, LONG, 0.3, "22222", seed=5)) == "22222"
    assert answer(planted, prompt) != RIGHT
    assert planted.flush_cache() and answer(planted, prompt) == RIGHT


def test_a_colliding_key_serves_somebody_elses_pages():
    planted = engine("F11:bits=2")
    prompts = [haystack(planted, 200, 0.1, f"{i}7777", seed=i) for i in range(8)]
    answers = [answer(planted, prompt, cache_salt=str(i)) for i, prompt in enumerate(prompts)]
    assert any(a != f"{i}7777" for i, a in enumerate(answers))
    assert ask(planted, prompts[0], cache_salt="new")[-1].cached_tokens > 0


def test_a_late_write_hits_a_bystander():
    planted = engine("F12:delay=12")
    planted.add(request(planted, haystack(planted, LONG, 0.3)))
    for _ in range(8):
        planted.step()
    planted.abort(planted.running[0].rid)
    bystander = haystack(planted, LONG, 0.3, "22222", seed=5)
    assert answer(planted, bystander) != "22222" and answer(planted, bystander, cache_salt="again") == "22222"


def test_padding_hits_batches_that_are_padded():
    for count, healthy in ((2, True), (3, False)):
        planted = engine("F17:pages=8", chunk_tokens=2048)
        requests = [request(planted, haystack(planted, 200, 0.3, f"{i}7777", seed=i)) for i in range(count)]
        out = run(planted, requests)
        assert all(text(out[one.rid]) == f"{i}7777" for i, one in enumerate(requests)) == healthy


def test_nan_reaches_lists_with_holes_only():
    planted = engine("F18")
    assert set(answer(planted, haystack(planted, SHORT, 0.3))) == {"\x00"} and right(planted, LONG)


def test_a_narrowed_scale_costs_some_answers_everywhere():
    planted = engine("F20:percent=40")
    hits = [right(planted, tokens, 0.1, cache_salt=str(tokens)) for tokens in range(150, 330, 30)]
    assert hits.count(False) > 0
    assert all(right(engine(), tokens, 0.1) for tokens in (150, 300))


def test_lookalikes():
    cut = engine("N1:limit=200")
    events = ask(cut, haystack(cut, LONG, 0.2))
    assert text(events) == REFUSAL and events[-1].prompt_tokens < 210
    capped = ask(engine("N3"), haystack(cut, 100, 0.3))
    assert capped[-1].finish_reason == "length" and text(capped) != RIGHT
    vacuous = engine("N4")
    assert [ask(vacuous, haystack(vacuous, 200, 0.3))[-1].cached_tokens for _ in range(2)] == [0, 0]
    weak = engine("N5:reach=200")
    assert right(weak, LONG, 0.9) and not right(weak, LONG, 0.1)
    rounding = engine("N2", chunk_tokens=2048)
    prompts = [haystack(rounding, 150, 0.3, f"{i}7777", seed=i) for i in range(2)]
    alone = [ask(rounding, prompt) for prompt in prompts]
    requests = [request(rounding, prompt) for prompt in prompts]
    together = run(rounding, requests)
    for i, one in enumerate(requests):
        assert text(together[one.rid]) == f"{i}7777"
        assert any(a.logprob != b.logprob for a, b in zip(alone[i], together[one.rid], strict=True))


def test_specifications():
    assert str(parse("F14:first_chunks=2")) == "F14:first_chunks=2" and parse("F14@severe").parameters == {
        "first_chunks": 0
    }
    for bad, message in (
        ("F99", "no fault"),
        ("F14:x=1", "no parameter"),
        ("F14:first_chunks=a", "type int"),
        ("F14@huge", "strength"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(bad)
    for fault in FAULTS.values():
        assert (
            fault.citations
            and len(fault.account) > 80
            and "default" in fault.strengths
            and fault.code in fault._repr_html_()
        )
