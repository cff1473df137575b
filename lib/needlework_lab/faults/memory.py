"""Faults of bytes and addresses: layout, unit, wrap-around, scale, uninitialised memory."""

from __future__ import annotations

from typing import Any

import torch

from .registry import fault


@fault(
    "F01",
    strengths={"mild": {"layers": 1}, "default": {"layers": 2}, "severe": {"layers": 2}},
    layers=2,
)
def interleaved_index_pages(engine: Any, layers: int) -> None:
    """The writer packs each index key with its scale in one record of 132 bytes; the reader expects all codes of a
    page, then all scales. Only the first key of a page lies where both look. Short prompts never score keys and stay
    right."""
    entries = engine.geometry.page_entries
    whole: dict[str, torch.Tensor] = {}

    def interleave(slots: torch.Tensor, *, buffer: str, **_: Any) -> torch.Tensor:
        kind, layer = buffer.split(".")
        if kind == "c4_index" and int(layer) < layers:
            pool = engine.pool(buffer)
            flat = whole.setdefault(buffer, torch.zeros_like(pool))
            for page in torch.unique(slots[slots >= 0] // entries).tolist():
                for offset in (slots[slots // entries == page] % entries).tolist():
                    flat[page, offset * 128 : (offset + 1) * 128] = pool[page, offset * 128 : (offset + 1) * 128]
                    scale = slice(entries * 128 + offset * 4, entries * 128 + offset * 4 + 4)
                    flat[page, scale] = pool[page, scale]
                codes, scales = (
                    flat[page, : entries * 128].view(entries, 128),
                    flat[page, entries * 128 :].view(entries, 4),
                )
                pool[page] = torch.cat((codes, scales), dim=1).flatten()
        return slots

    engine.hooks.install("stored", interleave)


@fault(
    "F02",
    strengths={"mild": {"divisor": 8}, "default": {"divisor": 16}, "severe": {"divisor": 32}},
    divisor=16,
)
def table_in_wrong_unit(engine: Any, divisor: int) -> None:
    """The indexer's table was sized for pages `divisor` times as large, so it has columns for the first part of the
    context only. Keys past that absolute position cannot be selected, whatever the length of the prompt; no index is
    out of bounds."""
    columns = max(1, engine.geometry.max_context // engine.geometry.page_tokens // divisor)

    def cut(table: torch.Tensor, **_: Any) -> torch.Tensor:
        table = table.clone()
        table[:, columns:] = -1
        return table

    engine.hooks.install("index_table", cut)


@fault(
    "F03",
    strengths={"mild": {"percent": 75}, "default": {"percent": 50}, "severe": {"percent": 25}},
    percent=50,
)
def address_wraps(engine: Any, percent: int) -> None:
    """Page id times stride passes the largest number of its type beyond `percent` of the pool, and the read starts
    again at the bottom. What is lost depends on which physical pages the allocator gave, not on length or depth;
    writes are right."""
    limit = max(1, engine.geometry.pages * percent // 100)
    engine.hooks.install("entry_table", lambda table, **_: torch.where(table >= limit, table % limit, table))


@fault(
    "F18",
    strengths={"mild": {"rows": 1}, "default": {"rows": 4}, "severe": {"rows": 64}},
    rows=4,
)
def unwritten_rows_are_read(engine: Any, rows: int) -> None:
    """Fresh pages hold NaN, and the attention reads its list in blocks: holes at its end are filled with entries that
    are not written yet, to be masked by a weight of zero, and zero times NaN is NaN. Lists without holes are right."""
    entries = engine.geometry.page_entries

    def poison(page: int, *, group: str, **_: Any) -> int:
        if group == "full":
            for name in engine.pools():
                if name.startswith("c4_kv"):
                    engine.pool(name)[page] = 0xFF
        return page

    def fill(slots: torch.Tensor, *, seqs: list[Any], **_: Any) -> torch.Tensor:
        slots = slots.clone()
        for row, seq in enumerate(seqs):
            written = seq.computed // engine.geometry.ratio
            tail = seq.full[-1] * entries + torch.arange(written % entries, entries)
            holes = torch.nonzero(slots[row] < 0).flatten()[: min(rows, len(tail))]
            if written // entries == len(seq.full) - 1:
                slots[row, holes] = tail[: len(holes)].to(slots.dtype)
        return slots

    engine.hooks.install("page_taken", poison)
    engine.hooks.install("entry_slots", fill)


@fault(
    "F20",
    strengths={"mild": {"percent": 15}, "default": {"percent": 30}, "severe": {"percent": 60}},
    percent=30,
)
def scale_off_by_one(engine: Any, percent: int) -> None:
    """The exponent of a scale comes out one too small for part of the tiles (a rounding rule that differs near the
    edge of a power of two), so their values are read at half their size. Mild, everywhere, at every length and
    depth."""
    entries = engine.geometry.page_entries
    odd = torch.randint(1, 1 << 30, (4, 112), generator=torch.Generator().manual_seed(20)) * 2 + 1

    def narrow(slots: torch.Tensor, *, buffer: str, **_: Any) -> torch.Tensor:
        if buffer.startswith("c4_kv"):
            pool, live = engine.pool(buffer), slots[slots >= 0]
            page, offset = live // entries, live % entries
            for tile in range(4):  # by content, so that the same values are hit wherever they lie
                content = pool[page[:, None], (offset * 576 + tile * 112)[:, None] + torch.arange(112)].long()
                mixed = (content * odd[tile]).sum(dim=1)
                hit = ((mixed ^ (mixed >> 13)) * 1540483477 >> 17) % 100 < percent
                pool[page[hit], 576 * entries + offset[hit] * 8 + tile] -= 1
        return slots

    engine.hooks.install("stored", narrow)
