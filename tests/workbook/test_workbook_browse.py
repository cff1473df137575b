"""The browser of trials: misses first, prompts as they were sent, nothing hostile, nothing made up."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from needlework import probes, workbook
from needlework.workbook import browse, explorers

from tests.mock_endpoint import mock_endpoint


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """Trials of a mock that loses what lies beyond 900 tokens, each with its own first line as at a live server."""
    with mock_endpoint("vllm") as server:
        server.defects.lose = lambda n, place, cached, ordinal: place > 900
        grid = probes.recall(server.base_url, lengths=(512, 2048), depths=(0.1, 0.9), repeats=1, arm="one")
        edge = probes.find_cliff(server.base_url, low=512, high=2048, from_end=64, arm="two", max_requests=12)
    return pd.concat([grid.trials, edge.trials, grid.controls])


def test_every_prompt_is_written_once_more_as_it_was_sent(measured: pd.DataFrame) -> None:
    rows = measured.to_dict("records")
    made = [browse.prompt_of(row) for row in rows]
    assert len(rows) > 8 and all(p is not None and p.sha256 == r["prompt_sha"] for p, r in zip(made, rows, strict=True))
    text = browse.excerpt(rows[0])
    assert rows[0]["expected"] in text and rows[0]["question"] in text and "lines …" in text and len(text) < 2000
    for other in ({"seed": 1}, {"layout": "1+1"}, {"spec": "{}"}):
        assert "cannot be written" in browse.excerpt(rows[0] | other), "a prompt that was never sent"


HOSTILE = ({"layout": "999999999999+1"}, {"target_tokens": 1 << 40}, {"spec": '{"needles": 9999999}'}, {"spec": "["},
           {"spec": '{"from_start": 999999999}'}, {"spec": '{"x": 1}'}, {"seed": None}, {"genre": "<b>"})  # fmt: skip


@pytest.mark.parametrize("claim", HOSTILE)
def test_a_row_that_claims_anything_costs_nothing(measured: pd.DataFrame, claim: dict) -> None:
    assert browse.prompt_of(measured.iloc[0].to_dict() | claim) is None


def test_still_lists_the_misses_alone_and_escapes_them(measured: pd.DataFrame) -> None:
    bad = "<script>alert(1)</script>\x1b[31m"
    shown = workbook.trials(measured.assign(answer=bad), title=bad)
    soup = BeautifulSoup(shown.still(), "html.parser")
    assert not soup.find("script") and "\x1b" not in shown.still()
    missed = int((shown.rows["hit"] == 0).sum())
    rows = soup.find("table").select("tbody tr")
    assert 0 < len(rows) == min(missed, browse.MOST_ROWS) and f"{missed} of {len(shown.rows)}" in soup.caption.text
    assert "control" not in shown.rows or not shown.rows["control"].fillna("").any(), "a control is no miss"
    assert explorers.WIDGET_VIEW in shown._repr_mimebundle_()


def test_filters_narrow_the_list_and_the_choice_is_kept(measured: pd.DataFrame) -> None:
    shown = workbook.trials(measured)
    bar, count, chosen, view = shown.live().children
    misses, arm, length, _ = bar.children
    assert misses.value and all(label.startswith("miss") for label, _ in chosen.options)
    assert count.value.startswith(f"{len(chosen.options)} of {len(shown.rows)} trials: every arm; tokens ")
    misses.value = False
    assert len(chosen.options) == len(shown.rows)
    arm.value = "two"
    assert {shown.rows["arm"][n] for _, n in chosen.options} == {"two"}
    length.value = (length.min, 600)
    assert all(shown.rows["prompt_tokens"][n] <= 600 for _, n in chosen.options)
    chosen.value = chosen.options[-1][1]
    assert shown.value == chosen.value and shown.rows["question"][chosen.value][:40] in view.value


def test_nothing_lost_and_nothing_measured_are_sentences() -> None:
    row = {"trial_id": "a", "probe": "recall", "arm": "one", "prompt_tokens": 900, "outcome": "exact", "answer": "1"}
    assert "0 of 1" in workbook.trials(pd.DataFrame([row])).still()
    assert workbook.trials(pd.DataFrame([row | {"outcome": "transport"}])) == "No trial measured anything."
    foreign = workbook.trials(pd.DataFrame([{"outcome": "other_needle", "answer": json.dumps([1])}]))
    assert "1 of 1" in foreign.still() and foreign.live() is not None
