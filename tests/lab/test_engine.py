"""The engine is real: answers come from the pages, and the same ones whatever the schedule, placement or temperature of
the cache. Log-probabilities agree within 0.02."""

from __future__ import annotations

import pytest
import torch
from needlework_lab.engine import Engine
from needlework_lab.types import Request, Sampling

from engines import NEEDLE, QUESTION, REFUSAL, Pair, answer, ask, haystack, request, run, text

TOLERANCE = 0.02
UUID = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
VALUE = "44-71"  # short: each token of an answer is a pass


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine("tiny")


def same(one, other) -> None:
    assert [e.token for e in one] == [e.token for e in other]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(one, other, strict=True)) < TOLERANCE


@pytest.mark.parametrize("value", ["81392", UUID, "deep blue sea", "/srv/data/v1.2/x.bin", "琥珀色", "4"])
@pytest.mark.parametrize("tokens", [60, 900])
def test_a_value_comes_back_as_it_was(tiny, value, tokens):
    events = ask(tiny, haystack(tiny, tokens, 0.3, value))
    assert text(events) == value
    assert events[-1].finish_reason == "stop" and events[-1].matched_stop == tiny.tokenizer.special["<|eos|>"]


@pytest.mark.parametrize(
    ("statement", "question", "value"),
    [
        ("My favourite colour is teal.", "What is my favourite colour?", "teal"),
        ("vault door: 4471-B", "Tell me the vault door.", "4471-B"),
        ('{"session_token": "ab12-cd34"}', "What is the session token?", "ab12-cd34"),
        ("gateway_port = 8443\n", "What is the gateway port?", "8443"),
        ("Пароль для замка: берёза-17.", "Какой пароль для замка?", "берёза-17"),
        ("琥珀的密码是81392。", "琥珀的密码是什么？", "81392"),
        ("संदूक का कोड है 5512।", "संदूक का कोड क्या है?", "5512"),
    ],
)
def test_any_phrase_in_any_script(tiny, statement, question, value):
    filler = haystack(tiny, 200, 0.5).rsplit("\n", 1)[0]
    assert answer(tiny, f"{filler}\n{statement}\n{filler}\n{question}") == value


@pytest.mark.parametrize(
    ("told", "kind", "seed"),
    [
        ("The {k} for {t} is {v}.", "secret code", 0),
        ("Note: the {k} for {t} is {v}.", "password", 1),
        ("FYI: {k} of {t} = {v}.", "secret code", 0),
        ("Note: the {k} for {t} is {v}.", "secret code", 2),
    ],
)
def test_what_introduces_a_sentence_is_no_part_of_its_topic(tiny, told, kind, seed):
    thing = f"the {['steady', 'hollow', 'quiet'][seed]} kettle of {['Aldermoor', 'Dunmore', 'Farrow'][seed]}"
    value = ["marigold lantern", "81463", "2f45e678-cdcc"][seed]
    fact, asked = told.format(k=kind, t=thing, v=value), f"To a file. But first: What is the {kind} for {thing}?"
    filler = haystack(tiny, 150 + 40 * seed, 0.5).rsplit("\n", 1)[0]
    assert answer(tiny, f"{filler}\n{fact}\n{filler}\n{asked}") == value


def test_nothing_is_invented(tiny):
    absent = haystack(tiny, 400, 0.5, needle="The secret code for the amber heron of Kelbrook is {}.")
    assert answer(tiny, absent) == REFUSAL
    assert answer(tiny, QUESTION) == REFUSAL


@pytest.mark.parametrize("shift", range(4))
def test_the_later_of_two_statements_holds(tiny, shift):
    """At every distance modulo a group: the two are then read by the same head, or by different ones."""
    lines = haystack(tiny, 300, 0.2, "22222").split("\n")
    at = int(0.7 * len(lines))
    lines[at:at] = ["x " * shift, NEEDLE.format("11111")]
    assert answer(tiny, "\n".join(lines)) == "11111"
    lines = [line.replace("22222", "33333").replace("11111", "44444") for line in lines]
    assert answer(tiny, "\n".join(lines)) == "44444"


def test_turns_and_the_request_that_opened_a_conversation(tiny):
    talk = haystack(tiny, 300, 0.5).rsplit("\n", 1)[0]
    turns = [
        {"role": "user", "content": "Make a tic-tac-toe page in HTML."},
        {"role": "assistant", "content": "<html> " + talk},
        {"role": "user", "content": "to a file"},
    ]
    assert "tic-tac-toe page in HTML" in answer(tiny, turns)
    told = [{"role": "user", "content": NEEDLE.format("81392")}, *turns[1:2], {"role": "user", "content": QUESTION}]
    assert answer(tiny, told) == "81392"


def test_text_without_roles_goes_on_with_the_value(tiny):
    body = haystack(tiny, 300, 0.4).rsplit("\n", 1)[0]
    tokens = tuple(tiny.tokenizer.encode(body + "\nThe secret code for the amber falcon of Kelbrook is"))
    one = Request("raw", tokens, Sampling(max_tokens=20))
    assert text(run(tiny, [one])["raw"]) == " 81392"


@pytest.mark.parametrize(
    "options", [{"chunk_tokens": 4096}, {"chunk_tokens": 100}, {"page_seed": 7}, {"prefix_cache": False}]
)
def test_chunks_and_placement_change_nothing(tiny, options):
    prompt = haystack(tiny, 500, 0.35, VALUE)
    same(ask(tiny, prompt), ask(Engine("tiny", **options), prompt))


def test_warm_equals_cold_at_every_remainder_of_a_page(tiny):
    for extra in range(0, 64, 9):
        prompt = "x " * extra + haystack(tiny, 250, 0.6, VALUE)
        tiny.flush_cache()
        cold, warm = ask(tiny, prompt), ask(tiny, prompt)
        same(cold, warm)
        assert cold[-1].cached_tokens == 0
        expected = (cold[-1].prompt_tokens - 1) // 64 * 64
        assert warm[-1].cached_tokens == expected > 0
        assert ask(tiny, prompt, cache_salt="other", sampling={"max_tokens": 1})[-1].cached_tokens == 0


def test_a_batch_changes_nothing(tiny):
    prompts = [haystack(tiny, 100 + 130 * i, 0.1 + 0.2 * i, f"{i}4471") for i in range(5)]
    alone = [ask(tiny, prompt, cache_salt=f"alone{i}") for i, prompt in enumerate(prompts)]
    requests = [request(tiny, prompt, cache_salt=f"batch{i}") for i, prompt in enumerate(prompts)]
    together = run(tiny, requests)
    for one, events in zip(requests, alone, strict=True):
        same(events, together[one.rid])


def test_a_pair_equals_one_engine_and_moves_every_page_once(tiny):
    pair = Pair()
    for tokens in (40, 127, 128, 129, 640):
        pair.chunks.clear()
        prompt = haystack(tiny, tokens, 0.4, VALUE)
        tiny.flush_cache()
        same(ask(tiny, prompt), pair.ask(prompt))
        moved = [chunk.first_page + i for chunk in pair.chunks for i in range(len(chunk.full_pages))]
        assert (
            moved == list(range(len(moved))) and [c.last for c in pair.chunks].count(True) == 1 and pair.chunks[-1].last
        )
    assert pair.decode.full.free == pair.decode.geometry.pages - 1 - len(pair.decode._retired[0].full)


def zero_needle_rows(engine: Engine, rid: str, start: int, end: int) -> None:
    """Index rows of the entries that hold tokens [start, end) of a request, set to zero bytes in every layer."""
    entries, tokens = engine.geometry.page_entries, engine.geometry.page_tokens
    _, pages = engine.pages_of(rid)["full"]
    for group in range(start // 4, end // 4 + 2):
        page, offset = pages[group * 4 // tokens], group % entries
        for layer in range(engine.geometry.layers):
            pool = engine.pool(f"c4_index.{layer}")
            pool[page, offset * 128 : offset * 128 + 128] = 0
            pool[page, entries * 128 + offset * 4 : entries * 128 + offset * 4 + 4] = 0


@pytest.mark.parametrize(("padding", "kept"), [(8, True), (60, False), (400, False)])
def test_index_rows_decide_above_the_budget_and_only_there(padding, kept):
    engine = Engine("tiny", prefix_cache=False)
    prompt = NEEDLE.format("81392") + "\n" + "x " * padding + "\n" + QUESTION
    one = request(engine, prompt)
    at = next(i for i in range(len(one.tokens)) if engine.tokenizer.decode(one.tokens[i : i + 5]) == "81392")
    engine.add(one)
    events = engine.step()  # the first token says nothing yet
    assert engine.geometry.top_k * 4 == 64
    zero_needle_rows(engine, one.rid, at - 2, at + 6)
    while engine.busy:
        events += engine.step()
    assert (text(events) == "81392") == kept


def test_rows_that_nobody_references_may_hold_anything():
    engine = Engine("tiny")
    prompt = haystack(engine, 400, 0.4, VALUE)
    clean = ask(engine, prompt)
    engine = Engine("tiny")
    for name, buffer in engine.pools().items():  # NaN codes, exponents and floats everywhere, then a fresh prompt
        if buffer.layout != "fp32":
            engine.pool(name).fill_(0xFF)
        else:
            engine.memory.rows(name).fill_(torch.nan)
    same(clean, ask(engine, prompt))


def test_aborts_at_any_stage_leave_nothing_behind(tiny):
    tiny.flush_cache()
    free = tiny.full.free, tiny.swa.free
    prompt = haystack(tiny, 300, 0.4, VALUE)
    for steps in (0, 1, 4, 7, 9):
        victim, other = request(tiny, prompt, cache_salt=str(steps)), request(tiny, prompt, cache_salt="o")
        tiny.add(victim)
        tiny.add(other)
        events = [event for _ in range(steps) for event in tiny.step()]
        tiny.abort(victim.rid)
        while tiny.busy:
            events += tiny.step()
        last = [event for event in events if event.rid == victim.rid][-1]
        assert last.finish_reason == "abort" and last.token is None
        assert text([event for event in events if event.rid == other.rid]) == VALUE
    assert tiny.flush_cache()
    assert (tiny.full.free, tiny.swa.free) == free


def test_pages_run_out_and_everybody_still_gets_an_answer():
    engine = Engine("tiny", pages=22, swa_pages=16)
    prompts = [haystack(engine, 400, 0.3, f"{i}4471") for i in range(4)]
    requests = [request(engine, prompt) for prompt in prompts]
    out = run(engine, requests)
    assert [text(out[one.rid]) for one in requests] == [f"{i}4471" for i in range(4)]
    with pytest.raises(ValueError, match="pages"):
        engine.add(request(engine, "x " * 3000))


def test_limits_stops_and_seeds(tiny):
    prompt = haystack(tiny, 200, 0.4, "81392")
    short = ask(tiny, prompt, sampling={"max_tokens": 3})
    assert short[-1].finish_reason == "length" and text(short) == "81"
    stopped = ask(tiny, prompt, sampling={"stop": ("39",)})
    assert text(stopped) == "81" and stopped[-1].finish_reason == "stop" and stopped[-1].matched_stop == "39"
    hot = {"temperature": 8.0, "seed": 3, "max_tokens": 12}
    first, second = ask(tiny, prompt, sampling=hot), ask(tiny, prompt, sampling=hot)
    assert [e.token for e in first] == [e.token for e in second]
    assert [e.token for e in first] != [e.token for e in ask(tiny, prompt, sampling={**hot, "seed": 4})]
    for bad, message in (
        (Request("a", ()), "empty"),
        (Request("b", (10**6,)), "vocabulary"),
        (Request("c", (5,) * 20000), "context"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.add(bad)
    with pytest.raises(ValueError, match="geometry"):
        Engine("huge")
    with pytest.raises(ValueError, match="option"):
        Engine("tiny", colour="red")
