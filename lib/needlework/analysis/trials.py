"""The trial table: one request and its outcome per row, read from a journal or from somebody else's export.

Every analysis takes such a table (a pandas DataFrame). A table from elsewhere may have any subset of `COLUMNS`;
unknown columns are kept, missing ones are absent or null. What was changed on the way in is told in
`frame.attrs["notes"]` (a list of sentences), so that nothing is repaired in silence.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import tables

COLUMNS = [
    "trial_id", "run", "probe", "arm", "time", "target_tokens", "prompt_tokens", "depth", "needle_token",
    "question", "expected", "answer", "outcome", "score", "finish_reason", "completion_tokens", "reasoning_tokens",
    "cached_tokens", "cache", "turn", "concurrency", "ordinal", "ttft_s", "latency_s", "accept_length", "worker",
    "seed", "error",
]  # fmt: skip
OUTCOMES = [  # only `exact` is a hit
    "exact", "near", "other_needle", "distractor", "refusal", "empty", "cut", "reasoning_only", "garbage",
    "transport",
]  # fmt: skip
NO_MEASUREMENT = frozenset({"cut", "reasoning_only", "transport"})  # the question was never answered: no hit, no miss
NUMERIC = frozenset((
    "target_tokens", "prompt_tokens", "depth", "needle_token", "score", "completion_tokens", "reasoning_tokens",
    "cached_tokens", "turn", "concurrency", "ordinal", "ttft_s", "latency_s", "accept_length", "seed",
))  # fmt: skip
FRACTIONS = frozenset({"depth", "score", "ttft_s", "latency_s", "accept_length"})  # "3,5" is three and a half
# Names that other tools give to our columns. The measured count is never guessed from a wished length.
ALIASES = {
    alias: name
    for name, aliases in {
        "target_tokens": "context_length context_len context_size context_tokens ctx ctx_len length max_length "
        "input_length input_len prompt_length seq_len sequence_length n_tokens num_tokens tokens",
        "prompt_tokens": "input_tokens usage.prompt_tokens",
        "completion_tokens": "output_tokens usage.completion_tokens",
        "depth": "depth_percent depth_pct needle_depth insertion_depth relative_position position_percent",
        "answer": "response prediction pred model_response model_output model_answer generated_text completion output",
        "expected": "reference gold gold_answer ground_truth target needle label answer_key outputs answers",
        "outcome": "result correct is_correct hit passed judge",
        "score": "accuracy acc exact_match em",
        "ttft_s": "ttft",
        "latency_s": "latency test_duration_seconds",
    }.items()
    for alias in aliases.split()
}
HIT_WORDS = frozenset(("exact", "hit", "correct", "pass", "passed", "ok", "true", "1", "1.0", "yes", "right"))
MISS_WORDS = frozenset(("miss", "wrong", "incorrect", "fail", "failed", "false", "0", "0.0", "no"))  # of unknown kind
TRANSPORT_WORDS = frozenset(("error", "timeout", "timed_out", "exception", "http_error", "connection"))
LARGEST_BYTES = 512 * 2**20  # a journal of a million trials is about this large


def load_trials(path: str | Path) -> pd.DataFrame:
    """Reads a table of trials: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json`, `.parquet`, or a run folder.

    So are the tables of other tools (`analysis.tables`). Where nobody graded, answers are graded by us if the expected
    value is told. Scores of 1 to 10 and of 0 to 100 become shares. `answer_holds_value` marks answers that were graded
    wrong and hold the value, where there are any. Equal rows count once if they tell of one request (value, time …).

    Returns a DataFrame with lower-case column names, numbers as float64 and text as object; `attrs["notes"]` says
    what was renamed, dropped to null or torn. Raises FileNotFoundError when there is no such file and ValueError,
    naming the line, when a line can not be read: a line is never skipped. The only exception is a torn last line of a
    run folder (the process was killed while it wrote); it is reported in the notes and in `attrs["torn"]`.
    """
    path = Path(path)
    notes: list[str] = []
    attrs: dict[str, Any] = {}
    if path.is_dir():
        journal = path / "trials.jsonl"
        if not journal.is_file():
            raise FileNotFoundError(f"{path.name}/ holds no trials.jsonl; name a run folder or a table of trials")
        rows, torn = tables.json_lines(journal, forgive_torn=True)
        frame = pd.DataFrame(rows)
        if "trial_id" in frame.columns:  # a trial that failed on the line was tried again: its last row counts
            again = frame["trial_id"].notna() & frame["trial_id"].duplicated(keep="last")
            frame = frame[~again].reset_index(drop=True)
        if torn is not None:
            notes.append(
                f"the last line of {path.name}/trials.jsonl is torn (a write was interrupted); it is not counted"
            )
            attrs["torn"] = torn
        manifest = path / "manifest.json"
        if manifest.is_file():
            try:
                attrs["manifest"] = json.loads(manifest.read_text(encoding="utf-8"))
            except ValueError as error:
                notes.append(f"manifest.json could not be read ({error}); the trials were")
        frame = _normal(frame, notes)
        if "run" not in frame.columns or frame["run"].isna().all():
            frame["run"] = path.name
    else:
        if not path.is_file():
            raise FileNotFoundError(
                f"no table of trials at {path.name}; give a run folder, CSV, JSON lines or parquet file"
            )
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(
                f"{path.name} is larger than {LARGEST_BYTES >> 20} MiB; split it into runs and load them one by one"
            )
        frame = _judged(_normal(tables.read_file(path, notes), notes), path.name, notes)
    frame.attrs.update(attrs, notes=notes)
    return frame


def hits(trials: pd.DataFrame) -> pd.Series:
    """1.0 for a hit, 0.0 for a miss, NaN for no measurement; float64, aligned with the table.

    Without an `outcome` column a `score` between 0 and 1 stands in (a hit is a score of at least 0.5).
    """
    if "outcome" in trials.columns and trials["outcome"].notna().any():
        outcome = trials["outcome"].astype("object")
        known = outcome.notna() & ~outcome.isin(NO_MEASUREMENT)
        return pd.Series(np.where(known, (outcome == "exact").astype(float), np.nan), index=trials.index, name="hit")
    if "score" in trials.columns:
        score = pd.to_numeric(trials["score"], errors="coerce")
        if score.notna().any() and score.min() >= 0 and score.max() <= 1:
            return (score >= 0.5).astype(float).where(score.notna()).rename("hit")
    return pd.Series(np.nan, index=trials.index, name="hit", dtype="float64")


def lengths(trials: pd.DataFrame) -> pd.Series:
    """Prompt length in tokens: as the endpoint counted it, else as it was wished; NaN where neither is known."""
    counted, wished = (
        pd.to_numeric(column(trials, name), errors="coerce").astype("float64")
        for name in ("prompt_tokens", "target_tokens")
    )
    return counted.fillna(wished).rename("length")


def column(trials: pd.DataFrame, name: str, default: Any = np.nan) -> pd.Series:
    """A column of the table, or a column of `default` when the table does not have it."""
    if name in trials.columns:
        return trials[name]
    return pd.Series(default, index=trials.index, name=name, dtype="float64" if default is np.nan else "object")


def texts(trials: pd.DataFrame, name: str) -> pd.Series:
    """A column as text, "" where it is missing; a column in which nothing stands is read as numbers, whatever it is."""
    return column(trials, name, "").astype("object").fillna("").astype(str)


def concat(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Several tables of trials as one: the union of their columns; of rows with one `trial_id` the last is kept."""
    tables = [table for table in tables if len(table)]
    if not tables:
        return pd.DataFrame(columns=list(COLUMNS))
    notes = [note for table in tables for note in table.attrs.get("notes", [])]
    plain = []
    for table in tables:  # attrs may hold dicts that pandas can not compare
        table = table.copy()
        table.attrs = {}
        plain.append(table.dropna(axis="columns", how="all"))
    whole = pd.concat(plain, ignore_index=True)
    if "trial_id" in whole.columns:
        repeated = whole["trial_id"].notna() & whole["trial_id"].duplicated(keep="last")
        whole = whole[~repeated].reset_index(drop=True)
    whole.attrs["notes"] = notes
    return whole


def _number(cell: Any) -> Any:
    return None if isinstance(cell, int) and abs(cell) > 2**1000 else cell  # no float holds it


def _normal(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    names = [str(name).strip().lower().replace(" ", "_") for name in frame.columns]
    taken = set(names)
    for position, name in enumerate(names):
        alias = ALIASES.get(name)
        if alias and alias not in taken:
            notes.append(f"column {name!r} was read as {alias!r}")
            names[position] = alias
            taken.add(alias)
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"two columns have the name {doubles[0]!r}; rename one")
    frame = frame.set_axis(names, axis="columns").reset_index(drop=True)
    for name in sorted(NUMERIC & set(names)):
        before = frame[name]
        if before.dtype == object:
            before = before.map(_number)
        number = pd.to_numeric(before, errors="coerce").astype("float64")
        number = number.where(np.isfinite(number))
        lost = before.notna() & number.isna()
        if lost.any() and name not in FRACTIONS:  # 3,000 tokens
            bare = before[lost].astype(str).str.strip()
            bare = bare.where(bare.str.fullmatch(r"\d{1,3}(,\d{3})+")).str.replace(",", "")
            number = number.fillna(pd.to_numeric(bare, errors="coerce"))
        lost = frame[name].notna() & number.isna()
        if lost.any():
            first = int(np.flatnonzero(lost.to_numpy())[0])
            notes.append(
                f"{int(lost.sum())} cells of {name!r} are not numbers and count as missing (first: row {first + 1})"
            )
        frame[name] = number
    if "position" in names and "depth" not in names:
        frame = _placed(frame, notes)
    if "depth" in frame and 1 < frame["depth"].max() <= 100:
        frame["depth"] = frame["depth"] / 100
        notes.append("depths above 1 were read as per cent")
    if "score" in names:
        frame["score"] = _shares(frame["score"], notes)
    if "outcome" in names:
        frame["outcome"] = _outcomes(frame["outcome"], notes)
    if "time" in names and frame["time"].map(lambda cell: isinstance(cell, int | float) and cell == cell).any():
        frame["time"] = frame["time"].map(_time)
    return frame


def _placed(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """A `position` is a depth if all are shares or reach from per cent to 100, a token where prompts are that long."""
    place, length = pd.to_numeric(frame["position"], errors="coerce"), lengths(frame)
    if place.notna().any() and place.min() >= 0 and (place.max() <= 1 or place.max() == 100):
        name = "depth"
    elif place.max() > 100 and (place <= length)[place.notna()].all():
        name = "needle_token"
    else:
        notes.append("'position' is neither a share, nor per cent, nor a token's number, and was not read as a depth")
        return frame
    notes.append(f"column 'position' was read as {name!r}")
    return frame.assign(**{name: place.astype("float64")})


def _shares(score: pd.Series, notes: list[str]) -> pd.Series:
    low, high = score.min(), score.max()
    if high <= 1 or low < 0 or high > 100:
        if high > 1:
            notes.append(f"scores between {low:g} and {high:g} are no shares, and were not read")
        return score if high <= 1 else score * np.nan
    if high > 10:
        notes.append("scores of 0 to 100 were read as per cent; a hit is at least 50")
        return score / 100
    if low >= 1:
        notes.append("scores of 1 to 10 were read as shares from 0 to 1; a hit is at least 5.5")
        return (score - 1) / 9
    notes.append("scores of 0 to 10 were read as shares; a hit is at least 5")
    return score / 10


def _time(cell: Any) -> Any:
    """Seconds or milliseconds since 1970 as our own text, so that times of both kinds can be ordered."""
    if isinstance(cell, int | float) and cell == cell:
        seconds = cell / 1000 if cell > 1e11 else cell
        if 1e8 < seconds < 1e10:
            return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
        return f"{cell:020.6f}" if abs(cell) < 1e15 else None
    return cell


def _judged(frame: pd.DataFrame, name: str, notes: list[str]) -> pd.DataFrame:
    """Answers graded where nobody did; grades held against the answers beside them; equal rows once."""
    told = [column for column in ("outcome", "score") if column in frame and frame[column].notna().any()]
    both = {"expected", "answer"} <= set(frame.columns)
    if len(frame) and not told and not both:
        raise ValueError(f"{name} has the columns {', '.join(map(str, frame.columns[:12]))}; {tables.WRITE}")
    if both:
        wrong = hits(frame) == 0 if told else pd.Series(True, index=frame.index)
        if "outcome" in told:  # a kind of miss is our own grade, which has looked
            wrong &= ~frame["outcome"].isin(OUTCOMES)
        ours = tables.graded(zip(frame["expected"][wrong], frame["answer"][wrong], strict=True))
        kinds = pd.Series([kind for kind, _ in ours], index=frame.index[wrong], dtype="object").reindex(frame.index)
        if not told:
            frame["outcome"] = kinds
            notes.append(f"nobody had graded the answers: {int(kinds.notna().sum())} were graded here")
        else:
            inside = pd.Series([holds for _, holds in ours], index=frame.index[wrong], dtype="object")
            if inside.any():
                frame["answer_holds_value"] = inside.reindex(frame.index, fill_value=False).astype(bool)
                notes.append(f"{int(inside.sum())} answers graded wrong hold the expected value")
        frame["expected"] = frame["expected"].map(
            lambda x: "; ".join(map(str, x)) if isinstance(x, list | tuple) else x
        )
    single = {"trial_id", "time", "seed", "question", "expected", "answer", "latency_s", "ttft_s"} & set(frame.columns)
    named = "trial_id" in frame and frame["trial_id"].notna().all() and frame["trial_id"].is_unique
    if not named and any(frame[column].notna().any() for column in single):
        equal = frame.astype(str).duplicated()
        if equal.any():
            notes.append(f"{int(equal.sum())} rows equal another in every cell; each counts once")
            frame = frame[~equal].reset_index(drop=True)
    return frame


def _outcomes(outcome: pd.Series, notes: list[str]) -> pd.Series:
    def mapped(cell: Any) -> Any:
        if cell is None or (isinstance(cell, float) and np.isnan(cell)):
            return None
        word = str(cell).strip().lower()
        if word in OUTCOMES:
            return word
        if word in HIT_WORDS:
            return "exact"
        if word in MISS_WORDS:
            return "miss"
        return "transport" if word in TRANSPORT_WORDS else None

    result = outcome.map(mapped).astype("object")
    unknown = outcome.notna() & result.isna()
    if unknown.any():
        word = str(outcome[unknown].iloc[0])[:40]
        notes.append(
            f"{int(unknown.sum())} outcomes have an unknown name (such as {word!r}) and count as no measurement"
        )
    if (result == "miss").any():
        notes.append("misses without a kind stay 'miss': how the answers were wrong is not known")
    return result
