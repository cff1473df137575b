"""Where an incident lies: `data/incidents/<name>/`, and the few files that a notebook opens in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from needlework.evidence.bundle import Bundle

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


def names() -> list[str]:
    """Names of the incidents under data/incidents, sorted."""
    folder = root() / "data" / "incidents"
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)) if folder.is_dir() else []


def incident(name: str | None = None) -> Bundle:
    """The incident of this name, else of NEEDLEWORK_INCIDENT, else `context-loss`.

    Raises ValueError with the known names when the folder does not exist or the name is not a plain slug.
    """
    name = name or os.environ.get("NEEDLEWORK_INCIDENT") or DEFAULT
    path = root() / "data" / "incidents" / name
    if not _NAME.fullmatch(name) or not path.is_dir():
        known = ", ".join(names()) or "none yet"
        raise ValueError(f"no incident {name[:64]!r} under data/incidents; known are: {known}")
    return Bundle(path)
