"""One trial: what is asked, of whom, how it is sent, and the row that is known before and after the reply."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from needlework.serving import Endpoint, Reply, TransportError, tokens

from .budget import Budget
from .grade import grade
from .journal import Recorded
from .prompts import GENERATOR, Messages, Prompt, PromptSpec, digest

Target = Endpoint | Recorded | str
Row = dict[str, Any]
# of a row that another tool wrote, or that was cut down before it was passed on: nothing is known here
UNKNOWN: Row = {
    "prompt_tokens": None,
    "cached_tokens": None,
    "cache": "unknown",
    "needle_token": None,
    "expected": None,
}
Confirm = Callable[[Budget], bool]
# Earlier turns of a conversation: sends them, returns the final messages and columns to add to the trial's row.
Prepare = Callable[["Ask", Prompt, Endpoint], Awaitable[tuple[Messages, dict[str, Any]]]]


class Stopped(RuntimeError):
    """An instrument stopped early: the reason is one sentence; what was measured is in the journal."""


@dataclass(frozen=True)
class Ask:
    """One trial to be made. All fields are part of its identity, so change one and it is another trial.

    arm     which deployment or condition answers; cache: the state that is wanted ("cold", "warm", "unknown")
    send    a number that tells repeated sends of one prompt apart (0 = first)
    label   anything else that makes it another question
    """

    probe: str
    prompt: PromptSpec
    arm: str = ""
    repeat: int = 0
    cache: str = "cold"
    send: int = 0
    turn: int = 1
    concurrency: int = 1
    ordinal: int | None = None
    label: str = ""
    max_tokens: int = 48
    temperature: float = 0.0

    @cached_property
    def trial_id(self) -> str:
        """Hash of what is asked."""
        names = (f.name for f in fields(self) if f.name != "ordinal")  # which says when, not what
        identity = {name: getattr(self, name) for name in names} | {"prompt": self.prompt.as_dict()}
        return digest({"generator": GENERATOR, **identity})

    def whole(self, row: Row, *, graded: bool = True) -> Row:
        """A row of this trial with every column that an instrument reads: what a journal lacks follows from what was
        asked, or is unknown. Raises ValueError when a graded trial has no outcome.
        """
        if graded and row.get("outcome") is None:
            raise ValueError(f"the journal has no outcome for the {self}; mend its line of trials.jsonl or remove it")
        of = self.prompt
        asked = {"target_tokens": of.target_tokens, "depth": of.depth, "label": self.label, "wanted_cache": self.cache,
                 "ordinal": self.ordinal or 0, "outcome": None}  # fmt: skip
        return row | {name: value for name, value in (UNKNOWN | asked).items() if row.get(name) is None}

    def __str__(self) -> str:
        arm = f", arm {self.arm}" if self.arm else ""
        of = self.prompt
        return f"{self.probe} trial of {of.target_tokens} tokens at depth {of.depth:g} (seed {of.seed}{arm})"


def resolve(endpoint: Target) -> tuple[Endpoint | None, Recorded | None]:
    """(live endpoint, None) or (None, recorded run) from what the user named; raises ValueError for anything else."""
    if isinstance(endpoint, Recorded):
        return None, endpoint
    if isinstance(endpoint, str):
        if endpoint.startswith("recorded:"):
            return None, Recorded(endpoint.removeprefix("recorded:"))
        return Endpoint(endpoint), None
    if isinstance(endpoint, Endpoint):
        return endpoint, None
    raise ValueError("give an Endpoint, a URL that starts with http, or a Recorded run")


def with_seed(spec: PromptSpec, *parts: int) -> PromptSpec:
    """The same specification with a seed mixed from its own and `parts`: fresh text, reproducible."""
    return replace(spec, seed=int(digest([spec.seed, *parts], 7), 16))


def before(a: Ask, prompt: Prompt, *, run: str, ordinal: int) -> Row:
    """The part of a row that is known before anything is sent."""
    return {
        "trial_id": a.trial_id,
        "run": run,
        "probe": "control" if prompt.spec.control else a.probe,
        "arm": a.arm or "single",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "target_tokens": prompt.spec.target_tokens,
        **sent_columns(prompt),
        "depth": prompt.spec.depth,
        "needle_token": prompt.needle_token,
        "question": prompt.question,
        "expected": prompt.expected,
        "turn": a.turn,
        "concurrency": a.concurrency,
        "ordinal": a.ordinal if a.ordinal is not None else ordinal,
        "seed": prompt.spec.seed,
        "repeat": a.repeat,
        "send": a.send,
        "wanted_cache": a.cache,
        "label": a.label,
        "control": prompt.spec.control,
        "genre": prompt.spec.genre,
        "needle": prompt.spec.needle,
        "prompt_sha": prompt.sha256,
        "layout": prompt.layout,
        "spec": _beside(prompt),
    }


def _beside(prompt: Prompt) -> str:
    """What else decides about the text, as JSON: with it, the layout and the other columns the prompt can be written
    once more."""
    first = prompt.text.partition("\n")[0]
    names = ("needles", "ask", "distractors", "style", "pad", "from_start", "from_end")
    usual = PromptSpec(prompt.spec.target_tokens)
    more = {n: v for n in names if (v := getattr(prompt.spec, n)) != getattr(usual, n)}
    return json.dumps(more | {"salt": "".join(first.removeprefix("Set ").rstrip(".").split())})


def sent_columns(prompt: Prompt) -> Row:
    """How long the request was as it left, and who says so; without a tokenizer an interval is all that is known."""
    low, high = prompt.sent or (None, None)
    counted = prompt.counted_tokens if prompt.exact else None
    return {"counted_tokens": counted, "counted_by": prompt.counted_by, "sent_low": low, "sent_high": high}


class PromptTooLong(ValueError):
    """A prompt that was asked for does not fit the endpoint's window."""


def check_window(a: Ask, prompt: Prompt, limit: int | None) -> None:
    """Raises PromptTooLong when prompt and answer do not fit a window of `limit` tokens (None: not known)."""
    if limit and prompt.counted_tokens + a.max_tokens > limit:
        raise PromptTooLong(
            f"a prompt of {prompt.counted_tokens} tokens and {a.max_tokens} for the answer do not fit the window "
            f"of {limit} tokens; ask for shorter prompts"
        )


async def exchange(
    endpoint: Endpoint, a: Ask, prompt: Prompt, known_values: Mapping[str, str], *, alone: bool, thinking: bool,
    tolerance: int, prepare: Prepare | None,
) -> Row:  # fmt: skip
    """Send an ask and grade the answer; what goes wrong on the way is an outcome of its own, with its reason. alone: no
    other request of this bench is under way.
    """
    found = endpoint.capabilities
    # the same text again and yet cold: only a salt in the request does that
    salt = a.trial_id if a.cache == "cold" and a.send > 0 else None
    messages: list[dict[str, str]] = prompt.messages
    more: Row = {}
    started = time.perf_counter()
    try:
        if prepare is not None:
            messages, more = await prepare(a, prompt, endpoint)
        reply = await tokens.chat(
            endpoint, messages, alone=alone, max_tokens=a.max_tokens, temperature=a.temperature,
            logprobs=found.logprobs, fields=found.fields(salt=salt, thinking=thinking),
        )  # fmt: skip
    except TransportError as error:
        return more | {
            "outcome": "transport",
            "error": error.reason,
            "failure": error.failure,
            "http_status": error.status,
            "answer": getattr(error, "text", None),  # what came before an end that is none
            "finish_reason": getattr(error, "finish_reason", None),
            "cache": "unknown",
            "prompt_tokens": None,
            "latency_s": _rounded(time.perf_counter() - started),
        }
    note = length_note(prompt, reply.prompt_tokens, tolerance) if prepare is None else None
    return after(a, prompt, reply, known_values, found.hello_tokens) | more | {"length_note": note}


def after(a: Ask, prompt: Prompt, reply: Reply, known_values: Mapping[str, str], hello_tokens: int = 0) -> Row:
    """The part of a row that a reply decides. known_values: values of all prompts so far, with the trial of each."""
    result = grade(reply, prompt.expected, prompt.facts)
    if result.outcome not in ("exact", "empty", "cut", "reasoning_only"):  # only then can it be foreign content
        own = {f.value for f in prompt.facts}
        elsewhere = {v: t for v, t in known_values.items() if t != a.trial_id and v not in own}
        result = grade(reply, prompt.expected, prompt.facts, elsewhere)
    counted = prompt.counted_tokens if prompt.exact else None
    return {
        "prompt_tokens": reply.prompt_tokens if reply.prompt_tokens is not None else counted,
        "answer": result.answer,
        "outcome": result.outcome,
        "score": result.score,
        "logprob": result.logprob,
        "distance": result.distance,
        "answered_from": result.answered_from,
        "in_reasoning": result.in_reasoning,
        "finish_reason": reply.finish_reason,
        "completion_tokens": reply.completion_tokens,
        "reasoning_tokens": reply.reasoning_tokens,
        "cached_tokens": reply.cached_tokens,
        "cache": cache_state(reply.cached_tokens, reply.prompt_tokens, hello_tokens),
        "ttft_s": _rounded(reply.ttft_s),
        "latency_s": _rounded(reply.latency_s),
        "accept_length": reply.accept_length,
        "worker": reply.worker,
        "fingerprint": reply.fingerprint,
    }


def length_note(prompt: Prompt, realised: int | None, tolerance: int) -> str | None:
    """What is wrong when a server evaluates other than was sent: it has cut, or added to, the prompt."""
    if realised is None or prompt.sent is None:
        return None
    slack = max(2, tolerance) if prompt.exact else 0
    low, high = prompt.sent
    if low - slack <= realised <= high + slack:
        return None
    sent = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"the server reports {realised:,} prompt tokens where {sent} were sent" + (
        ": the prompt may be cut before the model sees it" if realised < low else ""
    )


def cache_state(cached: int | None, prompt_tokens: int | None, hello_tokens: int = 0) -> str:
    """ "cold" only when nothing was cached, "warm" only when at least half of the prompt was; else "unknown".

    hello_tokens    of a request that says next to nothing: a cache without pages (llama.cpp's) finds the template's
                    head in every prompt, and up to this length there is nothing else to find
    """
    if cached is None or not prompt_tokens:
        return "unknown"
    if cached <= hello_tokens:
        return "cold"
    return "warm" if 2 * cached >= prompt_tokens else "unknown"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
