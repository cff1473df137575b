"""How often do the instruments accuse a healthy deployment? Every instrument with its own controls, again and again.

    python benchmarks/false_alarms.py [--runs 100] [--minutes 10] [--out data/lab/false_alarms.json]
    python benchmarks/false_alarms.py --target vllm --runs 100 --out data/lab/false_alarms_vllm.json

A run is one call of an instrument at small lengths with a seed of its own. It is a false alarm when the verdict is a
finding or when the controls fail ("harness"); "not proven" accuses nobody and is counted beside. With --out, runs that
are there already are kept and the seeds go on from them, so a long series can be made in pieces. The lab answers within
this process (the same engines, worker threads, HTTP application and transfer as `lab.start`, without sockets), tiny
geometry, one combined server and one prefill/decode pair for all runs. The engine is the pair of `make engine`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
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

LAB: dict[str, Call] = {
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
VLLM: dict[str, Call] = {
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
    from needlework.calibrate.inside import start_inside

    with start_inside("combined") as one, start_inside("pd") as pair:
        yield {"combined": one.endpoint, "pd": pair.endpoint}


@contextlib.contextmanager
def engine() -> Iterator[Arms]:
    from needlework import workbook

    with workbook.open_target("vllm") as opened:
        yield {name: opened.arms[name] for name in ("combined", "pd")}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("lab", "vllm"), default="lab")
    parser.add_argument("--runs", type=int, default=100, help="of each instrument, those already in --out included")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long, whatever is done")
    parser.add_argument("--only", default="", help="names of instruments, comma-separated")
    parser.add_argument("--out", type=Path, help="JSON file that is added to")
    args = parser.parse_args()
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    calls = LAB if args.target == "lab" else VLLM
    wanted = [n for n in calls if not args.only or n in args.only.split(",")]
    kept = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    found: dict[str, list[dict[str, Any]]] = {name: kept.get("runs", {}).get(name, []) for name in calls}
    deadline = time.monotonic() + 60 * args.minutes
    with lab() if args.target == "lab" else engine() as arms, tempfile.TemporaryDirectory() as folder:
        for seed in range(args.runs):
            for name in wanted:
                if len(found[name]) <= seed and time.monotonic() < deadline:
                    found[name].append(one_run(name, calls[name], arms, 10_000 + seed, Path(folder)))
                    if "sentence" in found[name][-1]:
                        print(f"{name}, seed {seed}: {found[name][-1]['sentence']}", flush=True)
    if args.out:
        facts = {
            "what": f"verdicts of every instrument on a healthy deployment ({args.target}), with its own controls",
            "command": f"python benchmarks/false_alarms.py --target {args.target}",
            "date": datetime.date.today().isoformat(),
            "versions": {"needlework": needlework.__version__, "python": platform.python_version()},
        }
        args.out.write_text(json.dumps(facts | {"runs": found}, indent=1) + "\n")
    print(table({name: rows for name, rows in found.items() if rows}))
    return 1 if any("sentence" in r for rows in found.values() for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
