"""`needlework diagnose`: a table, or the whole battery on a live deployment, in one command."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mock_endpoint import mock_endpoint
from needlework import __main__ as command
from needlework import probes

RUNS = Path(__file__).parents[2] / "data" / "incidents" / "context-loss" / "runs"
SMALL = replace(
    probes.QUICK, lengths=(300, 700), arm_lengths=(400, 500, 600, 700, 800, 900), aa_pairs=1, period=4, crowd=((2, 2),),
    residue_start=300, warm_lengths=(400,), turn_length=400, turn_repeats=1, abort_length=600, abort_rounds=1,
)  # fmt: skip


def test_a_recorded_split_is_named_from_its_table(capsys):
    status = command.main(["diagnose", str(RUNS / "10_pd_vs_combined"), "--constants", "topk=512,ratio=4"])
    assert status == 1 and capsys.readouterr().out.startswith("Most likely: F14")


def test_a_table_without_columns_says_what_it_does_not_tell(tmp_path, capsys):
    table = tmp_path / "other.csv"
    table.write_text("answer,expected,prompt_tokens\n58213,58213,500\nnone,58213,900\n")
    assert command.main(["diagnose", str(table)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("needlework diagnose: none of 2 trials says whether the answer was right; add a column")
    assert not said.out and said.err.count("\n") == 1
    table.write_text("correct\nyes\nno\n")
    assert command.main(["diagnose", str(table)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("Not proven. Over all trials 1 of 2 answers right")
    assert (
        "nothing is said about length\n" in said.err and "nothing is said about the place in the prompt\n" in said.err
    )


def test_a_live_pair_is_measured_and_a_second_start_sends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "QUICK", SMALL)

    def lose(n, place, cached, ordinal):
        return n > 450

    with mock_endpoint() as whole, mock_endpoint(lose=lose) as split:
        target = f"combined={whole.base_url},pd={split.base_url}"
        argv = [
            "diagnose",
            target,
            "--quick",
            "--yes",
            "--run",
            str(tmp_path / "run"),
            "--constants",
            "topk=64,ratio=4",
        ]
        status = command.main(argv)
        said = capsys.readouterr()
        assert status == 1 and "budget: " in said.err and "asking: arms combined" in said.err
        assert "against pd (exact McNemar p =" in said.out and "Healthy" not in said.out
        sent = len(whole.chats), len(split.chats)
        limit = int(said.err.split("budget: ")[1].split(" requests")[0])
        assert sum(sent) <= limit + 40, "looking at what the endpoints offer takes a few requests more"
        assert command.main(argv) == 1 and capsys.readouterr().out == said.out
        assert (len(whole.chats) - sent[0]) + (len(split.chats) - sent[1]) <= 40
        assert whole.base_url not in said.out + said.err
    assert command.main(["diagnose", str(tmp_path / "run")]) == 1
    again = capsys.readouterr().out
    assert said.out.endswith(again) and "answers right" in again, "the folder alone says the same"


def test_nothing_is_asked_before_the_budget_is_confirmed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "QUICK", SMALL)
    with mock_endpoint() as mock:
        assert command.main(["diagnose", mock.base_url, "--quick", "--run", str(tmp_path / "run")]) == 2
        assert "add --yes" in capsys.readouterr().err
        asked = [c for c in mock.chats if "What is the secret code" in str(c)]
    assert len(asked) <= 2, "the two by which the speed is estimated"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nothing-here"], "there is no 'nothing-here' here"),
        (["http://127.0.0.1:9"], "name a folder for the journal with --run"),
        (["http://127.0.0.1:9", "--run", "run"], "nothing answers"),
    ],
)
def test_bad_input_gets_one_sentence(argv, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["diagnose", *argv]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out


def test_a_plan_within_a_window_asks_nothing_longer():
    plan = probes.Plan().within(3192)
    assert max(plan.lengths) <= 3192 and plan.arm_lengths == (2048,) and plan.period == 100
    assert "abort" not in plan.instruments and "recall" in plan.instruments
    tiny = probes.Plan().within(300)
    assert tiny.instruments == ("reload",) and probes.Plan().within(1 << 20) == probes.Plan()


def test_a_server_that_dies_ends_it_with_one_sentence_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "QUICK", SMALL)
    with mock_endpoint() as mock:
        argv = ["diagnose", mock.base_url, "--quick", "--yes", "--run", str(tmp_path / "run")]

        def fail(*_, **__):
            raise RuntimeError("the endpoint's tokenize route fails: the connection was reset")

        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["needlework.probes.battery"], "scan_residues", fail)
            assert command.main(argv) == 2
        assert capsys.readouterr().err.endswith("is kept, the same command goes on\n")
        sent = len(mock.chats)
        assert command.main(argv) == 0 and "Healthy" in capsys.readouterr().out
        assert len(mock.chats) > sent


def test_a_reader_that_has_seen_enough_is_no_error():
    argv = [sys.executable, "-m", "needlework", "diagnose", str(RUNS / "10_pd_vs_combined")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""
