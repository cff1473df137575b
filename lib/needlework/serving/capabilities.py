"""What an endpoint can do, found by asking it.

Names and routes move between releases and routers drop fields, so nothing is taken from a version or an engine's name:
every capability is tried once, with requests of a few tokens, and recorded. Sources of the routes: sglang
`srt/entrypoints/http_server.py`, vllm `entrypoints/serve/*`, TensorRT-LLM `tensorrt_llm/serve/openai_server.py`,
llama.cpp `tools/server/README.md`, dynamo `lib/llm/src/http/service/`, sglang `sgl-model-gateway/README.md`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from . import gauges
from .endpoint import PROBE_TIMEOUT_S, Endpoint, attempt
from .replies import Message, Reply, TransportError, parse_json
from .scrub import private
from .tokens import cache_hits, counted, tokenize_form

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


# what finding it all out takes, at most
DISCOVERY_REQUESTS = 14
DISCOVERY_TOKENS = 20_000


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
    cached_by: str = "usage"  # or "counter": of a pair's prefill server, as its answers call moved tokens cached
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


async def discover(endpoint: Endpoint) -> Capabilities:
    """Find out what `endpoint` can do; about ten short requests, none of which changes the server's state.

    Raises TransportError when the endpoint does not answer a plain chat request at all. The result is kept in
    `endpoint.capabilities`, so a second call costs nothing.
    """
    known: Capabilities | None = endpoint.capabilities
    if known is not None:
        return known
    card = _card(await endpoint.models(timeout_s=PROBE_TIMEOUT_S), endpoint.model)
    model = endpoint.model = card["id"]
    hello: list[Message] = [{"role": "user", "content": "Hello."}]
    first = await endpoint.chat(hello, max_tokens=4)  # must work; everything below is optional
    marks, info, metrics_text = await asyncio.gather(_marks(endpoint), _info(endpoint), gauges.text(endpoint))
    form, path = await tokenize_form(endpoint, model, hello)
    notes: list[str] = []
    if form == "usage":
        notes.append("no /tokenize route answers; prompt lengths are calibrated on usage.prompt_tokens")
    window = _length(card, info, marks) or gauges.context_length(metrics_text, model)
    hello_tokens = first.prompt_tokens or 0
    source, salt = await caching(endpoint, hello_tokens, notes, window)
    thinking, thinks = await _thinking(endpoint, hello, first)
    engine = _engine(marks, metrics_text)
    found = Capabilities(
        engine=engine,
        model=model,
        max_model_len=window,
        tokenize=form,
        tokenize_path=path,
        usage=first.prompt_tokens is not None,
        hello_tokens=hello_tokens,
        cached_tokens=source is not None,
        cached_by=source or "usage",
        salt=salt,
        flush_path=_flush_path(marks, engine),
        abort_path="/abort_request" if "sglang" in marks else None,
        logprobs=await _has_logprobs(endpoint, hello),
        names_worker=await _names_worker(endpoint, hello, first),
        metrics=tuple(n for n, v in (await gauges.of(endpoint, metrics_text, engine)).items() if v is not None),
        thinking=thinking,
        thinks=thinks,
        notes=tuple(notes),
    )
    endpoint.capabilities = found
    return found


async def flush(endpoint: Endpoint) -> None:
    """Ask the server to drop its prefix cache. Its word is not trusted: prove cold by cached tokens.

    Raises RuntimeError when no flush route was found or some workers did not follow, TransportError when the server
    refuses.
    """
    found = await discover(endpoint)
    if found.flush_path is None:
        raise RuntimeError("this endpoint offers no way to flush its prefix cache; use salts or new text instead")
    answer = await endpoint.post_text(found.flush_path)
    if found.engine == "dynamo":  # answers 200 in any case, and lists who cleared and who failed
        report = parse_json(answer.encode())
        report = report if isinstance(report, dict) else {}
        listed = [report.get(f"{name}_workers") for name in ("failed", "cleared")]
        failed, cleared = (workers if isinstance(workers, list) else [] for workers in listed)
        if failed or not cleared:
            why = endpoint.scrub(report.get("message") or "some did not answer", limit=120)
            raise RuntimeError(f"{len(failed)} workers did not clear their cache and {len(cleared)} did: {why}")


# ---- single questions ----


def _card(cards: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    found = next((card for card in cards if name in (None, card["id"])), None)
    if found is None:
        offered = ", ".join(card["id"][:60] for card in cards[:5])
        raise TransportError(f"the endpoint does not serve a model named {str(name)[:60]!r}; it offers {offered}")
    return found


async def _marks(endpoint: Endpoint) -> dict[str, Any]:
    """Routes that only one family has. Several marks, because single ones mislead (TensorRT-LLM also has /version)."""
    routes = {"sglang": "/model_info", "sglang_old": "/get_model_info", "version": "/version", "llama": "/props"}
    bodies = await asyncio.gather(*(attempt(endpoint.get_json(p, timeout_s=PROBE_TIMEOUT_S)) for p in routes.values()))
    marks = {name: body for name, body in zip(routes, bodies, strict=True) if isinstance(body, dict)}
    if "sglang_old" in marks:
        marks.setdefault("sglang", marks.pop("sglang_old"))
    if "llama" in marks and "default_generation_settings" not in marks["llama"]:
        del marks["llama"]
    return marks


async def _info(endpoint: Endpoint) -> dict[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        body = await attempt(endpoint.get_json(path, timeout_s=PROBE_TIMEOUT_S))
        if isinstance(body, dict):
            return body
    return {}


def _engine(marks: dict[str, Any], metrics: str) -> str:
    prefixes = {"sglang": ("sglang:", "sglang_"), "vllm": ("vllm:",), "llama.cpp": ("llamacpp:",),
                "tensorrt-llm": ("trtllm_",), "dynamo": ("dynamo_",), "router": ("smg_", "sgl_router")}  # fmt: skip
    for engine, starts in prefixes.items():
        if any(line.startswith(starts) for line in metrics.splitlines()):
            return engine
    if "llama" in marks:
        return "llama.cpp"
    if "sglang" in marks:
        return "sglang"
    return "openai"


def _length(card: dict[str, Any], info: dict[str, Any], marks: dict[str, Any]) -> int | None:
    # llama.cpp: both are the window of one slot; older builds have it in /props alone
    slot = marks.get("llama", {}).get("default_generation_settings")
    meta, slot = (part if isinstance(part, dict) else {} for part in (card.get("meta"), slot))
    values = (card.get("max_model_len"), card.get("context_length"), meta.get("n_ctx"), slot.get("n_ctx"),
              info.get("context_length"), info.get("max_model_len"), info.get("max_seq_len"))  # fmt: skip
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _flush_path(marks: dict[str, Any], engine: str) -> str | None:
    # a flush cannot be tried without flushing, so the family's marks decide; failing is loud at the time of use
    if engine == "dynamo":
        return "/clear_kv_blocks"
    return "/flush_cache" if "sglang" in marks else None


async def _has_logprobs(endpoint: Endpoint, hello: list[Message]) -> bool:
    reply = await attempt(endpoint.chat(hello, max_tokens=2, logprobs=True))
    return reply is not None and bool(reply.token_logprobs)


async def _names_worker(endpoint: Endpoint, hello: list[Message], first: Reply) -> bool:
    """Whether the answer names its workers when asked to in Dynamo's way; not asked where it names them anyway."""
    if first.worker is not None:
        return False
    reply = await attempt(endpoint.chat(hello, max_tokens=1, fields={"nvext": {"extra_fields": ["worker_id"]}}))
    return reply is not None and reply.worker is not None


async def _thinking(endpoint: Endpoint, hello: list[Message], first: Reply) -> tuple[str | None, bool]:
    """How thinking is switched off. Only tried when the plain answer showed reasoning text or an opening tag."""
    if not first.reasoning and not first.text.lstrip().startswith("<think"):
        return None, False
    for name, value in THINKING_OFF.items():
        reply = await attempt(endpoint.chat(hello, max_tokens=4, fields={name: value}))
        if reply is not None and not reply.reasoning and not reply.text.lstrip().startswith("<think"):
            return name, False
    return None, True


# ---- prefix caches: who tells what came out of one, and how a prompt is made cold ----


async def caching(
    endpoint: Endpoint, hello_tokens: int, notes: list[str], window: int | None = None
) -> tuple[str | None, str | None]:
    """(who tells the truth on cached tokens: "usage", "counter" or nobody; a salt field that works, or None).

    A text that was never sent cannot be cached, but for the template's `hello_tokens`. The decode server of a pair
    reports it as cached all the same, because its keys and values came from elsewhere (vllm 0.32.0
    `v1/core/sched/scheduler.py`); then only the counter of the server that computes prompts can tell. Sent again, it
    fills whole pages of the cache: a short text those of usual size, which a slow engine answers at once; the long one
    is asked where nothing of the short one was cached.
    """
    send: Any
    source, size = None, ""
    for text in _lamps(window):
        fresh = await attempt(endpoint.chat(text, max_tokens=1))
        if fresh is None:
            break
        send, source = Endpoint.chat, None if fresh.cached_tokens is None else "usage"
        asked = (fresh.prompt_tokens or 0) - hello_tokens
        if source and 0 < asked <= 2 * (fresh.cached_tokens - hello_tokens):
            send, source = counted, "counter"
            if await cache_hits(endpoint) is None:
                notes.append(
                    "a text that was never sent is reported as cached (a decode server counts what it was sent), so "
                    "warm and cold cannot be proved; name the prefill server as cache_url"
                )
                return None, None
        again = await attempt(send(endpoint, text, max_tokens=1))
        if again is not None and (again.cached_tokens or 0) > hello_tokens:  # some engines leave a zero out
            salt = await _salt(endpoint, send, text, again.cached_tokens)
            if salt is None:
                notes.append("no salt field is honoured; cold prompts start with a new first line instead")
            return source or "usage", salt
        size = f"of {fresh.prompt_tokens:,} tokens " if fresh.prompt_tokens else ""
    if source is None:
        notes.append("cached tokens are not reported, so warm and cold cannot be proved")
    else:
        notes.append(f"a repeated prompt {size}had no cached tokens: the prefix cache is off, or its pages are longer")
    return source, None


async def _salt(endpoint: Endpoint, send: Any, text: list[Message], cached_tokens: int) -> str | None:
    """The field with which less of a cached text is found; a value of an earlier probe would be warm already."""
    for name in SALTS:
        fields = {name: salt_value(name, secrets.token_hex(8))}
        salted = await attempt(send(endpoint, text, max_tokens=1, fields=fields))
        if salted is not None and (salted.cached_tokens or 0) < cached_tokens:
            return name
    return None


def _lamps(window: int | None) -> Iterator[list[Message]]:
    """New texts of about 170 and 2,000 tokens, or of half a smaller window."""
    most = 240 if window is None or window >= 4096 else max(10, window // 18)
    for times in sorted({min(24, most), most}):
        text = f"Cache check {secrets.token_hex(8)}. " + "The lamp is on the table. " * times
        yield [{"role": "user", "content": text}]
