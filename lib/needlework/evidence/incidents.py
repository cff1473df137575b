"""Where an incident lies: `data/incidents/<name>/`, and the few files that a notebook opens in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from needlework.evidence.bundle import Bundle

DEFAULT = "context-loss"
ELSEWHERE = "NEEDLEWORK_INCIDENTS"  # environment variable: a second folder with incidents
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


def _folders() -> list[Path]:
    """Where incidents lie: data/incidents, and the folder that `adopt` was given."""
    more = os.environ.get(ELSEWHERE)
    return [root() / "data" / "incidents", *([Path(more)] if more else [])]


def adopt(path: str | Path) -> str:
    """Make a bundle that lies elsewhere known by its folder's name, here and in child processes; returns the name.

    Raises ValueError where the folder is no bundle, or its name is no slug or that of another incident here.
    """
    folder = Path(path).resolve()
    if not (folder / "incident.toml").is_file():
        raise ValueError(f"{folder.name or 'this folder'} is no incident bundle: it holds no incident.toml")
    there = root() / "data" / "incidents"
    if folder.parent == there.resolve():
        return folder.name
    if not _NAME.fullmatch(folder.name) or (there / folder.name).is_dir():
        raise ValueError(
            f"rename the folder {folder.name[:64]!r}: a name in a-z, 0-9, - and _ that no incident here has"
        )
    os.environ[ELSEWHERE] = str(folder.parent)
    return folder.name


def names() -> list[str]:
    """Names of the incidents that are known, sorted."""
    found = [p for folder in _folders() if folder.is_dir() for p in folder.iterdir()]
    return sorted({p.name for p in found if p.is_dir() and _NAME.fullmatch(p.name)})


def incident(name: str | None = None) -> Bundle:
    """The incident of this name, else of NEEDLEWORK_INCIDENT, else `context-loss`.

    Raises ValueError with the known names when the folder does not exist or the name is not a plain slug.
    """
    name = name or os.environ.get("NEEDLEWORK_INCIDENT") or DEFAULT
    path = next((f / name for f in _folders() if (f / name).is_dir()), root() / "data" / "incidents" / name)
    if not _NAME.fullmatch(name) or not path.is_dir():
        known = ", ".join(names()) or "none yet"
        raise ValueError(f"no incident {name[:64]!r} under data/incidents; known are: {known}")
    return Bundle(path)
