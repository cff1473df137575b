"""Recall of the calibration checkpoint on a running engine, combined and as a prefill/decode pair, healthy and with
faults planted while it runs.

    python tools/make_checkpoint.py --out OUT/model
    python tools/record_vllm.py serve --out OUT --name needlework-recall [--site DIR]
    python tools/record_checkpoint.py --out OUT
    python tools/record_vllm.py stop --out OUT

What it writes to --out: runs/recall (the same prompts to the single server and the pair, absent keys too), runs/faults
(the pair with each fault of tools/vllm_worker.py at the layer that finds the value), pages/*.npz (that layer's pages on
both sides of one transfer for each fault). `--steps pack --data DIR` keeps what is worth keeping, with card.json made
from the journals alone. Needs what tools/record_vllm.py needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_reference as plain  # these five beside this file
import checkpoint_words as words
import httpx
import make_checkpoint as made
import pair_proxy
import pandas as pd
import record_vllm
from needlework import analysis, pages, probes
from needlework.evidence.bundle import Bundle
from needlework.probes.bench.prompts import assemble
from needlework.probes.bench.trial import Ask, with_seed
from needlework.serving import Endpoint

NAME, LAYER = "needlework-recall", made.LAYERS - 1
LENGTHS = (500, 1000, 2000, 2100, 3000, 4000, 8000, 12000, 16000, 24000, 32000)
DEPTHS, REPEATS = (0.0, 0.25, 0.5, 0.75, 1.0), 3
FAULT_LENGTHS, FAULT_DEPTHS = (1000, 2000, 3000, 4000, 8000, 12000, 16000, 32000), (0.1, 0.5, 0.9)
EDGE_TOKENS = 9000  # prompts up to here are rebuilt to count their line ends
CUT_LENGTHS = (6000, 9000, 10000, 11000)  # about where 256 entries no longer hold all line ends
FAULTS = (*record_vllm.FAULTS, "none again")
SWAPPED, SWAP_TOKENS, DUMP_TOKENS = (2, 30), 8000, 2400
# what an outside observer would have to call each fault (docs/checkpoint.md says why)
CLASS_OF = {"none": "healthy", "index-skip": "F14", "index-swap": "F13", "scales-zero": "F14", "mla-skip": "F13",
            "topk-256": "F05"}  # fmt: skip
CONFIG = {"topk": made.TOPK, "ratio": 1, "page": record_vllm.BLOCK, "chunk": record_vllm.CHUNK}
POOL_OF = {"index": "dsa-index-fp8-ue8m0", "mla": "v32-mla-fp8"}


def absent(arms: dict[str, Endpoint], run: Path) -> None:
    """Keys that were never given, two at every length, to both arms."""
    for arm, endpoint in arms.items():
        with probes.Bench(endpoint, run, probe="absent", arm=arm) as bench:
            bench.ask([Ask("absent", with_seed(probes.PromptSpec(n, 0.5, control="absent"), 3, n, r), arm=arm)
                       for n in LENGTHS for r in range(2)])  # fmt: skip


def in_page(page: int, tokens: int, seed: int) -> probes.PromptSpec:
    """A prompt whose asked value lies in this page of 64 tokens. Raises RuntimeError if none is found."""
    tokenizer, start = words.Tokenizer(words.vocabulary()), 58 * page
    for step in range(60):
        spec = with_seed(probes.PromptSpec(tokens, from_start=start), seed, page, step)
        at = len(tokenizer.chat(assemble(spec, tokens // 20, 0)[1])) - 2  # without the end mark and the reply's start
        if page * 64 <= at < page * 64 + 56:
            return spec
        start = max(0, start + page * 64 + 28 - at)
    raise RuntimeError(f"no prompt with its value in page {page} was found")


def fault_asks(fault: str) -> list[Ask]:
    lengths = (*FAULT_LENGTHS, *(CUT_LENGTHS if fault == "topk-256" else ()))
    asks = [Ask("fault", with_seed(probes.PromptSpec(n, d), 5, n), arm=fault) for n in lengths for d in FAULT_DEPTHS]
    if fault in ("none", "index-swap"):  # only a value in one of the two pages can be lost
        asks += [Ask("fault", in_page(page, SWAP_TOKENS, seed), arm=fault, label=f"page {page}")
                 for page in SWAPPED for seed in range(1, 7)]  # fmt: skip
    return asks


def faults(asker: record_vllm.Asker, pair: Endpoint, combined: Endpoint, run: Path) -> None:
    """The single server once, then the pair with each fault, healthy first and last; prefix caches emptied between, so
    that every prompt travels."""
    with probes.Bench(pair, run, probe="fault", arm="none") as first:
        every = {repr(one.prompt): replace(one, arm="combined") for fault in FAULTS for one in fault_asks(fault)}
        with probes.Bench(combined, journal=first.journal, probe="fault", arm="combined", builder=first) as single:
            single.ask([replace(one, label="") for one in every.values()])
        for fault in FAULTS:
            kind = fault.split(" ")[0]
            asker.order("decode", "fault", kind=kind, layer=LAYER, pages=list(SWAPPED))
            asker.cold("prefill", "decode")
            if fault == "none":
                first.ask(fault_asks(fault))
            else:
                with probes.Bench(pair, journal=first.journal, probe="fault", arm=fault, builder=first) as bench:
                    bench.ask(fault_asks(fault))
            print(f"fault {fault}", flush=True)
    asker.order("decode", "fault", kind="none")


def dumps(asker: record_vllm.Asker, folder: Path) -> list[dict[str, Any]]:
    """One prompt for each fault: the answer, and what the pages of both sides say of the transfer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = words.Tokenizer(words.vocabulary())
    prompt = plain.built(in_page(SWAPPED[0], DUMP_TOKENS, 9), tokenizer)
    found = []
    for fault in record_vllm.FAULTS:
        asker.order("decode", "fault", kind=fault, layer=LAYER, pages=list(SWAPPED))
        asker.cold("prefill", "decode")
        tokens = asker.ask("pd", tokenizer.chat(prompt.text))["tokens"]
        names, paths = [f"{pool}.{LAYER}" for pool in POOL_OF], {}
        for role, blocks in asker.last_blocks.items():
            paths[role] = folder / f"{role}-{fault}.npz"
            asker.order(role, "dump", path=str(paths[role]), blocks=blocks, names=names)
        said = tokenizer.decode(tokens).strip()
        found.append({"fault": fault, "answer": said, "expected": prompt.expected, "findings": named(paths)})
        print(found[-1], flush=True)
    asker.order("decode", "fault", kind="none")
    return found


def named(paths: dict[str, Path]) -> list[dict[str, Any]]:
    """Findings of `pages.compare_dumps` by pool and name: how many pages, which tokens."""
    import numpy as np
    import torch

    sides = []
    for role in ("prefill", "decode"):
        with np.load(paths[role], allow_pickle=False) as file:
            sides.append([pages.Dump(torch.from_numpy(file[f"{pool}.{LAYER}"]), layout, 64, (), pool, LAYER, "", role,
                                     DUMP_TOKENS - 1) for pool, layout in POOL_OF.items()])  # fmt: skip
    table = pages.compare_dumps(*sides)
    if not len(table):
        return []
    grouped = table.groupby(["pool", "name"]).agg(pages=("page", "nunique"), token_first=("token_first", "min"),
                                                  token_last=("token_last", "max")).reset_index()  # fmt: skip
    return json.loads(grouped.to_json(orient="records"))


def rates(trials: Any, by: list[str]) -> list[dict[str, Any]]:
    """Hits, trials and Wilson interval for each combination of the columns `by`."""
    rows = []
    for key, part in trials.groupby(by, sort=True):
        hits = int((part["outcome"] == "exact").sum())
        low, high = analysis.wilson(hits, len(part))
        values = [int(value) if name == "target_tokens" else value for name, value in zip(by, key, strict=True)]
        rate = {"hits": hits, "trials": len(part), "low": round(low, 4), "high": round(high, 4)}
        rows.append(dict(zip(by, values, strict=True)) | rate)
    return rows


def selected_at_most(trials: pd.DataFrame) -> int | None:
    """How many entries the engine can have selected, told by the answers alone: its index ranks every line end above
    the value, so a prompt that is lost has as many line ends as entries are selected, or more. The fewest line ends of
    a prompt that is lost while all with fewer are found; None where that is no edge."""
    tokenizer = words.Tokenizer(words.vocabulary())
    end = tokenizer.ids[words.byte_letters()[10]]
    asked = trials.drop_duplicates("target_tokens").set_index("target_tokens")
    counts = {}
    for length, row in asked[asked.index <= EDGE_TOKENS].iterrows():
        spec = with_seed(probes.PromptSpec(int(length), float(row["depth"])), 5, int(length))
        counts[length] = tokenizer.chat(plain.built(spec, tokenizer).text).count(end)
    found = (trials["outcome"] == "exact").groupby(trials["target_tokens"]).mean()
    lost = [count for length, count in counts.items() if found[length] == 0]
    kept = [count for length, count in counts.items() if found[length] == 1]
    return min(lost) if lost and kept and max(kept) < min(lost) else None


def inside(out: Path, fault: str) -> dict[str, Any]:
    """What the pages of both sides say, as `analysis.diagnose` takes it."""
    kept = json.loads((out / "evidence" / "dumps.json").read_text())
    findings = next(row["findings"] for row in kept if row["fault"] == fault)
    lost = {row["pool"] for row in findings}
    digests = {f"{pool}.{LAYER}": pool not in lost for pool in POOL_OF}
    return {"digests": digests, "pages": [f"{row['name']} {row['pool']}" for row in findings]}


def compared(out: Path, fault: str) -> pd.DataFrame:
    """The pair with a fault beside the single server, on the same prompts."""
    trials = analysis.load_trials(out / "runs" / "faults").query("probe == 'fault'")
    cached = trials["cached_tokens"].fillna(0)  # vLLM leaves a zero out of its usage
    trials = trials.assign(cached_tokens=cached, cache=["warm" if count else "cold" for count in cached])
    pair = trials[trials["arm"] == fault].assign(arm="pd")
    single = trials[(trials["arm"] == "combined") & trials["prompt_sha"].isin(pair["prompt_sha"])]
    return pd.concat([single, pair], ignore_index=True)


def diagnosed(out: Path, fault: str, *, pages_seen: bool = True) -> analysis.Diagnosis:
    """`analysis.diagnose` of the pair with a fault beside the single server, with or without what the pages say."""
    evidence = inside(out, fault) if pages_seen else {}
    trials = compared(out, fault)
    if pages_seen and not evidence["pages"]:  # where pages are damaged the edge is theirs
        most = selected_at_most(trials.query("arm == 'pd' and label == ''"))
        evidence |= {} if most is None else {"selected": {"by the answers": most}}
    return analysis.diagnose(trials, {"config": CONFIG, **evidence})


def card(out: Path) -> dict[str, Any]:
    """Recall by arm, fault and length, from the journals in `out` alone."""
    recall = analysis.load_trials(out / "runs" / "recall")
    asked = recall[recall["probe"] == "arms"]
    absent_ones = recall[recall["control"] == "absent"]
    said: dict[str, Any] = {
        "recall": rates(asked, ["arm"]),
        "recall_by_length": rates(asked, ["arm", "target_tokens"]),
        "recall_by_depth": rates(asked, ["arm", "depth"]),
        "absent_refused": {
            arm: [int((part["outcome"] == "refusal").sum()), len(part)] for arm, part in absent_ones.groupby("arm")
        },
    }
    if (out / "runs" / "faults").is_dir():
        fault = analysis.load_trials(out / "runs" / "faults")
        in_pages = fault["label"].fillna("").str.startswith("page")
        grid = fault[(fault["probe"] == "fault") & ~in_pages]
        said |= {
            "faults": rates(grid, ["arm", "target_tokens"]),
            "swapped_pages": rates(fault[in_pages], ["arm", "label"]),
            "fault_outcomes": {arm: part["outcome"].value_counts().to_dict() for arm, part in grid.groupby("arm")},
        }
    return said


def pack(out: Path, target: Path) -> None:
    """What is kept of a recording: journals without token counts, evidence without addresses, the damaged pools."""
    import numpy as np
    from pack_vllm import text

    for run in sorted((out / "runs").iterdir()):
        (target / "runs" / run.name).mkdir(parents=True, exist_ok=True)
        for name in ("trials.jsonl", "manifest.json"):
            (target / "runs" / run.name / name).write_bytes((run / name).read_bytes())
    for path in [*sorted((out / "evidence").glob("*.json")), out / "startup.json"]:
        content = json.loads(path.read_text())
        if path.name == "versions.json":
            chosen = [line for line in content["log"] if "WARNING" not in line and "throughput" not in line]
            content["log"] = [line for line in chosen if "Initializing a V1 LLM engine" not in line]
        (target / "evidence").mkdir(exist_ok=True)
        shown = text(json.dumps(content, indent=1, ensure_ascii=False), {str(out): "RUN"})
        (target / "evidence" / path.name).write_text(shown + "\n", encoding="utf-8")
    (target / "pages").mkdir(exist_ok=True)
    faulty = {"none": "index", "index-skip": "index", "index-swap": "index", "scales-zero": "index", "mla-skip": "mla"}
    kept = [(role, fault, pool) for fault, pool in faulty.items() for role in ("prefill", "decode")]
    for role, fault, pool in kept:
        with np.load(out / "pages" / f"{role}-{fault}.npz", allow_pickle=False) as file:
            raw = file[f"{pool}.{LAYER}"]
        np.savez_compressed(target / "pages" / f"{role}-{pool}-{fault}.npz", raw)
    (target / "card.json").write_text(json.dumps(card(out), indent=1) + "\n")
    Bundle(target).seal()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="folder with vLLM, if it is not installed (for the versions)")
    parser.add_argument("--port", type=int, default=8300, help="as given to record_vllm.py; the pair answers at + 3")
    parser.add_argument("--name", default=NAME, help="the model's name as it is served")
    parser.add_argument("--steps", default="recall,faults,dumps", help="and pack, with --data")
    parser.add_argument("--data", type=Path, help="folder for what `pack` keeps")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    runs, steps, evidence = options.out / "runs", options.steps.split(","), options.out / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    asker = record_vllm.Asker(options)
    combined, prefill, decode = (record_vllm.url(options, role) for role in record_vllm.ROLES)
    try:
        with pair_proxy.pair("vllm", prefill, decode, port=options.port + 3) as address:
            arms = {"combined": Endpoint(combined), "pd": Endpoint(address)}
            for role in record_vllm.ROLES if {"recall", "faults", "dumps"} & set(steps) else ():
                asker.order(role, "install")
                said = asker.order(role, "describe")
                (evidence / f"worker-{role}.json").write_text(json.dumps(said, indent=1) + "\n")
            if "recall" in steps:
                result = probes.compare_arms(
                    arms, runs / "recall", lengths=LENGTHS, depths=DEPTHS, repeats=options.repeats
                )
                print(result, *result.warnings, sep="\n", flush=True)
                absent(arms, runs / "recall")
                record_vllm.versions(options)
            if "faults" in steps:
                faults(asker, arms["pd"], arms["combined"], runs / "faults")
            if "dumps" in steps:
                (evidence / "dumps.json").write_text(json.dumps(dumps(asker, options.out / "pages"), indent=1) + "\n")
        print(json.dumps(card(options.out)))
        if "pack" in steps:
            pack(options.out, options.data or options.out / "packed")
    except (RuntimeError, ValueError, httpx.HTTPError) as problem:
        print(f"record_checkpoint: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
