"""The journal: nothing lost, nothing twice, torn lines set aside, hostile text kept harmless."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import probe_kills
import pytest
from mock_endpoint import mock_endpoint
from needlework import probes
from needlework.__main__ import main as needlework
from needlework.analysis import load_trials
from needlework.probes import Journal, Recorded, recall
from needlework.serving import Endpoint


def row(i, outcome="exact"):
    return {"trial_id": f"t{i}", "outcome": outcome, "answer": "\u2028 \x00 \U0001f600", "probe": "recall"}


def test_append_read_back_and_last_row_wins(tmp_path):
    with Journal(tmp_path / "run") as journal:
        journal.append(row(1, "transport"))
        assert journal.get("t1") is None and journal.get("t1", final=True)
        journal.append(row(1))
        journal.append(row(2))
        journal.note(parameters={"recall": {"a": 1}})
        journal.note(parameters={"cliff": {"b": 2}})
    with Journal(tmp_path / "run") as journal:
        assert list(journal.frame()["trial_id"]) == ["t1", "t2"] and journal.get("t1")["outcome"] == "exact"
        assert set(journal.manifest["parameters"]) == {"recall", "cliff"}
        assert journal.frame().loc[0, "answer"] == "\u2028 \x00 \U0001f600"


def test_a_run_under_way_writes_the_name_that_it_will_have(tmp_path):
    assert Journal(tmp_path / "10_pd.part").name == Journal(tmp_path / "10_pd").name == "10_pd"


def test_torn_last_line_is_set_aside_and_the_next_append_is_whole(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        journal.append(row(1))
    with open(run / "trials.jsonl", "ab") as file:
        file.write(b'{"trial_id": "t2", "outc')
    with Journal(run) as journal:
        assert journal.torn == 1 and set(journal.rows) == {"t1"}
        journal.append(row(3))
    assert [json.loads(line)["trial_id"] for line in (run / "trials.jsonl").read_text().splitlines()] == ["t1", "t3"]
    assert "t2" in (run / "trials.torn").read_text()
    assert len(load_trials(run)) == 2
    with open(run / "trials.jsonl", "ab") as file:  # complete, only the line break is missing
        file.write(json.dumps(row(4)).encode())
    with Journal(run) as journal:
        journal.append(row(5))
    assert len(load_trials(run)) == 4


@contextlib.contextmanager
def full_at(size):
    """No file of this process grows past `size` bytes: what fits is written, then the system refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_whole_lines_and_the_old_manifest(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        journal.append(row(1))
        journal.note(generator=1)
        with full_at((run / "trials.jsonl").stat().st_size + 20), pytest.raises(OSError):
            journal.append(row(2))
        with full_at(10), pytest.raises(OSError):
            journal.note(generator=2)
        assert journal.get("t2") is None and {p.name for p in run.iterdir()} == {
            ".lock",
            "trials.jsonl",
            "manifest.json",
        }
        journal.append(row(3))  # there is room again
        journal.note(generator=2)
    with Journal(run) as journal:
        assert list(journal.rows) == ["t1", "t3"] and journal.manifest["generator"] == 2 and not journal.torn


def test_malformed_line_in_the_middle_is_named_and_nothing_changes(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        journal.append(row(1))
    raw = (run / "trials.jsonl").read_bytes() + b"not json\n" + json.dumps(row(2)).encode() + b"\n"
    (run / "trials.jsonl").write_bytes(raw)
    with pytest.raises(ValueError, match=r"trials.jsonl line 2 is malformed"):
        Journal(run)
    assert (run / "trials.jsonl").read_bytes() == raw


@pytest.mark.parametrize(
    "manifest",
    [
        "[1]",
        '"x"',
        '{"schema":"2"}',
        '{"targets":5}',
        '{"targets":{"single":5}}',
        '{"state":[]}',
        '{"parameters":"x"}',
        '{"schema":null}',
        "[" * 100_000,
        "",
        '{"schema":9}',
    ],
)
def test_a_manifest_that_is_none_is_one_sentence_and_the_folder_stays_free(tmp_path, manifest):
    (tmp_path / "trials.jsonl").write_text(json.dumps(row(1)) + "\n")
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"mend or remove it|newer needlework"):
        Journal(tmp_path)
    (tmp_path / "manifest.json").unlink()
    Journal(tmp_path).close()  # the refused open left no lock behind


@pytest.mark.parametrize("line", ['{"outcome":"exact"}', '{"trial_id":5,"outcome":"exact"}'])
def test_a_row_that_names_no_trial_is_not_dropped_in_silence(tmp_path, line):
    (tmp_path / "trials.jsonl").write_text(f"{json.dumps(row(1))}\n{line}\n")
    with pytest.raises(ValueError, match=r"trials.jsonl line 2 is malformed"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("outcome", 3, "text"),
        ("target_tokens", [1], "a number"),
        ("depth", True, "a number"),
        ("label", 3, "text"),
        ("time", 1.5, "text"),
        ("http_status", "500", "a number"),
    ],
)
def test_a_column_of_another_kind_is_named(tmp_path, column, value, said):
    (tmp_path / "trials.jsonl").write_text(f"{json.dumps(row(1))}\n{json.dumps(row(2) | {column: value})}\n")
    with pytest.raises(ValueError, match=f"trials.jsonl line 2: {column} is not {said}; mend or remove"):
        Recorded(tmp_path)


@pytest.mark.parametrize("name", ["trials.jsonl", "counts.jsonl", "plan.jsonl"])
def test_a_pipe_in_a_file_s_place_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is no file that can be read"):
        Journal(tmp_path)


def test_a_torn_end_stays_when_the_other_file_is_refused(tmp_path):
    torn = json.dumps(row(1)) + '\n{"trial_id"'
    (tmp_path / "trials.jsonl").write_text(torn)
    (tmp_path / "counts.jsonl").write_text("garbage\n")
    with pytest.raises(ValueError, match=r"counts.jsonl line 1 is malformed"):
        Journal(tmp_path)
    assert (tmp_path / "trials.jsonl").read_text() == torn


def test_two_writers_are_refused_and_a_dead_one_is_not_in_the_way(tmp_path):
    with Journal(tmp_path / "run"), pytest.raises(ValueError, match="another process"):
        Journal(tmp_path / "run")
    Journal(tmp_path / "run").close()
    with pytest.raises(FileNotFoundError, match="holds no trials"):
        Recorded(tmp_path / "none")


def test_kills_lose_nothing_and_repeat_only_what_was_in_flight(tmp_path):
    tally = probe_kills.kill_runs(tmp_path, 4, seed=3)
    assert tally.kills == 4 and (tally.lost, tally.changed, tally.excess) == (0, 0, 0)


def test_the_kill_test_sees_a_journal_that_loses_lines(tmp_path, monkeypatch):
    seen = iter([{"a": {"probe": "recall"}}, {}])
    monkeypatch.setattr(probe_kills, "rows_of", lambda run: next(seen, {}))
    monkeypatch.setattr(probe_kills, "kill_one", lambda *_: True)
    monkeypatch.setattr(probe_kills.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert probe_kills.kill_runs(tmp_path, 2).lost > probe_kills.CELLS * 2


def test_recorded_run_answers_without_a_server(tmp_path):
    options = {"lengths": (300, 600), "depths": (0.5,)}
    with mock_endpoint(lose=lambda n, p, c, o: n > 500) as mock:
        live = recall(mock.base_url, tmp_path / "run", **options)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    replayed = recall(f"recorded:{tmp_path / 'run'}", **options)
    assert str(replayed) == str(live) and replayed.table.equals(live.table)
    with pytest.raises(ValueError, match=r"holds no recall trial of 700 tokens at depth 0\.5"):
        recall(Recorded(tmp_path / "run"), lengths=(300, 700), depths=(0.5,))
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert "127.0.0.1" not in "".join(p.read_text() for p in Path(tmp_path / "run").iterdir())


def without(run, *columns):
    """The run with these columns left out of every row."""
    rows = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in columns} for row in rows]
    (run / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return f"recorded:{run}"


@pytest.mark.parametrize(
    ("instrument", "options"),
    [
        (recall, {"lengths": (300, 600), "depths": (0.2, 0.8)}),
        (probes.drift, {"canaries": 8, "length": 300}),
        (probes.turns, {"length": 600, "repeats": 1}),
        (probes.find_cliff, {"low": 300, "high": 2400, "max_requests": 12}),
    ],
)
def test_what_a_recorded_run_lacks_follows_from_what_was_asked(tmp_path, capsys, instrument, options):
    with mock_endpoint(lose=lambda n, place, c, o: n > 500) as mock:
        live = instrument(mock.base_url, tmp_path, **options)
    places = {"needle_token"} if instrument is not probes.find_cliff else set()
    target = without(tmp_path, "target_tokens", "depth", "label", "ordinal", "cached_tokens", "wanted_cache", *places)
    assert str(instrument(target, **options)) == str(live)
    without(tmp_path, "outcome")
    name = {"find_cliff": "cliff"}.get(instrument.__name__, instrument.__name__)
    flags = [
        f"--{k.replace('_', '-')}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in options.items()
    ]
    assert needlework(["probe", name, target, *flags]) == 2
    said = capsys.readouterr().err.strip()
    assert "the journal has no outcome for the" in said and "mend its line" in said and said.count("\n") == 0


def test_a_request_that_failed_has_no_cached_tokens_and_is_no_traceback():
    with mock_endpoint(fail=lambda o: (503, '{"error": "busy"}') if o == 3 else None) as mock:
        result = probes.reload(mock.base_url, fill_tokens=900, prompts=2, length=300)
    assert any("1 transport: HTTP 503: busy" in w for w in result.warnings)


def test_resume_after_failures_retries_only_those(tmp_path):
    with mock_endpoint(fail=lambda o: (503, '{"error": "busy"}') if o in (3, 5) else None) as mock:
        first = recall(
            mock.base_url, tmp_path / "run", lengths=(300,), depths=(0.2, 0.5, 0.8), repeats=3, controls=False
        )
        assert list(first.trials["outcome"]).count("transport") == 2
        assert any("2 of 9 trials measured nothing (2 transport: HTTP 503: busy)" in w for w in first.warnings)
        assert first.table["measured"].sum() == 7 and first.verdict == "healthy"
        sent = len(mock.chats)
        second = recall(
            mock.base_url, tmp_path / "run", lengths=(300,), depths=(0.2, 0.5, 0.8), repeats=3, controls=False
        )
        assert len(mock.chats) - sent == 2 and second.table["measured"].sum() == 9
    trials = load_trials(tmp_path / "run").query("probe == 'recall'")
    assert len(trials) == 9 and set(trials["outcome"]) == {"exact"}  # of a retried trial the last row counts


def first_lines(run, mock, **options):
    """First lines of the recall prompts that a run sends."""
    before = len(mock.chats)
    recall(options.pop("endpoint", mock.base_url), run, lengths=(300,), depths=(0.5,), repeats=2, **options)
    return {chat["messages"][0]["content"].split("\n")[0] for chat in mock.chats[before:]}


def test_a_second_run_does_not_meet_what_the_first_left_in_the_cache(tmp_path):
    with mock_endpoint() as mock:
        first = first_lines(tmp_path / "a", mock)
        assert not first & first_lines(tmp_path / "b", mock)  # another folder
        assert not first & first_lines(None, mock)  # none
        cut = (tmp_path / "a" / "trials.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "a" / "trials.jsonl").write_bytes(b"".join(cut[:-2]))
        again = first_lines(tmp_path / "a", mock)
        assert again and again <= first  # the same run goes on with its own prompts
        told = Endpoint(mock.base_url, repeatable=True)
        assert first_lines(None, mock, endpoint=told) & first_lines(None, mock, endpoint=told)
