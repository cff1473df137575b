"""The trial table: one request and its outcome per row, read from a journal or from somebody else's export.

Every analysis takes such a table (a pandas DataFrame). A table from elsewhere may have any subset of `COLUMNS`;
unknown columns are kept, missing ones are absent or null. What was changed on the way in is told in
`frame.attrs["notes"]` (a list of sentences), so that nothing is repaired in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COLUMNS = [
    "trial_id",
    "run",
    "probe",
    "arm",
    "time",
    "target_tokens",
    "prompt_tokens",
    "depth",
    "needle_token",
    "question",
    "expected",
    "answer",
    "outcome",
    "score",
    "finish_reason",
    "completion_tokens",
    "reasoning_tokens",
    "cached_tokens",
    "cache",
    "turn",
    "concurrency",
    "ordinal",
    "ttft_s",
    "latency_s",
    "accept_length",
    "worker",
    "seed",
    "error",
]
OUTCOMES = [
    "exact",
    "near",
    "other_needle",
    "distractor",
    "refusal",
    "empty",
    "cut",
    "reasoning_only",
    "garbage",
    "transport",
]  # only `exact` is a hit
NO_MEASUREMENT = frozenset(
    {"cut", "reasoning_only", "transport"}
)  # the question was never answered: neither hit nor miss

NUMERIC = frozenset(
    [
        "target_tokens",
        "prompt_tokens",
        "depth",
        "needle_token",
        "score",
        "completion_tokens",
        "reasoning_tokens",
        "cached_tokens",
        "turn",
        "concurrency",
        "ordinal",
        "ttft_s",
        "latency_s",
        "accept_length",
        "seed",
    ]
)
# Names that other tools give to our columns. The measured count is never guessed from a wished length.
ALIASES = {
    "context_length": "target_tokens",
    "context_len": "target_tokens",
    "length": "target_tokens",
    "input_tokens": "prompt_tokens",
    "usage.prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "depth_percent": "depth",
    "response": "answer",
    "prediction": "answer",
    "model_response": "answer",
    "reference": "expected",
    "gold": "expected",
    "result": "outcome",
    "correct": "outcome",
    "hit": "outcome",
    "passed": "outcome",
    "ttft": "ttft_s",
    "latency": "latency_s",
}
HIT_WORDS = frozenset(["exact", "hit", "correct", "pass", "passed", "ok", "true", "1", "1.0", "yes", "right"])
MISS_WORDS = frozenset(
    ["miss", "wrong", "incorrect", "fail", "failed", "false", "0", "0.0", "no"]
)  # a miss whose kind nobody recorded
TRANSPORT_WORDS = frozenset(["error", "timeout", "timed_out", "exception", "http_error", "connection"])
LARGEST_BYTES = 512 * 2**20  # a journal of a million trials is about this large


def load_trials(path: str | Path) -> pd.DataFrame:
    """Reads a table of trials: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json`, `.parquet`, or a run folder.

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
        rows, torn = _json_lines(journal, forgive_torn=True)
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
        frame = _normal(_read(path), notes)
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


def _read(path: Path) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix in {".csv", ".tsv", ".txt"}:
        return _delimited(path, "," if suffix == ".csv" else "\t")
    if suffix in {".jsonl", ".ndjson"}:
        return pd.DataFrame(_json_lines(path, forgive_torn=False)[0])
    if suffix == ".json":
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
        if isinstance(data, dict):  # {"trials": [...]} or one list under any name
            lists = [value for value in data.values() if isinstance(value, list)]
            data = data.get("trials", lists[0] if len(lists) == 1 else None)
        if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
            raise ValueError(f"{path.name} must hold a list of objects, one for each trial")
        return pd.DataFrame([_spelled(row) for row in data])
    if suffix in {".parquet", ".pq"}:
        try:
            return pd.read_parquet(path)
        except Exception as error:  # pyarrow raises its own kinds
            raise ValueError(f"{path.name} is not a parquet table: {str(error)[:120]}") from None
    raise ValueError(
        f"{path.name}: unknown kind of table {suffix or '(no suffix)'!r}; use .csv, .tsv, .jsonl, .json or .parquet"
    )


def _delimited(path: Path, separator: str) -> pd.DataFrame:
    import csv

    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = next(reader, None)
            if not header:
                raise ValueError(f"{path.name} is empty; the first line must name the columns")
            rows = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"{path.name} line {reader.line_num} has {len(row)} fields, "
                        f"the header has {len(header)}; mend that line"
                    )
                rows.append([cell or None for cell in row])
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text (byte {error.start}); convert it first") from None
    except csv.Error as error:
        raise ValueError(f"{path.name} line {reader.line_num} is not valid CSV: {error}") from None
    return pd.DataFrame(rows, columns=header, dtype="object")


def _json_lines(path: Path, *, forgive_torn: bool) -> tuple[list[dict], str | None]:
    rows: list[dict] = []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8"))
                problem = None if isinstance(row, dict) else "is not an object"
            except UnicodeDecodeError:
                problem = "is not UTF-8 text"
            except (ValueError, RecursionError):
                problem = "is not JSON"
            if problem is None:
                rows.append(_spelled(row) if b"\\u" in raw else row)
            elif forgive_torn and not raw.endswith(b"\n"):
                return rows, raw[:200].decode("utf-8", "replace")
            else:
                raise ValueError(f"{path.name} line {number} {problem}; mend or remove that line, nothing was loaded")
    return rows, None


def _spelled(row: dict) -> dict:
    """JSON can spell half a surrogate pair, which no table accepts: it becomes a question mark."""

    def whole(cell: Any) -> Any:
        return cell.encode("utf-8", "replace").decode("utf-8") if isinstance(cell, str) else cell

    return {whole(name): whole(cell) for name, cell in row.items()}


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
    for name in NUMERIC & set(names):
        before = frame[name]
        if before.dtype == object:
            before = before.map(_number)
        number = pd.to_numeric(before, errors="coerce").astype("float64")
        number = number.where(np.isfinite(number))
        lost = frame[name].notna() & number.isna()
        if lost.any():
            first = int(np.flatnonzero(lost.to_numpy())[0])
            notes.append(
                f"{int(lost.sum())} cells of {name!r} are not numbers and count as missing (first: row {first + 1})"
            )
        frame[name] = number
    if "depth" in names and 1 < frame["depth"].max() <= 100:
        frame["depth"] = frame["depth"] / 100
        notes.append("depths above 1 were read as per cent")
    if "outcome" in names:
        frame["outcome"] = _outcomes(frame["outcome"], notes)
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
