"""The KV-cache page layouts that public code uses, one declarative record each, and what follows from a record: page
size, access, decode, encode, byte map. A new layout is one record in `LAYOUTS`.

A pool is uint8 [pages, page_bytes]; a page holds `page_tokens` entries; slot = page * page_tokens + offset. The public
shapes such as [pages, P, 1, 584] or [blocks, 64, 1, 132] are fictions: in a *footer* page all data rows come first,
then all scale rows (sglang 0.5.23 mem_cache/deepseek_v4_memory_pool.py; FlashMLA 9241ae3 tests/quant.py;
DeepGEMM 54e2261 csrc/apis). Only the *interleaved* layouts keep a token's scales beside its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import formats, writers
from .writers import Writer

# values of one step on a CPU thread: shorter ones make the threads wait for Python between one torch call and the next
SLICE_VALUES = 1 << 20
GPU_SLICE_VALUES = 1 << 24  # a GPU's kernels want millions of values a launch


@dataclass(frozen=True)
class Field:
    """`count` numbers of one format for each token.

    Byte b of token t lies at page_tokens * base + offset + t * stride + b, unless `tile` = (T, W) shuffles the block
    into tiles of T tokens by W bytes (aiter's preshuffle): tile after tile for T tokens, token after token in a tile.
    """

    name: str
    format: str
    count: int
    base: int = 0  # bytes per token of the blocks that lie before this one in the page
    offset: int = 0  # bytes from the start of the token's row
    stride: int = 0  # bytes from one token's row to the next
    tile: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of this field per token."""
        return self.count * formats.FORMATS[self.format].bits // 8

    def start(self, page_tokens: int) -> int:
        """First byte of the field's block inside a page."""
        return page_tokens * self.base + self.offset

    def view(self, pool: Tensor, page_tokens: int) -> Tensor:
        """Writable uint8 view [pages, P/T, T, tiles, W] of the field's bytes (T = tiles = 1 without `tile`)."""
        if self.tile is None:
            shape = (pool.shape[0], page_tokens, 1, 1, self.bytes)
            stride: tuple[int, ...] = (pool.stride(0), self.stride, 0, 0, 1)
        else:
            rows, width = self.tile
            shape = (pool.shape[0], page_tokens // rows, rows, self.bytes // width, width)
            stride = (pool.stride(0), self.stride * rows, width, rows * width, 1)
        return pool.as_strided(shape, stride, pool.storage_offset() + self.start(page_tokens))

    def place(self, offset: Tensor) -> tuple[Tensor, Tensor | int]:
        """Where `view` has the token at an offset in its page: (row, place in its tile)."""
        if self.tile is None:
            return offset, 0
        return offset // self.tile[0], offset % self.tile[0]

    def take(self, pool: Tensor, page_tokens: int, *index: Tensor | int) -> Tensor:
        """A copy of the bytes at `index` (page, or page, row and place in its tile) of `view`."""
        view = self.view(pool, page_tokens)
        if view.is_cuda:
            return view[index]
        # numpy copies the bytes of a row in one piece, torch one by one: 20 times as long
        return torch.from_numpy(view.numpy()[_plain(index)])

    def put(self, pool: Tensor, page_tokens: int, data: Tensor, *index: Tensor | int) -> None:
        """Write bytes uint8 [n, bytes] at `index` (page, row and place in its tile) of `view`."""
        view = self.view(pool, page_tokens)
        data = data.reshape(-1, *view.shape[3:])
        if view.is_cuda:
            view[index] = data
        else:  # as in `take`
            view.numpy()[_plain(index)] = data.numpy()

    def stored(self, pool: Tensor, page_tokens: int) -> Tensor:
        """The field as stored: uint8 [pages, page_tokens, bytes], or float32 / bfloat16 [pages, page_tokens, count].

        The uint8 form is a view where strides allow.
        """
        data = self.view(pool, page_tokens).flatten(3).flatten(1, 2)
        kind = formats.FORMATS[self.format].stored
        return data if kind == torch.uint8 else data.contiguous().view(kind)

    def address(self, page_tokens: int) -> Tensor:
        """int64 [page_tokens, bytes]: where each byte of each token's field lies inside the page."""
        rows, width = self.tile or (1, self.bytes)
        token = torch.arange(page_tokens)[:, None]
        byte = torch.arange(self.bytes)[None, :]
        if self.tile is None:
            return self.start(page_tokens) + token * self.stride + byte
        inside = (byte // width) * (rows * width) + (token % rows) * width + byte % width
        return self.start(page_tokens) + token // rows * (self.stride * rows) + inside


def _plain(index: tuple[Tensor | int, ...]) -> tuple[Any, ...]:
    return tuple(one if isinstance(one, int) else one.numpy() for one in index)


@cache
def _has(package: str) -> bool:
    return find_spec(package) is not None


@dataclass(frozen=True)
class Layout:
    """One page layout. `group` values share a scale; `align` rounds the page size up (1: no padding)."""

    name: str
    meaning: str
    fields: tuple[Field, ...]
    group: int
    writers: Mapping[str, Writer] = field(repr=False)
    align: int = 1
    page_tokens: tuple[int, ...] = (64,)  # page sizes that public code uses; any multiple of `token_multiple` works
    source: str = ""

    # ---- shape -------------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Field:
        for item in self.fields:
            if item.name == name:
                return item
        raise KeyError(f"layout {self.name} has no field {name!r}; it has {', '.join(f.name for f in self.fields)}")

    def __contains__(self, name: str) -> bool:
        return any(item.name == name for item in self.fields)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, without page padding."""
        return sum(item.bytes for item in self.fields)

    @property
    def dim(self) -> int:
        """Values of one token: quantised ones, then the plain rope ones."""
        return self["codes"].count + (self["rope"].count if "rope" in self else 0)

    @property
    def token_multiple(self) -> int:
        return self["codes"].tile[0] if self["codes"].tile else 1

    def page_bytes(self, page_tokens: int = 64) -> int:
        """Bytes of a page of `page_tokens` entries. Raises ValueError if the layout cannot have such a page."""
        if page_tokens < 1 or page_tokens % self.token_multiple:
            raise ValueError(
                f"a {self.name} page holds a positive multiple of {self.token_multiple} entries, not {page_tokens}"
            )
        return -(-page_tokens * self.token_bytes // self.align) * self.align

    def check(self, pool: Tensor, page_tokens: int = 64) -> None:
        """ValueError, with expected and found sizes, unless `pool` is uint8 [pages >= 1, page_bytes]."""
        if pool.dtype != torch.uint8 or pool.ndim != 2:
            raise ValueError(f"a pool is uint8 [pages, page bytes]; found {pool.dtype} {list(pool.shape)}")
        expected = self.page_bytes(page_tokens)
        if pool.shape[0] == 0 or pool.shape[1] != expected:
            raise ValueError(
                f"{self.name} with {page_tokens} entries a page needs at least one page of {expected:,} bytes; "
                f"found {pool.shape[0]:,} pages of {pool.shape[1]:,} bytes"
            )
        if pool.stride(1) != 1:
            raise ValueError("the bytes of a page must be contiguous; make the pool contiguous first")

    # ---- whole pages -------------------------------------------------------------------------------------------------
    def decode(self, raw: Tensor, page_tokens: int = 64) -> dict[str, Tensor]:
        """Everything a pool holds: fields as stored, "scale_values" and "values" float32 [pages, page_tokens, dim].

        Stored fields: codes uint8 [pages, P, n] (n/2 bytes for e2m1), scales (float32, or uint8 exponent/e4m3 bytes),
        rope bfloat16, pad uint8 (the scale row's spare byte), padding uint8 [pages, tail]. `encode` gives `raw` back.
        The uint8 ones are views of `raw` where strides allow, not copies.
        """
        self.check(raw, page_tokens)
        out: dict[str, Tensor] = {}
        for item in self.fields:
            out[item.name] = item.stored(raw, page_tokens)
        out["padding"] = raw[:, page_tokens * self.token_bytes :]
        out["scale_values"] = formats.decode(out["scales"], self["scales"].format)
        out["values"] = self.values(raw, page_tokens)
        return out

    def values(self, raw: Tensor, page_tokens: int = 64, out: Tensor | None = None) -> Tensor:
        """Only the dequantised values, float32 [pages, page_tokens, dim], into a contiguous `out` where it is given.

        ValueError if `out` does not fit. On a CUDA device one fused kernel, where Triton is installed.
        """
        self.check(raw, page_tokens)
        shape = (raw.shape[0], page_tokens, self.dim)
        if out is None:
            out = torch.empty(shape, device=raw.device)
        elif out.shape != shape or out.dtype != torch.float32 or out.device != raw.device or not out.is_contiguous():
            raise ValueError(
                f"{self.name}: values of this pool need a contiguous torch.float32 {list(shape)} on {raw.device}; "
                f"found {out.dtype} {list(out.shape)} on {out.device}"
            )
        if raw.is_cuda and _has("triton") and raw.data_ptr() % 4 == raw.stride(0) % 4 == 0:
            from . import gpu  # imports triton, and sets up its compiler

            gpu.values(self, raw, page_tokens, out)
        else:
            _values(self, raw, page_tokens, out)
        return out

    def entry_bytes(self, raw: Tensor, page_tokens: int = 64) -> Tensor:
        """uint8 [pages, P, n]: the bytes that carry an entry, field after field; pad and padding left out."""
        parts = [f.view(raw, page_tokens).flatten(3).flatten(1, 2) for f in self.fields if f.format != "raw"]
        return torch.cat(parts, -1)

    def encode(self, fields: Mapping[str, Tensor], page_tokens: int = 64, writer: str | None = None) -> Tensor:
        """Pages uint8 [pages, page_bytes] from stored fields, or from "values" [pages, page_tokens, dim] alone.

        Given "codes" and "scales" they are placed as they are (exact inverse of `decode`); given only "values" they are
        quantised by `writer` (default: this layout's first). Missing pad and padding bytes are zero.
        """
        stored = dict(fields) if "codes" in fields else self.quantise(fields["values"], writer)
        first = stored["codes"]
        if first.ndim != 3 or first.shape[1] != page_tokens:
            raise ValueError(f"{self.name}: fields are [pages, {page_tokens}, n]; found {list(first.shape)}")
        pool = torch.zeros(first.shape[0], self.page_bytes(page_tokens), dtype=torch.uint8, device=first.device)
        for item in self.fields:
            if item.name in stored:
                self._place(item.view(pool, page_tokens), item, stored[item.name])
        tail = pool.shape[1] - page_tokens * self.token_bytes
        if tail and "padding" in stored:
            pool[:, -tail:] = stored["padding"]
        return pool

    # ---- single slots ------------------------------------------------------------------------------------------------
    def gather(self, pool: Tensor, slots: Tensor, page_tokens: int = 64) -> Tensor:
        """float32 [..., dim] values of the entries at integer `slots` [...]; a negative slot (a hole) gives zeros."""
        flat = slots.reshape(-1).to(pool.device).long()
        stored = self.taken(pool, flat.clamp(min=0), page_tokens)
        values = self._values({**stored, "scale_values": formats.decode(stored["scales"], self["scales"].format)})
        holes = flat < 0
        if bool(holes.any()):
            values[holes] = 0.0
        return values.reshape(*slots.shape, self.dim)

    def taken(self, pool: Tensor, slots: Tensor, page_tokens: int = 64) -> dict[str, Tensor]:
        """What is stored at int64 `slots` [n], none of them a hole: codes, scales and rope, each a copy [n, ...]."""
        self.check(pool, page_tokens)
        page, offset = self._locate(pool, slots, page_tokens)
        stored = {}
        for item in self.fields:
            if item.name in ("codes", "scales", "rope"):
                taken = item.take(pool, page_tokens, page, *item.place(offset)).flatten(1)
                stored[item.name] = taken.view(formats.FORMATS[item.format].stored)
        return stored

    def scatter(
        self, pool: Tensor, slots: Tensor, values: Tensor, page_tokens: int = 64, writer: str | None = None
    ) -> None:
        """Quantise `values` [..., dim] as the public writer does and store them at `slots` [...], in place.

        A negative slot is skipped. Bytes the writer does not touch (padding; SGLang: the pad byte) keep their content.
        Two values for the same slot: one of them stays, which one is not defined (as on a GPU).
        """
        self.check(pool, page_tokens)
        rows = values.reshape(-1, values.shape[-1])
        if rows.shape != (slots.numel(), self.dim):
            raise ValueError(
                f"{slots.numel()} {self.name} slots need values [{slots.numel()}, {self.dim}], "
                f"found {list(values.shape)}"
            )
        self.put(pool, slots, self.quantise(rows, writer), page_tokens)

    def put(self, pool: Tensor, slots: Tensor, stored: Mapping[str, Tensor], page_tokens: int = 64) -> None:
        """Store fields as `quantise` gives them, each [n, ...], at integer `slots` [n], in place; as `scatter`."""
        flat = slots.reshape(-1).to(pool.device).long()
        live = flat >= 0
        if not bool(live.all()):
            flat, stored = flat[live], {name: rows[live] for name, rows in stored.items()}
        if not flat.numel():
            return
        page, offset = self._locate(pool, flat, page_tokens)
        for item in self.fields:
            if item.name in stored:
                item.put(pool, page_tokens, stored[item.name].contiguous().view(torch.uint8), page, *item.place(offset))

    def quantise(self, values: Tensor, writer: str | None = None) -> dict[str, Tensor]:
        """Stored fields of float values [..., dim]: codes, scales, and rope (and a zeroed pad) where they apply."""
        if values.shape[-1] != self.dim:
            raise ValueError(f"{self.name} stores {self.dim} values an entry, found {values.shape[-1]}")
        rule = self.writer(writer)
        count = self["codes"].count
        codes, scales = rule.quantise(values[..., :count], self.group, self["codes"].format, self["scales"].format)
        # a field may hold copies of one scale (the packed ue8m0 form of a 128-value scale)
        copies = self["scales"].count // scales.shape[-1]
        out = {"codes": codes, "scales": scales.repeat_interleave(copies, -1) if copies > 1 else scales}
        if "rope" in self:
            out["rope"] = values[..., count:].to(torch.bfloat16)
        if rule.clears_pad and "pad" in self:
            out["pad"] = torch.zeros(*values.shape[:-1], self["pad"].count, dtype=torch.uint8, device=values.device)
        return out

    def writer(self, name: str | None = None) -> Writer:
        """The rounding rule called `name`, or this layout's default (SGLang's where SGLang writes it)."""
        if name is None:
            return next(iter(self.writers.values()))
        if name not in self.writers:
            raise ValueError(f"{self.name} has no writer {name!r}; known: {', '.join(self.writers)}")
        return self.writers[name]

    def byte_map(self, page_tokens: int = 64) -> list[tuple[str, int, int]]:
        """(field, first byte, last byte + 1) of every contiguous run in a page, in order, padding included."""
        owner = torch.full((self.page_bytes(page_tokens),), len(self.fields), dtype=torch.int16)
        for number, item in enumerate(self.fields):
            owner[item.address(page_tokens).flatten()] = number
        names = [*(item.name for item in self.fields), "padding"]
        cut = torch.cat([torch.tensor([0]), (owner[1:] != owner[:-1]).nonzero().flatten() + 1])
        ends = [*cut[1:].tolist(), owner.numel()]
        return [(names[int(owner[first])], first, last) for first, last in zip(cut.tolist(), ends, strict=True)]

    # ---- inner -------------------------------------------------------------------------------------------------------
    def _locate(self, pool: Tensor, flat: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
        capacity = pool.shape[0] * page_tokens
        if flat.numel() and int(flat.max()) >= capacity:
            raise ValueError(f"slot {int(flat.max())} lies outside a pool of {capacity} slots ({pool.shape[0]} pages)")
        return flat // page_tokens, flat % page_tokens

    def _values(self, stored: Mapping[str, Tensor]) -> Tensor:
        """float32 [n, dim] of n single entries' stored fields."""
        codes, scales = self["codes"], stored["scale_values"]
        values = torch.empty(len(scales), self.dim, device=scales.device)
        formats.dequantise(stored["codes"], codes.format, scales, values[:, : codes.count])
        if "rope" in self:
            values[:, codes.count :] = stored["rope"]
        return values

    def _place(self, view: Tensor, item: Field, data: Tensor) -> None:
        stored = formats.FORMATS[item.format].stored
        expected = [view.shape[0], view.shape[1] * view.shape[2], item.bytes // stored.itemsize]
        if list(data.shape) != expected or data.dtype != stored:
            raise ValueError(
                f"{self.name}: field {item.name!r} is {stored} {expected}, found {data.dtype} {list(data.shape)}"
            )
        view.copy_(data.contiguous().view(torch.uint8).reshape(view.shape))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(f.name)}</td><td>{escape(f.format)}</td><td>{f.count}</td><td>{f.bytes}</td>"
            f"<td>{f.base}·P + {f.offset}</td><td>{f.stride}</td></tr>"
            for f in self.fields
        )
        return (
            f"<p><b>{escape(self.name)}</b>: {escape(self.meaning)}; {self.page_bytes(self.page_tokens[0]):,} bytes "
            f"for {self.page_tokens[0]} entries</p><table><thead><tr><th>field</th><th>format</th><th>numbers</th>"
            f"<th>bytes a token</th><th>starts at</th><th>stride</th></tr></thead><tbody>{rows}</tbody></table>"
        )


def _values(layout: Layout, pool: Tensor, page_tokens: int, out: Tensor) -> None:
    """`Layout.values` in plain torch, on any device: slices of pages, on a CPU as many threads as torch is set to use.

    Each thread takes slice after slice by itself, so that no step waits for another core. Memory of its own: two bytes
    for each value of one slice and thread, and the scales of the whole pool in float32.
    """
    codes, scales = layout["codes"], formats.decode(layout["scales"].stored(pool, page_tokens), layout["scales"].format)
    stored, target, rest = codes.view(pool, page_tokens), out[..., : codes.count], out[..., codes.count :]
    stored = stored if codes.tile else stored[:, :, 0, 0]  # fewer dimensions, faster reductions
    rope = None
    if "rope" in layout:
        halves = layout["rope"].view(pool, page_tokens)[:, :, 0, 0]
        odd = halves.storage_offset() % 2 or any(step % 2 for step in halves.stride()[:-1])
        rope = (halves.contiguous() if odd else halves).view(torch.bfloat16)
    step = max(1, (GPU_SLICE_VALUES if pool.is_cuda else SLICE_VALUES) // (page_tokens * layout.dim))
    firsts = iter(range(0, len(pool), step))

    def work() -> None:
        scratch = torch.empty(min(step, len(pool)), page_tokens, codes.count, dtype=torch.int16, device=pool.device)
        for first in firsts:
            part = slice(first, first + step)
            widened, bias = formats.halves(stored[part], codes.format, scratch[: len(stored[part])])
            formats.scale_up(target[part].copy_(widened), scales[part], bias)
            if rope is not None:
                rest[part].copy_(rope[part])

    threads = 1 if pool.is_cuda else min(torch.get_num_threads(), -(-len(pool) // step))
    if threads == 1:
        return work()
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            for done in [workers.submit(work) for _ in range(threads)]:
                done.result()
    finally:
        torch.set_num_threads(before)  # what the workers set is also what later threads would start with


def _footer(name: str, meaning: str, codes: Field, scales: Field, **more) -> Layout:
    """Index page: every entry's codes, then every entry's scales."""
    data = replace(codes, stride=codes.bytes)
    return Layout(name, meaning, (data, replace(scales, base=data.bytes, stride=scales.bytes)), **more)


def _v4(name: str, meaning: str, code_format: str = "e4m3fn") -> Layout:
    return Layout(
        name,
        meaning,
        (
            Field("codes", code_format, 448, stride=576),
            Field("rope", "bf16", 64, offset=448, stride=576),
            Field("scales", "ue8m0", 7, base=576, stride=8),
            Field("pad", "raw", 1, base=576, offset=7, stride=8),
        ),
        group=64,
        writers=writers.V4,
        align=576,
        page_tokens=(64, 256, 2, 128),
        source="sglang 0.5.23 mem_cache/deepseek_v4_memory_pool.py, FlashMLA 9241ae3 tests/quant.py",
    )


def _v32(name: str, meaning: str, rules: Mapping[str, Writer]) -> Layout:
    return Layout(
        name,
        meaning,
        (
            Field("codes", "e4m3fn", 512, stride=656),
            Field("scales", "f32", 4, offset=512, stride=656),
            Field("rope", "bf16", 64, offset=528, stride=656),
        ),
        group=128,
        writers=rules,
        source="FlashMLA 9241ae3 README, sglang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py",
    )


def _v41(name: str, meaning: str, codes: Field, scales: Field, align: int, interleaved: bool, group: int) -> Layout:
    row = codes.bytes + scales.bytes
    if interleaved:
        fields = (replace(codes, stride=row), replace(scales, offset=codes.bytes, stride=row))
    else:
        fields = (replace(codes, stride=codes.bytes), replace(scales, base=codes.bytes, stride=scales.bytes))
    return Layout(
        name,
        meaning,
        fields,
        group=group,
        writers=writers.V41_FP8 if group == 32 else writers.V41_FP4,
        align=1 if interleaved else align,
        page_tokens=(64, 256, 2, 128),
        source="sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py",
    )


_INDEX = "sglang 0.5.23 kernels/ops/kvcache/dsa_index_k_cache.py"
_E4M3_128, _F32_1 = Field("codes", "e4m3fn", 128), Field("scales", "f32", 1)
_E4M3_512, _E2M1_512 = Field("codes", "e4m3fn", 512), Field("codes", "e2m1", 512)
_PER_32, _PER_16 = Field("scales", "ue8m0", 16), Field("scales", "e4m3fn", 32)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _footer("dsa-index-fp8", "indexer keys, one plain float32 scale each", _E4M3_128, _F32_1,
                group=128, writers=writers.INDEX_FP8, source=_INDEX),
        _footer("dsa-index-fp8-ue8m0", "indexer keys, float32 scale that is a power of two", _E4M3_128, _F32_1,
                group=128, writers=writers.INDEX_FP8_UE8M0, source=_INDEX),
        _footer("dsa-index-fp8-mx", "indexer keys, the scale as four packed exponent bytes", _E4M3_128,
                Field("scales", "ue8m0", 4), group=128, writers=writers.INDEX_FP8_UE8M0,
                source="vllm 0.33.0 models/deepseek_v4/common/ops/fused_compress_quant_cache.py"),
        _footer("dsa-index-fp8-fnuz", "indexer keys in AMD's FNUZ codes", Field("codes", "e4m3fnuz", 128), _F32_1,
                group=128, writers=writers.INDEX_FP8,
                source="sglang 0.5.23 kernels/jit/include/sgl_kernel/deepseek_v4/fp8_utils.cuh"),
        _footer("dsa-index-fp8-preshuffle", "indexer keys in 16x16 tiles (aiter), scales in order",
                replace(_E4M3_128, tile=(16, 16)), _F32_1, group=128, writers=writers.INDEX_FP8, source=_INDEX),
        _footer("dsa-index-fp4", "indexer keys in MXFP4, one exponent byte per 32", Field("codes", "e2m1", 128),
                Field("scales", "ue8m0", 4), group=32, writers=writers.INDEX_FP4,
                source="sglang 0.5.23 kernels/ops/quantization/fp4_indexer_quant.py"),
        _v32("v32-mla-fp8", "DeepSeek-V3.2 latent, plain float32 scales per 128", writers.V32),
        _v32("v32-mla-fp8-ue8m0", "DeepSeek-V3.2 latent, power-of-two float32 scales", writers.V32_UE8M0),
        _v4("v4-mla-fp8", "DeepSeek-V4 entry, exponent bytes per 64 in the footer"),
        _v4("v4-mla-fp8-fnuz", "DeepSeek-V4 entry in AMD's FNUZ codes", "e4m3fnuz"),
        _v41("v41-mla-fp8", "DeepSeek-V4.1 entry, footer", _E4M3_512, _PER_32, 512, False, 32),
        _v41("v41-mla-fp4", "DeepSeek-V4.1 entry in 4 bits, footer", _E2M1_512, _PER_16, 256, False, 16),
        _v41("v41-mla-fp8-interleaved", "DeepSeek-V4.1 entry, scales beside it", _E4M3_512, _PER_32, 512, True, 32),
        _v41("v41-mla-fp4-interleaved", "DeepSeek-V4.1 in 4 bits, scales beside it", _E2M1_512, _PER_16, 256, True, 16),
    )
}  # fmt: skip


def layout_of(layout: str | Layout) -> Layout:
    """A layout by name. Raises ValueError that lists the known names."""
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {str(layout)[:60]!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]
