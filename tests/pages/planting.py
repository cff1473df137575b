"""Healthy dumps of realistic variety, and every fault that diagnose must find, planted at a random place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from needlework.pages import LAYOUTS, Layout, page_digests
from needlework.pages.findings import as_rows
from torch import Tensor

KINDS = (
    "normalised",
    "correlated",
    "outlier channels",
    "repetitive text",
    "mixed sizes",
    "tiny",
    "large",
    "zero entries",
    "repetitive mixed",
    "sizes in a walk",
)


@dataclass
class Dump:
    raw: Tensor
    layout: Layout
    page_tokens: int
    live: Tensor
    extra: dict = field(default_factory=dict)  # further keyword arguments for diagnose
    page: int = -1


def keys(kind: str, count: int, dim: int, generator: torch.Generator) -> Tensor:
    """float32 [count, dim], rounded to bf16 as every public writer's input is."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(count, dim)
    if kind in ("correlated", "repetitive text", "repetitive mixed"):
        walk = torch.cumsum(normal(count, dim) * 0.3, 0)
        x = x + walk
    if kind == "outlier channels":
        x = x * torch.exp(normal(dim) * 0.7)
    if kind.startswith("repetitive"):  # one sentence over and over, cut at odd places
        period = int(torch.randint(5, 23, (1,), generator=generator))
        x = x[torch.arange(count) % period]
        x = x + 0.02 * normal(count, dim) * (torch.arange(count) % 3 == 0)[:, None]
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    if kind == "mixed sizes":
        x = x * torch.exp(1.5 * normal(count, 1))
    if kind == "repetitive mixed":
        x = x * torch.exp(normal(97, 1)).repeat(-(-count // 97), 1)[:count]
    if kind == "sizes in a walk":
        x = x * torch.exp(0.3 * torch.cumsum(normal(count, 1), 0).remainder(8))
    if kind == "tiny":
        x = x * 10 ** (-6 * torch.rand(count, 1, generator=generator))
    if kind == "large":
        x = x * 3000
    if kind == "zero entries":
        x[torch.rand(count, generator=generator) < 0.1] = 0.0
    return x.to(torch.bfloat16).float()


def healthy(layout: Layout, seed: int, kind: str | None = None, page_tokens: int = 64, pages: int = 6) -> Dump:
    """A pool of one request: full pages, a partly filled last one with leftovers behind it, and a free page."""
    generator = torch.Generator().manual_seed(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    if kind in ("zero entries", "tiny") and layout.name == "v32-mla-fp8":
        kind = "normalised"  # that writer has no floor: a zero latent leaves no trace, and none exists after a norm
    count = (pages - 2) * page_tokens + int(torch.randint(1, page_tokens + 1, (1,), generator=generator))
    raw = torch.zeros(pages, layout.page_bytes(page_tokens), dtype=torch.uint8)
    leftovers = bool(seed % 2)
    if leftovers:  # an earlier request used the same pages
        everything = torch.arange(pages * page_tokens)
        layout.scatter(raw, everything, keys("normalised", len(everything), layout.dim, generator), page_tokens)
    layout.scatter(raw, torch.arange(count), keys(kind, count, layout.dim, generator), page_tokens)
    live = (torch.arange(pages * page_tokens) < count).view(pages, page_tokens)
    return Dump(raw, layout, page_tokens, live)


# ---- faults: each changes one dump in place ----------------------------------------------------------------------
Fault = Callable[[Dump, int, torch.Generator], None]


def _slot_bytes(dump: Dump, name: str, page: int, slot: int) -> Tensor:
    """Writable bytes of one field of one entry; layouts without tiles only."""
    return dump.layout[name].view(dump.raw, dump.page_tokens)[page, slot, 0, 0]


def _some_slots(dump: Dump, page: int, generator: torch.Generator) -> list[int]:
    live = dump.live[page].nonzero().flatten()
    count = int(torch.randint(1, 4, (1,), generator=generator))
    return live[torch.randperm(len(live), generator=generator)[:count]].tolist()


def _set(name: str, value: Callable[[Dump], Tensor]) -> Fault:
    def plant(dump: Dump, page: int, generator: torch.Generator) -> None:
        for slot in _some_slots(dump, page, generator):
            stored = value(dump)
            target = _slot_bytes(dump, name, page, slot)
            target[: len(stored)] = stored

    return plant


def _float(value: float) -> Callable[[Dump], Tensor]:
    def make(dump: Dump) -> Tensor:
        if dump.layout["scales"].format == "f32":
            return torch.tensor([value]).view(torch.uint8)
        byte = 0 if value == 0 else 255 if value != value or value > 1e6 else 90
        return torch.tensor([byte], dtype=torch.uint8)

    return make


def never_written(dump, page, generator):
    for slot in _some_slots(dump, page, generator):
        for item in dump.layout.fields:
            _slot_bytes(dump, item.name, page, slot).zero_()


def never_written_page(dump, page, generator):
    dump.raw[page] = 0


def all_zero(dump, page, generator):
    for slot in _some_slots(dump, page, generator):
        _slot_bytes(dump, "codes", page, slot).zero_()


def poison(dump, page, generator):
    word = [[0xFF] * 4, [0xAA] * 4, [0xCD] * 4, [0xEF, 0xBE, 0xAD, 0xDE]][
        int(torch.randint(4, (1,), generator=generator))
    ]
    if torch.rand(1, generator=generator) < 0.5:
        dump.raw[page] = torch.tensor(word, dtype=torch.uint8).repeat(dump.raw.shape[1] // 4)
        return
    for slot in _some_slots(dump, page, generator):
        for item in dump.layout.fields:
            target = _slot_bytes(dump, item.name, page, slot)
            target.copy_(torch.tensor(word, dtype=torch.uint8).repeat(-(-len(target) // 4))[: len(target)])


def nan_code(dump, page, generator):
    for slot in _some_slots(dump, page, generator):
        target = _slot_bytes(dump, "codes", page, slot)
        target[int(torch.randint(len(target), (1,), generator=generator))] = 0x7F


def scale_shifted(dump, page, generator):
    """The scale block of a page lies n slots late or early; the gap holds what was pushed out, or zeros."""
    n = int(torch.randint(1, dump.page_tokens // 2, (1,), generator=generator))
    n = n if torch.rand(1, generator=generator) < 0.5 else -n
    view = dump.layout["scales"].view(dump.raw, dump.page_tokens)[page]
    view.copy_(view.clone().roll(n, 0))
    if torch.rand(1, generator=generator) < 0.5:
        view[slice(0, n) if n > 0 else slice(n, None)] = 0


def rows(dump, page, generator):
    values = dump.layout.decode(dump.raw[page : page + 1], dump.page_tokens)
    interleaved = as_rows(dump.layout)
    written = interleaved.encode({k: v for k, v in values.items() if k != "padding"}, dump.page_tokens)
    dump.raw[page] = 0
    dump.raw[page, : written.shape[1]] = written[0]


def scales_in_rows(dump, page, generator):
    """Codes lie where they belong; each scale is put behind its row of the shape [P, 1, row], across the codes."""
    scales = dump.layout["scales"].view(dump.raw, dump.page_tokens)[page].clone()
    dump.layout["scales"].view(dump.raw, dump.page_tokens)[page].zero_()
    as_rows(dump.layout, ("scales",))["scales"].view(dump.raw, dump.page_tokens)[page].copy_(scales)


def drift(dump, page, generator):
    """Every page lies later than the reader looks: the writer's stride has a gap."""
    need = dump.raw.shape[1]
    gap = 16 * int(torch.randint(1, need // 128, (1,), generator=generator))
    wide = torch.zeros(len(dump.raw), need + gap, dtype=torch.uint8)
    wide[:, :need] = dump.raw
    dump.raw[:] = wide.view(-1)[: dump.raw.numel()].view(dump.raw.shape)
    dump.page = 1 + page % 3


def _round_scales(rounded: Callable[[Tensor], Tensor], whole: bool) -> Fault:
    """Of each scale a power of two near it, the codes left as they are; on one page or on all."""

    def plant(dump: Dump, page: int, generator: torch.Generator) -> None:
        for where in range(len(dump.raw)) if whole else [page]:
            view = dump.layout["scales"].view(dump.raw, dump.page_tokens)[where]
            scale = dump.layout["scales"].stored(dump.raw, dump.page_tokens)[where]
            view.copy_(rounded(scale.log2()).exp2().contiguous().view(torch.uint8).reshape(view.shape))

    return plant


def swapped(dump, page, generator):
    dump.extra["digests"] = page_digests(dump.raw, dump.layout, dump.page_tokens, dump.live)
    other = (page + 1) % 4
    dump.raw[[page, other]] = dump.raw[[other, page]]


def repeated(dump, page, generator):
    dump.raw[page] = dump.raw[(page + 1) % 4]


def stale_by_digest(dump, page, generator):
    dump.extra["digests"] = page_digests(dump.raw, dump.layout, dump.page_tokens, dump.live)
    foreign = keys("normalised", dump.page_tokens, dump.layout.dim, generator)
    dump.layout.scatter(dump.raw, torch.arange(dump.page_tokens) + page * dump.page_tokens, foreign, dump.page_tokens)


def stale_since_before(dump, page, generator):
    before = torch.zeros_like(dump.raw)
    everything = torch.arange(dump.raw.shape[0] * dump.page_tokens)
    dump.layout.scatter(
        before, everything, keys("normalised", len(everything), dump.layout.dim, generator), dump.page_tokens
    )
    dump.raw[page] = before[page]
    dump.extra["before"] = before


def half_page(dump, page, generator):
    size = dump.page_tokens * dump.layout.token_bytes
    if torch.rand(1, generator=generator) < 0.5:  # half of the bytes
        half = slice(size // 2, None) if torch.rand(1, generator=generator) < 0.5 else slice(0, size // 2)
        dump.raw[page, half] = 0
    else:  # half of the entries
        for slot in range(dump.page_tokens // 2, dump.page_tokens):
            for item in dump.layout.fields:
                _slot_bytes(dump, item.name, page, slot).zero_()


def _rewrite_as(name: str) -> Fault:
    def plant(dump: Dump, page: int, generator: torch.Generator) -> None:
        values = dump.layout.decode(dump.raw[page : page + 1], dump.page_tokens)["values"]
        dump.raw[page] = LAYOUTS[name].encode({"values": values}, dump.page_tokens)[0]

    return plant


def fnuz(dump, page, generator):
    _rewrite_as(dump.layout.name + "-fnuz")(dump, page, generator)


def padding(dump, page, generator):
    tail = dump.raw.shape[1] - dump.page_tokens * dump.layout.token_bytes
    at = dump.raw.shape[1] - 1 - int(torch.randint(tail, (1,), generator=generator))
    dump.raw[page, at] = 7


# fault -> (layouts it can happen in, plant, names that are right, kinds of keys)
INDEX, V4, V32 = "dsa-index-fp8", "v4-mla-fp8", "v32-mla-fp8"
NORMALISED = ("normalised", "correlated", "outlier channels")
ALL = KINDS[:5]
FAULTS: dict[str, tuple[tuple[str, ...], Fault, tuple[str, ...], tuple[str, ...]]] = {
    "never written": ((INDEX, V4, V32, "v41-mla-fp4"), never_written, ("never-written", "half-page"), ALL),
    "never written page": ((INDEX, V4, "dsa-index-fp4"), never_written_page, ("never-written",), ALL),
    "all zero": ((INDEX, V4, "v41-mla-fp8"), all_zero, ("all-zero",), NORMALISED),
    "poison": ((INDEX, V4, V32, "v41-mla-fp8"), poison, ("poison", "padding-touched"), ALL),
    "NaN code": ((INDEX, V4, V32), nan_code, ("nan-code",), ALL),
    "zero scale": ((INDEX, V4), _set("scales", _float(0.0)), ("zero-scale",), ALL),
    "denormal scale": ((INDEX, V32), _set("scales", _float(1e-40)), ("denormal-scale",), ALL),
    "negative scale": ((INDEX, V32), _set("scales", _float(-0.01)), ("negative-scale",), ALL),
    "absurd scale": ((INDEX, V4, V32), _set("scales", _float(3e30)), ("absurd-scale",), ALL),
    "NaN scale": ((INDEX, V4), _set("scales", _float(float("nan"))), ("absurd-scale",), ALL),
    "scale out of range": ((INDEX, V4), _set("scales", _float(1e-9)), ("scale-out-of-range",), ALL),
    "scales shifted": ((INDEX, V4, V32, "dsa-index-fp4", "v41-mla-fp8"), scale_shifted, ("scale-shifted",), NORMALISED),
    "values as rows": ((INDEX, V4, "dsa-index-fp4"), rows, ("row-format",), ALL),
    "scales in rows": ((INDEX, V4, "dsa-index-fp4"), scales_in_rows, ("scales-in-rows",), ALL),
    "stride with a gap": ((INDEX, V4, V32, "dsa-index-fp8-mx"), drift, ("stride-drift",), NORMALISED),
    "scales cut": ((INDEX, V32), _round_scales(torch.floor, False), ("scale-rounded",), NORMALISED),
    "scales raised": ((INDEX, V32), _round_scales(torch.ceil, False), ("scale-rounded",), NORMALISED),
    "all scales rounded": ((INDEX, V32), _round_scales(torch.round, True), ("scale-rounded",), ALL),
    "swapped pages": ((INDEX, V4), swapped, ("swapped-pages",), ALL),
    "repeated page": ((INDEX, V4, V32), repeated, ("repeated-page",), NORMALISED),
    "stale by digest": ((INDEX, V4), stale_by_digest, ("stale",), ALL),
    "stale since before": ((INDEX, V4), stale_since_before, ("stale",), ALL),
    "half a page": ((INDEX, V4, V32, "v41-mla-fp8"), half_page, ("half-page",), ALL),
    "FNUZ read as FN": (
        (INDEX, V4),
        fnuz,
        ("wrong-format",),
        (*NORMALISED, "zero entries"),
    ),
    "ue8m0 read as fp32": ((INDEX,), _rewrite_as("dsa-index-fp8-mx"), ("wrong-format",), ALL),
    "padding touched": ((V4,), padding, ("padding-touched",), ALL),
}


def planted(fault: str, seed: int) -> Dump:
    """A healthy dump with one fault on one of its four full pages."""
    names, plant, _, kinds = FAULTS[fault]
    generator = torch.Generator().manual_seed(10_000 + seed)
    dump = healthy(LAYOUTS[names[seed % len(names)]], 2 * seed, kinds[seed % len(kinds)], pages=7)
    dump.page = int(torch.randint(4, (1,), generator=generator))
    before = dump.raw.clone()
    plant(dump, dump.page, generator)
    assert not torch.equal(before, dump.raw), f"{fault} planted nothing"
    return dump
