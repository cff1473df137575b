"""Awkward inputs on purpose: seeded cases for every operation, each with the reason why it is there.

A case builds its inputs from its seed alone, so that a failure can be repeated by naming it. Every byte that the
kernel must not depend on (other pages, unused slots, page padding, columns past the length) is *background*: "nan"
fills it with 0xFF, which is NaN in every format of a page, "noise" with finite garbage. The result must be the same
for both, bit for bit. Page 0 is never referenced, as in a real pool: a kernel that reads a hole (-1) as page 0 reads
background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from needlework.pages import layout_of

INT32 = 2**31


@dataclass(frozen=True)
class Case:
    """One input. kind: what is awkward; covers: the topics it counts for; optional: why a kernel may refuse it ("" =
    may not)."""

    kind: str
    seed: int
    covers: tuple[str, ...] = ()
    optional: str = ""

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        """The keyword arguments of the operation."""
        raise NotImplementedError

    def varied(self) -> Case:
        """A case of the same shapes with other numbers and, where it has several, other lengths: for buffers used
        again."""
        changes: dict[str, Any] = {"seed": self.seed + 500}
        if isinstance(getattr(self, "lengths", None), tuple):
            changes["lengths"] = self.lengths[::-1]  # type: ignore[attr-defined]
        return replace(self, **changes)

    @property
    def name(self) -> str:
        """What identifies the case in a table."""
        return f"{self.kind} #{self.seed}"

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def garbage(shape: tuple[int, ...], background: str) -> Tensor:
    """uint8 bytes of one background; finite in every page format ("noise": bytes below 0x70, seeded)."""
    if background == "nan":
        return torch.full(shape, 0xFF, dtype=torch.uint8)
    return torch.randint(0, 0x70, shape, generator=torch.Generator().manual_seed(99), dtype=torch.uint8)


def empty_pool(pages: int, page_bytes: int, background: str, touched: Tensor) -> Tensor:
    """A pool whose `touched` pages and their neighbours hold background. A pool past 64 MiB is filled only there: on
    a CPU the rest is never backed by memory, so that page ids past 2^31 / page_bytes cost nothing."""
    if pages * page_bytes <= 64 << 20:
        return garbage((pages, page_bytes), background)
    pool = torch.empty((pages, page_bytes), dtype=torch.uint8)
    near = (
        torch.cat([touched + d for d in (-1, 0, 1)] + [torch.zeros(1, dtype=torch.long)]).clamp(0, pages - 1).unique()
    )
    pool[near] = garbage((len(near), page_bytes), background)
    return pool


def page_ids(count: int, page_bytes: int, placing: str, g: torch.Generator) -> tuple[Tensor, int]:
    """`count` distinct page ids >= 1, and the size of the pool. "permuted" in a small pool; "high": around 2^31
    bytes."""
    if placing == "high":
        edge = INT32 // page_bytes
        return torch.randperm(count, generator=g) + edge - count // 2, edge + count + 2
    size = 2 * count + 3
    return torch.randperm(size - 1, generator=g)[:count] + 1, size


def widened(x: Tensor) -> Tensor:
    """The same numbers as a slice of a wider buffer: rows apart, last axis contiguous."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 24), dtype=x.dtype, device=x.device)
    wide[..., 8 : 8 + x.shape[-1]] = x
    return wide[..., 8 : 8 + x.shape[-1]]


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


@dataclass(frozen=True)
class StoreCase(Case):
    """Index keys written at slots of a pool that already holds background."""

    count: int = 70
    data: str = "random"  # random, spread, tiny, zero, outlier
    padded: bool = False  # some slots are -1
    pages: str = "permuted"
    bf16: bool = False
    strided: bool = False

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        g = self.generator()
        page_bytes = layout_of("dsa-index-fp8").page_bytes(64)
        ids, size = page_ids(-(-self.count // 64) + 1, page_bytes, self.pages, g)
        slots = (ids[:, None] * 64 + torch.arange(64)).flatten()
        slots = slots[torch.randperm(len(slots), generator=g)[: self.count]]
        keys = torch.randn(self.count, 128, generator=g)
        if self.data == "spread":
            keys *= 10.0 ** torch.empty(self.count, 1).uniform_(-3, 3, generator=g)
        elif self.data == "tiny":
            keys *= 1e-6
        elif self.data == "zero":
            keys[::2] = 0.0
        elif self.data == "outlier":
            keys[:, 17] *= 1000.0
        if self.padded:
            slots[torch.randperm(self.count, generator=g)[: self.count // 3]] = -1
        keys = keys.to(torch.bfloat16) if self.bf16 else keys
        pool = empty_pool(size, page_bytes, background, ids)
        return on(
            device, {"pool": pool, "slots": slots, "keys": widened(keys) if self.strided else keys, "page_tokens": 64}
        )


@dataclass(frozen=True)
class LogitsCase(Case):
    """Index logits over a paged pool. lengths: one per row, or one tuple per request (2-D lengths)."""

    lengths: tuple[int, ...] | tuple[tuple[int, ...], ...] = (100,)
    heads: int = 64
    data: str = "random"  # random, needle, concentrated, negative, spread, zeros
    pages: str = "permuted"
    table: str = "page0"  # what stands behind the last page: page0, holes, full (nothing: the longest row fills it)
    strided: bool = False
    layout: str = "dsa-index-fp8"
    columns: int = 0  # of the page table, at least: an engine's tables are as wide as its longest context

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        g = self.generator()
        layout = layout_of(self.layout)
        page_bytes = layout.page_bytes(64)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        per_request = lengths if lengths.ndim == 1 else lengths.amax(dim=1)
        used = [-(-int(n) // 64) for n in per_request]
        columns = max(self.columns, max(used) + (self.table != "full"))
        ids, size = page_ids(max(sum(used), 1), page_bytes, self.pages, g)
        table = torch.full((len(used), columns), -1 if self.table == "holes" else 0, dtype=torch.int32)
        pool = empty_pool(size, page_bytes, background, ids)
        rows = (len(used),) if lengths.ndim == 1 else tuple(lengths.shape)
        q = torch.randn(*rows, self.heads, 128, generator=g)
        weights = torch.randn(*rows, self.heads, generator=g) * 0.1
        start = 0
        for b, n in enumerate(per_request.tolist()):
            table[b, : used[b]] = ids[start : start + used[b]]
            start += used[b]
            keys = self._keys(n, q[b].reshape(-1, 128), g)
            position = torch.arange(n)
            layout.scatter(pool, table[b].long()[position // 64] * 64 + position % 64, keys)
        if self.data == "negative":
            weights = -weights.abs()
        scale = (
            q.abs().amax(dim=-1, keepdim=True) / 448
        )  # the query's own scale goes into the weights, as in the engines
        q, weights = (q / scale).to(torch.float8_e4m3fn), weights * scale[..., 0]
        if self.strided:
            weights, table = widened(weights), widened(table)
            q = widened(q.view(torch.uint8)).view(torch.float8_e4m3fn)
        out = {"q": q, "weights": weights, "pool": pool, "page_table": table, "lengths": lengths, "page_tokens": 64}
        return on(device, out | ({"layout": self.layout} if self.layout != "dsa-index-fp8" else {}))

    def _keys(self, n: int, q: Tensor, g: torch.Generator) -> Tensor:
        keys = torch.randn(n, 128, generator=g)
        if n and self.data == "needle":
            keys[int(torch.randint(n, (), generator=g))] = q.mean(dim=0) * 8
        elif self.data == "concentrated":  # a captured row looks like this: one topic, little between the keys
            keys = torch.randn(1, 128, generator=g) + 0.05 * keys
        elif self.data == "spread":  # every key its own scale: a scale read from the next key is then far off
            keys *= 10.0 ** torch.empty(n, 1).uniform_(-3, 2, generator=g)
        elif self.data == "zeros":
            keys[torch.rand(n, generator=g) < 0.9] = 0.0
        return keys


@dataclass(frozen=True)
class TopkCase(Case):
    """Selection of k among rows of scores; columns past a row's length hold NaN or a winning score (background)."""

    lengths: tuple[int, ...] = (100, 512, 513)
    k: int = 512
    data: str = "random"
    translate: bool = True
    strided: bool = False

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        g = self.generator()
        columns = max(1, -(-max(self.lengths) // 64)) + 1
        width = columns * 64
        scores = torch.stack([topk_row(self.data, width, g) for _ in self.lengths])
        if self.data == "needle":  # the winner stands last, first, and on both sides of a page edge
            for b, n in enumerate(self.lengths):
                for place in {0, n - 1, 63, 64} & set(range(n)):
                    scores[b, place] = 1000.0 + place
        past = torch.arange(width) >= torch.tensor(self.lengths)[:, None]
        scores[past] = torch.nan if background == "nan" else 3e38
        out: dict[str, Any] = {"logits": scores, "lengths": torch.tensor(self.lengths, dtype=torch.int32), "k": self.k}
        if self.translate:
            ids = torch.randperm(len(self.lengths) * columns * 2, generator=g)[: len(self.lengths) * columns] + 1
            out |= {"page_table": ids.reshape(len(self.lengths), columns).to(torch.int32), "page_tokens": 64}
        if self.strided:
            out["logits"] = widened(scores)
        return on(device, out)


def topk_row(data: str, n: int, g: torch.Generator) -> Tensor:
    """One row of scores [n] that a coarse or approximate selection gets wrong."""
    x = torch.randn(n, generator=g)
    match data:
        case "tied":  # seven values only
            return torch.round(x * 1.5) / 2
        case "equal":
            return torch.full((n,), 0.25)
        case "one bin":  # the upper 22 bits are equal: any coarse first pass puts the row in one bin
            return (torch.randint(0, 1024, (n,), generator=g, dtype=torch.int32) + 0x3F9D0000).view(torch.float32)
        case "concentrated":  # 1.0 … 1.245: one fp16-derived 8-bit bin holds them all
            return 1.0 + 0.245 * torch.rand(n, generator=g)
        case "rising":
            return torch.linspace(-1.0, 1.0, n)
        case "falling":
            return torch.linspace(1.0, -1.0, n)
        case "mostly zero":
            return torch.where(torch.rand(n, generator=g) < 0.9, torch.zeros(()), x)
        case "negative":
            return -x.abs() - 1e-3
        case "tiny":  # below the smallest fp16 number
            return x * 1e-9
        case "huge":  # above the largest fp16 number
            return x * 1e30
        case "captured":  # slow drift of one topic plus needle-like spikes, as rows of a real indexer look
            drift = torch.cumsum(x * 0.01, 0)
            return torch.relu(drift + 0.05 * torch.randn(n, generator=g)) + (torch.rand(n, generator=g) < 0.002) * 3.0
        case _:
            return x


@dataclass(frozen=True)
class DecodeCase(Case):
    """Sparse MLA decode over selected entries."""

    batch: int = 2
    heads: int = 64
    keys: int = 128
    layout: str = "v4-mla-fp8"
    page_tokens: int = 64
    holes: float = 0.0  # share of -1 in the index list
    data: str = "random"  # random, peaked, equal, large, outlier
    sink: str = ""  # "", random, -inf, +inf
    extra_keys: int = 0
    extra_page_tokens: int = 64
    limited: bool = False  # topk_length
    pages: str = "permuted"
    strided: bool = False

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        g = self.generator()
        dim = layout_of(self.layout).dim
        q = torch.randn(self.batch, self.heads, dim, generator=g).to(torch.bfloat16)
        pool, indices = self._cache(self.keys, self.page_tokens, q, background, g)
        out: dict[str, Any] = {"q": widened(q) if self.strided else q, "pool": pool, "indices": indices}
        out |= {"layout": self.layout, "page_tokens": self.page_tokens}
        if self.strided:
            out["indices"] = widened(indices)
        if self.sink:
            sink = torch.randn(self.heads, generator=g)
            if self.sink != "random":
                sink[::2] = float(self.sink)
            out["sink"] = sink
        if self.extra_keys:
            extra, more = self._cache(self.extra_keys, self.extra_page_tokens, q, background, g)
            out |= {"extra_pool": extra, "extra_indices": more, "extra_page_tokens": self.extra_page_tokens}
        if self.limited:
            limit = torch.randint(1, self.keys + 1, (self.batch,), generator=g, dtype=torch.int32)
            past = torch.arange(self.keys) >= limit[:, None]  # what lies behind the limit points into page 0
            out |= {"topk_length": limit, "indices": torch.where(past, 5, indices)}
        return on(device, out)

    def _cache(
        self, keys: int, page_tokens: int, q: Tensor, background: str, g: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        layout = layout_of(self.layout)
        page_bytes = layout.page_bytes(page_tokens)
        ids, size = page_ids(-(-3 * keys // page_tokens) + 1, page_bytes, self.pages, g)
        slots = (ids[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        indices = torch.stack([slots[torch.randperm(len(slots), generator=g)[:keys]] for _ in range(self.batch)])
        used = indices.unique()
        values = torch.randn(len(used), layout.dim, generator=g)
        if self.data == "peaked":  # one entry takes nearly all of the softmax
            values[len(used) // 2] = 4.0 * q[0, 0].float()
        elif self.data == "equal":
            values[:] = values[0].clone()
        elif self.data == "large":  # scores far past exp's range unless the maximum is taken off first
            values *= 60.0
        elif self.data == "outlier":  # each tile its own magnitude, so that a neighbour's scale is far off
            values[:, : layout.dim - 64].unflatten(1, (-1, 64)).mul_(
                10.0 ** torch.linspace(-2, 1, layout.dim // 64 - 1)[:, None]
            )
        pool = empty_pool(size, page_bytes, background, ids)
        layout.scatter(pool, used, values, page_tokens)
        if self.holes:
            indices = torch.where(torch.rand(indices.shape, generator=g) < self.holes, -1, indices)
        return pool, indices.to(torch.int32)


@dataclass(frozen=True)
class MergeCase(Case):
    """Partial attentions to be merged by their log-sum-exp."""

    parts: int = 4
    batch: int = 2
    heads: int = 16
    dim: int = 512
    empty: str = ""  # "", "+inf", "-inf": the sentinel of some parts that had no key
    spread: float = 1.0  # of the log-sum-exps
    sink: bool = False

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        g = self.generator()
        outs = torch.randn(self.parts, self.batch, self.heads, self.dim, generator=g)
        lses = torch.randn(self.parts, self.batch, self.heads, generator=g) * self.spread + 5.0
        if self.empty:
            gone = torch.rand(lses.shape, generator=g) < 0.4
            gone[:, 0, 0] = True  # one row has no part at all
            lses[gone] = float(self.empty)
            outs[gone] = torch.nan if background == "nan" else 7.0
        sink = {"sink": torch.randn(self.heads, generator=g) + 5.0} if self.sink else {}
        return on(device, {"outs": outs, "lses": lses, **sink})


@dataclass(frozen=True)
class PlainCase(Case):
    """Inputs of an operation without pages, made by a seeded function."""

    make: Callable[[torch.Generator], dict[str, Any]] = dict  # type: ignore[assignment]

    def inputs(self, background: str = "nan", device: str = "cpu") -> dict[str, Any]:
        return on(device, self.make(self.generator()))
