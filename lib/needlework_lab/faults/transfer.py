"""Faults of the transfer between prefill and decode."""

from __future__ import annotations

from typing import Any

from .registry import fault


@fault(
    "F14",
    strengths={"mild": {"first_chunks": 2}, "default": {"first_chunks": 1}, "severe": {"first_chunks": 0}},
    roles=("prefill",),
    first_chunks=1,
)
def side_buffer_not_moved(engine: Any, first_chunks: int) -> None:
    """The transfer moves index pages with its first chunks only; entries, window and state of every chunk arrive. On
    the decode side the index rows of later chunks keep what the page held before. While everything fits in the budget
    of the selection nobody looks at them; beyond it only the chunks whose index came along can be selected."""

    def keep(names: tuple[str, ...], *, chunk: Any, **_: Any) -> tuple[str, ...]:
        moved = chunk.index < first_chunks
        return tuple(name for name in names if moved or not name.startswith("c4_index."))

    engine.hooks.install("chunk_buffers", keep)


@fault(
    "F13",
    roles=("prefill",),
    strengths={"mild": {"every": 3}, "default": {"every": 1}, "severe": {"every": 1}},
    every=1,
)
def sent_too_early(engine: Any, every: int) -> None:
    """The transfer reads a chunk's pages without waiting for the event that ends its forward pass. What arrives is
    what the pages held before; only the last chunk, which is awaited for its token, is right. `every`: one chunk in
    so many."""

    def early(_: bool, *, seq: Any, last: bool, **__: Any) -> bool:
        return not last and seq.chunks % every == 0

    engine.hooks.install("announce_early", early)


@fault(
    "F16",
    strengths={"mild": {"every": 8}, "default": {"every": 3}, "severe": {"every": 1}},
    roles=("prefill", "decode"),
    every=3,
)
def failure_swallowed(engine: Any, every: int) -> None:
    """One request in `every` fails to move its pages; the failure is logged and decode goes on with what its pages
    held. HTTP 200, and an answer as if there had been no prompt, or another one."""
    requests: list[str] = []

    def drop(names: tuple[str, ...], *, chunk: Any, **_: Any) -> tuple[str, ...]:
        if chunk.rid not in requests:
            requests.append(chunk.rid)
        return () if requests.index(chunk.rid) % every == every - 1 else names

    engine.hooks.install("chunk_buffers", drop)
    engine.hooks.install("transfer_failed", lambda error, **_: None)
