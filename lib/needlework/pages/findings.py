"""What is wrong with a pool, page by page and entry by entry, and which layout explains unlabelled bytes.

A public writer leaves a signature: a scale never falls under its floor, and the largest code of a group is the format's
largest (plain scale) or lies in its upper half (power-of-two scale), unless the floor set the scale. Random bytes,
another layout or a shifted block do not keep it. `marks` computes these facts once for a whole pool.

With more evidence `diagnose` sees more: `live` says which entries a request wrote (others may hold anything), `before`
is the same pool as it was dumped before the request ran (what is unchanged is stale), `digests` are what `page_digests`
gave where the pages came from (swapped, repeated and foreign pages; with digests of entries also a few changed bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd
import torch
from torch import Tensor

from . import formats
from .dumps import ENTRY_HEX, PAGE_HEX, entry_digest, page_digests
from .layouts import LAYOUTS, Layout, layout_of

ABSURD_SCALE = 2.0**16  # normalised keys stay near 1; with 448 codes this scale means values beyond 29 million
NONE = "none of these"
AS_ROWS = " as rows"
PAGE_TOKENS = (64, 256, 128, 32, 16, 2)

COLUMNS = ["name", "severity", "page", "slot", "slot_last", "field", "sentence"]

# name -> (severity, field, what it means); the sentence of a finding is made from the last
MEANINGS = {
    "never-written": ("error", "entry", "all bytes are zero, scale included: nothing was ever written here"),
    "half-page": ("error", "page", "only part of the page was written"),
    "poison": ("error", "entry", "every byte repeats one word: a fill pattern, not data"),
    "row-format": ("error", "page", "entries were written as whole rows, data beside scale, into a footer page"),
    "scales-in-rows": ("error", "scales", "scales were written as if each lay behind its row, across the codes"),
    "stride-drift": (
        "error",
        "page",
        "pages lie further apart than the layout's size: each begins later than the last",
    ),
    "scale-rounded": ("error", "scales", "scales were rounded to powers of two and the codes were not made for them"),
    "scale-shifted": ("error", "scales", "scales belong to other entries: the scale block is shifted"),
    "wrong-format": ("error", "page", "bytes follow another number format"),
    "nan-code": ("error", "codes", "codes hold NaN"),
    "zero-scale": ("error", "scales", "the scale is zero although the codes are not: every value reads as zero"),
    "negative-scale": ("error", "scales", "the scale is negative"),
    "denormal-scale": ("error", "scales", "the scale is denormal: values vanish"),
    "absurd-scale": ("error", "scales", "the scale is NaN, infinite or beyond any key's size"),
    "scale-out-of-range": ("error", "scales", "the scale is one that no public writer stores"),
    "all-zero": ("error", "codes", "all codes are zero although the scale says that values were there"),
    "scale-misfit": (
        "error",
        "scales",
        "the codes do not reach the range that the scale promises: one of them is foreign",
    ),
    "repeated-page": ("error", "page", "the page repeats another one byte for byte"),
    "swapped-pages": ("error", "page", "the page holds the content that another page should have, and the reverse"),
    "stale": ("error", "page", "content is from before the request, or of another one"),
    "changed": ("error", "entry", "bytes are not the recorded ones although the rest of the page is: changed in place"),
    "padding-touched": ("warning", "padding", "bytes that carry no information are not zero: something wrote there"),
}
# an entry gets the first name that applies
ENTRY_ORDER = ("poison", "never-written", "nan-code", "negative-scale", "zero-scale", "denormal-scale", "absurd-scale",
               "scale-out-of-range", "all-zero", "scale-misfit")  # fmt: skip


def diagnose(
    raw: Tensor,
    layout: str | Layout,
    page_tokens: int = 64,
    *,
    live: Tensor | None = None,
    before: Tensor | None = None,
    digests: Sequence[str] | None = None,
    writer: str | None = None,
) -> pd.DataFrame:
    """Findings in a pool uint8 [pages, page bytes], one row each; an empty table for a healthy pool.

    live: bool [pages, page_tokens], the entries that must hold data (default: all). before: an earlier dump of the same
    pool. digests: what each page should be (`page_digests`). writer: judge scales by this writer alone.
    Columns: name, severity, page, slot, slot_last (-1 for a whole page), field, sentence.
    Raises ValueError (expected and found sizes) on input that does not match.
    """
    layout = layout_of(layout)
    layout.check(raw, page_tokens)
    raw = raw.cpu()
    shape = (raw.shape[0], page_tokens)
    if live is None:
        live = torch.ones(shape, dtype=torch.bool)
    elif live.dtype != torch.bool or tuple(live.shape) != shape:
        raise ValueError(f"live is bool {list(shape)}, found {live.dtype} {list(live.shape)}")
    if before is not None and before.shape != raw.shape:
        raise ValueError(f"before has the pool's shape {list(raw.shape)}, found {list(before.shape)}")
    if digests is not None and len(digests) != raw.shape[0]:
        raise ValueError(f"digests: one for each of {raw.shape[0]} pages, found {len(digests)}")

    facts = marks(raw, layout, page_tokens, writer)
    rows: list[tuple] = []
    settled = ~live.any(-1)  # pages that need no look at their entries any more
    rows.extend(_row(*found) for found in from_digests(settled, raw, layout, page_tokens, live, facts, digests))
    for find in (_from_before, _parts, _shapes, _repeats, _rounded):
        find(rows, settled, raw, layout, page_tokens, live, facts, before=before)
    _entries(rows, facts, live & ~settled[:, None], layout)
    _padding(rows, settled, raw, layout, page_tokens)
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["page", "slot", "name"], kind="stable").reset_index(drop=True)


def _row(name: str, page: int, detail: str = "", slot: int = -1, slot_last: int = -1, field: str = "") -> tuple:
    severity, default_field, meaning = MEANINGS[name]
    where = f"page {page}"
    if slot >= 0:
        where += f", slot {slot}" if slot == slot_last else f", slots {slot}–{slot_last}"
    text = f"{where}: {meaning}" + (f"; {detail}" if detail else "")
    return name, severity, page, slot, slot_last, field or default_field, text


# ---- whole pages -----------------------------------------------------------------------------------------------------


def _from_before(rows, settled, raw, layout, page_tokens, live, facts, *, before, **_) -> None:
    if before is None:
        return
    same = (layout.entry_bytes(raw, page_tokens) == layout.entry_bytes(before.cpu(), page_tokens)).all(-1)
    same &= live & ~facts.empty & ~settled[:, None]
    for page in same.any(-1).nonzero().flatten().tolist():
        whole = bool((same[page] == live[page]).all())
        for first, last in [(-1, -1)] if whole else runs(same[page]):
            rows.append(_row("stale", page, "unchanged since the dump taken before", first, last))
        settled[page] |= whole


def _parts(rows, settled, raw, layout, page_tokens, live, facts: Marks, **_) -> None:
    """Pages and halves of pages that are empty or poisoned; cuts by bytes and by entries."""
    for name, mask in (("never-written", facts.empty), ("poison", facts.poison)):
        whole = (mask | ~live).all(-1) & ~settled
        rows.extend(_row(name, page) for page in whole.nonzero().flatten().tolist())
        settled |= whole
    address = torch.full((layout.page_bytes(page_tokens),), -1, dtype=torch.int64)
    for item in layout.fields:
        if item.format != "raw":
            address[item.address(page_tokens)] = torch.arange(page_tokens)[:, None]
    hollow = (facts.zeros * live).sum(-1) >= live.sum(-1) * facts.entry_bytes // 8  # few pages need a closer look
    for page in (~settled & hollow).nonzero().flatten().tolist():
        wanted = (address >= 0) & live[page][address.clamp(min=0)]
        filled = (raw[page][wanted] != 0).nonzero().flatten()
        total = int(wanted.sum())
        head, tail = int(filled[0]), total - 1 - int(filled[-1])
        gap = max(head, tail)
        if gap >= total // 8 and (head == 0 or tail == 0):
            side = "first" if head else "last"
            rows.append(_row("half-page", page, f"the {side} {gap:,} of {total:,} bytes are zero"))
            settled[page] = True
            continue
        slots = live[page].nonzero().flatten()
        missing = facts.empty[page][slots]
        for first, last in runs(missing):
            length = last - first + 1
            if 4 * length >= len(slots) > length and (first == 0 or last == len(slots) - 1):
                span = (int(slots[first]), int(slots[last]))
                rows.append(_row("half-page", page, f"{length} of {len(slots)} entries are zero", *span))
                settled[page] = True


def _shapes(rows, settled, raw, layout: Layout, page_tokens, live, facts: Marks, **_) -> None:
    """Pages that make sense under another layout, and scales that make sense at other entries."""
    written = live & ~facts.empty
    lawful = _share(facts, written)
    need = layout.page_bytes(page_tokens)
    if len(raw) > 2 and lawful[0] >= 0.9 and int((lawful[1:] < 0.9).sum()) >= 2:
        stride = stride_of(raw.reshape(-1), layout, page_tokens) or 0
        for page in (~settled & (lawful < 0.9)).nonzero().flatten().tolist() if stride else ():
            apart = (
                f"{stride:,} bytes apart, {need:,} were expected; this one lies {page * (stride - need):+,} bytes off"
            )
            rows.append(_row("stride-drift", page, apart))
            settled[page] = True
    across = _row_scales(raw, layout, page_tokens, live)
    for page in (~settled & ((lawful < 0.9) | across)).nonzero().flatten().tolist():
        rival = _other_shape(raw[page : page + 1], layout, page_tokens, written[page])
        if rival:
            rows.append(_row(rival[0], page, rival[1]))
            settled[page] = True
    for page, shift, detail in shifted(raw, layout, page_tokens, written & ~settled[:, None], facts):
        rows.append(_row("scale-shifted", page, f"scales lie {shift:+d} slots from their codes ({detail})"))
        settled[page] = True
    if layout["codes"].format == "e4m3fn":
        for page, detail in _doubled(raw, layout, page_tokens, written & ~settled[:, None], facts):
            rows.append(_row("wrong-format", page, detail))
            settled[page] = True


def _share(facts: Marks, written: Tensor) -> Tensor:
    """float [pages]: share of written groups that obey the writer (1 where nothing is written)."""
    good = (facts.lawful & written[..., None]).sum((1, 2)).float()
    return torch.where(written.any(-1), good / (written.sum(-1) * facts.scale.shape[-1]).clamp(min=1), 1.0)


def _other_shape(page: Tensor, layout: Layout, page_tokens: int, written: Tensor) -> tuple[str, str] | None:
    rivals: list[tuple[str, Layout, str]] = []
    rows = as_rows(layout)
    if rows is not None:
        rivals.append(("row-format", rows, f"{layout.token_bytes}-byte rows explain it"))
        across: Layout = as_rows(layout, ("scales", "pad"))  # type: ignore[assignment]
        rivals.append(("scales-in-rows", across, f"steps of {layout.token_bytes} bytes explain them"))
        # whole rows fill what lies behind the codes, scales alone leave it empty
        count = int(written.nonzero()[-1]) + 1 if bool(written.any()) else 0
        behind = torch.zeros(page.shape[1], dtype=torch.bool)
        behind[count * layout["codes"].stride : count * layout.token_bytes] = True
        behind[across["scales"].address(page_tokens)] = False
        if int((page[0][behind] != 0).sum()) < 0.5 * int(behind.sum()):
            rivals.reverse()
    same_codes = [
        other
        for other in LAYOUTS.values()
        if other.name != layout.name and other.token_bytes == layout.token_bytes and other.dim == layout.dim
    ]
    rivals += [("wrong-format", other, f"{other.name} explains it ({other.meaning})") for other in same_codes]
    for name, other, detail in rivals:
        if page_tokens % other.token_multiple or other.page_bytes(page_tokens) != page.shape[1]:
            continue
        facts = marks(page, other, page_tokens)
        # scales that lie across the codes spoil some of them
        if float(_share(facts, written[None] & ~facts.empty)) >= (0.75 if name == "scales-in-rows" else 0.9):
            return name, detail
    return None


def _row_scales(raw: Tensor, layout: Layout, page_tokens: int, live: Tensor) -> Tensor:
    """bool [pages]: nine tenths of what lies where rows would have their scales could be scales."""
    rows = as_rows(layout, ("scales", "pad"))
    if rows is None:
        return torch.zeros(len(raw), dtype=torch.bool)
    scale = formats.decode(rows["scales"].stored(raw, page_tokens), rows["scales"].format)
    sane = ((scale >= floors(layout)[0]) & (scale > 0) & (scale <= ABSURD_SCALE)).all(-1) & live
    return sane.sum(-1) >= 0.9 * live.sum(-1).clamp(min=8)


def stride_of(flat: Tensor, layout: Layout, page_tokens: int) -> int | None:
    """Bytes from page to page in flat bytes whose first page is sound, where it is not the page's own size."""
    need, size = layout.page_bytes(page_tokens), flat.numel()
    steps = torch.arange(need - need // 4, min(need + need // 2, size - need) + 1, 4)
    if not len(steps):
        return None
    place = layout["scales"].address(page_tokens)
    stored = flat[steps[:, None, None] + place]
    if layout["scales"].format == "f32":
        stored = stored.contiguous().view(torch.float32)
    scale = formats.decode(stored, layout["scales"].format).flatten(1)
    sane = ((scale >= floors(layout)[0]) & (scale > 0) & (scale <= ABSURD_SCALE)).float().mean(-1)
    best: tuple[float, float, int] = (0.0, 0.0, need)
    for at in sane.argsort(descending=True, stable=True)[:12].tolist():
        stride = int(steps[at])
        pages = flat.as_strided((min(8, (size - need) // stride + 1), need), (stride, 1)).contiguous()
        share, written = fit(pages, layout, page_tokens)
        if written > page_tokens:
            best = max(best, (share, float(sane[at]), stride))
    return best[2] if best[0] >= 0.9 and best[2] != need else None


def _rounded(rows, settled, raw, layout: Layout, page_tokens, live, facts: Marks, **_) -> None:
    """Powers of two under codes that all reach the largest: a writer of powers of two rounds up before it divides, so
    that few groups (one in twenty in fp8, one in four in fp4) get there."""
    if layout["scales"].format == "e4m3fn":
        return
    size = code_sizes(raw, layout, page_tokens, layout["codes"].count // layout.group)
    copies = facts.scale.shape[-1] // size.shape[-1]
    full, lawful = (mask.unflatten(-1, (-1, copies)) for mask in (facts.full > 0, facts.lawful & ~facts.free))
    scale = facts.scale[..., ::copies]
    usable = lawful.all(-1) & (live & ~settled[:, None])[..., None]
    cut = usable & full.any(-1) & (scale.view(torch.int32) & 0x7FFFFF == 0)
    count = usable.flatten(1).sum(-1)
    suspect = cut.flatten(1).sum(-1) >= 0.9 * count.clamp(min=1)
    # repeated text counts once
    least = 12 if layout["codes"].format == "e2m1" else 6
    for page in (suspect & (count >= least)).nonzero().flatten().tolist():
        suspect[page] = len(size[page][cut[page]].unique()) >= least
    suspect &= count >= least
    plain = usable & ~suspect[:, None, None]
    own = plain & (scale.view(torch.int32) & 0x7FFFFF == 0)
    # keys of one size may reach the largest code together, but then under one scale
    _, often = scale[cut & suspect[:, None, None]].unique(return_counts=True)
    if int((often >= 3).sum()) < 2 and not int(own.sum()) < 0.1 * int(plain.sum()) >= 1.2:
        return
    top = {"e4m3fn": 448, "e4m3fnuz": 224, "e2m1": 6}[layout["codes"].format]
    for page in suspect.nonzero().flatten().tolist():
        clipped = float(facts.full[page].float().sum() / cut[page].sum()) >= 3
        how = "many codes a group do: values are clipped" if clipped else "values are off by up to a factor of two"
        rows.append(
            _row("scale-rounded", page, f"{int(cut[page].sum())} of {int(count[page])} groups reach {top}; {how}")
        )
        settled[page] = True


def _doubled(raw, layout: Layout, page_tokens: int, written: Tensor, facts: Marks):
    """FNUZ codes read as FN are the same bytes at twice the worth: seen by a zero entry's scale, or by keys' size."""
    fnuz = 2 * floors(layout)[1]
    silent = facts.silent.all(-1) & written
    for page in silent.any(-1).nonzero().flatten().tolist():
        if bool((facts.scale[page][silent[page]] == fnuz).all()):
            yield page, "a zero entry carries the smallest scale of a FNUZ writer (1e-4/224)"
            written[page] = False
    size, spread, enough = page_sizes(raw, layout, page_tokens, written, facts)
    if int(enough.sum()) < 4:
        return
    centre = size[enough].median()
    off = (size - centre).abs()
    near = enough & (off < 0.25)
    # only keys of one size, as normalised keys are, allow the judgement
    if int(near.sum()) < 0.6 * int(enough.sum()) or float(off[near].quantile(0.9)) > 0.1:
        return
    for page in (enough & ((size - centre - 1).abs() < 0.12) & (spread < 0.35)).nonzero().flatten().tolist():
        ratio = 2 ** float(size[page] - centre)
        yield page, f"its values are {ratio:.2f} times those of the other pages: FNUZ read as FN"


def _repeats(rows, settled, raw, layout, page_tokens, live, facts: Marks, **_) -> None:
    content = layout.entry_bytes(raw, page_tokens) * live[..., None]
    first_seen: dict[bytes, int] = {}
    for page in (~settled).nonzero().flatten().tolist():
        if int(live[page].sum()) < 2:
            continue
        key = hashlib.blake2b(content[page].numpy().tobytes(), digest_size=16).digest()
        if key in first_seen:
            # entries that are all alike may repeat by right (a run of one token)
            if len(torch.unique(content[page][live[page]], dim=0)) > max(1, int(live[page].sum()) // 8):
                rows.append(_row("repeated-page", page, f"it equals page {first_seen[key]}"))
                settled[page] = True
        else:
            first_seen[key] = page


# ---- entries ---------------------------------------------------------------------------------------------------------


def _entries(rows, facts: Marks, live: Tensor, layout: Layout) -> None:
    grouped = {
        "nan-code": facts.nan,
        "negative-scale": facts.negative,
        "zero-scale": facts.zero & ~facts.silent,
        "denormal-scale": facts.denormal,
        "absurd-scale": facts.absurd,
        "scale-out-of-range": facts.below | facts.uneven | (facts.zero & facts.silent),
        "all-zero": facts.silent & facts.misfit,
        "scale-misfit": facts.misfit,
    }
    open_slots = live.clone()
    for name in ENTRY_ORDER:
        marked = {"poison": facts.poison, "never-written": facts.empty}.get(name)
        if marked is None:
            group_mask = grouped[name]
            marked = group_mask.any(-1)
        mask = marked & open_slots
        open_slots &= ~mask
        for page in mask.any(-1).nonzero().flatten().tolist():
            for first, last in runs(mask[page]):
                detail, field = "", ""
                if name in grouped:
                    groups = grouped[name][page, first].nonzero().flatten().tolist()
                    scale = float(facts.scale[page, first, groups[0]])
                    detail = f"scale {scale:.6g}"
                    if facts.scale.shape[-1] > 1:
                        detail += f" in group {groups[0]} of {facts.scale.shape[-1]}"
                        field = f"{MEANINGS[name][1]}[{groups[0]}]"
                rows.append(_row(name, page, detail, first, last, field))


def _padding(rows, settled, raw, layout: Layout, page_tokens: int) -> None:
    tail = raw[:, page_tokens * layout.token_bytes :]
    touched = {"padding": tail}
    if "pad" in layout:
        touched["pad"] = layout["pad"].view(raw, page_tokens).flatten(1)
    for field, content in touched.items():
        if content.shape[1]:
            for page in ((content != 0).any(-1) & ~settled).nonzero().flatten().tolist():
                count = int((content[page] != 0).sum())
                rows.append(_row("padding-touched", page, f"{count} of {content.shape[1]} bytes", field=field))


# ---- digests ---------------------------------------------------------------------------------------------------------


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
    content = layout.entry_bytes(page, page_tokens)[0].contiguous()
    differs = [
        bool(live[slot]) and entry_digest(content[slot]) != recorded[ENTRY_HEX * slot : ENTRY_HEX * (slot + 1)]
        for slot in range(page_tokens)
    ]
    return torch.tensor(differs)


# ---- facts of each scale group ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """Facts about a pool; bool unless said. Group marks are [pages, P, groups], entry marks [pages, P]."""

    scale: Tensor  # float32 [pages, P, groups]: decoded scales
    zero: Tensor  # scale bytes are zero (an exponent byte of 0 counts: no writer stores it)
    negative: Tensor
    denormal: Tensor
    absurd: Tensor  # NaN, infinite or above ABSURD_SCALE
    below: Tensor  # positive and normal, but under the writer's floor
    uneven: Tensor  # not a power of two although the layout's scales are
    nan: Tensor  # the group holds a NaN code
    silent: Tensor  # every code of the group is zero
    free: Tensor  # the scale is a floor, or too coarse: the codes may be small
    full: Tensor  # int: how many codes of the group are the largest one
    misfit: Tensor  # the codes do not reach the range that a writer's scale gives
    empty: Tensor  # entry: all bytes zero
    poison: Tensor  # entry: every byte, scales too, repeats one non-zero 4-byte word
    zeros: Tensor  # entry, int: how many of its bytes are zero
    entry_bytes: int

    @property
    def lawful(self) -> Tensor:
        """Groups in which nothing contradicts the writer."""
        bad = self.zero | self.negative | self.denormal | self.absurd | self.below | self.uneven | self.nan
        return ~(bad | self.misfit | self.poison[..., None])


def magnitudes(codes: Tensor, layout: Layout, groups: int) -> Tensor:
    """uint8 [pages, P, groups, group]: codes without their sign; their order is the order of the magnitudes."""
    if layout["codes"].format == "e2m1":
        codes = torch.stack([codes & 7, (codes >> 4) & 7], -1).flatten(-2)
    else:
        codes = codes & 0x7F
    return codes.unflatten(-1, (groups, -1))


def floors(layout: Layout, writer: str | None = None) -> tuple[float, float]:
    """Lowest and highest of the smallest scales that the layout's serving writers (or the one named) store."""
    rules = [layout.writer(writer)] if writer else [rule for rule in layout.writers.values() if rule.serving]
    smallest = [rule.smallest_scale(layout["codes"].format) for rule in rules or layout.writers.values()]
    return min(smallest), max(smallest)


def marks(raw: Tensor, layout: Layout, page_tokens: int, writer: str | None = None) -> Marks:
    """The marks of every entry of a pool uint8 [pages, page bytes]; with `writer`, judged by that writer's floor."""
    layout.check(raw, page_tokens)
    codes = layout["codes"].view(raw, page_tokens).flatten(3).flatten(1, 2)
    field = layout["scales"]
    stored = field.view(raw, page_tokens).flatten(3).flatten(1, 2)
    if field.format == "f32":
        stored = stored.contiguous().view(torch.float32)
    scale = formats.decode(stored, field.format)
    bits = scale.view(torch.int32)
    everything = layout.entry_bytes(raw, page_tokens)
    words = everything.view(*everything.shape[:2], -1)
    words = words[..., : words.shape[-1] // 4 * 4].contiguous().view(torch.int32)
    zeros = (everything == 0).sum(-1)
    empty = zeros == everything.shape[-1]
    poison = (words == words[..., :1]).all(-1) & ~empty

    zero = stored == 0
    negative = torch.signbit(scale)
    # a subnormal is no scale in single precision; in e4m3 the smallest scales are subnormal by right
    denormal = (bits & 0x7F800000 == 0) & ~zero & (field.format == "f32") & ~negative
    absurd = ~(scale.abs() <= ABSURD_SCALE)
    floor, highest_floor = floors(layout, writer)
    sane = ~(zero | negative | denormal | absurd)
    below = (scale < floor) & sane
    power = bits & 0x7FFFFF == 0
    demand_power = field.format == "f32" and all(rule.power_of_two for rule in layout.writers.values())
    uneven = sane & ~below & ~power if demand_power else torch.zeros_like(zero)

    if field.count > layout["codes"].count // layout.group:  # one scale, stored several times over
        uneven = uneven | (scale != scale[..., :1])
    groups = scale.shape[-1]
    size = magnitudes(codes, layout, groups)
    peak = size.amax(-1)
    silent = peak == 0
    by_group = codes.unflatten(-1, (groups, -1))
    match layout["codes"].format:
        case "e4m3fn":
            nan, top, half = peak == 0x7F, 0x7E, 0x76
        case "e4m3fnuz":
            nan, top, half = (by_group == 0x80).any(-1), 0x7E, 0x76
            silent = silent & ~nan
        case _:
            nan, top, half = torch.zeros_like(silent), 7, 5
    # under the floor, or among the coarse subnormals of an e4m3 scale, the codes may stay small
    free = scale <= max(highest_floor, 2.0**-6 if field.format == "e4m3fn" else 0.0)
    if any(rule.power_of_two for rule in layout.writers.values()):
        fits = (peak >= half) & (peak <= top)
        if field.count > layout["codes"].count // layout.group:  # copies of one scale: the peak is that of all groups
            fits = fits.any(-1, keepdim=True).expand_as(fits) & (peak <= top)
    else:
        # a power-of-two scale under the plain layout is another public writer's, with the same decode
        fits = (peak == top) | (power & (peak >= half) & (peak <= top) & (field.format == "f32"))
    if not floor:
        free = free | (silent & zero)
    misfit = ~fits & ~free & ~nan
    zero_allowed = silent & ~empty[..., None] if not floor else torch.zeros_like(zero)
    zero = zero & ~zero_allowed
    full = (size == top).sum(-1)
    return Marks(scale, zero, negative, denormal, absurd, below, uneven, nan, silent, free, full, misfit, empty, poison,
                 zeros, everything.shape[-1])  # fmt: skip


# ---- codes and scales that do not belong together --------------------------------------------------------------------


# A writer divides by the scale, so the size of an entry's codes and its scale are strongly anti-correlated wherever
# entries have similar sizes (index keys and latents are normalised). Where that correlation is absent at shift 0 and
# strong at shift n, the scale block is shifted by n slots.


def as_rows(layout: Layout, only: Sequence[str] = ()) -> Layout | None:
    """The layout with all fields of a token side by side, as its fictional shape suggests (or `only` those where such
    rows have them); None if it is so already."""
    if all(item.base == 0 for item in layout.fields):
        return None
    fields, offset = [], 0
    for item in layout.fields:
        beside = replace(item, base=0, offset=offset, stride=layout.token_bytes, tile=None)
        fields.append(item if only and item.name not in only else beside)
        offset += item.bytes
    return replace(layout, name=layout.name + AS_ROWS, fields=tuple(fields))


def code_sizes(raw: Tensor, layout: Layout, page_tokens: int, groups: int) -> Tensor:
    """float32 [pages, P, groups]: log2 of the norm of each group's codes (NaN where all are zero)."""
    codes = layout["codes"].view(raw, page_tokens).flatten(3).flatten(1, 2)
    values = formats.decode(codes.contiguous(), layout["codes"].format).unflatten(-1, (groups, -1))
    square = values.square_().sum(-1)
    return torch.where(square > 0, square, torch.nan).log2() / 2


def page_sizes(
    raw: Tensor, layout: Layout, page_tokens: int, written: Tensor, facts: Marks
) -> tuple[Tensor, Tensor, Tensor]:
    """Per page: median log2 size of its entries, their middle spread, and whether enough entries are written."""
    size = code_sizes(raw, layout, page_tokens, facts.scale.shape[-1]) + facts.scale.abs().log2()
    size = torch.where(written[..., None] & facts.lawful, size, torch.nan).flatten(1)
    enough = (~size.isnan()).sum(-1) >= 8
    quartiles = torch.nanquantile(size, torch.tensor([0.25, 0.5, 0.75]), dim=-1)
    return quartiles[1].nan_to_num(0.0), (quartiles[2] - quartiles[0]).nan_to_num(9.0), enough


def _correlation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pearson's r along the last axis over places where neither is NaN, and their number."""
    both = ~(a.isnan() | b.isnan())
    n = both.sum(-1)
    a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    a = torch.where(both, a - a.sum(-1, keepdim=True) / n.clamp(min=1)[..., None], 0.0)
    b = torch.where(both, b - b.sum(-1, keepdim=True) / n.clamp(min=1)[..., None], 0.0)
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return torch.where(scale > 1e-6, (a * b).sum(-1) / scale.clamp(min=1e-12), 0.0), n


def shifted(
    raw: Tensor, layout: Layout, page_tokens: int, written: Tensor, facts: Marks
) -> Iterator[tuple[int, int, str]]:
    """(page, shift, evidence) of pages whose scales fit the codes `shift` slots earlier far better than their own."""
    if page_tokens < 16:
        return
    groups = layout["codes"].count // layout.group
    copies = facts.scale.shape[-1] // groups  # a scale stored four times is one piece of evidence
    size = code_sizes(raw, layout, page_tokens, groups)
    odd = facts.zero | facts.negative | facts.absurd | facts.denormal | facts.below
    # where the floor made the scale, the codes shrink with the values and the law does not hold
    usable = (written[..., None] & ~odd & ~facts.free)[..., ::copies]
    scale = torch.where(usable, facts.scale[..., ::copies].log2(), torch.nan)
    size = torch.where((written[..., None] & (odd | ~facts.free))[..., ::copies], size, torch.nan)
    # a group that is loud in every entry says nothing about entries
    scale, size = scale - scale.nanmean(1, keepdim=True), size - size.nanmean(1, keepdim=True)
    at_home, _ = _correlation(size.flatten(1), scale.flatten(1))
    doubtful = ((at_home > -0.35) & (written.sum(-1) >= 12)).nonzero().flatten()
    for page in doubtful.tolist():
        # scales missing at one end of the page already suggest where they went
        missing = (facts.zero & ~facts.silent).all(-1)[page][written[page]].int()
        head, tail = int(missing.cumprod(0).sum()), int(missing.flip(0).cumprod(0).sum())
        hint = head if head >= tail else -tail
        shift, r, z = _best_shift(size[page], scale[page], hint)
        if z < (-2.6 if hint and shift == hint else -5.2) and r < float(at_home[page]) - 0.35:
            yield page, shift, f"correlation {r:.2f} there, {at_home[page]:.2f} at home"


def _best_shift(size: Tensor, scale: Tensor, hint: int = 0) -> tuple[int, float, float]:
    """(shift, r, Fisher's z) at which scales [P, groups] fit sizes [P, groups] best, rolled or cut; or at `hint`."""
    tokens = size.shape[0]
    # repeated text repeats entries: only different ones are evidence
    valid = ~size.isnan()
    distinct = len(torch.unique(size[valid])) / max(1, int(valid.sum()))
    # groups of one entry share its size: they count as two, not as many
    distinct *= min(1.0, 2 / size.shape[1])
    steps = [hint] if hint else [n for n in range(-tokens // 2, tokens // 2 + 1) if n]
    rolled = torch.stack([scale.roll(-n, 0) for n in steps])
    cut = rolled.clone()
    for row, n in enumerate(steps):
        cut[row, slice(tokens - n, None) if n > 0 else slice(0, -n)] = torch.nan
    r, pairs = _correlation(size.flatten()[None], torch.cat([rolled, cut]).flatten(1))
    z = torch.atanh(r.clamp(-0.9999, 0.9999)) * (pairs * distinct - 3).clamp(min=0).sqrt()
    best = int(z.argmin())
    return steps[best % len(steps)], float(r[best]), float(z[best])


# ---- identify --------------------------------------------------------------------------------------------------------


def fit(raw: Tensor, layout: Layout, page_tokens: int) -> tuple[float, int]:
    """Share of the written scale groups that obey the layout's writers, and how many entries were written."""
    found = marks(raw, layout, page_tokens)
    written = ~found.empty
    count = int(written.sum())
    return (float(found.lawful[written].float().mean()) if count else 0.0), count


@cache
def chance(name: str) -> float:
    """The fit that uniformly random bytes reach under a layout (measured on a seeded page)."""
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(20261129)
    raw = torch.randint(0, 256, (8, layout.page_bytes(64)), dtype=torch.uint8, generator=generator)
    return fit(raw, layout, 64)[0]


def identify(raw: Tensor, page_tokens: int | None = None) -> pd.DataFrame:
    """Which layouts explain unlabelled bytes, best first. `raw` uint8, any shape; its length must be whole pages.

    Columns: layout, page_tokens, pages, page_bytes, fit, sentence. `fit` is the share of written scale groups that
    obey the layout's public writers, less what random bytes reach, 0..1. The first row says "none of these" when no
    fit exceeds one half. FNUZ and FN codes are the same bytes at half the worth: only a zero entry's scale can tell
    them apart. Raises ValueError on empty input or another dtype.
    """
    if raw.dtype != torch.uint8 or raw.numel() == 0:
        raise ValueError(f"identify takes at least one page of uint8 bytes; found {raw.numel()} of {raw.dtype}")
    flat = raw.reshape(-1)
    table = _fits(flat, page_tokens, _whole_pages)
    if table.empty or table["fit"].iloc[0] <= 0.5:
        apart = _fits(flat, page_tokens, _pages_apart)
        table = apart if len(apart) else table
    if table.empty or table["fit"].iloc[0] <= 0.5:
        best = f"best fit {table['fit'].iloc[0]:.2f}" if len(table) else "no layout has pages that divide it"
        nothing = (NONE, 0, 0, 0, 0.0, f"{flat.numel():,} bytes follow no known layout ({best})")
        table = pd.concat([pd.DataFrame([nothing], columns=table.columns), table], ignore_index=True)
    return table.reset_index(drop=True)


def _fits(flat: Tensor, page_tokens: int | None, cut: Callable[[Tensor, Layout, int], Tensor | None]) -> pd.DataFrame:
    """The table of `identify`, with pages as `cut` finds them."""
    found = []
    for name, layout, base in _candidates():
        # rows that lie one after another look alike for every page size: the first one stands for all
        contiguous = all(f.base == 0 for f in layout.fields)
        for size in (page_tokens,) if page_tokens else layout.page_tokens[:1] if contiguous else PAGE_TOKENS:
            pages = None if size % layout.token_multiple else cut(flat, layout, size)
            if pages is None:
                continue
            stride = pages.stride(0) if len(pages) > 1 else pages.shape[1]
            sample = pages[:: max(1, len(pages) // 256)]
            share, written = fit(sample, layout, size)
            value = max(0.0, (share - chance(base)) / (1 - chance(base)))
            value += _favour(sample, layout, size) if value > 0.5 else 0.0
            sentence = f"{share:.1%} of the scale groups in {written} written entries obey the writer of {base} "
            sentence += f"(random bytes: {chance(base):.1%})"
            if base != name:
                sentence += f" if they lie in rows of {layout.token_bytes} bytes, which no reader of {base} expects"
            if stride != pages.shape[1]:
                sentence += f"; pages of {pages.shape[1]:,} bytes begin every {stride:,}"
            found.append((name, size, len(pages), stride, value, sentence))
    table = pd.DataFrame(found, columns=["layout", "page_tokens", "pages", "page_bytes", "fit", "sentence"])
    table = table.sort_values("fit", ascending=False, kind="stable", ignore_index=True)
    return table.assign(fit=table["fit"].clip(upper=1.0))


@cache
def _candidates() -> list[tuple[str, Layout, str]]:
    """(name, layout, name of the public record): every record, and footers that somebody wrote as rows."""
    rows = [(f"{name}{AS_ROWS}", as_rows(layout), name) for name, layout in LAYOUTS.items()
            if f"{name}-interleaved" not in LAYOUTS and not layout["codes"].tile]  # fmt: skip
    return [(name, layout, name) for name, layout in LAYOUTS.items()] + [row for row in rows if row[1]]  # type: ignore[misc]


def _whole_pages(flat: Tensor, layout: Layout, page_tokens: int) -> Tensor | None:
    size = layout.page_bytes(page_tokens)
    return None if flat.numel() % size else flat.view(-1, size)


def _pages_apart(flat: Tensor, layout: Layout, page_tokens: int) -> Tensor | None:
    """Pages that lie further apart than their size, as engines pad them to a common stride."""
    size = layout.page_bytes(page_tokens)
    if flat.numel() < 2 * size or fit(flat[:size].view(1, size), layout, page_tokens)[0] < 0.9:
        return None
    stride = stride_of(flat, layout, page_tokens)
    return flat.as_strided(((flat.numel() - size) // stride + 1, size), (stride, 1)) if stride else None


def _favour(pages: Tensor, layout: Layout, page_tokens: int) -> float:
    """Tie-breakers among layouts of equal fit, as a bonus: the record that demands more of the bytes wins."""
    found = marks(pages, layout, page_tokens)
    written = ~found.empty
    if layout["codes"].format == "e4m3fnuz":
        zero_entry = (found.silent.all(-1) & written)[..., None].expand_as(found.scale)
        floor = floors(layout)[1]
        return 0.02 if bool(zero_entry.any()) and bool((found.scale[zero_entry] == floor).all()) else -0.02
    if layout["scales"].format == "f32" and all(rule.power_of_two for rule in layout.writers.values()):
        return 0.01
    return 0.0
