"""Who holds which page: sequences, the prefix cache, and the host tier behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

import torch

from needlework_lab.forward import Sequence
from needlework_lab.output import Output
from needlework_lab.pools import Allocator, OutOfPages, Pools
from needlework_lab.prefix import Node, PrefixCache
from needlework_lab.tiers import Copy, HostTier
from needlework_lab.types import Buffer, Geometry, Handoff, Hooks


@dataclass(eq=False)
class Running(Sequence):
    """A sequence with its bookkeeping."""

    output: Output | None = None
    prompt_tokens: int = 0
    nodes: list[Node] = field(default_factory=list)  # cached nodes this sequence holds locks on, one a page
    swa_held: set[int] = field(default_factory=set)  # logical pages whose window page is locked in its node
    loading: list[Copy] = field(default_factory=list)  # copies from the host tier that nobody has waited for yet
    exported: int = 0  # logical pages announced to the transfer
    chunks: int = 0
    handoff: Handoff | None = None  # decode role: the first token, not yet reported
    identity: str = ""
    drafts: list[int] = field(default_factory=list)  # the last tokens, proposed and not yet verified
    kept_state: list[tuple[str, int, torch.Tensor]] = field(default_factory=list)  # what they may overwrite
    apart: bool = False  # another sequence has published the same content: this one keeps its further pages to itself

    @property
    def prompt_done(self) -> bool:
        return self.computed >= self.prompt_tokens

    def views(self) -> list[Sequence]:
        """The sequence as it is after its last sampled token, and after each draft."""
        if not self.drafts:
            return [self]
        known = len(self.tokens) - len(self.drafts)
        return [replace(self, computed=known + row) for row in range(1 + len(self.drafts))]


class Paging:
    """The pools of one engine and the pages that its sequences hold in them."""

    def __init__(self, geometry: Geometry, role: str, order: int, prefix_cache: bool) -> None:
        self.geometry, self.role = geometry, role
        self.hooks = Hooks()
        self.memory = Pools(geometry)
        order += {"combined": 0, "prefill": 101, "decode": 202}[role]
        self.full, self.swa = Allocator(geometry.pages, 2 * order), Allocator(geometry.swa_pages, 2 * order + 1)
        window_pages = -(-geometry.local_window // geometry.page_tokens)
        self.cache = PrefixCache(geometry.page_tokens, window_pages, self.full, self.swa, prefix_cache)
        self.cache.on_evict = self._evicted
        tiered = prefix_cache and geometry.host_pages > 0
        self.host = HostTier(self.memory, geometry.host_pages, self.hooks) if tiered else None
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.held: dict[str, Running] = {}  # transferring (prefill), or reserved and not started (decode)
        self._retired: list[Running] = []  # finished in the last step; their pages are still theirs until the next

    # ---- hits --------------------------------------------------------------------------------------------------------
    def _fits(self, seq: Running) -> bool:
        needed = -(-(seq.prompt_tokens + 1) // self.geometry.page_tokens)
        promised = sum(
            -(-(s.prompt_tokens + 1) // self.geometry.page_tokens) - len(s.full)
            for s in self.running
            if not s.prompt_done
        )
        return needed + promised <= self.full.free + self.cache.evictable

    def _take_over(self, seq: Running) -> int:
        """Give a sequence what the caches have of its prompt, all but its last token; pages that came from the host."""
        keys = self.cache.keys(seq.tokens[: seq.prompt_tokens - 1], seq.identity)
        found, more = self._match(keys)
        chain = self.hooks.apply("prefix_hit", found, seq=seq)
        more = 0 if len(chain) < len(found) else more
        first = len(chain) + more - self.cache.window_pages
        self.cache.lock(chain, window=False)
        seq.nodes = list(chain)
        for page, node in enumerate(chain):
            seq.loading += [copy for copy in node.loading if not copy.landed]  # another request's, still under way
            if page >= first and node.swa_page is not None:
                node.swa_locks += 1
                self._hold_window(seq, page, node)
        if self.host is not None:
            self._load(seq, keys, more, first)
        seq.full = [node.page for node in seq.nodes]
        seq.computed = len(seq.nodes) * self.geometry.page_tokens
        return more

    def _hold_window(self, seq: Running, page: int, node: Node) -> None:
        assert node.swa_page is not None
        seq.swa[page] = node.swa_page
        seq.swa_held.add(page)

    def _match(self, keys: list[bytes]) -> tuple[list[Node], int]:
        """The longest legal hit: nodes on the device, and how many further pages the host tier has."""
        host, depth = self.host, self.cache.window_pages
        if host is None or self.cache.spare_windows < depth:
            return self.cache.match(keys), 0
        chain = self.cache.match(keys, window=False)
        end = len(chain) + host.match(keys[len(chain) :])
        windows = [
            host.has_window(key) or (page < len(chain) and chain[page].swa_page is not None)
            for page, key in enumerate(keys[:end])
        ]
        while windows and not all(windows[-depth:]):
            windows.pop()
        return chain[: len(windows)], max(0, len(windows) - len(chain))

    def _load(self, seq: Running, keys: list[bytes], more: int, first: int) -> None:
        """Begin to copy `more` pages of a hit from the host tier, windows first: the next pass reads them first.

        Every window that is loaded stays locked by the sequence until its first pass has waited for it."""
        assert self.host is not None
        start = len(seq.nodes)
        wanted = keys[start : start + more]
        self.host.pin(wanted, True)
        windows: list[Node] = []
        for page in range(max(0, first), start):  # on the device, but the window page was given up
            node = seq.nodes[page]
            if node.swa_page is None:
                node.swa_page, node.swa_locks = self.cache.take_swa(), node.swa_locks + 1
                self._hold_window(seq, page, node)
                windows.append(node)
        for page, key in enumerate(wanted, start):
            kept = self.host.has_window(key) and (page >= first or self.swa.free > self.cache.window_pages)
            swa_page = self.cache.take_swa() if kept else None
            fresh = self.cache.publish(key, seq.nodes[-1] if seq.nodes else None, self.cache.take_full(), swa_page)
            assert fresh is not None  # no child outlives its parent on the device
            seq.nodes.append(fresh)
            if kept:
                self._hold_window(seq, page, fresh)
                windows.append(fresh)
        for node in windows:
            assert node.swa_page is not None
            node.loading = self.host.load(node.key, "swa", node.swa_page)
        for node in seq.nodes[start:]:
            node.loading = node.loading + self.host.load(node.key, "full", node.page)
        seq.loading += [copy for node in seq.nodes[start:] for copy in node.loading]
        seq.loading += [copy for node in windows if node not in seq.nodes[start:] for copy in node.loading]
        self.host.pin(wanted, False)

    def _loaded(self, seq: Running) -> None:
        """Wait for the pages that a sequence is about to read."""
        copies, seq.loading = seq.loading, []
        for copy in self.hooks.apply("tier_wait", copies, side="load", seq=seq) if copies else ():
            copy.wait()

    def _evicted(self, node: Node) -> None:
        """Copy a page that the device gives up into the host tier, and wait: its next owner may write at once."""
        self.hooks.apply("evicted", node)
        if self.host is not None:
            copies = self.host.store(node.key, node.page, node.swa_page)
            for copy in self.hooks.apply("tier_wait", copies, side="store", seq=None) if copies else ():
                copy.wait()

    # ---- pages of sequences ------------------------------------------------------------------------------------------
    def _take_pages(self, seq: Running, end: int) -> None:
        tokens = self.geometry.page_tokens
        while len(seq.full) * tokens < end:
            page = self.cache.take_full()
            seq.full.append(page)
            self.hooks.apply("page_taken", page, group="full", seq=seq)
        for page in range(seq.computed // tokens, (end - 1) // tokens + 1):
            if page not in seq.swa:
                seq.swa[page] = self.cache.take_swa()
                self.hooks.apply("page_taken", seq.swa[page], group="swa", seq=seq)

    def _publish(self, seq: Running) -> None:
        """Give finished pages to the prefix cache."""
        tokens = self.geometry.page_tokens
        pages = min(seq.computed // tokens, len(seq.full))
        if not self.cache.enabled or seq.apart or pages <= len(seq.nodes):
            return
        keys = self.cache.keys(seq.tokens[: pages * tokens], seq.identity)
        for page in range(len(seq.nodes), pages):
            parent = seq.nodes[-1] if seq.nodes else None
            node = self.cache.publish(keys[page], parent, seq.full[page], seq.swa.get(page))
            if node is None:
                seq.apart = True
                return
            seq.nodes.append(node)
            if node.swa_page is not None:
                seq.swa_held.add(page)

    def _slide(self, seq: Running) -> None:
        """Let go of window pages that no later token of this sequence can see."""
        tokens = self.geometry.page_tokens
        for page in [p for p in seq.swa if (p + 1) * tokens <= seq.computed - self.geometry.local_window]:
            self._drop_window(seq, page)

    def _drop_window(self, seq: Running, page: int) -> None:
        physical = seq.swa.pop(page)
        if page in seq.swa_held:
            seq.swa_held.remove(page)
            seq.nodes[page].swa_locks -= 1
        else:
            self.swa.give(physical)

    def _retire(self) -> None:
        for seq in self._retired:
            self._free(seq, finished=True)
        self._retired = []

    def _free(self, seq: Running, *, finished: bool) -> None:
        """Give all pages back: locks on cached ones, the rest to the free list."""
        self._loaded(seq)
        own = seq.full[len(seq.nodes) :]
        for page in list(seq.swa):
            self._drop_window(seq, page)
        for node in seq.nodes:
            node.locks -= 1
        for page in own:
            self.full.give(page)
        self.hooks.apply("released", None, seq=seq, pages=own, finished=finished)
        seq.nodes, seq.full = [], []

    # ---- buffers -----------------------------------------------------------------------------------------------------
    def pools(self) -> dict[str, Buffer]:
        """The registered buffers, in the order a transfer moves them."""
        return dict(self.memory.buffers)

    def pool(self, name: str) -> torch.Tensor:
        """The live memory of a buffer, uint8 [pages, item_bytes]."""
        self.memory.check(name, ())
        return self.memory[name]

    def read_pages(self, name: str, ids: Iterable[int]) -> bytes:
        return self.memory.read(name, ids)

    def write_pages(self, name: str, ids: Ids[int], data: bytes) -> None:
        self.memory.write(name, ids, data)

    def digest(self, name: str, ids: Iterable[int]) -> int:
        return self.memory.digest(name, ids)

    def pages_of(self, rid: str) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Group -> (first logical page, physical ids in logical order) of a request that still holds its pages."""
        for seq in (*self.running, *self.held.values(), *self._retired, *self.waiting):
            if seq.rid == rid:
                tokens = self.geometry.page_tokens
                window = sorted(p for p in seq.swa if (p + 1) * tokens > seq.prompt_tokens - self.geometry.local_window)
                return {
                    "full": (0, tuple(seq.full)),
                    "swa": (window[0] if window else 0, tuple(seq.swa[page] for page in window)),
                }
        raise ValueError(f"no request with rid {rid[:60]!r} holds pages")

    def flush_cache(self) -> bool:
        """Empty the prefix cache and its host tier; False, and nothing done, while requests run, wait or are being
        transferred."""
        if self.waiting or self.running or self.held:
            return False
        self._retire()
        host, self.host = self.host, None  # what is given up now goes nowhere
        self.cache.clear()
        self.host = host
        if host is not None:
            host.clear()
        return True

    def occupancy(self) -> dict[str, float]:
        """Tokens that the pools hold, by SGLang's gauge names without the prefix."""
        g = self.geometry
        total = (g.pages - 1) * g.page_tokens
        free, kept = self.full.free * g.page_tokens, self.cache.evictable * g.page_tokens
        out = {
            "kv_available_tokens": float(free),
            "kv_evictable_tokens": float(kept),
            "kv_used_tokens": float(total - free - kept),
            "token_usage": (total - free - kept) / total,
        }
        if self.host is not None:
            out["hicache_host_used_tokens"] = float(len(self.host.entries) * g.page_tokens)
            out["hicache_host_total_tokens"] = float(g.host_pages * g.page_tokens)
        return out


__all__ = ["OutOfPages", "Paging", "Running"]
