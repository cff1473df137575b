"""What notebooks 02 and 04 ask, recorded on a real engine whose right answers are known: the calibration checkpoint on
one server and on a prefill/decode pair.

    python tools/make_checkpoint.py --out OUT/model
    python tools/record_vllm.py serve --out OUT --name needlework-recall [--site DIR]
    python tools/pair_proxy.py vllm http://127.0.0.1:8301 http://127.0.0.1:8302 --port 8303
    python tools/record_patterns.py --out OUT --target combined=http://127.0.0.1:8300,pd=http://127.0.0.1:8303
        [--router router=http://127.0.0.1:8304+tokenizer=http://127.0.0.1:8301+metrics=http://127.0.0.1:8302]

It writes OUT/runs/02_reproduce_symptom and OUT/runs/04_recall_patterns; the notebooks read them back with the same
parameters. Interruptions of the pair are asked through the router, which passes a broken connection on (the proxy
answers whole).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from needlework import probes, workbook
from needlework.probes import Result
from needlework.serving.target import TargetError

SHORT, LONG, DEPTH = 1024, 16384, 0.6
EDGE = 2049  # one token more than the index of this model selects
SYMPTOM, PATTERNS = "02_reproduce_symptom", "04_recall_patterns"

Asked = tuple[str, Callable[..., Result], dict[str, Any]]


def talks() -> Iterator[Asked]:
    """Notebook 02 but for interruptions: what a conversation keeps, and whether its text is coherent."""
    for length in (SHORT, LONG):
        yield SYMPTOM, probes.turns, {"length": length, "depth": DEPTH, "repeats": 2}
    yield SYMPTOM, probes.coherence, {"lengths": (SHORT, LONG), "repeats": 2, "depth": DEPTH}


def interruptions() -> Iterator[Asked]:
    yield SYMPTOM, probes.abort, {"stages": ("prefill", "decode"), "rounds": 10, "length": LONG, "depth": DEPTH}


def patterns() -> Iterator[Asked]:
    """Notebook 04: depth, residue, warmth, concurrency, request count; and how many backends there are."""
    yield PATTERNS, probes.depth_profile, {"length": LONG, "depths": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "repeats": 2}
    yield PATTERNS, probes.scan_residues, {"start": EDGE, "period": 64}
    yield PATTERNS, probes.warm_cold, {"lengths": (2000, LONG), "repeats": 4, "depth": DEPTH}
    yield PATTERNS, probes.echo, {"trials": 16, "concurrency": 8, "lengths": (EDGE,)}
    yield PATTERNS, probes.drift, {"canaries": 40, "length": 512}
    yield PATTERNS, probes.pool, {"sends": 8, "length": 512}


def record(arms: dict[str, Any], runs: Path) -> int:
    """Ask everything of every arm; returns how many verdicts accuse."""
    accused = 0
    for arm, endpoint in arms.items():
        asked = interruptions() if arm == "router" else [*talks(), *patterns()]
        if arm == "combined":
            asked = [*asked, *interruptions()]
        for run, probe, options in asked:
            result = probe(endpoint, runs / run, arm=arm, **options)
            accused += result.verdict in ("finding", "harness")
            print(f"{arm} {probe.__name__}: {result.verdict}. {result}", *result.warnings, sep="\n  ", flush=True)
    return accused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", required=True, help="combined=URL,pd=URL")
    parser.add_argument("--router", default="", help="router=URL+tokenizer=URL…: the pair, for interruptions")
    options = parser.parse_args()
    specs = options.target + ("," + options.router if options.router else "")
    try:
        with workbook.open_target(specs) as opened:
            return 1 if record(dict(opened.arms), options.out / "runs") else 0
    except (TargetError, RuntimeError, ValueError) as problem:
        print(f"record_patterns: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
