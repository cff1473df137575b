"""llama.cpp's own answers, recorded from its server (0.5.0-dev, commit 0c1e57098) with SmolLM2-135M-Instruct."""

from __future__ import annotations

import json

import httpx
import pytest
from mock_endpoint import mock_endpoint
from needlework.probes.bench.trial import cache_state
from needlework.serving import Endpoint, TransportError, run
from needlework.serving.capabilities import discover
from needlework.serving.gauges import read
from needlework.serving.tokens import count_tokens

HELLO = [{"role": "user", "content": "Hello."}]
MODEL = "SmolLM2-135M-Instruct.Q8_0.gguf"
META = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": 4096, "n_ctx_train": 8192, "n_embd": 576, "n_params": 134515008}
CARD = {"id": MODEL, "aliases": [MODEL], "tags": [], "object": "model", "owned_by": "llamacpp", "meta": META}
PROPS = {"default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": 4096}, "total_slots": 2,
         "endpoint_slots": True, "endpoint_metrics": False, "build_info": "b1-0c1e57098"}  # fmt: skip
SLOTS = [{"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": True, "id_task": 5, "n_prompt_tokens": 33},
         {"id": 1, "n_ctx": 4096, "speculative": False, "is_processing": False}]  # fmt: skip
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
)
TIMINGS = {"cache_n": 31, "prompt_n": 1, "prompt_ms": 20.353, "predicted_n": 2, "predicted_ms": 19.929}
HEAD = {"created": 1796024996, "id": "chatcmpl-N01ftAVGml7xNfZ2lYlKQVXZsxHAQi8G", "model": MODEL,
        "system_fingerprint": "b1-0c1e57098", "object": "chat.completion.chunk"}  # fmt: skip
USAGE = {"completion_tokens": 2, "prompt_tokens": 32, "total_tokens": 34}
EVENTS = [
    {"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}], **HEAD},
    {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "Hello"}}], **HEAD},
    {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "!"}}], **HEAD},
    {"choices": [{"finish_reason": "length", "index": 0, "delta": {}}], **HEAD},
    {"choices": [], **HEAD, "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 31}}, "timings": TIMINGS},
]
TOO_LONG = {
    "code": 400,
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 5032,
    "n_ctx": 4096,
    "message": "request (5032 tokens) exceeds the available context size (4096 tokens), try increasing it",
}
NO_METRICS = {"code": 501, "message": "This server does not support metrics endpoint. Start it with `--metrics`",
              "type": "not_supported_error"}  # fmt: skip


def _raw(status: int, text: str, kind: str) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(text.encode()), headers={"content-type": kind})


def _json(status: int, body: object) -> httpx.Response:
    return _raw(status, json.dumps(body), "application/json; charset=utf-8")


def _server(request: httpx.Request) -> httpx.Response:
    """Each route as it was recorded; a chat is always answered with the same stream."""
    body = json.loads(request.content or b"{}")
    match request.url.path:
        case "/v1/models":
            return _json(200, {"models": [{"name": MODEL}], "object": "list", "data": [CARD]})
        case "/props":
            return _json(200, PROPS)
        case "/slots":
            return _json(200, SLOTS)
        case "/metrics":
            return _json(501, {"error": NO_METRICS})
        case "/tokenize":
            counts = {"": 0, PROMPT: 32}  # `messages` are not known here, and nothing is said
            return _json(200, {"tokens": list(range(counts.get(body.get("content", ""), 150)))})
        case "/apply-template":
            said = body["messages"][-1]["content"]
            return _json(200, {"prompt": PROMPT.replace("Hello.", said)})
        case "/v1/chat/completions" if body.get("max_tokens", 0) > 4096:
            return _json(400, {"error": TOO_LONG})
        case "/v1/chat/completions":
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"
            return _raw(200, text, "text/event-stream")
    gone = {"message": "File Not Found", "type": "not_found_error", "code": 404}
    return _json(404, {"error": gone})


def test_recorded_answers_are_read():
    endpoint = Endpoint("http://llama", transport=httpx.MockTransport(_server))
    reply = run(endpoint.chat(HELLO, max_tokens=2))
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.cached_tokens) == ("Hello!", "length", 32, 31)
    assert reply.fingerprint == "b1-0c1e57098" and reply.model == MODEL
    found = run(discover(endpoint))
    assert (found.engine, found.max_model_len, found.hello_tokens) == ("llama.cpp", 4096, 32)
    # a build that counts no chat request renders it, and the rendered text is counted with its marks
    assert (found.tokenize, found.tokenize_path) == ("chat", "/apply-template")
    assert run(count_tokens(endpoint, HELLO)) == 32
    # without --metrics the slots tell what runs; what nobody tells is not 0
    gauges = run(read(endpoint))
    assert gauges["running"] == 1 and gauges["waiting"] is None and found.metrics == ("running",)
    with pytest.raises(TransportError, match=r"^HTTP 400: request \(5032 tokens\) exceeds the available context size"):
        run(endpoint.chat(HELLO, max_tokens=5000))


def test_an_old_build_tells_its_window_elsewhere_and_its_cache_has_no_pages():
    with mock_endpoint("llama.cpp", old=True) as mock:
        endpoint = Endpoint(mock.base_url)
        found = run(discover(endpoint))
        assert (found.tokenize_path, found.max_model_len, found.salt) == ("/apply-template", 131072, "cache_prompt")
        assert run(count_tokens(endpoint, HELLO)) == run(endpoint.chat(HELLO)).prompt_tokens == found.hello_tokens
        assert found.fields(salt="x") == {"cache_prompt": False} and found.fields() == {}


def test_what_the_template_shares_is_not_warm():
    # recorded: 25 of 600 tokens cached when a text was never sent (system prompt and first word), 599 when it was
    assert cache_state(25, 600) == "unknown"
    assert cache_state(25, 600, 32) == "cold" and cache_state(599, 600, 32) == "warm"
    assert cache_state(200, 600, 32) == "unknown" and cache_state(None, 600, 32) == "unknown"
