"""What in a report was measured live, read from recordings, or computed: told from each notebook's stamp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# part of a bundle (or of data/) -> how a reader would call it
PARTS = {"runs": "recorded runs", "evidence": "collected evidence", "pages": "page dumps", "kernels": "GPU results"}
# folder of data/ -> whose parts they are, in words
OWNERS = {"incidents": " of incident {}", "checkpoint": " of the checkpoint on {}"}
KINDS = {
    "lab": "the deployment in a box",
    "vllm": "vLLM on this machine",
    "http": "an endpoint",
}


@dataclass(frozen=True)
class Origin:
    """Where one notebook's figures come from: `word` is "live", "recorded", "computed" or "failed"; `text` is one
    sentence."""

    word: str
    text: str


def origin(mark: Mapping[str, Any]) -> Origin | None:
    """The origin by a notebook's stamp. None when it has none, or one that does not say what was measured live."""
    if "failed" in mark:
        return Origin("failed", f"This notebook did not come to its end: it {mark['failed']}")
    if "live" not in mark:
        return None
    live, data = list(mark["live"]), list(mark.get("data", {}))
    found: dict[str, list[str]] = {}
    for path in data:
        if match := re.match(r"data/(?:(incidents|checkpoint)/([^/]+)/)?(runs|evidence|pages|kernels)/", path):
            owner = OWNERS[match[1]].format(match[2]) if match[1] else ""
            if PARTS[match[3]] not in found.setdefault(owner, []):
                found[owner].append(PARTS[match[3]])
    read = "; ".join(", ".join(sorted(parts)) + owner for owner, parts in sorted(found.items(), reverse=True))
    if live:
        also = f" It also reads {read}." if read else ""
        where = " and ".join(KINDS.get(str(kind), "a target") for kind in live)
        return Origin("live", f"Measured live on {where} when this was executed.{also}")
    if any(found.values()) and set(found) != {""}:
        return Origin("recorded", f"Read from {read}; nothing was sent.")
    also = f", beside recorded {read}" if read else ""
    return Origin("computed", f"Computed from inputs made in the notebook{also}; no deployment is asked.")


def overview(origins: Mapping[str, Origin | None]) -> str:
    """One sentence over all notebooks (by number), e.g. "Live: 02, 03. Recorded: 01, 11. Computed: 06."."""
    words: Sequence[tuple[str, str]] = (
        ("live", "Measured live"),
        ("recorded", "Read from recordings"),
        ("computed", "Computed without a deployment"),
        ("failed", "Did not come to its end"),
    )
    parts = []
    for word, phrase in words:
        numbers = [number for number, found in origins.items() if found is not None and found.word == word]
        if numbers:
            parts.append(f"{phrase}: notebook{'s' if numbers[1:] else ''} {', '.join(numbers)}.")
    return " ".join(parts)
