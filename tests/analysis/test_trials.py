import json

import numpy as np
import pandas as pd
import pytest
from needlework import analysis
from needlework.analysis import trials as module
from needlework.analysis.trials import COLUMNS, concat, hits, lengths, load_trials


def journal(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "trials.jsonl").write_bytes(text)
    return folder


def test_columns_are_the_contract():
    assert len(COLUMNS) == len(set(COLUMNS)) == 28
    assert COLUMNS[0] == "trial_id" and COLUMNS[-1] == "error"
    assert set(analysis.NO_MEASUREMENT) < set(analysis.OUTCOMES)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_kind_of_table_gives_the_same_frame(tmp_path, suffix):
    rows = [
        {"prompt_tokens": 1000, "outcome": "exact", "mine": "a,b"},
        {"prompt_tokens": 2000, "outcome": "garbage", "mine": "=1+1"},
        {"prompt_tokens": None, "outcome": "transport", "mine": None},
    ]
    path = tmp_path / f"t.{suffix}"
    frame = pd.DataFrame(rows)
    if suffix in ("csv", "tsv"):
        frame.to_csv(path, sep="," if suffix == "csv" else "\t", index=False)
    elif suffix == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif suffix == "json":
        path.write_text(json.dumps({"trials": rows}))
    else:
        frame.to_parquet(path)
    got = load_trials(path)
    assert list(got.columns) == ["prompt_tokens", "outcome", "mine"]
    assert got["prompt_tokens"].dtype == "float64" and got["prompt_tokens"].iloc[1] == 2000
    assert got["mine"].iloc[1] == "=1+1"
    np.testing.assert_array_equal(hits(got), [1, 0, np.nan])


def test_bad_line_is_named_and_nothing_is_lost(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"outcome": "exact"}\n{"outcome": \n{"outcome": "exact"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_trials(path)
    path.write_text('{"outcome": "exact"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2 is not an object"):
        load_trials(path)
    csv = tmp_path / "t.csv"
    csv.write_text("outcome,score\nexact,1\nexact\n")
    with pytest.raises(ValueError, match="line 3 has 1 fields"):
        load_trials(csv)
    with pytest.raises(FileNotFoundError):
        load_trials(tmp_path / "none.csv")


def test_torn_last_line_of_a_run_is_told(tmp_path):
    run = journal(tmp_path / "run1", b'{"outcome": "exact"}\n{"outcome": "ga')
    got = load_trials(run)
    assert len(got) == 1 and got.attrs["torn"] == '{"outcome": "ga'
    assert "torn" in got.attrs["notes"][0] and got["run"].iloc[0] == "run1"
    with pytest.raises(ValueError, match="line 1"):
        load_trials(journal(tmp_path / "run2", b'{"outcome": "ga\n{"outcome": "exact"}'))


def test_foreign_names_and_words(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "Context Length,Depth Percent,Correct,Input Tokens\n1000,50,True,1010\n2000,100,False,n/a\n"
        "3000,0,?,-\n4000,25,timeout,\n"
    )
    got = load_trials(path)
    assert list(got.columns) == ["target_tokens", "depth", "outcome", "prompt_tokens"]
    assert got["depth"].tolist() == [0.5, 1.0, 0.0, 0.25]
    assert got["outcome"].fillna("?").tolist() == ["exact", "miss", "?", "transport"]
    np.testing.assert_array_equal(hits(got), [1, 0, np.nan, np.nan])
    assert lengths(got).tolist() == [1010, 2000, 3000, 4000]
    assert any("2 cells of 'prompt_tokens'" in note for note in got.attrs["notes"])


def test_score_stands_in_for_a_missing_outcome():
    np.testing.assert_array_equal(hits(pd.DataFrame({"score": [1.0, 0.2, None]})), [1, 0, np.nan])
    assert hits(pd.DataFrame({"score": [-3.0, -0.2]})).isna().all()  # log-probabilities are not shares


def test_concat_keeps_a_trial_once():
    first = pd.DataFrame({"trial_id": ["a", "b"], "outcome": ["transport", "exact"]})
    second = pd.DataFrame({"trial_id": ["a"], "outcome": ["exact"]})
    assert concat([first, second])["outcome"].tolist() == ["exact", "exact"]
    assert list(concat([]).columns) == list(COLUMNS)


def test_hostile_bytes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"outcome\n\xff\xfe\n")
    with pytest.raises(ValueError, match="UTF-8"):
        load_trials(path)
    deep = tmp_path / "t.jsonl"
    deep.write_text("[" * 100000)
    with pytest.raises(ValueError, match="line 1"):
        load_trials(deep)
    assert module.LARGEST_BYTES > 2**20


def test_numbers_no_float_holds_and_half_surrogates_cost_a_cell_not_the_table(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt_tokens":1%s,"answer":"\\ud800 x","outcome":"exact"}\n' % ("0" * 400))
    frame = load_trials(tmp_path / "t.jsonl")
    assert frame["prompt_tokens"].isna().all() and list(frame["answer"]) == ["? x"]
    assert any("1 cells of 'prompt_tokens' are not numbers" in note for note in frame.attrs["notes"])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.json is not JSON"):
        load_trials(tmp_path / "deep.json")
