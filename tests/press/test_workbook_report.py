"""The report: one file that fetches and runs nothing, escapes what is hostile, is not written when its check fails."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from needlework import analysis
from needlework.workbook import figures, tables, verdict
from needlework_press import cli, origin, render, report, runner, writer

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b]8;;http://evil.example\x07"
ALT = "A line that rises from one to three over three points."


def svg() -> str:
    fig, ax = figures.new(3, 2)
    ax.plot([1, 2, 3])
    return figures.to_svg(fig)


def notebook(*cells: nbformat.NotebookNode, title: str = "# Look closely\n\n*What is seen?*") -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(title), *cells])


def code(*data: dict, source: str = "x = 1", metadata: dict | None = None) -> nbformat.NotebookNode:
    outputs = [nbformat.v4.new_output("display_data", data=d, metadata=metadata or {}) for d in data]
    return nbformat.v4.new_code_cell(source=source, outputs=outputs)


def page(*notebooks: nbformat.NotebookNode, title: str = "T", found: verdict.Summary | None = None) -> str:
    named = [(f"{i:02d}_nb", nb) for i, nb in enumerate(notebooks)]
    return report.page(named, title=title, subtitle="S", found=found)


GOOD = verdict.Summary(symptom="s", verdict="F14", evidence=["24 of 24"], confidence="high", next_step="fix")


@pytest.mark.parametrize(
    ("live", "data", "word", "said"),
    [
        ([], ["data/kernels/h200.json"], "computed", "beside recorded GPU results"),
        ([], ["data/incidents/x/pages/a.bin"], "recorded", "Read from page dumps of incident x;"),
        (
            [],
            ["data/checkpoint/vllm/runs/r/trials.jsonl"],
            "recorded",
            "runs of the checkpoint on vllm;",
        ),
        (
            ["lab"],
            ["data/checkpoint/vllm/runs/r/trials.jsonl"],
            "live",
            "live on the deployment in a box when this was executed. It also reads recorded runs of",
        ),
    ],
)
def test_what_was_read_from_recordings_is_not_called_computed(live, data, word, said) -> None:
    found = origin.origin({"live": live, "data": dict.fromkeys(data, "digest")})
    assert found.word == word and said in found.text


def test_a_healthy_page_has_no_problem_and_everything_in_it() -> None:
    picture = code({"image/svg+xml": svg(), "text/plain": "x"}, metadata={"image/svg+xml": {"alt": ALT}})
    text = page(
        notebook(picture), notebook(nbformat.v4.new_markdown_cell("## Sub\n\nSee [next](01_nb.ipynb).")), found=GOOD
    )
    assert report.problems(text, ["00_nb", "01_nb"]) == []
    soup = BeautifulSoup(text, "html.parser")
    assert soup.html["lang"] == "en" and soup.main["id"] == "main" and soup.find("a", class_="skip")["href"] == "#main"
    assert [a["href"] for a in soup.nav.find_all("a")] == [
        "#summary",
        "#nb00",
        "#nb01",
    ] and "What is seen?" in soup.nav.text
    assert [dt.text for dt in soup.select(".summary dt")] == [
        "Symptom",
        "Verdict",
        "Evidence",
        "Confidence",
        "Next step",
    ]
    assert soup.find("img")["alt"] == ALT and soup.find("a", string="next")["href"] == "#nb01"
    levels = [int(h.name[1]) for h in soup.find_all(["h1", "h2", "h3", "h4"])]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_pictures_have_their_room_and_are_read_late_and_only_coloured_code_has_elements() -> None:
    picture = code({"image/svg+xml": svg(), "text/plain": "x"}, metadata={"image/svg+xml": {"alt": ALT}})
    fig, ax = figures.new(3, 2)
    ax.plot([1, 2, 3])
    png = code({"image/png": figures.to_png(fig)}, metadata={"image/png": {"alt": ALT}})
    bare = code({"image/svg+xml": "<svg></svg>"}, metadata={"image/svg+xml": {"alt": ALT}}, source="total = 1 + [a]")
    soup = BeautifulSoup(page(notebook(picture, png, bare)), "html.parser")
    drawn, dots, sizeless = soup.find_all("img")
    assert {i["loading"] for i in (drawn, dots, sizeless)} == {"lazy"} and not sizeless.get("width")
    assert int(drawn["width"]) / int(drawn["height"]) == pytest.approx(1.5, abs=0.02)
    assert int(dots["width"]) / int(dots["height"]) == pytest.approx(1.5, abs=0.02)
    last = soup.find_all("pre", class_="highlight")[-1]
    assert last.text.strip() == "total = 1 + [a]" and [(s["class"], s.text) for s in last.find_all("span")] == [
        (["mi"], "1")
    ]


PLANTED = {
    "script": "<script>1</script>",
    "handler": "<p onclick='x()'>t</p>",
    "outside image": f'<img src="https://example.org/x.png" alt="{ALT}">',
    "protocol-relative image": f'<img src="//example.org/x.png" alt="{ALT}">',
    "srcset": f'<img src="data:image/png;base64,AA" srcset="http://e/x 2x" alt="{ALT}">',
    "stylesheet": '<link rel="stylesheet" href="https://example.org/x.css">',
    "css url": "<style>p{background:url(https://example.org/x)}</style>",
    "css url hidden": "<style>p{background:u\\rl( //example.org/x)}</style>",
    "css import": "<style>@import 'x.css';</style>",
    "inline css": '<p style="background: URL(http://e)">t</p>',
    "frame": '<iframe srcdoc="x"></iframe>',
    "object": '<object data="x"></object>',
    "base": '<base href="https://example.org">',
    "refresh": '<meta http-equiv="refresh" content="0;url=http://e">',
    "script link": '<a href=" java\nscript:alert(1)">t</a>',
    "data link": '<a href="data:text/html,x">t</a>',
    "svg use": '<svg><use xlink:href="http://e/x.svg#a"/></svg>',
    "form": '<form action="http://e"><input></form>',
    "no alt": '<img src="data:image/png;base64,AA">',
    "filler alt": '<img src="data:image/png;base64,AA" alt="No description has been provided for this image">',
    "double id": '<p id="a"></p><p id="a"></p>',
    "bare widget": "<pre>VBox(children=(IntSlider(value=0),))</pre>",
    "second main": "<main></main>",
    "css url escaped": "<style>p{background:u\\72l(//example.org/x)}</style>",
    "comment": "<p>t</p><!-- and the rest",
    "end of the frame": "</div></section></main><h1>Another verdict</h1>",
    "textarea": "<textarea>",
    "plaintext": "<plaintext>",
    "title": "<title>",
    "size": "x" * 5_000_001,
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_found(name: str) -> None:
    text = page(notebook())
    assert report.problems(text, ["00_nb"]) == []
    assert text.count("</main>") == 1
    found = report.problems(text.replace("</main>", f"{PLANTED[name]}</main>"), ["00_nb"])
    assert len(found) >= 1, name


def test_a_lost_or_untitled_notebook_is_found() -> None:
    assert report.problems(page(notebook()), ["00_nb", "05_gone"]) == ["no title from notebook 05_gone"]
    assert report.problems(page(notebook(title="No heading")), ["00_nb"]) == ["no title from notebook 00_nb"]


def test_hostile_outputs_titles_and_metadata_stay_text() -> None:
    nb = notebook(
        code({"text/plain": HOSTILE}, {"text/markdown": f"[x](javascript:alert(1)) {HOSTILE}"}, source=f"# {HOSTILE}"),
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text=HOSTILE * 3000)]),
        nbformat.v4.new_code_cell(
            outputs=[nbformat.v4.new_output("error", ename=HOSTILE, evalue=HOSTILE, traceback=[])]
        ),
        code(
            {"image/svg+xml": f"<svg onload='x()'>{HOSTILE}</svg>"},
            metadata={"image/svg+xml": {"alt": f'{ALT}">{HOSTILE}'}},
        ),
    )
    nb.metadata["needlework"] = {"source": HOSTILE, "data": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    nb.metadata["title"] = HOSTILE
    bad = verdict.from_mapping(dict.fromkeys(verdict.FIELDS, HOSTILE) | {"evidence": [HOSTILE, 3]})
    text = page(nb, title=HOSTILE, found=bad)
    assert report.problems(text, ["00_nb"]) == []
    soup = BeautifulSoup(text, "html.parser")
    images = soup.find_all("img")
    assert len(images) == 1 and images[0]["src"].startswith("data:image/svg+xml;base64,") and not soup.find("script")
    assert "\x1b" not in text and len(text) < 200_000 and "more characters" in text


def test_markup_in_an_html_output_stops_the_report(small: Path) -> None:
    nb = writer.read_twin(small / "notebooks/src/00_words.py")
    nb.cells[1].outputs = [nbformat.v4.new_output("display_data", data={"text/html": PLANTED["script"]})]
    (small / "notebooks/00_words.ipynb").write_text(nbformat.writes(nb))
    with pytest.raises(report.ReportError, match="not written: a <script> element"):
        report.build(runner.Plan(small))
    assert not (small / "report").exists()


@pytest.mark.parametrize(
    "mark", [[1], "x", {"source": 1}, {"source": "s", "data": [], "library": {}}, {"versions": []}]
)
def test_a_stamp_that_we_did_not_make_is_no_stamp(small: Path, mark: object) -> None:
    nb = writer.read_twin(small / "notebooks/src/00_words.py")
    nb.metadata["needlework"] = mark
    (small / "notebooks/00_words.ipynb").write_text(nbformat.writes(nb))
    assert report.build(runner.Plan(small)).is_file()
    assert (
        writer.why_stale(small / "notebooks/00_words.ipynb", small / "notebooks/src/00_words.py", small) == "no stamp"
    )


def test_a_file_that_is_no_notebook_is_one_sentence(small: Path) -> None:
    for text in ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}', "[]", "x"):
        (small / "notebooks/00_words.ipynb").write_text(text)
        with pytest.raises(report.ReportError, match=r"00_words\.ipynb is not a valid notebook"):
            report.build(runner.Plan(small))


def test_marks_that_turn_or_hide_text_reach_no_output() -> None:
    marks = "\u202e\u2066\u200b\u2060\ufeff\x85\ud800"
    stream = nbformat.v4.new_output("stream", name="stdout", text=f"a{marks}b")
    error = nbformat.v4.new_output("error", ename=f"E{marks}", evalue=marks, traceback=[])
    written = "c&#x202e;&#8203;&zwnj;d &amp; &nbsp;e"
    nb = notebook(
        nbformat.v4.new_code_cell(f"x = '{marks}'", outputs=[stream, error]),
        code({"text/html": f"<p>{marks}{written}</p>"}, {"text/markdown": marks}, {"text/plain": marks}),
        nbformat.v4.new_markdown_cell(f"*{marks}*"),
    )
    text = page(nb, title=f"T{marks}")
    assert not set(marks) & set(text) and "\ufffd" in text
    assert "c\ufffd\ufffd\ufffdd &amp; &nbsp;e" in text and not set(marks) & set(
        BeautifulSoup(text, "html.parser").text
    )
    assert report.problems(text, ["00_nb"]) == []


def test_a_picture_that_cannot_be_read_has_no_size_and_stops_nothing() -> None:
    torn = code({"text/html": f'<img src="data:image/png;base64,abc" alt="{ALT}">'})
    assert "data:image/png;base64,abc" in page(notebook(torn))


def executed(small: Path, plan: runner.Plan, found: verdict.Summary | None = None) -> str:
    """The report of a notebook that measured live, and one that reads a recording of the incident."""
    for name, mark in (
        ("00_words", {"live": ["http"], "when": "2026-11-30"}),
        ("01_end", {"live": [], "data": {"data/incidents/context-loss/evidence/x": "d"}}),
    ):
        twin = small / f"notebooks/src/{name}.py"
        nb = writer.read_twin(twin)
        if found:
            shown = found._repr_mimebundle_()
            nb.cells[1].outputs = [nbformat.v4.new_output("display_data", data=shown)]
        nb.metadata["needlework"] = {"source": "s", "data": {}, "library": {}, **mark}
        plan.output(twin).parent.mkdir(parents=True, exist_ok=True)
        plan.output(twin).write_text(nbformat.writes(nb))
    return report.build(plan).read_text()


def test_the_title_of_a_live_target_is_its_own_verdict_and_recordings_are_folded(small: Path) -> None:
    (small / "data/incidents/context-loss/incident.toml").write_text('title = "Lost above 2,500 tokens"\n')
    (small / "data/incidents/context-loss/ledger.json").write_text('{"verdict": "a class of the incident"}')
    live = runner.Plan(small, target="a=http://127.0.0.1:1,b=http://127.0.0.1:2")
    soup = BeautifulSoup(executed(small, live, dataclasses.replace(GOOD, verdict="Healthy. 80 of 80")), "html.parser")
    assert soup.h1.text == "2 live endpoints: Healthy" and soup.title.text == "2 live endpoints: Healthy · Needlework"
    assert "Lost above" not in soup.text and "Measured 2026-11-30" in soup.header.text
    (folded,) = soup.find_all("details", class_="foreign")
    assert folded.find_parent("section")["id"] == "nb01" and "not of this deployment" in folded.summary.text
    soup = BeautifulSoup(executed(small, live), "html.parser")  # the incident's ledger is not the verdict on this
    assert soup.h1.text == "2 live endpoints: no verdict" and "a class of the incident" not in soup.text
    own = BeautifulSoup(executed(small, runner.Plan(small)), "html.parser")
    assert own.h1.text == "Lost above 2,500 tokens" and not own.find("details", class_="foreign")
    assert "a class of the incident" in own.text


def test_without_the_verdict_a_live_report_says_what_its_notebooks_found(small: Path) -> None:
    plan = runner.Plan(small, target="http://127.0.0.1:1")
    mark = {"source": "s", "data": {}, "library": {}, "live": ["http"]}
    cells = [nbformat.v4.new_markdown_cell("## What we found"), nbformat.v4.new_code_cell("print(verdict)")]
    nb = nbformat.v4.new_notebook(cells=cells, metadata={"needlework": mark})
    nb.cells[1].outputs = [nbformat.v4.new_output("stream", text="Healthy: 9 of 9 <b>. More.\n")]
    assert (
        report._headline(plan, None, [("03_recall", nb)]) == "A live endpoint: Healthy: 9 of 9 <b> (notebook 03 alone)"
    )
    text = report.page([("03_recall", nb)], title="t", subtitle="s", found=None)
    summary = BeautifulSoup(text, "html.parser").find(id="summary")
    assert "03: Healthy: 9 of 9 <b>" in summary.text and "Notebook 11" in summary.text
    assert "belongs to" not in report._subtitle(plan, [("03_recall", nb)], own=False), "nothing here is recorded"


def test_without_any_executed_notebook_it_says_what_to_do(small: Path) -> None:
    with pytest.raises(report.ReportError, match="run `needlework run` first"):
        cli.rebuild([])


def test_a_notebook_that_was_not_executed_is_named_on_the_page(small: Path) -> None:
    nb = writer.read_twin(small / "notebooks/src/00_words.py")
    (small / "notebooks/00_words.ipynb").write_text(nbformat.writes(nb))
    assert cli.rebuild([]) == 0
    assert "1 notebook not executed</summary>01_end" in (small / "report/context-loss/index.html").read_text()


def test_maths_is_mathml_and_never_raw_tex() -> None:
    tex = r"Inline $a_i \le 2^{b}$, $$\sum_i x_i$$ and \begin{align} a &= b \end{align}"
    body, _ = render.markdown(tex, "p", trusted=True)
    soup = BeautifulSoup(body, "html.parser")
    assert len(soup.find_all("math")) == 3 and soup.find("math")["display"] == "inline" and "$" not in soup.text
    assert "<b>" not in render.mathml(r"\left( <b>", True) and "&lt;" in render.mathml(r"\left( <b>", True)


def test_tags_hide_cells_and_inputs() -> None:
    hidden, no_input = code({"text/plain": "gone"}), code({"text/plain": "kept"}, source="secret_source = 1")
    hidden.metadata["tags"], no_input.metadata["tags"] = ["remove-cell"], ["hide-input"]
    text = page(notebook(hidden, no_input))
    assert "gone" not in text and "kept" in text and "secret_source" not in text


def test_two_stills_of_one_explorer_do_not_share_ids() -> None:
    from needlework.workbook import explorers

    still = {"text/html": explorers.Slider("n", {1: "a", 2: "b"}).still()}
    text = page(notebook(code(still, still)), notebook(code(still)))
    assert report.problems(text) == []
    groups = {i["name"] for i in BeautifulSoup(text, "html.parser").find_all("input")}
    assert len(groups) == 3


def test_the_same_table_in_two_notebooks_does_not_share_ids() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    table = {"text/html": tables.to_html(tables.table(frame, "Same"))}
    other = {"text/html": tables.to_html(tables.table(frame + 1, "Same"))}
    text = page(notebook(code(table, other)), notebook(code(table)))
    assert report.problems(text) == [] and text.count("Same</caption>") == 3


def test_summary_comes_from_the_last_verdict_or_from_the_ledger(small: Path) -> None:
    bundle = small / "data/incidents/context-loss/ledger.json"
    ledger = analysis.Ledger("context-loss", symptom="from the ledger").suspect("F14", "side buffer", 0.1)
    ledger = ledger.record("pair", "digests", "weak one", supports=["F14"], strength="weak")
    ledger = ledger.record("pair", "recall", "0 of 24", supports=["F14"], strength="strong")
    dataclasses.replace(ledger, verdict="F14 it is", confidence="strong", next_steps=("patch",)).save(bundle)
    nb = writer.read_twin(small / "notebooks/src/00_words.py")
    (small / "notebooks/00_words.ipynb").write_text(nbformat.writes(nb))
    path = report.build(runner.Plan(small))
    text = path.read_text()
    assert "from the ledger" in text and "F14 it is" in text and "patch" in text
    assert text.index("recall (pair): 0 of 24") < text.index("digests (pair): weak one")
    end = writer.read_twin(small / "notebooks/src/01_end.py")
    bundle_of = verdict.Summary(
        symptom="seen", verdict="F14 is guilty", evidence=["24/24"], confidence="high", next_step="n"
    )
    end.cells[2].outputs = [nbformat.v4.new_output("execute_result", data=bundle_of._repr_mimebundle_())]
    (small / "notebooks/01_end.ipynb").write_text(nbformat.writes(end))
    assert "F14 is guilty" in report.build(runner.Plan(small)).read_text()
    assert "from the ledger" not in path.read_text()
