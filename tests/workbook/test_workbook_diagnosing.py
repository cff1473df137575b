"""`needlework diagnose`: a table, or a live deployment that is asked first, in one command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mock_endpoint import mock_endpoint
from needlework import __main__ as command

RUNS = Path(__file__).parents[2] / "data" / "incidents" / "context-loss" / "runs"


def beyond_3000(n, place, cached, ordinal):
    return n > 3000


def test_a_recorded_split_is_named_from_its_table(capsys):
    status = command.main(["diagnose", str(RUNS / "10_pd_vs_combined"), "--constants", "topk=512,ratio=4"])
    assert status == 1 and "F14" in capsys.readouterr().out.split("\n")[0]


def test_a_table_without_columns_says_what_it_does_not_tell(tmp_path, capsys):
    table = tmp_path / "other.csv"
    table.write_text("question,prompt_tokens\nwhich,500\nwho,900\n")
    assert command.main(["diagnose", str(table)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    table.write_text("correct\nyes\nno\n")
    assert command.main(["diagnose", str(table)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("Not proven")
    assert (
        "nothing is said about length\n" in said.err and "nothing is said about the place in the prompt\n" in said.err
    )


def test_two_servers_with_blanks_between_them_and_a_second_start_sends_nothing(tmp_path, capsys):
    with mock_endpoint() as whole, mock_endpoint(lose=beyond_3000) as split:
        whole.window = split.window = 8192
        argv = [
            "diagnose",
            f"combined={whole.base_url},",
            f"pd={split.base_url}",
            "--yes",
            "--run",
            str(tmp_path / "run"),
        ]
        argv += ["--requests", "110"]
        assert command.main(argv) == 1
        said = capsys.readouterr()
        assert "budget: about 110 requests, 140 at most" in said.err and "asking" in said.err
        assert "on pd" in said.out and "Foretold: " in said.out and "Healthy" not in said.out
        sent = len(whole.chats), len(split.chats)
        assert sum(sent) <= 110 + 2 * 12, "looking at what the endpoints offer takes a few requests more"
        assert command.main([x for x in argv if x != "--yes"]) == 1, "nothing to send, so nothing to confirm"
        again = capsys.readouterr()
        assert again.out == said.out and "budget" not in again.err
        assert (len(whole.chats), len(split.chats)) == sent
        assert whole.base_url not in said.out + said.err
    assert command.main(["diagnose", str(tmp_path / "run")]) == 1
    alone = capsys.readouterr().out
    assert said.out.startswith(alone) and "Foretold: " in alone, "the folder alone says the same"


def test_nothing_is_asked_before_the_budget_is_confirmed(tmp_path, capsys):
    with mock_endpoint() as mock:
        assert command.main(["diagnose", mock.base_url, "--quick", "--run", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert "budget: about 100 requests, 116 at most" in said and "add --yes" in said
        assert not mock.requests


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nothing-here"], "there is no 'nothing-here' here"),
        (["http://127.0.0.1:9"], "name a folder for the journal with --run"),
        (["http://127.0.0.1:9", "--run", "run"], "nothing answers"),
        (["http://127.0.0.1:9", "--run", "run", "--api-key-env", "sk-live-4242"], "give its name, never the key"),
        (["http://127.0.0.1:9", "--run", "run", "--then", "http://127.0.0.1:9"], "name both deployments"),
        (["http://127.0.0.1:9", "--run", "run", "--ca", "none.pem"], "none.pem holds no certificates"),
    ],
)
def test_bad_input_gets_one_sentence(argv, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["diagnose", *argv]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out
    assert "sk-live-4242" not in said.err and not os.listdir(tmp_path)


def test_limits_that_tell_nothing_are_refused(tmp_path, capsys):
    with mock_endpoint() as mock:
        for more, sentence in (
            (["--requests", "3"], "3 requests tell nothing"),
            (["--exclude", "7"], "between 0 and 1"),
        ):
            assert command.main(["diagnose", mock.base_url, "--yes", "--run", str(tmp_path / "run"), *more]) == 2
            assert sentence in capsys.readouterr().err
        assert not mock.requests


def test_a_stopped_run_is_read_as_what_it_is(tmp_path, capsys):
    with mock_endpoint() as mock:
        argv = ["diagnose", mock.base_url, "--yes", "--run", str(tmp_path / "run"), "--requests", "60"]
        mock.defects.fail = lambda ordinal: (500, '{"error": {"message": "worker died"}}') if ordinal > 20 else None
        assert command.main(argv) == 1
        assert "UNFINISHED" in capsys.readouterr().out
        assert command.main(["diagnose", str(tmp_path / "run")]) == 1
        assert "UNFINISHED: this run was stopped after" in capsys.readouterr().err
        mock.defects.fail = lambda ordinal: None
        command.main(argv)
        assert "UNFINISHED" not in capsys.readouterr().out


def test_one_after_the_other_prints_the_switch_and_goes_on_when_the_second_is_up(tmp_path, capsys):
    plan = RUNS.parent / "incident.toml"
    with mock_endpoint(lose=beyond_3000) as split:
        split.window = 8192
        argv = ["diagnose", f"pd={split.base_url}", "--yes", "--run", str(tmp_path / "run"), "--requests", "100"]
        argv += ["--plan", str(plan), "--then"]
        assert command.main([*argv, "combined=http://127.0.0.1:9"]) == 1
        said = capsys.readouterr()
        assert "sudo systemctl stop sglang-dsv4-router.service" in said.err and "nothing answers" in said.err
        with mock_endpoint() as whole:
            assert command.main([*argv, f"combined={whole.base_url}"]) == 1
            said = capsys.readouterr()
            assert "on pd" in said.out and "systemctl" not in said.err and len(whole.chats) > 40


def test_a_reader_that_has_seen_enough_is_no_error():
    argv = [sys.executable, "-m", "needlework", "diagnose", str(RUNS / "10_pd_vs_combined")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""
