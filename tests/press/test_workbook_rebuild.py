"""The shipped incident rebuilt from its recordings, network off: it works, says so, and gives the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ("02_reproduce_symptom",)  # it replays its requests through the journal, as the live notebooks do
ALONE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # loopback, and nothing else


def can_be_cut_off() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "ip"))
    return tools and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_be_cut_off(), reason="no right to a network namespace here (unshare -n, as root)")
def test_two_rebuilds_without_a_network_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "notebooks/src").mkdir(parents=True)
    for name in NOTEBOOKS:
        shutil.copy(ROOT / f"notebooks/src/{name}.py", tmp_path / "notebooks/src")
    for kept in ("incidents/context-loss", "checkpoint/vllm/runs/02_reproduce_symptom"):
        shutil.copytree(ROOT / "data" / kept, tmp_path / "data" / kept)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NEEDLEWORK_")}
    environment |= {"NEEDLEWORK_ROOT": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [*ALONE, sys.executable, "-m", "needlework", "run", "--all", "--incident", "context-loss"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        made = [*(tmp_path / "build").rglob("*.ipynb"), *(tmp_path / "report").rglob("index.html")]
        found.append({path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in made})
    assert len(found[0]) == len(NOTEBOOKS) + 1 and found[0] == found[1]
    page = next(text for name, text in found[0].items() if name.endswith("index.html")).decode()
    assert "rebuilt from recordings, nothing was sent" in page and "Read from recordings: notebook" in page
    assert not list((tmp_path / "notebooks").glob("*.ipynb")), "the committed notebooks are another place"
