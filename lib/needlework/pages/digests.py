"""Digests of pages, taken where they were written, and what they prove about a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .inspect import Marks, entry_bytes
from .io import ENTRY_HEX, PAGE_HEX
from .layout import Layout
from .layouts import layout_of


def page_digests(
    raw: Tensor, layout: str | Layout, page_tokens: int = 64, live: Tensor | None = None, *, entries: bool = False
) -> list[str]:
    """One 16-digit digest a page over its live entries' bytes (no padding): what to save beside a dump.

    With `entries`, four digits for each entry follow it, and `diagnose` can tell a few changed bytes from foreign
    content.
    """
    layout = layout_of(layout)
    content = entry_bytes(raw, layout, page_tokens)
    if live is not None:
        content = content * live[..., None]
    content = content.contiguous().cpu()
    out = [hashlib.blake2b(page.numpy().tobytes(), digest_size=PAGE_HEX // 2).hexdigest() for page in content]
    if not entries:
        return out
    each = ["".join(_entry_digest(entry) for entry in page) for page in content]
    return [page + rest for page, rest in zip(out, each, strict=True)]


def _entry_digest(entry: Tensor) -> str:
    return hashlib.blake2b(entry.numpy().tobytes(), digest_size=ENTRY_HEX // 2).hexdigest()


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """First and last index of each run of True in a bool [n]."""
    edge = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    starts, ends = (edge == 1).nonzero().flatten().tolist(), (edge == -1).nonzero().flatten().tolist()
    return [(a, b - 1) for a, b in zip(starts, ends, strict=True)]


def from_digests(
    settled: Tensor, raw: Tensor, layout: Layout, page_tokens: int, live: Tensor, facts: Marks,
    digests: Sequence[str] | None,
) -> Iterator[tuple]:  # fmt: skip
    """(name, page, detail[, first slot, last slot]) for each page that is not the recorded one; it becomes settled."""
    if digests is None:
        return
    wanted = [digest[:PAGE_HEX] for digest in digests]
    found = page_digests(raw, layout, page_tokens, live)
    where = {digest: page for page, digest in enumerate(wanted)}
    for page, digest in enumerate(found):
        if digest == wanted[page] or settled[page] or facts.empty[page][live[page]].any():
            continue
        origin = where.get(digest)
        if origin is None:
            if not bool(facts.lawful[page][live[page]].all()):
                continue  # damaged rather than foreign: the entries will say how
            changed = _changed(raw[page : page + 1], layout, page_tokens, live[page], digests[page][PAGE_HEX:])
            if changed is None:
                yield "stale", page, "or changed in place: its digest is not the one recorded and no other page's"
            elif 2 * int(changed.sum()) > int(live[page].sum()):
                yield (
                    "stale",
                    page,
                    f"{int(changed.sum())} of {int(live[page].sum())} entries are not the recorded ones",
                )
            else:
                for first, last in runs(changed):
                    yield "changed", page, "", first, last
        elif found[origin] == wanted[page]:
            yield "swapped-pages", page, f"it holds page {origin} and page {origin} holds it"
        else:
            yield "repeated-page", page, f"it holds page {origin}"
        settled[page] = True


def _changed(page: Tensor, layout: Layout, page_tokens: int, live: Tensor, recorded: str) -> Tensor | None:
    """bool [page_tokens]: live entries that are not the recorded ones; None where entries were not recorded."""
    if len(recorded) != ENTRY_HEX * page_tokens:
        return None
    content = entry_bytes(page, layout, page_tokens)[0].contiguous()
    differs = [
        bool(live[slot]) and _entry_digest(content[slot]) != recorded[ENTRY_HEX * slot : ENTRY_HEX * (slot + 1)]
        for slot in range(page_tokens)
    ]
    return torch.tensor(differs)
