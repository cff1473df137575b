"""Record SGLang 0.5.14 with DeepSeek-V3.2's sparse attention on one GPU: one server against a NIXL prefill/decode pair.

    python tools/record_sglang.py serve --out OUT [--site DIR] [--port 8400]      # OUT/model holds the checkpoint
    python tools/record_sglang.py ask --out OUT --steps equality|recall
    python tools/record_sglang.py stop --out OUT

`--model random` of `serve` first writes seeded random weights (as tools/record_vllm.py does) beside the configuration
in data/incidents/vllm-dsv32; `--model recall` the calibration checkpoint of tools/make_checkpoint.py.
`equality` asks one server and the pair the same token ids at the edges of page, chunk and top-k, cold, warm and cold
again, and keeps tokens and log-probabilities; it needs no trained weights. `recall` sends the probes' prompts.
Sizes are given, so that all servers can start at once on one GPU. Needs compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import make_checkpoint  # these three beside this file
import pair_proxy
import record_vllm

HERE = Path(__file__).resolve().parent
NAME, ROLES = "needlework", record_vllm.ROLES
LENGTHS, DEPTHS = (500, 1000, 2000, 2100, 4000, 8000, 16000, 32000), (0.0, 0.5, 1.0)
# short prompts take the sparse path too (the dense one needs FlashAttention 3); no compilation ahead of time
SWITCHES = {
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0", "SGLANG_DSA_FORCE_MLA": "1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "1", "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "UCX_TLS": "all",
}  # fmt: skip


def command(role: str, model: Path, port: int, bootstrap: int) -> list[str]:
    """The server's command line."""
    line = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--context-length", "32768", "--chunked-prefill-size", "8192",
        "--max-total-tokens", "140000", "--max-running-requests", "8", "--mem-fraction-static", "0.7",
        "--disable-cuda-graph", "--disable-custom-all-reduce", "--skip-server-warmup", "--enable-cache-report",
        "--kv-cache-dtype", "fp8_e4m3", "--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend",
        "flashmla_kv",
    ]  # fmt: skip
    if role != "combined":
        line += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
        line += ["--disaggregation-bootstrap-port", str(bootstrap)]
    return line


def serve(options: argparse.Namespace) -> None:
    """Start the three servers in sessions of their own and wait until all answer. Raises RuntimeError if one dies."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.model == "random":
        source = HERE.parent / "data" / "incidents" / "vllm-dsv32" / "evidence" / "model"
        made = record_vllm.write_checkpoint(source, options.out / "model")
    else:
        made = make_checkpoint.write(options.out / "model")
    (options.out / "checkpoint.json").write_text(json.dumps(made, indent=1) + "\n")
    switches = SWITCHES | ({"PYTHONPATH": str(options.site)} if options.site else {})
    started, pids = time.monotonic(), {}
    for role in ROLES:
        line = command(role, options.out / "model", options.port + ROLES.index(role), options.bootstrap)
        with open(options.out / f"{role}.log", "wb") as log:
            pids[role] = subprocess.Popen(
                line, stdout=log, stderr=log, env=os.environ | switches, start_new_session=True
            )
    (options.out / "pids.json").write_text(json.dumps({role: child.pid for role, child in pids.items()}))
    record_vllm.wait(options, pids, started, "/v1/models")


class Asker(record_vllm.Asker):
    """The same journal rows as for vLLM, asked through SGLang's own route."""

    pair = ""  # the proxy's address

    def cold(self, *roles: str) -> None:
        for role in roles:
            self.client.post(f"{record_vllm.url(self.options, role)}/flush_cache")

    def ask(self, arm: str, ids: Sequence[int]) -> dict[str, Any]:
        start = time.monotonic()
        address = self.pair if arm == "pd" else record_vllm.url(self.options, "combined")
        body = {"input_ids": list(ids), "return_logprob": True, "top_logprobs_num": 5, "sampling_params":
                {"temperature": 0, "max_new_tokens": record_vllm.NEW_TOKENS, "ignore_eos": True}}  # fmt: skip
        answer = self.client.post(address + "/generate", json=body, timeout=300)
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


def ask(options: argparse.Namespace) -> None:
    from needlework import probes
    from needlework.probes.asks import Ask, with_seed
    from needlework.serving import Endpoint

    asker, runs = Asker(options), options.out / "runs"
    prefill, decode = (record_vllm.url(options, role) for role in ROLES[1:])
    with pair_proxy.pair(
        "sglang", prefill, decode, port=options.port + 3, bootstrap=("127.0.0.1", options.bootstrap)
    ) as address:
        asker.pair = address
        for arm in ("combined", "pd"):  # the first request of each compiles kernels for up to three minutes
            asker.ask(arm, record_vllm.prompt(3000))
        asker.cold(*ROLES)
        if options.steps == "equality":
            journal = probes.Journal(runs / "equality")
            sampling = {"temperature": 0, "max_tokens": record_vllm.NEW_TOKENS}
            journal.note(engine="sglang 0.5.14", model="dsv32-random", sampling=sampling)
            record_vllm.power(asker, journal)
            record_vllm.equality(asker, journal)
            journal.close()
        else:
            arms = {
                "combined": Endpoint(record_vllm.url(options, "combined")),
                "pd": Endpoint(address, tokenizer_url=prefill),
            }
            result = probes.compare_arms(arms, runs / "recall", lengths=LENGTHS, depths=DEPTHS, repeats=2)
            print(result, *result.warnings, sep="\n", flush=True)
            for arm, endpoint in arms.items():
                with probes.Bench(endpoint, runs / "recall", probe="absent", arm=arm) as bench:
                    bench.ask(
                        [
                            Ask("absent", with_seed(probes.PromptSpec(n, 0.5, control="absent"), 3, n), arm=arm)
                            for n in LENGTHS
                        ]
                    )
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
    (options.out / f"said-{options.steps}.json").write_text(json.dumps(said, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "ask", "stop"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=("random", "recall"), default="random")
    parser.add_argument("--steps", choices=("equality", "recall"), default="equality")
    parser.add_argument("--site", type=Path, help="folder with SGLang and what it needs, if it is not installed")
    parser.add_argument("--port", type=int, default=8400, help="three servers from here, the pair at + 3")
    parser.add_argument("--bootstrap", type=int, default=8998, help="the prefill server's bootstrap port")
    parser.add_argument("--start-limit", type=float, default=200, help="seconds")
    options = parser.parse_args()
    try:
        {"serve": serve, "ask": ask, "stop": record_vllm.stop}[options.what](options)
    except (RuntimeError, ValueError, httpx.HTTPError) as problem:
        print(f"record_sglang: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
