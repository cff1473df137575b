"""What an endpoint was found to offer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .scrub import private

# The first goes to the template of vllm and sglang, the second through dynamo (its `nvext.md`) to the engine.
THINKING_OFF: dict[str, dict[str, Any]] = {
    "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    "nvext": {"max_thinking_tokens": 0},
}

# Fields that make a prompt cold: the first two keep caches apart by their value, the third (llama.cpp's) uses none.
SALTS = ("cache_salt", "extra_key", "cache_prompt")


def salt_value(name: str, salt: str) -> str | bool:
    """What to send in the field `name` so that nothing which was sent without it, or with another salt, is used."""
    return False if name == "cache_prompt" else salt


@dataclass(frozen=True)
class Capabilities:
    """What was found. Every field is the result of a request; `notes` says in words what could not be found."""

    engine: str = "openai"
    model: str = ""
    max_model_len: int | None = None
    tokenize: str = "usage"  # "chat", "text" or "usage" (no route: lengths are calibrated on usage.prompt_tokens)
    tokenize_path: str | None = None
    usage: bool = False
    cached_tokens: bool = False  # it can be told how much of a prompt came out of a prefix cache
    cached_by: str = (
        "usage"  # or "counter": answers of a pair call transferred tokens cached, its prefill server does not
    )
    hello_tokens: int = 0  # of a request that says "Hello."; up to here, what is cached of a prompt is the template's
    salt: str | None = None  # request field that makes a prompt cold without admin rights
    flush_path: str | None = None
    abort_path: str | None = None
    logprobs: bool = False
    metrics: tuple[str, ...] = ()
    names_worker: bool = False  # `nvext.extra_fields` makes the answer name the workers that served it
    thinking: str | None = None  # how thinking is switched off: "chat_template_kwargs", "nvext", or None
    thinks: bool = False  # reasoning text came back all the same
    notes: tuple[str, ...] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
        """For the journal: without keys, hosts or home folders that a model's name or a note may hold."""
        return asdict(self) | {"model": private(self.model), "notes": [private(note) for note in self.notes]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Capabilities:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("metrics", "notes"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)

    def fields(self, *, salt: str | None = None, thinking: bool = False) -> dict[str, Any]:
        """Request fields for one trial: only such as this endpoint accepted when it was probed."""
        extra: dict[str, Any] = {}
        if self.names_worker:
            extra["nvext"] = {"extra_fields": ["worker_id"]}
        if self.thinking and not thinking:
            extra[self.thinking] = extra.get(self.thinking, {}) | THINKING_OFF[self.thinking]
        if salt and self.salt:
            extra[self.salt] = salt_value(self.salt, salt)
        return extra

    def __str__(self) -> str:
        length = f"{self.max_model_len:,} tokens" if self.max_model_len else "unknown context length"
        cold = f"cold by {self.salt}" if self.salt else "cold by new text only"
        return (
            f"{self.engine} endpoint, model {private(self.model)!r}, {length}; lengths by {self.tokenize}-form count; "
            f"cached tokens {'reported' if self.cached_tokens else 'not reported'}; {cold}; "
            f"log-probabilities {'yes' if self.logprobs else 'no'}"
        )
