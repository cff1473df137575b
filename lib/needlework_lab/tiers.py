"""The host tier of the prefix cache: pages that the device pool gave up, copied out and back by threads of their own.

As in sglang 0.5.23 `srt/mem_cache/hiradix_cache.py`, a copy runs beside the forward passes, and whoever needs its
outcome waits for it: the allocator before it hands an evicted page to somebody else, a forward pass before it reads
pages that come back. Those two waits are the whole synchronisation. Stores and loads have a thread (a stream) each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from needlework_lab.pools import Pools
from needlework_lab.types import Hooks


@dataclass(frozen=True, eq=False)
class Copy:
    """One page of one group of buffers ("full" or "swa") on its way: `side` "store" to the host, "load" back."""

    side: str
    group: str
    future: Future[None]

    @property
    def landed(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        """Return when it has landed; raises what the copy raised."""
        self.future.result()


@dataclass(eq=False)
class HostPage:
    """One page of a prompt in host memory. `window`: its window page is there too."""

    slot: int
    window: bool
    pinned: bool = False  # about to be loaded
    copies: list[Copy] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        self.copies = [copy for copy in self.copies if not copy.landed]
        return self.pinned or bool(self.copies)


class HostTier:
    """Host memory for `pages` pages of every buffer, by the prefix cache's keys. Methods are the engine thread's;
    only the copies run in threads of the tier, each side's in the order in which they were asked for."""

    def __init__(self, pools: Pools, pages: int, hooks: Hooks) -> None:
        self.pools, self.pages, self.hooks = pools, pages, hooks
        self.memory = {b.name: np.zeros((pages, b.item_bytes), np.uint8) for b in pools.buffers.values()}
        self.entries: OrderedDict[bytes, HostPage] = OrderedDict()  # least recently used first
        self._free = list(range(pages))
        self._threads = {side: ThreadPoolExecutor(1, thread_name_prefix=side) for side in ("store", "load")}

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys have a page here."""
        found = 0
        while found < len(keys) and keys[found] in self.entries:
            found += 1
        return found

    def has_window(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.window

    def pin(self, keys: Sequence[bytes], pinned: bool) -> None:
        """Keep pages from being dropped while device pages are found for them."""
        for key in keys:
            self.entries[key].pinned = pinned

    def store(self, key: bytes, page: int, swa_page: int | None) -> list[Copy]:
        """Begin to copy a device page here; no copy when it is here already, or when every page here is in use."""
        entry = self.entries.get(key)
        if entry is not None and (entry.window or swa_page is None):
            self.entries.move_to_end(key)
            return []
        if entry is None:
            slot = self._slot()
            if slot is None:
                return []
            entry = self.entries[key] = HostPage(slot, swa_page is not None)
        self.entries.move_to_end(key)
        entry.window = swa_page is not None
        return self._begin(entry, "store", [("swa", swa_page), ("full", page)])

    def load(self, key: bytes, group: str, page: int) -> list[Copy]:
        """Begin to copy one group's page back into a device page."""
        self.entries.move_to_end(key)
        return self._begin(self.entries[key], "load", [(group, page)])

    def _begin(self, entry: HostPage, side: str, pages: list[tuple[str, int | None]]) -> list[Copy]:
        begun = [
            Copy(side, group, self._threads[side].submit(self._copy, side, group, entry.slot, page))
            for group, page in pages
            if page is not None
        ]
        entry.copies += begun
        return begun

    def clear(self) -> None:
        """Forget everything, once the copies under way are done."""
        for entry in self.entries.values():
            for copy in entry.copies:
                copy.wait()
        self.entries.clear()
        self._free = list(range(self.pages))

    def _slot(self) -> int | None:
        if not self._free:
            idle = next((key for key, entry in self.entries.items() if not entry.busy), None)
            if idle is None:
                return None
            self._free.append(self.entries.pop(idle).slot)
        return self._free.pop()

    def _copy(self, side: str, group: str, slot: int, page: int) -> None:
        self.hooks.apply("tier_copy", None, side=side, group=group)
        for name, buffer in self.pools.buffers.items():
            if buffer.group == group:
                device, host = self.pools[name].numpy()[page], self.memory[name][slot]
                if side == "store":
                    host[:] = device
                else:
                    device[:] = host
