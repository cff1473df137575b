"""Writing answers: the engine's events as chat, completion or native bodies, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from needlework_lab.requests import MODEL, Generation
from needlework_lab.types import Event


def usage_of(event: Event) -> dict[str, Any]:
    return {
        "prompt_tokens": event.prompt_tokens,
        "total_tokens": event.prompt_tokens + event.completion_tokens,
        "completion_tokens": event.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
    }


def cached_details(event: Event) -> dict[str, int]:
    """Cached tokens by the tier that they came from."""
    return {"device": event.cached_tokens - event.cached_host_tokens, "host": event.cached_host_tokens}


def draft_details(event: Event) -> dict[str, Any]:
    """How drafts fared, under SGLang's names; nothing where no draft was verified."""
    if not event.verified:
        return {}
    return {"spec_verify_ct": event.verified, "spec_accept_length": event.completion_tokens / event.verified}


class Writer:
    """Turns the events of one request into bodies of its dialect."""

    def __init__(self, generation: Generation, tokenizer: Any):
        self.generation, self.tokenizer = generation, tokenizer
        self.events: list[Event] = []
        self.text = ""

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.text += event.text

    # -- parts --

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token], special=True)

    def _chat_logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self.generation.request.logprobs:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self._name(token), "bytes": list(self.tokenizer.bytes([token])), "logprob": logprob}

        return {
            "content": [
                {**entry(e.token, e.logprob), "top_logprobs": [entry(t, p) for t, p in e.top_logprobs]}
                for e in events
                if e.token is not None
            ]
        }

    def _completion_logprobs(self, events: Sequence[Event], offset: int) -> dict[str, Any] | None:
        if not self.generation.request.logprobs:
            return None
        tokens = [e for e in events if e.token is not None]
        offsets = []
        for event in tokens:
            offsets.append(offset)
            offset += len(event.text)
        return {
            "tokens": [self._name(e.token) for e in tokens if e.token is not None],
            "token_logprobs": [e.logprob for e in tokens],
            "top_logprobs": [{self._name(t): p for t, p in e.top_logprobs} for e in tokens]
            if self.generation.request.top_logprobs
            else None,
            "text_offset": offsets,
        }

    def _meta(self) -> dict[str, Any]:
        last = self.events[-1]
        reason: dict[str, Any] | None = None
        if last.finish_reason == "stop":
            reason = {"type": "stop", "matched": last.matched_stop}
        elif last.finish_reason == "length":
            reason = {"type": "length", "length": last.completion_tokens}
        elif last.finish_reason is not None:
            reason = {"type": last.finish_reason, "message": "Aborted"}
        meta: dict[str, Any] = {
            "id": self.generation.request.rid,
            "finish_reason": reason,
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "cached_tokens": last.cached_tokens,
            "cached_tokens_details": cached_details(last),
            **draft_details(last),
            "weight_version": "default",
        }
        if self.generation.request.logprobs:
            tokens = [e for e in self.events if e.token is not None]

            def triple(token: int | None, logprob: float | None) -> list[Any]:
                named = self._name(token) if self.generation.text_in_logprobs and token is not None else None
                return [logprob, token, named]

            meta["output_token_logprobs"] = [triple(e.token, e.logprob) for e in tokens]
            meta["input_token_logprobs"] = []
            if self.generation.request.top_logprobs:
                meta["output_top_logprobs"] = [[triple(t, p) for t, p in e.top_logprobs] for e in tokens]
        if last.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self.generation.started
        return meta

    def _native(self) -> dict[str, Any]:
        ids = [e.token for e in self.events if e.token is not None]
        return {"text": self.text, "output_ids": ids, "meta_info": self._meta()}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.generation.request.rid, "object": kind, "created": self.generation.created, "model": MODEL}
        return {**head, "choices": choices}

    def _closing(self) -> dict[str, Any]:
        """What the last body of the OpenAI dialects says beside the answer: usage, and extensions where they apply."""
        last = self.events[-1]
        out: dict[str, Any] = {"usage": usage_of(last)}
        if self.generation.cached_details:
            out["sglext"] = {"cached_tokens_details": cached_details(last)}
        if last.verified:
            out["meta_info"] = draft_details(last)
        return out

    # -- whole answer --

    def whole(self) -> dict[str, Any]:
        """The body of a non-streaming answer; call it after the last event was added."""
        last = self.events[-1]
        if self.generation.dialect == "native":
            return self._native()
        choice: dict[str, Any] = {"index": 0, "finish_reason": last.finish_reason, "matched_stop": last.matched_stop}
        if self.generation.dialect == "chat":
            choice["message"] = {
                "role": "assistant",
                "content": self.text,
                "reasoning_content": None,
                "tool_calls": None,
            }
            choice["logprobs"] = self._chat_logprobs(self.events)
            return {**self._frame("chat.completion", [choice]), **self._closing()}
        choice["text"] = self.text
        choice["logprobs"] = self._completion_logprobs(self.events, 0)
        return {**self._frame("text_completion", [choice]), **self._closing()}

    # -- streaming --

    def opening(self) -> list[dict[str, Any]]:
        """What is sent before the first token."""
        if self.generation.dialect != "chat":
            return []
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
        return [self._frame("chat.completion.chunk", [choice])]

    def part(self, event: Event) -> list[dict[str, Any]]:
        """Bodies for one event (which must have been added); the last one carries the finish reason and the usage."""
        if self.generation.dialect == "native":
            return [self._native()]
        end = {"finish_reason": event.finish_reason, "matched_stop": event.matched_stop}
        if self.generation.dialect == "chat":
            delta = {"role": None, "content": event.text if event.text or event.finish_reason is None else None}
            logprobs = self._chat_logprobs([event]) if event.token is not None else None
            frame = self._frame("chat.completion.chunk", [{"index": 0, "delta": delta, "logprobs": logprobs, **end}])
        else:
            offset = len(self.text) - len(event.text)
            logprobs = self._completion_logprobs([event], offset)
            frame = self._frame("text_completion", [{"index": 0, "text": event.text, "logprobs": logprobs, **end}])
        frames = [frame]
        if event.finish_reason is not None and self.generation.include_usage:
            frames.append({**self._frame(frame["object"], []), **self._closing()})
        return frames
