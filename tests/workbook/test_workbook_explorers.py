"""Explorers: live and still form in one bundle, a default, a value that survives a re-run, nothing hostile."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from needlework import analysis
from needlework.workbook import explorers, figures


def picture(n: int) -> figures.Picture:
    fig, ax = figures.new(3, 2)
    ax.plot([0, n])
    return figures.picture(fig, f"A line that rises from zero to {n} in one step.")


def test_still_shows_every_frame_behind_a_radio_button_without_a_script() -> None:
    slider = explorers.Slider("size", {1: picture(1), 2: picture(2), 3: "three"}, start=2, note="It grows.")
    soup = BeautifulSoup(slider.still(), "html.parser")
    buttons = soup.find_all("input", type="radio")
    assert len(buttons) == len(soup.select(".nw-frames > div")) == 3
    assert [b.get("checked") is not None for b in buttons] == [False, True, False]
    assert {lab["for"] for lab in soup.find_all("label")} == {b["id"] for b in buttons}
    assert len({b["name"] for b in buttons}) == 1 and soup.find("legend").text == "size"
    images = soup.find_all("img")
    assert len(images) == 2 and all(img["src"].startswith("data:image/") and img["alt"] for img in images)
    assert not soup.find("script") and "It grows." in soup.text


def test_one_bundle_has_both_forms() -> None:
    bundle = explorers.Slider("size", {1: "one", 2: "two"})._repr_mimebundle_()
    assert explorers.WIDGET_VIEW in bundle and "nw-still" in bundle["text/html"] and "2 choices" in bundle["text/plain"]


def test_live_slider_changes_its_picture_and_value() -> None:
    slider = explorers.Slider("width", lambda v: f"frame {v}", choices=[10, 20, 30])
    control, body, *_ = slider.live().children
    assert "frame 10" in body.value and slider.value == 10
    control.value = 30
    assert "frame 30" in body.value and slider.value == 30


def test_value_survives_a_rerun_and_default_stays() -> None:
    make = lambda: explorers.Picker("survivor", {"a": "1", "b": "2"})  # noqa: E731
    make().value = "b"
    again = make()
    assert again.value == "b" and again.default == "a" and again.live().children[0].value == "b"
    assert 'checked><label for="nw-x' in again.still().replace(again.id, "nw-x")


def test_hostile_names_choices_and_frames_stay_text() -> None:
    bad = "<script>alert(1)</script>\x1b[31m"
    picker = explorers.Picker(bad, {bad: bad, "</fieldset><img src=x onerror=y>": bad}, note=bad)
    soup = BeautifulSoup(picker.still(), "html.parser")
    assert not soup.find(["script", "img"]) and "\x1b" not in picker.still() and len(soup.find_all("fieldset")) == 1
    options = [text for text, _ in picker.live().children[0].options]
    assert not any("\x1b" in text for text in options)


def test_many_choices_are_thinned_in_the_still_and_it_says_so() -> None:
    drawn: list[int] = []
    slider = explorers.Slider("n", lambda v: drawn.append(v) or str(v), choices=range(100), start=50)
    still = slider.still()
    assert still.count('type="radio"') == 13 and {0, 50, 99} <= set(drawn) and "87 further choices" in still


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"frames": {}}, "nothing to choose"),
        ({"frames": {1: "a"}, "start": 2}, "cannot start at 2"),
    ],
)
def test_impossible_explorers_are_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        explorers.Slider("n", **arguments)


def test_a_figure_without_alt_is_refused() -> None:
    fig, _ = figures.new()
    with pytest.raises(ValueError, match="alt text"):
        explorers.Slider("n", {1: fig}).still()


def test_incident_picker_shows_what_each_bundle_holds(small: Path) -> None:
    picker = explorers.incident_picker("one")
    text = BeautifulSoup(picker.still(), "html.parser").text
    assert picker.value == "one" and "The <b>first</b> one" in text and "none yet" in text


def test_recall_explorer_has_a_frame_per_value_and_alt_from_the_numbers() -> None:
    rows = [
        {"arm": "pd", "depth": d, "target_tokens": n, "prompt_tokens": n, "outcome": "exact" if n < 2000 else "refusal"}
        for d in (0.1, 0.9)
        for n in (512, 4096)
    ]
    explorer = explorers.recall_explorer(pd.DataFrame(rows))
    assert explorer.choices == ["all", 0.1, 0.9]
    assert explorer.note == "Lost: pd at depth 0.1: 1 of 2; pd at depth 0.9: 1 of 2."
    assert explorers.recall_explorer(pd.DataFrame(rows[::2])).note == "Nothing is lost at any depth."
    alt = BeautifulSoup(explorer.frame("all"), "html.parser").img["alt"]
    assert "pd: recall 1.00 at 512 tokens, 0.00 at 4,096, below one half from 4,096 tokens" in alt
    with pytest.raises(ValueError, match="no trial has a value in the column 'depth'"):
        explorers.recall_explorer(pd.DataFrame(rows).assign(depth=None))
    with pytest.raises(ValueError, match="no trial has a value in the column 'depth'"):
        explorers.recall_explorer(pd.DataFrame(rows).drop(columns="depth"))


def test_ledger_explorer_lists_what_speaks_for_and_against() -> None:
    ledger = analysis.Ledger("one", verdict="F14 <b>").suspect("F14", "side buffer", 0.1).suspect("F05", "budget", 0.1)
    ledger = ledger.record("pair", "digests", "7 of 7 differ", supports=["F14"], exonerates=["F05"], strength="strong")
    explorer = explorers.ledger_explorer(ledger)
    assert explorer.choices == ["all", "F14", "F05"]
    assert "for" in explorer.frame("F14") and "against" in explorer.frame("F05") and "7 of 7" in explorer.frame("F05")
    assert "F14 &lt;b&gt;" in explorer.still()
