"""The recorded GPU results: every bar is judged from its numbers, and the block sizes are the library's defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from needlework.kernels.triton import index, mla, topk

RECORDED = Path(__file__).parents[2] / "data" / "kernels"
ROWS = json.loads((RECORDED / "h200.json").read_text())["rows"]
OURS = {(row["operation"], row["shape"]): row for row in ROWS if row["kernel"] == "needlework"}


def shape_of(text: str) -> tuple[int, int]:
    """'B64x32768' or 'v4 B64 K512' -> (64, 32768) or (64, 512)."""
    batch, width = text.split()[-2:] if " " in text else text.split("x")
    return int(batch[1:]), int(width.lstrip("K"))


@pytest.fixture
def on_an_h200(monkeypatch):
    for module in (index, mla, topk):
        monkeypatch.setattr(module, "INTERPRETED", False)
        monkeypatch.setitem(module.LAUNCH, "PDL", True)
    monkeypatch.setattr(mla, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(mla, "shared_bytes", lambda device: 232_448)


def test_recorded_block_sizes_are_the_defaults(on_an_h200):
    device, compared = torch.device("cpu"), 0
    for (operation, shape), row in OURS.items():
        if "config" not in row:
            continue
        batch, width = shape_of(shape)
        layout = f"{shape.split()[0]}-mla-fp8"
        default = {
            "indexer_logits": lambda b, w: index.logits_config(b, w, 132),
            "select_topk": topk.topk_config,
            "sparse_mla_decode": lambda b, w, of=layout: mla.decode_config(b, w, device, of),
        }[operation](batch, width)
        assert default == row["config"], (operation, shape)
        compared += 1
    assert compared == 27


def test_recorded_bars_follow_from_the_recorded_times():
    judged = [row for row in ROWS if "bar" in row]
    assert len(judged) == 39
    for row in judged:
        ratio = OURS[row["operation"], row["shape"]]["median_us"] / row["median_us"]
        assert row["ours_over_this"] == pytest.approx(ratio, abs=2e-3)
        assert row["met"] == (row["ours_over_this"] <= row["bar"])
    assert all(row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in ROWS if "median_us" in row)


def test_recorded_checks_of_the_twins_agree_with_the_reference():
    results = json.loads((RECORDED / "checks_h200.json").read_text())["results"]
    ours = {(r["operation"], r["size"]): r["passed"] for r in results if r["candidate"] == "triton"}
    assert len(ours) == 10 and all(ours.values())
