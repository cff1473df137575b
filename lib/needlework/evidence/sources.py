"""The source files that came: which, how large, how old, and what differs from the public release."""

from __future__ import annotations

import difflib
import hashlib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from needlework.evidence.collect import Collection

if TYPE_CHECKING:
    import pandas as pd  # half a second, which redacting does without


@dataclass(frozen=True)
class SourceComparison:
    """A deployed source file against the public release: digests, line counts, and a bounded unified diff."""

    name: str
    sha256: str
    release_sha256: str
    added: int
    removed: int
    diff: str

    @property
    def same(self) -> bool:
        return self.sha256 == self.release_sha256

    def __str__(self) -> str:
        if self.same:
            return f"{self.name}: identical to the release (sha256 {self.sha256[:12]})"
        return f"{self.name}: differs from the release, {self.added} lines added and {self.removed} removed"

    def _repr_html_(self) -> str:
        diff = f"<pre>{html.escape(self.diff)}</pre>" if self.diff else ""
        return f"<p>{html.escape(str(self))}</p>{diff}"


def compare_source(name: str, deployed: str, release: str, max_diff_lines: int = 400) -> SourceComparison:
    """Compare two texts of one file. Digests are of the UTF-8 text as given."""
    lines = list(
        difflib.unified_diff(release.splitlines(), deployed.splitlines(), "release", "deployed", lineterm="", n=2)
    )
    body = [line for line in lines if not line.startswith(("---", "+++"))]
    added, removed = (sum(line.startswith(sign) for line in body) for sign in "+-")
    shown = "\n".join(line[:300] for line in lines[:max_diff_lines])
    digest = [hashlib.sha256(text.encode()).hexdigest() for text in (deployed, release)]
    return SourceComparison(name, digest[0], digest[1], added, removed, shown)


def source_files(collection: Collection) -> pd.DataFrame:
    """One row per file asked for: host, role, path, state, bytes (on the host), modified (UTC), sha256 (as the host
    gave it, before redaction)."""
    import pandas as pd

    rows = []
    for item in collection.items:
        kind, _, path = item["item"].partition(":")
        if kind != "stat" or not path:
            continue
        where = (item["host"], item["role"])
        size, _, seconds = collection.text(*where, item["item"]).partition(" ")
        known = size.isdigit() and seconds.strip().isdigit() and len(seconds.strip()) <= 11
        modified = pd.Timestamp(int(seconds), unit="s").strftime("%Y-%m-%d %H:%M") if known else ""
        digest = collection.text(*where, f"sha256:{path}")[:64]
        rows.append((*where, path, item["state"], int(size) if known else None, modified, digest))
    table = pd.DataFrame(rows, columns=["host", "role", "path", "state", "bytes", "modified", "sha256"])
    return table.astype({"bytes": "Int64"})


def compare_sources(collection: Collection, release: Mapping[str, str], folder: str | Path) -> list[SourceComparison]:
    """Each file name of `release` (name -> path of the public copy, below `folder`) against what was collected under
    that name, one comparison per different content. Raises ValueError when a public copy is missing."""
    found = []
    for name, place in sorted(release.items()):
        public = Path(folder) / place
        if not public.resolve().is_relative_to(Path(folder).resolve()) or not public.is_file():
            raise ValueError(f"the public copy of {name[:80]!r} is not in the incident's folder; see [release]")
        texts = {
            text: role
            for (_, role, item), text in collection.texts.items()
            if item.startswith("file:") and item.rsplit("/", 1)[-1] == name
        }
        found += [compare_source(name, text, public.read_text(encoding="utf-8")) for text in texts]
    return found
