"""The HTTP front of one lab process: SGLang's routes over a `Worker`. Loopback only.

Run by `start` as `python -m needlework_lab.main …`; every failure that a client can cause is an answer of 4xx
with one sentence, every failure of the server one of 5xx with a reason, and a client that goes away takes its request
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import needlework
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from needlework_lab import requests
from needlework_lab.captured_pages import Capture, prompt_key
from needlework_lab.json_bodies import HttpError, read_object, refuse, token_ids
from needlework_lab.metrics import collect, expose
from needlework_lab.streams import Feed, Json, answer
from needlework_lab.types import Request, Sampling
from needlework_lab.worker import Worker

Parser = Callable[[dict[str, Any], Any, int], requests.Generation]
CALL_TIMEOUT_S = 60.0


class Front:
    """Routes over one worker."""

    def __init__(self, worker: Worker, facts: dict[str, Any]):
        self.worker, self.engine, self.facts = worker, worker.engine, facts
        self.tokenizer = worker.engine.tokenizer
        self.context: int = worker.engine.geometry.max_context

    async def _call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = self.worker.call(function)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_TIMEOUT_S)
        except TimeoutError:
            refuse("the engine did not answer in time", status=503)

    # ---- generation ----

    async def _generate(self, http: HttpRequest, parse: Parser) -> Response:
        body = await read_object(http)
        generation = await asyncio.to_thread(parse, body, self.tokenizer, self.context)
        return await answer(http, self.worker, generation)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._generate(http, requests.parse_chat)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._generate(http, requests.parse_completion)

    async def generate(self, http: HttpRequest) -> Response:
        return await self._generate(http, requests.parse_generate)

    # ---- tokens ----

    async def tokenize(self, http: HttpRequest) -> Response:
        body = requests.NamedPrompt.of(await read_object(http))
        if body.messages is not None:
            ids: Any = await asyncio.to_thread(requests.chat_tokens, body, self.tokenizer)
        else:
            prompt = body.prompt
            texts = prompt if isinstance(prompt, list) else [prompt]
            if not texts or not all(isinstance(text, str) for text in texts):
                refuse("give prompt (a string or a list of strings) or messages", "prompt")
            lists = await asyncio.to_thread(lambda: [self.tokenizer.encode(text) for text in texts])
            ids = lists if isinstance(prompt, list) else lists[0]
        count = [len(i) for i in ids] if ids and isinstance(ids[0], list) else len(ids)
        return Json({"tokens": ids, "count": count, "max_model_len": self.context})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = requests.TokensBody.of(await read_object(http))
        ids = token_ids(body.tokens, "tokens", self.tokenizer.vocabulary)
        if ids is None:
            refuse("tokens is missing", "tokens")
        return Json({"text": self.tokenizer.decode(ids, special=not body.skip_special_tokens)})

    # ---- about the server ----

    async def models(self, http: HttpRequest) -> Response:
        card = {
            "id": requests.MODEL,
            "object": "model",
            "created": self.facts["started"],
            "owned_by": "needlework",
            "root": requests.MODEL,
            "parent": None,
            "max_model_len": self.context,
        }
        return Json({"object": "list", "data": [card]})

    async def health(self, http: HttpRequest) -> Response:
        if self.worker.failure is not None or not self.worker.is_alive():
            return PlainTextResponse("the engine has failed", 503)
        return PlainTextResponse("")

    async def health_generate(self, http: HttpRequest) -> Response:
        """Runs one token where one server can; a half of a pair answers as /health does."""
        if self.worker.role == "combined":
            ids = tuple(self.tokenizer.chat([{"role": "user", "content": "hello"}]))
            request = Request(f"HEALTH_CHECK_{id(http)}", ids, Sampling(max_tokens=1), cache_salt="health")
            feed = Feed(self.worker, request)
            try:
                while not feed.ended:
                    await asyncio.wait_for(feed.next(), CALL_TIMEOUT_S)
            except (HttpError, TimeoutError):
                return PlainTextResponse("the engine does not answer", 503)
            finally:
                feed.close()
        return await self.health(http)

    async def model_info(self, http: HttpRequest) -> Response:
        # paths are empty on purpose: the weights are constructed, and a router that sees a path looks for its tokenizer
        return Json(
            {"model_path": "", "tokenizer_path": "", "served_model_name": requests.MODEL, "is_generation": True}
        )

    async def server_info(self, http: HttpRequest) -> Response:
        geometry, info = self.engine.geometry, await self._call(self.engine.info)
        transfer = getattr(self.worker, "transfer", None)
        return Json(
            {
                "model_path": "",
                "tokenizer_path": "",
                "served_model_name": requests.MODEL,
                "disaggregation_mode": "null" if self.worker.role == "combined" else self.worker.role,
                "disaggregation_bootstrap_port": getattr(transfer, "port", None),
                "disaggregation_transfer_backend": None if transfer is None else "zmq",
                "page_size": geometry.page_tokens,
                "context_length": geometry.max_context,
                "chunked_prefill_size": geometry.chunk_tokens,
                "index_topk": geometry.top_k,
                "random_seed": self.engine.seed,
                "enable_cache_report": True,
                "version": f"needlework {needlework.__version__}",
                "status": "ready",
                **info,
            }
        )

    async def metrics(self, http: HttpRequest) -> Response:
        return PlainTextResponse(expose(await self._call(lambda: collect(self.worker))))

    # ---- control ----

    async def flush_cache(self, http: HttpRequest) -> Response:
        wait_s = http.query_params.get("timeout", "0")
        deadline = asyncio.get_running_loop().time() + (
            float(wait_s[:6]) if wait_s.replace(".", "", 1).isdigit() else 0
        )
        while True:
            if self.worker.live() == 0 and await self._call(self.engine.flush_cache):
                return PlainTextResponse("Cache flushed.\n")
            if asyncio.get_running_loop().time() >= deadline:
                return PlainTextResponse("Cache not flushed: requests are running or waiting.\n", 400)
            await asyncio.sleep(0.05)

    async def abort_request(self, http: HttpRequest) -> Response:
        body = requests.AbortBody.of(await read_object(http))
        if not body.abort_all and not body.rid:
            refuse("give rid, or abort_all: true", "rid")
        self.worker.abort(body.rid or None, everything=body.abort_all)
        return PlainTextResponse("")

    # ---- the lab's own routes ----

    async def _capture(self, body: requests.CaptureBody) -> Capture:
        key, rid, room = None, body.rid, body.room
        if body.messages is not None or body.input_ids is not None:
            key = prompt_key(requests.chat_tokens(body, self.tokenizer), body.cache_salt, body.extra_key)
        elif body.prompt is not None:
            tokens = requests.prompt_tokens(body.prompt, "prompt", self.tokenizer)
            key = prompt_key(tokens, body.cache_salt, body.extra_key)
        if rid is None and room is None and key is None:
            refuse("name a request by rid, room, prompt, messages or input_ids")
        found = await self._call(lambda: self.worker.captures.find(rid=rid, key=key, room=room))
        if found is None:
            refuse("no such request among the last ones that this server remembers", status=404)
        return found

    async def digests(self, http: HttpRequest) -> Response:
        capture = await self._capture(requests.CaptureBody.of(await read_object(http)))
        return Json(capture.summary(self.engine.pools()))

    async def captures(self, http: HttpRequest) -> Response:
        """Digests of every request that is remembered, oldest first."""
        kept = await self._call(self.worker.captures.newest)
        buffers = self.engine.pools()
        return Json(await asyncio.to_thread(lambda: [capture.summary(buffers) for capture in kept]))

    async def pages(self, http: HttpRequest) -> Response:
        """The bytes of one buffer of a remembered request; the header of the dump is in `x-needlework-pages`."""
        body = requests.CaptureBody.of(await read_object(http))
        capture, name = await self._capture(body), body.buffer
        if name is None or name not in capture.digests:
            refuse(f"buffer must be one of {', '.join(capture.digests)}", "buffer")
        if name not in capture.data:
            refuse("the bytes of this request were dropped for newer ones; its digests remain", status=410)
        header = json.dumps(capture.header(self.engine.pools()[name], self.engine.geometry))
        return Response(
            capture.data[name], media_type="application/octet-stream", headers={"x-needlework-pages": header}
        )

    async def faults(self, http: HttpRequest) -> Response:
        hooks = self.engine.hooks
        return Json({"faults": list(self.facts["faults"]), "hooks": hooks.active(), "role": self.worker.role})


def build(worker: Worker, facts: dict[str, Any]) -> Starlette:
    """The application. `facts`: `started` (UNIX seconds) and `faults` (names as planted)."""
    front = Front(worker, facts)
    table: list[tuple[str, list[str], Any]] = [
        ("/v1/chat/completions", ["POST"], front.chat),
        ("/v1/completions", ["POST"], front.completions),
        ("/generate", ["POST"], front.generate),
        ("/v1/models", ["GET"], front.models),
        ("/health", ["GET"], front.health),
        ("/health_generate", ["GET"], front.health_generate),
        ("/metrics", ["GET"], front.metrics),
        ("/flush_cache", ["GET", "POST"], front.flush_cache),
        ("/abort_request", ["POST"], front.abort_request),
        ("/lab/captures", ["GET"], front.captures),
        ("/lab/digests", ["POST"], front.digests),
        ("/lab/pages", ["POST"], front.pages),
        ("/lab/faults", ["GET"], front.faults),
    ]
    for prefix in ("", "/v1"):
        table += [
            (f"{prefix}/tokenize", ["POST"], front.tokenize),
            (f"{prefix}/detokenize", ["POST"], front.detokenize),
        ]
    for prefix in ("", "get_"):
        table += [
            (f"/{prefix}server_info", ["GET"], front.server_info),
            (f"/{prefix}model_info", ["GET"], front.model_info),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    def told(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return Json(error.body(), error.status)

    def routing(http: HttpRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return told(http, HttpError(status, f"{http.method} {http.url.path[:80]} is not offered"))

    def unforeseen(http: HttpRequest, error: Exception) -> Response:
        traceback.print_exception(error, file=sys.stderr)
        return told(http, HttpError(500, f"the server failed on this request ({type(error).__name__})"))

    return Starlette(
        routes=[Route(path, handler, methods=methods) for path, methods, handler in table],
        exception_handlers={HttpError: told, HTTPException: routing, Exception: unforeseen},
        lifespan=lifespan,
    )
