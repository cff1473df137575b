"""One address in front of a prefill and a decode server: what a router does, without one.

    with pair("vllm", prefill_url, decode_url, port=8303) as url: …
    python tools/pair_proxy.py vllm http://127.0.0.1:8301 http://127.0.0.1:8302 [--port 8303]

vLLM (NIXL connector): prefill answers first with one token and says where its blocks lie; decode gets the same request
with that. SGLang: both get the request at once with the prefill's bootstrap address and a common room. Answers pass as
they come from decode, but whole: there is no time to the first token here. What they say of cached tokens is
prefill's: decode of vLLM calls every transferred token cached, and SGLang's knows of no cache. Everything else goes to
decode (GET) or prefill (POST), so that tokenize routes answer too.
Sources: vllm 0.23.0 `kv_connector/v1/nixl`; sglang 0.5.14 `srt/disaggregation`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

GENERATE = ("/v1/chat/completions", "/v1/completions", "/generate")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip
ENGINES = ("vllm", "sglang")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._pass(self.server.client.get(self.server.decode + self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            if self.path in GENERATE:
                self._pass(self.server.generate(self.path, json.loads(body)))
            else:
                kind = {"content-type": "application/json"}
                self._pass(self.server.client.post(self.server.prefill + self.path, content=body, headers=kind))
        except httpx.HTTPError as problem:
            text = json.dumps({"error": f"{type(problem).__name__}: {str(problem)[:200]}"}).encode()
            self._pass(httpx.Response(502, content=text, headers={"content-type": "application/json"}))

    def _pass(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)


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


def with_cached_tokens(body: bytes, count: int) -> bytes:
    """The answer, saying `count` wherever it speaks of what was computed."""
    for line, document in _documents(body):
        usage, meta = document.get("usage"), document.get("meta_info")
        if isinstance(usage, dict):
            usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": count}
        elif isinstance(meta, dict):
            meta["cached_tokens"] = count
        else:
            continue
        new = json.dumps(document).encode()
        body = body.replace(line, b"data: " + new) if body.startswith(b"data:") else new
    return body


def with_cached_of(answer: httpx.Response, first: httpx.Response) -> httpx.Response:
    count = cached_tokens(first.content)
    if answer.status_code != 200 or count is None:
        return answer
    kind = {"content-type": answer.headers.get("content-type", "application/json")}
    return httpx.Response(200, content=with_cached_tokens(answer.content, count), headers=kind)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, engine: str, prefill: str, decode: str, port: int, bootstrap: tuple[str, int]):
        super().__init__(("127.0.0.1", port), _Handler)
        self.engine, self.prefill, self.decode, self.bootstrap = engine, prefill, decode, bootstrap
        self.client = httpx.Client(timeout=httpx.Timeout(900, connect=5))

    def generate(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if self.engine == "vllm":
            names = ("stream", "stream_options", "max_completion_tokens")
            one = {name: value for name, value in body.items() if name not in names}
            first = self.client.post(self.prefill + path, json={**one, "max_tokens": 1, "kv_transfer_params": ASKED})
            if first.status_code != 200:
                return first
            where = first.json()["kv_transfer_params"]
            answer = self.client.post(self.decode + path, json={**body, "kv_transfer_params": where})
            return with_cached_of(answer, first)
        host, port = self.bootstrap
        # a room is an integer of up to 63 bits; both sides must be told the same
        common = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": random.getrandbits(62)}
        told: list[httpx.Response] = []
        other = threading.Thread(target=lambda: told.append(self.client.post(self.prefill + path, json=body | common)))
        other.start()
        answer = self.client.post(self.decode + path, json=body | common)
        other.join()
        if told and told[0].status_code != 200:
            return told[0]
        return with_cached_of(answer, told[0]) if told else answer


@contextlib.contextmanager
def pair(
    engine: str, prefill: str, decode: str, *, port: int, bootstrap: tuple[str, int] = ("127.0.0.1", 8998)
) -> Iterator[str]:
    """The pair's address, while the block runs. Raises ValueError for an unknown engine, OSError for a taken port."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; one of {', '.join(ENGINES)}")
    server = _Server(engine, prefill, decode, port, bootstrap)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        server.client.close()


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
