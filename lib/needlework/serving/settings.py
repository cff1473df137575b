"""What is known about a deployment: version, command and the numbers that an edge can be held against, each with the
place where it was read. What nobody said is not known, and is never filled in from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.names import SIZES
from needlework.serving.scrub import plain

if TYPE_CHECKING:
    import pandas as pd

    from needlework.evidence import Bundle
    from needlework.serving.target import Target

NOT_KNOWN = "not known"
MOST = 1 << 40  # larger numbers are no setting


@dataclass(frozen=True)
class Deployed:
    """`config` holds the constants that somebody told (tokens or entries), `source` where each was read."""

    version: str = NOT_KNOWN
    command: tuple[str, ...] = ()
    config: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """Setting, value ("not known" where nobody told it) and where it was read."""
        import pandas as pd

        rows = [("version", self.version, self.source.get("version", "–"))]
        rows += [(n, f"{self.config[n]:,}" if n in self.config else NOT_KNOWN, self.source.get(n, "–")) for n in SIZES]
        return pd.DataFrame(rows, columns=["setting", "value", "read from"])

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False, border=0, escape=True)

    def __str__(self) -> str:
        known = ", ".join(f"{name} {value:,}" for name, value in self.config.items()) or "no constant is known"
        return f"version {self.version}; {known}"


def deployed(bundle: Bundle, target: Target | None = None) -> Deployed:
    """What `target` says of itself, or, without a target, what was collected in the incident's evidence."""
    if target is None or not target.live:
        return _read(_collected(bundle.evidence), _commands(bundle.evidence))
    return _read(_asked(target), ())


def _read(told: Iterable[tuple[str, Mapping[str, Any]]], command: Iterable[str]) -> Deployed:
    config: dict[str, int] = {}
    source: dict[str, str] = {}
    version = NOT_KNOWN
    for where, info in told:
        said = info.get("version")
        if version == NOT_KNOWN and isinstance(said, str) and said.strip():
            version, source["version"] = plain(said.strip(), 80), where
        for name, words in SIZES.items():
            value = next((info[w] for w in words if w in info), None)
            number = isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST
            if number and name not in config:
                config[name], source[name] = int(value), where  # type: ignore[arg-type]
    return Deployed(version, tuple(plain(line, 400) for line in command), config, source)


def _collected(evidence: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for path in sorted(evidence.glob("*/*/http-server_info")):
        try:
            info = json.loads(path.read_text("utf-8", "replace"))
        except ValueError:
            continue
        if isinstance(info, dict):
            yield f"server_info of {path.parent.name}", info


def _commands(evidence: Path) -> list[str]:
    """What each role's unit starts: its ExecStart, or the `exec` line of the script that it names."""
    found: dict[str, None] = {}
    for role in sorted(p for p in evidence.glob("*/*") if p.is_dir()):
        texts = [p.read_text("utf-8", "replace") for p in sorted(role.glob("*.sh"))]
        lines = [x.removeprefix("exec ").strip() for t in texts for x in t.splitlines() if x.startswith("exec ")]
        unit = role / "unit-cat"
        if not lines and unit.is_file():
            text = unit.read_text("utf-8", "replace")
            lines = [x.partition("=")[2].strip() for x in text.splitlines() if x.startswith("ExecStart=")]
        found |= dict.fromkeys(f"{role.name}: {line}" for line in lines[:2])
    return list(found)


def _asked(target: Target) -> Iterable[tuple[str, Mapping[str, Any]]]:
    from needlework.serving import run

    for arm, endpoint in target.arms.items():
        handle = target.deployments.get(arm)
        info = handle.server_info() if handle is not None and hasattr(handle, "server_info") else run(_info(endpoint))
        parts = [v for v in info.values() if isinstance(v, dict)] if "version" not in info else []
        for part in [info, *parts]:  # a pair answers with one part a role
            yield f"server_info of {arm}", part


async def _info(endpoint: Any) -> dict[str, Any]:
    """What a live server tells of itself; an empty mapping when it has no such route."""
    from needlework.serving import TransportError

    found: dict[str, Any] = {}
    for path in ("/server_info", "/get_server_info", "/version", "/v1/models", "/props"):
        try:
            body = await endpoint.get_json(path, timeout_s=10.0)
        except TransportError:
            continue
        body = body["data"][0] if path == "/v1/models" and isinstance(body, dict) and body.get("data") else body
        if path == "/props" and isinstance(body, dict):  # llama.cpp: its build, and the window of one slot
            slot = body.get("default_generation_settings")
            length = slot.get("n_ctx") if isinstance(slot, dict) else None
            body = {"version": body["build_info"], "max_model_len": length} if "build_info" in body else {}
        if isinstance(body, dict):
            found = {**{k: v for k, v in body.items() if k in ("version", "max_model_len") or "info" in path}, **found}
    return found
