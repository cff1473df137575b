"""What an endpoint can do, found by asking it.

Names and routes move between releases and routers drop fields, so nothing is taken from a version or an engine's name:
every capability is tried once, with requests of a few tokens, and recorded. Sources of the routes: sglang
`srt/entrypoints/http_server.py`, vllm `entrypoints/serve/*`, TensorRT-LLM `tensorrt_llm/serve/openai_server.py`,
llama.cpp `tools/server/README.md`, dynamo `lib/llm/src/http/service/`, sglang `sgl-model-gateway/README.md`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .attempts import PROBE_TIMEOUT_S, attempt
from .cached import accepted_salt, cached_source
from .capabilities import THINKING_OFF, Capabilities
from .counts import tokenize_form
from .endpoint import Endpoint
from .gauges import context_length, read_gauges
from .replies import Message, Reply, TransportError, parse_json


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
    form, path = await tokenize_form(endpoint, model, hello)
    notes: list[str] = []
    if form == "usage":
        notes.append("no /tokenize route answers; prompt lengths are calibrated on usage.prompt_tokens")
    source = await cached_source(endpoint, notes)
    salt = await accepted_salt(endpoint, source, notes)
    thinking, thinks = await _thinking(endpoint, hello, first)
    engine = _engine(marks, metrics_text)
    found = Capabilities(
        engine=engine,
        model=model,
        max_model_len=_length(card, info, marks) or context_length(metrics_text, model),
        tokenize=form,
        tokenize_path=path,
        usage=first.prompt_tokens is not None,
        hello_tokens=first.prompt_tokens or 0,
        cached_tokens=source is not None,
        cached_by=source or "usage",
        salt=salt,
        flush_path=_flush_path(marks, engine),
        abort_path="/abort_request" if "sglang" in marks else None,
        logprobs=await _has_logprobs(endpoint, hello),
        names_worker=await _names_worker(endpoint, hello, first),
        metrics=tuple(n for n, v in (await _gauges(endpoint, metrics_text, engine)).items() if v is not None),
        thinking=thinking,
        thinks=thinks,
        notes=tuple(notes),
    )
    endpoint.capabilities = found
    return found


async def read_metrics(endpoint: Endpoint) -> dict[str, float | None]:
    """The quantities of METRICS as this server offers them; None where it does not."""
    found = endpoint.capabilities
    return await _gauges(endpoint, await _metrics_text(endpoint), found.engine if found is not None else "")


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
        listed = [report.get(f"{name}_workers") for name in ("failed", "cleared")]
        failed, cleared = (workers if isinstance(workers, list) else [] for workers in listed)
        if failed or not cleared:
            why = endpoint.scrub(report.get("message") or "some did not answer", limit=120)
            raise RuntimeError(f"{len(failed)} workers did not clear their cache and {len(cleared)} did: {why}")


# ---- single questions ----


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


async def _metrics_text(endpoint: Endpoint) -> str:
    base = endpoint.metrics_url or endpoint.base_url
    return await attempt(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=base)) or ""


async def _gauges(endpoint: Endpoint, text: str, engine: str) -> dict[str, float | None]:
    """The quantities of METRICS; llama.cpp without --metrics still tells of each slot whether it is at work."""
    gauges = read_gauges(text)
    if engine == "llama.cpp" and gauges["running"] is None:
        slots = await attempt(endpoint.get_json("/slots", timeout_s=PROBE_TIMEOUT_S))
        if isinstance(slots, list):
            busy = [slot.get("is_processing") for slot in slots if isinstance(slot, dict)]
            gauges["running"] = float(busy.count(True)) if busy else None
    return gauges


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
