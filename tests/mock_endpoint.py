"""A small real HTTP server for tests: it recalls from the prompt by a regular expression, in several dialects, and can
be given defects. It is no model: what it gets right or wrong is decided by `Defects`, so instruments can be judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN = re.compile(r"<\|\w+\|>| ?[^\W\d_]+| ?\d|[^\w\s]|\s|_")
ASKED = re.compile(r"What is the secret code for (.*?)\?")
PAGE = 16
HEAD, TAIL = 3, 4  # tokens of the chat template before and after each message


@dataclass
class Defects:
    """`lose(length, needle_token, cached, ordinal) -> bool` decides whether the fact is not found."""

    lose: Callable[[int, int, int, int], bool] = lambda length, place, cached, ordinal: False
    answer_instead: Callable[[str, str], str] | None = None  # (question, right answer) -> answer
    truncate_to: int | None = None  # cuts the prompt in silence, from the start
    finish_on_abort: str = "abort"
    leak: bool = False  # now and then answers with the previous request's value
    delay_s: float = 0.0
    fail: Callable[[int], tuple[int, str] | None] = lambda ordinal: None  # (status, body) instead of an answer
    hang: float = 0.0  # seconds before such a failure
    thinks: bool = False
    replicas: int = 1
    count_fails: Callable[[int], bool] = lambda ordinal: False  # of the tokenise route
    transfers: bool = False  # as the decode server of a pair: all but the last token of any prompt is called cached
    page: int = PAGE  # tokens of the prefix cache's
    head: int = 0  # tokens that the template puts before every conversation
    zero_left_out: bool = False  # no word on cached tokens where there are none, as vllm 0.23 and sglang 0.5.14


@dataclass
class Mock:
    dialect: str = "sglang"  # sglang, vllm, llama.cpp, trtllm, openai, text, dynamo
    defects: Defects = field(default_factory=Defects)
    window: int = 131072
    base_url: str = ""
    requests: list[dict] = field(default_factory=list)
    cache: set[tuple] = field(default_factory=set)
    running: int = 0
    hits: int = 0  # tokens that came out of the cache
    aborted: int = 0
    counts: int = 0
    last_value: str = ""
    key: str | None = None
    model: str = "mock"
    old: bool = False  # llama.cpp before it counted chat requests and told the window of a slot with the model

    @property
    def chats(self) -> list[dict]:
        """Generation requests that were made for a trial (their prompt asks for a secret code)."""
        return [r for r in self.requests if "secret code" in json.dumps(r)]


def tokens_of(text: str) -> list[str]:
    return TOKEN.findall(text)


def render(messages: list[dict]) -> list[str]:
    out: list[str] = []
    for m in messages:
        out += ["<|role|>", m["role"], "\n", *tokens_of(m["content"]), "<|end|>"]
    return [*out, "<|role|>", "assistant", "\n"]


def answer_for(mock: Mock, tokens: list[str], cached: int, ordinal: int) -> str:
    text = "".join(tokens)
    asked = ASKED.findall(text)
    if not asked:
        return "Hello."
    key = asked[-1]
    found = list(re.finditer(rf"The secret code for {re.escape(key)} is (.+?)\.(?=\s|$)", text))
    if not found:
        return "I have no prior context about that."
    value = found[-1].group(1)
    place = len(tokens_of(text[: found[-1].start()]))
    previous, mock.last_value = mock.last_value, value
    if mock.defects.leak and ordinal % 4 == 3 and previous:
        return previous
    if mock.defects.lose(len(tokens), place, cached, ordinal):
        return "I have no prior context about that."
    if mock.defects.answer_instead:
        return mock.defects.answer_instead(key, value)
    return value


def make_app(mock: Mock) -> Starlette:
    d = mock.dialect
    size = (
        1 if d == "llama.cpp" else mock.defects.page
    )  # its cache has no pages, so the template's head is found in every prompt

    def refused(status: int, kind: str, message: str, **more: object) -> Response:
        """In OpenAI's form; llama.cpp adds the code and, when a prompt is too long, both lengths."""
        more |= {"code": status, "type": kind} if d == "llama.cpp" else {}
        return JSONResponse({"error": {"message": message, **more}}, status)

    async def chat(request: Request) -> Response:
        body = await request.json()
        if mock.key and request.headers.get("authorization") != f"Bearer {mock.key}":
            return refused(401, "authentication_error", "Invalid API Key")
        known = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "logprobs", "seed"}
        if d == "trtllm" and set(body) - known:
            return JSONResponse({"error": {"message": "extra fields not permitted"}}, 400)
        mock.requests.append(body)
        ordinal = len(mock.chats) - 1
        if fault := mock.defects.fail(ordinal):
            await asyncio.sleep(mock.defects.hang)
            return Response(fault[1], fault[0], media_type="text/html" if "<" in fault[1] else "application/json")
        tokens = [" head"] * mock.defects.head + render(body["messages"])
        if d == "llama.cpp" and len(tokens) >= mock.window:  # room for the answer is not asked for
            text = f"request ({len(tokens)} tokens) exceeds the available context size ({mock.window} tokens)"
            more = {"n_prompt_tokens": len(tokens), "n_ctx": mock.window}
            return refused(400, "exceed_context_size_error", f"{text}, try increasing it", **more)
        if d != "llama.cpp" and len(tokens) + body["max_tokens"] > mock.window:
            return refused(400, "", "prompt too long")
        if mock.defects.truncate_to:
            tokens = tokens[-mock.defects.truncate_to :]
        salt = body.get("cache_salt", "") if d in ("sglang", "vllm") else ""
        cached = 0
        if d != "llama.cpp" or body.get("cache_prompt", True):
            for page in range(len(tokens) // size):
                if (salt, *tokens[: (page + 1) * size][-64:], page) not in mock.cache:
                    break
                cached = (page + 1) * size
        for page in range(len(tokens) // size):
            mock.cache.add((salt, *tokens[: (page + 1) * size][-64:], page))
        cached = min(cached, len(tokens) - 1)
        mock.hits += cached
        mock.running += 1
        try:
            deadline = time.perf_counter() + mock.defects.delay_s
            while time.perf_counter() < deadline:
                if await request.is_disconnected():
                    mock.aborted += 1
                    return Response(status_code=499)
                await asyncio.sleep(0.01)
        finally:
            mock.running -= 1
        text = answer_for(mock, tokens, cached, ordinal)
        switch = body.get("chat_template_kwargs", {})
        nvext = body.get("nvext", {}) if d == "dynamo" else {}
        silent = nvext.get("max_thinking_tokens") == 0 if d == "dynamo" else not switch.get("enable_thinking", True)
        thought = "Let me look. " if mock.defects.thinks and not silent else ""
        pieces = tokens_of(text)[: body["max_tokens"]]
        finish = "stop" if len(tokens_of(text)) <= body["max_tokens"] else "length"
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(pieces), "total_tokens": 0}
        if d in ("sglang", "vllm", "text", "dynamo", "llama.cpp") and not (mock.defects.zero_left_out and not cached):
            usage["prompt_tokens_details"] = {"cached_tokens": len(tokens) - 1 if mock.defects.transfers else cached}
        logprobs = None
        if body.get("logprobs") and d != "openai":
            logprobs = {"content": [{"token": p, "logprob": -0.01} for p in pieces]}
        base = {"id": "x", "model": mock.model, "system_fingerprint": f"fp{ordinal % mock.defects.replicas}"}
        if "worker_id" in nvext.get("extra_fields", []):
            base["nvext"] = {"worker_id": {"prefill_worker_id": 7, "decode_worker_id": 9, "decode_dp_rank": 0}}
        message = {"role": "assistant", "content": "".join(pieces)}
        if thought:
            message["reasoning_content"] = thought
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
            return JSONResponse({**base, "choices": [choice], "usage": usage})

        async def events() -> Iterator[bytes]:
            if thought:
                yield _event({**base, "choices": [{"delta": {"reasoning_content": thought}}]})
            yield _event({**base, "choices": [{"delta": {"content": message["content"]}, "logprobs": logprobs}]})
            yield _event({**base, "choices": [{"delta": {}, "finish_reason": finish}]})
            yield _event({**base, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        mock.counts += 1
        if mock.defects.count_fails(mock.counts):
            return JSONResponse({"error": {"message": "busy"}}, 503)
        if d == "llama.cpp":  # takes nothing but `content`, and says nothing of what it does not know
            return JSONResponse({"tokens": list(range(len(tokens_of(body.get("content", "")))))})
        if "messages" in body and d in ("sglang", "vllm"):
            count = len(render(body["messages"]))
        elif "prompt" in body:
            count = len(tokens_of(body["prompt"]))
            if d == "sglang":  # lists every id; the others give the first few
                return JSONResponse({"count": count, "tokens": [hash(x) & 0xFFFF for x in tokens_of(body["prompt"])]})
        else:
            return JSONResponse({"error": "bad request"}, 400)
        return JSONResponse({"count": count, "tokens": list(range(min(count, 8))), "max_model_len": mock.window})

    async def models(request: Request) -> Response:
        card = {"id": mock.model, "object": "model"}
        if d in ("sglang", "vllm"):
            card["max_model_len"] = mock.window
        if d == "llama.cpp" and not mock.old:
            card["meta"] = {"n_ctx": mock.window, "n_ctx_train": 1 << 20}
        return JSONResponse({"object": "list", "data": [card]})

    async def input_tokens(request: Request) -> Response:
        count = len(render((await request.json())["messages"]))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def apply_template(request: Request) -> Response:
        return JSONResponse({"prompt": "".join(render((await request.json())["messages"]))})

    async def slots(request: Request) -> Response:
        return JSONResponse([{"id": 0, "n_ctx": mock.window, "is_processing": mock.running > 0}])

    async def metrics(request: Request) -> Response:
        if d == "dynamo":
            head, label = "dynamo_frontend_", '{model="mock"}'
            lines = [f"{head}inflight_requests{label} {mock.running}", f"{head}model_context_length{label} 131072"]
            lines += [f'{head}model_context_length{{model="other"}} 4096']
            lines += [f'{head}requests_total{{model="mock",error_type="cancelled"}} {mock.aborted}']
            return PlainTextResponse("\n".join(lines) + "\n")
        prefix = {"sglang": "sglang:", "vllm": "vllm:"}[d]
        names = {
            "sglang:": ("num_running_reqs", "num_aborted_requests_total"),
            "vllm:": ("num_requests_running", 'request_success_total{finished_reason="abort"}'),
        }[prefix]
        lines = [f"{prefix}{names[0]} {float(mock.running)}", f"{prefix}{names[1]} {float(mock.aborted)}"]
        if d == "vllm":
            lines.append(f"vllm:prefix_cache_hits_total {mock.hits}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def clear(request: Request) -> Response:
        """Always 200, as Dynamo's frontend answers: who cleared, and who did not."""
        failed = [{"name": "w2", "status": "No response from instance"}] if mock.defects.replicas > 1 else []
        mock.cache.clear()
        return JSONResponse({"cleared_workers": [{"name": "w1"}], "failed_workers": failed})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    if d in ("sglang", "vllm", "llama.cpp", "text"):
        routes.append(Route("/tokenize", tokenize, methods=["POST"]))
    if d in ("sglang", "vllm", "dynamo"):
        routes.append(Route("/metrics", metrics))
    if d == "dynamo":
        routes.append(Route("/clear_kv_blocks", clear, methods=["POST"]))
    if d == "sglang":
        routes.append(Route("/model_info", lambda r: JSONResponse({"model_path": "mock"})))
        routes.append(
            Route("/flush_cache", lambda r: (mock.cache.clear(), PlainTextResponse("flushed"))[1], methods=["POST"])
        )
    if d == "llama.cpp":  # /metrics and the count of a chat request are not in every start and build
        props = {"default_generation_settings": {"n_ctx": mock.window}, "build_info": "b1-0c1e57098"}
        routes.append(Route("/props", lambda r: JSONResponse(props)))
        routes += [Route("/apply-template", apply_template, methods=["POST"]), Route("/slots", slots)]
        if not mock.old:
            routes.append(Route("/v1/chat/completions/input_tokens", input_tokens, methods=["POST"]))
    return Starlette(routes=routes)


def _event(body: dict) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@contextlib.contextmanager
def serving(app: object, **options: str) -> Iterator[str]:
    """Serve an ASGI app on a free local port in a thread; yields its URL. options: of uvicorn (certificate and key)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(500):
        if server.started:
            break
        time.sleep(0.01)
    try:
        yield f"http{'s' if options else ''}://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)


@contextlib.contextmanager
def mock_endpoint(dialect: str = "sglang", old: bool = False, **defects: object) -> Iterator[Mock]:
    mock = Mock(dialect=dialect, old=old, defects=Defects(**defects))
    with serving(make_app(mock)) as url:
        mock.base_url = url
        yield mock
