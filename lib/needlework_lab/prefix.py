"""The prefix cache: full pages by the content before them, and the window pages that a hit needs.

A node stands for one full page of tokens after its parent's. Its compressed page stays until it is evicted; its window
page may go earlier (a tombstone). A hit of h pages is legal only where the window pages before its end still live, so
it shortens rather than read a stale window (sglang 0.5.23 `mem_cache/unified_cache/components/swa.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from needlework_lab.pools import Allocator, OutOfPages


@dataclass(eq=False)
class Node:
    """One cached page. `locks` counts the requests that use the page; `swa_locks` those that use its window page."""

    key: bytes
    parent: Node | None
    page: int
    swa_page: int | None
    children: int = 0
    locks: int = 0
    swa_locks: int = 0
    used: int = 0
    loading: list[Any] = field(default_factory=list)  # copies from the host tier into these pages


class PrefixCache:
    """Nodes by chained content hash. All methods are the engine's, in its one thread."""

    def __init__(
        self, page_tokens: int, window_pages: int, full: Allocator, swa: Allocator, enabled: bool = True
    ) -> None:
        self.page_tokens, self.window_pages, self.enabled = page_tokens, window_pages, enabled
        self.full, self.swa = full, swa
        self.key_bits = 128  # of the hash that names a page
        self.nodes: dict[bytes, Node] = {}
        self._clock = count(1)
        self.on_evict: Callable[[Node], None] | None = None

    def keys(self, tokens: Sequence[int], identity: str) -> list[bytes]:
        """Keys of the full pages of a prompt, each hashing all content before it and the identity (salt, adapter)."""
        out, last = [], hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
        raw, size = np.asarray(tokens, dtype="<u4").tobytes(), 4 * self.page_tokens
        for start in range(0, len(raw) - size + 1, size):
            last = hashlib.sha256(last + raw[start : start + size]).digest()[:16]
            last = (int.from_bytes(last) >> (128 - self.key_bits)).to_bytes(16)
            out.append(last)
        return out

    def match(self, keys: Sequence[bytes], *, window: bool = True) -> list[Node]:
        """The longest legal hit: nodes of the first pages, all there, the last of them with live window pages (unless
        the window comes from elsewhere: `window` False)."""
        if not self.enabled:
            return []
        chain: list[Node] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            chain.append(node)
        while window and chain and any(node.swa_page is None for node in chain[-self.window_pages :]):
            chain.pop()
        return chain

    def lock(self, chain: Sequence[Node], *, window: bool = True) -> None:
        """Keep a hit's pages, and the window pages before its end, from eviction."""
        now = next(self._clock)
        for node in chain:
            node.locks += 1
            node.used = now
        for node in chain[-self.window_pages :] if window else ():
            node.swa_locks += 1

    def publish(self, key: bytes, parent: Node | None, page: int, swa_page: int | None) -> Node | None:
        """Give a finished page to the cache, locked by the giver; None when the cache has it already (or is off)."""
        if not self.enabled or key in self.nodes:
            return None
        node = Node(key, parent, page, swa_page, locks=1, swa_locks=int(swa_page is not None), used=next(self._clock))
        self.nodes[key] = node
        if parent is not None:
            parent.children += 1
        return node

    def take_full(self) -> int:
        """A free compressed page, evicting the least recently used leaf if need be. Raises OutOfPages."""
        if not self.full.free:
            leaves = [n for n in self.nodes.values() if not (n.children or n.locks or n.swa_locks)]
            if not leaves:
                raise OutOfPages("every page is in use by a running request")
            self.evict(min(leaves, key=lambda n: n.used))
        return self.full.take()

    def take_swa(self) -> int:
        """A free window page, leaving a tombstone in the least recently used node if need be. Raises OutOfPages."""
        if not self.swa.free:
            owners = [n for n in self.nodes.values() if n.swa_page is not None and not n.swa_locks]
            if not owners:
                raise OutOfPages("every window page is in use by a running request")
            node = min(owners, key=lambda n: n.used)
            self.swa.give(node.swa_page)  # type: ignore[arg-type]
            node.swa_page = None
        return self.swa.take()

    def evict(self, node: Node) -> None:
        if self.on_evict is not None:
            self.on_evict(node)
        del self.nodes[node.key]
        self.full.give(node.page)
        if node.swa_page is not None:
            self.swa.give(node.swa_page)
        if node.parent is not None:
            node.parent.children -= 1

    def clear(self) -> None:
        """Evict everything; only while no request runs."""
        while self.nodes:
            for node in [n for n in self.nodes.values() if not n.children]:
                self.evict(node)

    @property
    def evictable(self) -> int:
        """Compressed pages that could be freed if asked for."""
        return sum(1 for n in self.nodes.values() if not n.locks)

    @property
    def spare_windows(self) -> int:
        """Window pages that are free or could be."""
        return self.swa.free + sum(1 for n in self.nodes.values() if n.swa_page is not None and not n.swa_locks)
