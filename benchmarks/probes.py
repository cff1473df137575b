"""What the client costs: trials a second against an instant local server, beside others on the same server.

    python benchmarks/probes.py [--trials 600] [--in-flight 1,16,64,256] [--lm-eval PYTHON] [--aiperf COMMAND]

The server runs in a process of its own, counts tokens, answers the question that a prompt asks, and streams. Ours
builds each prompt to the token, bounds and checks the answer, grades it, and writes a journal line. Plain aiohttp posts
bodies that were made before and reads them. `--lm-eval` names the interpreter of an environment that has lm-eval,
`--aiperf` the command of one that has aiperf; without them they are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import aiohttp
from needlework.probes import Bench, PromptSpec
from needlework.probes.bench import prompts
from needlework.probes.bench.trial import Ask
from needlework.serving import Endpoint, run

TOKEN = re.compile(r" ?[^\W\d_]+| ?\d{1,3}|[^\w\s]+\n*|\s|_")
FACT = re.compile(rb"secret code for ([^.?]+?) is (\S+?)\.")
ASKED = re.compile(rb"What is the secret code for ([^?]+)\?")
MODELS = b'{"object":"list","data":[{"id":"instant","max_model_len":131072}]}'
TOKENS = 512
LM_EVAL = """
import json, sys, time
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion
url, size, texts = sys.argv[1], int(sys.argv[2]), open(sys.argv[3]).read().split(chr(0))
model = LocalChatCompletion(base_url=url + "/v1/chat/completions", model="instant", num_concurrent=size, max_retries=1,
                            tokenized_requests=False, tokenizer_backend=None)
chats = [JsonChatStr(json.dumps([{"role": "user", "content": text}])) for text in texts]
asks = [Instance("generate_until", {}, (chat, {"max_gen_toks": 48, "until": []}), i) for i, chat in enumerate(chats)]
began = time.perf_counter()
model.generate_until(asks, disable_tqdm=True)
print("RATE", len(asks) / (time.perf_counter() - began))
"""


def answer(path: bytes, body: bytes) -> tuple[bytes, bytes]:
    """(content type, body) of a request."""
    if b"/models" in path:
        return b"application/json", MODELS
    if b"/tokenize" in path:
        asked = json.loads(body)
        text = asked.get("prompt") or "".join(m["content"] for m in asked.get("messages", []))
        found = TOKEN.findall(text)
        ids = [hash(t) & 0x1FFFF for t in found] + [7] * (9 if "messages" in asked else 0)
        return b"application/json", json.dumps({"tokens": ids, "count": len(ids)}).encode()
    if b"/chat/" not in path:
        return b"", b""
    asked_for = ASKED.findall(body)
    value = dict(FACT.findall(body)).get(asked_for[-1] if asked_for else b"", b"Hello.").decode()
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    base = {"id": "chatcmpl-1", "created": 1, "model": "instant"}
    if b'"stream": true' in body or b'"stream":true' in body:
        parts = [
            {"choices": [{"index": 0, "delta": {"content": value}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        events = b"".join(
            b"data: " + json.dumps(base | {"object": "chat.completion.chunk"} | p).encode() + b"\n\n" for p in parts
        )
        return b"text/event-stream", events + b"data: [DONE]\n\n"
    choice = {"index": 0, "message": {"role": "assistant", "content": value}, "finish_reason": "stop"}
    whole = base | {"object": "chat.completion", "choices": [choice], "usage": usage}
    return b"application/json", json.dumps(whole).encode()


def serve(port: int) -> None:
    """Answer at once; 404 for what is not known."""

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
                body, self.pending = self.pending[end + 4 : end + 4 + size], self.pending[end + 4 + size :]
                kind, said = answer(head[:60], body)
                status = b"200 OK" if said else b"404 Not Found"
                self.transport.write(  # type: ignore[attr-defined]
                    b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(said)) + said
                )

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Instant, "127.0.0.1", port, backlog=1024)
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
        with contextlib.suppress(OSError):
            urlopen(url + "/v1/models").close()
            break
        time.sleep(0.05)
    try:
        yield url
    finally:
        process.terminate()
        process.join(5)


async def plain(url: str, bodies: list[bytes], in_flight: int) -> float:
    """Requests a second of aiohttp alone."""
    queue = iter(bodies)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def worker() -> None:
            for body in queue:
                async with session.post(
                    url + "/v1/chat/completions", data=body, headers={"content-type": "application/json"}
                ) as reply:
                    await reply.read()

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return len(bodies) / (time.perf_counter() - started)


def ours(url: str, folder: Path, trials: int, in_flight: int, seed: int) -> tuple[float, float, list[str]]:
    """(trials a second, CPU ms a trial, prompts); the endpoint is asked what it can do before."""
    with Bench(Endpoint(url, max_connections=max(256, in_flight)), folder, probe="recall") as bench:
        run(bench._prepare())
        asks = [
            Ask("recall", PromptSpec(TOKENS, seed=seed * 100_000 + i), concurrency=in_flight) for i in range(trials)
        ]
        started, spent = time.perf_counter(), time.process_time()
        rows = bench.ask(asks, concurrency=in_flight)
        wall, cpu = time.perf_counter() - started, time.process_time() - spent
        wrong = [r for r in rows if r["outcome"] != "exact" or r["counted_tokens"] != TOKENS]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {trials} trials are not right: {wrong[0]}")
        texts = [run(bench.build(a)).text for a in asks[:64]]
    return trials / wall, 1e3 * cpu / trials, texts


def lm_eval(python: str, url: str, trials: int, in_flight: int, texts: list[str]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\x00".join(texts[i % len(texts)] for i in range(trials)))
        file.flush()
        command = [python, "-c", LM_EVAL, url, str(in_flight), file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r"RATE (\S+)", said.stdout)
    return f"{float(found[1]):.0f}" if found else f"failed: {said.stderr.strip().splitlines()[-1][:80]}"


def aiperf(command: str, tokenizer: str, url: str, trials: int, in_flight: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = [command, "profile", "--model", "instant", "--url", url, "--endpoint-type", "chat", "--streaming",
                 "--concurrency", str(in_flight), "--request-count", str(trials), "--isl", str(TOKENS), "--osl", "2",
                 "--tokenizer", tokenizer, "--ui", "none", "--artifact-dir", folder]  # fmt: skip
        said = subprocess.run(words, capture_output=True, text=True, timeout=600)
        report = Path(folder) / "profile_export_aiperf.json"
        if report.is_file():
            return f"{json.loads(report.read_text())['request_throughput']['avg']:.0f}"
    return f"failed: {(said.stderr or said.stdout).strip().splitlines()[-1][:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--in-flight", default="1,16,64,256")
    parser.add_argument("--lm-eval", metavar="PYTHON")
    parser.add_argument("--aiperf", metavar="COMMAND", default=shutil.which("aiperf"))
    parser.add_argument("--tokenizer", metavar="DIR", default="builtin", help="of aiperf, where it cannot download one")
    args = parser.parse_args()
    rates = []
    with instant_server() as url, tempfile.TemporaryDirectory() as folder:
        print(f"{args.trials} trials of {TOKENS} tokens against a server that answers at once, a second:")
        for size in map(int, args.in_flight.split(",")):
            rate, cpu_ms, texts = ours(url, Path(folder) / f"run{size}", args.trials, size, size)
            rates.append(rate)
            bodies = [
                json.dumps({"model": "instant", "stream": True, "messages": [{"role": "user", "content": t}]}).encode()
                for t in texts
            ]
            alone = asyncio.run(plain(url, [bodies[i % len(bodies)] for i in range(args.trials)], size))
            line = f"  {size:4d} in flight: ours {rate:6.0f} ({cpu_ms:.2f} ms CPU a trial), plain aiohttp {alone:6.0f}"
            if args.lm_eval:
                line += f", lm-eval {lm_eval(args.lm_eval, url, args.trials, size, texts)}"
            if args.aiperf:
                line += f", aiperf {aiperf(args.aiperf, args.tokenizer, url, args.trials, size)}"
            print(line, flush=True)
    spec = PromptSpec(128_000, 0.5, seed=12345)
    started = time.perf_counter()
    text, _ = prompts.assemble(spec, 3600, 10)
    cold_s = time.perf_counter() - started
    print(f"a prompt of {len(text):,} characters (about 128k tokens) assembled in {cold_s:.3f} s (aim 1 s)")
    return 0 if cold_s <= 1 and min(rates[1:] or rates) >= 400 else 1


if __name__ == "__main__":
    sys.exit(main())
