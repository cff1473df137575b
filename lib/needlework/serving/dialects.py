"""What an endpoint can do, found by asking it.

Names and routes move between releases and routers drop fields, so nothing is taken from a version or an engine's name:
every capability is tried once, with requests of a few tokens, and recorded. Sources of the routes: sglang
`srt/entrypoints/http_server.py`, vllm `entrypoints/serve/*`, TensorRT-LLM `tensorrt_llm/serve/openai_server.py`,
llama.cpp `tools/server/README.md`, dynamo `lib/llm/src/http/service/`, sglang `sgl-model-gateway/README.md`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from .endpoint import Endpoint
from .replies import Message, Reply, TransportError

PROBE_TIMEOUT_S = 30.0
# Metric names moved over time; each quantity has a list of aliases, and "not offered" is None, never 0.
METRICS: dict[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs", "sglang_num_running_reqs", "vllm:num_requests_running",
                "llamacpp:requests_processing", "dynamo_frontend_inflight_requests", "num_requests_running"),
    "waiting": ("sglang:num_queue_reqs", "sglang_num_queue_reqs", "vllm:num_requests_waiting",
                "llamacpp:requests_deferred", "dynamo_frontend_queued_requests"),
    "kv_used": ("sglang:num_used_tokens", "sglang:kv_used_tokens", "sglang:token_usage", "sglang_token_usage",
                "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "kv_cache_utilization"),
    "aborted": ("sglang:num_aborted_requests_total", "sglang:num_aborted_requests", "sglang_num_aborted_requests_total",
                'vllm:request_success_total{finished_reason="abort"}'),
    "cached_tokens": ("sglang:cached_tokens_total", "sglang_cached_tokens_total", "vllm:prefix_cache_hits_total",
                      "vllm:prefix_cache_hits", "trtllm_kv_cache_reused_blocks_total"),
    "prompt_tokens": ("sglang:prompt_tokens_total", "sglang_prompt_tokens_total", "vllm:prompt_tokens_total",
                      "llamacpp:prompt_tokens_total", "smg_router_tokens_total"),
    "router_retries": ("smg_worker_retries_total", "sgl_router_retries_total", "vllm_router_retries_total"),
    "transfer_failed": ("sglang:num_transfer_failed_reqs_total", "sglang_num_transfer_failed_reqs_total",
                        "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_transfers"),
}  # fmt: skip
_METRIC_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{[^}]*\})?\s+([-+0-9.eEnNaAiIfF]+)")


@dataclass(frozen=True)
class Capabilities:
    """What was found. Every field is the result of a request; `notes` says in words what could not be found."""

    engine: str = "openai"
    model: str = ""
    max_model_len: int | None = None
    tokenize: str = "usage"  # "chat", "text" or "usage" (no route: lengths are calibrated on usage.prompt_tokens)
    tokenize_path: str | None = None
    usage: bool = False
    cached_tokens: bool = False
    salt: str | None = None  # request field that makes a prompt cold without admin rights
    flush_path: str | None = None
    abort_path: str | None = None
    logprobs: bool = False
    metrics: tuple[str, ...] = ()
    thinking: str | None = None  # how thinking is switched off: "chat_template_kwargs", or None
    thinks: bool = False  # reasoning text came back all the same
    notes: tuple[str, ...] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Capabilities:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("metrics", "notes"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)

    def fields(self, *, salt: str | None = None, thinking: bool = False) -> dict[str, Any]:
        """Request fields for one trial: only such as this endpoint accepted when it was probed."""
        extra: dict[str, Any] = {}
        if self.thinking and not thinking:
            extra[self.thinking] = {"enable_thinking": False, "thinking": False}
        if salt and self.salt:
            extra[self.salt] = salt
        return extra

    def __str__(self) -> str:
        length = f"{self.max_model_len:,} tokens" if self.max_model_len else "unknown context length"
        cold = f"cold by {self.salt}" if self.salt else "cold by new text only"
        return (
            f"{self.engine} endpoint, model {self.model!r}, {length}; lengths by {self.tokenize}-form count; "
            f"cached tokens {'reported' if self.cached_tokens else 'not reported'}; {cold}; "
            f"log-probabilities {'yes' if self.logprobs else 'no'}"
        )


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
    salt = await _accepted_field(endpoint, hello, ("cache_salt", "extra_key"), notes)
    thinking, thinks = await _thinking(endpoint, hello, first)
    found = Capabilities(
        engine=_engine(marks, metrics_text),
        model=model,
        max_model_len=_length(card, info),
        tokenize=form,
        tokenize_path=path,
        usage=first.prompt_tokens is not None,
        cached_tokens=await _reports_cached(endpoint, hello),
        salt=salt,
        flush_path=_flush_path(marks),
        abort_path="/abort_request" if "sglang" in marks else None,
        logprobs=await _has_logprobs(endpoint, hello),
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


def read_gauges(text: str) -> dict[str, float | None]:
    """Parse Prometheus text into the quantities of METRICS, summed over labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines()[:20_000]:
        if match := _METRIC_LINE.match(line):
            name, labels, raw = match.groups()
            try:
                value = float(raw)
            except ValueError:
                continue
            sums[name] = sums.get(name, 0.0) + value
            for label in (labels or "{}")[1:-1].split(","):
                key = f"{name}{{{label.strip()}}}"
                sums[key] = sums.get(key, 0.0) + value
    return {what: next((sums[a] for a in aliases if a in sums), None) for what, aliases in METRICS.items()}


async def flush(endpoint: Endpoint) -> None:
    """Ask the server to drop its prefix cache. Its word is not trusted: prove cold by cached tokens.

    Raises RuntimeError when no flush route was found, TransportError when the server refuses.
    """
    found = await probe(endpoint)
    if found.flush_path is None:
        raise RuntimeError("this endpoint offers no way to flush its prefix cache; use salts or new text instead")
    await endpoint.post_text(found.flush_path)


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


def _flush_path(marks: dict[str, Any]) -> str | None:
    # a flush cannot be tried without flushing, so the family's marks decide; failing is loud at the time of use
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


async def _accepted_field(
    endpoint: Endpoint, hello: list[Message], names: tuple[str, ...], notes: list[str]
) -> str | None:
    """A salt field that is accepted *and* seen to work: the same prompt under a new salt has no cached tokens."""
    if not await _reports_cached(endpoint, hello):
        notes.append("cached tokens are not reported, so warm and cold cannot be proved")
        return None
    text: list[Message] = [{"role": "user", "content": "Cache check. " + "The lamp is on the table. " * 120}]
    await _try(endpoint.chat(text, max_tokens=1))
    again = await _try(endpoint.chat(text, max_tokens=1))
    if again is None or not again.cached_tokens:
        notes.append("a repeated prompt had no cached tokens: the prefix cache seems to be off")
        return None
    for name in names:
        # a salt used in an earlier probe would be warm already
        salted = await _try(endpoint.chat(text, max_tokens=1, fields={name: secrets.token_hex(8)}))
        if salted is not None and salted.cached_tokens is not None and salted.cached_tokens < again.cached_tokens:
            return name
    notes.append("no salt field is honoured; cold prompts start with a new first line instead")
    return None


async def _reports_cached(endpoint: Endpoint, hello: list[Message]) -> bool:
    reply = await _try(endpoint.chat(hello, max_tokens=1))
    return reply is not None and reply.cached_tokens is not None


async def _has_logprobs(endpoint: Endpoint, hello: list[Message]) -> bool:
    reply = await _try(endpoint.chat(hello, max_tokens=2, logprobs=True))
    return reply is not None and bool(reply.token_logprobs)


async def _thinking(endpoint: Endpoint, hello: list[Message], first: Reply) -> tuple[str | None, bool]:
    """How thinking is switched off. Only tried when the plain answer showed reasoning text or an opening tag."""
    if not first.reasoning and not first.text.lstrip().startswith("<think"):
        return None, False
    fields = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    reply = await _try(endpoint.chat(hello, max_tokens=4, fields=fields))
    if reply is not None and not reply.reasoning and not reply.text.lstrip().startswith("<think"):
        return "chat_template_kwargs", False
    return None, True
