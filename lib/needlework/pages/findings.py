"""diagnose: what is wrong with a pool, page by page and entry by entry, judged from its bytes alone.

With more evidence it sees more: `live` says which entries a request wrote (others may hold anything), `before` is the
same pool as it was dumped before the request ran (what is unchanged is stale), `digests` are what `page_digests` gave
where the pages came from (swapped, repeated and foreign pages; with digests of entries also a few changed bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from . import shifts
from .digests import from_digests, page_digests, runs
from .inspect import Marks, entry_bytes, floors, marks
from .layout import Layout
from .layouts import LAYOUTS, layout_of

COLUMNS = ["name", "severity", "page", "slot", "slot_last", "field", "sentence"]

# name -> (severity, field, what it means); the sentence of a finding is made from the last
MEANINGS = {
    "never-written": ("error", "entry", "all bytes are zero, scale included: nothing was ever written here"),
    "half-page": ("error", "page", "only part of the page was written"),
    "poison": ("error", "entry", "every byte repeats one word: a fill pattern, not data"),
    "row-format": ("error", "page", "entries were written as whole rows, data beside scale, into a footer page"),
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
    for find in (_from_before, _parts, _shapes, _repeats):
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
    same = (entry_bytes(raw, layout, page_tokens) == entry_bytes(before.cpu(), layout, page_tokens)).all(-1)
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
    for page in (~settled).nonzero().flatten().tolist():
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
    for page in (~settled & (lawful < 0.9)).nonzero().flatten().tolist():
        rival = _other_shape(raw[page : page + 1], layout, page_tokens, written[page])
        if rival:
            rows.append(_row(rival[0], page, rival[1]))
            settled[page] = True
    for page, shift, detail in shifts.shifted(raw, layout, page_tokens, written & ~settled[:, None], facts):
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
    rows = shifts.as_rows(layout)
    if rows is not None:
        detail = f"{layout.token_bytes}-byte rows explain it"
        rivals.append(("row-format", rows, detail))
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
        if float(_share(facts, written[None] & ~facts.empty)) >= 0.9:
            return name, detail
    return None


def _doubled(raw, layout: Layout, page_tokens: int, written: Tensor, facts: Marks):
    """FNUZ codes read as FN are the same bytes at twice the worth: seen by a zero entry's scale, or by keys' size."""
    fnuz = 2 * floors(layout)[1]
    silent = facts.silent.all(-1) & written
    for page in silent.any(-1).nonzero().flatten().tolist():
        if bool((facts.scale[page][silent[page]] == fnuz).all()):
            yield page, "a zero entry carries the smallest scale of a FNUZ writer (1e-4/224)"
            written[page] = False
    size, spread, enough = shifts.page_sizes(raw, layout, page_tokens, written, facts)
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
    content = entry_bytes(raw, layout, page_tokens) * live[..., None]
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


__all__ = ["COLUMNS", "MEANINGS", "diagnose", "page_digests", "runs"]
