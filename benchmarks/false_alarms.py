"""How often do the instruments accuse a healthy deployment? Every instrument with its own controls, again and again.

    python benchmarks/false_alarms.py [--runs 100] [--minutes 10] [--out data/lab/false_alarms.json]
    python benchmarks/false_alarms.py --target vllm --out data/lab/false_alarms_vllm.json
    python benchmarks/false_alarms.py --endpoint http://127.0.0.1:8000 [--model NAME] --out alarms.json
    python benchmarks/false_alarms.py --endpoint combined=http://…,pd=http://…+tokenizer=http://… --out alarms.json

A run is one call of an instrument at small lengths with a seed of its own. It is a false alarm when the verdict is a
finding or when the controls fail ("harness"); "not proven" accuses nobody and is counted beside. With --out, each run
is on disk when it ends, those that are there already are kept and the seeds go on from them, so a long series can be
made in pieces and ended at any moment. The lab answers within this process (the same engines, worker threads, HTTP
application and transfer as `lab.start`, without sockets), tiny geometry, one combined server and one prefill/decode
pair for all runs. The engine of `--target vllm` is the pair of `make engine`, whose small model gets questions within
its reach; a live endpoint gets the lab's (300 to 1,100 tokens), those for two servers when it names two. Its model must
answer such questions without a miss, or the misses are the model's. A key comes from NEEDLEWORK_API_KEY.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import needlework
from needlework import probes
from needlework.analysis.intervals import wilson
from needlework.probes import Result
from needlework.serving import Endpoint

Arms = Mapping[str, Endpoint]
Call = Callable[[Arms, dict[str, Any]], Result]
SPLIT = ("recall on the pair", "arms")  # asked only where there are two servers

FULL: dict[str, Call] = {
    "recall": lambda a, o: probes.recall(a["combined"], lengths=(300, 600), depths=(0.1, 0.9), **o),
    "recall on the pair": lambda a, o: probes.recall(a["pd"], lengths=(300, 600), depths=(0.1, 0.9), **o),
    "cliff": lambda a, o: probes.find_cliff(a["combined"], low=280, high=900, tolerance=0.3, **o),
    "residues": lambda a, o: probes.scan_residues(a["combined"], start=320, period=4, distance=100, **o),
    "depth": lambda a, o: probes.depth_profile(a["pd"], length=500, depths=(0.0, 0.5, 1.0), repeats=1, **o),
    "warm_cold": lambda a, o: probes.warm_cold(a["pd"], lengths=(300, 500), repeats=1, **o),
    "turns": lambda a, o: probes.turns(a["pd"], length=320, repeats=1, **o),
    "abort": lambda a, o: probes.abort(a["pd"], stages=("prefill", "decode"), rounds=1, length=600, **o),
    "echo": lambda a, o: probes.echo(a["pd"], trials=4, concurrency=4, lengths=(300,), **o),
    "drift": lambda a, o: probes.drift(a["combined"], canaries=8, length=300, **o),
    "coherence": lambda a, o: probes.coherence(a["combined"], lengths=(300,), repeats=2, max_tokens=40, **o),
    "pool": lambda a, o: probes.pool(a["pd"], sends=4, length=300, **o),
    "arms": lambda a, o: probes.compare_arms(
        a, lengths=(300, 500), depths=(0.5,), repeats=1, aa_pairs=1, cache=("cold", "warm"), **o
    ),
}  # fmt: skip
# A model of 135 million parameters: facts near the end of short prompts, where it is whole; the long ones are its own.
SMALL: dict[str, Call] = {
    "recall": lambda a, o: probes.recall(a["combined"], lengths=(300, 400), depths=(0.9,), **o),
    "residues": lambda a, o: probes.scan_residues(
        a["combined"], start=300, period=2, anchors=("end",), distance=60, cache=("cold",), **o
    ),
    "warm_cold": lambda a, o: probes.warm_cold(a["pd"], lengths=(400,), repeats=1, depth=0.9, **o),
    "abort": lambda a, o: probes.abort(a["combined"], stages=("decode",), rounds=1, length=400, depth=0.9, **o),
    "echo": lambda a, o: probes.echo(a["combined"], trials=2, concurrency=2, lengths=(300,), **o),
    "drift": lambda a, o: probes.drift(a["combined"], canaries=8, length=300, depth=0.9, **o),
    "pool": lambda a, o: probes.pool(a["pd"], sends=2, length=300, **o),
    "arms": lambda a, o: probes.compare_arms(a, lengths=(300,), depths=(0.9,), repeats=2, aa_pairs=1, **o),
}  # fmt: skip


@contextlib.contextmanager
def lab() -> Iterator[Arms]:
    from needlework_lab.calibrate.in_process import start_in_process

    with start_in_process("combined") as one, start_in_process("pd") as pair:
        yield {"combined": one.endpoint, "pd": pair.endpoint}


@contextlib.contextmanager
def engine() -> Iterator[Arms]:
    from needlework import workbook

    with workbook.open_target("vllm") as opened:
        yield {name: opened.arms[name] for name in ("combined", "pd")}


@contextlib.contextmanager
def live(spec: str, model: str | None) -> Iterator[Arms]:
    """One live server for both roles, or `combined=…,pd=…`, as a notebook's target is written."""
    from needlework import workbook

    os.environ.pop("NEEDLEWORK_TARGET", None)  # it would overrule the address
    with workbook.open_target(spec, model=model) as opened:
        arms = dict(opened.arms)
        if len(arms) > 1 and set(arms) != {"combined", "pd"}:
            raise SystemExit("two endpoints are given as combined=URL,pd=URL")
        yield arms if len(arms) > 1 else dict.fromkeys(("combined", "pd"), *arms.values())


def one_run(name: str, call: Call, arms: Arms, seed: int, folder: Path) -> dict[str, Any]:
    """One run as a row: verdict, and the sentence where it accuses."""
    began = time.perf_counter()
    result = call(arms, {"run": folder / name.replace(" ", "-"), "seed": seed})
    row = {"seed": seed, "verdict": result.verdict, "requests": len(result.trials) + len(result.controls)}
    if result.verdict in ("finding", "harness"):
        row["sentence"] = str(result)
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row an instrument, and the 95 % upper bound of its rate of false alarms."""
    lines = [
        "| instrument | runs | false alarms | at most (95 %) | not proven | requests | s a run |",
        "|---|" + "---|" * 6,
    ]
    for name, rows in found.items():
        verdicts = [r["verdict"] for r in rows]
        false = sum(v in ("finding", "harness") for v in verdicts)
        high = wilson(false, len(rows)).high if rows else 1.0
        seconds = sum(r["seconds"] for r in rows) / max(1, len(rows))
        lines.append(
            f"| {name} | {len(rows)} | {false} | {100 * high:.1f} % | {verdicts.count('not proven')} "
            f"| {sum(r['requests'] for r in rows):,} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def save(out: Path, facts: Mapping[str, Any], found: Mapping[str, list[dict[str, Any]]]) -> None:
    """The whole file anew, in one step: a series that is killed loses the run under way and no other."""
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")
    beside.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("lab", "vllm"), default="lab")
    parser.add_argument("--endpoint", metavar="URL", help="a live endpoint instead, or combined=URL,pd=URL")
    parser.add_argument("--model", help="model name at the live endpoint; default: the first one that is listed")
    parser.add_argument("--runs", type=int, default=100, help="of each instrument, those already in --out included")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after so long")
    parser.add_argument("--only", default="", help="names of instruments, comma-separated")
    parser.add_argument("--out", type=Path, help="JSON file that is added to")
    args = parser.parse_args()
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    target = "live endpoint" if args.endpoint else args.target
    calls = SMALL if target == "vllm" else FULL
    if args.endpoint and "pd=" not in args.endpoint:
        calls = {name: call for name, call in calls.items() if name not in SPLIT}
    wanted = [n for n in calls if not args.only or n in args.only.split(",")]
    kept = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    found: dict[str, list[dict[str, Any]]] = {name: kept.get("runs", {}).get(name, []) for name in calls}
    opened = live(args.endpoint, args.model) if args.endpoint else lab() if target == "lab" else engine()
    facts = {
        "what": f"verdicts of every instrument on a healthy deployment ({target}), with its own controls",
        "command": f"python benchmarks/false_alarms.py {'--endpoint URL' if args.endpoint else f'--target {target}'}",
        "date": datetime.date.today().isoformat(),
        "versions": {"needlework": needlework.__version__, "python": platform.python_version()},
    }
    deadline = time.monotonic() + 60 * args.minutes
    with opened as arms, tempfile.TemporaryDirectory() as folder:
        for seed in range(args.runs):
            for name in wanted:
                if len(found[name]) > seed or time.monotonic() > deadline:
                    continue
                found[name].append(one_run(name, calls[name], arms, 10_000 + seed, Path(folder)))
                if args.out:
                    save(args.out, facts, found)
                if "sentence" in found[name][-1]:
                    print(f"{name}, seed {seed}: {found[name][-1]['sentence']}", flush=True)
    print(table({name: rows for name, rows in found.items() if rows}))
    return 1 if any("sentence" in r for rows in found.values() for r in rows) else 0


if __name__ == "__main__":
    from needlework.serving.target import TargetError

    try:
        sys.exit(main())
    except TargetError as error:  # no such engine, or nobody at that address
        sys.exit(str(error))
