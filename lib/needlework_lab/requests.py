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
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast
from pydantic import Field as Bounds

from needlework_lab.json_bodies import Body, Count, Name, Room, Strings, only, refuse, token_ids
from needlework_lab.types import Request, Sampling

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


class Prompt(Body):
    """Where the prompt of a body may stand; what is in it is looked at when it becomes tokens."""

    messages: Any = None
    input_ids: Any = None
    prompt: Any = None
    text: Any = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True


def _known_model(name: str) -> str:
    if name not in ("", "default", MODEL):
        refuse(f"the model {name[:80]!r} does not exist; this server has {MODEL!r}", "model", status=404)
    return name


class NamedPrompt(Prompt):
    model: Annotated[str, Bounds(max_length=1 << 10), AfterValidator(_known_model)] = ""


class NotOffered(Body):
    n: only(1, "this server gives one choice a request") = 1  # type: ignore[valid-type]
    best_of: only(1, "this server gives one choice a request") = 1  # type: ignore[valid-type]
    frequency_penalty: only(0, "penalties are not offered") = 0  # type: ignore[valid-type]
    presence_penalty: only(0, "penalties are not offered") = 0  # type: ignore[valid-type]
    repetition_penalty: only(1, "penalties are not offered") = 1  # type: ignore[valid-type]
    logit_bias: only({}, "logit bias is not offered") = None  # type: ignore[valid-type]


class Choice(NotOffered):
    """How the next token is chosen, and when to stop."""

    temperature: float = Bounds(default=0.0, ge=0, le=100)
    top_p: float = Bounds(default=1.0, ge=0, le=1)
    top_k: int = Bounds(default=0, ge=-1, le=2**31 - 1)
    stop: Strings = ()
    stop_token_ids: Annotated[list[int], FailFast()] = Bounds(default_factory=list)
    ignore_eos: bool = False

    def sampling(self, max_tokens: int, seed: int | None) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=secrets.randbits(62) if seed is None else seed & (2**63 - 1),
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


Seed = Annotated[int, Bounds(ge=-(2**63), le=2**63 - 1)]
Top = Annotated[int, Bounds(ge=0, le=MAX_TOP_LOGPROBS)]


class NativeChoice(Choice):
    max_new_tokens: Count = 128
    sampling_seed: Seed | None = None


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(NamedPrompt, NotOffered):
    """What the three dialects share."""

    stream: bool = False
    rid: Name = ""
    cache_salt: Name = ""
    extra_key: Name = ""
    bootstrap_host: Annotated[str, Bounds(max_length=64)] | None = None
    bootstrap_port: Annotated[int, Bounds(ge=1, le=65535)] | None = None
    bootstrap_room: Room | None = None

    def bootstrap(self) -> dict[str, Any] | None:
        parts = (self.bootstrap_host, self.bootstrap_port, self.bootstrap_room)
        if parts == (None, None, None):
            return None
        if None in parts:
            refuse("bootstrap_host, bootstrap_port and bootstrap_room belong together", "bootstrap_room")
        if self.bootstrap_host not in LOOPBACK_NAMES:
            refuse("bootstrap_host must be a loopback address: the lab does not leave this machine", "bootstrap_host")
        return {"host": "127.0.0.1", "port": self.bootstrap_port, "room": self.bootstrap_room}

    def request(self, tokens: list[int], sampling: Sampling, context: int, *, logprobs: bool, top: int) -> Request:
        if not tokens:
            refuse("the prompt is empty")
        if len(tokens) >= context:
            refuse(f"the prompt has {len(tokens)} tokens, the model's context length is {context} tokens")
        if len(tokens) + sampling.max_tokens > context:
            refuse(
                f"{len(tokens)} prompt tokens and {sampling.max_tokens} new tokens are together more than the model's "
                f"context length of {context} tokens"
            )
        return Request(
            rid=self.rid or uuid.uuid4().hex,
            tokens=tuple(tokens),
            sampling=sampling,
            cache_salt=self.cache_salt,
            extra_key=self.extra_key,
            logprobs=logprobs,
            top_logprobs=top,
            bootstrap=self.bootstrap(),
        )


class OpenAIBody(GenerationBody, Choice):
    seed: Seed | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions = StreamOptions()
    return_cached_tokens_details: bool = False


class ChatBody(OpenAIBody):
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Top = 0


class CompletionBody(OpenAIBody):
    logprobs: Top | None = None
    echo: only(False, "echo is not offered") = False  # type: ignore[valid-type]
    suffix: only("", "suffix is not offered") = ""  # type: ignore[valid-type]


class NativeBody(GenerationBody):
    sampling_params: NativeChoice = NativeChoice()
    logprob_start_len: int = Bounds(default=-1, ge=-1, le=2**31 - 1)
    return_logprob: bool = False
    top_logprobs_num: Top = 0
    return_text_in_logprobs: bool = False


def chat_tokens(body: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a chat body (`messages`, or ready-made `input_ids`)."""
    ids = token_ids(body.input_ids, "input_ids", tokenizer.vocabulary)
    if ids is not None:
        return ids
    messages = body.messages
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        refuse("messages must be a non-empty list of objects with role and content", "messages")
    last, start = body.continue_final_message, body.add_generation_prompt
    try:
        return tokenizer.chat(messages, add_generation_prompt=start, continue_final_message=last)
    except ValueError as error:
        refuse(str(error), "messages")


def prompt_tokens(value: Any, name: str, tokenizer: Any) -> list[int]:
    """Token ids of `prompt`/`text`: a string, a list of ids, or a list with exactly one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            refuse(f"{name} is longer than {MAX_TEXT} characters", name)
        return tokenizer.encode(value)
    if isinstance(value, list) and len(value) > 1 and not all(type(item) is int for item in value):
        refuse(f"{name} holds several prompts; this server takes one prompt a request", name)
    ids = token_ids(value, name, tokenizer.vocabulary)
    if ids is None:
        refuse(f"{name} is missing", name)
    return ids


def parse_chat(raw: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    body = ChatBody.of(raw)
    tokens = chat_tokens(body, tokenizer)
    wanted = body.max_completion_tokens or body.max_tokens or max(1, context - len(tokens))
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs needs logprobs: true", "top_logprobs")
    sampling = body.sampling(wanted, body.seed)
    request = body.request(tokens, sampling, context, logprobs=body.logprobs, top=body.top_logprobs)
    usage, details = body.stream_options.include_usage, body.return_cached_tokens_details
    return Generation("chat", request, body.stream, usage, cached_details=details)


def parse_completion(raw: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    body = CompletionBody.of(raw)
    tokens = prompt_tokens(body.prompt, "prompt", tokenizer)
    sampling = body.sampling(body.max_tokens or 16, body.seed)
    logprobs, top = body.logprobs is not None, body.logprobs or 0
    request = body.request(tokens, sampling, context, logprobs=logprobs, top=top)
    usage, details = body.stream_options.include_usage, body.return_cached_tokens_details
    return Generation("completion", request, body.stream, usage, cached_details=details)


def parse_generate(raw: dict[str, Any], tokenizer: Any, context: int) -> Generation:
    body = NativeBody.of(raw)
    if (body.text is None) == (body.input_ids is None):
        refuse("give either text or input_ids", "text")
    name = "input_ids" if body.text is None else "text"
    tokens = prompt_tokens(body.input_ids if body.text is None else body.text, name, tokenizer)
    if 0 <= body.logprob_start_len < len(tokens):
        refuse("log-probabilities of the prompt are not offered", "logprob_start_len")
    chosen = body.sampling_params
    sampling = chosen.sampling(chosen.max_new_tokens, chosen.sampling_seed)
    request = body.request(tokens, sampling, context, logprobs=body.return_logprob, top=body.top_logprobs_num)
    return Generation("native", request, body.stream, text_in_logprobs=body.return_text_in_logprobs)


class TokensBody(Body):
    """What /detokenize takes."""

    tokens: Any = None
    skip_special_tokens: bool = True


class AbortBody(Body):
    abort_all: bool = False
    rid: Name = ""


class CaptureBody(Prompt):
    """A request whose pages are asked for, and which of them."""

    cache_salt: Name = ""
    extra_key: Name = ""
    rid: Name | None = None
    room: Room | None = None
    buffer: Annotated[str, Bounds(max_length=64)] | None = None
