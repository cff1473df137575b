"""Record vLLM 0.23.0 with DeepSeek-V3.2's sparse attention on one GPU: one server against a NIXL prefill/decode pair,
with faults planted while it runs.

    python tools/record_vllm.py all --config DIR --out DIR [--site DIR] [--port 8300]

`--config` is a folder with a DeepSeek-V3.2 `config.json` and a tokenizer (the run was made with the small one in
data/incidents/vllm-dsv32/evidence/model: 3 layers, hidden 1,024, 64 heads, index_topk 2,048, 2,048 words); `--site` a
folder with vLLM 0.23.0 and what it needs, if they are not installed. The steps can be run one by one: `checkpoint`
writes seeded random weights beside the configuration, `serve` starts three servers on one GPU and returns when all
answer, `ask` sends the requests, `stop` ends the servers.

What `ask` writes to --out:
    runs/equality   prompts at the edges of page, chunk and top-k: one server and the pair, cold and warm, A/A
    runs/power      what one changed early token, or one changed page, does to the log-probabilities
    runs/faults     the pair with each fault of tools/vllm_worker.py planted, and healthy again
    pages/*.npz     pools of one request on both sides of the transfer, for every fault
    evidence/       versions, effective configuration, what the workers say of themselves, kernel checks, captured steps
Needs a GPU of 40 GB or more with compute capability 9.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

MODEL = "dsv32-random"
LENGTHS = (63, 64, 65, 127, 128, 129, 300, 2040, 2047, 2048, 2049, 2112, 3000, 4096, 8191, 8192, 8193, 9000, 16384,
           16385, 32000)  # fmt: skip
POWER_LENGTHS = (65, 300, 2049, 3000, 9000, 16384, 32000)
FAULT_LENGTHS = (300, 2040, 2049, 2112, 3000, 4096, 8193, 16384, 32000)
FAULTS = ("none", "index-skip", "index-swap", "scales-zero", "mla-skip", "topk-256")
DUMP_LENGTHS = {"short": 600, "long": 2200}
LAYER, NEW_TOKENS = 1, 8
ROLES = ("combined", "prefill", "decode")
CHUNK, BLOCK, CACHE_BYTES = 8192, 64, 3 << 30


# ---- the checkpoint ----


def tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Any]]:
    """Random weights of a scale at which the output depends on the context: unit variance is kept through every
    projection, and attention logits have a standard deviation of about SHARP, so that a query reads tens of entries and
    not all of them alike."""
    import torch

    sharp, reads = 2.5, 2.0
    g = torch.Generator().manual_seed(seed)
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    latent, rope, low = config["kv_lora_rank"], config["qk_rope_head_dim"], config["q_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (torch.randn(rows, columns, generator=g) * (gain / columns**0.5)).to(torch.bfloat16)

    def ones(n: int) -> Any:
        return torch.ones(n, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", torch.randn(config["vocab_size"], hidden, generator=g).to(torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        at, attn = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        yield at + "input_layernorm.weight", ones(hidden)
        yield attn + "q_a_proj.weight", normal(low, hidden)
        yield attn + "q_a_layernorm.weight", ones(low)
        yield attn + "q_b_proj.weight", normal(heads * (nope + rope), low, sharp)
        yield attn + "kv_a_proj_with_mqa.weight", normal(latent + rope, hidden)
        yield attn + "kv_a_layernorm.weight", ones(latent)
        yield attn + "kv_b_proj.weight", normal(heads * (nope + value), latent)
        yield attn + "o_proj.weight", normal(hidden, heads * value, reads)
        yield attn + "indexer.wq_b.weight", normal(index_heads * index_dim, low)
        yield attn + "indexer.wk.weight", normal(index_dim, hidden)
        yield attn + "indexer.k_norm.weight", torch.ones(index_dim)
        yield attn + "indexer.k_norm.bias", torch.zeros(index_dim)
        yield attn + "indexer.weights_proj.weight", normal(index_heads, hidden)
        yield at + "post_attention_layernorm.weight", ones(hidden)
        yield at + "mlp.gate_proj.weight", normal(inner, hidden)
        yield at + "mlp.up_proj.weight", normal(inner, hidden)
        yield at + "mlp.down_proj.weight", normal(hidden, inner)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", normal(config["vocab_size"], hidden, 3.0)


def write_checkpoint(source: Path, target: Path, seed: int = 0) -> dict[str, Any]:
    """`source`'s configuration and tokenizer with seeded weights; returns parameters, bytes and a digest."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    weights = dict(tensors(config, seed))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    digest = hashlib.blake2b((target / "model.safetensors").read_bytes(), digest_size=16).hexdigest()
    count = sum(t.numel() for t in weights.values())
    return {
        "seed": seed,
        "parameters": count,
        "bytes": (target / "model.safetensors").stat().st_size,
        "blake2b": digest,
    }


# ---- servers ----


def command(role: str, model: Path, port: int, name: str = MODEL, seqs: int = 8) -> list[str]:
    """The server's command line. Sizes are given, so that three servers can start at once on one GPU."""
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-prompt-tokens-details",
        "--kv-cache-dtype", "fp8_ds_mla", "--block-size", str(BLOCK), "--max-model-len", "32768",
        "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", str(seqs), "--gpu-memory-utilization", "0.15",
        "--kv-cache-memory-bytes", str(CACHE_BYTES), "--worker-extension-cls", "vllm_worker.Extension",
        *(["--kv-transfer-config", transfer] if role != "combined" else []),
    ]  # fmt: skip


def serve(options: argparse.Namespace) -> None:
    """Start the three servers in sessions of their own and wait until all answer. Raises RuntimeError if one dies."""
    here = Path(__file__).resolve().parent
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [str(options.site)] if options.site else []
    paths += [str(here), str(here.parent / "lib")]
    # FlashInfer's sampler is built at the first start (more than two minutes) and greedy answers do not need it
    switches = {
        "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_DEEP_GEMM_WARMUP": "skip", "UCX_TLS": "all", "PYTHONUNBUFFERED": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    started, pids = time.monotonic(), {}
    for role in options.roles.split(","):
        number = ROLES.index(role)
        environment = os.environ | switches | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.port + 50 + number)}
        with open(options.out / f"{role}.log", "wb") as log:
            line = command(role, options.out / "model", options.port + number, options.name, options.seqs)
            child = subprocess.Popen(line, stdout=log, stderr=log, env=environment, start_new_session=True)
        pids[role] = child
    known = options.out / "pids.json"
    before = json.loads(known.read_text()) if known.exists() else {}
    known.write_text(json.dumps(before | {role: child.pid for role, child in pids.items()}))
    wait(options, pids, started, "/health")


def wait(options: argparse.Namespace, pids: dict[str, subprocess.Popen[bytes]], started: float, route: str) -> None:
    """Until every server answers `route`; startup.json keeps the seconds. RuntimeError if one dies or is late."""
    waiting, seconds = dict(pids), {}
    while waiting:
        for role, child in list(waiting.items()):
            if child.poll() is not None:
                log = (options.out / f"{role}.log").read_text(errors="replace")
                raise RuntimeError(f"{role} ended with {child.returncode}:\n" + "\n".join(log.splitlines()[-40:]))
            try:
                if httpx.get(f"{url(options, role)}{route}", timeout=2).status_code == 200:
                    del waiting[role]
                    seconds[role] = round(time.monotonic() - started)
                    print(f"{role} answers after {seconds[role]} s", flush=True)
            except httpx.HTTPError:
                pass
        if time.monotonic() - started > options.start_limit:
            raise RuntimeError(f"not up after {options.start_limit} s: {', '.join(waiting)}")
        time.sleep(0.5)
    (options.out / "startup.json").write_text(json.dumps(seconds) + "\n")


def stop(options: argparse.Namespace) -> None:
    """End the servers by the process groups that `serve` started."""
    for pid in json.loads((options.out / "pids.json").read_text()).values():
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


def url(options: argparse.Namespace, role: str) -> str:
    return f"http://127.0.0.1:{options.port + ROLES.index(role)}"


# ---- requests ----


def prompt(length: int, edit: str = "", words: int = 2048) -> list[int]:
    """`length` random token ids, the same for the same length. edit: "token" changes the sixth, "page" the first 64."""
    rng = random.Random(f"needlework {length}")
    ids = [rng.randrange(3, words) for _ in range(length)]
    other = random.Random(f"needlework {length} {edit}")
    changed = {"": range(0), "token": range(5, 6), "page": range(min(64, length - 1))}[edit]
    for place in changed:
        ids[place] = 3 + (ids[place] - 3 + other.randrange(1, words - 3)) % (words - 3)
    return ids


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Tokens, their log-probabilities and the five likeliest at each step, as the server gave them."""
    choice = answer["choices"][0]
    given = choice["logprobs"]
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {
        "tokens": [int(name.rpartition(":")[2]) for name in given["tokens"]],
        "logprobs": given["token_logprobs"],
        "tops": [{name.rpartition(":")[2]: value for name, value in step.items()} for step in given["top_logprobs"]],
        "prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"],
        "cached_tokens": cached or 0, "finish_reason": choice["finish_reason"],
    }  # fmt: skip


class Asker:
    """Sends prompts to one server or through the pair, and writes each answer into a journal."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.client = httpx.Client(timeout=httpx.Timeout(60, connect=5))
        self.ordinal = 0
        self.last_blocks: dict[str, list[int]] = {}  # of the request last sent through the pair, by role

    def post(self, role: str, path: str, body: dict[str, Any] | None = None, slow: bool = False) -> httpx.Response:
        answer = self.client.post(f"{url(self.options, role)}{path}", json=body, timeout=150 if slow else 60)
        if answer.status_code != 200:
            raise RuntimeError(f"{role} answered {path} with {answer.status_code}: {answer.text[:300]}")
        return answer

    def order(self, role: str, do: str, **more: Any) -> dict[str, Any]:
        """One order to the worker behind a server. Raises RuntimeError with what the worker says."""
        body = {"method": "needlework", "args": [json.dumps({"do": do, **more})]}
        result = self.post(role, "/collective_rpc", body, slow=do == "check").json()["results"][0]
        if "problem" in result:
            raise RuntimeError(f"{role}, {do}: {result['problem']}")
        return result

    def cold(self, *roles: str) -> None:
        for role in roles:
            self.post(role, "/reset_prefix_cache")

    def complete(self, role: str, ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
        body = {"model": self.options.name, "prompt": list(ids), "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 5, "return_tokens_as_token_ids": True, **more}
        return self.post(role, "/v1/completions", body).json()

    def ask(self, arm: str, ids: Sequence[int]) -> dict[str, Any]:
        """One greedy answer of NEW_TOKENS. The pair: prefill computes the prompt, decode reads its blocks."""
        start = time.monotonic()
        if arm == "combined":
            found = read_answer(self.complete("combined", ids, NEW_TOKENS))
            found["prefill_cached_tokens"] = found["cached_tokens"]
        else:
            asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                     "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
            first = self.complete("prefill", ids, 1, kv_transfer_params=asked)
            transfer = first["kv_transfer_params"]
            self.last_blocks = {"prefill": [block for group in transfer["remote_block_ids"] for block in group]}
            found = read_answer(self.complete("decode", ids, NEW_TOKENS, kv_transfer_params=transfer))
            found["decode_cached_tokens"] = found["cached_tokens"]
            found["prefill_cached_tokens"] = read_answer(first)["cached_tokens"]
            found["cached_tokens"] = found["prefill_cached_tokens"]
            found["first_token"] = read_answer(first)["tokens"][0]
            self.last_blocks["decode"] = self.order("decode", "blocks")["blocks"]
            found["transferred_blocks"] = len(self.last_blocks["decode"])
        found["latency_s"] = round(time.monotonic() - start, 4)
        return found

    def trial(self, journal: Any, probe: str, arm: str, length: int, *, send: int = 0, wanted: str = "cold",
              fault: str = "none", edit: str = "", reference: list[int] | None = None) -> dict[str, Any]:  # fmt: skip
        """Ask once and write the row. `reference`: the tokens that count as right (those of the cold single server)."""
        ids = prompt(length, edit)
        spec = {"probe": probe, "arm": arm, "target_tokens": length, "send": send, "fault": fault, "edit": edit}
        trial_id = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        found = self.ask(arm, ids)
        tokens = found.pop("tokens")
        wanted_tokens = tokens if reference is None else reference
        same = next((i for i, (a, b) in enumerate(zip(tokens, wanted_tokens, strict=True)) if a != b), NEW_TOKENS)
        row = {
            "trial_id": trial_id, "run": journal.name, "time": at, **spec, "turn": 1, "concurrency": 1,
            "ordinal": self.ordinal, "seed": 0, "prompt_sha": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
            "expected": " ".join(map(str, wanted_tokens)), "answer": " ".join(map(str, tokens)),
            "outcome": "exact" if same == NEW_TOKENS else ("near" if same else "garbage"), "score": same / NEW_TOKENS,
            "wanted_cache": wanted, "cache": "warm" if found["cached_tokens"] else "cold", **found,
        }  # fmt: skip
        self.ordinal += 1
        journal.append(row)
        return {**row, "tokens": tokens}


def equality(asker: Asker, journal: Any, lengths: Sequence[int] = LENGTHS) -> None:
    """Both arms at every length: cold, at once again (warm), and cold once more (A/A)."""
    for number, length in enumerate(lengths):
        first = asker.trial(journal, "equality", "combined", length)["tokens"]
        plan = [("combined", 1, "warm"), ("pd", 0, "cold"), ("pd", 1, "warm")]
        for arm, send, wanted in plan if number % 2 == 0 else [plan[1], plan[2], plan[0]]:
            asker.trial(journal, "equality", arm, length, send=send, wanted=wanted, reference=first)
        asker.cold(*ROLES)
        for arm in ("combined", "pd"):
            asker.trial(journal, "aa", arm, length, send=2, reference=first)
        print(f"equality {length}", flush=True)


def power(asker: Asker, journal: Any, lengths: Sequence[int] = POWER_LENGTHS) -> None:
    """Does an early change show? The plain prompt, one changed token, one changed page; all cold."""
    asker.cold(*ROLES)
    for length in lengths:
        plain = asker.trial(journal, "power", "combined", length)["tokens"]
        for edit in ("token", "page"):
            asker.trial(journal, "power", "combined", length, edit=edit, reference=plain)
        asker.cold("combined")
    print("power", flush=True)


def faults(asker: Asker, journal: Any, references: dict[int, list[int]]) -> None:
    """The pair with each fault planted at one layer, healthy first and last; every prompt cold on both sides."""
    for repeat, fault in enumerate([*FAULTS, "none"]):
        asker.order("decode", "fault", kind=fault, layer=LAYER, pages=[2, 30])
        for length in FAULT_LENGTHS:
            asker.cold("prefill", "decode")
            send = 10 + repeat if fault == "none" else 0
            asker.trial(journal, "fault", "pd", length, fault=fault, send=send, reference=references[length])
        print(f"fault {fault}", flush=True)
    asker.order("decode", "fault", kind="none")


def dumps(asker: Asker, folder: Path) -> list[dict[str, Any]]:
    """The pools of two requests on both sides for every fault, after the answer (decode has added its own tokens)."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for fault in FAULTS:
        asker.order("decode", "fault", kind=fault, layer=LAYER, pages=[2, 5])
        for name, length in DUMP_LENGTHS.items():
            asker.cold("prefill", "decode")
            asker.order("decode", "capture")
            found = asker.ask("pd", prompt(length))
            there = asker.last_blocks
            step = folder / f"step-{fault}-{name}.npz"
            asker.order("decode", "captured", path=str(step))
            names = [f"index.{n}" for n in range(3)]
            for role, blocks in there.items():
                stem = f"{role}-{fault}-{name}"
                asker.order(role, "dump", path=str(folder / f"index-{stem}.npz"), blocks=blocks, names=names)
                if name == "short":
                    more = [f"mla.{n}" for n in range(3)]
                    asker.order(role, "dump", path=str(folder / f"mla-{stem}.npz"), blocks=blocks, names=more)
            kept.append({"fault": fault, "length": length, "name": name, "blocks": there, "tokens": found["tokens"]})
        print(f"dumps {fault}", flush=True)
    asker.order("decode", "fault", kind="none")
    return kept


def ask(options: argparse.Namespace) -> None:
    from needlework.probes.bench.journal import Journal

    asker, evidence = Asker(options), options.out / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    said = {}
    for role in options.roles.split(","):
        asker.order(role, "reload")
        said[role] = {"install": asker.order(role, "install"), **asker.order(role, "describe")}
        info = asker.client.get(f"{url(options, role)}/server_info")
        (evidence / f"server_info-{role}.json").write_text(info.text if info.status_code == 200 else "{}")
        (evidence / f"worker-{role}.json").write_text(json.dumps(said[role], indent=1) + "\n")
    print(json.dumps(said)[:2000], flush=True)
    journals = {name: Journal(options.out / "runs" / name) for name in ("equality", "power", "faults")}
    manifest = {
        "engine": "vllm 0.23.0",
        "model": options.name,
        "sampling": {"temperature": 0, "max_tokens": NEW_TOKENS},
    }
    for journal in journals.values():
        journal.note(**manifest)
    steps = options.steps.split(",")
    if "power" in steps:
        power(asker, journals["power"])
    if "equality" in steps:
        equality(asker, journals["equality"])
    if "faults" in steps:
        rows = journals["equality"].rows.values()
        cold = {r["target_tokens"]: r for r in rows if r["arm"] == "combined" and r["send"] == 0}
        faults(asker, journals["faults"], {n: [int(t) for t in r["answer"].split()] for n, r in cold.items()})
    if "dumps" in steps:
        kept = dumps(asker, options.out / "pages")
        (evidence / "dumps.json").write_text(json.dumps(kept, indent=1) + "\n")
    for journal in journals.values():
        journal.close()
    if "check" in steps:
        print(asker.order("decode", "check", path=str(evidence / "kernel_checks.json")), flush=True)


def versions(options: argparse.Namespace) -> None:
    """Names and versions of what ran, and the servers' own lines about backends."""
    search = [str(options.site)] if options.site else None
    from importlib import metadata

    found = metadata.distributions(path=search) if search else metadata.distributions()
    names = sorted({f"{d.metadata['Name']}=={d.version}" for d in found if d.metadata["Name"]})
    card = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    lines = []
    for role in ROLES:
        log = (options.out / f"{role}.log").read_text(errors="replace")
        chosen = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in log.splitlines()]
        lines += [f"{role}: {line[:300]}" for line in chosen if re.search(r"(?i)backend|kv cache|deepgemm|nixl", line)]
    record = {"card": card.stdout.strip(), "python": sys.version.split()[0], "packages": names, "log": lines[:150]}
    (options.out / "evidence" / "versions.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("all", "checkpoint", "serve", "ask", "stop"))
    parser.add_argument("--config", type=Path, help="folder with config.json and tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="folder with vLLM and what it needs")
    parser.add_argument("--port", type=int, default=8300, help="three ports from here, and three from here + 50")
    parser.add_argument("--roles", default=",".join(ROLES), help="which servers to start or to prepare")
    parser.add_argument("--name", default=MODEL, help="the model's name as it is served")
    parser.add_argument("--seqs", type=int, default=8, help="requests that a server computes at a time")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds")
    parser.add_argument("--steps", default="power,equality,faults,dumps,check")
    options = parser.parse_args()
    if options.what in ("all", "checkpoint"):
        if options.config is None:
            parser.error("--config is needed to write the checkpoint")
        made = write_checkpoint(options.config, options.out / "model")
        (options.out / "evidence").mkdir(parents=True, exist_ok=True)
        (options.out / "evidence" / "checkpoint.json").write_text(json.dumps(made, indent=1) + "\n")
        print(made, flush=True)
    try:
        if options.what in ("all", "serve"):
            serve(options)
        if options.what in ("all", "ask"):
            ask(options)
            versions(options)
    except (RuntimeError, httpx.HTTPError) as problem:
        print(f"record_vllm: {problem}", file=sys.stderr)
        return 2
    finally:
        if options.what in ("all", "stop"):
            stop(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
