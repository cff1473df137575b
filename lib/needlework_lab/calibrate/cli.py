"""`needlework calibrate`: run the calibration and write its table."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

MOST_CASES = 100_000  # each takes seconds


def main(argv: list[str]) -> int:
    """Run `needlework calibrate`; 0 when done, 2 with one sentence for a mistake, 130 when interrupted."""
    from needlework_lab.calibrate.cases import PAIRS, STRENGTHS, cases
    from needlework_lab.calibrate.run import measured
    from needlework_lab.faults import FAULTS

    parser = argparse.ArgumentParser(prog="needlework calibrate", description=__doc__)
    parser.add_argument(
        "--faults", default="all", help="comma list of classes, pairs (F01+F17), healthy; or all, pairs"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds for each class and strength (3)")
    parser.add_argument("--first-seed", type=int, default=200, metavar="S", help="seeds are S, S+1, … (200)")
    parser.add_argument(
        "--healthy", type=int, default=0, metavar="N", help="N more healthy deployments, half of them PD"
    )
    parser.add_argument("--strengths", default="default", help=f"comma list of {', '.join(STRENGTHS)}")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes of this machine (2)")
    parser.add_argument("--executor", metavar="dask:ADDRESS", help="a Dask scheduler whose workers see FOLDER")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as a page")
    parser.add_argument("--as-is", action="store_true", help="measure nothing: the tables of what FOLDER holds so far")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="trials and results; reused if there")
    asked = parser.parse_args(argv)
    names: list[str] = []
    for part in filter(None, asked.faults.split(",")):
        names += [*sorted(FAULTS), "healthy"] if part == "all" else list(PAIRS) if part == "pairs" else [part]
    strengths = tuple(filter(None, asked.strengths.split(",")))
    try:
        if asked.seeds < 1 or asked.workers < 1:
            raise ValueError("give at least one seed and one worker")
        if unknown := set(strengths) - set(STRENGTHS):
            raise ValueError(f"unknown strength {sorted(unknown)[0][:20]!r}; choose from {', '.join(STRENGTHS)}")
        if len(names) * len(strengths) * asked.seeds + asked.healthy > MOST_CASES:
            raise ValueError(f"one calibration measures at most {MOST_CASES:,} cases; ask for fewer seeds or classes")
        seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
        planned = cases(names, strengths, seeds, healthy=asked.healthy)
        wanted = planned
        if asked.as_is:
            wanted = [case for case in wanted if measured(case, asked.out)]
            if not wanted:
                raise ValueError("none of these cases is measured there yet; leave --as-is out to measure them")
        executor: Executor | None = None
        if asked.as_is:
            executor = ThreadPoolExecutor(1)  # nothing is measured: no process is worth its start
        elif asked.executor:
            executor = _executor(asked.executor)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return _run(asked, argv, wanted, len(planned), executor)


def _run(asked: argparse.Namespace, argv: list[str], wanted: list[Any], planned: int, executor: Executor | None) -> int:
    import needlework

    from needlework_lab.calibrate.run import calibrate
    from needlework_lab.calibrate.summary import summarise

    started = time.perf_counter()

    def progress(done: int, of: int, row: dict[str, Any]) -> None:
        first = {view: row[view]["ranked"][0] for view in ("outside", "evidence")}
        minutes = (time.perf_counter() - started) / 60
        print(
            f"{done}/{of} {row['label']} {row['strength']} seed {row['seed']}: {first['outside']} from outside, "
            f"{first['evidence']} with evidence; {row['requests']} requests, {minutes:.1f} min",
            file=sys.stderr,
            flush=True,
        )

    try:
        rows = calibrate(wanted, asked.out, executor=executor, workers=asked.workers, progress=progress)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here, and --as-is shows what there is", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"the calibration stopped: {str(error)[:300]}", file=sys.stderr)
        return 2
    busy = sum(row["cpu_s"] for row in rows)
    plain = [a for a in argv if a not in (str(asked.out), str(asked.markdown), "--as-is")]
    command = shlex.join(["needlework", "calibrate", *plain]).replace("--out", "--out FOLDER")
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command.replace("--markdown", "--markdown FILE"),
        "seeds": f"{asked.first_seed} to {asked.first_seed + asked.seeds - 1}",
        "runs": len(rows) if len(rows) == planned else f"{len(rows)} of {planned} planned",
        "processor time of the measurements": f"{busy / 60:.0f} min",
        "versions": f"needlework {needlework.__version__}, Python {platform.python_version()}",
    }
    summary = summarise(rows, facts)
    data = {"facts": facts, "rows": [{k: v for k, v in row.items() if k not in ("wall_s", "cpu_s")} for row in rows]}
    (asked.out / "table.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if asked.markdown is not None:
        asked.markdown.write_text(summary.markdown(), encoding="utf-8")
    print(summary)
    return 0


def _executor(spec: str) -> Executor:
    kind, _, address = spec.partition(":")
    if kind != "dask" or not address:
        raise ValueError("an executor is given as dask:ADDRESS, for example dask:tcp://scheduler:8786")
    try:
        from distributed import Client
    except ImportError:
        raise RuntimeError(
            "Dask is not installed here; add the package `distributed`, or leave --executor out"
        ) from None
    return Client(address).get_executor()
