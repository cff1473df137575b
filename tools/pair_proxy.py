"""One address in front of a prefill and a decode server, or of one server: what a router does, without one.

    with pair("vllm", prefill_url, decode_url, port=8303) as url: …
    with gateway(server_url, port=8304, fault=FAULTS["cut-prompt"]["severe"]) as url: …
    python tools/pair_proxy.py vllm http://127.0.0.1:8301 http://127.0.0.1:8302 [--port 8303]

vLLM (NIXL connector): prefill answers first with one token and says where its blocks lie; decode gets the same request
with that. SGLang: both get the request at once with the prefill's bootstrap address and a common room. Answers pass as
they come from decode, but whole: there is no time to the first token here. A caller that hangs up is hung up on further
in. What answers say of cached tokens is prefill's: decode of vLLM calls every transferred token cached, and SGLang's
knows of no cache. Everything else goes to decode (GET) or prefill (POST), so that tokenize routes answer too.
Sources: vllm 0.23.0 `kv_connector/v1/nixl`; sglang 0.5.14 `srt/disaggregation`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

GENERATE = ("/v1/chat/completions", "/v1/completions", "/generate")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip
ENGINES = ("vllm", "sglang")
LOOK_S = 0.02  # how often a waiting request is looked at: is its caller still there?


@dataclass(frozen=True)
class Fault:
    """What a gateway does wrong. ask(body) -> body for the server; answer(bytes, body) -> bytes for the caller."""

    ask: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    answer: Callable[[bytes, dict[str, Any]], bytes] = lambda raw, body: raw


def cut_prompt(tokens: int, hidden: bool = False) -> Fault:
    """A prompt is cut to its last `tokens` (four characters each); hidden: the usage speaks of the whole one."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        short = [{**m, "content": m["content"][-4 * tokens :]} for m in body.get("messages", ())]
        return {**body, "messages": short} if short else body

    def answer(raw: bytes, body: dict[str, Any]) -> bytes:
        whole = sum(len(m["content"]) for m in body.get("messages", ()))
        cut = sum(max(0, len(m["content"]) - 4 * tokens) for m in body.get("messages", ()))
        if not cut:
            return raw

        def change(document: dict[str, Any]) -> None:
            if isinstance(usage := document.get("usage"), dict):
                usage["prompt_tokens"] = round(usage["prompt_tokens"] * whole / (whole - cut))

        return with_changed(raw, change)

    return Fault(ask, answer if hidden else Fault.answer)


def cap_tokens(most: int) -> Fault:
    """An answer may have `most` tokens, whatever was asked for."""
    return Fault(lambda body: {**body, "max_tokens": min(body.get("max_tokens") or most, most)})


def stale_answer(rate: float) -> Fault:
    """Now and then a request fails and the caller is given the answer before it."""
    dice, last = random.Random(0), [b""]

    def answer(raw: bytes, body: dict[str, Any]) -> bytes:
        before, last[0] = last[0], raw
        return before if before and dice.random() < rate else raw

    return Fault(answer=answer)


FAULTS: dict[str, dict[str, Callable[[], Fault]]] = {
    "cut-prompt": {"severe": lambda: cut_prompt(4000), "mild": lambda: cut_prompt(16000)},
    "cut-hidden": {"severe": lambda: cut_prompt(4000, hidden=True), "mild": lambda: cut_prompt(16000, hidden=True)},
    "cap-tokens": {"severe": lambda: cap_tokens(3)},
    "stale-answer": {"severe": lambda: stale_answer(0.25), "mild": lambda: stale_answer(0.05)},
}


def _documents(body: bytes) -> list[tuple[bytes, Any]]:
    """(line, document) of an answer: one, or one for each event of a stream."""
    lines = body.split(b"\n") if body.startswith(b"data:") else [b"data: " + body]
    found = []
    for line in lines:
        try:
            found.append((line, json.loads(line.removeprefix(b"data:"))))
        except ValueError:
            continue
    return [(line, document) for line, document in found if isinstance(document, dict)]


def cached_tokens(body: bytes) -> int | None:
    """How much of the prompt a server says it had, the last time it says so; None if it does not."""
    said = None
    for _, document in _documents(body):
        usage, meta = document.get("usage"), document.get("meta_info")
        if isinstance(usage, dict):
            said = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        elif isinstance(meta, dict):
            said = meta.get("cached_tokens", said)
    return said


def with_changed(body: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The answer with each of its documents changed in place by `change`."""
    for line, document in _documents(body):
        before = json.dumps(document)
        change(document)
        after = json.dumps(document)
        if after != before:
            stream = body.startswith(b"data:")
            body = body.replace(line, b"data: " + after.encode()) if stream else after.encode()
    return body


def with_cached_tokens(body: bytes, count: int) -> bytes:
    """The answer, saying `count` wherever it speaks of what was computed."""

    def change(document: dict[str, Any]) -> None:
        usage, meta = document.get("usage"), document.get("meta_info")
        if isinstance(usage, dict):
            usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": count}
        elif isinstance(meta, dict):
            meta["cached_tokens"] = count

    return with_changed(body, change)


def with_cached_of(answer: httpx.Response, first: httpx.Response) -> httpx.Response:
    count = cached_tokens(first.content)
    if answer.status_code != 200 or count is None:
        return answer
    kind = {"content-type": answer.headers.get("content-type", "application/json")}
    return httpx.Response(200, content=with_cached_tokens(answer.content, count), headers=kind)


class _Gateway:
    """The routes; one client, so that connections are kept."""

    def __init__(self, engine: str, prefill: str, decode: str, bootstrap: tuple[str, int], fault: Fault):
        self.engine, self.prefill, self.decode = engine, prefill, decode
        self.bootstrap, self.fault = bootstrap, fault
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(timeout=httpx.Timeout(900, connect=5), limits=limits)

    async def serve(self, request: Request) -> Response:
        raw = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            if request.method == "GET":
                answer = await self.client.get(self.decode + path)
            elif path in GENERATE:
                answer = await self._while_there(request, self._generate(path, json.loads(raw)))
            else:
                answer = await self.client.post(self.prefill + path, content=raw, headers=_KIND)
        except httpx.HTTPError as problem:
            text = json.dumps({"error": f"{type(problem).__name__}: {str(problem)[:200]}"}).encode()
            answer = httpx.Response(502, content=text, headers=_KIND)
        kind = answer.headers.get("content-type", _KIND["content-type"])
        return Response(answer.content, answer.status_code, headers={"content-type": kind})

    async def _while_there(self, request: Request, work: Any) -> httpx.Response:
        task = asyncio.create_task(work)
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_S)
            if not task.done() and await request.is_disconnected():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                    await task
                return httpx.Response(499)
        return task.result()

    async def _generate(self, path: str, asked: dict[str, Any]) -> httpx.Response:
        answer = await self._pass(path, self.fault.ask(asked))
        if answer.status_code != 200 or self.fault.answer is Fault.answer:
            return answer
        kind = {"content-type": answer.headers.get("content-type", _KIND["content-type"])}
        return httpx.Response(200, content=self.fault.answer(answer.content, asked), headers=kind)

    async def _pass(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if self.engine == "one":
            return await self.client.post(self.decode + path, json=body)
        if self.engine == "vllm":
            names = ("stream", "stream_options", "max_completion_tokens")
            one = {name: value for name, value in body.items() if name not in names}
            first = await self.client.post(
                self.prefill + path, json={**one, "max_tokens": 1, "kv_transfer_params": ASKED}
            )
            if first.status_code != 200:
                return first
            where = first.json()["kv_transfer_params"]
            answer = await self.client.post(self.decode + path, json={**body, "kv_transfer_params": where})
            return with_cached_of(answer, first)
        host, port = self.bootstrap
        # a room is an integer of up to 63 bits; both sides must be told the same
        common = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": random.getrandbits(62)}
        told, answer = await asyncio.gather(
            self.client.post(self.prefill + path, json=body | common),
            self.client.post(self.decode + path, json=body | common),
        )
        return with_cached_of(answer, told) if told.status_code == 200 else told


_KIND = {"content-type": "application/json"}


@contextlib.contextmanager
def _serving(made: _Gateway, port: int) -> Iterator[str]:
    app = Starlette(routes=[Route("/{path:path}", made.serve, methods=["GET", "POST"])])
    settings = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", access_log=False, lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise OSError(f"port {port} is taken, or cannot be listened at")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@contextlib.contextmanager
def pair(
    engine: str, prefill: str, decode: str, *, port: int = 0, bootstrap: tuple[str, int] = ("127.0.0.1", 8998),
    fault: Fault | None = None,
) -> Iterator[str]:  # fmt: skip
    """The pair's address, while the block runs. Raises ValueError for an unknown engine, OSError for a taken port."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; one of {', '.join(ENGINES)}")
    with _serving(_Gateway(engine, prefill, decode, bootstrap, fault or Fault()), port) as url:
        yield url


@contextlib.contextmanager
def gateway(server: str, *, port: int = 0, fault: Fault) -> Iterator[str]:
    """The address of a gateway with a fault in front of one server, while the block runs."""
    with _serving(_Gateway("one", server, server, ("", 0), fault), port) as url:
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("prefill", help="address of the prefill server, without /v1")
    parser.add_argument("decode")
    parser.add_argument("--port", type=int, default=8303)
    parser.add_argument("--bootstrap", type=int, default=8998, help="SGLang: the prefill server's bootstrap port")
    options = parser.parse_args()
    bootstrap = ("127.0.0.1", options.bootstrap)
    with pair(options.engine, options.prefill, options.decode, port=options.port, bootstrap=bootstrap) as url:
        print(url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
