"""The harness finds what was planted, is silent where nothing was, resumes, and counts rightly; the incident is solved
from outside in 120 requests and confirmed by its pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from needlework.analysis import diagnose
from needlework.probes import investigate
from needlework.probes.bench.journal import lock_folder
from needlework.serving import run as run_coroutine
from needlework_lab.calibrate.cases import GEOMETRY, Case, Effort, cases, key
from needlework_lab.calibrate.cli import main
from needlework_lab.calibrate.evidence import config_of, inside_of
from needlework_lab.calibrate.in_process import start_in_process
from needlework_lab.calibrate.run import calibrate
from needlework_lab.calibrate.summary import judged, summarise, table

SHORT = Effort(requests=140, window=2600, fill_tokens=0)


def test_planted_faults_are_named_and_a_healthy_deployment_is_not(tmp_path):
    wanted = [Case(("F08",), seed=100), Case((), seed=100)]
    with ThreadPoolExecutor(1) as one:
        rows = calibrate(wanted, tmp_path, effort=SHORT, executor=one)
        first = rows[0]["outside"]
        named = [code for group in first["groups"] for code in group]
        assert first["verdict"] != "healthy" and (first["confidence"] != "strong" or "F08" in named)
        assert rows[1]["outside"]["verdict"] == rows[1]["evidence"]["verdict"] == "healthy"
        assert not rows[1]["outside"]["groups"] and rows[1]["requests"] > 30
        measured = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/evidence.json")}
        again = calibrate(wanted, tmp_path, effort=SHORT, executor=one)  # diagnosed anew, measured once
    assert {path: path.stat().st_mtime_ns for path in measured} == measured and len(measured) == 2
    assert again == rows and len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


def test_the_incident_is_solved_from_outside_and_confirmed_inside(tmp_path):
    """Prefill and decode apart, index pages left behind after the first chunk; at most 120 requests to the pair."""
    options = {**GEOMETRY, "seed": 0}
    with start_in_process("pd", "F14", **options) as pair, start_in_process("combined", "F14", **options) as whole:
        arms = {"combined": whole.endpoint, "pd": pair.endpoint}
        found = investigate(arms, tmp_path / "run", requests=120, window=4000)
        asked = pair.transport.generated + whole.transport.generated
        config = config_of(pair.servers["prefill"])
        outside = diagnose(found.trials, {"config": config}, predictions=found.records)
        print(outside)
        assert outside.verdict != "healthy" and outside.laws[0].name.startswith("arm=pd: ") and asked <= 140
        assert outside.confidence != "strong" or "F14" in outside.causes
        evidence = inside_of(pair, whole)
    assert not evidence["digests"]["c4_index.0"] and evidence["digests"]["c4_kv.0"]
    assert any(name.startswith("c4_index") for name in evidence["pages"])
    assert not any(name.startswith("c4_kv") for name in evidence["pages"])
    inside = diagnose(found.trials, {"config": config, **evidence}, predictions=found.records)
    shares = [next(r.posterior for r in d.ranked if r.code == "F14") for d in (outside, inside)]
    assert shares[1] > shares[0] and inside.verdict != "healthy"


PARENT = """
import sys
from needlework_lab.calibrate.cases import Case
from needlework_lab.calibrate.run import calibrate
if __name__ == "__main__":
    calibrate([Case((), seed=seed) for seed in range(100, 104)], sys.argv[1], workers=2)
"""


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # ended, and nobody has asked for its status
    except psutil.NoSuchProcess:
        return False


def test_no_worker_outlives_a_killed_calibration(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = psutil.Popen([sys.executable, tmp_path / "parent.py", tmp_path], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while len(family := parent.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30  # a worker that is still importing notices when it is done
    while (left := list(filter(_runs, family))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert len(family) == 3 and not left, "two workers, and what tracks their semaphores"


def test_a_client_that_leaves_is_an_abort():
    import asyncio

    with start_in_process("combined", (), **GEOMETRY) as one:
        lines = "\n".join(f"Line {i} says nothing of interest to anybody." for i in range(400))
        first = asyncio.Event()

        async def leave() -> None:
            sending = asyncio.create_task(
                one.endpoint.chat([{"role": "user", "content": lines}], max_tokens=200, on_first_token=first)
            )
            await asyncio.wait_for(first.wait(), 20)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

        run_coroutine(leave())
        for _ in range(100):
            text = run_coroutine(one.endpoint.get_text("/metrics"))
            if 'num_aborted_requests_total{model_name="needlework-lookup"} 1.0' in text:
                return
    raise AssertionError("the server did not notice")


def test_cases():
    modes = {c.label: c.mode for c in cases(["F01", "F14", "healthy"], ["default"], [1])}
    assert modes == {"F01": "combined", "F14": "pd", "healthy": "combined"}
    assert len(cases(["F05"], ["mild", "default", "severe"], range(2))) == 6
    assert [c.mode for c in cases(["healthy"], ["default"], [0], healthy=3)] == [
        "combined",
        "combined",
        "pd",
        "combined",
    ]
    every = cases(["F01", "F02", "F03", "F01+F17", "healthy"], ["default"], range(200, 204), healthy=8)
    assert [c.seed for c in every if len(c.faults) == 1] == [s for s in range(200, 204) for _ in range(3)]
    half = every[: len(every) // 2]  # left in the middle, every kind has come half of its way
    assert [sum(len(c.faults) == n for c in half) for n in range(3)] == [6, 6, 2]
    one = Case(("F05",))
    assert key(one) != key(one, SHORT) and key(one) == key(Case(("F05",)))
    with pytest.raises(ValueError, match="no fault named 'F99'"):
        cases(["F99"], ["default"], [0])


def _row(faults, ranked, verdict="named", groups=None, **more):
    found = {"verdict": verdict, "ranked": ranked, "groups": [ranked[:1]] if groups is None else groups}
    label = "+".join(faults) or "healthy"
    return {"faults": faults, "label": label, "strength": "default", "requests": 100, "outside": found, **more}


def test_a_wrong_diagnosis_counts_as_wrong():
    rows = [
        _row(["F01"], ["F01", "F05", "F06"]),
        _row(["F01"], ["F05", "F01", "F06"]),
        _row(["F01"], ["healthy", "F05", "F06"], "healthy", []),
        _row([], ["healthy", "F05", "F06"], "healthy", []),
        _row([], ["F05", "healthy", "F06"]),
        _row(["F01", "F09"], ["F09", "F01", "F06"], "two causes", [["F09"], ["F01"]]),
        _row(["F01", "F09"], ["F09", "F06", "F01"], "two causes", [["F09"], ["F06"]]),
    ]
    shown = table(rows, "outside").set_index("class")
    assert shown.loc["F01", ["runs", "detected", "first", "three", "accused"]].tolist() == [3, 2, 1, 2, 1]
    assert shown.loc["healthy", ["healthy", "accused"]].tolist() == [1, 1]
    assert shown.loc["F01+F09", ["both", "two causes", "accused"]].tolist() == [1, 2, 1]
    assert shown.loc["F01", "taken for"] == "F05 (1), healthy (1)"
    assert judged(rows[1], "outside")["accused"] and not judged(rows[0], "outside")["accused"]
    assert not judged(_row(["F01"], ["F01", "F06"], groups=[["F01", "F06"]]), "outside")["accused"]
    page = summarise([{**row, "evidence": row["outside"]} for row in rows], {"date": "2026-11-29"}).markdown()
    assert "| right class first (default strength) | 1 of 3 |" in page and "* date: 2026-11-29" in page


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    for arguments in (["--faults", "F99"], ["--strengths", "huge"], ["--seeds", "0"], ["--executor", "slurm"]):
        assert main([*arguments, "--out", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["--as-is", "--out", str(tmp_path)]) == 2 and "measured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_is_measured_into_by_one_process_at_a_time(tmp_path, capsys):
    held = lock_folder(tmp_path)
    assert main(["--faults", "F14", "--seeds", "1", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "another process" in said and len(said.splitlines()) == 1 and not (tmp_path / "runs").exists()
    os.close(held)


def test_an_unfinished_run_has_its_tables(tmp_path, capsys):
    case = next(c for c in cases(["F08", "healthy"], ["default"], [200, 201]) if c.faults)
    here = tmp_path / "runs" / key(case)
    here.mkdir(parents=True)
    row = {"probe": "recall", "prompt_tokens": 600, "outcome": "garbage", "expected": "1", "answer": "2"}
    (here / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(30)))
    facts = {"config": {}, "requests": 30, "ended": "", "foretold": [], "inside": {}, "wall_s": 1, "cpu_s": 1}
    (here / "evidence.json").write_text(json.dumps(facts))
    arguments = ["--faults", "F08,healthy", "--seeds", "2", "--workers", "1", "--as-is", "--out", str(tmp_path)]
    assert main([*arguments, "--markdown", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "* runs: 1 of 4 planned" in page and "| F08 | default | 1 |" in page and "--as-is" not in page
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_remembered_server_gives_the_same_answer_and_computes_it_once():
    with start_in_process("combined", (), remember=True, **GEOMETRY) as reference:
        ask = [{"role": "user", "content": "The code of the red door is 58213. What is the code of the red door?"}]
        first, again = (run_coroutine(reference.endpoint.chat(ask, max_tokens=12)) for _ in range(2))
        assert first.text == again.text and "58213" in first.text and reference.transport.generated == 1
        other = [{"role": "user", "content": ask[0]["content"].replace("58213", "70044")}]
        assert "70044" in run_coroutine(reference.endpoint.chat(other, max_tokens=12)).text
        assert reference.transport.generated == 2
