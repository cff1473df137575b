"""What does the verdict say of recordings of a real engine with planted faults? One row a run, beside its truth.

    python benchmarks/engine_verdicts.py PART [--data data/engines/vllm] [--out FILE]

A run is judged from outside: its trials and the sizes its manifest states. "place" says where the planted class
stands: first, in the group that was named, among the first three, elsewhere; a healthy run is "healthy" or "accused"; a
sick one that is called healthy is "missed". "another" is the confidence with which the verdict names classes that
leave the planted one out. What was planted is read after all verdicts are made.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from needlework import analysis

ENOUGH = 5  # losses below which no verdict from outside can be asked for


def judge(run: Path) -> dict[str, Any]:
    """The verdict on one run folder, from outside; figures rounded."""
    begin = time.perf_counter()
    config = json.loads((run / "manifest.json").read_text(encoding="utf-8")).get("config", {})
    d = analysis.diagnose(analysis.load_trials(run), {"config": config})
    law = d.laws[0] if d.laws and d.hits < d.measured else None
    return {
        "run": run.name,
        "verdict": d.verdict,
        "confidence": d.confidence,
        "causes": list(d.causes),
        "first": [r.code for r in d.ranked if r.code in analysis.MECHANISMS][:3],
        "healthy": round(next(r.posterior for r in d.ranked if r.code == "healthy"), 3),
        "law": law.sentence if law else "",
        "law_share": round(law.share, 3) if law else 0.0,
        "requests": d.measured,
        "losses": d.measured - d.hits,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def score(row: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """The row with what was planted beside it, and where the planted class stands."""
    planted, named = truth["class"], row["causes"]
    if planted == "healthy":
        place = "accused" if named else "healthy" if row["verdict"] == "healthy" else "not proven"
        another = row["confidence"] if named else ""
    else:
        another = row["confidence"] if named and planted not in named else ""
        place = "missed" if row["verdict"] == "healthy" else "elsewhere"
        if row["verdict"] != "healthy" and planted in row["first"]:
            place = "first" if row["first"][0] == planted else "of three"
        if planted in named:
            place = "first" if named[0] == planted else "group"
    return {"planted": planted, "fault": truth["fault"], **row, "place": place, "another": another}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over faults, those with at least five losses, and healthy runs."""
    sick = [r for r in rows if r["planted"] != "healthy"]
    seen = [r for r in sick if r["losses"] >= ENOUGH]
    whole = [r for r in rows if r["planted"] == "healthy"]
    another = Counter(r["another"] for r in sick if r["another"])
    return {
        "faults": len(sick),
        f"faults with {ENOUGH} losses": len(seen),
        "… right class first or in the group named": sum(r["place"] in ("first", "group") for r in seen),
        "… in the first three": sum(r["place"] in ("first", "group", "of three") for r in seen),
        "… not proven": sum(r["verdict"] == "not proven" for r in seen),
        "… called healthy": sum(r["place"] == "missed" for r in seen),
        "called healthy with fewer losses": sum(r["place"] == "missed" for r in sick if r not in seen),
        **{f"another class named, {c}": another.get(c, 0) for c in ("weak", "moderate", "strong")},
        "healthy": len(whole),
        "healthy called healthy": sum(r["place"] == "healthy" for r in whole),
        "healthy accused": sum(r["place"] == "accused" for r in whole),
        "requests, median": int(pd.Series([r["requests"] for r in rows]).median()),
    }


def verdicts(part: Path) -> list[dict[str, Any]]:
    """All runs of a part, judged and then scored."""
    rows = [judge(run) for run in sorted(part.iterdir()) if (run / "trials.jsonl").is_file()]
    truth = json.loads((part / "truth.json").read_text(encoding="utf-8"))["runs"]
    return sorted((score(row, truth[row["run"]]) for row in rows), key=lambda r: (r["planted"], r["fault"], r["run"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", help="a folder of runs with truth.json beside them")
    parser.add_argument("--data", type=Path, default=Path("data/engines/vllm"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = verdicts(args.data / args.part)
    for r in rows:
        names = "/".join(r["causes"]) or "-"
        said = f"{r['verdict']} {names} ({r['confidence']})"
        print(f"{r['run']} {r['planted']:7} {r['fault']:20} {r['losses']:3}/{r['requests']:3} {said:44} "
              f"{r['place']:10} "
              f"{'OTHER ' + r['another'] if r['another'] else '':14} [{' '.join(r['first'])}] "
              f"{r['law_share']:.2f} {r['law']}")  # fmt: skip
    counts = summary(rows)
    print("\n".join(f"{n:5} {what}" for what, n in counts.items()))
    out = args.out or args.data / f"verdicts-{args.part}.json"
    out.write_text(json.dumps({"summary": counts, "runs": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
