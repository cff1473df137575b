"""A notebook on the real engine: the split against one server, as `needlework run 10 --target vllm` executes it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from needlework.workbook import runner

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
if not os.environ.get("NEEDLEWORK_ENGINES"):
    pytest.skip("the real engine is tested by `make test-engines`", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {"target": "vllm", "lengths": (300, 700), "depths": (0.2, 0.8), "aa_pairs": 2}


def test_the_split_is_compared_with_one_server():
    (twin,) = runner.choose(["10_pd_vs_combined"], ROOT)
    environment = {"NEEDLEWORK_TARGET": "vllm"}
    notebook = asyncio.run(
        runner.execute(twin, root=ROOT, parameters=PARAMETERS, environment=environment, timeout_s=800)
    )
    printed = [o.text for cell in notebook.cells for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
    verdict = next(text for text in printed if text.startswith(("The split", "Healthy", "Not proven")))
    # a weak model may answer two prompts unlike in two batches; it must not look like a loss of context
    assert not verdict.startswith("The split"), verdict
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) == 2, "the paired table and the map of depths"
