"""Record SGLang 0.5.14 with sparse attention on one GPU: one server against a NIXL prefill/decode pair, from outside
and from the pages of both sides.

    python tools/record_sglang.py serve --out OUT [--family v4 --config DIR] [--model recall] [--site DIR] [--port 8400]
    python tools/record_sglang.py ask --out OUT [--family v4] --steps power,equality,dumps,check
    python tools/record_sglang.py stop --out OUT

`--family v32` (DeepSeek-V3.2): `--model random` of `serve` first writes seeded random weights (as tools/record_vllm.py
does) beside the configuration in data/incidents/vllm-dsv32, `--model recall` the calibration checkpoint of
tools/make_checkpoint.py. `--family v4` (DeepSeek-V4): the configuration in `--config`; the engine's own random weights,
scaled by tools/sglang_worker.py so that the output depends on the context.

`power` and `equality` ask one server and the pair the same token ids at the edges of page, chunk and selection, cold,
warm and cold again, and keep tokens and log-probabilities: they need no trained weights. `dumps` leaves the pages of
one request from both sides of the transfer, and of the single server (pages/*.npz), healthy and with two index pages
exchanged. `check` holds the kernels of the decode process against the reference. `recall` sends the probes' prompts.
The first request of each server compiles kernels for minutes: it is sent first, with a long time-out. Sizes are given,
so that all servers can start at once on one GPU. Needs compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import make_checkpoint  # these three beside this file
import pair_proxy
import record_vllm

HERE = Path(__file__).resolve().parent
NAME, ROLES = "needlework", record_vllm.ROLES
LENGTHS, DEPTHS = (500, 1000, 2000, 2100, 4000, 8000, 16000, 32000), (0.0, 0.5, 1.0)
# page (256) and c128 group (128), selection (512 entries of 4 tokens), chunk (8,192); the shortest last, for one of 129
# tokens once ended a server of V4
V4_EDGES = (3000, 2047, 2048, 2049, 8191, 8192, 8193, 9000, 16384, 300, 257, 256, 255, 129, 128, 127)
EDGES = {"v32": record_vllm.LENGTHS, "v4": V4_EDGES}
POWER = {"v32": record_vllm.POWER_LENGTHS, "v4": (3000, 2049, 9000, 16384, 300, 129)}
DUMPS = {"v32": {"short": 600, "long": 2200}, "v4": {"short": 1100, "long": 3000}}
SWAPPED, CHECK_TOKENS = (2, 5), 310
FIRST_LIMIT, WAIT_LIMIT = 900, 240  # seconds: for the request that compiles; for an order's result
# short prompts take the sparse path too (the dense one needs FlashAttention 3); no compilation ahead of time
SWITCHES = {
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0", "SGLANG_DSA_FORCE_MLA": "1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "1", "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "UCX_TLS": "all",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "900", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "900",
}  # fmt: skip
DSA = [
    "--kv-cache-dtype",
    "fp8_e4m3",
    "--dsa-prefill-backend",
    "flashmla_sparse",
    "--dsa-decode-backend",
    "flashmla_kv",
]
FAMILIES = {"v32": DSA, "v4": ["--load-format", "dummy"]}
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: needlework-sglang\nVersion: 0\n",
          "entry_points.txt": "[sglang.srt.plugins]\nneedlework = sglang_worker:install\n"}  # fmt: skip


def command(role: str, model: Path, port: int, bootstrap: int, family: str = "v32") -> list[str]:
    """The server's command line."""
    line = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--context-length", "32768", "--chunked-prefill-size", "8192",
        "--max-total-tokens", "140000", "--max-running-requests", "8", "--mem-fraction-static", "0.7",
        "--disable-cuda-graph", "--disable-custom-all-reduce", "--skip-server-warmup", "--enable-cache-report",
        "--watchdog-timeout", "1200", *FAMILIES[family],
    ]  # fmt: skip
    if role != "combined":
        line += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
        line += ["--disaggregation-bootstrap-port", str(bootstrap)]
    return line


def plugin(out: Path, site: Path | None) -> str:
    """Write the metadata by which SGLang finds tools/sglang_worker.py; returns the PYTHONPATH."""
    at = out / "plugin" / "needlework_sglang-0.dist-info"
    at.mkdir(parents=True, exist_ok=True)
    for name, text in PLUGIN.items():
        (at / name).write_text(text)
    paths = [at.parent, HERE, HERE.parent / "lib", *([site] if site else [])]
    return ":".join(str(path) for path in paths)


def serve(options: argparse.Namespace) -> None:
    """Start the three servers in sessions of their own and wait until all answer. Raises RuntimeError if one dies."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.family == "v4":
        shutil.copytree(options.config, options.out / "model", dirs_exist_ok=True)
        made = {"weights": "the engine's own random ones, scaled by tools/sglang_worker.py"}
    elif options.model == "random":
        source = HERE.parent / "data" / "incidents" / "vllm-dsv32" / "evidence" / "model"
        made = record_vllm.write_checkpoint(source, options.out / "model")
    else:
        made = make_checkpoint.write(options.out / "model")
    (options.out / "checkpoint.json").write_text(json.dumps(made, indent=1) + "\n")
    switches = SWITCHES | {"PYTHONPATH": plugin(options.out, options.site)}
    started, pids = time.monotonic(), {}
    for role in ROLES:
        port = options.port + ROLES.index(role)
        line = command(role, options.out / "model", port, options.bootstrap, options.family)
        orders = options.out / "orders" / role
        orders.mkdir(parents=True, exist_ok=True)
        with open(options.out / f"{role}.log", "wb") as log:
            pids[role] = subprocess.Popen(
                line, stdout=log, stderr=log, env=os.environ | switches | {"NEEDLEWORK_ORDERS": str(orders)},
                start_new_session=True,
            )  # fmt: skip
    (options.out / "pids.json").write_text(json.dumps({role: child.pid for role, child in pids.items()}))
    record_vllm.wait(options, pids, started, "/v1/models")


class Asker(record_vllm.Asker):
    """The same journal rows as for vLLM, asked through SGLang's own route."""

    pair = ""  # the proxy's address

    def cold(self, *roles: str) -> None:
        for role in roles:
            for _ in range(20):  # refused while a request is on its way out
                if self.client.post(f"{record_vllm.url(self.options, role)}/flush_cache").status_code == 200:
                    break
                time.sleep(0.1)
            else:
                raise RuntimeError(f"{role} did not empty its cache")

    def order(self, role: str, do: str, **more: Any) -> dict[str, Any]:
        """Place an order with a scheduler, to be carried out as the next request of so many tokens ends."""
        folder = self.options.out / "orders" / role
        (folder / "part.json").write_text(json.dumps({"name": do, **more}))
        (folder / "part.json").rename(folder / "order.json")
        return {}

    def result(self, role: str, name: str) -> dict[str, Any]:
        """What the order came to. Raises RuntimeError with the scheduler's words, or if nothing came."""
        path = self.options.out / "orders" / role / f"{name}.json"
        until = time.monotonic() + WAIT_LIMIT
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{role} did not carry out {name}")
            time.sleep(0.05)
        found = json.loads(path.read_text())
        if "problem" in found:
            raise RuntimeError(f"{role}, {name}: {found['problem']}")
        return found

    def ask(self, arm: str, ids: Sequence[int], tokens: int = record_vllm.NEW_TOKENS) -> dict[str, Any]:
        start = time.monotonic()
        address = self.pair if arm == "pd" else record_vllm.url(self.options, "combined")
        body = {"input_ids": list(ids), "return_logprob": True, "top_logprobs_num": 5, "sampling_params":
                {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}  # fmt: skip
        answer = self.client.post(address + "/generate", json=body, timeout=FIRST_LIMIT)
        if answer.status_code != 200:
            raise RuntimeError(f"{arm} answered with {answer.status_code}: {answer.text[:300]}")
        said = answer.json()["meta_info"]
        steps = said["output_token_logprobs"]
        return {
            "tokens": [int(token) for _, token, *_ in steps], "logprobs": [value for value, *_ in steps],
            "tops": [{str(token): value for value, token, *_ in step} for step in said["output_top_logprobs"]],
            "prompt_tokens": said["prompt_tokens"], "completion_tokens": said["completion_tokens"],
            "cached_tokens": said.get("cached_tokens") or 0, "finish_reason": "length",
            "latency_s": round(time.monotonic() - start, 4),
        }  # fmt: skip


def dumps(asker: Asker, family: str, arms: Sequence[str]) -> list[dict[str, Any]]:
    """The pages of one prompt on the single server and on both sides of the pair, healthy and with two index pages
    exchanged on the way. V4 answers one token: its windows and states are overwritten as decode goes on."""
    kept = []
    roles = [role for role in ROLES if ("combined" if role == "combined" else "pd") in arms]
    for fault in ("none", "index-swap") if family == "v32" else ("none",):
        for name, length in DUMPS[family].items():
            asker.cold(*roles)
            stem = f"{name}-{fault}"
            swap = {"swap": SWAPPED} if fault == "index-swap" else {}
            for role in roles:
                step = family == "v32" and name == "long" and role != "prefill"
                asker.order(role, stem, tokens=length, step=step, **(swap if role == "prefill" else {}))
            ids, tokens = record_vllm.prompt(length), record_vllm.NEW_TOKENS if family == "v32" else 1
            said = {arm: asker.ask(arm, ids, tokens) for arm in arms}
            found = {role: asker.result(role, stem) for role in roles}
            kept.append({"fault": fault, "name": name, "length": length, "sides": found,
                         "tokens": {arm: answer["tokens"] for arm, answer in said.items()}})  # fmt: skip
            print(f"dumps {stem}", flush=True)
    return kept


def compare(asker: Asker, steps: Sequence[str], family: str, out: Path, arms: Sequence[str]) -> None:
    """The steps that need no trained weights. What fails is said, and the others go on."""
    from needlework import probes

    sampling = {"temperature": 0, "max_tokens": record_vllm.NEW_TOKENS}
    told = {"engine": "sglang 0.5.14", "model": f"ds{family}-random", "sampling": sampling}
    evidence = out / "evidence"
    evidence.mkdir(exist_ok=True)
    for step in steps:
        try:
            if step in ("power", "equality"):
                journal = probes.Journal(out / "runs" / step)
                journal.note(**told)
                if step == "power":
                    record_vllm.power(asker, journal, POWER[family])
                else:
                    record_vllm.equality(asker, journal, EDGES[family])
                journal.close()
            elif step == "dumps":
                (evidence / "dumps.json").write_text(json.dumps(dumps(asker, family, arms), indent=1) + "\n")
            elif step == "check":
                asker.order("decode", "kernels", tokens=CHECK_TOKENS, check=True)
                asker.ask("pd", record_vllm.prompt(CHECK_TOKENS))
                print(asker.result("decode", "kernels"), flush=True)
        except (RuntimeError, httpx.HTTPError) as problem:
            print(f"{step}: {problem}", file=sys.stderr, flush=True)


def warm_up(asker: Asker) -> list[str]:
    """One request to the single server and one through the pair, at once; the arms that answered."""
    began, took = time.monotonic(), {}

    def first(arm: str) -> None:
        try:
            asker.ask(arm, record_vllm.prompt(3000))
            took[arm] = round(time.monotonic() - began)
        except (RuntimeError, httpx.HTTPError) as problem:
            print(f"{arm} did not answer its first request: {problem}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2) as both:
        list(both.map(first, ("combined", "pd")))
    print(f"first requests answered after {took} s", flush=True)
    (asker.options.out / "first.json").write_text(json.dumps(took) + "\n")
    return list(took)


def recall(options: argparse.Namespace, address: str) -> None:
    """The probes' prompts to both arms, and one absent key at every length."""
    from needlework import probes
    from needlework.probes.bench.trial import Ask, with_seed
    from needlework.serving import Endpoint

    run = options.out / "runs" / "recall"
    arms = {
        "combined": Endpoint(record_vllm.url(options, "combined")),
        "pd": Endpoint(address, tokenizer_url=record_vllm.url(options, "prefill")),
    }
    result = probes.compare_arms(arms, run, lengths=LENGTHS, depths=DEPTHS, repeats=2)
    print(result, *result.warnings, sep="\n", flush=True)
    for arm, endpoint in arms.items():
        with probes.Bench(endpoint, run, probe="absent", arm=arm) as bench:
            bench.ask(
                [Ask("absent", with_seed(probes.PromptSpec(n, 0.5, control="absent"), 3, n), arm=arm) for n in LENGTHS]
            )


def ask(options: argparse.Namespace) -> None:
    asker, steps = Asker(options), options.steps.split(",")
    prefill, decode = (record_vllm.url(options, role) for role in ROLES[1:])
    with pair_proxy.pair(
        "sglang", prefill, decode, port=options.port + 3, bootstrap=("127.0.0.1", options.bootstrap)
    ) as address:
        asker.pair = address
        compare(asker, steps, options.family, options.out, warm_up(asker))
        if "recall" in steps:
            recall(options, address)
    lines = []
    for role in ROLES:
        log = re.sub(r"\x1b\[[0-9;]*m", "", (options.out / f"{role}.log").read_text(errors="replace"))
        lines += [
            f"{role}: {line[:300]}"
            for line in log.splitlines()
            if re.search(r"(?i)backend|kv cache|kv_cache_dtype", line)
        ]
    card = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    said = {"card": card.stdout.strip(), "python": sys.version.split()[0], "log": lines[:60]}
    (options.out / "evidence").mkdir(exist_ok=True)
    (options.out / "evidence" / "engine.json").write_text(json.dumps(said, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "ask", "stop"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=("random", "recall"), default="random")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="v32")
    parser.add_argument("--config", type=Path, help="folder with a DeepSeek-V4 config.json and a tokenizer")
    parser.add_argument("--steps", default="power,equality,dumps,check", help="and recall")
    parser.add_argument("--site", type=Path, help="folder with SGLang and what it needs, if it is not installed")
    parser.add_argument("--port", type=int, default=8400, help="three servers from here, the pair at + 3")
    parser.add_argument("--bootstrap", type=int, default=8998, help="the prefill server's bootstrap port")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds")
    options = parser.parse_args()
    if options.what == "serve" and options.family == "v4" and options.config is None:
        parser.error("--config is needed to serve DeepSeek-V4")
    try:
        {"serve": serve, "ask": ask, "stop": record_vllm.stop}[options.what](options)
    except (RuntimeError, ValueError, httpx.HTTPError) as problem:
        print(f"record_sglang: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
