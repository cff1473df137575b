"""compare: did the pages that were sent arrive? Two pools, read through their page tables, entry by entry.

Pages are compared in the request's order, so physical ids may differ. Only bytes that carry entries count: pad and
padding may hold anything. Each finding names the pool, the layer, the entries, and the token positions that a reader
would lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from . import formats
from .dumps import Dump
from .findings import marks, runs
from .layouts import Layout, layout_of

COLUMNS = ["name", "severity", "pool", "layer", "page", "slot", "slot_last", "field", "token_first", "token_last",
           "entries", "sentence"]  # fmt: skip

MEANINGS = {
    "missing": "nothing arrived",
    "permuted": "the page's content lies at another page of the request",
    "repeated": "the page holds a copy of another page of the request, its own content is lost",
    "shifted": "entries arrived, but at other positions",
    "scales-shifted": "codes arrived, their scales lie at other entries",
    "values-shifted": "scales arrived, their codes lie at other entries",
    "scales-rounded": "codes arrived, their scales were rounded to powers of two",
    "scales-changed": "codes arrived, their scales were multiplied",
    "partly-copied": "only part of the page arrived",
    "stale": "the page holds other content than was sent",
    "changed": "bytes differ",
}


def _table(pool: Tensor, table: Tensor | Sequence[int] | None, side: str) -> Tensor:
    if table is None:
        return torch.arange(pool.shape[0])
    ids = torch.as_tensor(table).flatten().long().cpu()
    if ids.numel() == 0:
        raise ValueError(f"the {side} page table is empty")
    if int(ids.max()) >= pool.shape[0] or int(ids.min()) < -1:
        bad = int(ids[(ids >= pool.shape[0]) | (ids < -1)][0])
        raise ValueError(
            f"the {side} page table names page {bad}; the pool has pages 0 to {pool.shape[0] - 1} (-1: hole)"
        )
    return ids


def compare(
    sent: Tensor,
    received: Tensor,
    layout: str | Layout,
    page_tokens: int = 64,
    *,
    sent_table: Tensor | Sequence[int] | None = None,
    received_table: Tensor | Sequence[int] | None = None,
    entries: int | None = None,
    before: Tensor | None = None,
    tokens_per_entry: int = 1,
    pool: str = "",
    layer: int = 0,
    tolerance: float = 0.0,
) -> pd.DataFrame:
    """What a reader of `received` loses against `sent` (both uint8 [pages, page bytes]); empty if all arrived.

    sent_table, received_table: physical page of each of the request's pages (-1: none; default 0, 1, …). entries: how
    many are live (default all). before: the receiving pool as dumped before the transfer, to prove staleness.
    tokens_per_entry: 1, or 4 and 128 for compressed pools. tolerance: entries whose values differ by no more than this
    part of the largest one count as equal (0: bytes decide).
    Columns: name, severity, pool, layer, page (of the request), slot, slot_last, field, token_first, token_last,
    entries, sentence. Raises ValueError (expected and found) when sizes or tables do not match.
    """
    layout = layout_of(layout)
    for data in (sent, received) if before is None else (sent, received, before):
        layout.check(data, page_tokens)
    if before is not None and before.shape != received.shape:
        raise ValueError(f"before has the received pool's shape {list(received.shape)}, found {list(before.shape)}")
    here, there = _table(sent, sent_table, "sent"), _table(received, received_table, "received")
    pages = len(here)
    if entries is None:
        entries = pages * page_tokens
    if not 0 <= entries <= pages * page_tokens:
        raise ValueError(f"{entries} entries do not fit the sent table's {pages} pages of {page_tokens}")
    if len(there) < pages:
        there = torch.cat([there, torch.full((pages - len(there),), -1)])
    there = there[:pages]
    live = (torch.arange(pages * page_tokens) < entries).view(pages, page_tokens) & (here >= 0)[:, None]
    sent, received = sent.cpu()[here.clamp(min=0)], received.cpu()[there.clamp(min=0)]
    received = torch.where((there >= 0)[:, None], received, 0)
    old = None if before is None else layout.entry_bytes(before.cpu()[there.clamp(min=0)], page_tokens)
    journey = _Journey(sent, received, layout, page_tokens, live, old, tolerance)
    rows = []
    for page in journey.different.any(-1).nonzero().flatten().tolist():
        for name, first, last, field, detail in journey.explain(page, hole=int(there[page]) < 0):
            token_first = (page * page_tokens + first) * tokens_per_entry
            token_last = (page * page_tokens + last + 1) * tokens_per_entry - 1
            where = f"{pool or 'pool'}, layer {layer}, page {page}, slots {first}–{last}"
            text = f"{where}: {MEANINGS[name]}; {detail}; tokens {token_first:,}–{token_last:,} are lost to a reader"
            rows.append((name, "error", pool, layer, page, first, last, field, token_first, token_last,
                         last - first + 1, text))  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def compare_dumps(sent: Sequence[Dump], received: Sequence[Dump], *, tolerance: float = 0.0) -> pd.DataFrame:
    """`compare` for every pool and layer of two sets of dumps (pages in the request's order on both sides)."""
    arrived = {(dump.pool, dump.layer): dump for dump in received}
    tables = []
    for dump in sent:
        key = (dump.pool, dump.layer)
        other = arrived.get(key)
        if other is None and len(sent) == len(received) == 1:
            other = received[0]
        if other is None:
            last = (dump.entries or dump.raw.shape[0] * dump.page_tokens) * dump.tokens_per_entry - 1
            text = f"{dump.pool or 'pool'}, layer {dump.layer}: no dump of it on the receiving side"
            row = ("missing", "error", *key, -1, -1, -1, "pool", 0, last, dump.entries or 0, text)
            tables.append(pd.DataFrame([row], columns=COLUMNS))
            continue
        if (other.layout, other.page_tokens) != (dump.layout, dump.page_tokens):
            raise ValueError(
                f"pool {dump.pool or '?'}, layer {dump.layer}: sent as {dump.layout} with {dump.page_tokens} entries, "
                f"received as {other.layout} with {other.page_tokens}; such peers must not be paired"
            )
        tables.append(
            compare(
                dump.raw,
                other.raw,
                dump.record,
                dump.page_tokens,
                entries=dump.entries,
                pool=dump.pool,
                layer=dump.layer,
                tokens_per_entry=dump.tokens_per_entry,
                tolerance=tolerance,
            )
        )
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def _hash(content: Tensor) -> Tensor:
    """int64 [n] of rows uint8 [n, w]: a linear hash with fixed odd multipliers, exact on equality."""
    width = -(-content.shape[1] // 8) * 8
    words = torch.nn.functional.pad(content, (0, width - content.shape[1])).contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(7)
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator) * 2 + 1
    mixed = (words ^ (words >> 31)) * factors
    return (mixed ^ (mixed >> 29)).sum(-1)


class _Journey:
    """Both sides in the request's order, and what explains a page that differs."""

    def __init__(self, sent, received, layout: Layout, page_tokens: int, live: Tensor, old, tolerance: float) -> None:
        self.layout, self.page_tokens, self.live, self.old = layout, page_tokens, live, old
        self.sent, self.received = (layout.entry_bytes(side, page_tokens) for side in (sent, received))
        same = (self.sent == self.received).all(-1)
        if tolerance:
            a, b = (layout.decode(side, page_tokens)["values"] for side in (sent, received))
            same |= (a - b).abs().amax(-1) <= tolerance * a.abs().amax(-1)
        self.different = ~same & live
        facts = marks(received, layout, page_tokens)
        self.empty, self.poison = facts.empty, facts.poison
        codes = layout["codes"].bytes
        scales = slice(codes, codes + layout["scales"].bytes)
        order = [item.name for item in layout.fields if item.format != "raw"]
        if order != ["codes", "scales"]:  # the fields lie in the record's order
            start = sum(layout[name].bytes for name in order[: order.index("scales")])
            scales = slice(start, start + layout["scales"].bytes)
        self.columns = {"entry": slice(None), "codes": slice(0, codes), "scales": scales}
        address = [item.address(page_tokens) for item in layout.fields if item.format != "raw"]
        self.order = torch.cat(address, -1).flatten().argsort()  # entry bytes in the order of the page

    def _offset(self, page: int, mask: Tensor, field: str) -> tuple[int, float]:
        """(offset, share): most of the page's marked entries equal the entries sent `offset` places before."""
        columns = self.columns[field]
        wanted = self.received[page][:, columns][mask]
        if not wanted.any() or not len(wanted):
            return 0, 0.0
        pool = self.sent[..., columns].flatten(0, 1)
        hashes = _hash(pool)
        hashes[~self.live.flatten()] = -1
        ordered, index = hashes.sort(stable=True)
        mine = _hash(wanted)
        low = torch.searchsorted(ordered, mine)
        high = torch.searchsorted(ordered, mine, right=True)
        at = page * self.page_tokens + mask.nonzero().flatten()
        votes: dict[int, int] = {}
        for k in range(64):  # repeated text: an entry may have many twins
            hit = low + k < high
            if not bool(hit.any()):
                break
            offset = at[hit] - index[(low + k)[hit]]
            values, counts = offset.unique(return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                votes[value] = votes.get(value, 0) + count
        votes.pop(0, None)
        if not votes:
            return 0, 0.0
        best = max(votes, key=lambda d: (votes[d], d % self.page_tokens == 0, -abs(d)))
        return best, votes[best] / len(wanted)

    def explain(self, page: int, hole: bool) -> list[tuple[str, int, int, str, str]]:
        """(name, first slot, last slot, field, detail) for a page with differences."""
        wrong, live = self.different[page], self.live[page]
        slots = wrong.nonzero().flatten()
        first, last = int(slots[0]), int(slots[-1])
        count, total = len(slots), int(live.sum())
        if hole:
            return [("missing", first, last, "page", "the received table has no page for it")]
        void = (self.empty[page] | self.poison[page]) & wrong
        filler = "zeros" if bool(self.empty[page][void].all()) else "a fill pattern"
        if int(void.sum()) == count == total:
            return [("missing", first, last, "page", f"the page holds {filler}")]
        filled = wrong & ~void
        if bool(filled.any()):
            offset, share = self._offset(page, filled, "entry")
            # what a shift pushed in from elsewhere has no twin; a page from elsewhere has one for every entry
            whole = share > 0.4 and int(filled.sum()) * share >= min(2, total)
            part = self._part_moved(page, filled, share if whole else 0.0) if int(filled.sum()) > 2 else None
            if part:
                return [(part[0], first, last, part[1], part[2])]
            if whole:
                return [self._moved(page, offset, first, last)]
        other = self._rescaled(page, wrong)
        if other:
            return [(other[0], first, last, "scales", other[1])]
        cut = self._cut(page, live, wrong)
        if cut:
            return [("partly-copied", first, last, "page", cut)]
        if bool(void.any()) and int(void.sum()) == count:
            return [("missing", a, b, "entry", f"{filler} there") for a, b in runs(wrong)]
        if count == total or (self.old is not None and bool((self.old[page] == self.received[page])[wrong].all())):
            proof = "nothing in it equals what was sent"
            if self.old is not None and bool((self.old[page] == self.received[page])[wrong].all()):
                proof = "it is what the page held before the transfer"
            return [("stale", first, last, "page", proof)]
        out = []
        for a, b in runs(wrong):
            difference = self.sent[page][a : b + 1] != self.received[page][a : b + 1]
            fields = [name for name in ("codes", "scales") if bool(difference[:, self.columns[name]].any())]
            out.append(("changed", a, b, "+".join(fields) or "rope", f"{int(difference.sum())} bytes"))
        return out

    def _moved(self, page: int, offset: int, first: int, last: int) -> tuple[str, int, int, str, str]:
        if offset % self.page_tokens:
            return "shifted", first, last, "entry", f"they lie {offset:+d} entries from where they were sent"
        origin = page - offset // self.page_tokens
        own = self.live[origin] & self.live[page]
        kept = bool((self.sent[origin] == self.received[origin])[own].all())
        name = "repeated" if kept else "permuted"
        return name, first, last, "page", f"it holds page {origin}"

    def _part_moved(self, page: int, filled: Tensor, whole: float) -> tuple[str, str, str] | None:
        """Codes or scales that moved alone: more of them have a twin than of the whole entries (share `whole`)."""
        same = {
            name: (self.sent[page][:, columns] == self.received[page][:, columns]).all(-1)[filled].float().mean()
            for name, columns in self.columns.items()
        }
        for field, other, name in (("scales", "codes", "scales-shifted"), ("codes", "scales", "values-shifted")):
            if same[other] < 0.9:
                continue
            offset, share = self._offset(page, filled, field)
            if share > max(0.4, whole + 0.05):
                return name, field, f"by {offset:+d} entries"
            if not bool(self.received[page][:, self.columns[field]][filled].any()):
                return "partly-copied", field, f"{other} arrived, {field} are zero"
        return None

    def _rescaled(self, page: int, wrong: Tensor) -> tuple[str, str] | None:
        """Scales that became other numbers by a rule, which bytes from elsewhere do not keep; the rest is as sent."""
        differs = self.sent[page] != self.received[page]
        start, stop, _ = self.columns["scales"].indices(differs.shape[-1])
        if bool(differs[:, :start].any()) or bool(differs[:, stop:].any()):
            return None
        name = self.layout["scales"].format
        kind = formats.FORMATS[name].stored
        old, new = (formats.decode(side[page][wrong, start:stop].contiguous().view(kind), name)
                    for side in (self.sent, self.received))  # fmt: skip
        ratio = (new / old)[old != 0]
        if ratio.numel() < 4 or not bool(((ratio > 0) & ratio.isfinite()).all()):
            return None
        low, high = float(ratio.min()), float(ratio.max())
        if high <= low * 1.001:
            return "scales-changed", f"each is {low:.6g} times what was sent"
        power = new.view(torch.int32) & 0x7FFFFF == 0
        if bool(power.all()) and low > 0.5 and high < 2 and name == "f32":
            how = "down" if high <= 1 else "up" if low >= 1 else "to the nearest"
            return "scales-rounded", f"rounded {how}: {low:.3f} to {high:.3f} times what was sent"
        return None

    def _cut(self, page: int, live: Tensor, wrong: Tensor) -> str | None:
        """Words for a page that is right on one side of a cut and wrong beyond; None for scattered damage."""
        whole = torch.zeros_like(self.sent[page], dtype=torch.bool)
        whole[live] = True
        keep = whole.flatten()[self.order]
        equal = (self.sent[page] == self.received[page]).flatten()[self.order][keep]
        blank = (self.received[page] == 0).flatten()[self.order][keep]
        n = len(equal)
        for view, zero, side in ((equal, blank, "first"), (equal.flip(0), blank.flip(0), "last")):
            arrived = int(view.int().cumprod(0).sum())
            rest, void = view[arrived:], zero[arrived:]
            if n // 16 <= arrived < n and len(rest) >= 4 and (bool(void.all()) or float(rest.float().mean()) < 0.35):
                state = "zero" if bool(void.all()) else "other content"
                return f"the {side} {arrived:,} of {n:,} bytes arrived, the rest is {state}"
        slots = live.nonzero().flatten()
        bad = wrong[slots]
        edge = runs(bad)
        if (
            len(edge) == 1
            and 4 * int(bad.sum()) >= len(slots) > int(bad.sum())
            and (edge[0][0] == 0 or edge[0][1] == len(slots) - 1)
        ):
            return f"{len(slots) - int(bad.sum())} of {len(slots)} entries arrived"
        return None
