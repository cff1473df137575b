"""The probes and a notebook against llama.cpp's own server with the same small model (`make test-engines`)."""

from __future__ import annotations

import pytest
from needlework import probes
from needlework.serving import Endpoint, capabilities, run
from needlework_lab import llama

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def llama_server():
    with llama.start() as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint(llama_server) -> Endpoint:
    return Endpoint(llama_server.base_url)


def test_llama_is_known_by_what_it_answers(endpoint):
    found = run(capabilities.discover(endpoint))
    assert found.engine == "llama.cpp" and found.max_model_len == 8192 and found.logprobs
    assert found.tokenize == "chat" and found.cached_tokens and found.salt == "cache_prompt"


def test_its_lengths_are_exact_and_short_prompts_are_remembered(endpoint):
    result = probes.recall(endpoint, lengths=(300, 600), depths=(0.2, 0.8), seed=1)
    assert result.verdict != "harness", str(result)
    assert result.table["measured"].sum() == 4 and result.table["hits"].sum() >= 2, str(result)
    rows = result.trials[result.trials["probe"] == "recall"]
    assert (rows["prompt_tokens"] == rows["target_tokens"]).all()


def test_its_warm_prompts_are_proved(endpoint):
    result = probes.warm_cold(endpoint, lengths=(500, 900), repeats=1, controls=False, seed=2)
    assert result.details["proved"] == result.details["pairs"] == 2, str(result)


def test_a_prompt_beyond_a_slot_is_refused_in_the_servers_words():
    with llama.start(context_tokens=2048, slots=2) as small:
        told = run(capabilities.discover(Endpoint(small.base_url)))
        assert told.max_model_len == 1024, "the window is that of one slot"
        with pytest.raises(ValueError, match="do not fit the window of 1024 tokens"):
            probes.recall(small.base_url, lengths=(2000,), depths=(0.5,), repeats=1, controls=False)


def test_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"llama\.cpp has one server"), llama.start("pd"):
        pass


def test_the_recall_notebook_runs_on_it(endpoint, executed, tmp_path):
    shorter = {"lengths": [300, 600, 1200], "depths": [0.2, 0.8], "search_s": 10}
    _, printed = executed("03_recall_vs_length", endpoint.base_url, tmp_path / "run", **shorter)
    assert any("the stated window: 8,192 tokens" in text for text in printed), printed
    trials = probes.Journal(tmp_path / "run", read_only=True).frame()
    asked = trials[trials["probe"] == "recall"]
    assert sorted(asked["target_tokens"].unique()) == [300, 600, 1200] and not (asked["outcome"] == "transport").any()
