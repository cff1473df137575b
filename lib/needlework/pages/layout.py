"""One page layout: from its record derive page size, access, decode, encode and byte map.

A pool is uint8 [pages, page_bytes]; a page holds `page_tokens` entries; slot = page * page_tokens + offset. The public
shapes such as [pages, P, 1, 584] or [blocks, 64, 1, 132] are fictions: in a *footer* page all data rows come first,
then all scale rows (sglang 0.5.23 mem_cache/deepseek_v4_memory_pool.py; FlashMLA 9241ae3 tests/quant.py;
DeepGEMM 54e2261 csrc/apis). Only the *interleaved* layouts keep a token's scales beside its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.util import find_spec

import torch
from torch import Tensor

from . import formats, slices
from .fields import Field
from .writers import Writer

COMPILED_VALUES = 1 << 28  # a pool of so many values repays the import of the compiled pass in one call


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

        ValueError if `out` does not fit. On a CUDA device one fused kernel, where Triton is installed; for a pool of
        2^28 values or more on a CPU one compiled pass, where numba is (the first on a machine takes seconds more).
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
            from . import device  # imports triton, and sets up its compiler

            device.values(self, raw, page_tokens, out)
            return out
        if not raw.is_cuda and out.numel() >= COMPILED_VALUES and _has("numba"):
            from . import compiled  # imports numba

            if compiled.takes(self, out):
                compiled.values(self, raw, page_tokens, out)
                return out
        slices.values(self, raw, page_tokens, out)
        return out

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
