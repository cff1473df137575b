"""Figures: one style, the same bytes every time, alt text that says something, hostile labels shown as text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib import cbook
from needlework.workbook import figures

HOSTILE = "<script>alert(1)</script>\x1b[31m $x^2$"


def trials() -> pd.DataFrame:
    rows = [
        {"arm": arm, "target_tokens": n, "prompt_tokens": n + 3, "outcome": "exact" if n < cut else "refusal"}
        for arm, cut in (("combined", 1e9), ("pd", 2500))
        for n in (512, 2048, 4096)
        for _ in range(4)
    ]
    rows.append({"arm": "pd", "target_tokens": 512, "prompt_tokens": 515, "outcome": "cut"})
    return pd.DataFrame(rows)


FIGURES = {
    "recall": lambda: figures.recall_curve(trials(), edges={HOSTILE: 2048}, title=HOSTILE),
    "heat": lambda: figures.heat_map(
        pd.DataFrame(np.arange(6.0).reshape(2, 3), columns=["a", "b", HOSTILE]), value="x"
    ),
    "gaps": lambda: figures.heat_map(pd.DataFrame([[-1.0, 2.0], [np.nan, 0.0]])),
    "paired": lambda: figures.paired_table(3, 2, 1, 0, first="combined", second=HOSTILE),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_same_bytes_twice_and_nothing_hostile_survives(kind: str) -> None:
    one, two = (figures.to_svg(FIGURES[kind]()) for _ in range(2))
    assert one == two
    assert one.startswith("<svg") and "<script" not in one and "\x1b" not in one
    assert "date" not in one.lower().split("<defs>")[0]


def test_a_table_that_lacks_columns_is_drawn_as_far_as_it_goes_or_refused_in_a_sentence() -> None:
    whole = figures.recall_table(trials())
    counted = figures.recall_table(trials().drop(columns="target_tokens"))
    assert counted["n"].sum() == whole["n"].sum() and counted["hits"].sum() == whole["hits"].sum()
    wished = figures.recall_table(trials().drop(columns="prompt_tokens"))
    assert list(wished["hits"]) == list(whole["hits"])
    scored = trials().assign(score=1.0).drop(columns="outcome")
    assert (figures.recall_table(scored)["recall"] == 1).all()
    for columns, lacking in ((["outcome"], "an outcome"), (["target_tokens", "prompt_tokens"], "a length")):
        with pytest.raises(ValueError, match=f"none of [0-9]+ trials has {lacking}"):
            figures.recall_curve(trials().drop(columns=columns))
    with pytest.raises(ValueError, match="none of 0 trials"):
        figures.recall_curve(trials().head(0))


@pytest.mark.parametrize("text", ["a$b", "$x^2$", r"\$x$ \frac{", r"$\bad{$", "_hidden", "C:\\x"])
def test_labels_are_never_mathematics(text: str) -> None:
    fig, ax = figures.new()
    ax.set_title(figures.label(text))
    assert figures.to_svg(fig) and not cbook.is_math_text(figures.label(text))


def test_logarithmic_ticks_are_readable() -> None:
    fig, ax = figures.new()
    ax.set_xscale("log")
    ax.plot([1, 1e6], [0, 1])
    labels = [t.get_text() for t in ax.get_xticklabels()]
    assert figures.to_svg(fig) and any(labels) and all(cbook.is_math_text(t) or t == "" for t in labels)


def test_each_point_of_a_recall_curve_stands_on_its_own_bar() -> None:
    fig = figures.recall_curve(trials())
    lines = fig.axes[0].get_lines()
    curves = [line for line in lines if line.get_marker() in figures.MARKERS]
    assert len(curves) == trials()["arm"].nunique()
    for points in curves:
        bars = {b.get_xdata()[0] for b in lines if b.get_color() == points.get_color() and b.get_marker() == "None"}
        assert set(points.get_xdata()) == bars


def test_an_arm_has_one_colour_and_marker_alone_and_in_company() -> None:
    def looks(rows: pd.DataFrame) -> dict[str, tuple[object, object]]:
        lines = [line for line in figures.recall_curve(rows).axes[0].get_lines() if line.get_marker() != "None"]
        return {line.get_label(): (line.get_color(), line.get_marker()) for line in lines}

    both, alone = looks(trials()), looks(trials().query("arm == 'pd'"))
    assert set(both) == {"combined", "pd"} and alone == {"pd": both["pd"]} and both["pd"] != both["combined"]
    more = looks(trials().assign(arm=lambda rows: rows["arm"].replace("combined", "another")))
    assert more["pd"] == both["pd"] and more["another"] not in both.values()
    assert len(set(figures.arm_numbers(["x", "pd", "y", "combined", "z"]).values())) == 5


def test_a_heat_map_speaks_of_tokens_in_words() -> None:
    frame = pd.DataFrame([[1.0, 0.0]], columns=pd.Index([1024, 6144], name="target_tokens"))
    ax = figures.heat_map(frame).axes[0]
    assert ax.get_xlabel() == "prompt tokens" and [t.get_text() for t in ax.get_xticklabels()] == ["1,024", "6,144"]


def test_recall_table_counts_no_measurement_apart() -> None:
    table = figures.recall_table(trials())
    row = table[(table["arm"] == "pd") & (table["prompt_tokens"] == 515)].iloc[0]
    assert (row["hits"], row["n"], row["no_measurement"], row["recall"]) == (4, 4, 1, 1.0)
    assert row["low"] == pytest.approx(0.5101, abs=1e-3)  # Wilson, 4 of 4


def test_a_length_without_measurement_has_no_recall() -> None:
    lost = trials().assign(outcome="transport")
    table = figures.recall_table(lost)
    assert table["recall"].isna().all() and (table["low"] == 0).all() and (table["high"] == 1).all()
    figures.to_svg(figures.recall_curve(lost))


@pytest.mark.parametrize(
    "alt", ["", "figure", "Recall plot", "TODO", "one two three four", "No description has been provided"]
)
def test_alt_text_that_says_nothing_is_refused(alt: str) -> None:
    with pytest.raises(ValueError, match="say what is seen"):
        figures.picture(FIGURES["paired"](), alt)


def test_picture_carries_its_alt_into_output_and_image() -> None:
    found = figures.picture(FIGURES["paired"](), 'Counts "three", <two>, one and none in a square.')
    data, metadata = found._repr_mimebundle_()
    assert metadata["image/svg+xml"]["alt"] == found.alt and data["text/plain"].endswith(found.alt)
    assert 'alt="Counts &quot;three&quot;, &lt;two&gt;, one' in found.to_img()


def test_a_large_drawing_becomes_a_small_png() -> None:
    fig, ax = figures.new()
    rng = np.random.default_rng(0)
    ax.scatter(rng.random(6000), rng.random(6000), s=3)
    found = figures.picture(fig, "A cloud of six thousand points without any order.")
    assert found.mime == "image/png" and len(found.data) < 200_000
