"""The canonical writer: what differs between two runs or machines does not reach the file; staleness is by content."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from needlework.workbook import tables
from needlework_press import render, trace, writer

STAMP = {"source": "0", "data": {}, "library": {}, "versions": {}}


def executed(*outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell(source="x", execution_count=1, outputs=list(outputs))
    cell.metadata.update(execution={"iopub.status.busy": "2026-01-01"}, collapsed=True, tags=["parameters"])
    nb = nbformat.v4.new_notebook(cells=[cell])
    nb.metadata.update(widgets={"state": {}}, kernelspec={"name": "other", "display_name": "<b>"})
    return nb


def out(data: dict, **metadata: object) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata)


def test_random_parts_are_gone(tmp_path: Path) -> None:
    def one(address: str, styler: str) -> str:
        html = f"<style>#T_{styler}_row0{{}}</style><table id='T_{styler}'></table>"
        text = nbformat.v4.new_output(
            "stream", name="stdout", text=f"\x1b[1mA at {address} in {tmp_path}/notebooks\x1b[0m"
        )
        nb = executed(out({"text/html": html, "text/plain": f"<Styler at {address}>"}), text)
        nb.cells[0].id = styler
        return writer.dumps(writer.canonical(nb, STAMP, tmp_path))

    first, second = one("0x7f0011223344", "abcdef"), one("0x55aa00bb11cc", "012345")
    assert first == second
    for word in ("0x", "\\u001b", str(tmp_path), "iopub", "widgets", "collapsed", '"other"', "abcdef"):
        assert word not in first
    assert '"parameters"' in first and '"name": "python3"' in first and first.endswith("}\n")


def test_warnings_lose_their_machine_and_progress_bars_vanish(tmp_path: Path) -> None:
    bar = "  0%|          | 0/4 [00:00<?, ?it/s]\r100%|██████████| 4/4 [00:01<00:00,  3.9it/s]\n"
    warning = f"/var/x/ipykernel_12/345.py:1: UserWarning: x\n{Path.home()}/y"
    nb = executed(nbformat.v4.new_output("stream", name="stderr", text=bar + warning))
    text = writer.canonical(nb, STAMP, tmp_path).cells[0].outputs[0].text
    assert text == "<cell>:1: UserWarning: x\n~/y"
    only_bar = executed(nbformat.v4.new_output("stream", name="stderr", text=bar))
    assert writer.canonical(only_bar, STAMP, tmp_path).cells[0].outputs == []


def test_widget_views_are_dropped_where_a_still_remains_and_refused_where_not(tmp_path: Path) -> None:
    view = {writer.WIDGET_VIEW: {"model_id": "1"}}
    both = writer.canonical(executed(out({**view, "text/html": "<p>still</p>"})), STAMP, tmp_path)
    assert list(both.cells[0].outputs[0].data) == ["text/html"]
    with pytest.raises(writer.TwinError, match="cell 1: a widget without a still form"):
        writer.canonical(executed(out({**view, "text/plain": "IntSlider(value=0)"})), STAMP, tmp_path)
    bar = writer.canonical(executed(out({**view, "text/plain": "  0%|   | 0/9 [00:00<?, ?it/s]"})), STAMP, tmp_path)
    assert bar.cells[0].outputs == []


def test_ids_follow_the_source_and_stay_where_a_cell_is_inserted(small: Path) -> None:
    twin = small / "notebooks/src/00_words.py"
    before = {c.source: c.id for c in writer.read_twin(twin).cells}
    twin.write_text("# %%\nnew = 1\n\n# %%\nnew = 1\n\n" + twin.read_text())
    after = writer.read_twin(twin).cells
    assert {c.source: c.id for c in after if c.source in before} == before
    assert len({c.id for c in after}) == len(after)


def test_twin_notebook_twin_is_a_round_trip(small: Path) -> None:
    twin = small / "notebooks/src/00_words.py"
    text, notebook = twin.read_text(), small / "notebooks/00_words.ipynb"
    nb = writer.canonical(writer.read_twin(twin), STAMP, small)
    notebook.write_text(writer.dumps(nb))
    assert writer.same_inputs(nbformat.read(notebook, 4), writer.read_twin(twin))
    assert not writer.write_twin(notebook, twin) and twin.read_text() == text
    nb.cells[3].source += "\nextra = 1"
    notebook.write_text(writer.dumps(nb))
    assert not writer.same_inputs(nb, writer.read_twin(twin))
    assert writer.write_twin(notebook, twin) and "extra = 1" in twin.read_text()
    assert writer.same_inputs(nb, writer.read_twin(twin))


def test_code_digest_sees_code_and_not_its_clothes() -> None:
    base = 'def f(a):\n    """Doc."""\n    return a + 1  # why\n'
    same = '"""Module."""\ndef f( a ):\n    """Other\n    döc."""\n    return a + 1\n'
    other = base.replace("+ 1", "+ 2")
    string = base.replace("a + 1", '"#" + a')
    assert trace.code_digest(base) == trace.code_digest(same)
    assert len({trace.code_digest(x) for x in (base, other, string)}) == 3


def test_staleness_names_what_changed(small: Path) -> None:
    twin, notebook = small / "notebooks/src/00_words.py", small / "notebooks/00_words.ipynb"
    data = small / "data/incidents/one/words.txt"
    assert writer.why_stale(notebook, twin, small) == "never executed"
    notebook.write_text("not json")
    assert writer.why_stale(notebook, twin, small) == "not a readable notebook"
    library = {"needlework.workbook.tables": trace.code_digest(Path(tables.__file__).read_text())}
    used = {"data": {"data/incidents/one/words.txt": trace.file_digest(data)}, "library": library}

    def stamp(**change: dict) -> str | None:
        nb = writer.canonical(writer.read_twin(twin), writer.stamp(twin, {**used, **change}), small)
        notebook.write_text(writer.dumps(nb))
        return writer.why_stale(notebook, twin, small)

    assert stamp() is None
    assert stamp(library={"needlework.workbook.tables": "0"}) == "needlework.workbook.tables changed"
    assert stamp(library={"needlework.no_such": "0"}) == "needlework.no_such changed"
    assert stamp(library={"no_such.room": "0"}) == "no_such.room changed"
    stamp()
    data.write_text("other")
    assert writer.why_stale(notebook, twin, small) == "data/incidents/one/words.txt changed"
    twin.write_text(twin.read_text() + "\n")
    assert writer.why_stale(notebook, twin, small) == "its source changed"


def test_what_checks_or_draws_is_folded_and_comes_back_without_a_trace(tmp_path: Path) -> None:
    twin = tmp_path / "01_quiet.py"
    sources = (
        "assert 1 < 2, 'x'\nassert True",
        "fig = f()\nworkbook.figures.show(fig, alt='x')",
        "x = 1\nassert x",
        "x = (",
    )
    twin.write_text("\n\n".join(f"# %%\n{source}" for source in sources) + "\n")
    before = twin.read_text()
    nb = writer.read_twin(twin)
    assert [c.metadata.get("jupyter", {}).get("source_hidden", False) for c in nb.cells] == [True, True, False, False]
    (tmp_path / "01_quiet.ipynb").write_text(nbformat.writes(nb))
    assert not writer.write_twin(tmp_path / "01_quiet.ipynb", twin) and twin.read_text() == before
    body = render.notebook(nb, "01")[2]
    assert body.count('class="code"') == 3 and "1 &lt; 2" not in body and "assert 1" not in body
