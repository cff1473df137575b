"""Reading an answer: a server may put anything anywhere, so nothing is taken without looking at its type."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .scrub import scrub

MAX_EVENT_BYTES = 4 << 20
MAX_NAME_CHARS = 200  # of a model, a finish reason, a fingerprint
Scrubber = Callable[[object], str]
Message = dict[str, str]


class TransportError(RuntimeError):
    """No well-formed answer came back. `reason` is a bounded, scrubbed sentence; `status` the HTTP status if any."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.reason = reason
        self.status = status


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
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise TransportError("the body is not valid UTF-8") from None


def parse_json(raw: bytes) -> Any:
    """Bytes to JSON; raises TransportError with what was found instead."""
    text = decode(raw)
    if not text.strip():
        raise TransportError("the body is empty")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        kind = "an HTML page" if text.lstrip()[:1] == "<" else "not JSON"
        raise TransportError(f"the body is {kind}") from None


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


def _choice(choice: dict[str, Any], part: str) -> tuple[str, str, list[tuple[str, float]]]:
    """(text, reasoning, token log-probabilities) of one choice; `part` is "message" or "delta"."""
    message = choice.get(part)
    if isinstance(message, dict):
        text = _string(message.get("content"))
        # SGLang and llama.cpp say reasoning_content, newer vLLM says reasoning
        reasoning = _string(message.get("reasoning_content")) or _string(message.get("reasoning"))
    else:
        text, reasoning = _string(choice.get("text")), ""
    probabilities: list[tuple[str, float]] = []
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        content = logprobs.get("content")
        pairs = [(i.get("token"), i.get("logprob")) for i in (content if isinstance(content, list) else [])
                 if isinstance(i, dict)]  # fmt: skip
        tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
        if isinstance(tokens, list) and isinstance(values, list):
            pairs += zip(tokens, values, strict=False)
        probabilities = [(_string(token), v) for token, value in pairs if (v := _number(value)) is not None]
    return text, reasoning, probabilities


def _extras(body: dict[str, Any]) -> dict[str, Any]:
    """What only some servers tell: cached tokens in llama.cpp's timings, draft acceptance, worker ids."""
    timings = body.get("timings")
    meta = body.get("meta_info")
    extension = body.get("nvext")
    timings, meta, extension = (part if isinstance(part, dict) else {} for part in (timings, meta, extension))
    accept = meta.get("spec_accept_length", body.get("spec_accept_length"))
    worker = extension.get("worker_id", meta.get("worker_id", body.get("worker_id")))
    return {
        "cached": _integer(timings.get("cache_n", meta.get("cached_tokens"))),
        "accept": _number(accept),
        "worker": scrub(_string(str(_worker(worker))), limit=60) if worker is not None else None,
    }


def read_completion(body: Any, headers: dict[str, str], latency_s: float, scrubber: Scrubber) -> Reply:
    if not isinstance(body, dict):
        raise TransportError("the answer is JSON but not an object")
    if body.get("error"):
        raise TransportError(scrubber(f"the server reports an error: {_error(body)}"))
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise TransportError("the answer has no choices")
    text, reasoning, probabilities = _choice(choices[0], "message")
    usage, extras = _usage(body.get("usage")), _extras(body)
    if usage["cached_tokens"] is None:
        usage["cached_tokens"] = extras["cached"]
    return Reply(
        text=text,
        reasoning=reasoning,
        finish_reason=_name(choices[0].get("finish_reason")),
        token_logprobs=tuple(probabilities) or None,
        latency_s=latency_s,
        model=_name(body.get("model")),
        fingerprint=_name(body.get("system_fingerprint")),
        worker=extras["worker"] or headers.get("x-worker-id"),
        accept_length=extras["accept"],
        headers=headers,
        **usage,
    )


def _error(body: dict[str, Any]) -> Any:
    error = body["error"]
    return error.get("message", error) if isinstance(error, dict) else error


class EventStream:
    """Collects server-sent events into one reply."""

    def __init__(self, scrubber: Scrubber, started: float, first: asyncio.Event | None):
        self.scrub, self.started, self.first = scrubber, started, first
        self.pending = bytearray()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.probabilities: list[tuple[str, float]] = []
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}
        self.model: str | None = None
        self.fingerprint: str | None = None
        self.ttft_s: float | None = None
        self.events = 0
        self.ended = False

    def feed(self, chunk: bytes) -> bool:
        """Take bytes; True when the stream said that it is done."""
        self.pending += chunk
        if b"\n" not in chunk:
            if len(self.pending) > MAX_EVENT_BYTES:
                raise TransportError("a streamed event is longer than 4 MiB")
            return False
        *lines, rest = bytes(self.pending).split(b"\n")
        self.pending = bytearray(rest)
        return any(self._line(line) for line in lines)

    def _line(self, line: bytes) -> bool:
        line = line.strip()
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return True
        event = parse_json(data)
        if not isinstance(event, dict):
            raise TransportError("a streamed event is JSON but not an object")
        if event.get("error"):
            raise TransportError(self.scrub(f"the server reports an error in the stream: {_error(event)}"))
        self.events += 1
        if isinstance(event.get("usage"), dict):
            self.usage = _usage(event["usage"])
        for name, value in _extras(event).items():
            if value is not None:
                self.extras[name] = value
        self.model = _name(event.get("model")) or self.model
        self.fingerprint = _name(event.get("system_fingerprint")) or self.fingerprint
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            text, reasoning, probabilities = _choice(choices[0], "delta")
            if (text or reasoning) and self.ttft_s is None:
                self.ttft_s = time.perf_counter() - self.started
                if self.first is not None:
                    self.first.set()
            self.text.append(text)
            self.reasoning.append(reasoning)
            self.probabilities += probabilities
            self.finish = _name(choices[0].get("finish_reason")) or self.finish
        return False

    def reply(self, headers: dict[str, str]) -> Reply:
        if self.pending.strip() and not self.ended:
            self._line(bytes(self.pending))
        if not self.ended and self.finish is None:
            raise TransportError(f"the stream ended without an end mark after {self.events} events")
        usage = self.usage or _usage(None)
        if usage["cached_tokens"] is None:
            usage["cached_tokens"] = self.extras.get("cached")
        return Reply(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            finish_reason=self.finish,
            token_logprobs=tuple(self.probabilities) or None,
            ttft_s=self.ttft_s,
            latency_s=time.perf_counter() - self.started,
            model=self.model,
            fingerprint=self.fingerprint,
            worker=self.extras.get("worker") or headers.get("x-worker-id"),
            accept_length=self.extras.get("accept"),
            headers=headers,
            **usage,
        )
