"""Figures of the kernel notebooks draw from plain tables; recorded GPU rows come with card, versions and command."""

from __future__ import annotations

import json

import pandas as pd
from bs4 import BeautifulSoup
from needlework.workbook import engine_figures, figures, kernel_figures, tables


def test_figures_have_their_axes_and_alt_text():
    lengths = pd.DataFrame({"kernel": ["a", "a", "b"], "keys": [256, 512, 256], "norm_error": [1e-7, 2e-7, 0.0]})
    ranks = pd.DataFrame({"tokens": [64, 64, 128], "entries": [16, 16, 32], "rank": [1, 9, 30]})
    shift = pd.DataFrame({"format": ["exact", "fp4"], "needle": [0, 0], "rank": [3, 5]})
    steps = pd.DataFrame({"target_tokens": [64], "first_step": [0.0]})
    drawn = [
        kernel_figures.accuracy(lengths.assign(layout="x", data="needle"), {"x": 1e-3}),
        kernel_figures.recall_by_budget(ranks, [4, 16], lambda n, k: 0.5),
        kernel_figures.rank_shift(shift, by="format", exact="exact", mark=4),
        engine_figures.first_step_distances({"a": steps}, budget=9),
    ]
    for fig in drawn:
        svg = figures.to_svg(fig)
        assert "mathdefault" not in svg
        assert fig.axes[0].get_xlabel() and fig.axes[0].get_ylabel()


def test_recorded_rows_fit_a_page():
    rows = pd.DataFrame(
        [
            ("B1", "ours", 5.163, 5.1, 5.24, 0.0, 1.727, 0.413, 0.0, None, None, None, None),
            ("B1", "theirs", 4924.281, 4922.0, 4925.1, 1.24e-4, 0.006, 0.001, 0.0, 0.045, 0.1, True, None),
        ],
        columns=kernel_figures.GPU_COLUMNS,
    )
    page = BeautifulSoup(tables.to_html(kernel_figures.gpu_table(rows)), "html.parser")
    cells = [[cell.text for cell in line.find_all(["th", "td"])] for line in page.find_all("tr")]
    assert cells[0] == ["shape", "kernel", "µs", "µs, p10–p90", "error", "TB/s", "of copy", "ours/this", "bar", "met"]
    assert cells[1][2:] == ["5.2", "5.1–5.2", "0", "1.73", "0.41", "–", "–", "–"]
    assert cells[2][2:] == ["4,924.3", "4,922.0–4,925.1", "1.2e-04", "0.006", "0.001", "0.045", "0.1", "yes"]


def test_recorded_rows_are_read_and_their_absence_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_ROOT", str(tmp_path))
    rows, said = kernel_figures.recorded_gpu("select_topk")
    assert rows.empty and "No GPU result" in said
    (tmp_path / "data" / "kernels").mkdir(parents=True)
    row = {"operation": "select_topk", "shape": "B1x65536", "kernel": "ours", "median_us": 30.0, "bytes": 1}
    recorded = {"setting": {"card": "a card", "versions": {"torch": "2", "x": "absent"}}, "command": "c", "rows": [row]}
    (tmp_path / "data" / "kernels" / "h200.json").write_text(json.dumps(recorded))
    rows, said = kernel_figures.recorded_gpu("select_topk")
    assert rows["median_us"].tolist() == [30.0] and "bytes" not in rows and said == "a card, torch 2; c"
    assert kernel_figures.recorded_checks("select_topk").empty
    kept = {
        "results": [{"candidate": "x", "operation": "select_topk", "size": "full", "says": "x agrees. Not covered: y."}]
    }
    (tmp_path / "data" / "kernels" / "checks_h200.json").write_text(json.dumps(kept))
    assert kernel_figures.recorded_checks("select_topk")["verdict"].tolist() == ["x agrees"]
