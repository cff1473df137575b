"""The engine's memory: paged pools in real byte layouts, and who owns which page.

One physical page id addresses every compressed pool (entries, index keys); window pools have ids of their own, as in
sglang 0.5.23 `srt/mem_cache/deepseek_v4_memory_pool.py`. Page 0 is reserved and never given to a request. Pools start
zeroed. The order in which pages are handed out is a seeded permutation, so that neighbours in a prompt are not
neighbours in memory.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from needlework.pages import LAYOUTS
from torch import Tensor

from needlework_lab.model import CODE, INDEX, KEY
from needlework_lab.types import Buffer, Geometry

KV, INDEX_LAYOUT = "v4-mla-fp8", "dsa-index-fp8"
DRAFT_INDEX = "draft_index"
STATE_ROWS = 8  # rows of compressor state a window page keeps: its last eight tokens, at position mod 8
STATE_WIDTH = {"c4_state": KEY + CODE, "c4_index_state": INDEX}


class OutOfPages(RuntimeError):
    """No free page, and none that the prefix cache could give up."""


class Allocator:
    """Free page ids 1 … pages-1, first freed first reused."""

    def __init__(self, pages: int, seed: int) -> None:
        self.pages = pages
        self._free = deque((np.random.Generator(np.random.PCG64(seed)).permutation(pages - 1) + 1).tolist())
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise OutOfPages("no free page")
        page = self._free.popleft()
        self._taken.add(page)
        return page

    def give(self, page: int) -> None:
        if page not in self._taken:
            raise RuntimeError(f"page {page} was freed twice")
        self._taken.remove(page)
        self._free.append(page)

    def hasten(self, pages: Iterable[int]) -> None:
        """Hand out these free pages next, as an allocator does that reuses the last freed first."""
        for page in pages:
            if page not in self._taken and page in self._free:
                self._free.remove(page)
                self._free.appendleft(page)


class Pools:
    """All registered buffers of one engine, by name."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        g = geometry
        self.buffers: dict[str, Buffer] = {}
        for layer in range(g.layers):
            self._register(f"c4_kv.{layer}", "full", KV, g.page_entries, g.pages)
        for layer in range(g.layers):
            self._register(f"c4_index.{layer}", "full", INDEX_LAYOUT, g.page_entries, g.pages)
        for layer in range(g.layers + 1):
            self._register(f"swa_kv.{layer}", "swa", KV, g.page_tokens, g.swa_pages)
        for kind in STATE_WIDTH:
            for layer in range(g.layers):
                self._register(f"{kind}.{layer}", "swa", "fp32", STATE_ROWS, g.swa_pages)
        if g.draft_tokens:  # token ids, where an n-gram draft looks
            self._register(DRAFT_INDEX, "full", "int32", g.page_tokens, g.pages)
        # numpy's zeros take no memory until they are written; torch's do
        self.memory = {
            b.name: torch.from_numpy(np.zeros((b.pages, b.item_bytes), dtype=np.uint8)) for b in self.buffers.values()
        }

    def _register(self, name: str, group: str, layout: str, entries: int, pages: int) -> None:
        if layout == "fp32":
            size = entries * STATE_WIDTH[name.split(".")[0]] * 4
        elif layout == "int32":
            size = entries * 4
        else:
            size = LAYOUTS[layout].page_bytes(entries)
        self.buffers[name] = Buffer(name, group, layout, entries, size, pages)

    def __getitem__(self, name: str) -> Tensor:
        return self.memory[name]

    def check(self, name: str, ids: Iterable[int]) -> list[int]:
        """Page ids as a list; ValueError for an unknown buffer or an id outside it."""
        if name not in self.buffers:
            raise ValueError(f"no buffer named {name!r}; the buffers are {', '.join(self.buffers)}")
        pages = [int(i) for i in ids]
        if any(not 0 <= page < self.buffers[name].pages for page in pages):
            raise ValueError(
                f"{name} has pages 0 to {self.buffers[name].pages - 1}, asked for {min(pages)} to {max(pages)}"
            )
        return pages

    def read(self, name: str, ids: Iterable[int]) -> bytes:
        """The bytes of some pages, in the order given."""
        return self.memory[name][self.check(name, ids)].numpy().tobytes()

    def write(self, name: str, ids: Sequence[int], data: bytes) -> None:
        """Put the bytes of whole pages in place, in the order given. ValueError when the size does not fit."""
        pages = self.check(name, ids)
        size = self.buffers[name].item_bytes
        if len(data) != len(pages) * size:
            raise ValueError(f"{len(pages)} pages of {name} are {len(pages) * size} bytes, got {len(data)}")
        if pages:
            rows = np.frombuffer(data, dtype=np.uint8).reshape(len(pages), size)
            self.memory[name][pages] = torch.from_numpy(rows.copy())

    def digest(self, name: str, ids: Iterable[int]) -> int:
        """Adler-32 over pages in the order given; 1 for none (sglang 0.5.23 `srt/disaggregation/checksum.py`)."""
        return zlib.adler32(self.read(name, ids))

    def rows(self, name: str) -> Tensor:
        """A state pool as float32 [pages, 8, width], the live memory."""
        return self.memory[name].view(torch.float32).view(self.buffers[name].pages, STATE_ROWS, -1)

    def words(self, name: str) -> Tensor:
        """A pool of numbers as int32 [pages, page_tokens], the live memory."""
        return self.memory[name].view(torch.int32)
