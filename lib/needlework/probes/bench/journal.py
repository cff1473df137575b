"""The journal of a run: append-only, content-addressed, safe against SIGKILL.

`run/` holds manifest.json (what was measured and how), trials.jsonl (one line a finished trial), counts.jsonl (token
counts by content hash) and, of an investigation, plan.jsonl (what was decided, each line before it was acted on). A
line is written by one write call after the answer was graded, so a kill loses at most what was in flight; a torn last
line is set aside on the next open. `trial_id` is the hash of what was asked, so a resumed run finds what it already
knows and sends only the rest. Rows of outcome `transport` are kept and retried: of one trial the last row counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.serving.scrub import private

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
WHOLE = "whole"  # in the manifest's state: this instrument came to its end
MOST_BYTES = 1 << 30  # of one file that is read
UNFINISHED = ".part"  # ends the name of a run that is being recorded
FROM_SERVER = ("answer", "error", "finish_reason", "worker", "fingerprint")  # text that somebody else wrote
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
NUMBERS = ("target_tokens", "prompt_tokens", "depth", "needle_token", "cached_tokens", "score", "ttft_s", "latency_s",
           "ordinal", "http_status", "sent_low", "sent_high")  # fmt: skip
TEXTS = ("outcome", "answer", "expected", "arm", "probe", "label", "cache", "wanted_cache", "history", "error",
         "time", "failure", "counted_by")  # fmt: skip


class Journal:
    """One run folder; `path=None` keeps everything in memory, or in the folder that NEEDLEWORK_RECORD names (so does
    `needlework run --record`).

    Raises ValueError when another process writes to the folder, when a line other than the last is malformed (its
    number is named; nothing is changed), or when the manifest is none or was made by a newer schema.
    """

    def __init__(self, path: str | Path | None, *, read_only: bool = False):
        path = path if path is not None else os.environ.get("NEEDLEWORK_RECORD") or None
        self.path = Path(path) if path is not None else None
        self.read_only = read_only
        self.rows: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, int] = {}
        self.records: list[dict[str, Any]] = []  # decisions of an investigation, in order
        self.manifest: dict[str, Any] = {}
        self.lines = 0
        self.torn = 0
        self._files: dict[str, int] = {}
        self._lock: int | None = None
        self._new = False  # the folder was made here
        if self.path is None:
            return
        if read_only:
            if not (self.path / "trials.jsonl").is_file():
                raise FileNotFoundError(f"{self.path.name} is not a recorded run: it holds no trials.jsonl")
        else:
            self._new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
        try:
            self._read()
        except BaseException:
            self.close()  # a refused folder is free again: mend it and go on in the same process
            raise

    def _read(self) -> None:
        assert self.path is not None
        manifest = self.path / "manifest.json"
        if manifest.is_file():
            try:
                self.manifest = json.loads(manifest.read_text(encoding="utf-8"))
            except (ValueError, RecursionError):
                raise ValueError(f"{self.path.name}/manifest.json is not JSON; mend or remove it") from None
            schema = self.manifest.get("schema", SCHEMA) if isinstance(self.manifest, dict) else None
            if not isinstance(schema, int) or not _is_manifest(self.manifest):
                raise ValueError(f"{self.path.name}/manifest.json is not a run's manifest; mend or remove it")
            if schema > SCHEMA:
                raise ValueError(f"{self.path.name} was written by a newer needlework; update this one")
        trials, torn_trial = self._load("trials.jsonl", "trial_id")
        counts, torn_count = self._load("counts.jsonl", "sha")
        self.records, torn_record = self._load("plan.jsonl", "record")
        for row in trials:
            self.rows[row["trial_id"]] = row
            self.lines += 1
        for row in counts:
            if isinstance(row.get("count"), int):
                self.counts[row["sha"]] = row["count"]
        if not self.read_only:  # only now, when all files were read, is a torn end set aside
            self._mend("plan.jsonl", "record", torn_record)
            self._mend("trials.jsonl", "trial_id", torn_trial)
            self._mend("counts.jsonl", "sha", torn_count)

    @property
    def name(self) -> str:
        """The folder's name; a run under way (`10_pd.part`) has the one that it will have when it is whole."""
        return _NAME.sub("-", self.path.name.removesuffix(UNFINISHED)) if self.path is not None else "memory"

    @property
    def salt(self) -> str:
        """What the first lines of this run's prompts are mixed with; "" in a run that was begun without."""
        return str(self.manifest.get("run_salt", ""))

    @property
    def unfinished(self) -> dict[str, str]:
        """Instruments that did not come to their end, and why."""
        state = self.manifest.get("state", {})
        return {name: "interrupted" if why == "begun" else why for name, why in state.items() if why != WHOLE}

    def get(self, trial_id: str, *, final: bool = False) -> dict[str, Any] | None:
        """The row of a finished trial. A `transport` row is not finished, unless `final` (replay) takes it as it is."""
        row = self.rows.get(trial_id)
        return row if row is not None and (final or row.get("outcome") != "transport") else None

    def append(self, row: dict[str, Any]) -> None:
        """Add one trial, without the secrets that a server may have put into it; on disk before this returns."""
        expected = row.get("expected") or ""
        for name in FROM_SERVER:
            if isinstance(said := row.get(name), str) and said.strip() != expected:
                row = row | {name: private(said, expected if expected in said else "")}
        self._write("trials.jsonl", row)
        self.rows[row["trial_id"]] = row
        self.lines += 1

    def decide(self, record: dict[str, Any]) -> None:
        """Add a decision (its kind under "record"); on disk before this returns."""
        self._write("plan.jsonl", record)
        self.records.append(record)

    def count(self, sha: str) -> int | None:
        return self.counts.get(sha)

    def add_count(self, sha: str, count: int) -> None:
        if sha not in self.counts:
            self._write("counts.jsonl", {"sha": sha, "count": count})
            self.counts[sha] = count

    def enter(self, arm: str, target: dict[str, Any], address: str = "") -> None:
        """Name what this run measures under `arm`; ValueError when the folder has measured another one.

        address   a short mark of where it is, "" where that may change (a deployment that a notebook starts)
        """
        known = self.manifest.get("targets", {}).get(arm)
        if known and (known.get("engine"), known.get("model")) != (target["engine"], target["model"]):
            raise ValueError(
                f"this run folder measured {known.get('engine')} with model {known.get('model')!r}, not "
                f"{target['engine']} with {target['model']!r}; use another folder"
            )
        if known and self.rows and address and known.get("address", address) != address:
            raise ValueError(
                f"this run folder measured another address ({len(self.rows)} trials); use another folder, or, if it is "
                "the same deployment that has moved, take `address` out of the folder's manifest.json"
            )
        self.note(targets={arm: target | ({"address": address} if address else {})})

    def note(self, **entries: Any) -> None:
        """Merge entries into the manifest (dictionaries one level deep) and write it atomically."""
        merged = dict(self.manifest)
        for name, value in entries.items():
            old = merged.get(name)
            merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        if merged != self.manifest and self.path is not None and not self.read_only:
            merged = {"schema": SCHEMA, **merged}
            text = json.dumps(merged, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
            beside = self.path / ".manifest.part"  # of this writer alone: the folder is locked
            try:
                beside.write_text(text, encoding="utf-8", errors="replace")
                os.replace(beside, self.path / "manifest.json")
            except OSError:
                beside.unlink(missing_ok=True)
                raise
        self.manifest = merged

    def frame(self, ids: list[str] | None = None) -> pd.DataFrame:
        """Trials as a table in the contract's columns; of one trial the last row counts."""
        import pandas as pd

        from needlework.analysis.trials import COLUMNS

        rows = [self.rows[i] for i in ids if i in self.rows] if ids is not None else list(self.rows.values())
        extra = sorted({name for row in rows for name in row} - set(COLUMNS))
        return pd.DataFrame(
            [{name: row.get(name) for name in [*COLUMNS, *extra]} for row in rows], columns=[*COLUMNS, *extra]
        )

    def close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        if self._lock is not None:
            if self._new and self.path is not None and not self.rows and not self.records:
                _take_away(self.path)  # nothing was measured
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- files ----

    def _load(self, name: str, key: str) -> tuple[list[dict[str, Any]], bytes]:
        """The rows of a file (each holds text under `key`), and what stands after its last line break."""
        assert self.path is not None
        file = self.path / name
        if not file.exists():
            return [], b""
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{self.path.name}/{name} is no file that can be read (a pipe, a folder, or over 1 GiB)")
        whole, _, tail = file.read_bytes().rpartition(b"\n")
        rows = []
        lines = whole.split(b"\n") if whole else []
        last = _object(tail)  # the line may be complete and only its line break lost
        if last is not None and isinstance(last.get(key), str):
            lines.append(tail)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _object(line)
            if row is None or not isinstance(row.get(key), str):
                raise ValueError(f"{self.path.name}/{name} line {number} is malformed; mend or remove that line")
            if name == "trials.jsonl" and (wrong := _wrong(row)):
                raise ValueError(f"{self.path.name}/{name} line {number}: {wrong}; mend or remove that line")
            rows.append(row)
        if not tail.strip():
            return rows, b""
        self.torn += 1
        return rows, tail

    def _mend(self, name: str, key: str, tail: bytes) -> None:
        if not tail:
            return
        assert self.path is not None
        file = self.path / name
        if isinstance((_object(tail) or {}).get(key), str):
            with open(file, "ab") as out:
                out.write(b"\n")
            return
        with open(file.with_suffix(".torn"), "ab") as aside:  # kept for whoever wants to look
            aside.write(tail + b"\n")
        with open(file, "rb+") as out:
            out.truncate(file.stat().st_size - len(tail))

    def _write(self, name: str, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self.read_only:
            raise RuntimeError("a recorded run is read only")
        if name not in self._files:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[name] = os.open(self.path / name, flags, 0o644)
        # ASCII only: lone surrogates and every other character of a hostile answer survive as escapes
        data = json.dumps(row, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        whole = os.fstat(self._files[name]).st_size
        try:
            while data:
                data = data[os.write(self._files[name], data) :]
        except OSError:  # a full disk: half a line would spoil the next one
            os.ftruncate(self._files[name], whole)
            raise


def _is_manifest(manifest: dict[str, Any]) -> bool:
    """Are the parts that are read of the kinds that were written?"""
    parts = [manifest.get(name, {}) for name in ("targets", "state", "parameters")]
    return all(isinstance(part, dict) for part in parts) and all(isinstance(t, dict) for t in parts[0].values())


def _take_away(folder: Path) -> None:
    with contextlib.suppress(OSError):  # whatever else lies there stays
        for name in ("manifest.json", ".lock"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _wrong(row: dict[str, Any]) -> str:
    """The first column whose value is not of its kind, in words, or "": a recorded run may come from anybody."""
    for names, kinds, said in ((NUMBERS, (int, float), "a number"), (TEXTS, (str,), "text")):
        for name in names:
            value = row.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                return f"{name} is not {said}"
    return ""


class Recorded:
    """A recorded run with the interface of an endpoint: it answers from the journal and never sends anything."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.journal = Journal(self.path, read_only=True)

    def __repr__(self) -> str:
        return f"Recorded({self.path.name!r}, {len(self.journal.rows)} trials)"


def lock_folder(folder: Path) -> int | None:
    """Takes `folder` for this process alone and returns what holds it: close it with os.close; the system drops it when
    the process dies. None on Windows, which has no such locks: the folder is then the user's to guard.

    Raises ValueError when another process (or another holder in this one) writes there.
    """
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ValueError(f"another process is writing to the run folder {folder.name}; use another folder") from None
    return handle
