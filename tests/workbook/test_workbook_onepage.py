"""The page for somebody who was not there: what it shows, that it is safe to open, and what lies beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needlework import analysis, workbook
from needlework.evidence import bundle, incidents
from needlework.workbook import onepage, verdict
from needlework.workbook.diagnosing import main

RUN = Path(__file__).parents[2] / "data/incidents/context-loss/runs/10_pd_vs_combined"


@pytest.fixture
def trials():
    return analysis.load_trials(RUN)


def made(trials, **more):
    return onepage.brief(analysis.diagnose(trials), trials, what="The pair", **more)


def test_a_wrong_answer_stands_beside_the_right_one_of_the_same_question(trials):
    found = made(trials)
    wrong, right = found.question["answers"]
    assert (wrong["arm"], wrong["found"], right["arm"], right["found"]) == ("pd", False, "combined", True)
    assert right["answer"] == found.question["expected"] and wrong["answer"] in onepage.page(found)
    same = trials[(trials["expected"] == found.question["expected"]) & (trials["arm"] == "pd")]
    assert (analysis.hits(same) == 0).any()


def test_the_grid_counts_every_measured_question_once(trials):
    found = made(trials)
    counted = sum(n for grid in found.grids.values() for row in grid["cells"] for _, n in row)
    rows = trials[trials["probe"].ne("calibration") & trials["control"].fillna("").eq("")]
    rows = rows.dropna(subset=["prompt_tokens", "needle_token"])
    assert counted == analysis.hits(rows).count() > 60


def test_titles_have_no_codes_and_a_healthy_table_no_failing_question(trials):
    assert not re.search(r"\b[FN]\d", made(trials).title)
    whole = made(trials[trials["arm"] == "combined"])
    assert whole.question == {} and "One question that fails" not in onepage.page(whole)
    assert "loses" not in whole.title


def test_hostile_answers_are_text(trials):
    trials.loc[trials["arm"] == "pd", "answer"] = "<script>alert(1)</script> http://10.1.2.3:8000/v1 Bearer abcdefghijk"
    found = made(trials, facts={"Version": "<img src=x>"})
    for text in (onepage.page(found), found.issue):
        assert "10.1.2.3" not in text and "abcdefghijk" not in text
    page = onepage.page(found)
    assert (
        "<script" not in page
        and "<img" not in page
        and not re.search(r'(?:src|href)="(?!data:|issue\.md|repro\.py)', page)
    )


def test_it_travels_in_a_notebook_and_nothing_else_is_taken_for_it(trials):
    found = made(trials)
    summary = workbook.summary(symptom="s", verdict="v", evidence=["e"], confidence="c", next_step="n", brief=found)
    carried = json.loads(json.dumps(summary._repr_mimebundle_()[verdict.MIME]))
    assert onepage.page(verdict.from_mapping(carried).brief) == onepage.page(found)
    assert onepage.from_mapping({"title": "x"}) is None
    assert onepage.from_mapping({**found.as_json(), "grids": {"a": {"lengths": ["<b>"]}}}) is None


def test_diagnose_writes_it_with_the_issue_and_a_script_that_explains_itself(tmp_path, capsys):
    assert main([str(RUN), "--report", str(tmp_path / "out")]) == 1
    assert "summary.html" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(onepage.NAMES)
    done = subprocess.run([sys.executable, tmp_path / "out/repro.py"], capture_output=True, text=True, timeout=30)
    assert "Usage" in done.stderr and "Traceback" not in done.stderr


def test_a_run_becomes_a_bundle_that_says_the_same(tmp_path, monkeypatch):
    made = bundle.from_run(RUN, tmp_path / "mine")
    assert made.problems() == []
    before, after = (analysis.diagnose(analysis.load_trials(p)) for p in (RUN, made.run(made.run_names[0])))
    assert str(before) == str(after)
    with pytest.raises(ValueError, match="already exists"):
        bundle.from_run(RUN, tmp_path / "mine")
    with pytest.raises(ValueError, match="no run folder"):
        bundle.from_run(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv(incidents.ELSEWHERE, "")
    assert incidents.adopt(tmp_path / "mine") == "mine" and incidents.incident("mine").path == tmp_path / "mine"
    with pytest.raises(ValueError, match="no incident bundle"):
        incidents.adopt(tmp_path)
