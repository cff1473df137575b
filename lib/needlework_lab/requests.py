"""The three generation dialects: chat and completions as OpenAI and SGLang speak them, and SGLang's native /generate.

Each dialect reads a body into the engine's `Request` and writes the engine's events back, whole or as server-sent
events. Field names and defaults follow sglang srt/entrypoints/openai/protocol.py and srt/managers/io_struct.py. What
would change an answer and is not offered (penalties, logit bias, several choices, input log-probabilities) is refused,
not ignored.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from needlework_lab.json_bodies import Fields, refuse
from needlework_lab.types import Request, Sampling
from needlework_lab.wire import MAX_ROOM

MODEL = "needlework-lookup"
MAX_TEXT = 16 << 20
MAX_TOP_LOGPROBS = 20
LOOPBACK_NAMES = ("127.0.0.1", "localhost")


@dataclass
class Generation:
    """A parsed generation request: what the engine runs and how the client wants to hear of it."""

    dialect: str  # "chat", "completion", "native"
    request: Request
    stream: bool
    include_usage: bool = False
    text_in_logprobs: bool = False
    cached_details: bool = False  # say which tier cached tokens came from
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)


def check_model(fields: Fields) -> None:
    name = fields.text("model")
    if name not in (None, "", "default", MODEL):
        refuse(f"the model {name[:80]!r} does not exist; this server has {MODEL!r}", "model", status=404)


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat body, checked as far as the template does not check them."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        refuse("messages must be a non-empty list of objects with role and content", "messages")
    return messages


def chat_tokens(fields: Fields, tokenizer: Any) -> list[int]:
    """Token ids of a chat body (`messages`, or ready-made `input_ids`)."""
    ids = fields.ids("input_ids", tokenizer.vocabulary)
    if ids is not None:
        return ids
    last = fields.flag("continue_final_message")
    start = fields.flag("add_generation_prompt", True)
    try:
        return tokenizer.chat(messages_of(fields), add_generation_prompt=start, continue_final_message=last)
    except ValueError as error:
        refuse(str(error), "messages")


def prompt_tokens(fields: Fields, name: str, tokenizer: Any) -> list[int]:
    """Token ids of `prompt`/`text`: a string, a list of ids, or a list with exactly one of these."""
    value = fields.raw(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            refuse(f"{name} is longer than {MAX_TEXT} characters", name)
        return tokenizer.encode(value)
    if isinstance(value, list) and len(value) > 1 and not all(type(item) is int for item in value):
        refuse(f"{name} holds several prompts; this server takes one prompt a request", name)
    ids = fields.ids(name, tokenizer.vocabulary)
    if ids is None:
        refuse(f"{name} is missing", name)
    return ids


def _bootstrap(fields: Fields) -> dict[str, Any] | None:
    host = fields.text("bootstrap_host", limit=64)
    port = fields.integer("bootstrap_port", low=1, high=65535)
    room = fields.integer("bootstrap_room", low=0, high=MAX_ROOM)
    if host is None and port is None and room is None:
        return None
    if host is None or port is None or room is None:
        refuse("bootstrap_host, bootstrap_port and bootstrap_room belong together", "bootstrap_room")
    if host not in LOOPBACK_NAMES:
        refuse("bootstrap_host must be a loopback address: the lab does not leave this machine", "bootstrap_host")
    return {"host": "127.0.0.1", "port": port, "room": room}


def _request(
    fields: Fields, tokens: Sequence[int], sampling: Sampling, context: int, *, logprobs: bool, top: int, prefix: str
) -> Request:
    if not tokens:
        refuse("the prompt is empty")
    if len(tokens) >= context:
        refuse(f"the prompt has {len(tokens)} tokens, the model's context length is {context} tokens")
    if len(tokens) + sampling.max_tokens > context:
        refuse(
            f"{len(tokens)} prompt tokens and {sampling.max_tokens} new tokens are together more than the model's "
            f"context length of {context} tokens"
        )
    fields.only("n", 1, why="this server gives one choice a request")
    fields.only("best_of", 1, why="this server gives one choice a request")
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0, why="penalties are not offered")
    fields.only("repetition_penalty", 1, why="penalties are not offered")
    fields.only("logit_bias", {}, why="logit bias is not offered")
    return Request(
        rid=fields.text("rid", limit=256) or f"{prefix}{uuid.uuid4().hex}",
        tokens=tuple(tokens),
        sampling=sampling,
        cache_salt=fields.text("cache_salt", limit=256) or "",
        extra_key=fields.text("extra_key", limit=256) or "",
        logprobs=logprobs,
        top_logprobs=top,
        bootstrap=_bootstrap(fields),
    )


def _sampling(fields: Fields, max_tokens: int, seed_name: str) -> Sampling:
    seed = fields.integer(seed_name, low=-(2**63), high=2**63 - 1)
    stop_ids = fields.raw("stop_token_ids")
    if stop_ids is not None and (not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids)):
        refuse("stop_token_ids must be a list of token ids", "stop_token_ids")
    top_k = fields.integer("top_k", 0, low=-1, high=2**31 - 1) or 0
    return Sampling(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0.0, low=0.0, high=100.0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        top_k=max(0, top_k),
        seed=secrets.randbits(62) if seed is None else seed & (2**63 - 1),
        stop=fields.strings("stop"),
        stop_token_ids=tuple(stop_ids or ()),
        ignore_eos=fields.flag("ignore_eos"),
    )


def parse_chat(body: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    fields = Fields(body)
    check_model(fields)
    tokens = chat_tokens(fields, tokenizer)
    most = max(1, context - len(tokens))
    wanted = fields.integer("max_completion_tokens", low=1, high=2**31 - 1)
    wanted = fields.integer("max_tokens", low=1, high=2**31 - 1) if wanted is None else wanted
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS) or 0
    if top and not logprobs:
        refuse("top_logprobs needs logprobs: true", "top_logprobs")
    sampling = _sampling(fields, most if wanted is None else wanted, "seed")
    request = _request(fields, tokens, sampling, context, logprobs=logprobs, top=top, prefix="")
    usage = fields.child("stream_options").flag("include_usage")
    details = fields.flag("return_cached_tokens_details")
    return Generation("chat", request, fields.flag("stream"), usage, cached_details=details)


def parse_completion(body: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    fields = Fields(body)
    check_model(fields)
    tokens = prompt_tokens(fields, "prompt", tokenizer)
    wanted = fields.integer("max_tokens", 16, low=1, high=2**31 - 1) or 16
    top = fields.integer("logprobs", low=0, high=MAX_TOP_LOGPROBS)
    fields.only("echo", False, why="echo is not offered")
    fields.only("suffix", "", why="suffix is not offered")
    sampling = _sampling(fields, wanted, "seed")
    request = _request(fields, tokens, sampling, context, logprobs=top is not None, top=top or 0, prefix="")
    usage = fields.child("stream_options").flag("include_usage")
    details = fields.flag("return_cached_tokens_details")
    return Generation("completion", request, fields.flag("stream"), usage, cached_details=details)


def parse_generate(body: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    fields = Fields(body)
    check_model(fields)
    if (fields.raw("text") is None) == (fields.raw("input_ids") is None):
        refuse("give either text or input_ids", "text")
    tokens = prompt_tokens(fields, "text" if fields.raw("text") is not None else "input_ids", tokenizer)
    inner = fields.child("sampling_params")
    wanted = inner.integer("max_new_tokens", 128, low=1, high=2**31 - 1) or 128
    inner.only("n", 1, why="this server gives one choice a request")
    for name in ("frequency_penalty", "presence_penalty"):
        inner.only(name, 0, why="penalties are not offered")
    start = fields.integer("logprob_start_len", -1, low=-1, high=2**31 - 1)
    if start is not None and 0 <= start < len(tokens):
        refuse("log-probabilities of the prompt are not offered", "logprob_start_len")
    logprobs = fields.flag("return_logprob")
    top = fields.integer("top_logprobs_num", 0, low=0, high=MAX_TOP_LOGPROBS) or 0
    sampling = _sampling(inner, wanted, "sampling_seed")
    request = _request(fields, tokens, sampling, context, logprobs=logprobs, top=top, prefix="")
    return Generation("native", request, fields.flag("stream"), text_in_logprobs=fields.flag("return_text_in_logprobs"))
