"""Runs check() on every candidate that is present, one process a pair, and writes what each found as JSON.

python tools/record_kernel_checks.py --out FILE [--limit SECONDS] [--sizes small full] [--only CANDIDATE …]
python tools/record_kernel_checks.py --merge FILE --out RECORD     # its rows take the place of the same rows in RECORD
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from pathlib import Path
from typing import Any

COLUMNS = ("status", "case", "norm_error", "element_error", "detail")


def run(pair: tuple[str, str], size: str) -> dict[str, Any]:
    """One candidate at one operation: the verdict, its table and what was covered."""
    from needlework.kernels import check

    start = time.monotonic()
    result = check(*pair, size=size)
    rows = []
    for row in result.table.to_dict("records"):
        kept = {name: row[name] for name in COLUMNS}
        rows.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in kept.items()})
    coverage = result.coverage.to_dict("records") if len(result.coverage) else []
    return {
        "candidate": pair[0], "operation": pair[1], "size": size, "passed": result.passed, "says": str(result),
        "seconds": round(time.monotonic() - start, 1), "cases": rows,
        "covered": [str(row["topic"]) for row in coverage if row["covered"]],
        "not_covered": [str(row["topic"]) for row in coverage if not row["covered"]],
    }  # fmt: skip


def merge(newer: Path, record: Path) -> None:
    """Rows of `newer` take the place of the same ones in `record`, and say when they were made."""
    new, old = json.loads(newer.read_text()), json.loads(record.read_text())
    if (new["card"], new["torch"]) != (old["card"], old["torch"]):
        raise SystemExit(f"{newer.name} was made on {new['card']} with torch {new['torch']}, {record.name} otherwise")
    made = {"date": new["date"], "driver": new["driver"]}
    rows = {(r["candidate"], r["operation"], r["size"]): r for r in old["results"]}
    rows |= {(r["candidate"], r["operation"], r["size"]): r | made for r in new["results"]}
    old["results"] = sorted(rows.values(), key=lambda r: (r["operation"], r["candidate"]))
    record.write_text(json.dumps(old, separators=(",", ":"), ensure_ascii=True) + "\n")


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=300, help="seconds; pairs still running then are not recorded")
    parser.add_argument("--sizes", nargs="+", choices=("small", "full"), default=["small", "full"], help="in order")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="+", metavar="CANDIDATE", help="these candidates and no others")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="of an earlier --out; runs nothing")
    options = parser.parse_args()
    if options.merge:
        return merge(options.merge, options.out)
    import torch
    from needlework.kernels.candidates.public import PUBLIC

    pairs = [("triton", name) for name in ("store_index_keys", "indexer_logits", "select_topk", "sparse_mla_decode",
                                           "merge_partials")]  # fmt: skip
    pairs += [(name, public.operation) for name, public in PUBLIC.items() if not public.missing()]
    pairs = [pair for pair in pairs if not options.only or pair[0] in options.only]
    absent = [f"{name}: {public.missing()}" for name, public in PUBLIC.items() if public.missing()]
    results, late = [], []
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    jobs = {pool.submit(run, pair, size): (*pair, size) for size in options.sizes for pair in pairs}
    try:
        for job in as_completed(jobs, timeout=options.limit):
            try:
                results.append(job.result())
                last = results[-1]
                print(f"{last['seconds']:6.1f} s  {last['size']:<5}  {last['says']}", flush=True)
            except Exception as problem:  # a process that died: recorded, and the others go on
                candidate, operation, size = jobs[job]
                says = f"{type(problem).__name__}: {str(problem)[:200]}"
                results.append({"candidate": candidate, "operation": operation, "size": size, "says": says})
                print(results[-1], flush=True)
    except TimeoutError:
        late = [" ".join(jobs[job]) for job in jobs if not job.done()]
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    only = f" --only {' '.join(options.only)}" if options.only else ""
    record = {
        "card": card, "torch": torch.__version__, "command": f"python tools/record_kernel_checks.py --out FILE{only}",
        "results": sorted(results, key=lambda r: (r["operation"], r["candidate"])), "not_finished": late,
        "absent": absent, "driver": driver(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print("not finished:", late or "none", "absent:", absent or "none", flush=True)
    for process in list((pool._processes or {}).values()):
        process.kill()
    os._exit(0)  # the executor would wait for what was killed


if __name__ == "__main__":
    main()
