"""What an endpoint can do is found by asking, in seven dialects."""

from __future__ import annotations

import pytest
from mock_endpoint import mock_endpoint, render
from needlework.serving import Endpoint, TransportError, run
from needlework.serving.capabilities import DISCOVERY_REQUESTS, DISCOVERY_TOKENS, Capabilities, discover, flush
from needlework.serving.gauges import parse, read
from needlework.serving.tokens import chat, count_tokens

HELLO = [{"role": "user", "content": "Hello."}]
EXPECTED = {
    "sglang": ("sglang", "chat", True, "cache_salt", True, 131072),
    "vllm": ("vllm", "chat", True, "cache_salt", True, 131072),
    "llama.cpp": ("llama.cpp", "chat", True, "cache_prompt", True, 131072),
    "trtllm": ("openai", "usage", False, None, True, None),
    "openai": ("openai", "usage", False, None, False, None),
    "dynamo": ("dynamo", "usage", True, None, True, 131072),
    "text": ("openai", "text", True, None, True, None),
}


@pytest.mark.parametrize("dialect", EXPECTED)
def test_probe_finds_what_is_there(dialect):
    with mock_endpoint(dialect) as mock:
        found = run(discover(Endpoint(mock.base_url)))
        again = run(discover(Endpoint(mock.base_url)))  # a second visitor finds the same
    seen = (found.engine, found.tokenize, found.cached_tokens, found.salt, found.logprobs, found.max_model_len)
    assert seen == EXPECTED[dialect]
    assert found == again == Capabilities.from_dict(found.as_dict())
    assert found.usage and found.model == "mock" and "mock" in str(found)


def test_thinking_is_switched_off_only_where_it_was_seen():
    with mock_endpoint("vllm", thinks=True) as mock:
        found = run(discover(Endpoint(mock.base_url)))
        assert found.thinking == "chat_template_kwargs" and not found.thinks
        assert found.fields()["chat_template_kwargs"]["enable_thinking"] is False
    with mock_endpoint("trtllm", thinks=True) as mock:  # forbids unknown fields
        found = run(discover(Endpoint(mock.base_url)))
        assert found.thinking is None and found.thinks and found.fields(salt="x") == {}


def test_dynamo_names_both_workers_and_its_flush_is_not_believed():
    with mock_endpoint("dynamo", thinks=True) as mock:
        endpoint = Endpoint(mock.base_url)
        found = run(discover(endpoint))
        assert found.names_worker and found.thinking == "nvext" and found.flush_path == "/clear_kv_blocks"
        assert found.fields() == {"nvext": {"extra_fields": ["worker_id"], "max_thinking_tokens": 0}}
        reply = run(endpoint.chat(HELLO, fields=found.fields()))
        assert reply.worker == "prefill 7, decode 9" and not reply.reasoning
        assert run(read(endpoint))["aborted"] == 0 and found.metrics == ("running", "aborted")
        run(flush(endpoint))
        assert not mock.cache
    with mock_endpoint("dynamo", replicas=2) as mock, pytest.raises(RuntimeError, match="1 workers did not clear"):
        run(flush(Endpoint(mock.base_url)))
    with mock_endpoint("vllm") as mock:
        assert not run(discover(Endpoint(mock.base_url))).names_worker


def test_an_engine_that_leaves_a_zero_out_still_proves_warm_and_cold():
    with mock_endpoint("vllm", zero_left_out=True) as mock:
        endpoint = Endpoint(mock.base_url)
        endpoint.capabilities = found = run(discover(endpoint))
        assert found.cached_tokens and found.cached_by == "usage" and found.salt == "cache_salt"
        text = [{"role": "user", "content": "Once more. " * 200}]
        seen = [run(chat(endpoint, text, alone=False, max_tokens=1)).cached_tokens for _ in range(2)]
        assert seen[0] == 0 and seen[1] > 100


def _checks(mock):
    return [len(render(r["messages"])) for r in mock.requests if "Cache check" in r["messages"][0]["content"]]


@pytest.mark.parametrize(("page", "requests"), [(1, 3), (16, 3), (64, 3), (128, 3), (256, 5), (1024, 5), (4096, 4)])
def test_a_cache_is_looked_for_with_a_short_text_first(page, requests):
    """Pages longer than the short text, which a slow engine answers at once, are found by the long one."""
    with mock_endpoint("vllm", page=page) as mock:
        found = run(discover(Endpoint(mock.base_url)))
    sent = _checks(mock)
    assert len(sent) == requests and len(mock.requests) <= DISCOVERY_REQUESTS and sum(sent) < DISCOVERY_TOKENS
    assert (max(sent) < 200) == (page <= 128)
    assert found.cached_tokens and found.salt == ("cache_salt" if page < 4096 else None)
    assert any("off, or its pages are longer" in n for n in found.notes) == (page == 4096)


def test_a_long_template_is_not_taken_for_a_text_that_was_never_sent():
    """All of a new short text but its last words is the template's, and that was sent before."""
    with mock_endpoint("vllm", page=1, head=900) as mock:
        found = run(discover(Endpoint(mock.base_url)))
    assert found.cached_by == "usage" and found.cached_tokens and found.salt == "cache_salt"


def test_a_pair_that_calls_transferred_tokens_cached_is_seen_through():
    with mock_endpoint("vllm", transfers=True) as mock:
        blind = Endpoint(mock.base_url)
        alone = run(discover(blind))
        assert not alone.cached_tokens and any("was never sent is reported as cached" in n for n in alone.notes)
        assert run(chat(blind, HELLO, alone=True, max_tokens=1)).cached_tokens is None
        endpoint = Endpoint(mock.base_url, cache_url=mock.base_url)
        found = run(discover(endpoint))
        assert found.cached_tokens and found.cached_by == "counter" and found.salt == "cache_salt"
        text = [{"role": "user", "content": "One two three four. " * 40}]
        seen = [run(chat(endpoint, text, alone=True, max_tokens=1)).cached_tokens for _ in range(2)]
        assert seen[0] == 0 and seen[1] > 100
        assert run(chat(endpoint, text, alone=False, max_tokens=1)).cached_tokens is None
    with mock_endpoint("vllm") as mock:
        assert run(discover(Endpoint(mock.base_url))).cached_by == "usage"


def test_counts_agree_with_usage():
    with mock_endpoint("sglang") as mock:
        endpoint = Endpoint(mock.base_url)
        run(discover(endpoint))
        assert run(count_tokens(endpoint, HELLO)) == run(endpoint.chat(HELLO)).prompt_tokens
    with mock_endpoint("openai") as mock:
        endpoint = Endpoint(mock.base_url)
        run(discover(endpoint))
        assert run(count_tokens(endpoint, HELLO)) is None


def test_flush_only_where_offered():
    with mock_endpoint("sglang") as mock:
        run(flush(Endpoint(mock.base_url)))
        assert not mock.cache
    with mock_endpoint("openai") as mock, pytest.raises(RuntimeError, match="no way to flush"):
        run(flush(Endpoint(mock.base_url)))


def test_metrics_by_alias_and_none_when_not_offered():
    text = 'vllm:num_requests_running{model="m"} 2.0\nvllm:num_requests_running{model="n"} 1\n'
    text += 'vllm:request_success_total{finished_reason="abort",m="x"} 4\n'
    text += 'vllm:request_success_total{finished_reason="stop"} 9\n'
    gauges = parse(text + "garbage {{{\n")
    assert gauges["running"] == 3 and gauges["aborted"] == 4 and gauges["kv_used"] is None
    with mock_endpoint("openai") as mock:
        assert set(run(read(Endpoint(mock.base_url))).values()) == {None}


def test_model_that_is_not_served_is_named():
    with (
        mock_endpoint() as mock,
        pytest.raises(TransportError, match=r"does not serve a model named 'gpt-0'.*offers mock"),
    ):
        run(discover(Endpoint(mock.base_url, "gpt-0")))
