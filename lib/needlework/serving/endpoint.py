"""A client for OpenAI-compatible endpoints that survives bad servers.

Retries are 0: a retry would turn a failed trial into a late success. Whatever goes wrong between the question and a
well-formed answer becomes one `TransportError` with a short reason; keys, URLs and hosts are removed from it. Bodies
and streams are bounded in bytes and in time, compressed bodies are refused (a decompression bomb has no bound), and
redirects are not followed (they would carry the key elsewhere).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from .replies import EventStream, Message, Reply, TransportError, decode, error_words, parse_json, read_completion
from .scrub import scrub, secrets_of

PROBE_TIMEOUT_S = 30.0  # of a question that only finds out what the endpoint can do


class Endpoint:
    """An OpenAI-compatible deployment.

    base_url        without /v1 (it is stripped if given)
    model           name to ask for; None takes the first that /v1/models lists
    api_key         sent as a bearer token; never shown, logged or stored
    timeout_s       bound on a whole request, first byte to last, however slowly the server drips
    max_body_bytes  bound on a body or a stream
    tokenizer_url   where token counts are asked when this URL is a router without /tokenize (a worker's URL)
    metrics_url     where /metrics answers when not here (a router serves it on a port of its own)
    cache_url       the server whose prefix cache counts when an answer cannot say so (the prefill server of a pair)
    ca_file         certificates to trust beside the system's, for a server that signed its own
    extra           fields merged into every generation request, for example {"chat_template_kwargs": {...}}
    repeatable      True: every run sends the same bytes, for a deployment that was started for it. False: each run's
                    prompts get first lines of their own, or what an earlier run left in the prefix cache answers
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        *,
        max_body_bytes: int = 32 << 20,
        max_connections: int = 256,
        tokenizer_url: str | None = None,
        metrics_url: str | None = None,
        cache_url: str | None = None,
        ca_file: str | Path | None = None,
        extra: dict[str, Any] | None = None,
        repeatable: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self.base_url = _clean(base_url)
        self.tokenizer_url = _clean(tokenizer_url) if tokenizer_url else None
        self.model = model
        self.timeout_s = float(timeout_s)
        self.max_body_bytes = int(max_body_bytes)
        self.extra = dict(extra or {})
        self.repeatable = repeatable
        self.capabilities: Any = None  # filled by capabilities.discover, once
        self.ids_path: str | None = None  # the route that lists token ids, once it was found
        self._key = api_key
        self._max_connections = max_connections
        self._transport = transport
        self._trust = trust(ca_file)
        self._secrets = secrets_of(self.base_url, api_key)
        self.metrics_url = _clean(metrics_url) if metrics_url else None
        self.cache_url = _clean(cache_url) if cache_url else None
        for url in filter(None, (self.tokenizer_url, self.metrics_url, self.cache_url)):
            self._secrets += secrets_of(url, None)
        self._lines: weakref.WeakKeyDictionary[Any, httpx.AsyncBaseTransport] = weakref.WeakKeyDictionary()  # by loop
        weakref.finalize(self, _hang_up, self._lines)  # also at the interpreter's end

    def __repr__(self) -> str:
        return f"Endpoint(model={self.model!r}, key={'set' if self._key else 'none'})"

    def scrub(self, text: object, limit: int = 300) -> str:
        """`text` without this endpoint's key, URL and host, on one line."""
        return scrub(text, secrets=self._secrets, limit=limit)

    async def aclose(self) -> None:
        """Close the connections opened from the running loop."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.aclose()

    # ---- plain HTTP ----

    async def get_json(self, path: str, **options: Any) -> Any:
        return parse_json(await self._fetch("GET", path, None, **options))

    async def post_json(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        return parse_json(await self._fetch("POST", path, body, **options))

    async def get_text(self, path: str, **options: Any) -> str:
        return decode(await self._fetch("GET", path, None, **options))

    async def post_text(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> str:
        return decode(await self._fetch("POST", path, body, **options))

    # ---- generation ----

    async def chat(
        self,
        messages: list[Message],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        logprobs: bool = False,
        fields: dict[str, Any] | None = None,
        on_sent: asyncio.Event | None = None,
        on_first_token: asyncio.Event | None = None,
    ) -> Reply:
        """Send one chat completion, streamed, and return its reply; raises TransportError.

        `fields` are added to the body as they are. Cancelling the awaiting task closes the connection, which serving
        engines treat as an abort; `on_sent` is set when the request has left, so that there is something to abort.
        """
        body: dict[str, Any] = {"model": await self.resolve_model(), "messages": messages, "max_tokens": max_tokens,
                                "temperature": temperature, "stream": True,
                                "stream_options": {"include_usage": True}}  # fmt: skip
        if logprobs:
            body["logprobs"] = True
        body |= self.extra | (fields or {})
        started = time.perf_counter()
        parts = EventStream(self.scrub, started, on_first_token)
        async with self._open("POST", "/v1/chat/completions", body, sent=on_sent) as (response, chunks):
            try:
                if "text/event-stream" not in response.headers.get("content-type", "").casefold():
                    raw = b"".join([chunk async for chunk in chunks])
                    if not raw.lstrip().startswith((b"data:", b"event:", b":")):
                        # some servers ignore "stream"; their single body is a valid answer without a first-token time
                        latency_s = time.perf_counter() - started
                        return read_completion(parse_json(raw), _marks(response.headers), latency_s, self.scrub)
                    parts.feed(raw)
                else:
                    async for chunk in chunks:
                        if parts.feed(chunk):
                            break
                return parts.reply(_marks(response.headers))
            except TransportError as error:
                error.status = error.status or response.status_code
                raise

    async def models(self, **options: Any) -> list[dict[str, Any]]:
        """The entries of /v1/models, one or more, each with its "id"; raises TransportError where it lists none."""
        listing = await self.get_json("/v1/models", **options)
        rows = listing.get("data") if isinstance(listing, dict) else None
        rows = rows if isinstance(rows, list) else []
        found = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        if not found:
            raise TransportError("/v1/models lists no model; is this an OpenAI-compatible endpoint?")
        return found

    async def resolve_model(self) -> str:
        """The model's name: as given, else the first of /v1/models; raises TransportError if there is none."""
        if self.model is None:
            self.model = (await self.models())[0]["id"]
        return self.model

    # ---- the one place that touches the wire ----

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float | None = None,
        base: str | None = None,
        accept: tuple[int, ...] = (200,),
        sent: asyncio.Event | None = None,
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        limit_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                content = None if body is None else json.dumps(body).encode()
                response = await self._answer(method, (base or self.base_url) + path, content, sent)
                try:
                    if response.headers.get("content-encoding", "identity") not in ("identity", ""):
                        reason = "the body is compressed although that was not asked for"
                        raise TransportError(reason, response.status_code)
                    chunks = self._bounded(response)
                    if response.status_code not in accept:
                        kind = "redirect" if 300 <= response.status_code < 400 else f"http_{response.status_code}"
                        raise TransportError(await self._why(response, chunks), response.status_code, kind)
                    yield response, chunks
                finally:
                    await response.aclose()
        except TimeoutError:
            raise TransportError(f"no complete answer within {limit_s:g} s", failure="timeout") from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, aiohttp.ClientError, OSError) as error:
            reason, kind = _describe(error, self)
            raise TransportError(reason, failure=kind) from None

    async def _answer(self, method: str, url: str, content: bytes | None, sent: asyncio.Event | None) -> httpx.Response:
        """The response to one request, when its headers have come."""
        headers = self._headers()
        if content is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(content))}
        timeouts = dict.fromkeys(("read", "write", "pool"), self.timeout_s) | {"connect": min(20.0, self.timeout_s)}
        while True:
            body = content if sent is None or content is None else _telling(content, sent)
            request = httpx.Request(method, url, headers=headers, content=body, extensions={"timeout": timeouts})
            _kept.set(False)
            try:  # straight to the transport: a client would add cookies, redirects and a third of the time
                response = await self._line().handle_async_request(request)
            except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
                # a kept connection that ends before the answer's first byte was closed before the request came
                # (llama.cpp does so after each stream, whatever its headers say): the next one may be new
                if not (_kept.get() and any(isinstance(one, _CLOSED) for one in _causes(error))):
                    raise
                continue
            response.request = request
            return response

    async def _bounded(self, response: httpx.Response) -> AsyncIterator[bytes]:
        seen = 0
        async for chunk in response.aiter_raw():
            seen += len(chunk)
            if seen > self.max_body_bytes:
                said = f"the answer is longer than {self.max_body_bytes >> 20} MiB"
                raise TransportError(said, response.status_code, "too_long")
            yield chunk

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None, **options: Any) -> bytes:
        async with self._open(method, path, body, **options) as (_, chunks):
            return b"".join([chunk async for chunk in chunks])

    async def _why(self, response: httpx.Response, chunks: AsyncIterator[bytes]) -> str:
        status = response.status_code
        if 300 <= status < 400:
            return f"HTTP {status}: the server redirects; give the final URL"
        head = b""
        async for chunk in chunks:
            head += chunk
            if len(head) > 4096:
                break
        text = head[:4096].decode("utf-8", "replace")
        if text.lstrip()[:1] == "<":
            return f"HTTP {status} with an HTML page instead of JSON (a proxy or a wrong path?)"
        message: Any = text
        try:
            parsed = json.loads(text)
            message = error_words(parsed) or (parsed.get("message") if isinstance(parsed, dict) else None) or parsed
        except (ValueError, RecursionError):
            pass
        if status in (401, 403):
            hint = "the key that was sent is refused" if self._key else "no key was sent, see --api-key-env"
            message = f"{message} ({hint})"
        return self.scrub(f"HTTP {status}: {message}" if text.strip() else f"HTTP {status} with an empty body")

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "needlework"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise TransportError("the API key holds characters that cannot be sent in a header")
            headers["authorization"] = f"Bearer {self._key}"
        return headers

    def _line(self) -> httpx.AsyncBaseTransport:
        """The connections of the running loop: they cannot be used from another one."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines[loop] = self._transport or AiohttpTransport(client=self._session(), trust_env=False)
        return self._lines[loop]

    def _session(self) -> aiohttp.ClientSession:
        """Connections of aiohttp, whose cost does not grow with their number. Idle ones are dropped before a server
        does (uvicorn after 5 s), so that no request meets a closed one.
        """
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=4.0, ssl=self._trust)
        tell = aiohttp.TraceConfig()
        tell.on_connection_reuseconn.append(_reused)
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 18, auto_decompress=False,
            trace_configs=[tell],
        )  # fmt: skip


# whether the connection of this task's request had served another one
_kept: contextvars.ContextVar[bool] = contextvars.ContextVar("kept", default=False)
_CLOSED = (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)


async def _reused(*_: object) -> None:
    _kept.set(True)


async def attempt(awaitable: Any) -> Any:
    """The answer to a question that an endpoint may well refuse, or None when there is no well-formed one."""
    try:
        return await awaitable
    except TransportError:
        return None


def _hang_up(lines: weakref.WeakKeyDictionary[Any, httpx.AsyncBaseTransport]) -> None:
    """Close connections whose endpoint is gone, on the loops that still run."""
    for loop, line in list(lines.items()):
        if loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(line.aclose(), loop)
            if threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is not loop:
                with contextlib.suppress(Exception):
                    closing.result(0.5)


async def _telling(content: bytes, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """The body, and `sent` when it has gone out."""
    yield content
    sent.set()


def trust(ca_file: str | Path | None) -> ssl.SSLContext | bool:
    """What httpx takes as `verify`: the system's certificates, and those of a file beside them."""
    if ca_file is None:
        return True
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError):
        raise ValueError(f"{Path(ca_file).name} holds no certificates in PEM form") from None
    return context


def _clean(url: str) -> str:
    """The base URL; ValueError with the one that was probably meant."""
    url = url.strip().rstrip("/")
    if "://" not in url:
        raise ValueError(f"the endpoint's URL must start with http:// or https://; perhaps http://{url}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        raise ValueError("the endpoint's URL must start with http:// or https:// and a host, without blanks")
    for ending in ("/chat/completions", "/completions", "/models"):
        if url.endswith("/v1" + ending):
            raise ValueError(f"leave out {ending} at the end of the endpoint's URL: the base is asked in several ways")
    return url.removesuffix("/v1").rstrip("/")


def _marks(headers: httpx.Headers) -> dict[str, str]:
    """The few headers that tell which backend answered."""
    wanted = ("server", "x-worker-id", "x-worker-instance-id", "x-sglang-worker", "x-request-id", "via", "x-served-by")
    return {name: scrub(headers[name], limit=80) for name in wanted if name in headers}


# of aiohttp's and httpx's errors, the first that fits: what to say, and the kind in a word
_REASONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (ssl.SSLCertVerificationError, "the server's certificate is not trusted (self-signed?); name its authority with "
     "--ca FILE, ca_file in Python", "tls"),
    (ssl.SSLError, "no TLS on this port; give the URL with http://", "tls"),
    (aiohttp.ClientConnectorDNSError, "the host's name cannot be resolved", "refused"),
    (aiohttp.ServerDisconnectedError, "the connection was closed in the middle of an answer", "stream_broken"),
    (aiohttp.ClientPayloadError, "the connection was closed in the middle of an answer", "stream_broken"),
    (aiohttp.ClientResponseError, "the server does not speak HTTP/1.1 on this port", "malformed"),
    (aiohttp.ClientConnectorError, "the endpoint cannot be reached (is it running, and is the port right?)", "refused"),
    (aiohttp.ConnectionTimeoutError, "the connection was not accepted in time", "timeout"),
    (aiohttp.ServerTimeoutError, "the server stopped sending", "timeout"),
    (ConnectionError, "the connection was reset", "stream_broken"),
    (httpx.ConnectError, "the endpoint cannot be reached (is it running, and is the port right?)", "refused"),
    (httpx.TimeoutException, "the server stopped sending", "timeout"),
    (httpx.ReadError, "the connection was reset while reading", "stream_broken"),
)  # fmt: skip

_OTHER_NAME = "is for another name than the host's in the URL; use the one that it was made for"
# what no file of authorities mends, by the codes of OpenSSL's x509_vfy.h
_CERTIFICATE = {
    9: "is not valid yet (is this machine's clock right?)",
    10: "has expired",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "os_error", None) or error.__cause__


def _describe(error: BaseException, endpoint: Endpoint) -> tuple[str, str]:
    chain = list(_causes(error))
    for one in chain:
        if said := _CERTIFICATE.get(getattr(one, "verify_code", 0)):
            return f"the server's certificate {said}", "tls"
    for kind, text, failure in _REASONS:
        if any(isinstance(one, kind) for one in chain):
            return text, failure
    return endpoint.scrub(f"{type(error).__name__}: {error}", limit=160), "stream_broken"
