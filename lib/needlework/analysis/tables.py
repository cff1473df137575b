"""Tables as files and other tools have them: rows in our columns, or one sentence that says what to write.

Read are delimited text (comma, semicolon, tab; UTF-8 or UTF-16), JSON, JSON lines, parquet; as whole tools write them:
predictions of RULER and LongBench, samples of lm-evaluation-harness, logs of inspect_ai, results of
needle-in-a-haystack. Expected values are a text, a list (one of them suffices) or a tuple (all of them are asked for).
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

WRITE = "write one row a request: target_tokens (or prompt_tokens), depth, expected and answer, or an outcome or score"
INSPECT = {"C": "exact", "I": "miss", "N": "miss"}  # inspect_ai's correct, incorrect, no answer; partial is a score


def read_file(path: Path, notes: list[str]) -> pd.DataFrame:
    """The table in a file, its columns as they are there. Raises ValueError, naming the line where there is one."""
    suffix = path.suffix.lower()
    if suffix in {".csv", ".tsv", ".txt"}:
        return _delimited(path, notes)
    if suffix in {".jsonl", ".ndjson"}:
        return _objects(json_lines(path, forgive_torn=False)[0], path, notes)
    if suffix in {".json", ".eval"}:
        return _objects(_json(path), path, notes)
    if suffix in {".parquet", ".pq"}:
        try:
            table = pd.read_parquet(path)
        except Exception as error:  # pyarrow raises its own kinds
            raise ValueError(f"{path.name} is not a parquet table: {str(error)[:120]}") from None
        return table.reset_index() if any(table.index.names) else table
    kind = repr(suffix or "(no suffix)")
    raise ValueError(f"{path.name}: unknown kind of table {kind}; use .csv, .tsv, .jsonl, .json or .parquet")


# ---- delimited text --------------------------------------------------------------------------------------------------


def _delimited(path: Path, notes: list[str]) -> pd.DataFrame:
    raw = path.read_bytes()
    wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = raw.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        what = "UTF-16" if wide else "UTF-8"
        raise ValueError(f"{path.name} is not {what} text (byte {error.start}); convert it first") from None
    if text.startswith("sep="):  # a spreadsheet's own hint
        text = text.partition("\n")[2]
    first = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    separator = max(",;\t", key=lambda mark: (first.count(mark), mark == ("," if path.suffix == ".csv" else "\t")))
    if not first.strip():
        raise ValueError(f"{path.name} is empty; the first line must name the columns")
    table = _arrow(text, separator)
    if table is None:
        table = _checked(path.name, text, separator)
    if separator == ";":
        notes.append("columns are separated by semicolons; a comma in a number is read as its decimal point")
        for name in table.columns:
            marks = table[name].astype("string").str.fullmatch(r"\s*-?[\d.]*,\d+\s*")
            if marks.fillna(False).any():
                pointed = table[name].astype("string").str.replace(".", "", regex=False).str.replace(",", ".")
                table[name] = pointed.where(marks.fillna(False), table[name]).astype("object")
    return table


def _arrow(text: str, separator: str) -> pd.DataFrame | None:
    """The table read by pyarrow, every cell as text; None where a line does not fit, which `_checked` will name."""
    import pyarrow
    from pyarrow import csv as fast

    names = next(csv.reader(io.StringIO(text), delimiter=separator), [])
    try:
        table = fast.read_csv(
            pyarrow.py_buffer(text.encode()),
            parse_options=fast.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=fast.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), null_values=[""], strings_can_be_null=True
            ),
        )
    except (pyarrow.ArrowException, ValueError):
        return None
    return table.to_pandas().astype("object").where(lambda cell: cell.notna(), None)


def _checked(name: str, text: str, separator: str) -> pd.DataFrame:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = []
    try:
        header = next(reader)
        for row in filter(None, reader):
            if len(row) != len(header):
                raise ValueError(
                    f"{name} line {reader.line_num} has {len(row)} fields, the header has {len(header)}; mend that line"
                )
            rows.append([cell or None for cell in row])
    except csv.Error as error:
        raise ValueError(f"{name} line {reader.line_num} is not valid CSV: {error}") from None
    return pd.DataFrame(rows, columns=header, dtype="object")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def json_lines(path: Path, *, forgive_torn: bool) -> tuple[list[dict], str | None]:
    """The objects of a file, one a line, and its torn last line where that is forgiven."""
    rows: list[dict] = []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
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


def _json(path: Path) -> list[dict]:
    """The objects of a JSON file: a list, or one list under any name; a log of inspect_ai."""
    if path.suffix.lower() == ".eval":
        try:
            from inspect_ai.log import read_eval_log
        except ImportError:
            told = (
                "install inspect_ai, whose own reader is used, or save the log as JSON (inspect log convert --to json)"
            )
            raise ValueError(f"{path.name} is a log of inspect_ai; {told}") from None
        try:
            data = read_eval_log(str(path)).model_dump(mode="json")
        except Exception as error:  # whatever its reader finds in a broken file
            raise ValueError(f"{path.name} is no log that inspect_ai reads: {str(error)[:120]}") from None
    else:
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is not JSON: {str(error)[:120]}") from None
    if isinstance(data, dict) and isinstance(data.get("results"), dict):
        raise ValueError(
            f"{path.name} holds a share for each task, not the requests; lm-evaluation-harness writes them with "
            f"--log_samples, else {WRITE}"
        )
    if isinstance(data, dict):  # {"trials": [...]} or one list under any name
        lists = [value for value in data.values() if isinstance(value, list)]
        data = data.get("trials", data.get("samples", lists[0] if len(lists) == 1 else None))
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise ValueError(f"{path.name} must hold a list of objects, one for each trial; {WRITE}")
    return [_spelled(row) for row in data]


# ---- what other tools call things ------------------------------------------------------------------------------------


def _objects(rows: list[dict], path: Path, notes: list[str]) -> pd.DataFrame:
    for tool, keys, take in TOOLS:
        if rows and all(keys <= row.keys() for row in rows):
            notes.append(f"{path.name} was read as {tool}")
            return pd.DataFrame([take(row) for row in rows])
    return pd.DataFrame(rows)


def _ruler(row: Mapping[str, Any]) -> dict[str, Any]:
    wanted = row["outputs"] if isinstance(row["outputs"], list) else [row["outputs"]]
    return {"target_tokens": row.get("length"), "expected": tuple(map(str, wanted)), "answer": _text(row["pred"])}


def _longbench(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"target_tokens": row.get("length"), "expected": row["answers"], "answer": _text(row["pred"])}


def _longbench_choice(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("length", "difficulty", "domain") if key in row}
    return {**kept, "expected": row["answer"], "answer": _text(row["pred"]), "outcome": row["judge"]}


def _lm_eval(row: Mapping[str, Any]) -> dict[str, Any]:
    doc = row["doc"] if isinstance(row["doc"], dict) else {}
    target = row["target"]
    if isinstance(target, str) and target.startswith(("[", "(")):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            target = [str(item) for item in ast.literal_eval(target)]
    answer = row["filtered_resps"]
    while isinstance(answer, list | tuple) and answer:
        answer = answer[0]
    told = row.get("metrics")
    scores = [row[name] for name in told if row.get(name) not in (None, -1)] if isinstance(told, list) else []
    length = doc.get("max_length", doc.get("length"))
    out = {"target_tokens": length, "depth": doc.get("depth"), "expected": target, "answer": _text(answer)}
    return {key: value for key, value in out.items() if value is not None} | ({"score": scores[0]} if scores else {})


def _inspect(row: Mapping[str, Any]) -> dict[str, Any]:
    output = row["output"] if isinstance(row["output"], dict) else {}
    out: dict[str, Any] = dict(row.get("metadata") or {})
    scores = list((row.get("scores") or {}).values())
    value = scores[0].get("value") if scores and isinstance(scores[0], dict) else None
    choices = output.get("choices")
    out |= {"trial_id": f"{row['id']}.{row['epoch']}", "expected": row["target"]}
    out["answer"] = _text(output.get("completion", ""))
    out["prompt_tokens"] = (output.get("usage") or {}).get("input_tokens")
    out["finish_reason"] = choices[0].get("stop_reason") if choices else None
    if row.get("error"):
        out["outcome"] = "transport"
    elif isinstance(value, str) and value in INSPECT:
        out["outcome"] = INSPECT[value]
    elif isinstance(value, int | float | bool):
        out["score"] = float(value)
    return out


def _needle(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("needle", "model_response", "score")}
    score = row["score"]
    if isinstance(score, int) and not isinstance(score, bool):  # 1, 3, 5, 7, 10: its judge's rubric
        score = (score - 1) / 9 if 1 <= score <= 10 else score
    return {**kept, "expected": row["needle"], "answer": _text(row["model_response"]), "score": score}


def _text(cell: Any) -> str:
    return cell if isinstance(cell, str) else "" if cell is None else json.dumps(cell, ensure_ascii=False)


TOOLS: tuple[tuple[str, set[str], Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
    ("predictions of RULER", {"pred", "outputs"}, _ruler),
    ("predictions of LongBench", {"pred", "answers"}, _longbench),
    ("results of LongBench v2", {"pred", "answer", "judge"}, _longbench_choice),
    ("samples of lm-evaluation-harness", {"doc", "target", "filtered_resps"}, _lm_eval),
    ("a log of inspect_ai", {"id", "epoch", "target", "output"}, _inspect),
    ("results of needle-in-a-haystack, scores of 1 to 10 as shares", {"needle", "model_response", "score"}, _needle),
)


# ---- grades ----------------------------------------------------------------------------------------------------------


def graded(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str | None, bool]]:
    """(outcome, whether the answer holds what was expected) for pairs of expected value and answer, as our own probes
    grade; (None, False) where one of the two is missing."""
    from needlework.probes.bench.grade import grade, holds, stands
    from needlework.serving import Reply

    known: dict[tuple[Any, str], tuple[str | None, bool]] = {}
    out: list[tuple[str | None, bool]] = []
    for expected, answer in pairs:
        wanted = tuple(map(str, expected)) if isinstance(expected, list | tuple) else (str(expected),)
        if not isinstance(answer, str) or expected is None or expected != expected or not any(wanted):
            out.append((None, False))
            continue
        key = (isinstance(expected, tuple), *wanted), answer
        if key not in known:
            several = isinstance(expected, tuple) and len(wanted) > 1  # then a list of values is no list of guesses
            inside = [(stands if several else holds)(answer, value.strip()) for value in wanted]
            enough = all(inside) if isinstance(expected, tuple) else any(inside)
            missing = wanted[inside.index(False)] if False in inside else wanted[0]
            known[key] = ("exact", True) if enough else (grade(Reply(answer), missing).outcome, False)
        out.append(known[key])
    return out
