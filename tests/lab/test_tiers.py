"""The host tier and the draft change nothing but speed, and their faults break what their classes predict."""

from __future__ import annotations

import pytest
from needlework.serving.replies import read_completion
from needlework_lab import requests
from needlework_lab.answers import Writer
from needlework_lab.engine import Engine

from engines import REFUSAL, Pair, answer, ask, haystack, request, run, text

UUID = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
TIER = {"pages": 18, "host_pages": 200}
SIZE = 400  # tokens: six or seven pages, so that three other prompts drive one out


def prompts(engine: Engine, count: int = 4) -> list[tuple[str, str]]:
    """Prompts of different text about the same key, each with its own value."""
    return [(haystack(engine, SIZE, 0.6, f"{i}4471", seed=i), f"{i}4471") for i in range(count)]


def drive_out(engine: Engine, seed: int = 100) -> None:
    """Other text until nothing of what came before is left on the device."""
    for i in range(3):
        ask(engine, haystack(engine, SIZE, 0.5, "90909", seed=seed + i))


def same(one, other) -> None:
    assert [event.token for event in one] == [event.token for event in other]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(one, other, strict=True)) < 0.02


def test_pages_come_back_from_the_host_as_they_were():
    engine = Engine("tiny", **TIER)
    prompt, _ = prompts(engine)[0]
    cold = ask(engine, prompt)
    warm = ask(engine, prompt)
    assert warm[-1].cached_tokens > 0 == warm[-1].cached_host_tokens
    drive_out(engine)
    back = ask(engine, prompt)
    same(cold, back)
    assert back[-1].cached_tokens == warm[-1].cached_tokens == back[-1].cached_host_tokens
    again = ask(engine, prompt)
    assert again[-1].cached_host_tokens == 0 and again[-1].cached_tokens == back[-1].cached_tokens
    figures = engine.metrics()
    assert figures["hicache_host_used_tokens"] > 0 and figures["cached_host_tokens_total"] == back[-1].cached_tokens
    assert engine.flush_cache() and ask(engine, prompt)[-1].cached_tokens == 0


def test_a_busy_tier_answers_as_an_engine_without_one():
    """Rounds of prompts together over a pool that holds two of them: every page goes out and comes back again."""
    engine = Engine("tiny", **TIER)
    wanted = prompts(engine)
    for _ in range(2):
        requests = [request(engine, prompt) for prompt, _ in wanted]
        out = run(engine, requests)
        assert [text(out[one.rid]) for one in requests] == [value for _, value in wanted]
    assert engine.counters["cached_host_tokens"] > 500
    assert engine.flush_cache() and engine.full.free == engine.geometry.pages - 1
    assert engine.swa.free == engine.geometry.swa_pages - 1


def test_a_small_host_forgets_the_oldest():
    engine = Engine("tiny", pages=18, host_pages=4)
    prompt, value = prompts(engine)[0]
    assert answer(engine, prompt) == value
    drive_out(engine)
    back = ask(engine, prompt)
    assert text(back) == value and back[-1].cached_tokens <= 4 * 64


def test_a_load_that_is_not_awaited_is_wrong_once_and_only_from_the_host():
    engine = Engine("tiny", faults=("F15:every=1,delay_ms=150",), **TIER)
    prompt, value = prompts(engine)[0]
    assert answer(engine, prompt) == value and answer(engine, prompt) == value  # cold, and warm on the device
    drive_out(engine)
    early = ask(engine, prompt)
    assert early[-1].cached_host_tokens > 0 and text(early) != value
    assert engine.host is not None
    for entry in engine.host.entries.values():
        for copy in entry.copies:
            copy.wait()
    late = ask(engine, prompt)
    assert text(late) == value and late[-1].cached_tokens > 0 == late[-1].cached_host_tokens


def test_a_store_that_is_not_awaited_keeps_what_the_next_owner_wrote():
    engine = Engine("tiny", faults=("F15:every=1,delay_ms=60,side=store",), **TIER)
    prompt, value = prompts(engine)[0]
    assert answer(engine, prompt) == value
    drive_out(engine)
    back = ask(engine, prompt)
    assert back[-1].cached_host_tokens > 0 and text(back) in (REFUSAL, "90909")
    assert engine.flush_cache() and answer(engine, prompt) == value


def test_one_request_in_every_is_hit_and_the_fault_brings_its_tier():
    engine = Engine("tiny", faults=("F15",))
    assert engine.geometry.host_pages == 512 and engine.geometry.pages == 65
    engine = Engine("tiny", faults=("F15:delay_ms=30",), **TIER)
    wanted = prompts(engine, 3)
    first = [answer(engine, prompt) == value for prompt, value in wanted]
    second = []
    for seed, (prompt, value) in zip((200, 300), wanted, strict=False):
        drive_out(engine, seed)
        second.append(answer(engine, prompt) == value)
    assert all(first) and second == [True, False]
    with pytest.raises(ValueError, match="side"):
        Engine("tiny", faults=("F15:side=left",))


# ---- drafts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("drafts", "value"), [(1, UUID), (4, UUID), (7, UUID), (4, "81392"), (4, "deep blue sea")])
def test_drafts_change_nothing(drafts, value):
    plain, drafting = Engine("tiny"), Engine("tiny", draft_tokens=drafts)
    prompt = haystack(plain, 200, 0.4, value)
    for _ in range(2):  # cold, warm
        wanted, got = ask(plain, prompt), ask(drafting, prompt)
        same(wanted, got)
        assert text(got) == value and got[-1].verified < len(got)
    assert wanted[-1].verified == 0


def test_rejected_drafts_leave_no_trace():
    """Text that repeats itself with other ends, so that drafts are often half right: every remainder of a group."""
    plain, drafting = Engine("tiny", prefix_cache=False), Engine("tiny", prefix_cache=False, draft_tokens=7)
    decoys = "".join(f"The secret code for the amber heron of Brook {i} is f81d4fae-7dec-{i}. " for i in range(3))
    for extra in range(4):
        prompt = "x " * extra + haystack(plain, 100, 0.2, UUID).rsplit("\n", 1)[0] + "\n" + decoys
        prompt += "\nWhat is the secret code for the amber falcon of Kelbrook?"
        same(ask(plain, prompt), ask(drafting, prompt))
    proposed, accepted = (drafting.counters[f"spec_{name}_tokens"] for name in ("proposed", "accepted"))
    assert 0 < accepted < proposed


def test_drafts_in_batches_with_seeds_and_in_pairs():
    plain, drafting = Engine("tiny"), Engine("tiny", draft_tokens=4)
    wanted = [haystack(plain, 90 + 70 * i, 0.3, f"{i}4471-{i}4471", seed=i) for i in range(3)]
    hot = {"temperature": 6.0, "seed": 5, "max_tokens": 12}
    for sampling in ({}, hot):
        requests = [request(drafting, prompt, sampling=sampling, cache_salt=str(sampling)) for prompt in wanted]
        together = run(drafting, requests)
        for one, prompt in zip(requests, wanted, strict=True):
            same(ask(plain, prompt, sampling=sampling), together[one.rid])
    pair = Pair(draft_tokens=4)
    events = pair.ask(wanted[0])
    assert text(events) == "04471-04471" and 0 < events[-1].verified < len(events) - 2


def test_limits_hold_with_drafts():
    drafting = Engine("tiny", draft_tokens=7)
    prompt = haystack(drafting, 200, 0.3, UUID)
    for limit in (1, 2, 6, 9):
        events = ask(drafting, prompt, sampling={"max_tokens": limit})
        assert len(events) == limit and events[-1].finish_reason == "length"
    stopped = ask(drafting, prompt, sampling={"stop": ("7dec",)})
    assert text(stopped) == "f81d4fae-" and stopped[-1].finish_reason == "stop"
    with pytest.raises(ValueError, match="draft_tokens"):
        Engine("tiny", draft_tokens=8)


def test_without_its_index_the_draft_is_rarely_right_and_the_text_always():
    engine = Engine("tiny", faults=("F19",))
    prompt = haystack(engine, 200, 0.4, UUID)
    cold, warm = ask(engine, prompt), ask(engine, prompt)
    assert text(cold) == text(warm) == UUID
    lengths = [len(events) / events[-1].verified for events in (cold, warm)]
    assert lengths[1] < 0.5 * lengths[0]
    healthy = Engine("tiny", draft_tokens=4)
    cold, warm = ask(healthy, prompt), ask(healthy, prompt)
    assert cold[-1].verified == warm[-1].verified
    pair, whole = Pair(faults=("F19",)), Pair(draft_tokens=4)
    lost, kept = pair.ask(prompt), whole.ask(prompt)
    assert text(lost) == text(kept) == UUID and lost[-1].verified > 2 * kept[-1].verified


def test_a_miscounted_accept_loses_tokens_after_a_partial_accept_only():
    engine = Engine("tiny", faults=("F19:kind=count",))
    assert answer(engine, haystack(engine, 300, 0.4, UUID)) == UUID  # every draft is right
    decoy = "The secret code for the amber heron of Brook is 81377.\n"
    prompt = haystack(engine, 300, 0.2, "81392").rsplit("\n", 1)
    prompt = prompt[0] + "\n" + decoy + prompt[1]
    said = answer(engine, prompt)
    assert said != "81392" and said.startswith("813")
    assert answer(Engine("tiny", draft_tokens=4), prompt) == "81392"


def test_a_client_hears_of_tiers_and_drafts_in_sglangs_form():
    engine = Engine("tiny", draft_tokens=4, **TIER)
    prompt, value = prompts(engine)[0]
    for _ in range(2):
        events = ask(engine, prompt)
        drive_out(engine)
    body = {"messages": [{"role": "user", "content": prompt}], "return_cached_tokens_details": True}
    asked = requests.parse_chat(body, engine.tokenizer, engine.geometry.max_context)
    writer = Writer(asked, engine.tokenizer)
    for event in events:
        writer.add(event)
    said = writer.whole()
    host = events[-1].cached_host_tokens
    assert said["sglext"]["cached_tokens_details"] == {"device": 0, "host": host} and host > 0
    reply = read_completion(said, {}, 0.1, str)
    assert reply.text == value and reply.cached_tokens == host
    assert reply.accept_length == pytest.approx(len(events) / events[-1].verified) and reply.accept_length > 1
