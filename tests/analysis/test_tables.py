"""Tables as other tools write them: each is read, or refused in one sentence that says what to write."""

from __future__ import annotations

import json

import numpy as np
import pytest
from needlework.analysis import hits, lengths, load_trials


def jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_ruler_wants_every_value(tmp_path):
    rows = [
        {"index": 0, "pred": " 1234567 and 7654321.", "input": "…", "outputs": ["1234567", "7654321"], "length": 4096},
        {"index": 1, "pred": " 1234567.", "input": "…", "outputs": ["1234567", "7654321"], "length": 8192},
        {"index": 2, "pred": "", "input": "…", "outputs": ["1234567"], "length": 8192},
    ]
    got = load_trials(jsonl(tmp_path / "niah.jsonl", rows))
    assert hits(got).tolist() == [1, 0, 0] and lengths(got).tolist() == [4096, 8192, 8192]
    assert got["expected"][0] == "1234567; 7654321" and got["outcome"][2] == "empty"
    assert "nobody had graded the answers: 3 were graded here" in got.attrs["notes"]


def test_longbench_wants_one_of_the_answers(tmp_path):
    rows = [{"pred": "It is Paris.", "answers": ["Lyon", "Paris"], "all_classes": None, "length": 900},
            {"pred": "Rome", "answers": ["Lyon", "Paris"], "all_classes": None, "length": 900}]  # fmt: skip
    assert hits(load_trials(jsonl(tmp_path / "p.jsonl", rows))).tolist() == [1, 0]
    rows = [{"_id": "a", "pred": "B", "answer": "A", "judge": False, "length": "long"}]
    got = load_trials(jsonl(tmp_path / "v2.jsonl", rows))
    assert hits(got).tolist() == [0] and (got["answer"][0], got["expected"][0]) == ("B", "A")


def test_samples_of_lm_eval_keep_the_score_that_was_measured(tmp_path):
    row = {"doc": {"max_length": 4096}, "target": "['63']", "filtered_resps": [" 63"], "metrics": ["4096", "8192"]}
    rows = [{**row, "4096": 1.0, "8192": -1}, {**row, "4096": 0.0, "8192": -1, "filtered_resps": ["It is 63."]}]
    got = load_trials(jsonl(tmp_path / "samples.jsonl", rows))
    assert got["score"].tolist() == [1, 0] and got["expected"].tolist() == ["63", "63"]
    assert got["answer_holds_value"].tolist() == [False, True]
    assert "1 answers graded wrong hold the expected value" in got.attrs["notes"]
    (tmp_path / "results.json").write_text(json.dumps({"results": {"niah": {"4096,none": 1.0}}}))
    with pytest.raises(ValueError, match=r"a share for each task, not the requests; .* --log_samples"):
        load_trials(tmp_path / "results.json")


def test_logs_of_inspect(tmp_path):
    def sample(number, value, text, **more):
        output = {"completion": text, "usage": {"input_tokens": 4100}, "choices": [{"stop_reason": "stop"}]}
        return {"id": number, "epoch": 1, "input": "…", "target": "63", "output": output, "metadata": {"depth": 50},
                "scores": {"includes": {"value": value}}, **more}  # fmt: skip

    samples = [sample(1, "C", "63"), sample(2, "I", "71"), sample(3, 0.25, "7"), sample(4, "I", "", error={"m": "x"})]
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": {}, "samples": samples, "stats": {}}))
    got = load_trials(path)
    np.testing.assert_array_equal(hits(got)[[0, 1, 3]], [1, 0, np.nan])
    assert got["outcome"].tolist()[3] == "transport" and got["prompt_tokens"].tolist() == [4100] * 4
    assert got["finish_reason"][0] == "stop" and got["score"][2] == 0.25
    (tmp_path / "log.eval").write_bytes(b"PK")
    with pytest.raises(ValueError, match="inspect_ai"):
        load_trials(tmp_path / "log.eval")


def test_needle_results_are_of_1_to_10_even_where_all_are_1(tmp_path):
    row = {"context_length": 1000, "depth_percent": 50.0, "needle": "eat a tart", "model_response": "No idea."}
    (tmp_path / "n.json").write_text(json.dumps([{**row, "score": 1}, {**row, "score": 1, "depth_percent": 70.0}]))
    assert hits(load_trials(tmp_path / "n.json")).tolist() == [0, 0]


@pytest.mark.parametrize(
    "scores, want, words",
    [
        ([10, 1, 7, 3], [1, 0, 1, 0], "scores of 1 to 10"),
        ([10, 0, 7, 3], [1, 0, 1, 0], "scores of 0 to 10"),
        ([100, 0, 55, 30], [1, 0, 1, 0], "scores of 0 to 100"),
        ([1, 0, 0.7, 0.3], [1, 0, 1, 0], None),
    ],
)
def test_scores_become_shares_and_it_is_said(tmp_path, scores, want, words):
    rows = [{"target_tokens": 1000 * n, "score": score} for n, score in enumerate(scores, 1)]
    got = load_trials(jsonl(tmp_path / "s.jsonl", rows))
    assert hits(got).tolist() == want
    assert any(words in note for note in got.attrs["notes"]) if words else not got.attrs["notes"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-bom"])
def test_spreadsheets_of_other_countries(tmp_path, encoding):
    text = "sep=;\ncontext_length;depth;score;answer\n4000;0,25;1,0;a,b\n8000;0,5;0,0;ü\n"
    raw = b"\xff\xfe" + text.encode("utf-16-le") if encoding.endswith("bom") else text.encode(encoding)
    (tmp_path / "t.csv").write_bytes(raw)
    got = load_trials(tmp_path / "t.csv")
    assert got["depth"].tolist() == [0.25, 0.5] and hits(got).tolist() == [1, 0]
    assert got["answer"].tolist() == ["a,b", "ü"] and lengths(got).tolist() == [4000, 8000]
    assert any("semicolons" in note for note in got.attrs["notes"])


def test_grouped_numbers_and_places(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('input_length,position,correct\n"3,000",0,yes\n"12,000",50,no\n"1,048,576",100,no\n')
    got = load_trials(path)
    assert lengths(got).tolist() == [3000, 12000, 1048576] and got["depth"].tolist() == [0, 0.5, 1]
    path.write_text("input_length,position,correct\n3000,150,yes\n12000,9000,no\n")
    assert load_trials(path)["needle_token"].tolist() == [150, 9000]
    path.write_text("input_length,position,correct\n3000,4,yes\n12000,19,no\n")  # the number of a document
    got = load_trials(path)
    assert "depth" not in got and any("'position' is neither" in note for note in got.attrs["notes"])


def test_what_holds_no_result_is_refused_with_the_columns_to_write(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("context_length,comment\n1000,fine\n")
    with pytest.raises(ValueError, match=r"columns target_tokens, comment; write one row a request: target_tokens"):
        load_trials(path)


def test_pasted_rows_count_once_and_bare_ones_stay(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{n}000,{n}7,{n}7\n" for n in range(1, 5))
    path.write_text("length,expected,answer\n" + 3 * rows)
    got = load_trials(path)
    assert len(got) == 4 and "8 rows equal another in every cell; each counts once" in got.attrs["notes"]
    path.write_text("length,outcome\n" + "4000,exact\n" * 5)  # five trials of one length
    assert len(load_trials(path)) == 5


def test_times_of_two_kinds_can_be_ordered(tmp_path):
    rows = [{"time": "2026-11-30T10:00:01+00:00", "outcome": "exact"}, {"time": 1.7e9, "outcome": "exact"},
            {"time": 5, "outcome": "exact"}]  # fmt: skip
    got = load_trials(jsonl(tmp_path / "t.jsonl", rows)).sort_values("time")
    assert got["time"].tolist()[-1] == rows[0]["time"] and got["time"].map(type).eq(str).all()
