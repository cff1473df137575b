"""Faults for a running vLLM 0.23.0 with DeepSeek-V3.2's sparse attention, each planted where a public report found
its like and taken out again while the engine runs. `tools/fault_bench.py` asks for them through `tools/vllm_worker.py`.

A fault is a function of its `Site` (caches, scheduler and connector of one engine process) that returns hooks by stage:

    index_write(k, cache, slots)            before the indexer's keys are stored; (k, slots), or None if it stored them
    gathered(keys, scales)                  after prefill gathered the keys of its requests
    built(meta, common, builder)            after the indexer's metadata of a step were built
    selected(rows)                          after an indexer selected: see `Rows`
    rotated(positions)                      positions of the indexer's keys
    latent_write(latent, rope, slots)       before attention's entries are stored; the three, changed
    attend(meta)                            attention's metadata before it runs; changed
    hit(blocks), allocated(blocks)          block numbers that a prefix hit found, that a request was given
    aborted(request, blocks)                a request was dropped
    scheduled(scheduler)                    a step was scheduled and has not run yet
    hashed(bytes), evicted(block)           the prefix cache's key; whether a block leaves the prefix cache
    sent(rows, remote)                      transfer descriptors [regions, blocks], changed or fewer of them
    trimmed(local, remote)                  remote block numbers when decode has a part already
    arrived(request, blocks)                a transfer ended

They change bytes, order or bookkeeping, never an answer. Sources: vllm 0.23.0 `sparse_attn_indexer.py`,
`v1/attention/backends/mla/`, `v1/core/`, `kv_connector/v1/nixl/`.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

INDEX_BYTES, MLA_BYTES, PAGE, DIM = 132, 656, 64, 128  # bytes an entry, entries a page, numbers of an index key
Hooks = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """code: its class in docs/classes.md; place; source: a public report; arms: where it can be planted ("single", and
    "prefill", "decode" or "all" of a pair); strengths: parameters by name; make: (site, **parameters) -> hooks."""

    code: str
    place: str
    source: str
    arms: tuple[str, ...]
    strengths: dict[str, dict[str, Any]]
    make: Callable[..., Hooks]

    @property
    def what(self) -> str:
        return " ".join((self.make.__doc__ or "").split())


CATALOG: dict[str, Fault] = {}


def fault(
    code: str, place: str, source: str, *arms: str, severe: dict[str, Any], mild: dict[str, Any] | None = None
) -> Callable[[Callable[..., Hooks]], Callable[..., Hooks]]:
    def register(make: Callable[..., Hooks]) -> Callable[..., Hooks]:
        strengths = {"severe": severe} | ({} if mild is None else {"mild": mild})
        CATALOG[make.__name__.replace("_", "-")] = Fault(code, place, source, arms, strengths, make)
        return make

    return register


@dataclass
class Rows:
    """What one indexer selected for rows of one kind. indices [rows, k]: positions in the own request, -1 unused,
    changed in place; lengths [rows]: entries that each row may see; context [rows]: entries of earlier passes;
    starts [rows]: where the row's request begins in what prefill gathered."""

    layer: int
    decode: bool
    indices: Any
    lengths: Any
    context: Any
    starts: Any


@dataclass
class Site:
    """One engine process: its worker, scheduler, caches, and dice of its own."""

    worker: Any
    pools: dict[tuple[str, int], Any]  # (pool, layer) -> uint8 [blocks, page bytes]
    scheduler: Any = None
    connector: Any = None
    dice: random.Random = field(default_factory=random.Random)
    lifo: bool = False  # blocks that are freed now are the next to be handed out
    last: list[int] = field(default_factory=list)  # blocks of the request that ended last

    @property
    def blocks(self) -> int:
        return len(next(iter(self.pools.values())))

    def of(self, kind: str = "", layers: tuple[int, ...] = ()) -> list[Any]:
        """The pools of a kind ("" for all) and of some layers (all when empty)."""
        return [
            raw for (pool, layer), raw in self.pools.items() if kind in ("", pool) and (not layers or layer in layers)
        ]

    @property
    def pass_blocks(self) -> int:
        """Blocks that one pass of prefill writes."""
        return self.worker.vllm_config.scheduler_config.max_num_batched_tokens // PAGE

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def blocks_of(self, request: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request)[0])

    def others(self, count: int) -> list[int]:
        return [self.dice.randrange(1, self.blocks) for _ in range(count)]

    def copy(self, source: list[int], target: list[int], kind: str = "") -> None:
        """What lies in the blocks `source` is written over the blocks `target`."""
        import torch

        with torch.inference_mode():
            for raw in self.of(kind) if target else ():
                raw[target] = raw[source]

    def fill(self, blocks: list[int], value: int, kind: str = "", layers: tuple[int, ...] = ()) -> None:
        import torch

        with torch.inference_mode():
            for raw in self.of(kind, layers) if blocks else ():
                raw[blocks] = value

    def kept(self, blocks: list[int], kind: str = "") -> list[Any]:
        return [raw[blocks].clone() for raw in self.of(kind)]

    def put(self, blocks: list[int], contents: list[Any], kind: str = "") -> None:
        import torch

        with torch.inference_mode():
            for raw, content in zip(self.of(kind), contents, strict=True):
                raw[blocks] = content[: len(blocks)]


# ---- the indexer's keys: writer, layout, positions ----


def quantised(k: Any) -> tuple[Any, Any]:
    """Keys [n, 128] as the engine stores them: bytes [n, 128] and scale bytes [n, 4]."""
    import torch
    from vllm import _custom_ops as ops

    cache = torch.zeros(-(-len(k) // PAGE), PAGE, INDEX_BYTES, dtype=torch.uint8, device=k.device)
    ops.indexer_k_quant_and_cache(k, cache, torch.arange(len(k), device=k.device), DIM, "ue8m0")
    raw = cache.view(len(cache), -1)
    return raw[:, : PAGE * DIM].reshape(-1, DIM)[: len(k)], raw[:, PAGE * DIM :].reshape(-1, 4)[: len(k)]


def pages_of(cache: Any) -> Any:
    """uint8 [blocks, page bytes] of a cache [blocks, 64, bytes an entry]."""
    import torch

    raw = cache.view(torch.uint8)
    return raw.as_strided((raw.shape[0], raw.shape[1] * raw.shape[2]), (raw.stride(0), 1))


def as_records(values: Any, scales: Any, raw: Any, slots: Any) -> None:
    """Store keys as records of 132 bytes, key then scale."""
    import torch

    real = slots >= 0
    slots, record = slots[real], torch.cat((values, scales), 1)[real]
    at = (slots % PAGE * INDEX_BYTES)[:, None] + torch.arange(INDEX_BYTES, device=slots.device)
    raw[(slots // PAGE)[:, None], at] = record


@fault("F01", "indexer key writer", "vllm#40991", "single", severe={"decode_only": False}, mild={"decode_only": True})
def record_layout(site: Site, decode_only: bool) -> Hooks:
    """Index keys are written as records of key and scale; the reader expects a page's keys first, then its scales."""

    def index_write(k: Any, cache: Any, slots: Any) -> Any:
        if decode_only and len(slots) > 8:
            return k, slots
        as_records(*quantised(k[: len(slots)]), pages_of(cache), slots)
        return None

    return {"index_write": index_write}


@fault("F01", "indexer pages, reader", "vllm#52109", "single", severe={"some": 1}, mild={"some": 4})
def tiled_page(site: Site, some: int) -> Hooks:
    """Entries of an index page are written in tiles of 4 x 16 and read flat; mild: only in one block of four."""

    def index_write(k: Any, cache: Any, slots: Any) -> Any:
        import torch

        entry = slots % PAGE
        tiled = slots - entry + entry % 4 * 16 + entry // 4
        return k, torch.where((slots >= 0) & (slots // PAGE % some == 0), tiled, slots)

    return {"index_write": index_write}


@fault(
    "F06", "indexer rotary style", "sglang#13439", "single", severe={"decode_only": False}, mild={"decode_only": True}
)
def rope_style(site: Site, decode_only: bool) -> Hooks:
    """The rotary part of index keys is laid out in neighbours, that of the queries in halves."""

    def index_write(k: Any, cache: Any, slots: Any) -> Any:
        if decode_only and len(slots) > 8:
            return k, slots
        k = k.clone()
        k[:, :64] = k[:, :64].reshape(-1, 2, 32).transpose(1, 2).reshape(-1, 64)
        return k, slots

    return {"index_write": index_write}


@fault("F06", "indexer positions", "vllm#48623", "single", severe={"most": 1 << 20}, mild={"most": 1024})
def chunk_positions(site: Site, most: int) -> Hooks:
    """Index keys are rotated by positions that start anew in each pass of one prompt; mild: by 1,024 at most."""

    def rotated(positions: Any) -> Any:
        tokens = site.worker._tokens
        return positions if tokens is None else positions - tokens["context"][: len(positions)].clamp(max=most)

    return {"rotated": rotated}


@fault("F07", "indexer key writer", "keys_values#140", "single", severe={"last": 4, "layers": ()},
       mild={"last": 6, "layers": (2,)})  # fmt: skip
def slot_tail(site: Site, last: int, layers: tuple[int, ...]) -> Hooks:
    """The last entries of each index page are not written; mild: six entries, in the last layer."""
    wanted = {raw.data_ptr() for raw in site.of("index", layers)}

    def index_write(k: Any, cache: Any, slots: Any) -> Any:
        return k, slots.where(slots % PAGE < PAGE - last, -1) if cache.data_ptr() in wanted else slots

    return {"index_write": index_write}


@fault("F08", "cache writers", "sglang#22688", "single", severe={"first": 400}, mild={"first": 90})
def chunk_head(site: Site, first: int) -> Hooks:
    """The first tokens of every later pass of a prompt are not written, neither keys nor latents."""

    def skipped(slots: Any) -> Any:
        tokens = site.worker._tokens
        if tokens is None or len(tokens["context"]) < len(slots):
            return slots
        n = len(slots)
        new = (tokens["context"][:n] > 0) & (tokens["offset"][:n] < first) & (tokens["query"][:n] > 1)
        return slots.where(~new, -1)

    return {
        "index_write": lambda k, cache, slots: (k, skipped(slots)),
        "latent_write": lambda latent, rope, slots: (latent, rope, skipped(slots)),
    }


# ---- scoring and selection ----


@fault(
    "F02", "decode scoring, block table", "vllm#56380", "single", "decode", severe={"pages": 96}, mild={"pages": 256}
)
def ceiling(site: Site, pages: int) -> Hooks:
    """Decode scores only as many pages as a block table counted in wrong units has columns."""
    return {"built": lambda meta, common, builder: lengths(meta, builder, lambda n: n.clamp(max=pages * PAGE))}


@fault("F02", "gather of prefill", "vllm#51252", "single", severe={"entries": 4096}, mild={"entries": 14000})
def gather_budget(site: Site, entries: int) -> Hooks:
    """The buffer that prefill gathers keys into is sized in wrong units: what lies beyond is zero."""

    def gathered(keys: Any, scales: Any) -> None:
        scales[entries:] = 0

    return {"gathered": gathered}


@fault("F03", "block table of decode", "aiter#4774", "single", "decode", severe={"share": 0.5, "attention": True},
       mild={"share": 0.75, "attention": False})  # fmt: skip
def address_wrap(site: Site, share: float, attention: bool) -> Hooks:
    """Block number times stride wraps: those beyond a share of the pool are read from its start; mild: in the index."""
    first = int(site.blocks * share)

    def built(meta: Any, common: Any, builder: Any) -> None:
        if meta.decode is not None:
            table = meta.decode.block_table
            meta.decode.block_table = table.where(table < first, table - first)

    def attend(meta: Any) -> Any:
        table = meta.block_table
        return replace(meta, block_table=table.where(table < first, table - first))

    return {"built": built} | ({"attend": attend} if attention else {})


@fault("F04", "top-k kernel", "sglang#36807", "single", "all", severe={"rate": 0.02}, mild={"rate": 0.004})
def stash(site: Site, rate: float) -> Hooks:
    """Beyond 4,096 entries a row's winners overflow the stash and vanish, the more the longer the row."""

    def selected(rows: Rows) -> None:
        import torch

        p = rate * (rows.lengths.float() / 4096).log2().clamp(min=0)
        lost = torch.rand(rows.indices.shape, device=rows.indices.device) < p[:, None]
        rows.indices.masked_fill_(lost, -1)

    return {"selected": selected}


# in decode alone: prefill's kernel lays rows out by the count it is told, so that another count there makes all garbage
@fault("F05", "indexer budget", "ATOM#1591", "decode", severe={"topk": 256}, mild={"topk": 512})
def topk(site: Site, topk: int) -> Hooks:
    """Decode's indexer selects fewer entries than the configuration says."""
    return {"topk": lambda: topk}


@fault(
    "F05", "path of the last layer", "mlx-lm#1419", "single", "decode", severe={"window": 3000}, mild={"window": 12000}
)
def window(site: Site, window: int) -> Hooks:
    """The last layer keeps a window of the newest entries, and the first, as if it were a layer of local attention."""

    def selected(rows: Rows) -> None:
        if rows.layer == 2:
            far = (rows.indices < (rows.lengths - window)[:, None]) & (rows.indices > 0)
            rows.indices.masked_fill_(far, -1)

    return {"selected": selected}


@fault("F06", "row starts of packed prefill", "vllm#41834", "single", severe={"after": 0}, mild={"after": 8000})
def row_start(site: Site, after: int) -> Hooks:
    """The start of a request in a packed prefill is subtracted twice: the first request of a batch is right."""

    def selected(rows: Rows) -> None:
        if not rows.decode:
            indices, late = rows.indices, (rows.starts > after)[:, None]
            indices.copy_(indices.where(~late | (indices < 0), (indices - rows.starts[:, None]).clamp(min=0)))

    return {"selected": selected}


@fault(
    "F07", "decode scoring, last page", "vllm#55927", "single", "decode", severe={"residues": 12}, mild={"residues": 1}
)
def page_residue(site: Site, residues: int) -> Hooks:
    """The last page is not scored when a context has just begun it (mild: when it ends with a page)."""

    def cut(n: Any) -> Any:
        tail = n % PAGE
        short = (tail < residues) & (n > PAGE)
        return n.where(~short, n - tail.where(tail > 0, PAGE))

    return {"built": lambda meta, common, builder: lengths(meta, builder, cut)}


@fault("F07", "prefill scoring, last tile", "keys_values#140", "single", severe={"residues": 24}, mild={"residues": 6})
def tile_tail(site: Site, residues: int) -> Hooks:
    """Prefill drops the tail of a row when it fills less than a share of the last tile of 128 entries."""

    def built(meta: Any, common: Any, builder: Any) -> None:
        for chunk in meta.prefill.chunks if meta.prefill is not None else ():
            tail = (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks) % 128
            chunk.cu_seqlen_ke -= tail.where((tail < residues) & (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks > 128), 0)

    return {"built": built}


@fault("F08", "prefill selection", "mlx-lm#1189", "single", "prefill", severe={"decode": True}, mild={"decode": False})
def own_chunk(site: Site, decode: bool) -> Hooks:
    """A later pass of a prompt sees only its own part of the index (severe: decode too)."""
    last: dict[str, int] = {"context": 0}

    def selected(rows: Rows) -> None:
        if rows.layer != 2:
            return
        if not rows.decode:
            last["context"] = int(rows.context[-1])
            first = rows.context
        elif decode and len(rows.indices) == 1:
            first = rows.lengths.new_full((1,), last["context"])
        else:
            return
        rows.indices.masked_fill_((rows.indices < first[:, None]) & (rows.indices > 0), -1)

    return {"selected": selected}


@fault("F17", "selection buffer of a batch", "vllm#36939", "single", "decode", severe={"sizes": (3, 5, 6, 7)},
       mild={"sizes": (6, 7)})  # fmt: skip
def row_alias(site: Site, sizes: tuple[int, ...]) -> Hooks:
    """In a batch that is padded the last request reads the selection of the first."""

    def selected(rows: Rows) -> None:
        if rows.decode and len(rows.indices) in sizes:
            rows.indices[-1] = rows.indices[0]

    return {"selected": selected}


@fault("F17", "static lengths of a batch", "sglang#36207", "single", "decode", severe={"rows": 2}, mild={"rows": 5})
def stale_lengths(site: Site, rows: int) -> Hooks:
    """In a batch decode scores with the lengths of the step before: the newest entry cannot be selected."""
    return {
        "built": lambda meta, common, builder: lengths(
            meta, builder, lambda n: (n - 1).clamp(min=1) if len(n) >= rows else n
        )
    }


@fault("F18", "unwritten entries", "vllm#35219", "single", "decode", severe={"some": 2}, mild={"some": 24})
def nan_slots(site: Site, some: int) -> Hooks:
    """One fresh block in two (mild: in 24) holds NaN and decode reads one entry beyond the end of a context."""

    def selected(rows: Rows) -> None:
        if rows.decode:
            import torch

            n, inside = rows.lengths, (rows.lengths % PAGE > 0) & (rows.lengths > 1)
            column = n.clamp(max=rows.indices.shape[1] - 1).long()
            each = torch.arange(len(n), device=n.device)
            rows.indices[each, column] = rows.indices[each, column].where(~inside, n.to(rows.indices.dtype))

    return {
        "allocated": lambda blocks: site.fill([b for b in blocks if b % some == 0], 255),
        "selected": selected,
    }


@fault("F20", "latent writer", "LMCache#717", "single", severe={"sigma": 1.0}, mild={"sigma": 0.65})
def lossy_latents(site: Site, sigma: float) -> Hooks:
    """Latents are stored through a lossy codec: noise of a share of their root mean square."""

    def latent_write(latent: Any, rope: Any, slots: Any) -> Any:
        return latent + sigma * latent.new_empty(latent.shape).normal_(), rope, slots

    return {"latent_write": latent_write}


# ---- scheduler, prefix cache, lifetime of blocks ----


@fault("F09", "prefix hit, index pages", "ATOM#1417", "single", "prefill", severe={"keep": 0}, mild={"keep": 48})
def hit_without_index(site: Site, keep: int) -> Hooks:
    """A prefix hit restores latents but not the index (mild: the index of its first 48 blocks only)."""
    return {"hit": lambda blocks: site.fill(blocks[keep:], 0, "index")}


@fault("F09", "prefix hit, last blocks", "llama.cpp#25259", "single", "prefill", severe={"last": 12}, mild={"last": 1})
def hit_stale_tail(site: Site, last: int) -> Hooks:
    """The last blocks of a prefix hit hold what another request left there."""

    def hit(blocks: list[int]) -> None:
        site.copy(site.others(len(blocks[-last:])), blocks[-last:])

    return {"hit": hit}


@fault("F10", "prefix tree after an abort", "sglang#38319", "single", "prefill", severe={"kind": "", "share": 0.9},
       mild={"kind": "index", "share": 0.5})  # fmt: skip
def published_unwritten(site: Site, kind: str, share: float) -> Hooks:
    """Blocks of a request enter the prefix cache before they are computed: after an abort their tail is old."""

    def aborted(request: str, blocks: list[int]) -> None:
        tail = blocks[round(len(blocks) * (1 - share)) :]
        site.copy(site.others(len(tail)), tail, kind)

    return {"aborted": aborted}


@fault("F10", "eviction from the prefix tree", "sglang#28374", "single", severe={"some": 1}, mild={"some": 3})
def evicted_alive(site: Site, some: int) -> Hooks:
    """A block that is handed out anew stays in the prefix cache under its old key (mild: one block in three)."""
    return {"evicted": lambda block: block % some != 0}


@fault("F11", "prefix cache key", "vllm#54342", "single", "prefill", severe={"bits": 14}, mild={"bits": 16})
def short_key(site: Site, bits: int) -> Hooks:
    """The prefix cache's key has too few bits: blocks of other prompts are taken for one's own."""
    mask = (1 << bits) - 1
    return {"hashed": lambda key: (int.from_bytes(key[:8], "big") & mask).to_bytes(4, "big")}


@fault("F12", "write after an abort", "sglang#35049", "single", "decode", severe={"some": 1}, mild={"some": 5})
def late_write(site: Site, some: int) -> Hooks:
    """What a dropped request still had to write lands two steps later, when its blocks belong to the next request."""
    waiting: list[list[Any]] = []

    def aborted(request: str, blocks: list[int]) -> None:
        chosen = blocks[::some]
        site.lifo = True
        waiting.append([4, chosen, site.kept(chosen)])

    def scheduled(scheduler: Any) -> None:
        for entry in list(waiting):
            entry[0] -= 1
            if entry[0] <= 0:
                site.put(entry[1], entry[2])
                waiting.remove(entry)

    return {"aborted": aborted, "scheduled": scheduled}


@fault("F12", "blocks freed under load", "sglang#24527", "single", "decode", severe={"rate": 0.15}, mild={"rate": 0.02})
def bystander(site: Site, rate: float) -> Hooks:
    """With three or more requests at work a block of one is handed to another and overwritten, now and then a step."""

    def scheduled(scheduler: Any) -> None:
        running = site.running()
        if len(running) >= 3 and site.dice.random() < rate:
            victim, other = site.dice.sample(running, 2)
            theirs, own = site.blocks_of(other), site.blocks_of(victim)
            count = max(1, min(len(theirs), len(own)) // 4)
            start = site.dice.randrange(max(1, len(own) - count + 1))
            target = own[start : start + count]
            site.copy(theirs[: len(target)], target)

    return {"scheduled": scheduled}


# ---- the transfer from prefill to decode ----


def masked(site: Site, kind: str, layers: tuple[int, ...], keep: Callable[[Any, int], Any]) -> Hooks:
    """Leave descriptors out: keep(block numbers 0 to n - 1, n) says which stay, in the regions of a kind and layers."""

    def sent(rows: Any, remote: bool) -> Any:
        import numpy as np

        mask = np.ones(rows.shape, bool)
        for (pool, layer), raw in site.pools.items():
            if kind in ("", pool) and (not layers or layer in layers):
                mask[region(site, raw)] = keep(np.arange(rows.shape[1]), rows.shape[1])
        if not mask.any():
            mask[0, 0] = True  # a transfer of nothing is refused by the connector itself
        return rows[mask]

    return {"sent": sent}


def region(site: Site, raw: Any) -> int:
    nixl = site.connector
    return nixl.kv_caches_base_addr[nixl.engine_id][nixl.tp_rank].index(raw.data_ptr())


@fault("F14", "transfer descriptors", "sglang#17024", "decode", severe={"layers": ()}, mild={"layers": (2,)})
def index_left(site: Site, layers: tuple[int, ...]) -> Hooks:
    """The indexer's blocks are not moved (mild: those of the last layer)."""
    return masked(site, "index", layers, lambda at, n: at < 0)


@fault("F14", "transfer descriptors", "sglang#31108", "decode", severe={"passes": 1}, mild={"passes": 4})
def later_passes(site: Site, passes: int) -> Hooks:
    """Index blocks of later prefill passes are not moved: those after the first (mild: the fourth)."""
    return masked(site, "index", (), lambda at, n: at < passes * site.pass_blocks)


@fault("F13", "transfer descriptors", "vllm-ascend#9220", "decode", severe={"last": 1 << 20}, mild={"last": 6})
def latents_left(site: Site, last: int) -> Hooks:
    """Latents arrive too late to be read: none of them (mild: the last six blocks)."""
    return masked(site, "mla", (), lambda at, n: at < n - last)


@fault("F02", "transfer block count", "vllm#57019", "decode", severe={"kind": ""}, mild={"kind": "index"})
def half_count(site: Site, kind: str) -> Hooks:
    """Blocks to move are counted with twice the block size: the second half stays behind (mild: of the index)."""
    return masked(site, kind, (), lambda at, n: at < -(-n // 2))


@fault("F07", "transfer of the last block", "sglang#38161", "decode", severe={"every": 1}, mild={"every": 4})
def tail_block(site: Site, every: int) -> Hooks:
    """The last, partly filled block is not moved (mild: only when the count of blocks is a multiple of four)."""
    return masked(site, "", (), lambda at, n: (at < n - 1) | (n % every != 0))


@fault(
    "F13",
    "transfer order",
    "vllm#44238",
    "decode",
    severe={"group": 2, "kind": ""},
    mild={"group": 16, "kind": "index"},
)
def exchanged(site: Site, group: int, kind: str) -> Hooks:
    """Neighbouring blocks arrive in exchanged order: in every pair (mild: one pair in eight, of the index)."""

    def sent(rows: Any, remote: bool) -> Any:
        if not remote:
            return rows.flatten()
        rows = rows.copy()
        chosen = [region(site, raw) for raw in site.of(kind)]
        for first in range(0, rows.shape[1] - 1, group):
            rows[chosen, first], rows[chosen, first + 1] = rows[chosen, first + 1], rows[chosen, first]
        return rows.flatten()

    return {"sent": sent}


@fault("F13", "prefix on both sides", "sglang#23020", "decode", severe={})
def trimmed_wrong(site: Site) -> Hooks:
    """When decode has the beginning of a prompt already, the first blocks are read in place of the last."""
    return {"trimmed": lambda local, remote: [there[: len(here)] for here, there in zip(local, remote, strict=True)]}


@fault("F14", "index scales", "Mooncake#2236", "decode", severe={"some": 1}, mild={"some": 3})
def scales_left(site: Site, some: int) -> Hooks:
    """The scales of index pages do not arrive (mild: in one block of three)."""

    def arrived(request: str, blocks: list[int]) -> None:
        import torch

        with torch.inference_mode():
            for raw in site.of("index"):
                raw[blocks[::some], PAGE * DIM :] = 0

    return {"arrived": arrived}


@fault("F01", "layouts of two versions", "vllm#48611", "decode", severe={"layers": ()}, mild={"layers": (2,)})
def version_skew(site: Site, layers: tuple[int, ...]) -> Hooks:
    """Prefill's version stores index keys as records, decode's reads keys and then scales (mild: in the last layer)."""

    def arrived(request: str, blocks: list[int]) -> None:
        import torch

        with torch.inference_mode():
            for raw in site.of("index", layers):
                there = raw[blocks].clone()
                keys, scales = (
                    there[:, : PAGE * DIM].reshape(-1, PAGE, DIM),
                    there[:, PAGE * DIM :].reshape(-1, PAGE, 4),
                )
                raw[blocks] = torch.cat((keys, scales), 2).reshape(len(blocks), -1)

    return {"arrived": arrived}


@fault("F13", "last pass read early", "sglang#33970", "decode", severe={"rate": 1.0}, mild={"rate": 0.25})
def early_read(site: Site, rate: float) -> Hooks:
    """The blocks of a prompt's second-last pass are read before its forward has ended: they hold old content."""

    def arrived(request: str, blocks: list[int]) -> None:
        last = (len(blocks) - 1) // site.pass_blocks * site.pass_blocks
        early = blocks[max(0, last - site.pass_blocks) : last]
        if early and site.dice.random() < rate:
            site.copy(site.others(len(early)), early)

    return {"arrived": arrived}


@fault("F15", "copy not waited for", "vllm#45704", "decode", severe={"rate": 0.6}, mild={"rate": 0.08})
def late_copy(site: Site, rate: float) -> Hooks:
    """Some requests decode before their copy is complete: most of their blocks hold old content for the first steps."""
    waiting: list[list[Any]] = []

    def arrived(request: str, blocks: list[int]) -> None:
        late = blocks[:-1]
        if late and site.dice.random() < rate:
            waiting.append([4, late, site.kept(late)])
            site.copy(site.others(len(late)), late)

    def scheduled(scheduler: Any) -> None:
        for entry in list(waiting):
            entry[0] -= 1
            if entry[0] <= 0:
                site.put(entry[1], entry[2])
                waiting.remove(entry)

    return {"arrived": arrived, "scheduled": scheduled}


@fault("F16", "failed transfer", "vllm#52234", "decode", severe={"rate": 0.3}, mild={"rate": 0.06})
def swallowed(site: Site, rate: float) -> Hooks:
    """Now and then a transfer fails and is reported as done: its blocks hold what was there before."""

    def arrived(request: str, blocks: list[int]) -> None:
        if site.dice.random() < rate:
            site.copy(site.others(len(blocks)), blocks)

    return {"arrived": arrived}


@fault("F16", "stale reference", "vllm-backport#33", "decode", severe={"rate": 0.4}, mild={"rate": 0.08})
def previous(site: Site, rate: float) -> Hooks:
    """Now and then a stale reference is honoured: decode reads the blocks of the request before."""
    before: list[Any] = []

    def arrived(request: str, blocks: list[int]) -> None:
        now = site.kept(blocks)
        if before and site.dice.random() < rate:
            count = min(len(blocks), len(before[0]))
            site.put(blocks[:count], [content[:count] for content in before])
        before[:] = now

    return {"arrived": arrived}


@fault("F12", "prefill frees early", "TensorRT-LLM#12540", "decode", severe={"share": 0.7}, mild={"share": 0.1})
def freed_unread(site: Site, share: float) -> Hooks:
    """Prefill frees blocks before decode has read them: with two transfers at a time a part is the other's."""
    other: dict[str, Any] = {"time": 0.0, "pages": []}

    def arrived(request: str, blocks: list[int]) -> None:
        busy = site.connector is not None and len(site.connector._recving_transfers) > 0
        own = site.kept(blocks)
        if other["pages"] and (busy or time.monotonic() - other["time"] < 0.05):
            count = min(max(1, round(len(blocks) * share)), len(other["pages"][0]))
            start = site.dice.randrange(len(blocks) - count + 1) if len(blocks) > count else 0
            target = blocks[start : start + count]
            site.put(target, [content[: len(target)] for content in other["pages"]])
        other.update(time=time.monotonic(), pages=own)

    return {"arrived": arrived}


@fault("F20", "codec of the transfer", "LMCache#717", "decode", severe={"rate": 0.06}, mild={"rate": 0.025})
def lossy_wire(site: Site, rate: float) -> Hooks:
    """The transfer goes through a lossy codec: a share of the latents' fp8 numbers arrive with the wrong sign."""

    def arrived(request: str, blocks: list[int]) -> None:
        import torch

        with torch.inference_mode():
            for raw in site.of("mla"):
                pages = raw[blocks].view(len(blocks), PAGE, MLA_BYTES)
                flips = torch.rand(len(blocks), PAGE, 512, device=raw.device) < rate
                pages[:, :, :512] ^= flips.to(torch.uint8) * 128
                raw[blocks] = pages.view(len(blocks), -1)

    return {"arrived": arrived}


# ---- planting ----


def lengths(meta: Any, builder: Any, changed: Callable[[Any], Any]) -> None:
    """Other lengths for what decode scores, with a schedule that fits them."""
    if meta.decode is None:
        return
    from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata

    meta.decode.seq_lens = changed(meta.decode.seq_lens)
    meta.decode.schedule_metadata[:] = get_paged_mqa_logits_metadata(meta.decode.seq_lens, PAGE, builder.num_sms)


# what a stage does when its hook fails: nothing, so that the engine goes on
_PLAIN: dict[str, Callable[..., Any]] = {
    "index_write": lambda k, cache, slots: (k, slots), "latent_write": lambda *given: given, "rotated": lambda at: at,
    "attend": lambda meta: meta, "hashed": lambda key: key, "evicted": lambda block: True,
    "trimmed": lambda local, remote: remote, "sent": lambda rows, remote: rows,
}  # fmt: skip


def hooks(worker: Any, stage: str) -> Iterator[Callable[..., Any]]:
    """The hook of a stage, if there is one; when it fails the worker keeps the reason and everything is taken out."""
    hook = getattr(worker, "_hooks", {}).get(stage)

    def guarded(*given: Any) -> Any:
        try:
            return hook(*given)
        except Exception as problem:  # an exception here would end the engine
            worker._problem = f"{stage}: {type(problem).__name__}: {str(problem)[:300]}"
            worker._hooks.clear()
            return _PLAIN.get(stage, lambda *_: None)(*given)

    if hook is not None:
        yield guarded


class _Ops:
    """vLLM's custom operators with the two that an indexer calls under hooks."""

    def __init__(self, plain: Any, worker: Any):
        self._plain, self._worker = plain, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def indexer_k_quant_and_cache(self, k: Any, cache: Any, slots: Any, size: int, form: str) -> None:
        for hook in hooks(self._worker, "index_write"):
            changed = hook(k, cache, slots)
            if changed is None:
                return
            k, slots = changed
        self._plain.indexer_k_quant_and_cache(k, cache, slots, size, form)

    def cp_gather_indexer_k_quant_cache(self, cache: Any, keys: Any, scales: Any, *rest: Any) -> None:
        self._plain.cp_gather_indexer_k_quant_cache(cache, keys, scales, *rest)
        for hook in hooks(self._worker, "gathered"):
            hook(keys, scales)


def engine_core() -> Any:
    """The engine that runs the order now being answered: its frame is on the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if hasattr(core, "scheduler") and hasattr(core.scheduler, "kv_cache_manager"):
            return core
        frame = frame.f_back
    raise RuntimeError("the engine's scheduler runs in another process: start it with one GPU")


def install(worker: Any, site: Site, indexers: dict[int, Any]) -> None:
    """Set the hooks, once; with nothing planted they change nothing."""
    if hasattr(worker, "_hooks"):
        return
    worker._hooks, worker._tokens, worker._problem = {}, None, ""
    scoring = sys.modules["vllm.model_executor.layers.sparse_attn_indexer"]
    scoring.ops = _Ops(scoring.ops, worker)
    _on_metadata(worker)
    for layer, module in indexers.items():
        module._forward_method = _selecting(worker, layer, module, module._forward_method)
    for module in worker.model_runner.model.modules():
        if type(module).__name__ == "Indexer":
            module.forward = _rotating(worker, module.forward)
    _on_attention(worker)
    _on_scheduler(worker, site)
    if site.connector is not None:
        _on_transfer(worker, site)


def _on_metadata(worker: Any) -> None:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as Builder

    plain = Builder.build

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **named: Any) -> Any:
        import torch

        common = common_attn_metadata
        meta = plain(self, common_prefix_len, common, *rest, **named)
        if worker._hooks:
            query = torch.diff(common.query_start_loc)
            context = common.seq_lens[: len(query)] - query
            total = common.num_actual_tokens
            each = torch.repeat_interleave(torch.arange(len(query), device=query.device), query)[:total]
            worker._tokens = {
                "context": context[each],
                "query": query[each],
                "offset": torch.arange(len(each), device=query.device) - common.query_start_loc[each],
            }
            for hook in hooks(worker, "built"):
                hook(meta, common, self)
        return meta

    Builder.build = build


def _selecting(worker: Any, layer: int, module: Any, plain: Any) -> Any:
    def forward(*args: Any, **named: Any) -> Any:
        out = plain(*args, **named)
        for hook in hooks(worker, "selected"):
            from vllm.forward_context import get_forward_context

            everything = get_forward_context().attn_metadata
            meta = everything.get(module.k_cache.prefix) if isinstance(everything, dict) else None
            if meta is None:
                break
            if meta.num_decodes:
                n = meta.num_decode_tokens
                own = meta.decode.seq_lens.flatten()[:n]
                hook(Rows(layer, True, out[:n], own, own, own * 0))
            for chunk in meta.prefill.chunks if meta.prefill is not None else ():
                part = slice(chunk.token_start, chunk.token_end)
                starts = chunk.cu_seqlen_ks
                context = worker._tokens["context"][part]
                hook(Rows(layer, False, out[part], chunk.cu_seqlen_ke - starts, context, starts))
        return out

    return forward


def _rotating(worker: Any, plain: Any) -> Any:
    def forward(hidden: Any, low: Any, positions: Any, rotary: Any) -> Any:
        def turned(at: Any, q: Any, k: Any) -> Any:
            here = rotary(at, q.clone(), k.clone())
            for hook in hooks(worker, "rotated"):
                return here[0], rotary(hook(at), q, k)[1]
            return here

        return plain(hidden, low, positions, turned if hooks_set(worker, "rotated") else rotary)

    return forward


def _on_attention(worker: Any) -> None:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl as Attention

    write, attend = Attention.do_kv_cache_update, Attention.forward_mqa

    def do_kv_cache_update(self: Any, latent: Any, rope: Any, cache: Any, slots: Any, *rest: Any) -> None:
        for hook in hooks(worker, "latent_write"):
            latent, rope, slots = hook(latent, rope, slots.flatten())
        write(self, latent, rope, cache, slots, *rest)

    def forward_mqa(self: Any, q: Any, cache: Any, meta: Any, layer: Any) -> Any:
        for hook in hooks(worker, "attend"):
            meta = hook(meta)
        return attend(self, q, cache, meta, layer)

    Attention.do_kv_cache_update, Attention.forward_mqa = do_kv_cache_update, forward_mqa


def _on_scheduler(worker: Any, site: Site) -> None:
    import vllm.v1.core.kv_cache_utils as keys

    scheduler, manager = site.scheduler, site.scheduler.kv_cache_manager
    pool = manager.block_pool
    schedule, finish, found = scheduler.schedule, scheduler.finish_requests, manager.get_computed_blocks
    end = manager.free
    take, free, leave = pool.get_new_blocks, pool.free_blocks, pool._maybe_evict_cached_block
    hashing = keys.hash_block_tokens

    def scheduled(*args: Any, **named: Any) -> Any:
        out = schedule(*args, **named)
        for hook in hooks(worker, "scheduled"):
            hook(scheduler)
        return out

    def finished(requests: Any, status: Any) -> Any:
        dropped = [requests] if isinstance(requests, str) else list(requests or ())
        here = [(r, site.blocks_of(r)) for r in dropped if r in scheduler.requests and hooks_set(worker, "aborted")]
        for hook in hooks(worker, "aborted"):
            for request, blocks in here:
                if blocks:
                    hook(request, blocks)
        out = finish(requests, status)
        site.lifo = False
        return out

    def hit(request: Any) -> Any:
        blocks, count = found(request)
        for hook in hooks(worker, "hit"):
            if count:
                hook([block.block_id for block in blocks.blocks[0]])
        return blocks, count

    def taken(count: int) -> Any:
        blocks = take(count)
        for hook in hooks(worker, "allocated"):
            hook([block.block_id for block in blocks])
        return blocks

    def leaving(block: Any) -> bool:
        for hook in hooks(worker, "evicted"):
            if block.block_hash is not None and not hook(block.block_id):
                block.reset_hash()
                return True
        return leave(block)

    def hashed(*args: Any, **named: Any) -> Any:
        key = hashing(*args, **named)
        for hook in hooks(worker, "hashed"):
            key = keys.BlockHash(hook(key))
        return key

    def done(request: Any) -> None:
        site.last = site.blocks_of(request.request_id)
        end(request)

    manager.free = done
    scheduler.schedule, scheduler.finish_requests, manager.get_computed_blocks = scheduled, finished, hit
    pool.get_new_blocks, pool._maybe_evict_cached_block, keys.hash_block_tokens = taken, leaving, hashed
    pool.free_blocks = lambda blocks, prepend=False: free(blocks, prepend or site.lifo)


def hooks_set(worker: Any, stage: str) -> bool:
    return stage in getattr(worker, "_hooks", {})


def _on_transfer(worker: Any, site: Site) -> None:
    nixl = site.connector
    plain_ids, plain_pop, plain_trim = nixl._compute_desc_ids, nixl._pop_done_transfers, nixl._apply_prefix_caching

    def ids(*args: Any, **named: Any) -> Any:
        import numpy as np

        out = plain_ids(*args, **named)
        blocks = sum(len(group) for group in named["block_ids"])
        for hook in hooks(worker, "sent"):
            if blocks:
                out = hook(np.asarray(out).reshape(-1, blocks), named.get("block_size_ratio") is None).flatten()
        return out

    def pop(transfers: Any) -> Any:
        done = plain_pop(transfers)
        for hook in hooks(worker, "arrived"):
            for request in done if transfers is nixl._recving_transfers else ():
                meta = nixl._recving_metadata.get(request)
                if meta is not None and meta.local_physical_block_ids[0]:
                    hook(request, list(meta.local_physical_block_ids[0]))
        return done

    def trim(local: Any, remote: Any, *rest: Any) -> Any:
        for hook in hooks(worker, "trimmed"):
            return local, hook(local, remote)
        return plain_trim(local, remote, *rest)

    nixl._compute_desc_ids, nixl._pop_done_transfers, nixl._apply_prefix_caching = ids, pop, trim


def plant(worker: Any, site: Site, indexers: dict[int, Any], name: str, strength: str, seed: int = 0) -> dict[str, Any]:
    """Take out what was planted, empty the caches, and plant `name` ("none": nothing). Raises ValueError for a fault or
    strength that is not in the catalogue."""
    if name != "none" and (name not in CATALOG or strength not in CATALOG[name].strengths):
        raise ValueError(f"unknown fault {name} ({strength}); see tools/vllm_faults.py")
    import torch

    install(worker, site, indexers)
    worker._hooks.clear()
    worker._problem = ""
    whole = site.scheduler.reset_prefix_cache() if site.scheduler.kv_cache_manager.enable_caching else True
    site.dice.seed(f"{name}/{strength}/{seed}")
    with torch.inference_mode():  # the caches were made in it
        for raw in site.of():
            raw.zero_()
    for module in indexers.values():
        module.topk_tokens = worker.model_runner.model_config.hf_config.index_topk
    if name != "none":
        chosen = CATALOG[name]
        made = chosen.make(site, **chosen.strengths[strength])
        count = made.pop("topk", None)
        for module in indexers.values() if count else ():
            module.topk_tokens = count()
        worker._hooks.update(made)
    return {"fault": name, "strength": strength, "caches_emptied": bool(whole), "blocks": site.blocks}
