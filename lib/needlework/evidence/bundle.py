"""The incident bundle: one folder, one zip, checked before it is believed, replayable without a cluster."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import stat
import tempfile
import tomllib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from needlework.evidence import redaction

PARTS = ("incident.toml", "evidence", "runs", "pages", "release", "ledger.json", "digests.json", "README.md")
MAX_FILES = 5_000
MAX_TOTAL_BYTES = 512 << 20
MAX_LISTING_BYTES = 4 << 20
MAX_NAME_CHARS = 300
SAFE_PART = re.compile(r"[\w.+-][\w.+ -]{0,119}", re.ASCII)
BUNDLE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # as `needlework run --incident` takes it
MAX_RATIO = 200  # a real journal or page dump compresses far less
TEXT_SUFFIXES = {"", ".json", ".jsonl", ".toml", ".md", ".txt", ".csv", ".py", ".sh", ".service", ".conf", ".log"}
REQUIRED = {"title": str, "symptom": str, "date": str, "engine": str}


@dataclass(frozen=True)
class Bundle:
    """An incident's folder: its parts, of which any may be missing (`has("runs")`), and whether it can be trusted as
    it is (`problems()`)."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.path.is_dir():
            raise ValueError(f"no incident bundle at {self.path}: the folder does not exist")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def toml(self) -> Path:
        return self.path / "incident.toml"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def pages(self) -> Path:
        return self.path / "pages"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    def has(self, part: str) -> bool:
        """Whether the bundle holds this file or folder, e.g. `has("ledger.json")`."""
        return (self.path / part).exists()

    def run(self, name: str) -> Path:
        """The folder of one recorded run; ValueError names the recorded ones when there is no such run."""
        folder = self.runs / name
        if not (folder / "trials.jsonl").is_file():
            raise ValueError(
                f"incident {self.name} holds no run {name!r}; recorded are: {', '.join(self.run_names) or 'none'}"
            )
        return folder

    @property
    def run_names(self) -> list[str]:
        from needlework.probes.bench.journal import UNFINISHED  # the room above this one

        found = (p.parent for p in self.runs.rglob("trials.jsonl"))
        return sorted(str(p.relative_to(self.runs)) for p in found if not p.name.endswith(UNFINISHED))

    @property
    def settings(self) -> dict[str, Any]:
        """incident.toml as a dictionary, empty when there is none; ValueError when it cannot be read."""
        try:
            found = tomllib.loads(self.toml.read_text("utf-8")) if self.toml.is_file() else {}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"incident {self.name}: incident.toml is not valid TOML: {str(error)[:200]}") from None
        except RecursionError:
            raise ValueError(f"incident {self.name}: incident.toml is not valid TOML: nested too deeply") from None
        for table in ("incident", "lab", "workbook"):
            if not isinstance(found.get(table, {}), dict):
                raise ValueError(f"incident {self.name}: [{table}] in incident.toml must be a table")
        return found

    def load_ledger(self) -> dict[str, Any]:
        """ledger.json as a dictionary, empty when the incident has none yet."""
        return json.loads(self.ledger.read_text("utf-8")) if self.ledger.is_file() else {}

    @property
    def title(self) -> str:
        settings = self.settings
        return str(settings.get("title") or settings.get("incident", {}).get("title") or self.name)

    def __str__(self) -> str:
        parts = [p for p in ("incident.toml", "evidence", "runs", "pages", "ledger.json") if self.has(p)]
        return f"incident {self.name}: {', '.join(parts) or 'nothing recorded yet'}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"

    def files(self) -> list[Path]:
        """Every file of the bundle but the digests and the journals' lock files, sorted by relative path."""
        found = [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]
        left_out = {"digests.json", ".lock"}
        return sorted((p for p in found if p.name not in left_out), key=lambda p: p.relative_to(self.path).as_posix())

    def digests(self) -> dict[str, str]:
        return {p.relative_to(self.path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in self.files()}

    def seal(self) -> None:
        """Write digests.json over all other files, so that a later change shows. Call it last."""
        text = json.dumps({"schema": 1, "sha256": self.digests()}, indent=1) + "\n"
        temporary = self.path / "digests.json.part"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / "digests.json")

    def problems(self) -> list[str]:
        """Everything that is wrong, one sentence each; an empty list means schema, digests and secrecy hold."""
        found = [f"{p.name}: not a part of a bundle" for p in self.path.iterdir() if p.name not in PARTS]
        found += [
            f"{p.relative_to(self.path)}: symbolic links are not allowed"
            for p in self.path.rglob("*")
            if p.is_symlink()
        ]
        try:
            if not self.toml.is_file():
                raise ValueError("incident.toml is missing")
            incident = self.settings.get("incident", {})
            found += [
                f"incident.toml: [incident] lacks {key}"
                for key, kind in REQUIRED.items()
                if not isinstance(incident.get(key), kind)
            ]
        except ValueError as error:
            found.append(str(error))
        found += self._json_problems() + self._digest_problems()
        for path in self.files():
            if path.suffix in TEXT_SUFFIXES:
                leaks = redaction.check(path.read_text(encoding="utf-8", errors="replace"))
                found += [
                    f"{path.relative_to(self.path)}:{leak.line}: holds a {leak.kind}; redact it" for leak in leaks[:5]
                ]
        return found

    def _json_problems(self) -> list[str]:
        found = []
        for path in self.files():
            name = path.relative_to(self.path)
            if path.suffix not in (".json", ".jsonl"):
                continue
            lines = path.read_text(encoding="utf-8", errors="replace")
            for number, line in enumerate(lines.splitlines() if path.suffix == ".jsonl" else [lines], 1):
                try:
                    json.loads(line)
                except (json.JSONDecodeError, RecursionError):
                    found.append(f"{name}: line {number} is not valid JSON")
                    break
        for run in self.path.glob("runs/*"):
            found += [
                f"runs/{run.name}: {need} is missing"
                for need in ("manifest.json", "trials.jsonl")
                if not (run / need).is_file()
            ]
        for dump in self.path.glob("pages/**/*.bin"):
            if not dump.with_suffix(".json").is_file():
                found.append(f"{dump.relative_to(self.path)}: its description (.json) is missing")
        return found

    def _digest_problems(self) -> list[str]:
        try:
            sealed = json.loads((self.path / "digests.json").read_text(encoding="utf-8"))["sha256"]
        except FileNotFoundError:
            return ["digests.json is missing: the bundle was not sealed"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return ["digests.json is damaged"]
        if not isinstance(sealed, dict):
            return ["digests.json is damaged"]
        now = self.digests()
        changed = [
            f"{name}: changed since the bundle was sealed"
            for name in now
            if name in sealed and now[name] != sealed[name]
        ]
        added = [f"{name}: not among the sealed files" for name in now if name not in sealed]
        return changed + added + [f"{name}: sealed, but missing" for name in sealed if name not in now]

    def zip(self, target: str | Path) -> Path:
        """Write one zip, the same bytes for the same content. Refuses when `problems()` finds any."""
        problems = self.problems()
        if problems:
            raise ValueError(
                f"the bundle is not fit to share: {problems[0]}"
                + (f" (and {len(problems) - 1} more)" if problems[1:] else "")
            )
        target = Path(target)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in [*self.files(), self.path / "digests.json"]:
                entry = zipfile.ZipInfo(
                    f"{self.path.name}/{path.relative_to(self.path).as_posix()}", (1980, 1, 1, 0, 0, 0)
                )
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
        return target


def from_run(run: str | Path, out: str | Path) -> Bundle:
    """A sealed bundle at `out` that holds one run folder, with keys and addresses replaced; the run stays as it is.

    Raises ValueError, and leaves nothing behind, where `run` is no run folder, `out` exists, or a secret would be left.
    """
    run, out = Path(run), Path(out)
    kept = [
        run / name for name in ("manifest.json", "trials.jsonl", "counts.jsonl", "plan.jsonl") if (run / name).is_file()
    ]
    if [path.name for path in kept[:2]] != ["manifest.json", "trials.jsonl"]:
        raise ValueError(f"{run.name or run} is no run folder: it needs a manifest.json and a trials.jsonl")
    if out.exists():
        raise ValueError(f"{out.name} already exists; nothing was overwritten")
    texts = {path.name: path.read_text("utf-8") for path in kept}
    days = re.findall(r'"time": ?"(\d{4}-\d\d-\d\d)', texts["trials.jsonl"])
    told = {
        "title": "A deployment that was measured" + (f" on {days[0]}" if days else ""),
        "symptom": "not recorded: this deployment was measured, nobody reported on it",
        "date": days[0] if days else "not recorded", "engine": "not recorded",
    }  # fmt: skip
    lines = ["[incident]", *(f"{key} = {json.dumps(value)}" for key, value in told.items()), "", "[workbook]",
             'target = "recorded"', 'notebooks = ["00_start_here", "11_verdict"]', ""]  # fmt: skip
    folder = out / "runs" / (re.sub(r"[^a-z0-9_-]+", "-", run.resolve().name.lower()).strip("-") or "run")
    folder.mkdir(parents=True)
    try:
        redactor = redaction.Redactor()
        for name, text in texts.items():
            (folder / name).write_text("\n".join(redactor.text(line) for line in text.split("\n")), "utf-8")
        (out / "incident.toml").write_text("\n".join(lines), "utf-8")
        made = Bundle(out)
        made.seal()
        if problems := made.problems():
            raise ValueError(f"this run is not fit to share: {problems[0]}")
    except BaseException:
        shutil.rmtree(out)
        raise
    return made


def unzip(archive: str | Path, folder: str | Path) -> Bundle:
    """Unpack a bundle somebody sent, into `folder/<name>`. Raises ValueError, and leaves nothing behind, when the zip
    would write outside, holds links, is too large, or unpacks to far more than it weighs.
    """
    archive, folder = Path(archive), Path(folder)
    try:
        if archive.stat().st_size > MAX_TOTAL_BYTES or _listing_bytes(archive) > MAX_LISTING_BYTES:
            raise ValueError(f"{archive.name} is refused: that is no incident bundle (too large, or too many entries)")
        opened = zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, OSError):
        raise ValueError(f"{archive.name} is not a readable zip file") from None
    with opened as zipped:
        name = _refuse_hostile(archive.name, zipped.infolist())
        entries = [entry for entry in zipped.infolist() if not entry.is_dir()]
        if (folder / name).exists():
            raise ValueError(f"{name} already exists in the target folder; nothing was overwritten")
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".unzip-", dir=folder))
        try:
            for entry in entries:
                _extract(zipped, entry, scratch)
            os.replace(scratch / name, folder / name)
        except OSError as error:
            raise ValueError(f"{archive.name} could not be unpacked: {error.strerror}") from None
        except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error):
            raise ValueError(
                f"{archive.name} could not be unpacked: an entry is damaged or not as its header says"
            ) from None
        except RuntimeError:
            raise ValueError(f"{archive.name} could not be unpacked: it is encrypted") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Bundle(folder / name)


def _listing_bytes(archive: Path) -> int:
    """Size of the zip's table of contents as its last record states it: a long one fills memory before it is judged."""
    with archive.open("rb") as handle:
        handle.seek(max(0, archive.stat().st_size - (1 << 16) - 22))
        tail = handle.read()
    at = tail.rfind(b"PK\x05\x06")
    return int.from_bytes(tail[at + 12 : at + 16], "little") if at >= 0 else 0


def _refuse_hostile(label: str, entries: list[zipfile.ZipInfo]) -> str:
    tops, seen = set(), set()
    for entry in entries:
        path = PurePosixPath(entry.filename)
        outside = path.is_absolute() or ".." in path.parts or any(sign in entry.filename for sign in ("\\", ":", "\0"))
        if outside:
            raise ValueError(f"{label} is refused: it holds a path that leads outside the folder")
        if len(entry.filename) > MAX_NAME_CHARS or not all(SAFE_PART.fullmatch(part) for part in path.parts):
            raise ValueError(f"{label} is refused: it holds a file name that is too long or has strange characters")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind == stat.S_IFLNK:
            raise ValueError(f"{label} is refused: it holds a symbolic link")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{label} is refused: it holds something that is neither a file nor a folder")
        if str(path).lower() in seen:
            raise ValueError(f"{label} is refused: it holds the same path twice")
        seen.add(str(path).lower())
        if not entry.is_dir():
            tops.add(path.parts[0] if len(path.parts) > 1 else "")
    total, packed = sum(e.file_size for e in entries), sum(e.compress_size for e in entries)
    if len(entries) > MAX_FILES or total > MAX_TOTAL_BYTES or (total > 1 << 20 and total > MAX_RATIO * max(1, packed)):
        size = f"{len(entries):,} files, {total:,} bytes from {packed:,}"
        raise ValueError(f"{label} is refused: that is no incident bundle ({size})")
    if len(tops) != 1 or not BUNDLE_NAME.fullmatch(name := tops.pop()):
        raise ValueError(f"{label} is refused: a bundle is one folder, named after its incident (a-z, 0-9, '-', '_')")
    return name


def _extract(zipped: zipfile.ZipFile, entry: zipfile.ZipInfo, scratch: Path) -> None:
    target = scratch / entry.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    left = entry.file_size  # never trust the header: stop at the promised size
    with zipped.open(entry) as source, target.open("wb") as sink:
        while chunk := source.read(min(1 << 20, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile("an entry is larger than it says")
            sink.write(chunk)
