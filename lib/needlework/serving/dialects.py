"""What an endpoint can do, found by asking it.

Names and routes move between releases and routers drop fields, so nothing is taken from a version or an engine's name:
every capability is tried once, with requests of a few tokens, and recorded. Sources of the routes: sglang
`srt/entrypoints/http_server.py`, vllm `entrypoints/serve/*`, TensorRT-LLM `tensorrt_llm/serve/openai_server.py`,
llama.cpp `tools/server/README.md`, dynamo `lib/llm/src/http/service/`, sglang `sgl-model-gateway/README.md`.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Any

from .capabilities import THINKING_OFF, Capabilities
from .endpoint import Endpoint
from .gauges import context_length, read_gauges
from .replies import Message, Reply, TransportError, parse_json

PROBE_TIMEOUT_S = 30.0


async def probe(endpoint: Endpoint) -> Capabilities:
    """Find out what `endpoint` can do; about ten short requests, none of which changes the server's state.

    Raises TransportError when the endpoint does not answer a plain chat request at all. The result is kept in
    `endpoint.capabilities`, so a second call costs nothing.
    """
    if endpoint.capabilities is not None:
        return endpoint.capabilities
    models = await endpoint.get_json("/v1/models", timeout_s=PROBE_TIMEOUT_S)
    card = _card(models, endpoint.model)
    model = await endpoint.resolve_model()
    hello: list[Message] = [{"role": "user", "content": "Hello."}]
    first = await endpoint.chat(hello, max_tokens=4, stream=True)  # must work; everything below is optional
    marks, info, metrics_text = await asyncio.gather(_marks(endpoint), _info(endpoint), _metrics_text(endpoint))
    form, path = await _tokenize_form(endpoint, model, hello)
    notes: list[str] = []
    if form == "usage":
        notes.append("no /tokenize route answers; prompt lengths are calibrated on usage.prompt_tokens")
    source = await _cached_source(endpoint, notes)
    salt = await _accepted_field(endpoint, source, ("cache_salt", "extra_key"), notes)
    thinking, thinks = await _thinking(endpoint, hello, first)
    engine = _engine(marks, metrics_text)
    found = Capabilities(
        engine=engine,
        model=model,
        max_model_len=_length(card, info) or context_length(metrics_text, model),
        tokenize=form,
        tokenize_path=path,
        usage=first.prompt_tokens is not None,
        cached_tokens=source is not None,
        cached_by=source or "usage",
        salt=salt,
        flush_path=_flush_path(marks, engine),
        abort_path="/abort_request" if "sglang" in marks else None,
        logprobs=await _has_logprobs(endpoint, hello),
        names_worker=await _names_worker(endpoint, hello, first),
        metrics=tuple(name for name, value in read_gauges(metrics_text).items() if value is not None),
        thinking=thinking,
        thinks=thinks,
        notes=tuple(notes),
    )
    endpoint.capabilities = found
    return found


async def count_tokens(endpoint: Endpoint, messages: list[Message]) -> int | None:
    """Tokens of the whole request as the server's template renders it; None when no tokenise route answers.

    The text form counts the contents without the template; the caller learns the template's share from usage.
    """
    found = endpoint.capabilities or await probe(endpoint)
    if found.tokenize_path is None:
        return None
    if found.tokenize == "chat":
        body = {"model": found.model, "messages": messages, "add_generation_prompt": True}
        body |= {k: v for k, v in found.fields().items() if k == "chat_template_kwargs"}
    else:
        body = _text_body(found.tokenize_path, found.model, "\n".join(m["content"] for m in messages))
    base = endpoint.tokenizer_url or endpoint.base_url
    return _count(await endpoint.post_json(found.tokenize_path, body, base=base))


async def read_metrics(endpoint: Endpoint) -> dict[str, float | None]:
    """The quantities of METRICS as this server offers them; None where it does not."""
    return read_gauges(await _metrics_text(endpoint))


async def chat(endpoint: Endpoint, messages: list[Message], *, alone: bool, **options: Any) -> Reply:
    """`endpoint.chat`, with cached tokens from the source that was found to be right. alone: no other request is under
    way, as a counter needs it; without it such an endpoint's cached tokens are not known.
    """
    if endpoint.capabilities.cached_by == "usage":
        return await endpoint.chat(messages, **options)
    if not alone:
        return replace(await endpoint.chat(messages, **options), cached_tokens=None)
    return await _counted(endpoint, messages, **options)


async def _counted(endpoint: Endpoint, messages: list[Message], **options: Any) -> Reply:
    before = await _cache_hits(endpoint)
    reply = await endpoint.chat(messages, **options)
    after = await _cache_hits(endpoint)
    found = None if before is None or after is None else round(after - before)
    if found is not None and not 0 <= found <= (reply.prompt_tokens or 0):
        found = None  # somebody else's request, or a restart, is in the difference
    return replace(reply, cached_tokens=found)


async def _cache_hits(endpoint: Endpoint) -> float | None:
    """Tokens that the prefix cache at `cache_url` has served so far; None where it does not tell."""
    if endpoint.cache_url is None:
        return None
    text = await _try(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=endpoint.cache_url))
    return read_gauges(text or "")["cached_tokens"]


async def flush(endpoint: Endpoint) -> None:
    """Ask the server to drop its prefix cache. Its word is not trusted: prove cold by cached tokens.

    Raises RuntimeError when no flush route was found or some workers did not follow, TransportError when the server
    refuses.
    """
    found = await probe(endpoint)
    if found.flush_path is None:
        raise RuntimeError("this endpoint offers no way to flush its prefix cache; use salts or new text instead")
    answer = await endpoint.post_text(found.flush_path)
    if found.engine == "dynamo":  # answers 200 in any case, and lists who cleared and who failed
        report = parse_json(answer.encode())
        report = report if isinstance(report, dict) else {}
        failed, cleared = (report.get(f"{name}_workers") or [] for name in ("failed", "cleared"))
        if failed or not cleared:
            why = endpoint.scrub(report.get("message") or "some did not answer", limit=120)
            raise RuntimeError(f"{len(failed)} workers did not clear their cache and {len(cleared)} did: {why}")


# ---- single questions ----


async def _try(awaitable: Any) -> Any:
    try:
        return await awaitable
    except TransportError:
        return None


def _card(models: Any, name: str | None) -> dict[str, Any]:
    rows = models.get("data") if isinstance(models, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not rows:
        raise TransportError("/v1/models lists no model; is this an OpenAI-compatible endpoint?")
    if name is None:
        return rows[0]
    for row in rows:
        if row.get("id") == name:
            return row
    offered = ", ".join(str(row.get("id"))[:60] for row in rows[:5])
    raise TransportError(f"the endpoint does not serve a model named {name[:60]!r}; it offers {offered}")


async def _marks(endpoint: Endpoint) -> dict[str, Any]:
    """Routes that only one family has. Several marks, because single ones mislead (TensorRT-LLM also has /version)."""
    routes = {"sglang": "/model_info", "sglang_old": "/get_model_info", "version": "/version", "llama": "/props"}
    bodies = await asyncio.gather(*(_try(endpoint.get_json(p, timeout_s=PROBE_TIMEOUT_S)) for p in routes.values()))
    marks = {name: body for name, body in zip(routes, bodies, strict=True) if isinstance(body, dict)}
    if "sglang_old" in marks:
        marks.setdefault("sglang", marks.pop("sglang_old"))
    if "llama" in marks and "default_generation_settings" not in marks["llama"]:
        del marks["llama"]
    return marks


async def _info(endpoint: Endpoint) -> dict[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        body = await _try(endpoint.get_json(path, timeout_s=PROBE_TIMEOUT_S))
        if isinstance(body, dict):
            return body
    return {}


async def _metrics_text(endpoint: Endpoint) -> str:
    base = endpoint.metrics_url or endpoint.base_url
    return await _try(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=base)) or ""


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


def _length(card: dict[str, Any], info: dict[str, Any]) -> int | None:
    meta: Any = card.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    values = (card.get("max_model_len"), card.get("context_length"), meta.get("n_ctx"), info.get("context_length"),
              info.get("max_model_len"), info.get("max_seq_len"))  # fmt: skip
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _flush_path(marks: dict[str, Any], engine: str) -> str | None:
    # a flush cannot be tried without flushing, so the family's marks decide; failing is loud at the time of use
    if engine == "dynamo":
        return "/clear_kv_blocks"
    return "/flush_cache" if "sglang" in marks else None


def _text_body(path: str, model: str, text: str) -> dict[str, Any]:
    if path.endswith("#content"):  # llama.cpp
        return {"content": text, "add_special": False}
    return {"model": model, "prompt": text, "add_special_tokens": False}


def _count(body: Any) -> int | None:
    if not isinstance(body, dict):
        return None
    count, tokens = body.get("count"), body.get("tokens")
    if isinstance(count, list):  # a batch of one
        count = count[0] if len(count) == 1 else None
    if isinstance(count, int) and not isinstance(count, bool):
        return count
    return len(tokens) if isinstance(tokens, list) else None


async def _tokenize_form(endpoint: Endpoint, model: str, hello: list[Message]) -> tuple[str, str | None]:
    base = endpoint.tokenizer_url or endpoint.base_url
    longer: list[Message] = [{"role": "user", "content": "Hello. " * 40}]
    for path in ("/tokenize", "/v1/tokenize"):
        counts = []
        for messages in (hello, longer):
            body = {"model": model, "messages": messages, "add_generation_prompt": True}
            counts.append(_count(await _try(endpoint.post_json(path, body, base=base, timeout_s=PROBE_TIMEOUT_S))))
        # a route that ignores `messages` counts an empty prompt: the longer text must count more
        if counts[0] and counts[1] and counts[1] >= counts[0] + 39:
            return "chat", path
    for path in ("/tokenize", "/v1/tokenize", "/_internal/tokenize", "/tokenize#content"):
        short, long = (_text_body(path, model, m[0]["content"]) for m in (hello, longer))
        counts = [
            _count(await _try(endpoint.post_json(path, body, base=base, timeout_s=PROBE_TIMEOUT_S)))
            for body in (short, long)
        ]
        if counts[0] and counts[1] and counts[1] >= counts[0] + 39:
            return "text", path
    return "usage", None


async def _cached_source(endpoint: Endpoint, notes: list[str]) -> str | None:
    """Who tells the truth on cached tokens: "usage", "counter", or nobody.

    A text that was never sent cannot be cached. The decode server of a pair reports it as cached all the same, because
    its keys and values came from elsewhere (vllm 0.32.0 `v1/core/sched/scheduler.py`); then only the counter of the
    server that computes prompts can tell.
    """
    fresh = _lamps(secrets.token_hex(8))
    reply = await _try(endpoint.chat(fresh, max_tokens=1))
    if reply is None or reply.cached_tokens is None:
        notes.append("cached tokens are not reported, so warm and cold cannot be proved")
        return None
    if 2 * reply.cached_tokens < (reply.prompt_tokens or 0):
        return "usage"
    if await _cache_hits(endpoint) is not None:
        return "counter"
    notes.append(
        "a text that was never sent is reported as cached (a decode server counts what it was sent), so warm and cold "
        "cannot be proved; name the prefill server as cache_url"
    )
    return None


def _lamps(first: str) -> list[Message]:
    """A text that fills some pages of any prefix cache; `first` makes it another one."""
    return [{"role": "user", "content": f"Cache check {first}. " + "The lamp is on the table. " * 120}]


async def _accepted_field(
    endpoint: Endpoint, source: str | None, names: tuple[str, ...], notes: list[str]
) -> str | None:
    """A salt field that is accepted *and* seen to work: the same prompt under a new salt has no cached tokens."""
    if source is None:
        return None
    text, send = _lamps("twice"), _counted if source == "counter" else Endpoint.chat
    await _try(send(endpoint, text, max_tokens=1))
    again = await _try(send(endpoint, text, max_tokens=1))
    if again is None or not again.cached_tokens:
        notes.append("a repeated prompt had no cached tokens: the prefix cache seems to be off")
        return None
    for name in names:
        # a salt used in an earlier probe would be warm already
        salted = await _try(send(endpoint, text, max_tokens=1, fields={name: secrets.token_hex(8)}))
        if salted is not None and salted.cached_tokens is not None and salted.cached_tokens < again.cached_tokens:
            return name
    notes.append("no salt field is honoured; cold prompts start with a new first line instead")
    return None


async def _has_logprobs(endpoint: Endpoint, hello: list[Message]) -> bool:
    reply = await _try(endpoint.chat(hello, max_tokens=2, logprobs=True))
    return reply is not None and bool(reply.token_logprobs)


async def _names_worker(endpoint: Endpoint, hello: list[Message], first: Reply) -> bool:
    """Whether the answer names its workers when asked to in Dynamo's way; not asked where it names them anyway."""
    if first.worker is not None:
        return False
    reply = await _try(endpoint.chat(hello, max_tokens=1, fields={"nvext": {"extra_fields": ["worker_id"]}}))
    return reply is not None and reply.worker is not None


async def _thinking(endpoint: Endpoint, hello: list[Message], first: Reply) -> tuple[str | None, bool]:
    """How thinking is switched off. Only tried when the plain answer showed reasoning text or an opening tag."""
    if not first.reasoning and not first.text.lstrip().startswith("<think"):
        return None, False
    for name, value in THINKING_OFF.items():
        reply = await _try(endpoint.chat(hello, max_tokens=4, fields={name: value}))
        if reply is not None and not reply.reasoning and not reply.text.lstrip().startswith("<think"):
            return name, False
    return None, True
