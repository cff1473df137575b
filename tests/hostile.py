"""A hostile OpenAI-compatible server: the first part of the path names what it does to a prompt of 1,500 tokens and more.

It has no model; it looks the asked value up in the prompt. Shorter prompts are answered well, so every behaviour is one of
a deployment that works until prompts grow. `BEHAVIOURS[name] = (expected outcomes, what to do)`: the outcomes that an
honest reader may write for such a request. "transport" says that nothing was measured.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ABOVE = 1500  # tokens; the prompts below are answered well
TOKEN = re.compile(r" ?[^\W\d_]+| ?\d|[^\w\s]|\s|_")
WORDS = "the worker ran out of blocks while it held the prompt"  # what a reader should be able to repeat

Do = Callable[["Call"], None]
BEHAVIOURS: dict[str, tuple[frozenset[str], Do]] = {}
RIGHT, NOTHING = frozenset({"exact"}), frozenset({"transport"})


class Call:
    """One long request: what was asked, the right answer, and the ways to reply."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: dict, answer: str, sent: int):
        self.handler, self.body, self.answer, self.sent = handler, body, answer, sent
        self.usage = {"prompt_tokens": sent, "completion_tokens": 5, "total_tokens": sent + 5}

    def raw(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.handler.wfile.write(data)
            self.handler.wfile.flush()

    def reply(self, status: int, content: bytes, kind: str = "application/json", **headers: str) -> None:
        head = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(content)}"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.raw("\r\n".join([*head, "", ""]).encode("latin-1") + content)

    def sse(self, content: bytes, kind: str = "text/event-stream") -> None:
        self.reply(200, content, kind)

    def event(self, delta: Any = None, finish: Any = None, **more: Any) -> dict:
        choice = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": finish}
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}

    def events(self, text: str | None = None, finish: Any = "stop", field: str = "content") -> list[dict]:
        text = self.answer if text is None else text
        parts = [text[i : i + 4] for i in range(0, len(text), 4)]
        out = [self.event({"role": "assistant"}), *(self.event({field: p}) for p in parts), self.event({}, finish)]
        return [*out, {**self.event(), "choices": [], "usage": self.usage}]

    def stream(self, events: list, done: bool = True, join: str = "\n\n", lead: str = "data: ") -> None:
        text = "".join(lead + json.dumps(e) + join for e in events) + (f"{lead}[DONE]{join}" if done else "")
        self.sse(text.encode())

    def message(self, finish: Any = "stop", **message: Any) -> None:
        """Not streamed, whatever was asked for: legal for a gateway that cannot stream."""
        message = {"role": "assistant", **message}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.reply(200, json.dumps({**whole, "usage": self.usage}).encode())


def behaviour(name: str, expected: frozenset[str] | str) -> Callable[[Do], Do]:
    def keep(do: Do) -> Do:
        assert name not in BEHAVIOURS, name
        BEHAVIOURS[name] = (frozenset({expected}) if isinstance(expected, str) else expected, do)
        return do

    return keep


def add(name: str, expected: frozenset[str] | str, do: Do) -> None:
    behaviour(name, expected)(do)


# ---- refusals by status ----
ERRORS: dict[str, Any] = {
    "openai": {"error": {"message": WORDS, "type": "server_error", "code": 500}},
    "string": {"error": WORDS},
    "detail": {"detail": WORDS},
    "details": {"detail": [{"loc": ["body"], "msg": WORDS, "type": "value_error"}]},
    "object": {"object": "error", "message": WORDS, "type": "BadRequestError", "code": 400},
    "message": {"message": WORDS},
    "title": {"title": "Bad", "status": 500, "detail": WORDS},
}
for status in (400, 401, 403, 404, 408, 409, 413, 422, 429, 499, 500, 501, 502, 503, 504, 520, 529):
    add(f"status_{status}", NOTHING, lambda c, s=status: c.reply(s, json.dumps(ERRORS["openai"]).encode()))
for form, said in ERRORS.items():
    add(f"refused_{form}", NOTHING, lambda c, e=said: c.reply(500, json.dumps(e).encode()))
    add(f"in_200_{form}", NOTHING, lambda c, e=said: c.reply(200, json.dumps(e).encode()))
    add(f"in_stream_{form}", NOTHING, lambda c, e=said: c.stream([e]))
    add(f"in_stream_no_mark_{form}", NOTHING, lambda c, e=said: c.stream([e], done=False))
    add(f"after_words_{form}", NOTHING, lambda c, e=said: c.stream([*c.events("So the")[:2], e]))
add("status_200_html", NOTHING, lambda c: c.reply(200, b"<html><body>Bad gateway</body></html>", "text/html"))
add("status_502_html", NOTHING, lambda c: c.reply(502, b"<html><script>x()</script></html>", "text/html"))
add("status_503_retry", NOTHING, lambda c: c.reply(503, b"busy", "text/plain", Retry_After="600"))
add("status_204", NOTHING, lambda c: c.raw(b"HTTP/1.1 204 No Content\r\n\r\n"))
add("status_302", NOTHING, lambda c: c.reply(302, b"", Location="http://127.0.0.1:9/elsewhere"))
add("status_307_self", NOTHING, lambda c: c.reply(307, b"", Location=c.handler.path))
add("status_101", NOTHING, lambda c: c.raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"))
add("status_999", NOTHING, lambda c: c.reply(999, b"{}"))

# ---- a success that holds no answer ----
add("empty_body_json", NOTHING, lambda c: c.reply(200, b""))
add("empty_body_sse", NOTHING, lambda c: c.sse(b""))
add("body_null", NOTHING, lambda c: c.reply(200, b"null"))
add("body_list", NOTHING, lambda c: c.reply(200, b"[]"))
add("body_number", NOTHING, lambda c: c.reply(200, b"42"))
add("body_no_choices", NOTHING, lambda c: c.reply(200, b'{"object":"chat.completion"}'))
add("body_choices_empty", NOTHING, lambda c: c.reply(200, b'{"choices":[]}'))
add("body_choices_null", NOTHING, lambda c: c.reply(200, b'{"choices":null}'))
add("body_choices_text", NOTHING, lambda c: c.reply(200, b'{"choices":"none"}'))
add("body_message_null", NOTHING, lambda c: c.reply(200, b'{"choices":[{"message":null,"finish_reason":"stop"}]}'))
add("body_choice_null", NOTHING, lambda c: c.reply(200, b'{"choices":[null]}'))
add("content_number", NOTHING, lambda c: c.message(content=7))
add("content_object", NOTHING, lambda c: c.message(content={"a": 1}))
add("done_alone", NOTHING, lambda c: c.stream([]))
add("usage_alone", NOTHING, lambda c: c.stream([{"choices": [], "usage": c.usage}]))
add("comments_alone", NOTHING, lambda c: c.sse(b": keep\n\n" * 20))
add("comment_words", NOTHING, lambda c: c.sse(b": " + WORDS.encode() + b"\n\n"))
add("error_line", NOTHING, lambda c: c.sse(b"error: " + json.dumps(ERRORS["openai"]).encode() + b"\n\n"))
add("error_line_words", NOTHING, lambda c: c.sse(b"error: " + WORDS.encode() + b"\n\ndata: [DONE]\n\n"))
add("event_error", NOTHING, lambda c: c.sse(b"event: error\ndata: " + WORDS.encode() + b"\n\n"))
add(
    "event_error_json",
    NOTHING,
    lambda c: c.sse(b"event: error\ndata: " + json.dumps(ERRORS["detail"]).encode() + b"\n\ndata: [DONE]\n\n"),
)
add("event_error_bare", NOTHING, lambda c: c.sse(b"event: error\n: no reason given\n\n"))
add("error_empty_object", NOTHING, lambda c: c.stream([{"error": {}}]))
add("error_then_choices", NOTHING, lambda c: c.stream([{**c.event({"content": "1"}), "error": {"message": WORDS}}]))
add("plain_text_200", NOTHING, lambda c: c.reply(200, WORDS.encode(), "text/plain"))
add("sse_plain_words", NOTHING, lambda c: c.sse(WORDS.encode() + b"\n\n"))
add("no_finish", NOTHING, lambda c: c.stream(c.events()[:-2], done=True))
add("no_finish_no_mark", NOTHING, lambda c: c.stream(c.events()[:2], done=False))
add("half_then_mark", NOTHING, lambda c: c.stream(c.events()[:2], done=True))
add("role_only", NOTHING, lambda c: c.stream([c.event({"role": "assistant"})]))
add("delta_null", NOTHING, lambda c: c.stream([{**c.event(), "choices": [{"index": 0, "delta": None}]}]))
add("delta_number", NOTHING, lambda c: c.stream([c.event({"content": 5}), c.event({}, "stop")]))
add(
    "choice_only_index_1",
    NOTHING,
    lambda c: c.stream([{**c.event(), "choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]}]),
)
CALL = [{"index": 0, "id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
add("tool_call", NOTHING, lambda c: c.message("tool_calls", content=None, tool_calls=CALL))
add("tool_call_stream", NOTHING, lambda c: c.stream([c.event({"tool_calls": CALL}), c.event({}, "tool_calls")]))
add("tool_call_stop", NOTHING, lambda c: c.message("stop", content=None, tool_calls=CALL))
for word in (
    "error", "abort", "cancelled", "timeout", "content_filter", "insufficient_system_resource", "tool_calls", "function_call",
    "kv_transfer_error", "repetition", "evicted", "preempted", "engine_dead", "unknown", "", "null", "STOPPED_BY_ADMIN",
):  # fmt: skip
    add(f"finish_{word or 'blank'}", NOTHING, lambda c, w=word: c.stream(c.events("", w)))
    add(f"finish_{word or 'blank'}_words", NOTHING, lambda c, w=word: c.stream(c.events("I think", w)))
add("finish_object", NOTHING, lambda c: c.stream(c.events("", {"type": "abort", "message": WORDS})))
add("finish_list", NOTHING, lambda c: c.stream(c.events("", ["stop"])))
add("finish_number", NOTHING, lambda c: c.stream(c.events("", 3)))

# ---- what the model really did ----
add(
    "zero_tokens",
    "empty",
    lambda c: c.stream(
        [
            c.event({"role": "assistant"}),
            c.event({}, "stop"),
            {"choices": [], "usage": {**c.usage, "completion_tokens": 0}},
        ]
    ),
)
add("blanks", "empty", lambda c: c.stream(c.events(" \n\t ")))
add("cut_by_length", frozenset({"cut"}), lambda c: c.stream(c.events("The value that was given is", "length")))
add(
    "refuses",
    frozenset({"refusal", "garbage"}),
    lambda c: c.stream(c.events("I don't see that code in what you gave me.")),
)
add("reasons_only", "reasoning_only", lambda c: c.message(content=None, reasoning_content=f"It is {c.answer}"))
add("reasons_only_stream", "reasoning_only", lambda c: c.stream(c.events(field="reasoning_content")))
add("reasons_other_field", "reasoning_only", lambda c: c.stream(c.events(field="reasoning")))
for mark, (start, end) in {
    "think": ("<think>", "</think>"), "thought": ("<thought>", "</thought>"), "reasoning": ("<reasoning>", "</reasoning>"),
    "thinking": ("<thinking>", "</thinking>"), "square": ("[THINK]", "[/THINK]"), "kimi": ("◁think▷", "◁/think▷"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}.items():  # fmt: skip
    add(
        f"thinks_{mark}_then_wrong",
        frozenset({"refusal", "garbage", "reasoning_only"}),
        lambda c, s=start, e=end: c.stream(c.events(f"{s}The code is {c.answer}.{e}I do not know that.")),
    )
    add(
        f"thinks_{mark}_then_right",
        RIGHT,
        lambda c, s=start, e=end: c.stream(c.events(f"{s}Let me look.{e}{c.answer}")),
    )
    add(
        f"thinks_{mark}_unclosed",
        frozenset({"reasoning_only", "cut"}),
        lambda c, s=start: c.stream(c.events(f"{s}The code is {c.answer}, or is it", "length")),
    )

# ---- right, in every legal form ----
add("right", RIGHT, lambda c: c.stream(c.events()))
add("right_not_streamed", RIGHT, lambda c: c.message(content=c.answer))
add("right_parts", RIGHT, lambda c: c.message(content=[{"type": "text", "text": c.answer}]))
add("right_crlf", RIGHT, lambda c: c.stream(c.events(), join="\r\n\r\n"))
add("right_cr", RIGHT, lambda c: c.stream(c.events(), join="\r\r"))
add("right_no_blank", RIGHT, lambda c: c.stream(c.events(), lead="data:"))
add("right_no_mark", RIGHT, lambda c: c.stream(c.events(), done=False))
add(
    "right_bom",
    RIGHT,
    lambda c: c.sse(
        b"\xef\xbb\xbf" + "".join(f"data: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n"
    ),
)
add(
    "right_multi_line",
    RIGHT,
    lambda c: c.sse(
        "".join(
            "".join(f"data: {line}\n" for line in json.dumps(e, indent=1).split("\n")) + "\n" for e in c.events()
        ).encode()
        + b"data: [DONE]\n\n"
    ),
)
add(
    "right_type_case",
    RIGHT,
    lambda c: c.sse(
        "".join(f"data: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n",
        "Text/Event-Stream; Charset=UTF-8",
    ),
)
add(
    "right_comments",
    RIGHT,
    lambda c: c.sse("".join(f": ping\n\ndata: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n"),
)
add(
    "right_ids",
    RIGHT,
    lambda c: c.sse(
        "".join(
            f"id: {i}\nretry: 10\nevent: message\ndata: {json.dumps(e)}\n\n" for i, e in enumerate(c.events())
        ).encode()
        + b"data: [DONE]\n\n"
    ),
)
add("right_error_null", RIGHT, lambda c: c.stream([{**e, "error": None} for e in c.events()]))
add(
    "right_nulls",
    RIGHT,
    lambda c: c.stream([{**e, "usage": e.get("usage"), "system_fingerprint": None} for e in c.events()]),
)
add("right_eos", RIGHT, lambda c: c.stream(c.events(finish="eos")))
add("right_stop_sequence", RIGHT, lambda c: c.stream(c.events(finish="stop_sequence")))
# compressed although nobody asked for it: read or refused, never a miss
add(
    "right_gzip",
    RIGHT | NOTHING,
    lambda c: c.reply(
        200,
        gzip.compress("".join(f"data: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n"),
        "text/event-stream",
        Content_Encoding="gzip",
    ),
)
add("right_no_usage", RIGHT, lambda c: c.stream(c.events()[:-1]))
add("right_usage_null", RIGHT, lambda c: c.stream([*c.events()[:-1], {"choices": [], "usage": None}]))
add(
    "right_usage_nan",
    RIGHT,
    lambda c: c.sse(
        (
            "".join(f"data: {json.dumps(e)}\n\n" for e in c.events()[:-1])
            + 'data: {"choices":[],"usage":{"prompt_tokens":NaN,"completion_tokens":1e400}}\n\ndata: [DONE]\n\n'
        ).encode()
    ),
)
add(
    "right_two_choices",
    RIGHT,
    lambda c: c.stream(
        [
            *(
                {**e, "choices": [{"index": 1, "delta": {"content": "zz"}, "finish_reason": None}, *e["choices"]]}
                for e in c.events()
                if e["choices"]
            )
        ]
    ),
)
add("right_unicode_split", RIGHT, lambda c: c.stream(c.events("\u201c" + c.answer + "\u201d \u2014 \U0001f512")))


@behaviour("right_byte_by_byte", RIGHT)
def _slow(c: Call) -> None:
    data = "".join(f"data: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n"
    c.raw(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n".encode())
    for i in range(0, len(data), 7):
        c.raw(data[i : i + 7])


@behaviour("right_chunked", RIGHT)
def _chunked(c: Call) -> None:
    data = "".join(f"data: {json.dumps(e)}\n\n" for e in c.events()).encode() + b"data: [DONE]\n\n"
    c.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for i in range(0, len(data), 50):
        part = data[i : i + 50]
        c.raw(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    c.raw(b"0\r\n\r\n")


# ---- the line itself ----
def _close(c: Call) -> None:
    c.handler.close_connection = True
    with contextlib.suppress(OSError):
        c.handler.connection.shutdown(socket.SHUT_RDWR)


def _reset(c: Call) -> None:
    c.handler.close_connection = True
    c.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.handler.connection.close()


def _partly(data: bytes, end: Do) -> Do:
    def do(c: Call) -> None:
        c.raw(data)
        end(c)

    return do


HEAD_SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
add("closes_at_once", NOTHING, _close)
add("resets_at_once", NOTHING, _reset)
add("closes_in_head", NOTHING, _partly(b"HTTP/1.1 200 OK\r\nContent-Ty", _close))
add("closes_after_head", NOTHING, _partly(HEAD_SSE + b"Content-Length: 900\r\n\r\n", _close))
add("resets_in_body", NOTHING, _partly(HEAD_SSE + b"Content-Length: 900\r\n\r\ndata: {", _reset))
add("closes_unframed", NOTHING, _partly(HEAD_SSE + b'Connection: close\r\n\r\ndata: {"choi', _close))
add("bad_status_line", NOTHING, _partly(b"HELLO THERE\r\n\r\n", _close))
add("bad_length", NOTHING, _partly(HEAD_SSE + b"Content-Length: many\r\n\r\n", _close))
add("bad_chunk", NOTHING, _partly(HEAD_SSE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n", _close))
add("bad_gzip", NOTHING, lambda c: c.reply(200, b"not gzip at all", "text/event-stream", Content_Encoding="gzip"))
_bomb = functools.cache(lambda: gzip.compress(bytes(64 << 20)))
add(
    "gzip_bomb",
    NOTHING,
    lambda c: c.reply(200, _bomb(), "text/event-stream", Content_Encoding="gzip"),
)
add("huge_header", NOTHING, _partly(b"HTTP/1.1 200 OK\r\nX: " + b"a" * (2 << 20) + b"\r\n\r\n", _close))
add("huge_line", NOTHING, lambda c: c.sse(b"data: " + b"a" * (24 << 20) + b"\n\n"))
add("deep_json", NOTHING, lambda c: c.reply(200, b"[" * 200_000))
add("bad_utf8", NOTHING, lambda c: c.sse(b"data: \xff\xfe{\n\n"))
add("bad_json_event", NOTHING, lambda c: c.sse(b'data: {"choices": [\n\ndata: [DONE]\n\n'))
add("huge_number", NOTHING, lambda c: c.sse(b'data: {"choices": ' + b"9" * 100_000 + b"}\n\n"))


@behaviour("hangs", NOTHING)
def _hang(c: Call) -> None:
    time.sleep(8)
    _close(c)


@behaviour("hangs_after_head", NOTHING)
def _hang_after(c: Call) -> None:
    c.raw(HEAD_SSE + b"Content-Length: 900\r\n\r\ndata: ")
    _hang(c)


@behaviour("drips", NOTHING)
def _drip(c: Call) -> None:
    c.raw(HEAD_SSE + b"Connection: close\r\n\r\n")
    for _ in range(40):
        c.raw(b": still here\n\n")
        time.sleep(0.2)
    _close(c)


@behaviour("endless", NOTHING)
def _endless(c: Call) -> None:
    c.raw(HEAD_SSE + b"Connection: close\r\n\r\n")
    line = f"data: {json.dumps(c.event({'content': 'na '}))}\n\n".encode() * 200
    for _ in range(2000):
        try:
            c.handler.wfile.write(line)
        except OSError:
            break
    _close(c)


def look_up(text: str) -> str:
    asked = re.findall(r"What is the secret code for (.*?)\?", text)
    if not asked:
        return "Hello there."
    found = re.findall(rf"The secret code for {re.escape(asked[-1])} is (.+?)\.(?=\s|$)", text)
    return found[-1] if found else "I don't see that code in what you gave me."


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def do_GET(self) -> None:
        call = Call(self, {}, "", 0)
        if self.path.endswith("/v1/models"):
            return call.reply(200, b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768}]}')
        return call.reply(404, b'{"error":{"message":"not found"}}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        name, _, route = self.path.lstrip("/").partition("/")
        text = "\n".join(str(m["content"]) for m in body.get("messages", [])) or str(body.get("prompt", ""))
        sent = len(TOKEN.findall(text)) + 8
        call = Call(self, body, look_up(text), sent)
        if route == "tokenize":
            return call.reply(200, json.dumps({"count": sent, "max_model_len": 32768}).encode())
        if route != "v1/chat/completions":
            return call.reply(404, b'{"error":{"message":"not found"}}')
        do = BEHAVIOURS[name][1] if sent >= ABOVE else BEHAVIOURS["right"][1]
        do(call)


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 128, True

    def handle_error(self, *args: Any) -> None: ...  # a client that hangs up is part of the play


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """The base address; put a behaviour's name behind it."""
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
