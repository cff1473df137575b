"""Where an incident lies: `data/incidents/<name>/`, and the few files that a notebook opens in it."""

from __future__ import annotations

import html
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework.probes.bench.journal import UNFINISHED

DEFAULT = "context-loss"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def root() -> Path:
    """The workbook's folder (the one with `notebooks/` and `data/`): NEEDLEWORK_ROOT, this checkout, or above here."""
    if named := os.environ.get("NEEDLEWORK_ROOT"):
        return Path(named)
    here = Path(__file__).resolve().parents[3]
    for folder in (here, Path.cwd(), *Path.cwd().parents):
        if (folder / "notebooks" / "src").is_dir():
            return folder
    raise RuntimeError("no notebooks/src folder here or above; start in a clone of the workbook or set NEEDLEWORK_ROOT")


@dataclass(frozen=True)
class Incident:
    """Paths of one incident bundle; a path may not exist yet (`.has("runs")` says)."""

    name: str
    path: Path

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
        found = (p.parent for p in self.runs.rglob("trials.jsonl"))
        return sorted(str(p.relative_to(self.runs)) for p in found if not p.name.endswith(UNFINISHED))

    @property
    def settings(self) -> dict[str, Any]:
        """incident.toml as a dictionary, empty when there is none."""
        try:
            found = tomllib.loads(self.toml.read_text("utf-8")) if self.toml.is_file() else {}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"incident {self.name}: incident.toml is not valid TOML: {str(error)[:200]}") from None
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


def names() -> list[str]:
    """Names of the incidents under data/incidents, sorted."""
    folder = root() / "data" / "incidents"
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)) if folder.is_dir() else []


def incident(name: str | None = None) -> Incident:
    """The incident of this name, else of NEEDLEWORK_INCIDENT, else `context-loss`.

    Raises ValueError with the known names when the folder does not exist or the name is not a plain slug.
    """
    name = name or os.environ.get("NEEDLEWORK_INCIDENT") or DEFAULT
    path = root() / "data" / "incidents" / name
    if not _NAME.fullmatch(name) or not path.is_dir():
        known = ", ".join(names()) or "none yet"
        raise ValueError(f"no incident {name[:64]!r} under data/incidents; known are: {known}")
    return Incident(name, path)
