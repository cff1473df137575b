"""Turn what `tools/record_sglang.py` wrote into an incident bundle: a few page dumps, the runs, redacted evidence.

    python tools/pack_sglang.py --out OUT_V32 --v4 OUT_V4 --bundle data/incidents/sglang-dsv32

Of DeepSeek-V3.2: index pages of all layers and the latent pages of one, both sides, 600 tokens; the same index pages
with two exchanged; the last index pages of 2,200 tokens as prefill and the single server wrote them; one decode step.
Of DeepSeek-V4: one layer of each pool on both sides, 1,100 tokens. What is left out is kept as digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pack_vllm  # these two beside this file
import record_sglang
import torch
from needlework import analysis, pages

LAYOUTS = {"index": "dsa-index-fp8", "mla": "v32-mla-fp8"}
LAYER, BUDGET, TAIL, ROLES = 1, 2048, 28, ("combined", "prefill", "decode")
# V4 pool -> (layout, entries of a page, tokens of an entry); the state pools hold float32 rows
V4 = {"window": ("v4-mla-fp8", 256, 1), "c4": ("v4-mla-fp8", 64, 4), "c128": ("v4-mla-fp8", 2, 128),
      "index": ("dsa-index-fp8", 64, 4)}  # fmt: skip
V4_KEPT = ("window.1", "c4.0", "c128.0", "index.0", "index_state.1")
WINDOW, V4_PAGE = 128, 256


def arrays(out: Path, role: str, stem: str) -> dict[str, np.ndarray]:
    """'pool.layer' -> uint8 [pages, page bytes] of one request."""
    with np.load(out / "orders" / role / f"{stem}.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def v32_dump(raw: np.ndarray, name: str, role: str, stem: str, entries: int, ids: tuple[int, ...] = ()) -> pages.Dump:
    pool, layer = name.split(".")
    kept = torch.from_numpy(raw).clone()
    return pages.Dump(kept, LAYOUTS[pool], 64, ids, pool, int(layer), stem, role, entries)


def v4_dump(raw: np.ndarray, name: str, role: str, tokens: int) -> pages.Dump:
    """A pool of V4; its live entries are those of whole groups, and in the window pool of the pages that were kept."""
    pool, layer = name.split(".")
    layout, slots, group = V4[pool]
    start = max(0, tokens - WINDOW) // V4_PAGE * V4_PAGE if pool == "window" else 0
    entries = (tokens - start) // group
    text = f"{tokens:,} tokens"
    return pages.Dump(torch.from_numpy(raw).clone(), layout, slots, (), pool, int(layer), text, role, entries, group)


def digests(out: Path, stem: str) -> dict[str, dict[str, str]]:
    """pool.layer -> side -> digest of its pages; for a pool of entries only the live ones count."""
    tokens = next(row["length"] for row in sides(out) if f"{row['name']}-{row['fault']}" == stem)
    found: dict[str, dict[str, str]] = {}
    for role in ROLES:
        kept = arrays(out, role, stem)
        for name, raw in kept.items():
            content = torch.from_numpy(raw)
            if "state" not in name:
                dump = v4_dump(raw, name, role, tokens) if "c4.0" in kept else v32_dump(raw, name, role, stem, tokens)
                content = dump.record.gather(dump.raw, torch.arange(dump.entries or 0), dump.page_tokens)
            found.setdefault(name, {})[role] = hashlib.blake2b(content.numpy().tobytes(), digest_size=8).hexdigest()
    return found


def sides(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "evidence" / "dumps.json").read_text())


def keep_v32(out: Path, target: Path) -> None:
    ids = {f"{row['name']}-{row['fault']}": row["sides"] for row in sides(out)}
    for stem, roles in (("short-none", ("prefill", "decode")), ("short-index-swap", ("decode",))):
        for role in roles:
            wanted = [f"index.{n}" for n in range(3)] + ([f"mla.{LAYER}"] if stem == "short-none" else [])
            for name in wanted:
                raw = arrays(out, role, stem)[name]
                dump = v32_dump(raw, name, role, stem, 600, tuple(ids[stem][role]["page_ids"][name]))
                pages.write_dump(target / f"{role}-{name}-{stem.partition('-')[2]}", dump)
    for role in ("prefill", "combined"):
        for layer in range(3):
            raw = arrays(out, role, "long-none")[f"index.{layer}"][TAIL:]
            dump = v32_dump(raw, f"index.{layer}", role, f"2,200 tokens, from page {TAIL}", 2200 - 64 * TAIL)
            pages.write_dump(target / f"long-{role}-index.{layer}", dump)


def keep_v4(out: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for role in ("prefill", "decode"):
        kept = arrays(out, role, "short-none")
        for name in V4_KEPT:
            if name.split(".")[0] in V4:
                pages.write_dump(target / f"{role}-{name}", v4_dump(kept[name], name, role, 1100))
            else:
                np.savez_compressed(target / f"{role}-{name}.npz", kept[name])


def step(out: Path, target: Path) -> None:
    """One layer of the captured decode step: what the indexer read and gave."""
    with np.load(out / "orders" / "decode" / "long-none-step.npz", allow_pickle=False) as file:
        names = ("q", "weights", "length", "logits", "pages")
        np.savez_compressed(target / "step.npz", **{name: file[f"{name}.{LAYER}"] for name in names})


def evidence(out: Path, v4: Path, target: Path, folders: dict[str, str]) -> None:
    for path, family in ((out, "v32"), (v4, "v4")):
        for name in ("engine.json", "dumps.json"):
            content = json.loads((path / "evidence" / name).read_text())
            if name == "engine.json":
                chosen = [re.sub(r"\[[\d :-]+\] ", "", line) for line in content["log"] if "server_args=" not in line]
                content["log"] = chosen
            shown = json.dumps(content, indent=1, ensure_ascii=False)
            (target / f"{family}-{name}").write_text(pack_vllm.text(shown, folders) + "\n")
        (target / f"{family}-first.json").write_text((path / "first.json").read_text())
        stems = sorted(file.stem for file in (path / "orders" / "prefill").glob("*.npz"))
        found = {stem: digests(path, stem) for stem in stems if (path / "orders" / "combined" / f"{stem}.npz").exists()}
        (target / f"{family}-digests.json").write_text(json.dumps(found, indent=1) + "\n")
    shutil.copyfile(out / "checkpoint.json", target / "checkpoint.json")
    shutil.copyfile(out / "orders" / "decode" / "kernels.checks.json", target / "kernel_checks.json")
    lines = {
        f"{family} {role}": " ".join(
            ["python3", *record_sglang.command(role, Path("RUN/model"), port + n, at, family)[1:]]
        )
        for family, port, at in (("v32", 8400, 8998), ("v4", 8500, 8999))
        for n, role in enumerate(ROLES)
    }
    (target / "commands.json").write_text(json.dumps(lines, indent=1) + "\n")
    config = json.loads((v4 / "model" / "config.json").read_text()) if (v4 / "model").is_dir() else None
    if config is not None:
        (target / "v4-config.json").write_text(json.dumps(config, indent=1) + "\n")


def ledger(folder: Path) -> analysis.Ledger:
    """What the recording supports and clears; each sentence has the numbers found in the bundle."""
    trials = analysis.load_trials(folder / "runs" / "equality")
    cold = {arm: trials[(trials["arm"] == arm) & (trials["send"] == 0)] for arm in ("combined", "pd")}
    again = [analysis.distances(trials[(trials["probe"] == "aa") & (trials["arm"] == arm)], cold[arm]) for arm in cold]
    repeats = [(row["target_tokens"], row["first_step"]) for table in again for row in table.to_dict("records")]
    split = analysis.distances(cold["pd"], cold["combined"])
    low = split[split["target_tokens"] <= BUDGET]["first_step"]
    read = {
        role: [pages.read(path)[0] for path in sorted((folder / "pages").glob(f"{role}-*-none.bin"))] for role in ROLES
    }
    lost = pages.compare_dumps(read["prefill"], read["decode"])
    kept = json.loads((folder / "evidence" / "v4-digests.json").read_text())
    same = sum(one["prefill"] == one["decode"] for pools in kept.values() for one in pools.values())
    count = sum(len(pools) for pools in kept.values())
    found = analysis.Ledger(folder.name, "Does SGLang's pair answer as one server does, and do its pages arrive?")
    found = found.suspect("split", "The transfer loses or moves pages", 0.3)
    found = found.suspect("order", "The engine selects in an order that changes from run to run", 0.3)
    text = f"{len(lost)} findings in {len(read['prefill'])} pools of both sides, 600 entries each"
    found = found.record("pages", "pages compared", text, exonerates=() if len(lost) else ("split",), strength="strong")
    text = f"{same} of {count} pools of two prompts have one digest on both sides"
    found = found.record(
        "pages", "pools of V4", text, exonerates=("split",) if same == count else (), strength="strong"
    )
    text = (
        f"up to {BUDGET:,} tokens the first step is {low.max():.2f} nats apart at most; repeats are equal in "
        f"{sum(d == 0 for n, d in repeats if n <= BUDGET)} of {sum(n <= BUDGET for n, _ in repeats)}, beyond in "
        f"{sum(d == 0 for n, d in repeats if n > BUDGET)} of {sum(n > BUDGET for n, _ in repeats)}"
    )
    found = found.record("equality", "pair against one server, and each against itself", text, supports=("order",))
    return replace(
        found,
        blind_spots=("random weights: how much of the noise a trained model would show", "V4's answers by length"),
        verdict=f"The pair is healthy; beyond {BUDGET:,} tokens the engine does not repeat itself.",
        confidence="moderate",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="what record_sglang.py wrote for V3.2")
    parser.add_argument("--v4", type=Path, required=True, help="and for V4")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--folder", action="append", default=[], help="PATH=NAME: write NAME where evidence says PATH")
    options = parser.parse_args()
    pack_vllm.emptied(options.bundle)
    for run in ("power", "equality"):
        shutil.copytree(options.out / "runs" / run, options.bundle / "runs" / run,
                        ignore=shutil.ignore_patterns(".lock"))  # fmt: skip
    keep_v32(options.out, options.bundle / "pages")
    keep_v4(options.v4, options.bundle / "pages" / "v4")
    step(options.out, options.bundle / "evidence")
    folders = dict(pair.split("=", 1) for pair in options.folder)
    evidence(options.out, options.v4, options.bundle / "evidence", folders)
    ledger(options.bundle).save(options.bundle / "ledger.json")
    return pack_vllm.sealed(options.bundle)


if __name__ == "__main__":
    sys.exit(main())
