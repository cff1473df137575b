"""What the client costs: trials a second against an instant local server beside a plain httpx loop; prompt building.

    python benchmarks/probes.py [--trials 600] [--in-flight 64]

The server runs in a process of its own and answers at once. The plain loop posts the same bodies with httpx and reads
the JSON; the client also builds each prompt, bounds and checks the answer, grades it, and writes a journal line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from needlework.probes import Bench, PromptSpec
from needlework.probes.bench import prompts
from needlework.probes.bench.trial import Ask
from needlework.serving import run

BODY = json.dumps(
    {
        "model": "instant",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "12345"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()
MODELS = b'{"object":"list","data":[{"id":"instant"}]}'


def serve(port: int) -> None:
    """Answer every POST with one completion and every GET with the model list; everything else is 404."""

    class Instant(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport, self.pending = transport, b""

        def data_received(self, data: bytes) -> None:
            self.pending += data
            while (end := self.pending.find(b"\r\n\r\n")) >= 0:
                head = self.pending[:end].lower()
                at = head.find(b"content-length:")
                size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(self.pending) < end + 4 + size:
                    return
                self.pending = self.pending[end + 4 + size :]
                body = BODY if b"/chat/" in head[:60] else MODELS if b"/models" in head[:40] else b""
                status = b"200 OK" if body else b"404 Not Found"
                self.transport.write(  # type: ignore[attr-defined]
                    b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
                    + body
                )

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Instant, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def instant_server() -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url + "/v1/models")
            break
        time.sleep(0.05)
    try:
        yield url
    finally:
        process.terminate()
        process.join(5)


async def plain(url: str, bodies: list[bytes], in_flight: int) -> float:
    """Seconds of the plain loop: httpx.AsyncClient.post and json, nothing else."""
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=30) as client:
        queue = iter(bodies)

        async def worker() -> None:
            for body in queue:
                reply = await client.post(
                    url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
                json.loads(reply.content)["choices"][0]["message"]["content"]

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return time.perf_counter() - started


def asks_for(count: int, seed: int) -> list[Ask]:
    return [Ask("recall", PromptSpec(300, seed=seed * 100_000 + i), concurrency=64) for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    random.seed(0)
    ratios = []
    with instant_server() as url, tempfile.TemporaryDirectory() as folder:
        print(f"{args.trials} trials of 300 tokens, {args.in_flight} in flight, against a server that answers at once")
        for i in range(args.rounds):
            with Bench(url, Path(folder) / f"run{i}", probe="recall") as bench:
                asks = asks_for(args.trials, i)
                run(bench._prepare())
                built = [run(bench.build(a)) for a in asks[:32]]
                bodies = [
                    json.dumps({"model": "instant", "messages": built[k % 32].messages, "max_tokens": 48}).encode()
                    for k in range(args.trials)
                ]
                spent = time.process_time()
                plain_s = run(plain(url, bodies, args.in_flight))
                plain_cpu = time.process_time() - spent
                started, spent = time.perf_counter(), time.process_time()
                bench.ask(asks, concurrency=args.in_flight)
                ours_s = time.perf_counter() - started
                cpu = [plain_cpu, time.process_time() - spent]
            ratios.append(plain_s / ours_s)
            rates = args.trials / plain_s, args.trials / ours_s
            print(
                f"  plain httpx {rates[0]:7.0f}/s   client {rates[1]:7.0f}/s   ratio {ratios[-1]:.2f}   "
                f"CPU a trial {1e3 * cpu[0] / args.trials:.2f} and {1e3 * cpu[1] / args.trials:.2f} ms"
            )
    median = sorted(ratios)[len(ratios) // 2]
    print(f"median ratio {median:.2f} (aim 0.80)")
    spec = PromptSpec(128_000, 0.5, seed=12345)
    started = time.perf_counter()
    text, _ = prompts.assemble(spec, 3600, 10)
    cold_s = time.perf_counter() - started
    print(f"a prompt of {len(text):,} characters (about 128k tokens) assembled in {cold_s:.3f} s (aim 1 s)")
    return 0 if median >= 0.8 and cold_s <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
