"""Every notebook, by glob: house style, twin and notebook alike, outputs fresh, pictures described, nothing secret.

A notebook that cannot meet a rule yet stands in `skips.toml` with a reason and the condition for its return.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
import statistics
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from needlework.evidence import redaction
from needlework.workbook import figures
from needlework_press import render, report, runner, writer

ROOT = Path(__file__).resolve().parents[2]
TWINS = {t.stem: t for t in writer.twins(ROOT)}
SKIPS = tomllib.loads((Path(__file__).parent / "skips.toml").read_text()).get("skip", {})
# executed again here and compared byte for byte: those that start no deployment and end within seconds.
# `needlework run` executes all, and `test_outputs_are_not_stale` reads the stamps that it leaves.
AGAIN = ("00_start_here", "01_collect_evidence")
MACHINE = re.compile(r"/(?:home|Users|work|farm|tmp)/\w|\blocalhost:\d{4,5}|0x[0-9a-f]{9,}")
MODULES = re.compile(
    r"\b(?:needlework|pages|probes|workbook)(?:\.[a-z_]+)+"
)  # `needlework.pages.dumps` is no host name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", AGAIN if metafunc.function is test_same_bytes_when_executed_again else TWINS)


def twin(name: str) -> NotebookNode:
    return writer.read_twin(TWINS[name])


def committed(name: str) -> NotebookNode:
    path = writer.notebook_path(TWINS[name])
    assert path.is_file(), f"{path.name} is missing; run `make run`"
    return nbformat.read(path, as_version=4)


def cells(nb: NotebookNode, kind: str) -> list[NotebookNode]:
    return [c for c in nb.cells if c.cell_type == kind]


def lines(cell: NotebookNode) -> int:
    return len([x for x in cell.source.splitlines() if x.strip()])


@pytest.fixture(autouse=True)
def quarantine(request: pytest.FixtureRequest, name: str) -> None:
    entry = SKIPS.get(name, {})
    if request.node.originalname in entry.get("tests", ()):
        pytest.skip(f"{entry['reason']}; returns when {entry['until']}")


def test_name_is_two_digits_and_a_slug(name: str) -> None:
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", name)


def test_one_title_and_no_skipped_heading(name: str) -> None:
    levels = [
        level for c in cells(twin(name), "markdown") for level, _ in render.markdown(c.source, "x", trusted=True)[1]
    ]
    assert levels and levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), levels


def test_skeleton(name: str) -> None:
    text = "\n".join(c.source for c in cells(twin(name), "markdown"))
    first = twin(name).cells[0].source
    assert first.startswith("# ") and "?" in first, "the first cell has the title and the question"
    for part in ("You will do", "You will learn", "You need", "What we found", "What would change our mind", "Next"):
        assert re.search(rf"\b{part}\b", text, re.I), f"no '{part}'"


def test_not_too_many_cells_and_enough_text(name: str) -> None:
    nb = twin(name)
    nb.cells = [c for c in nb.cells if "remove-cell" not in c.metadata.get("tags", ())]  # nobody is shown these
    assert len(nb.cells) <= 40, "split it"
    told = [
        c for c in cells(nb, "code")[2:] if not c.source.startswith("assert ")
    ]  # an assert belongs to the text around
    assert len(cells(nb, "markdown")) >= 0.75 * len(told), (
        "say before each what is asked, or after it what the number means"
    )


def test_code_cells_are_short(name: str) -> None:
    sizes = sorted(lines(c) for c in cells(twin(name), "code"))
    assert statistics.median(sizes) <= 5, sizes
    assert sizes[int(0.9 * (len(sizes) - 1))] <= 15 and sizes[-1] <= 25, sizes


def test_starts_with_start_then_literal_parameters(name: str) -> None:
    code = cells(twin(name), "code")
    assert "workbook.start(" in code[0].source and not re.search(r"(?m)^[!%]|sys\.path|pip install", code[0].source)
    assert code[1].metadata.get("tags") == ["parameters"], "the parameters come directly below"
    for node in ast.parse(code[1].source).body:
        assert isinstance(node, ast.Assign), "plain literals only"
        ast.literal_eval(node.value)


def test_notebooks_do_not_run_or_read_one_another(name: str) -> None:
    source = "\n".join(c.source for c in cells(twin(name), "code"))
    assert not re.search(r"%run|nbconvert|\.ipynb|import_module\(.\d\d_|/(?:work|tmp)/", source)


def test_claims_are_asserted(name: str) -> None:
    assert sum("assert " in c.source for c in cells(twin(name), "code")) >= 2


def test_committed_cells_equal_the_twin(name: str) -> None:
    assert writer.same_inputs(committed(name), twin(name)), "run `make run`, or `make keep` if the notebook was edited"


def test_outputs_are_not_stale(name: str) -> None:
    reason = writer.why_stale(writer.notebook_path(TWINS[name]), TWINS[name], ROOT)
    assert reason is None, f"{reason}; run `make run`"


def test_executed_once_in_order_by_the_writer(name: str) -> None:
    nb = committed(name)
    counts = [c.execution_count for c in cells(nb, "code") if c.source.strip()]
    assert counts == list(range(1, len(counts) + 1))
    assert nb.metadata.kernelspec.name == "python3" and not {"widgets", "jupytext"} & set(nb.metadata)
    assert writer.dumps(nb) == writer.notebook_path(TWINS[name]).read_text("utf-8"), "not written by the runner"


def test_no_error_without_its_tag(name: str) -> None:
    for cell in cells(committed(name), "code"):
        errors = [o for o in cell.outputs if o.output_type == "error"]
        assert not errors or "raises-exception" in cell.metadata.get("tags", ())


def test_every_picture_says_what_is_seen(name: str) -> None:
    for cell in cells(committed(name), "code"):
        for out in cell.outputs:
            for mime in [m for m in out.get("data", {}) if m.startswith("image/")]:
                figures.check_alt(out.metadata.get(mime, {}).get("alt", ""))
    for cell in cells(twin(name), "markdown"):
        assert not re.search(r"!\[\s*\]\(|!\[[^]]*\]\(https?:|data:image/\w+;base64", cell.source)


def test_nothing_secret_and_no_machine_in_source_output_or_page(name: str) -> None:
    nb = committed(name)
    _, _, page = render.notebook(nb, name[:2])
    plain = re.sub(r"data:image/[^\"]+", "", page)
    texts = [c.source for c in nb.cells] + [plain]
    for text in texts:
        found = redaction.check(MODULES.sub("module", text))
        assert not found, [f"{f.kind} in line {f.line}" for f in found[:3]]
        assert not MACHINE.search(text), MACHINE.search(text)


def test_page_of_this_notebook_alone_passes_the_report_check(name: str) -> None:
    text = report.page([(name, committed(name))], title=name, subtitle="alone", found=None)
    assert report.problems(text, [name]) == []


def test_same_bytes_when_executed_again(name: str) -> None:
    fresh = asyncio.run(runner.execute(TWINS[name], root=ROOT))
    before = committed(name)
    if fresh.metadata["needlework"]["versions"] != before.metadata["needlework"]["versions"]:
        assert [c.source for c in fresh.cells] == [c.source for c in before.cells]
        pytest.skip("other package versions than those that wrote the committed outputs")
    assert writer.dumps(fresh) == writer.dumps(before)
