"""The client against servers that behave, and against servers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import time

import pytest
from mock_endpoint import mock_endpoint
from needlework.serving import Endpoint, TransportError, run
from needlework.serving.gauges import context_length, parse
from needlework.serving.replies import EventStream, parse_json, read_completion
from needlework.serving.scrub import scrub
from needlework.serving.tokens import _count

KEY = "sk-verysecretkey0123456789"
HELLO = [{"role": "user", "content": "Hello."}]
OK = json.dumps({"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}).encode()


class Raw:
    """A TCP server that answers each connection with `play(reader, writer)`; counts connections."""

    def __init__(self, play):
        self.play, self.connections = play, 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self.server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            await self.play(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def head(kind: str, length: int | None = None, status: str = "200 OK", more: str = "") -> bytes:
    size = f"Content-Length: {length}\r\n" if length is not None else ""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{size}{more}Connection: close\r\n\r\n".encode()


def answer(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = ""):
    async def play(reader, writer):
        writer.write(head(kind, len(body), status, more) + body)

    return play


async def slow_loris(reader, writer):
    writer.write(head("application/json"))
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def slow_headers(reader, writer):
    for letter in b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 10_000:
        writer.write(bytes([letter]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless_stream(reader, writer):
    writer.write(head("text/event-stream"))
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 60_000 + b'"}}]}\n\n'
    while True:
        writer.write(event)
        await writer.drain()


async def endless_line(reader, writer):
    writer.write(head("text/event-stream") + b"data: ")
    while True:
        writer.write(b"y" * 65536)
        await writer.drain()


async def gigabyte(reader, writer):
    writer.write(head("application/json", 1 << 30))
    for _ in range(1 << 14):
        writer.write(b" " * 65536)
        await writer.drain()


async def half_stream(reader, writer):
    writer.write(head("text/event-stream") + b'data: {"choices":[{"delta":{"content":"12"}}]}\n\n')


async def reset(reader, writer):
    writer.transport.abort()


HOSTILE = {
    "slow loris": (slow_loris, "no complete answer within"),
    "slow headers": (slow_headers, "no complete answer within"),
    "endless stream": (endless_stream, "longer than|no complete answer"),
    "endless line": (endless_line, "longer than|no complete answer"),
    "1 GB body": (gigabyte, "longer than|no complete answer"),
    "half stream": (half_stream, "broke off after 1 events|not JSON"),
    "reset": (reset, "closed|reset"),
    "invalid UTF-8": (answer(b'{"choices": "\xff\xfe"}'), "not valid UTF-8"),
    "HTML page": (answer(b"<html><body>Bad gateway</body></html>", "text/html", "502 Bad Gateway"), "HTTP 502.*HTML"),
    "HTML as 200": (answer(b"<html>login</html>", "text/html"), "HTML page"),
    "wrong JSON": (answer(b'[1, 2, {"a": null}]'), "not an object"),
    "no choices": (answer(b'{"choices": []}'), "no choices"),
    "null choice": (answer(b'{"choices": [null]}'), "no choices"),
    "truncated JSON": (answer(b'{"choices": [{"mess'), "not JSON"),
    "deep JSON": (answer(b"[" * 200_000), "not JSON"),
    "empty body": (answer(b""), "empty"),
    "empty 500": (answer(b"", status="500 Internal Server Error"), "HTTP 500 with an empty body"),
    "429": (answer(b'{"error": {"message": "slow down"}}', status="429 Too Many Requests"), "HTTP 429: slow down"),
    "redirect loop": (answer(b"", status="302 Found", more="Location: /v1/chat/completions\r\n"), "redirects"),
    "compressed": (answer(b"\x1f\x8b" + b"0" * 100, more="Content-Encoding: gzip\r\n"), "compressed"),
    "key echo": (
        answer(
            json.dumps(
                {"error": {"message": f"Incorrect API key: {KEY} for http://10.1.2.3:80/v1 on db7.corp"}}
            ).encode(),
            status="401 Unauthorized",
        ),
        "HTTP 401: Incorrect API key",
    ),
    "error in a 200": (answer(json.dumps({"error": f"token {KEY} is bad"}).encode()), "reports an error"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_server_gives_one_bounded_reason(name):
    play, expected = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def scenario():
        raw = Raw(play)
        async with raw as url:
            endpoint = Endpoint(url, "m", KEY, 0.6, max_body_bytes=4 << 20)
            with pytest.raises(TransportError, match=expected) as caught:
                await endpoint.chat(HELLO)
            await endpoint.aclose()
            return caught.value.reason, raw.connections, url

    started = time.perf_counter()
    reason, connections, url = asyncio.run(scenario())
    assert time.perf_counter() - started < 4
    assert connections == 1  # no retry, no redirect followed
    assert len(reason) <= 300 and "\n" not in reason
    assert KEY not in reason and KEY[5:] not in reason and "127.0.0.1" not in reason and "10.1.2.3" not in reason
    assert url.rsplit(":", 1)[1] not in reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 80 << 10  # KiB


def event(choice: dict | None = None, **more) -> bytes:
    return b"data: " + json.dumps(({"choices": [choice]} if choice else {}) | more).encode() + b"\n\n"


TEXT, STOP, DONE = (
    event({"delta": {"content": "31"}}),
    event({"delta": {}, "finish_reason": "stop"}),
    b"data: [DONE]\n\n",
)
SPLIT = b'data: {"choices": [{"delta":\ndata: {"content": "31"}}]}\n\n'
STREAMS = {  # bytes of a stream -> its text
    "plain": (TEXT + STOP + DONE),
    "no end mark": (TEXT + STOP),
    "CR": (TEXT + STOP + DONE).replace(b"\n", b"\r"),
    "CRLF": (TEXT + STOP + DONE).replace(b"\n", b"\r\n"),
    "data on two lines": (SPLIT + STOP + DONE),
    "byte order mark": (b"\xef\xbb\xbf" + TEXT + STOP),
    "no blank between": (TEXT + STOP).replace(b"data: ", b"data:"),
    "no blank lines": (TEXT + STOP).replace(b"\n\n", b"\n"),
    "comments, ids and names": (b": ping\nid: 1\nretry: 5\nevent: message\n" + TEXT + b":\n\n" + STOP),
    "another choice beside it": (event({"index": 1, "delta": {"content": "99"}}) + TEXT + STOP),
    "error: null": (event({"delta": {"content": "31"}}, error=None) + STOP),
    "a body in the stream's place": json.dumps(
        {"choices": [{"message": {"content": "31"}, "finish_reason": "stop"}]}, indent=1
    ).encode(),
}
BROKEN = {  # bytes of a stream -> the kind of failure and the server's words
    "end mark alone": (DONE, "no_choice", "end mark alone"),
    "usage alone": (event(usage={"prompt_tokens": 9}) + DONE, "no_choice", "no choices"),
    "nothing": (b"", "empty_body", "empty"),
    "end mark after half an answer": (TEXT + DONE, "no_finish", "without a finish reason"),
    "half an answer": (TEXT, "stream_broken", "broke off after 1 events"),
    "error line": (
        b'error: {"code":400,"message":"context of 4096 tokens"}\n\n',
        "server_error",
        "context of 4096 tokens",
    ),
    "error event": (b"event: error\n: the worker gave no reason\n\n", "server_error", "the worker gave no reason"),
    "error event with data": (b'event: error\ndata: {"message": "no memory"}\n\n', "server_error", "no memory"),
    "error event with text": (b"event: error\ndata: no memory\n\n", "server_error", "no memory"),
    "object error": (event(object="error", message="out of pages") + DONE, "server_error", "out of pages"),
    "detail": (event(detail="engine is dead") + DONE, "server_error", "engine is dead"),
    "detail list": (event(detail=[{"msg": "too long", "loc": ["body"]}]) + DONE, "server_error", "too long"),
    "empty error": (event({"delta": {"content": "3"}}, error={}) + STOP, "server_error", "reports an error"),
    "comment alone": (b": upstream closed\n\n" + DONE, "no_choice", "upstream closed"),
    "stray words": (b"upstream connect error\n", "stream_broken", "upstream connect error"),
    "another choice alone": (
        event({"index": 1, "delta": {"content": "31"}, "finish_reason": "stop"}) + DONE,
        "no_choice",
        "",
    ),
    "null message": (event({"message": None, "finish_reason": "stop"}), "no_choice", "message is null"),
    "a number": (event({"delta": {"content": 31}}) + STOP, "malformed", "type int"),
    "an object": (event({"delta": {"content": {"a": 1}}}) + STOP, "malformed", "type dict"),
    "tool call": (
        event({"delta": {"content": None, "tool_calls": [{}]}, "finish_reason": "stop"}),
        "tool_calls",
        "tool",
    ),
    "finish object": (
        event({"delta": {"content": "3"}, "finish_reason": {"type": "abort", "message": "KV pool full"}}),
        "finish_abort",
        "KV pool full",
    ),
    "not JSON": (b"data: {nope}\n\n" + DONE, "malformed", "nope"),
} | {
    f"finish {word}": (event({"delta": {"content": "31"}, "finish_reason": word}), f"finish_{word}", word)
    for word in ("error", "cancelled", "timeout", "content_filter", "tool_calls", "kv_transfer_error", "repetition")
}


def read_stream(raw: bytes, step: int):
    stream = EventStream(str, 0.0)
    for i in range(0, len(raw), step):
        if stream.feed(raw[i : i + step]):
            break
    return stream.reply({})


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_streams_in_every_legal_form_are_read(step):
    for name, raw in STREAMS.items():
        assert (name, read_stream(raw, step).text) == (name, "31")


def test_what_is_no_answer_is_never_one():
    for name, (raw, failure, words) in BROKEN.items():
        for step in (1, 1 << 20):
            with pytest.raises(TransportError) as caught:
                pytest.fail(f"{name}: {read_stream(raw, step)}")
            assert (name, caught.value.failure) == (name, failure) and words in caught.value.reason


def test_a_whole_stream_without_text_is_an_answer():
    raw = event({"delta": {"role": "assistant", "content": ""}}) + STOP + event(usage={"completion_tokens": 0}) + DONE
    reply = read_stream(raw, 5)
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("", "stop", 0)


def test_a_stream_under_another_content_type_is_read_as_one():
    async def scenario(kind, body):
        async with Raw(answer(body, kind)) as url:
            return (await Endpoint(url, "m", timeout_s=5).chat(HELLO)).text

    for kind in ("Text/Event-Stream; charset=UTF-8", "text/plain", "application/json"):
        assert asyncio.run(scenario(kind, TEXT + STOP + DONE)) == "31"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "perhaps http://127.0.0.1:8000"),
        ("http:/host:1", "must start with http"),
        ("http://host: 1", "without blanks"),
        ("http://host:1/v1/chat/completions", "leave out /chat/completions"),
    ],
)
def test_an_address_that_cannot_be_meant_is_told_with_the_right_one(url, said):
    with pytest.raises(ValueError, match=said):
        Endpoint(url)


def test_tls_on_a_plain_port_is_told():
    said = "no TLS on this port; give the URL with http://"
    with mock_endpoint() as mock, pytest.raises(TransportError, match=said) as caught:
        run(Endpoint(mock.base_url.replace("http:", "https:"), "m", timeout_s=5).chat(HELLO))
    assert caught.value.failure == "tls"


def test_healthy_answers_pass():
    async def scenario():
        async with Raw(answer(OK)) as url:
            endpoint = Endpoint(url + "/v1/", "m", KEY, 5)
            assert endpoint.base_url == url
            return await endpoint.chat(HELLO)

    reply = asyncio.run(scenario())
    assert (reply.text, reply.finish_reason, reply.prompt_tokens) == ("fine", "stop", None)


def test_stream_gives_first_token_time_usage_and_reasoning():
    with mock_endpoint("sglang", delay_s=0.05, thinks=True) as mock:
        text = "The secret code for a is 12. What is the secret code for a?"
        reply = run(Endpoint(mock.base_url).chat([{"role": "user", "content": text}], logprobs=True))
    assert reply.text == "12" and reply.reasoning == "Let me look. "
    assert reply.ttft_s is not None and 0.05 <= reply.ttft_s <= reply.latency_s
    assert reply.prompt_tokens and reply.cached_tokens == 0 and reply.token_logprobs


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null"])
def test_numbers_that_are_none_are_left_out(number):
    """Python reads what JSON does not have, and no journal takes it: one such answer ended a run."""
    logprobs = f'{{"content": [{{"token": "x", "logprob": {number}}}], "tokens": ["x"], "token_logprobs": [{number}]}}'
    choice = f'{{"message": {{"content": "x"}}, "finish_reason": "stop", "logprobs": {logprobs}}}'
    body = f'{{"choices": [{choice}], "meta_info": {{"spec_accept_length": {number}}}}}'
    reply = read_completion(parse_json(body.encode()), {}, 0.0, str)
    assert (reply.text, reply.token_logprobs, reply.accept_length) == ("x", None, None)


def test_gauges_that_are_none_are_left_out():
    text = "sglang:num_running_reqs NaN\nsglang:num_running_reqs 3\nsglang:cached_tokens_total +Inf\n"
    assert (parse(text)["running"], parse(text)["cached_tokens"]) == (3, None)
    assert context_length('dynamo_frontend_model_context_length{model="m"} NaN', "m") is None
    assert [_count({"count": n}) for n in (-5, 1 << 60, True, 7, [7])] == [None, None, None, 7, 7]


def test_names_that_a_server_gives_are_bounded():
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "model": "m" * 10**6}
    reply = read_completion(body | {"nvext": {"worker_id": "\ud800"}}, {}, 0.0, str)
    assert len(reply.model) == 200 and reply.worker.isascii()


def test_half_a_surrogate_pair_becomes_harmless():
    body = b'{"choices": [{"message": {"content": "a\\ud800b"}, "finish_reason": "stop"}]}'

    async def scenario():
        async with Raw(answer(body)) as url:
            return await Endpoint(url, "m").chat(HELLO)

    assert asyncio.run(scenario()).text == "a?b"


def test_nobody_there_wrong_key_no_model():
    with pytest.raises(TransportError, match="cannot be reached"):
        run(Endpoint("http://127.0.0.1:9", "m", KEY).chat(HELLO))
    with mock_endpoint() as mock:
        mock.key = KEY
        with pytest.raises(TransportError, match="401: Invalid API Key"):
            run(Endpoint(mock.base_url, "m", "sk-otherkey-0000000").chat(HELLO))
        assert run(Endpoint(mock.base_url, "m", KEY).chat(HELLO)).text == "Hello."
    with pytest.raises(ValueError, match="must start with http"):
        Endpoint("localhost:8000")
    with pytest.raises(TransportError, match="characters that cannot be sent"):
        run(Endpoint("http://127.0.0.1:9", "m", "schlüssel-ключ").chat(HELLO))


def test_cancel_closes_the_connection():
    with mock_endpoint(delay_s=5) as mock:

        async def scenario():
            endpoint = Endpoint(mock.base_url, "m")
            task = asyncio.create_task(endpoint.chat(HELLO))
            while not mock.running and not task.done():  # on a busy machine a request takes its time to arrive
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(400):
                if mock.aborted:
                    return
                await asyncio.sleep(0.02)

        run(scenario())
        assert mock.aborted == 1


def test_run_works_inside_a_running_loop_and_refuses_itself():
    async def notebook_cell():
        return run(asyncio.sleep(0, "done"))

    assert asyncio.run(notebook_cell()) == "done"

    async def nested():
        return run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        run(nested())


def test_scrub_keeps_words_and_removes_secrets():
    text = "Bearer abcdef123456 at https://me:pw@host.example:8000/v1?x=1 from [2001:db8::1]:80 \x1b[31m\u202eevil"
    line = scrub(text, secrets=("host.example",))
    for gone in ("abcdef123456", "host.example", "pw", "2001:db8", "\x1b", "\u202e"):
        assert gone not in line
    assert scrub("error sending request for url (http://[::]:33301/v1/chat)") == "error sending request for url ([url])"
    assert scrub("prompt of 4,096 tokens is too long") == "prompt of 4,096 tokens is too long"
    assert len(scrub("word " * 1000)) == 300


def test_repr_shows_no_key_and_no_address():
    assert KEY not in repr(Endpoint("http://10.0.0.7:1", "m", KEY)) and "10.0" not in repr(
        Endpoint("http://10.0.0.7:1")
    )


@pytest.mark.parametrize("dies_at", [None, 5])
def test_a_kept_connection_that_was_closed_is_no_failure(dies_at):
    """llama.cpp closes after each stream of HTTP/1.1; a request that nobody answers stays a failure."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    asked = 0

    async def serve(reader, writer):
        nonlocal asked
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            told = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", told)[1]))
            asked += 1
            if asked != dies_at:
                writer.write(head + chunk)
                await writer.drain()
                await asyncio.sleep(0.001 * (asked % 3))  # sometimes the next request is on its way already
            writer.close()

    async def ask() -> list[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
            said = []
            for _ in range(40):
                try:
                    said.append((await endpoint.chat(HELLO, max_tokens=1)).text)
                except TransportError as error:
                    said.append(error.failure)
            await endpoint.aclose()
            return said

    said = asyncio.run(ask())
    assert said.count("yes") == (40 if dies_at is None else 39), said
    assert asked == 40, "no request reached the server twice"
