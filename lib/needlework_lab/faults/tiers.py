"""Faults of what stands beside the main path: the host tier of the prefix cache, and the draft."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch

from .registry import fault


@fault(
    "F15",
    strengths={
        "mild": {"every": 4},
        "default": {"every": 2},
        "severe": {"every": 1},
    },
    roles=("combined", "prefill"),
    needs={"pages": 65, "host_pages": 512},
    every=2,
    delay_ms=60,
    side="load",
)
def copy_not_awaited(engine: Any, every: int, delay_ms: int, side: str) -> None:
    """One request in `every` that gets pages back from the host tier waits for their windows only: entries and index
    keys that have not landed yet are still the page's previous owner's. Each copy takes `delay_ms` longer (0: as long
    as it takes), as on a busy link, so early pages are right and late ones are not; once the copies have landed the
    same request is right. side=store: an evicted page is handed on before its copy to the host was read, and the host
    keeps what the next owner wrote."""
    if side not in ("load", "store"):
        raise ValueError(f"F15: side must be load or store, not {side[:20]!r}")
    turn, wanted = count(1), side

    def slow(_: None, *, side: str, group: str) -> None:
        if side == wanted and group == "full":
            time.sleep(delay_ms / 1000)

    def hurry(copies: list[Any], *, side: str, **_: Any) -> list[Any]:
        if side == wanted and any(copy.group == "full" for copy in copies) and next(turn) % every == 0:
            return [copy for copy in copies if copy.group != "full"]
        return copies

    engine.hooks.install("tier_copy", slow)
    engine.hooks.install("tier_wait", hurry)


@fault(
    "F19",
    strengths={
        "mild": {"kind": "index"},
        "default": {"kind": "index"},
        "severe": {"kind": "count"},
    },
    needs={"draft_tokens": 4},
    kind="index",
)
def draft_state(engine: Any, kind: str) -> None:
    """kind=index: a prefix hit, or the move from prefill to decode, leaves the draft's index behind. The draft does not
    see the prompt any more, so hardly a draft is accepted, while the target verifies everything and every text is
    right. kind=count: after a partial accept the target keeps one draft too many in its cache, a rejected one: from
    there on it is one token ahead of what it has said, and the answer loses a token."""
    if kind not in ("index", "count"):
        raise ValueError(f"F19: kind must be index or count, not {kind[:20]!r}")

    def leave(names: tuple[str, ...], **_: Any) -> tuple[str, ...]:
        return tuple(name for name in names if name != "draft_index")

    def blind(rows: torch.Tensor, *, seq: Any) -> torch.Tensor:
        return torch.where(torch.arange(len(rows)) < seq.cached, -1, rows)

    def miscount(accepted: int, *, drafts: list[int], **_: Any) -> int:
        return min(accepted + 1, len(drafts))

    if kind == "count":
        engine.hooks.install("accepted", miscount)
    elif engine.role == "prefill":
        engine.hooks.install("chunk_buffers", leave)
    elif engine.role == "combined":
        engine.hooks.install("draft_rows", blind)
