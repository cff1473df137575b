"""Turn what `tools/record_vllm.py` wrote into an incident bundle: a few page dumps, the runs, redacted evidence.

python tools/pack_vllm.py --out OUT --bundle data/incidents/vllm-dsv32
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record_vllm  # beside this file
import torch
from needlework import analysis, pages
from needlework.evidence import Bundle, redact

LAYOUTS = {"index": "dsa-index-fp8", "mla": "v32-mla-fp8"}
SHORT, LONG, TAIL = 600, 2200, 28  # tokens of the two dumped requests; first page kept of the long one
LAYER, BUDGET, ROLES = 1, 2048, ("prefill", "decode")  # where the faults were planted; index_topk; sides
# fault -> pool in which it lies; the healthy request's pools are kept of every layer
FAULTY = {"index-skip": "index", "index-swap": "index", "scales-zero": "index", "mla-skip": "mla"}


def array(out: Path, pool: str, role: str, fault: str, name: str, layer: int) -> torch.Tensor:
    with np.load(out / "pages" / f"{pool}-{role}-{fault}-{name}.npz", allow_pickle=False) as file:
        return torch.from_numpy(file[f"{pool}.{layer}"])


def keep(out: Path, target: Path, pool: str, role: str, fault: str, layer: int, blocks: dict[str, list[int]]) -> None:
    """One pool and layer of the short request. Both sides write the last prompt token, each with its own kernel: it is
    not among the entries that must agree."""
    raw = array(out, pool, role, fault, "short", layer)
    dump = pages.Dump(raw, LAYOUTS[pool], 64, tuple(blocks[role]), pool, layer, f"{fault}, 600 tokens", role, SHORT - 1)
    pages.write_dump(target / f"{role}-{pool}.{layer}-{fault}", dump)


def keep_long(out: Path, target: Path, layer: int, fault: str, name: str) -> str:
    """The last pages of the long request as prefill computed it; returns a digest of the pages before them."""
    raw = array(out, "index", "prefill", fault, "long", layer)
    entries = LONG - 64 * TAIL
    request = f"{name}, 2,200 tokens, from page {TAIL}"
    dump = pages.Dump(raw[TAIL:].clone(), LAYOUTS["index"], 64, (), "index", layer, request, "prefill", entries)
    pages.write_dump(target / f"long-{name}-index.{layer}", dump)
    return pages.Dump(raw[:TAIL].clone(), LAYOUTS["index"]).describe()["digest"]


def steps(out: Path, target: Path) -> None:
    """Captured decode steps: what the indexer read and gave, and the order of one selection in two healthy forwards."""
    target.mkdir(parents=True, exist_ok=True)
    for fault in ("none", "topk-256"):
        shutil.copy(out / "pages" / f"step-{fault}-short.npz", target / f"{fault}.npz")
    with np.load(out / "pages/step-none-long.npz") as one, np.load(out / "pages/step-mla-skip-long.npz") as two:
        same = {
            f"{name}_{n}": file[f"{name}.0"] for n, file in enumerate((one, two)) for name in ("logits", "selected")
        }
    np.savez_compressed(target / "order.npz", **same)


def text(value: str, folders: dict[str, str]) -> str:
    """Evidence as it may leave the machine: folders by role, addresses and host names gone."""
    for folder, name in folders.items():
        value = value.replace(folder, name)
    return redact(re.sub(r"tcp://\S+", "tcp://ADDRESS", value))


def evidence(out: Path, target: Path, model: Path, folders: dict[str, str]) -> None:
    for path in sorted((out / "evidence").glob("*.json")):
        content: Any = json.loads(path.read_text())
        if path.name == "versions.json":
            chosen = [line for line in content["log"] if "WARNING" not in line and "throughput" not in line]
            content["log"] = [line for line in chosen if "Initializing a V1 LLM engine" not in line]
        if path.name.startswith("server_info"):
            content = {key: content[key] for key in ("vllm_config",) if key in content}
        shown = json.dumps(content, indent=1, ensure_ascii=False)
        (target / path.name).write_text(text(shown, folders) + "\n", encoding="utf-8")
    commands = {
        role: record_vllm.command(role, Path("RUN/model"), 8300 + n) for n, role in enumerate(record_vllm.ROLES)
    }
    shown = {role: " ".join(["python3", *line[1:]]) for role, line in commands.items()}
    (target / "commands.json").write_text(json.dumps(shown, indent=1) + "\n")
    (target / "model").mkdir(exist_ok=True)
    for path in model.iterdir():
        if path.name != "model.safetensors":
            shutil.copyfile(path, target / "model" / path.name)


def ledger(folder: Path) -> analysis.Ledger:
    """What the healthy part of the recording supports and clears; each sentence has the numbers found in the bundle."""
    trials = analysis.load_trials(folder / "runs" / "equality")
    cold = {arm: trials[(trials["arm"] == arm) & (trials["send"] == 0)] for arm in ("combined", "pd")}
    again = [analysis.distances(trials[(trials["probe"] == "aa") & (trials["arm"] == arm)], cold[arm]) for arm in cold]
    repeats = [(row["target_tokens"], row["first_step"]) for table in again for row in table.to_dict("records")]
    short, long = ([d for n, d in repeats if (n <= BUDGET) is low] for low in (True, False))
    warm = trials[(trials["arm"] == "combined") & (trials["send"] == 1) & (trials["target_tokens"] <= BUDGET)]
    last = analysis.distances(cold["pd"], warm[warm["target_tokens"] - warm["cached_tokens"] == 1])
    split = analysis.distances(cold["pd"], cold["combined"])
    split = split[split["target_tokens"] <= BUDGET]
    both = [[pages.read(path)[0] for path in sorted((folder / "pages").glob(f"{role}-*-none.bin"))] for role in ROLES]
    lost = pages.compare_dumps(*both)
    with np.load(folder / "evidence/steps/order.npz", allow_pickle=False) as kept:
        alike = set(kept["selected_0"]) == set(kept["selected_1"]) and (kept["logits_0"] == kept["logits_1"]).all()
        moved = float(np.mean(kept["selected_0"] != kept["selected_1"]))
    found = analysis.Ledger(
        folder.name, "One server and the pair answer identical prompts with other log-probabilities."
    )
    found = found.suspect("split", "The transfer loses or moves pages", 0.3)
    found = found.suspect("kernel", "Decode computes the last prompt token with another kernel than prefill", 0.3)
    found = found.suspect("order", "The engine selects in an order that changes from run to run", 0.1)
    text = f"{len(lost)} findings in {len(both[0])} pools of both sides, 599 entries each"
    found = found.record("pages", "pages compared", text, exonerates=() if len(lost) else ("split",), strength="strong")
    text = (
        f"up to {split['first_step'].max():.2f} nats apart at {len(split)} lengths of at most {BUDGET:,} tokens; "
        f"{last['worst_step'].max():.1f} at the {len(last)} where the single server had one token left to compute"
    )
    same = ("kernel",) if last["worst_step"].max() == 0 else ()
    found = found.record("equality", "pair against one server", text, supports=same, strength="strong")
    text = (
        f"up to {BUDGET:,} tokens {sum(d == 0 for d in short)} of {len(short)} repeats are equal, beyond "
        f"{sum(d == 0 for d in long)} of {len(long)}; one step twice: scores and set "
        f"{'equal' if alike else 'unequal'}, {moved:.0%} of the entries at another place"
    )
    found = found.record("equality", "each arm against itself", text, supports=("order",) if alike else ())
    return replace(
        found,
        blind_spots=("random weights: how much of the noise a trained model would show", "pools that held old pages"),
        verdict=f"The pair is healthy; beyond {BUDGET:,} tokens the engine does not repeat itself.",
        confidence="moderate",
    )


def emptied(bundle: Path) -> None:
    """The parts that packing fills, empty."""
    for part in ("runs", "pages", "evidence"):
        shutil.rmtree(bundle / part, ignore_errors=True)
        (bundle / part).mkdir(parents=True)


def sealed(folder: Path) -> int:
    """Seal a bundle, print its problems and its size; the exit status."""
    bundle = Bundle(folder)
    bundle.seal()
    for problem in bundle.problems():
        print(problem, file=sys.stderr)
    size = sum(path.stat().st_size for path in bundle.files())
    print(f"{len(bundle.files())} files, {size / 1e6:.2f} MB")
    return 2 if bundle.problems() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder that record_vllm.py filled")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder with config and tokenizer (default: OUT/model)")
    parser.add_argument("--folder", action="append", default=[], help="PATH=NAME: write NAME where evidence says PATH")
    options = parser.parse_args()
    emptied(options.bundle)
    shutil.copytree(options.out / "runs", options.bundle / "runs", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(".lock"))  # fmt: skip
    blocks = {row["fault"]: row["blocks"] for row in json.loads((options.out / "evidence/dumps.json").read_text())
              if row["name"] == "short"}  # fmt: skip
    target = options.bundle / "pages"
    for role in ("prefill", "decode"):
        for layer in range(3):
            keep(options.out, target, "index", role, "none", layer, blocks["none"])
        keep(options.out, target, "mla", role, "none", LAYER, blocks["none"])
    for fault, pool in FAULTY.items():
        keep(options.out, target, pool, "decode", fault, LAYER, blocks[fault])
    digests = {f"{name}, layer {layer}": keep_long(options.out, target, layer, fault, name)
               for layer in range(3) for name, fault in (("first", "none"), ("second", "mla-skip"))}  # fmt: skip
    (options.bundle / "evidence/long_pages_0_to_27.json").write_text(json.dumps(digests, indent=1) + "\n")
    steps(options.out, options.bundle / "evidence" / "steps")
    folders = dict(pair.split("=", 1) for pair in options.folder)
    evidence(options.out, options.bundle / "evidence", options.model or options.out / "model", folders)
    ledger(options.bundle).save(options.bundle / "ledger.json")
    return sealed(options.bundle)


if __name__ == "__main__":
    sys.exit(main())
