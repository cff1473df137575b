"""One combined server over real HTTP: SGLang's routes, honest answers, and no harm from any body."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from lab_client import MODEL, ask, story, until
from needlework import pages


def stream(client, path: str, body: dict) -> list:
    with client.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_what_the_server_says_about_itself(combined):
    (card,) = combined.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL and card["max_model_len"] == 16384
    for path in ("/health", "/health_generate"):
        assert combined.http.get(path).status_code == 200
    info = combined.http.get("/server_info").json()
    assert info["disaggregation_mode"] == "null" and info["index_topk"] == 16 and info["chunked_prefill_size"] == 64
    assert combined.http.get("/get_server_info").json().keys() == info.keys()
    assert combined.http.get("/get_model_info").json() == combined.http.get("/model_info").json()


@pytest.mark.parametrize("text", ["plain words, 49929!", "Zwölf Boxkämpfer → 十二 🥊 \x00\t\r\n", " ", "\ud800 alone"])
def test_tokens_make_the_round_trip(combined, text):
    body = combined.http.post("/tokenize", content=json.dumps({"model": MODEL, "prompt": text})).json()
    assert body["count"] == len(body["tokens"]) > 0 and body["max_model_len"] == 16384
    back = combined.http.post("/v1/detokenize", json={"model": MODEL, "tokens": body["tokens"]}).json()["text"]
    assert back == text


def test_the_chat_form_counts_what_a_request_counts(combined):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ask(8)}]
    counted = combined.http.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = combined.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == counted
    assert combined.http.post("/tokenize", json={"prompt": ["a b", "c"]}).json()["count"] == [2, 1]


def test_an_answer_and_its_account(combined):
    body = combined.chat(ask(20, "71536"), logprobs=True, top_logprobs=3)
    (choice,) = body["choices"]
    assert "71536" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    usage, tokens = body["usage"], choice["logprobs"]["content"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert len(tokens) == usage["completion_tokens"]
    for token in tokens:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] >= token["logprob"] - 1e-6
    assert "".join(t["token"] for t in tokens if not t["token"].startswith("<|")) == choice["message"]["content"]


def test_streamed_and_whole_answers_agree(combined):
    body = {"model": MODEL, "messages": [{"role": "user", "content": ask(20, "30817")}], "logprobs": True}
    whole = combined.http.post("/v1/chat/completions", json=body).json()
    events = stream(combined, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    parts = [e["choices"][0] for e in events if e["choices"]]
    assert "".join(p["delta"].get("content") or "" for p in parts) == whole["choices"][0]["message"]["content"]
    assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    streamed = [t["logprob"] for p in parts if p["logprobs"] for t in p["logprobs"]["content"]]
    assert streamed == pytest.approx([t["logprob"] for t in whole["choices"][0]["logprobs"]["content"]], abs=1e-4)


def test_completions_and_generate_say_the_same(combined):
    prompt = combined.http.post("/tokenize", json={"messages": [{"role": "user", "content": ask(12, "55104")}]}).json()[
        "tokens"
    ]
    first = combined.complete(prompt, max_tokens=40, logprobs=1)
    native = combined.http.post(
        "/generate",
        json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 40, "temperature": 0}, "return_logprob": True},
    ).json()
    assert first["choices"][0]["text"] == native["text"] and "55104" in native["text"]
    meta = native["meta_info"]
    assert meta["finish_reason"]["type"] == "stop" and meta["prompt_tokens"] == len(prompt)
    assert [t[0] for t in meta["output_token_logprobs"]] == pytest.approx(
        first["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert [t[1] for t in meta["output_token_logprobs"]] == native["output_ids"]
    last = stream(combined, "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 40}})[-1]
    assert last["text"] == native["text"]


def test_finish_reasons_are_honest(combined):
    cut = combined.chat(ask(5, "44012"), max_tokens=2)
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
    assert combined.chat(ask(5, "44012"), max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    stopped = combined.chat(ask(5, "44012"), stop=["01"])
    assert stopped["choices"][0]["matched_stop"] == "01" and stopped["choices"][0]["finish_reason"] == "stop"
    assert "01" not in stopped["choices"][0]["message"]["content"]


def test_warm_is_shown_by_cached_tokens_and_a_salt_makes_cold(combined):
    def cached(**fields) -> int:
        body = combined.chat(ask(40, "90211"), max_tokens=8, **fields)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert combined.http.post("/flush_cache?timeout=5").status_code == 200
    assert cached() == 0
    warm = cached()
    assert warm > 0 and warm % 64 == 0
    assert cached(cache_salt="another tenant") == 0
    assert combined.http.get("/flush_cache?timeout=5").status_code == 200
    assert cached() == 0


def test_abort_by_rid_and_flush_while_busy(combined):
    answers: list = []

    def run() -> None:
        answers.append(combined.complete(story(20), max_tokens=4000, ignore_eos=True, rid="long one"))

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: combined.metric("num_running_reqs") >= 1)
    assert combined.http.post("/flush_cache").status_code == 400
    assert combined.complete("again", expect=400, rid="long one")["message"].startswith("a request with rid")
    assert combined.http.post("/abort_request", json={"rid": "long one"}).status_code == 200
    thread.join(10)
    assert answers and answers[0]["choices"][0]["finish_reason"] == "abort"
    assert combined.http.post("/flush_cache?timeout=5").status_code == 200
    assert combined.http.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert combined.http.post("/abort_request", json={}).status_code == 400


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_goes_away_takes_its_request_with_it(combined, streaming):
    before = combined.metric("num_aborted_requests_total")
    body = {"prompt": story(20), "max_tokens": 4000, "ignore_eos": True, "stream": streaming}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: lab\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", combined.deployment.ports["combined"])) as connection:
        connection.sendall(head.encode() + raw)
        assert until(lambda: combined.metric("num_running_reqs") >= 1)
    assert until(lambda: combined.metric("num_running_reqs") == 0)
    assert until(lambda: combined.metric("num_aborted_requests_total") == before + 1)  # counted after it left the batch


def test_the_front_answers_while_a_long_prompt_runs(combined):
    thread = threading.Thread(target=lambda: combined.complete(story(450), max_tokens=1, cache_salt="long"))
    slowest = 0.0
    thread.start()
    while thread.is_alive():
        began = time.monotonic()
        assert combined.prefill.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.02)
    assert slowest < 1.0, f"/health took {slowest:.2f} s while a prompt was running"


BAD = [
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "hi"}]}, 400, "role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400, "content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": "five"}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**30}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}, 400, "n = 2"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1}}, 400, "logit"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "temperature": True}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": "yes"}, 400, "stream"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}, 400, "logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "bootstrap_room": 1.0}, 400, "room"),
    ("/v1/chat/completions", {"model": "gpt", "messages": [{"role": "user", "content": "a"}]}, 404, "does not exist"),
    ("/v1/completions", {"prompt": ""}, 400, "empty"),
    ("/v1/completions", {}, 400, "prompt is missing"),
    ("/v1/completions", {"prompt": ["a", "b"]}, 400, "several"),
    ("/v1/completions", {"prompt": [1, -2]}, 400, "token ids"),
    ("/v1/completions", {"prompt": [10**9]}, 400, "token ids"),
    ("/v1/completions", {"prompt": "word " * 17000}, 400, "context length"),
    ("/v1/completions", {"prompt": "word", "max_tokens": 16384}, 400, "context length"),
    ("/generate", {"text": "a", "input_ids": [1]}, 400, "either"),
    ("/generate", {"text": "a", "sampling_params": [1]}, 400, "sampling_params"),
    ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 0}, 400, "not offered"),
    ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/lab/digests", {"rid": "never seen"}, 404, "remembers"),
    ("/lab/digests", {}, 400, "name a request"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD, ids=[f"{p}-{w}" for p, _, _, w in BAD])
def test_bad_requests_get_one_sentence(combined, path, body, status, words):
    response = combined.http.post(path, json=body)
    error = response.json()
    assert response.status_code == error["code"] == status
    assert words in error["message"] and "Traceback" not in response.text and "\n" not in error["message"]


HOSTILE = {
    "not JSON": b"{nope",
    "not UTF-8": b'{"prompt": "\xff"}',
    "deep arrays": b"[" * 200_000,
    "deep objects": b'{"prompt":"a","x":' + b"[" * 500 + b"]" * 500 + b"}",
    "an array": b"[1,2]",
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "huge integer": b'{"prompt":"a","seed":' + b"9" * 20_000 + b"}",
    "infinite number": b'{"prompt":"a","temperature":1e999}',
    "null": b"null",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_quickly(combined, name):
    began = time.monotonic()
    response = combined.http.post("/v1/completions", content=HOSTILE[name])
    assert response.status_code == 400 and "Traceback" not in response.text
    assert time.monotonic() - began < 2.0


def test_a_huge_announced_body_is_refused_unread(combined):
    with socket.create_connection(("127.0.0.1", combined.deployment.ports["combined"]), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: lab\r\nContent-Length: 1000000000\r\n\r\n{")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_a_huge_chunked_body_is_refused(combined):
    def flood():
        for _ in range(40):
            yield b" " * (1 << 20)

    response = combined.http.post("/v1/completions", content=flood())
    assert response.status_code == 413


def test_unknown_routes_and_methods(combined):
    assert combined.http.get("/nothing").json()["code"] == 404
    assert combined.http.get("/generate").json()["code"] == 405


def test_metrics_carry_sglangs_names(combined):
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "cached_tokens_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_aborted_requests_total",
    ):
        assert combined.metric(name) >= 0


def test_pages_of_a_request_can_be_read_back(combined, tmp_path):
    content = ask(20, "18273")
    combined.chat(content, rid="dumped")
    table = combined.deployment.digests(messages=[{"role": "user", "content": content}])
    assert {"c4_kv.0", "c4_index.0", "swa_kv.0"} <= set(table["buffer"]) and "combined_digest" in table
    dumps = [dump for path in combined.deployment.dump_pages(tmp_path, rid="dumped") for dump in pages.read(path)]
    assert len(dumps) == len(table) and all(dump.request == "dumped" for dump in dumps)
    index = next(dump for dump in dumps if dump.pool == "c4_index" and dump.layer == 0)
    tokens = combined.http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()["count"]
    assert (index.layout, index.entries, index.tokens_per_entry) == ("dsa-index-fp8", tokens // 4, 4)
    assert not pages.diagnose(index.raw, index.record, index.page_tokens, live=index.live)["severity"].eq("error").any()


def test_planted_faults_are_listed(combined):
    assert combined.http.get("/lab/faults").json() == {"faults": [], "hooks": {}, "role": "combined"}
