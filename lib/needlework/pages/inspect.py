"""What each scale group of a pool shows: the facts that diagnose and identify judge by, computed once and vectorised.

A public writer leaves a signature: a scale never falls under its floor, and the largest code of a group is the format's
largest (plain scale) or lies in its upper half (power-of-two scale), unless the floor set the scale. Random bytes,
another layout or a shifted block do not keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pandas as pd
import torch
from torch import Tensor

from . import formats
from .layout import Layout
from .layouts import LAYOUTS

ABSURD_SCALE = 2.0**16  # normalised keys stay near 1; with 448 codes this scale means values beyond 29 million
NONE = "none of these"
PAGE_TOKENS = (64, 256, 128, 32, 16, 2)


@dataclass(frozen=True)
class Marks:
    """Facts about a pool; all bool. Group marks are [pages, P, groups], entry marks [pages, P]."""

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
    misfit: Tensor  # the codes do not reach the range that a writer's scale gives
    empty: Tensor  # entry: all bytes zero
    poison: Tensor  # entry: every byte, scales too, repeats one non-zero 4-byte word

    @property
    def lawful(self) -> Tensor:
        """Groups in which nothing contradicts the writer."""
        bad = self.zero | self.negative | self.denormal | self.absurd | self.below | self.uneven | self.nan
        return ~(bad | self.misfit | self.poison[..., None])


def entry_bytes(raw: Tensor, layout: Layout, page_tokens: int) -> Tensor:
    """uint8 [pages, P, n]: the bytes that carry an entry, field after field; pad and padding left out."""
    parts = [f.view(raw, page_tokens).flatten(3).flatten(1, 2) for f in layout.fields if f.format != "raw"]
    return torch.cat(parts, -1)


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
    everything = entry_bytes(raw, layout, page_tokens)
    words = everything.view(*everything.shape[:2], -1)
    words = words[..., : words.shape[-1] // 4 * 4].contiguous().view(torch.int32)
    empty = everything.amax(-1) == 0
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
    return Marks(scale, zero, negative, denormal, absurd, below, uneven, nan, silent, free, misfit, empty, poison)


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
    rows = []
    for layout in LAYOUTS.values():
        # rows that lie one after another look alike for every page size: the first one stands for all
        contiguous = all(f.base == 0 for f in layout.fields)
        sizes = (page_tokens,) if page_tokens else layout.page_tokens[:1] if contiguous else PAGE_TOKENS
        for size in sizes:
            if size % layout.token_multiple or flat.numel() % layout.page_bytes(size):
                continue
            pages = flat.view(-1, layout.page_bytes(size))
            sample = pages[:: max(1, pages.shape[0] // 256)]
            share, written = fit(sample, layout, size)
            by_chance = chance(layout.name)
            value = max(0.0, (share - by_chance) / (1 - by_chance))
            value += _favour(sample, layout, size) if value > 0.5 else 0.0
            sentence = (
                f"{share:.1%} of the scale groups in {written} written entries obey the writer of {layout.name} "
                f"(random bytes: {by_chance:.1%})"
            )
            rows.append((layout.name, size, pages.shape[0], layout.page_bytes(size), value, sentence))
    columns = ["layout", "page_tokens", "pages", "page_bytes", "fit", "sentence"]
    table = pd.DataFrame(rows, columns=columns).sort_values("fit", ascending=False, kind="stable")
    table["fit"] = table["fit"].clip(upper=1.0)
    if table.empty or table["fit"].iloc[0] <= 0.5:
        best = f"best fit {table['fit'].iloc[0]:.2f}" if len(table) else "no layout has pages that divide it"
        nothing = (NONE, 0, 0, 0, 0.0, f"{flat.numel():,} bytes follow no known layout ({best})")
        table = pd.concat([pd.DataFrame([nothing], columns=columns), table], ignore_index=True)
    return table.reset_index(drop=True)


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
