"""A deployment within this process: the lab's servers without sockets, for runs by the hundred.

The same engines, worker threads, HTTP application and transfer between prefill and decode as `lab.start`; only the
connections between client, router and servers are calls instead of loopback sockets, and the router is a few lines that
do what SGLang's does for a request: give it a room and send it to both halves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from needlework.serving import Endpoint
from needlework.serving import run as run_coroutine

LEAVING_S = 5.0  # for requests to end when the deployment stops
GENERATE = ("/v1/chat/completions", "/v1/completions", "/generate")


class _Body(httpx.AsyncByteStream):
    """The body of an answer as the application sends it; closing it early tells the application that we left."""

    def __init__(self, parts: asyncio.Queue[Any], gone: asyncio.Event):
        self._parts, self._gone = parts, gone

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._parts.get()) is not None:
            if message["type"] == "http.response.body":
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return
        raise httpx.ReadError("the application ended in the middle of an answer")

    async def aclose(self) -> None:
        self._gone.set()


class Inside(httpx.AsyncBaseTransport):
    """Requests go straight to an ASGI application, answers stream, and a client that leaves is a disconnection."""

    def __init__(self, app: Any):
        self.app = app
        self.generated = 0  # generation requests so far
        self._running: dict[asyncio.Future[Any], asyncio.Event] = {}  # request -> its client has gone

    async def aclose(self) -> None:
        """Every client of this loop leaves. What still waits (a prefill whose other half was given up waits for it for
        ever) would wait on when the engine has stopped, and be destroyed in the middle of it.
        """
        here = asyncio.get_running_loop()
        left = {task: gone for task, gone in self._running.items() if task.get_loop() is here}
        for gone in left.values():
            gone.set()
        if left:
            await asyncio.wait(left, timeout=LEAVING_S)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        self.generated += request.url.path in GENERATE
        parts: asyncio.Queue[Any] = asyncio.Queue()
        gone, told = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal told
            if not told:
                told = True
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            parts.put_nowait(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("inside", 0),
            "server": ("inside", 0),
        }
        task = asyncio.ensure_future(self.app(scope, receive, send))
        self._running[task] = gone

        def ended(done: asyncio.Future[Any]) -> None:
            del self._running[done]
            if not done.cancelled():
                done.exception()  # the application has answered 500 and raises it again: seen
            parts.put_nowait(None)

        task.add_done_callback(ended)
        try:
            start = await parts.get()
        except BaseException:
            gone.set()
            raise
        if start is None:
            raise httpx.ReadError("the application gave no answer")
        return httpx.Response(start["status"], headers=start["headers"], stream=_Body(parts, gone))


class _Whole(httpx.AsyncByteStream):
    """A body that is there already."""

    def __init__(self, body: bytes):
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body


class Remembered(httpx.AsyncBaseTransport):
    """A server that is asked for each generation once: the same request again gets the same answer from memory.

    For a healthy reference only, whose answers depend on nothing but the request: many examined deployments are
    compared with it on the same prompts.
    """

    def __init__(self, server: Inside, most: int = 2000):
        self.server, self.most = server, most
        self._known: dict[tuple[str, bytes], tuple[int, list[tuple[bytes, bytes]], bytes]] = {}

    @property
    def generated(self) -> int:
        return self.server.generated

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path not in GENERATE:
            return await self.server.handle_async_request(request)
        key = request.url.path, await request.aread()
        if key not in self._known:
            response = await self.server.handle_async_request(request)
            body = await response.aread()
            if response.status_code != 200 or len(self._known) >= self.most:
                return httpx.Response(response.status_code, headers=response.headers, stream=_Whole(body))
            self._known[key] = response.status_code, response.headers.raw, body
        status, headers, body = self._known[key]
        return httpx.Response(status, headers=headers, stream=_Whole(body))


class Router(httpx.AsyncBaseTransport):
    """Sends a generation request to both halves of a pair and answers with decode's; the rest goes to prefill."""

    def __init__(self, prefill: Inside, decode: Inside, bootstrap_port: int):
        self.prefill, self.decode, self.port = prefill, decode, bootstrap_port
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def generated(self) -> int:
        return self.decode.generated

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path not in GENERATE:
            return await self.prefill.handle_async_request(request)
        body = json.loads(await request.aread())
        if isinstance(body, dict):
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": secrets.randbits(62)}
        copies = [httpx.Request(request.method, request.url, json=body) for _ in range(2)]
        sending = asyncio.ensure_future(self._drain(copies[0]))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return await self.decode.handle_async_request(copies[1])

    async def _drain(self, request: httpx.Request) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await (await self.prefill.handle_async_request(request)).aread()


@dataclass(frozen=True)
class InProcessDeployment:
    """`endpoint` is what a client would use; `servers` are the processes by role, `transport` counts requests."""

    mode: str
    endpoint: Endpoint
    servers: Mapping[str, Endpoint]
    faults: tuple[str, ...]
    transport: Inside | Router | Remembered = field(repr=False)


@contextlib.contextmanager
def start_in_process(
    mode: str = "combined",
    faults: str | Sequence[str] = (),
    geometry: str = "tiny",
    seed: int = 0,
    remember: bool = False,
    **options: Any,
) -> Iterator[InProcessDeployment]:
    """As `lab.start`, within this process. Raises ValueError for a setting that does not exist.

    remember    answer a request that came before from memory (a combined reference only, see `Remembered`)
    """
    from needlework_lab.decode import DecodeWorker
    from needlework_lab.engine import Engine
    from needlework_lab.prefill import PrefillWorker
    from needlework_lab.server import build
    from needlework_lab.worker import Worker

    if mode not in ("combined", "pd"):
        raise ValueError(f"mode must be combined or pd, not {str(mode)[:40]!r}")
    planted = (faults,) if isinstance(faults, str) else tuple(faults)
    kinds: dict[str, Any] = {"prefill": PrefillWorker, "decode": DecodeWorker} if mode == "pd" else {"combined": Worker}
    workers = {
        role: kind(Engine(geometry, role=role, seed=seed, faults=planted, **options)) for role, kind in kinds.items()
    }
    apps = {role: Inside(build(worker, {"started": 0, "faults": planted})) for role, worker in workers.items()}
    for worker in workers.values():
        worker.start()
    try:
        entry: Inside | Router | Remembered = next(iter(apps.values()))
        if remember and mode == "combined":
            entry = Remembered(apps["combined"])
        if mode == "pd":
            entry = Router(apps["prefill"], apps["decode"], workers["prefill"].transfer.port)
        servers = {role: Endpoint("http://inside", transport=app) for role, app in apps.items()}
        front = Endpoint("http://inside", transport=entry, repeatable=True)
        yield InProcessDeployment(mode, front, servers, planted, entry)
    finally:
        for app in apps.values():
            run_coroutine(app.aclose())
        for worker in workers.values():
            worker.stop()
