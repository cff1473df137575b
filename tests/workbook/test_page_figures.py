"""The page notebook's figures and explorer: they show what the bytes say."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from needlework.pages import LAYOUTS, Dump, compare_dumps
from needlework.workbook import page_figures


@pytest.fixture(params=["dsa-index-fp8", "v4-mla-fp8", "v41-mla-fp4"])
def dump(request) -> Dump:
    torch.manual_seed(0)
    layout = LAYOUTS[request.param]
    return Dump(
        layout.encode({"values": torch.randn(3, 64, layout.dim)}), layout.name, pool=request.param, role="prefill"
    )


def test_explorer_numbers_are_those_of_the_bytes(dump):
    explorer = page_figures.PageExplorer(dump, slot=7)
    layout = dump.record
    numbers = explorer.numbers(1, 7, "codes")
    values = layout.decode(dump.raw)["values"][1, 7]
    first = [float(part) for text in numbers["worth"] for part in text.split(",")]
    assert first == pytest.approx(values[: len(first)].tolist(), rel=1e-4)
    at = int(numbers["byte in the pool"][0])
    assert bytes.fromhex(numbers["hex"][0]) == bytes(dump.raw.flatten()[at : at + 1].tolist())
    for field in (item.name for item in layout.fields):
        assert len(explorer.numbers(0, 63, field))


def test_explorer_has_a_value_a_still_and_a_live_view(dump):
    explorer = page_figures.PageExplorer(dump, slot=7)
    assert explorer.value == 0
    still = explorer.still()
    assert still.count("<img ") == 3 and "3 of 64 entries" not in still and "64 of 64 entries hold data" in still
    live = explorer.live()
    page, slot, field = live.children[0].children
    page.value, slot.value, field.value = 2, 9, "scales"
    assert explorer.value == 2 and "Slot 9, scales" in live.children[1].value


def test_an_empty_page_is_said_to_be_empty(dump):
    raw = dump.raw.clone()
    raw[1] = 0
    view = page_figures.PageExplorer(Dump(raw, dump.layout)).view(1, 0, "codes")
    assert "0 of 64 entries hold data" in view._repr_html_()


def test_journey_marks_exactly_the_lost_pages(dump):
    raw = dump.raw.clone()
    raw[2] = 0
    lost = compare_dumps([dump], [Dump(raw, dump.layout, pool=dump.pool, role="decode")])
    fig = page_figures.journey([dump], lost)
    assert [text.get_text() for text in fig.axes[0].texts] == ["", "", "×"]
    fine = page_figures.journey([dump], pd.DataFrame(columns=lost.columns))
    assert {text.get_text() for text in fine.axes[0].texts} == {""}


def test_page_plan_outlines_one_slot(dump):
    fig = page_figures.page_plan(dump.record, slot=3)
    outlined = sum(patch.get_width() * patch.get_height() for patch in fig.axes[0].patches)
    assert outlined == dump.record.token_bytes
