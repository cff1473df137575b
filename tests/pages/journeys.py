"""Healthy transfers through page tables, and every way in which one loses pages, planted at a random place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from needlework.pages import LAYOUTS, Layout
from torch import Tensor

from . import planting


@dataclass
class Transfer:
    sent: Tensor
    received: Tensor
    layout: Layout
    sent_table: Tensor
    received_table: Tensor
    entries: int
    before: Tensor
    page: int = -1

    def findings(self, compare, **more):
        return compare(
            self.sent, self.received, self.layout, sent_table=self.sent_table, received_table=self.received_table,
            entries=self.entries, **more,
        )  # fmt: skip

    def arrived(self, page: int) -> Tensor:
        """The received bytes of one of the request's pages, writable."""
        return self.received[int(self.received_table[page])]


def healthy(layout: Layout, seed: int, pages: int = 6) -> Transfer:
    """Pages sent from scattered places to other scattered places of a pool that held an earlier request."""
    generator = torch.Generator().manual_seed(seed)
    kind = planting.KINDS[seed % len(planting.KINDS)]
    entries = (pages - 1) * 64 + int(torch.randint(1, 65, (1,), generator=generator))
    sent_table, received_table = (torch.randperm(12, generator=generator)[:pages] for _ in range(2))
    sent = torch.zeros(12, layout.page_bytes(64), dtype=torch.uint8)
    before = torch.zeros_like(sent)
    everything = torch.arange(12 * 64)
    layout.scatter(before, everything, planting.keys("normalised", 12 * 64, layout.dim, generator))
    slots = (sent_table[:, None] * 64 + torch.arange(64)).flatten()[:entries]
    layout.scatter(sent, slots, planting.keys(kind, entries, layout.dim, generator))
    received = before.clone()
    received[received_table] = sent[sent_table]
    received[received_table[-1], :64] = received[received_table[-1], :64]
    return Transfer(sent, received, layout, sent_table, received_table, entries, before)


Loss = Callable[[Transfer, int, torch.Generator], None]


def _pick(high: int, generator: torch.Generator) -> int:
    return int(torch.randint(1, high, (1,), generator=generator))


def missing(t, page, generator):
    t.arrived(page).zero_()


def hole(t, page, generator):
    t.received_table[page] = -1


def permuted(t, page, generator):
    other = (page + 1) % 5
    mine, theirs = int(t.received_table[page]), int(t.received_table[other])
    t.received[[mine, theirs]] = t.received[[theirs, mine]]


def repeated(t, page, generator):
    t.received[int(t.received_table[page])] = t.arrived((page + 2) % 5)


def stale(t, page, generator):
    place = int(t.received_table[page])
    t.received[place] = t.before[place]


def _roll(*names: str) -> Loss:
    def lose(t: Transfer, page: int, generator: torch.Generator) -> None:
        n = _pick(32, generator)
        for name in names or [item.name for item in t.layout.fields]:
            view = t.layout[name].view(t.received, 64)[int(t.received_table[page])]
            view.copy_(view.clone().roll(n, 0))

    return lose


def partly(t, page, generator):
    """A part of the page's bytes stays as it was, zero or stale."""
    place = int(t.received_table[page])
    size = 64 * t.layout.token_bytes
    cut = size // 8 + _pick(size * 3 // 4, generator)
    rest = slice(cut, size) if torch.rand(1, generator=generator) < 0.5 else slice(0, cut)
    t.received[place, rest] = t.before[place, rest] if torch.rand(1, generator=generator) < 0.5 else 0


def scales_lost(t, page, generator):
    t.layout["scales"].view(t.received, 64)[int(t.received_table[page])].zero_()


def _rescale(change: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def lose(t: Transfer, page: int, generator: torch.Generator) -> None:
        place = int(t.received_table[page])
        view = t.layout["scales"].view(t.received, 64)[place]
        scale = t.layout["scales"].stored(t.received, 64)[place]
        view.copy_(change(scale).contiguous().view(torch.uint8).reshape(view.shape))

    return lose


def changed(t, page, generator):
    place, at = int(t.received_table[page]), _pick(64 * t.layout["codes"].bytes // 2, generator)
    t.received[place, at] ^= 0x15


LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "missing": (missing, ("missing",)),
    "hole in the table": (hole, ("missing",)),
    "permuted": (permuted, ("permuted",)),
    "repeated": (repeated, ("repeated",)),
    "stale": (stale, ("stale",)),
    "shifted": (_roll(), ("shifted",)),
    "scales shifted": (_roll("scales"), ("scales-shifted",)),
    "values shifted": (_roll("codes"), ("values-shifted",)),
    "partly copied": (partly, ("partly-copied",)),
    "scales lost": (scales_lost, ("partly-copied",)),
    "scales rounded down": (_rescale(lambda x: x.log2().floor().exp2()), ("scales-rounded",)),
    "scales rounded up": (_rescale(lambda x: x.log2().ceil().exp2()), ("scales-rounded",)),
    "scales doubled": (_rescale(lambda x: 2 * x), ("scales-changed",)),
    "changed": (changed, ("changed",)),
}


ONLY_F32 = ("scales rounded down", "scales rounded up", "scales doubled")  # where scales are single floats


def planted(loss: str, layout: Layout, seed: int) -> Transfer:
    if loss in ONLY_F32 and layout["scales"].format != "f32":
        layout = LAYOUTS["dsa-index-fp8-ue8m0" if loss == "scales doubled" else "dsa-index-fp8"]
    generator = torch.Generator().manual_seed(50_000 + seed)
    # kinds in which entries differ, so that a loss is a loss
    t = healthy(layout, seed // 3 * len(planting.KINDS) + seed % 3)
    t.page = int(torch.randint(5, (1,), generator=generator))
    was = (t.received.clone(), t.received_table.clone())
    LOSSES[loss][0](t, t.page, generator)
    assert not (torch.equal(was[0], t.received) and torch.equal(was[1], t.received_table)), f"{loss} planted nothing"
    return t
