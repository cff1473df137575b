"""The runner: same bytes twice, one short block for a failure, the right files stamped, and no process left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from needlework import __main__
from needlework.evidence import incidents
from needlework_press import cli, runner, writer


def run(twin: Path, root: Path, **options: object) -> nbformat.NotebookNode:
    return asyncio.run(runner.execute(twin, root=root, **options))


def write(root: Path, name: str, *cells: str) -> Path:
    twin = root / "notebooks/src" / f"{name}.py"
    twin.write_text("\n\n".join(f"# %%\n{c}" for c in cells) + "\n")
    return twin


def test_whole_run_same_bytes_stale_only_and_report(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    first = {p.name: p.read_bytes() for p in (small / "notebooks").glob("*.ipynb")}
    report = small / "report/context-loss/index.html"
    page = report.read_bytes()
    said = capsys.readouterr().out
    assert set(first) == {"00_words.ipynb", "01_end.ipynb"} and " s\n" in said and "index.html" in said
    mark = nbformat.reads(first["00_words.ipynb"].decode(), 4).metadata["needlework"]
    assert list(mark["data"]) == ["data/incidents/one/words.txt"]
    assert {"needlework.workbook.tables", "needlework.workbook.figures"} <= set(mark["library"])
    assert "needlework_press.trace" not in mark["library"]

    assert cli.run([]) == 0 and "up to date" in capsys.readouterr().out
    assert cli.run(["--all", "--jobs", "1"]) == 0
    assert {p.name: p.read_bytes() for p in (small / "notebooks").glob("*.ipynb")} == first
    assert report.read_bytes() == page


def test_another_incident_goes_elsewhere_with_its_parameters(plain: Path) -> None:
    (plain / "data/incidents/context-loss/words.txt").write_text("left alone")
    before = sorted((plain / "notebooks").glob("*.ipynb"))
    assert cli.run(["05", "--incident", "one", "--target", "recorded:x"]) == 0
    assert sorted((plain / "notebooks").glob("*.ipynb")) == before
    nb = nbformat.read(plain / "build/one-recorded-x/05_plain.ipynb", 4)
    injected = [c for c in nb.cells if "injected-parameters" in c.metadata.get("tags", ())]
    assert [c.source for c in injected] == ["incident = 'one'"]  # this notebook has no parameter `target`
    assert "rebuilt from recordings" in (plain / "report/one-recorded-x/index.html").read_text()


def test_no_target_is_published_as_another(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["05", "--incident", "one", "--target", "http://127.0.0.1:9"]) == 0
    live = {p.name for p in (plain / "report").iterdir()}
    capsys.readouterr()
    assert cli.run(["05", "--incident", "one", "--target", "http://127.0.0.1:9"]) == 0
    assert "up to date" not in capsys.readouterr().out, "a live endpoint may answer otherwise today"
    assert cli.run(["05", "--incident", "one", "--target", "http://127.0.0.1:10"]) == 0
    assert cli.run(["05", "--incident", "one", "--target", "recorded"]) == 0
    assert "up to date" not in capsys.readouterr().out
    every = {p.name for p in (plain / "report").iterdir()}
    assert len(live) == 1 and len(every) == 3 and "one" in every and "context-loss" not in every
    assert {p.name for p in (plain / "build").iterdir()} == every and not any("127" in name for name in every)


def test_parameters_assigned_together_are_parameters(small: Path) -> None:
    twin = write(small, "03_pair", "low, high = 1, 2")
    twin.write_text(twin.read_text().replace("# %%", '# %% tags=["parameters"]'))
    nb = runner.with_parameters(writer.read_twin(twin), {"high": 5, "other": 1})
    assert [c.source for c in nb.cells if c.cell_type == "code"] == ["low, high = 1, 2", "high = 5"]


def test_an_incident_sets_its_own_parameters(plain: Path) -> None:
    with (plain / "data/incidents/one/incident.toml").open("a") as settings:
        settings.write("\n[workbook.parameters.05_plain]\nlimit = 1\nunknown = 2\n")
    assert cli.run(["05", "--incident", "one", "--target", "recorded:x", "--no-report"]) == 0
    nb = nbformat.read(plain / "build/one-recorded-x/05_plain.ipynb", 4)
    injected = [c for c in nb.cells if "injected-parameters" in c.metadata.get("tags", ())]
    assert [c.source for c in injected] == ["incident = 'one'\nlimit = 1"]  # it has no parameter `unknown`


def test_a_failure_is_one_short_block_and_the_old_stays(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = write(small, "02_bad", "x = 1", "def f():\n    raise ValueError('too <b>long</b>' + 'x' * 2000)\n\nf()")
    old = writer.notebook_path(twin)
    old.write_text("{}")
    assert cli.run(["02"]) == 1
    said, errors = capsys.readouterr()
    assert "02_bad failed in cell 2\n    f()\n    ValueError: too <b>long</b>xxx" in said and len(said) < 1500
    assert "1 of 1 notebooks failed: 02_bad" in errors and old.read_text() == "{}" and "Traceback" not in said + errors
    assert not list(small.rglob("*.part"))


def test_a_failed_notebook_leaves_its_section_and_the_report_is_built(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for heavy in ("00_words", "01_end"):
        (plain / f"notebooks/src/{heavy}.py").unlink()
    raised = "raise ValueError(f'key sk-{\\'abc\\' * 8} at http://10.{1}.2.3:9/v1 <b>')".replace("\\'", '"')
    twin = write(plain, "02_bad", "print('seen before it')", raised)
    twin.write_text("# %% [markdown]\n# # Bad\n#\n# Why?\n\n" + twin.read_text())
    assert cli.run([]) == 1
    assert "index.html" in capsys.readouterr().out
    page = (plain / "report/context-loss/index.html").read_text()
    kept = (plain / "build/context-loss/02_bad.failed.ipynb").read_text()
    assert "This notebook did not come to its end: it failed in cell 3" in page and "seen before it" in page
    assert "This notebook ended here" in page and "Did not come to its end: notebook 02." in page
    assert "Count up" in page  # the others are there
    for text in (page, kept):
        assert "sk-abc" not in text and "10.1.2.3" not in text
    assert not writer.notebook_path(twin).exists()
    twin.write_text(twin.read_text().replace("raise ", "print('mended') or ").replace("or ValueError", "or str"))
    assert cli.run(["02"]) == 0 and not (plain / "build/context-loss/02_bad.failed.ipynb").exists()
    assert "come to its end" not in (plain / "report/context-loss/index.html").read_text()


def test_a_tagged_error_is_not_a_failure(small: Path) -> None:
    twin = small / "notebooks/src/03_meant.py"
    twin.write_text('# %% tags=["raises-exception"]\n1 / 0\n\n# %%\nprint(2)\n')
    nb = run(twin, small)
    assert [o.output_type for c in nb.cells for o in c.outputs] == ["error", "stream"]


def test_a_bare_widget_is_refused(small: Path) -> None:
    twin = write(small, "04_bare", "import ipywidgets", "ipywidgets.IntSlider()")
    with pytest.raises(runner.NotebookFailed, match="cell 2: a widget without a still form"):
        run(twin, small)


CHILD = (
    "import subprocess, sys, pathlib, os\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "pathlib.Path('pid').write_text(str(child.pid))"
)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_time_out_stops_kernel_and_children(small: Path) -> None:
    twin = write(small, "05_slow", CHILD, "import time; time.sleep(600)")
    with pytest.raises(runner.NotebookFailed, match="took longer than 6 s and was stopped"):
        run(twin, small, timeout_s=6)
    assert gone(int((small / "notebooks/pid").read_text()))


def test_a_dead_kernel_is_said(small: Path) -> None:
    with pytest.raises(runner.NotebookFailed, match="lost its kernel"):
        run(write(small, "06_dies", "import os; os._exit(3)"), small, timeout_s=30)


def test_children_of_a_finished_notebook_are_ended(small: Path) -> None:
    run(write(small, "07_leaves", CHILD), small)
    assert gone(int((small / "notebooks/pid").read_text()))


def test_ctrl_c_leaves_no_process(small: Path) -> None:
    write(small, "08_waits", CHILD, "import time; time.sleep(600)")
    command = [sys.executable, "-m", "needlework", "run", "08"]
    process = subprocess.Popen(
        command,
        env={**os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background test run ignores it
    )
    mark, deadline = small / "notebooks/pid", time.monotonic() + 60
    while not (mark.is_file() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    assert below, "the kernel runs"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.count("\n") <= 2 and "stopped" in errors and "Traceback" not in errors
    assert gone(int(mark.read_text())) and all(gone(p.pid) for p in below)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_leaves_its_blocks_in_order(number: signal.Signals) -> None:
    before, left = signal.getsignal(number), []
    signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, __main__._ending_in_order():
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                left.append("the block")
        assert ended.value.code == 128 + number and left and signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as under nohup
        with __main__._ending_in_order():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


RECORDS = """import os, pathlib
run = pathlib.Path(os.environ["NEEDLEWORK_RECORD"])
run.mkdir(parents=True, exist_ok=True)
with (run / "trials.jsonl").open("a") as file:
    file.write("{}\\n")
assert len((run / "trials.jsonl").read_text().splitlines()) == 2, "killed half way"
"""


def test_a_recording_that_was_stopped_goes_on_and_counts_only_when_whole(small: Path) -> None:
    write(small, "09_records", RECORDS)
    runs = small / "data/incidents/context-loss/runs"
    assert cli.run(["09", "--record", "--no-report"]) == 1
    assert [p.name for p in runs.iterdir()] == ["09_records.part"] and incidents.incident(
        "context-loss"
    ).run_names == []
    assert cli.run(["09", "--record", "--no-report"]) == 0
    assert [p.name for p in runs.iterdir()] == ["09_records"]
    assert incidents.incident("context-loss").run_names == ["09_records"]
    with pytest.raises(ValueError, match="already recorded: 09_records"):
        cli.run(["09", "--record"])
    with pytest.raises(ValueError, match="nothing to record from a recording"):
        cli.run(["09", "--record", "--target", "recorded"])


MEASURES = """import os, pathlib
run = pathlib.Path(os.environ["NEEDLEWORK_RECORD"])
assert not run.exists() and not run.with_suffix("").exists(), "a run of another day was left"
run.mkdir(parents=True)
(run / "trials.jsonl").write_text("{}\\n")"""
READS = """import os, pathlib
from needlework import workbook
print([folder.name for folder in workbook.measured()], all(f.is_dir() for f in workbook.measured()))"""


def test_the_verdict_reads_what_this_run_has_measured_on_the_same_target(plain: Path) -> None:
    """After all others, whatever ran beside it; alone it has nothing to read, and nothing is left of another day."""
    write(plain, "02_measures", MEASURES)
    write(plain, "03_fails", MEASURES, "1 / 0")
    write(plain, "04_sends_nothing", "print(1)")
    write(plain, "11_verdict", READS)

    def told(*wanted: str, target: str = "http://127.0.0.1:9") -> str:
        status = cli.run([*wanted, "--target", target, "--no-report", "--jobs", "2"])
        assert status == int("03" in wanted)
        (cell,) = nbformat.read(next(plain.glob("build/*/11_verdict.ipynb")), 4).cells
        return cell.outputs[0].text.strip()

    for _ in range(2):
        assert told("11", "02", "03", "04") == "['02_measures'] True"
    assert told("11") == "[] True"
    assert told("02", "11") == "['02_measures'] True"
    for default in ({}, {"target": "recorded"}):
        plan = runner.Plan(plain, **default)
        assert not plan.keeps and set(plan.environment(plain / "02_measures.py")) <= {
            "NEEDLEWORK_INCIDENT",
            "NEEDLEWORK_TARGET",
        }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[[", "not valid TOML"),
        ("a=" + "[" * 5000, "not valid TOML"),
        ("workbook = 3", "must be a table"),
        ("[workbook]\nnotebooks = 3", "list of notebook names"),
        ("[workbook]\nnotebooks = [3]", "list of notebook names"),
        ("[workbook]\nnotebooks = ['../../etc']", "no notebook '../../etc'"),
        ("[workbook]\nparameters = 3", "tables of parameters"),
        ("[workbook.parameters]\n00_words = 3", "tables of parameters"),
        ("[workbook]\ntarget = 3", "must be a text"),
    ],
)
def test_a_hostile_incident_is_one_sentence(small: Path, text: str, sentence: str) -> None:
    (small / "data/incidents/one/incident.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        cli.run(["--incident", "one"])


def test_an_incident_asked_for_by_name_is_rebuilt_from_its_recordings(small: Path) -> None:
    (small / "data/incidents/context-loss/incident.toml").write_text("[workbook]\ntarget = 'recorded'\n")
    assert cli._plan(small, None, None).default and cli._plan(small, None, None).target is None
    named = cli._plan(small, "context-loss", None)
    assert named.target == "recorded" and not named.default
    assert cli._plan(small, "context-loss", "lab").default


def test_unknown_notebook_and_incident_are_one_sentence(small: Path) -> None:
    for argv, sentence in ((["77"], "no notebook '77'"), (["--incident", "x"], "no incident 'x'")):
        with pytest.raises(ValueError, match=sentence):
            cli.run(argv)


def test_keep_brings_cells_back(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = small / "notebooks/src/01_end.py"
    nb = writer.canonical(writer.read_twin(twin), writer.stamp(twin, {"data": {}, "library": {}}), small)
    nb.cells[0].source += "\n\nA new sentence."
    writer.notebook_path(twin).write_text(json.dumps(nb))
    assert cli.run(["--keep", "01"]) == 0 and "changed" in capsys.readouterr().out
    assert "# A new sentence." in twin.read_text()
    with pytest.raises(ValueError, match="execute it first"):
        cli.run(["--keep", "00"])


def test_a_notebook_without_an_answer_ends_with_its_sentence_and_the_run_goes_on(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for heavy in ("00_words", "01_end"):
        (plain / f"notebooks/src/{heavy}.py").unlink()
    twin = write(
        plain, "02_two", "from needlework import workbook", "print(1)\nworkbook.need(False, 'two <arms>')", "1 / 0"
    )
    twin.write_text("# %% [markdown]\n# # Two\n#\n# Why?\n\n" + twin.read_text())
    small_window = (
        "from needlework.probes.bench.trial import Ask, PromptSpec, check_window",
        "asked = Ask('recall', PromptSpec(6144))\nprompt = type('Prompt', (), {'counted_tokens': 6144})",
        "check_window(asked, prompt, 2048)",
    )
    third = write(plain, "03_three", *small_window)
    third.write_text("# %% [markdown]\n# # Three\n#\n# Why?\n\n" + third.read_text())
    assert cli.run([]) == 3
    said, errors = capsys.readouterr()
    assert "not for this target: two <arms>" in said and "2 of 3 notebooks have no answer" in errors
    assert "02_two, 03_three" in errors and "do not fit the window of 2048 tokens" in said
    nb = nbformat.read(writer.notebook_path(twin), 4)
    kinds = [o.output_type for c in nb.cells for o in c.get("outputs", ())]
    assert kinds == ["stream", "display_data"] and nb.metadata["needlework"]["cannot"] == "two <arms>"
    page = (plain / "report/context-loss/index.html").read_text()
    assert "Not for this target." in page and "two &lt;arms&gt;" in page and "<arms>" not in page
    assert cli.run([]) == 3 and "up to date\n    not for this target" in capsys.readouterr().out


def test_reading_notebooks_compiles_no_grammar_of_web_addresses():
    assert "nbformat.validator" in sys.modules and "rfc3987_syntax.syntax_helpers" not in sys.modules


def test_live_endpoints_are_measured_by_one_notebook_at_a_time(tmp_path):
    assert runner.Plan(tmp_path).jobs == runner.Plan(tmp_path, target="recorded").jobs == 2
    assert runner.Plan(tmp_path, target="a=http://127.0.0.1:1,b=http://127.0.0.1:2").jobs == 1
