"""Faults of schedule, cache and page lifetimes."""

from __future__ import annotations

from typing import Any

import torch

from .registry import fault


@fault(
    "F08",
    strengths={"mild": {"after": 3}, "default": {"after": 1}, "severe": {"after": 1}},
    after=1,
)
def index_rebuilt_each_pass(engine: Any, after: int) -> None:
    """The index pool of a request is built anew by each forward pass from pass `after` on: rows of earlier chunks are
    gone. Above the budget of the selection only what stands in the last chunk can be found."""

    def rebuild(_: None, *, seq: Any, start: int, end: int) -> None:
        if seq.passes >= after and start < seq.prompt_tokens:  # also a last chunk of one token is a pass
            pages = seq.full[: start // engine.geometry.page_tokens]
            for name in engine.pools():
                if name.startswith("c4_index.") and pages:
                    engine.pool(name)[pages] = 0

    engine.hooks.install("pass_begins", rebuild)


@fault(
    "F09",
    strengths={"mild": {"pages": 1}, "default": {"pages": 2}, "severe": {"pages": 2}},
    pages=2,
)
def window_belongs_to_the_slot(engine: Any, pages: int) -> None:
    """Window and compressor state lie in a ring of the request's slot, not in the cached pages: after a hit the ring
    still holds what the slot's previous owner left there. The first request is right, its repetition is not; a suffix
    longer than the window heals."""

    def stale(_: None, *, seq: Any) -> None:
        for page in sorted(seq.swa)[-pages:]:
            engine._drop_window(seq, page)
            seq.swa[page] = engine.cache.take_swa()

    engine.hooks.install("restored", stale)


@fault(
    "F10",
    strengths={"mild": {"pages": 4}, "default": {"pages": 64}, "severe": {"pages": 512}},
    pages=64,
)
def tree_keeps_freed_pages(engine: Any, pages: int) -> None:
    """A request that is aborted gives its pages to the free list although the tree has them: the next request writes
    into the same memory, and a later hit on the prefix reads that. Poisoned for everyone until a flush. (Planted as
    one memory under two ids: what the new owner writes also lands in the tree's page.)"""
    shared: dict[int, int] = {}
    freed: list[int] = []

    def abandon(_: None, *, seq: Any, finished: bool, **__: Any) -> None:
        if not finished:
            freed.extend(node.page for node in seq.nodes[:pages])

    def take(page: int, *, group: str, **_: Any) -> int:
        shared.pop(page, None)
        if group == "full" and freed:
            shared[page] = freed.pop(0)
        return page

    def both(slots: torch.Tensor, *, buffer: str, **_: Any) -> torch.Tensor:
        if buffer.startswith("c4_") and shared and len(slots):
            pool = engine.pool(buffer)
            for page in torch.unique(slots[slots >= 0] // engine.geometry.page_entries).tolist():
                if page in shared:
                    pool[shared[page]] = pool[page]
        return slots

    def forget(node: Any) -> Any:
        for page in [page for page, other in shared.items() if other == node.page]:
            del shared[page]
        if node.page in freed:
            freed.remove(node.page)
        return node

    engine.hooks.install("released", abandon)
    engine.hooks.install("page_taken", take)
    engine.hooks.install("stored", both)
    engine.hooks.install("evicted", forget)


@fault(
    "F11",
    strengths={"mild": {"bits": 8}, "default": {"bits": 4}, "severe": {"bits": 2}},
    bits=4,
)
def key_collides(engine: Any, bits: int) -> None:
    """Salt and adapter are no part of the key, and the key keeps `bits` bits of the content's hash: another prompt's
    page is soon taken for one's own, and the answer is fluent and about somebody else's text."""
    engine.cache.key_bits = bits
    engine.hooks.install("cache_identity", lambda identity, **_: "")


@fault(
    "F12",
    strengths={"mild": {"delay": 2}, "default": {"delay": 4}, "severe": {"delay": 6}},
    delay=4,
)
def freed_too_early(engine: Any, delay: int) -> None:
    """An abort frees the pages of a request at once, although the write of its last chunk is still in flight and lands
    `delay` steps later, in pages that by then belong to somebody else. The victim is a bystander."""
    flight: list[list[Any]] = []

    def abort(_: None, *, seq: Any, pages: list[int], finished: bool) -> None:
        late = [*[node.page for node in seq.nodes], *pages]
        if not finished and late:
            flight.append(
                [delay, late, {name: engine.pool(name)[late].clone() for name in engine.pools() if "c4_kv" in name}]
            )
            for node in reversed(seq.nodes):
                if not (node.locks or node.children or node.swa_locks):
                    engine.cache.evict(node)
            engine.full.hasten(late)

    def land(_: None) -> None:
        for write in flight:
            write[0] -= 1
            if write[0] == 0:
                for name, data in write[2].items():
                    engine.pool(name)[write[1]] = data
        flight[:] = [write for write in flight if write[0] > 0]

    engine.hooks.install("released", abort)
    engine.hooks.install("step_begins", land)


@fault(
    "F17",
    strengths={"mild": {"pages": 1}, "default": {"pages": 2}, "severe": {"pages": 8}},
    pages=2,
)
def padding_writes(engine: Any, pages: int) -> None:
    """Batches run in captured sizes of 1, 2, 4, 8, …; the rows that fill up a batch keep the page table of the
    request that sat there last, and each step they write dummy entries into `pages` of its pages. Batches of a
    captured size are right."""
    turn = [0]

    def pad(seqs: list[Any]) -> list[Any]:
        size = 1 if seqs else 0
        while size < len(seqs):
            size *= 2
        for row in range(size - len(seqs)):
            seq = seqs[row % len(seqs)]
            for _ in range(pages):
                page = seq.full[turn[0] % len(seq.full)]
                turn[0] += 1
                for name in engine.pools():
                    if name.startswith("c4_kv"):
                        engine.pool(name)[page] = 0
        return seqs

    engine.hooks.install("batch", pad)
