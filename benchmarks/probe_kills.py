"""SIGKILL at random moments: is any trial lost, and is any sent twice beyond those that were in flight?

    python benchmarks/probe_kills.py [--kills 100] [--in-flight 4]

A recall run is started again and again on one folder and killed after a random number of journal lines; when a run
comes to its end, a new folder is begun. The endpoint is the tests' mock server, which counts what it was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from mock_endpoint import mock_endpoint

CELLS = 9  # trials of one repeat
WORKER = """
import sys
from needlework.probes import recall
recall(sys.argv[1], sys.argv[2], lengths=(200, 300, 400), depths=(0.2, 0.5, 0.8), repeats=int(sys.argv[4]),
       concurrency=int(sys.argv[3]), controls=False)
"""


@dataclass
class Tally:
    """What was seen: `lost` and `changed` lines of the journal and `excess` sends must be 0."""

    kills: int = 0
    runs: int = 0
    lost: int = 0
    changed: int = 0
    sent_again: int = 0
    excess: int = 0
    torn: int = 0


def rows_of(run: Path) -> dict[str, dict]:
    """Whole lines of the journal by trial."""
    file = run / "trials.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return {row["trial_id"]: row for row in map(json.loads, lines)}


def command(url: str, run: Path, in_flight: int, repeats: int) -> list[str]:
    return [sys.executable, "-c", WORKER, url, str(run), str(in_flight), str(repeats)]


def kill_one(url: str, run: Path, in_flight: int, repeats: int, dice: random.Random) -> bool:
    """Start a worker and kill it a few lines on; True if it was killed, False if it came to its end first."""
    worker = subprocess.Popen(command(url, run, in_flight, repeats), stderr=subprocess.DEVNULL)
    wanted = len(rows_of(run)) + dice.randrange(0, 7)
    deadline = time.monotonic() + 60
    while worker.poll() is None and time.monotonic() < deadline:
        file = run / "trials.jsonl"
        if file.exists() and file.read_bytes().count(b"\n") >= wanted:
            break
        time.sleep(0.002)
    time.sleep(dice.random() * 0.03)
    if worker.poll() is not None:
        return False
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    return True


def kill_runs(
    folder: Path, kills: int, *, in_flight: int = 4, repeats: int = 2, seed: int = 0, say: bool = False
) -> Tally:
    """Kill `kills` workers in all; every run is brought to its end before the next begins."""
    tally, dice = Tally(), random.Random(seed)
    while tally.kills < kills:
        run, here = folder / f"run{tally.runs}", 0
        with mock_endpoint(delay_s=0.02) as mock:
            before: dict[str, dict] = {}
            while tally.kills + here < kills and kill_one(mock.base_url, run, in_flight, repeats, dice):
                here += 1
                now = rows_of(run)
                tally.lost += len(before.keys() - now.keys())
                tally.changed += sum(now[k] != before[k] for k in before.keys() & now.keys())
                before = now
            argv = command(mock.base_url, run, in_flight, repeats)
            last = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=120)
            if last.returncode != 0:
                raise RuntimeError(f"a run that was killed cannot be finished: {last.stderr[-500:]}")
            final = rows_of(run)
            trials = [r for r in final.values() if r["probe"] == "recall"]
            tally.lost += CELLS * repeats - len(trials) + len(before.keys() - final.keys())
            tally.torn += (run / "trials.torn").exists()
            sends = Counter(r["messages"][0]["content"] for r in mock.chats)
            again = sum(n - 1 for n in sends.values())
            tally.sent_again += again
            tally.excess += max(0, again - in_flight * here)
            asked = len(mock.chats)
            subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=120)
            tally.excess += len(mock.chats) - asked  # a finished run sends nothing
        tally.kills += here
        tally.runs += 1
        if say:
            print(f"  run {tally.runs}: {here} kills, {again} trials sent again", flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10, help="trials of a run: nine times this")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_runs(
            Path(folder), args.kills, in_flight=args.in_flight, repeats=args.repeats, seed=args.seed, say=True
        )
    print(
        f"{tally.kills} kills in {tally.runs} runs of {CELLS * args.repeats} trials, {args.in_flight} in flight: "
        f"{tally.lost} trials lost, {tally.changed} lines changed, {tally.sent_again} sent again "
        f"({tally.excess} beyond those in flight), {tally.torn} torn lines"
    )
    return 1 if tally.lost or tally.changed or tally.excess else 0


if __name__ == "__main__":
    sys.exit(main())
