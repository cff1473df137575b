"""Reading an answer: a server may put anything anywhere, so nothing is taken without looking at its type.

What is no answer never becomes one: an error in whatever form, an end that is no normal end, a stream that breaks off.
Each raises `TransportError` with a short category and the server's own words.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .scrub import scrub

MAX_EVENT_BYTES = 4 << 20
MAX_NAME_CHARS = 200  # of a model, a finish reason, a fingerprint
Scrubber = Callable[[object], str]
Message = dict[str, str]
# How a whole answer ends, as OpenAI, TGI, Anthropic and Gemini gateways say it; any other word is no normal end.
NORMAL_ENDS = ("stop", "length", "eos", "eos_token", "stop_sequence", "end_turn", "max_tokens")
TOKEN_BUDGET = ("length", "max_tokens")
_KEEP_ALIVE = re.compile(r"(keep[-_ ]?alive|ping|heartbeat|OPENROUTER PROCESSING|\s)*$", re.IGNORECASE)


class TransportError(RuntimeError):
    """No well-formed answer came back.

    reason   a bounded, scrubbed sentence with the server's own words where it gave some
    status   the HTTP status if there was one
    failure  the kind in a word: refused, tls, timeout, http_500 …, redirect, stream_broken, empty_body, malformed,
             too_long, server_error, no_choice, no_finish, tool_calls, finish_<reason>
    """

    def __init__(self, reason: str, status: int | None = None, failure: str = "malformed"):
        super().__init__(reason)
        self.reason, self.status, self.failure = reason, status, failure


@dataclass(frozen=True)
class Reply:
    """One well-formed answer. Counts are the server's own; None means that it did not say."""

    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    token_logprobs: tuple[tuple[str, float], ...] | None = None
    ttft_s: float | None = None
    latency_s: float = 0.0
    model: str | None = None
    fingerprint: str | None = None
    worker: str | None = None
    accept_length: float | None = None
    headers: dict[str, str] = field(default_factory=dict)


def decode(raw: bytes) -> str:
    """Bytes to text, strictly; raises TransportError."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TransportError("the body is not valid UTF-8") from None


def parse_json(raw: bytes) -> Any:
    """Bytes to JSON; raises TransportError with what was found instead."""
    text = decode(raw)
    if not text.strip():
        raise TransportError("the body is empty", failure="empty_body")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        kind = "an HTML page" if text.lstrip()[:1] == "<" else "not JSON"
        raise TransportError(f"the body is {kind}") from None


def error_words(body: Any) -> Any:
    """What a body that reports an error says, or None where it reports none.

    Seen in public servers: `error` as text or object (also an empty one), `object: error`, `type: error`, and
    FastAPI's `detail`, or a bare `message`; a null or empty `error` beside choices is none.
    """
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if error not in (None, False, ""):
        inner = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        return inner or body.get("message") or error or "(no words)"
    if body.get("object") == "error" or body.get("type") == "error":
        return body.get("message") or body.get("detail") or body
    if "choices" not in body and (detail := body.get("detail")):
        told = [d.get("msg") for d in detail if isinstance(d, dict)] if isinstance(detail, list) else []
        return "; ".join(str(t) for t in told if t) or detail
    return None if "choices" in body or "usage" in body else body.get("message")


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _number(value: Any) -> float | None:
    """A finite number, or None: Python reads NaN and infinity, which JSON does not have and no journal takes."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fine else None


def _name(value: Any) -> str | None:
    return _string(value)[:MAX_NAME_CHARS] or None


def _string(value: Any) -> str:
    if isinstance(value, str):
        # JSON can spell half a surrogate pair, which no table or file accepts
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):  # content parts
        return "".join(_string(part.get("text")) for part in value if isinstance(part, dict))
    return ""


def _usage(usage: Any) -> dict[str, Any]:
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens_details")
    answer = usage.get("completion_tokens_details")
    prompt, answer = (part if isinstance(part, dict) else {} for part in (prompt, answer))
    return {
        "prompt_tokens": _integer(usage.get("prompt_tokens")),
        "completion_tokens": _integer(usage.get("completion_tokens")),
        "reasoning_tokens": _integer(answer.get("reasoning_tokens", usage.get("reasoning_tokens"))),
        "cached_tokens": _integer(prompt.get("cached_tokens", usage.get("cached_tokens"))),
    }


def _worker(value: Any) -> Any:
    """A worker's name; of a pair (dynamo names both, with their ranks) "prefill 1, decode 2"."""
    if not isinstance(value, dict):
        return value
    names = {role: value.get(f"{role}_worker_id") for role in ("prefill", "decode")}
    return ", ".join(f"{role} {name}" for role, name in names.items() if name is not None) or value


def _logprobs(logprobs: Any) -> list[tuple[str, float]]:
    if not isinstance(logprobs, dict):
        return []
    content = logprobs.get("content")
    pairs = [(i.get("token"), i.get("logprob")) for i in (content if isinstance(content, list) else [])
             if isinstance(i, dict)]  # fmt: skip
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if isinstance(tokens, list) and isinstance(values, list):
        pairs += zip(tokens, values, strict=False)
    return [(_string(token), v) for token, value in pairs if (v := _number(value)) is not None]


class _Answer:
    """What the bodies of one answer (one, or the events of a stream) have told so far."""

    def __init__(self, scrubber: Scrubber):
        self.scrub = scrubber
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.probabilities: list[tuple[str, float]] = []
        self.finish: Any = None
        self.usage: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}
        self.model: str | None = None
        self.fingerprint: str | None = None
        self.choices = self.messages = 0
        self.calls = False

    def take(self, body: Any) -> bool:
        """Read one body; True when it held text. Raises TransportError when it reports an error or is none."""
        if not isinstance(body, dict):
            raise TransportError("the answer is JSON but not an object")
        words = error_words(body)
        if words is not None:
            raise TransportError(self.scrub(f"the server reports an error: {words}"), failure="server_error")
        if isinstance(body.get("usage"), dict):
            self.usage = _usage(body["usage"])
        self._extensions(body)
        self.model = _name(body.get("model")) or self.model
        self.fingerprint = _name(body.get("system_fingerprint")) or self.fingerprint
        choices = body.get("choices")
        told = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index") in (None, 0):  # one answer was asked for
                told |= self._choice(choice)
        return told

    def _choice(self, choice: dict[str, Any]) -> bool:
        self.choices += 1
        message = choice.get("message", choice.get("delta"))
        text = reasoning = ""
        if isinstance(message, dict):
            self.messages += 1
            content = message.get("content")
            if content is not None and not isinstance(content, (str, list)):
                raise TransportError(f"the answer's content is of type {type(content).__name__}, not text")
            text = _string(content) or _string(message.get("refusal"))
            # SGLang and llama.cpp say reasoning_content, newer vLLM reasoning, Ollama thinking
            names = ("reasoning_content", "reasoning", "thinking")
            reasoning = next((t for t in (_string(message.get(name)) for name in names) if t), "")
            self.calls |= bool(message.get("tool_calls") or message.get("function_call"))
        elif isinstance(choice.get("text"), str):
            self.messages += 1
            text = _string(choice["text"])
        self.text.append(text)
        self.reasoning.append(reasoning)
        self.probabilities += _logprobs(choice.get("logprobs"))
        self.finish = choice.get("finish_reason") or self.finish
        return bool(text or reasoning)

    def _extensions(self, body: dict[str, Any]) -> None:
        """What only some servers tell: cached tokens in llama.cpp's timings, draft acceptance, worker ids."""
        if not any(name in body for name in ("timings", "meta_info", "nvext", "spec_accept_length", "worker_id")):
            return
        timings, meta, extension = (
            part if isinstance(part, dict) else {}
            for part in (body.get("timings"), body.get("meta_info"), body.get("nvext"))
        )
        worker = extension.get("worker_id", meta.get("worker_id", body.get("worker_id")))
        found = {
            "cached": _integer(timings.get("cache_n", meta.get("cached_tokens"))),
            "accept": _number(meta.get("spec_accept_length", body.get("spec_accept_length"))),
            "worker": scrub(_string(str(_worker(worker))), limit=60) if worker is not None else None,
        }
        self.extras |= {name: value for name, value in found.items() if value is not None}

    def reply(self, headers: dict[str, str], latency_s: float, ttft_s: float | None = None, said: str = "") -> Reply:
        """The whole answer; raises TransportError when it has none, or no end. said: the server's words beside it."""
        said = f": {said}" if said else ""
        if not self.choices:
            raise TransportError(self.scrub(f"the answer has no choices{said}"), failure="no_choice")
        if not self.messages:
            raise TransportError(self.scrub(f"the answer's message is null{said}"), failure="no_choice")
        finish, words = self.finish, said
        if isinstance(self.finish, dict):  # SGLang's own form
            finish, told = self.finish.get("type"), self.finish.get("message")
            words = f": {told}" if told else said
        name = _name(finish) or (None if finish is None else "unknown")
        if name is None:
            raise TransportError(self.scrub(f"the answer ended without a finish reason{said}"), failure="no_finish")
        text = "".join(self.text)
        if self.calls and not text:
            raise TransportError("the answer calls a tool instead of answering", failure="tool_calls")
        if name.casefold() not in NORMAL_ENDS:
            raise Unfinished(self.scrub(f"the answer ended with the finish reason {name[:60]!r}{words}"), name, text)
        usage = self.usage or _usage(None)
        if usage["cached_tokens"] is None:
            usage["cached_tokens"] = self.extras.get("cached")
        return Reply(
            text=text,
            reasoning="".join(self.reasoning),
            finish_reason=name,
            token_logprobs=tuple(self.probabilities) or None,
            ttft_s=ttft_s,
            latency_s=latency_s,
            model=self.model,
            fingerprint=self.fingerprint,
            worker=self.extras.get("worker") or headers.get("x-worker-id"),
            accept_length=self.extras.get("accept"),
            headers=headers,
            **usage,
        )


class Unfinished(TransportError):
    """An answer whose finish reason is no normal end (error, abort, content_filter …); `text` came before it."""

    def __init__(self, reason: str, finish_reason: str, text: str):
        word = re.sub(r"\W+", "_", finish_reason.casefold()).strip("_")[:40] or "unknown"
        super().__init__(reason, failure=f"finish_{word}")
        self.finish_reason, self.text = finish_reason, text


def read_completion(body: Any, headers: dict[str, str], latency_s: float, scrubber: Scrubber) -> Reply:
    """One body as a reply; raises TransportError."""
    answer = _Answer(scrubber)
    answer.take(body)
    return answer.reply(headers, latency_s)


class EventStream:
    """Collects server-sent events into one reply, in every form that the format allows: lines end in CR, LF or both, an
    event's data may stand on several lines, comments and unknown fields are passed over and kept as the server's words
    in case that no answer comes. Source: WHATWG HTML, section "Server-sent events".
    """

    def __init__(self, scrubber: Scrubber, started: float, first: asyncio.Event | None = None):
        self.answer, self.started, self.first = _Answer(scrubber), started, first
        self.pending = b""
        self.data: list[bytes] = []  # of the event under way, until it is whole
        self.kind = ""
        self.said: list[str] = []
        self.plain = b""  # a body without events under this content type
        self.ttft_s: float | None = None
        self.events = 0
        self.ended = False

    def feed(self, chunk: bytes) -> bool:
        """Take bytes; True when the stream said that it is done."""
        whole = self.pending + chunk
        if b"\r" in whole:
            held = b"\r" if whole.endswith(b"\r") else b""  # half of a CRLF, perhaps
            whole = whole.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *lines, rest = whole.split(b"\n")
        self.pending = rest + held
        if len(self.pending) > MAX_EVENT_BYTES:
            raise TransportError("a streamed event is longer than 4 MiB", failure="too_long")
        return any(self._line(line) for line in lines)

    def _line(self, line: bytes) -> bool:
        if self.events == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.strip()
        if line.startswith(b"data:"):
            return self._data(line[5:].strip())
        if not line:
            self._end_of_event()
            return False
        name, _, value = line.partition(b":")
        words = value.decode("utf-8", "replace").strip()
        if name == b"event":
            self.kind = words
        elif name == b"":
            if not _KEEP_ALIVE.match(words):
                self.said.append(words[:300])
        elif name == b"error":
            try:
                found = error_words({"error": json.loads(words)})
            except (ValueError, RecursionError):
                found = words
            raise TransportError(self.answer.scrub(f"the server reports an error: {found}"), failure="server_error")
        elif name not in (b"id", b"retry"):
            self.said.append(line.decode("utf-8", "replace")[:300])
            if not self.events and len(self.plain) < MAX_EVENT_BYTES:
                self.plain += line + b"\n"
        self.said = self.said[-5:]
        return False

    def _data(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.ended = True
            return True
        self.data.append(data)
        try:
            event = json.loads(b"\n".join(self.data) if len(self.data) > 1 else data)
        except (ValueError, RecursionError):
            if sum(map(len, self.data)) > MAX_EVENT_BYTES:
                raise TransportError("a streamed event is longer than 4 MiB", failure="too_long") from None
            return False  # the rest stands on the next line
        self.data.clear()
        self.events += 1
        if self.kind == "error":
            words = error_words(event) or event
            raise TransportError(self.answer.scrub(f"the server reports an error: {words}"), failure="server_error")
        if self.answer.take(event) and self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self.started
            if self.first is not None:
                self.first.set()
        return False

    def _end_of_event(self) -> None:
        if self.data:
            words = b" ".join(self.data).decode("utf-8", "replace").strip()[:200]
            self.data.clear()
            if self.kind == "error":
                raise TransportError(self.answer.scrub(f"the server reports an error: {words}"), failure="server_error")
            raise TransportError(self.answer.scrub(f"a streamed event is not JSON: {words}"))
        if self.kind == "error":
            self.said.append("event: error")
            self.ended = True
        self.kind = ""

    def reply(self, headers: dict[str, str]) -> Reply:
        """The reply of a stream that has come to its end; raises TransportError when it holds none."""
        if not self.ended:
            if self.pending.strip():
                self._line(self.pending)
            self._end_of_event()
        if not self.events and self.plain[:1] == b"{":
            self.answer.take(parse_json(self.plain))
            self.ended = True
        said = "; ".join(reversed(self.said)) if self.said else ""
        if not self.events and not self.ended and not said:
            raise TransportError("the stream is empty", failure="empty_body")
        if "event: error" in self.said:
            raise TransportError(self.answer.scrub(f"the server reports an error: {said}"), failure="server_error")
        if not self.answer.choices and self.ended:
            said = said or f"the end mark alone, after {self.events} events"
        elif self.answer.finish is None and not self.ended:
            why = f"the stream broke off after {self.events} events, without a finish reason or an end mark"
            raise TransportError(self.answer.scrub(f"{why}: {said}" if said else why), failure="stream_broken")
        return self.answer.reply(headers, time.perf_counter() - self.started, self.ttft_s, said)
