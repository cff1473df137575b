"""The engine: scheduler, prefix cache and paged pools around the forward pass. `lab.types` says how a server drives
it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from needlework.lab import faults as planted
from needlework.lab.forward import Forward, Sequence
from needlework.lab.model import Model
from needlework.lab.output import Output, draw
from needlework.lab.pools import Allocator, OutOfPages, Pools
from needlework.lab.prefix import Node, PrefixCache
from needlework.lab.types import GEOMETRIES, Buffer, Chunk, Event, Geometry, Handoff, Hooks, Request, Reservation

ROLES = ("combined", "prefill", "decode")


@dataclass(eq=False)
class Running(Sequence):
    """A sequence with its bookkeeping."""

    output: Output | None = None
    prompt_tokens: int = 0
    nodes: list[Node] = field(default_factory=list)  # cached nodes this sequence holds locks on, one a page
    swa_held: set[int] = field(default_factory=set)  # logical pages whose window page is locked in its node
    exported: int = 0  # logical pages announced to the transfer
    chunks: int = 0
    handoff: Handoff | None = None  # decode role: the first token, not yet reported
    identity: str = ""
    apart: bool = False  # another sequence has published the same content: this one keeps its further pages to itself

    @property
    def prompt_done(self) -> bool:
        return self.computed >= self.prompt_tokens


class Engine:
    """A continuous-batching engine over paged pools. `role` is "combined", "prefill" or "decode".

    options: `prefix_cache` (default True; False in decode unless asked for), `chunk_tokens`, `max_batch`, `page_seed`
    (order of physical pages, default: seed), `threads` of torch in this process (1: its tensors are small, and
    threads that wait for one another on a busy machine made a step ten times slower), and any field of Geometry.
    Raises ValueError for anything unknown.
    """

    def __init__(
        self,
        geometry: str | Geometry = "v4",
        *,
        role: str = "combined",
        seed: int = 0,
        faults: Iterable[str] = (),
        prefix_cache: bool | None = None,
        chunk_tokens: int | None = None,
        max_batch: int = 32,
        page_seed: int | None = None,
        threads: int = 1,
        **overrides: Any,
    ) -> None:
        if isinstance(geometry, str):
            if geometry not in GEOMETRIES:
                raise ValueError(f"unknown geometry {geometry[:40]!r}; choose one of {', '.join(GEOMETRIES)}")
            geometry = GEOMETRIES[geometry]
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; choose one of {', '.join(ROLES)}")
        if chunk_tokens is not None:
            overrides["chunk_tokens"] = chunk_tokens
        try:
            self.geometry = replace(geometry, **overrides)
        except TypeError:
            raise ValueError(f"unknown engine option among {', '.join(sorted(overrides))}") from None
        g = self.geometry
        if g.chunk_tokens < 1 or max_batch < 1:
            raise ValueError("chunk_tokens and max_batch must be at least 1")
        torch.set_num_threads(threads)
        self.role, self.seed, self.max_batch = role, seed, max_batch
        self.hooks = Hooks()
        self.model = Model(seed=seed, layers=g.layers)
        self.tokenizer = self.model.tokenizer
        self.memory = Pools(g)
        self.forward = Forward(self.model, self.memory, g, self.hooks)
        order = seed if page_seed is None else page_seed
        order += {"combined": 0, "prefill": 101, "decode": 202}[role]
        self.full, self.swa = Allocator(g.pages, 2 * order), Allocator(g.swa_pages, 2 * order + 1)
        enabled = role != "decode" if prefix_cache is None else prefix_cache
        self.cache = PrefixCache(g.page_tokens, -(-g.local_window // g.page_tokens), self.full, self.swa, enabled)
        self.cache.on_evict = lambda node: self.hooks.apply("evicted", node)
        self.on_chunk: Callable[[Chunk], None] | None = None
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.held: dict[str, Running] = {}  # transferring (prefill), or reserved and not started (decode)
        self._retired: list[Running] = []  # finished in the last step; their pages are still theirs until the next
        self._aborted: list[Event] = []
        self.counters = dict.fromkeys(
            (
                "num_requests",
                "prompt_tokens",
                "generation_tokens",
                "cached_tokens",
                "num_retracted_reqs",
                "forward_passes",
            ),
            0,
        )
        self.faults = planted.install(self, faults)

    # ---- requests ----------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. ValueError, with one sentence, when it cannot run here."""
        self._known(request.rid)
        seq = self._sequence(request)
        needed = -(-seq.prompt_tokens // self.geometry.page_tokens)
        if needed > self.geometry.pages - 1:
            raise ValueError(f"the prompt needs {needed} pages and the pool has {self.geometry.pages - 1}")
        self.waiting.append(seq)

    def _sequence(self, request: Request) -> Running:
        limit = self.geometry.max_context
        if not request.tokens:
            raise ValueError("the prompt is empty")
        size = self.tokenizer.vocabulary
        if any(not 0 <= token < size for token in request.tokens):
            raise ValueError(f"the prompt holds a token id outside the vocabulary of {size}")
        tokens = list(self.hooks.apply("prompt", list(request.tokens), request=request))
        if len(tokens) >= limit:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and the context length is {limit}: send a shorter prompt"
            )
        if request.sampling.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        identity = self.hooks.apply("cache_identity", f"{request.cache_salt}\x00{request.extra_key}", request=request)
        seq = Running(request, tokens, prompt_tokens=len(tokens), identity=identity)
        budget = self.hooks.apply("budget", min(request.sampling.max_tokens, limit - len(tokens)), request=request)
        seq.output = Output(request, self.tokenizer, len(tokens), budget)
        return seq

    def _known(self, rid: str) -> None:
        if rid in self.held or any(seq.rid == rid for seq in (*self.waiting, *self.running)):
            raise ValueError(f"a request with rid {rid[:60]!r} is running already")

    def abort(self, rid: str) -> None:
        """Give a request up at any stage; its Event comes with the next step. An unknown rid is ignored."""
        for seq in [*self.waiting, *self.running, *self.held.values()]:
            if seq.rid == rid:
                self._forget(seq)
                self._free(seq, finished=False)
                assert seq.output is not None
                self._aborted.append(seq.output.aborted(seq.cached))

    def _forget(self, seq: Running) -> None:
        if seq in self.waiting:
            self.waiting.remove(seq)
        if seq in self.running:
            self.running.remove(seq)
        self.held.pop(seq.rid, None)

    @property
    def busy(self) -> bool:
        """Would a step do anything?"""
        return bool(self.waiting or self.running or self._aborted)

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """One forward pass: prompt chunks within the budget, then one token for every sequence whose prompt is done."""
        self._retire()
        self.hooks.apply("step_begins", None)
        events, self._aborted = self._aborted, []
        started = [seq for seq in self.running if seq.handoff is not None]
        for seq in started:  # decode role: the token that prefill has sampled is the first of the answer
            handoff, seq.handoff = seq.handoff, None
            assert handoff is not None
            events.append(self._emit(seq, handoff.token, handoff.logprob, handoff.top_logprobs))
        decoding = [seq for seq in self.running if seq.prompt_done and seq not in started]
        for seq in decoding:
            if seq in self.running:  # not retracted meanwhile to make room
                self._grow(seq, len(seq.tokens))
        ready = [seq for seq in decoding if seq in self.running and seq.computed == len(seq.tokens)]
        ready += self._prefill()
        ready = self.hooks.apply("batch", ready)
        if ready:
            self.counters["forward_passes"] += 1
            for seq, logits in zip(ready, self.forward.logits(ready), strict=True):
                logits = self.hooks.apply("logits", logits, seq=seq)
                token, logprob, top = draw(logits, seq.request, len(seq.tokens))
                if seq.request.bootstrap is not None and self.role == "prefill":
                    self._hand_over(seq, token, logprob, top)
                else:
                    events.append(self._emit(seq, token, logprob, top))
        return events

    def _grow(self, seq: Running, end: int) -> bool:
        """Give a sequence pages up to token `end` and compute them; retract the youngest other when the pool is
        full."""
        while True:
            try:
                self._take_pages(seq, end)
            except OutOfPages:
                others = [other for other in self.running if other is not seq and other.handoff is None]
                if not others or self.role == "decode":
                    self._forget(seq)
                    self._free(seq, finished=False)
                    assert seq.output is not None
                    self._aborted.append(seq.output.failed("the cache has no page left for this request"))
                    return False
                self._retract(others[-1])
                continue
            self._compute(seq, end)
            return True

    def _retract(self, seq: Running) -> None:
        """Take a sequence's pages away and queue it again; what it has said so far stays said."""
        self._free(seq, finished=False)
        self.running.remove(seq)
        fresh = replace(seq, full=[], swa={}, computed=0, nodes=[], swa_held=set(), prompt_tokens=len(seq.tokens))
        self.waiting.appendleft(fresh)
        self.counters["num_retracted_reqs"] += 1

    def _compute(self, seq: Running, end: int) -> None:
        place = {"seq": seq, "start": seq.computed, "end": end}
        last = end >= seq.prompt_tokens
        exports = seq.request.bootstrap is not None and self.role == "prefill"
        if exports and not seq.chunks:  # what the prefix cache has goes first, in pieces of the size of a pass
            step = max(1, self.geometry.chunk_tokens // self.geometry.page_tokens) * self.geometry.page_tokens
            for cached in [*range(step, seq.computed, step), seq.computed] if seq.computed else []:
                self._announce(seq, cached)
        early = exports and not last and self.hooks.apply("announce_early", False, last=last, **place)
        if early:
            self._announce(seq, end)
        self.hooks.apply("pass_begins", None, **place)
        self.forward.extend(seq, end)
        if exports and not last and not early:
            self._announce(seq, end)
        self._publish(seq)
        self._slide(seq)

    def _prefill(self) -> list[Running]:
        """Compute prompt chunks of waiting and half-done sequences; those whose prompt is complete now."""
        budget = self.geometry.chunk_tokens
        done: list[Running] = []
        for seq in [s for s in self.running if not s.prompt_done]:
            budget = self._prefill_one(seq, budget, done)
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if not self._fits(seq):
                if not self.running and not self.held:
                    self.waiting.popleft()
                    assert seq.output is not None
                    self._aborted.append(seq.output.failed("the cache has no room for this prompt"))
                    continue
                break
            self.waiting.popleft()
            self._admit(seq)
            budget = self._prefill_one(seq, budget, done)
        return done

    def _prefill_one(self, seq: Running, budget: int, done: list[Running]) -> int:
        left = seq.prompt_tokens - seq.computed
        size = min(left, budget)
        if size < left:  # a chunk that is not the last ends on a page
            size = (seq.computed + size) // self.geometry.page_tokens * self.geometry.page_tokens - seq.computed
            if size <= 0:
                size = min(left, budget) if budget == self.geometry.chunk_tokens else 0
        if size > 0 and self._grow(seq, seq.computed + size) and seq.prompt_done:
            done.append(seq)
        return budget - size

    def _fits(self, seq: Running) -> bool:
        needed = -(-(seq.prompt_tokens + 1) // self.geometry.page_tokens)
        promised = sum(
            -(-(s.prompt_tokens + 1) // self.geometry.page_tokens) - len(s.full)
            for s in self.running
            if not s.prompt_done
        )
        return needed + promised <= self.full.free + self.cache.evictable

    def _admit(self, seq: Running) -> None:
        """Start a sequence, taking over what the prefix cache has of it; at least one token is always computed."""
        keys = self.cache.keys(seq.tokens[: seq.prompt_tokens - 1], seq.identity)
        chain = self.hooks.apply("prefix_hit", self.cache.match(keys), seq=seq)
        self.cache.lock(chain)
        seq.nodes = list(chain)
        seq.full = [node.page for node in chain]
        first = len(chain) - self.cache.window_pages
        for page, node in enumerate(chain):
            if page >= first and node.swa_page is not None:
                seq.swa[page] = node.swa_page
                seq.swa_held.add(page)
        if seq.output is not None and not seq.output.tokens:
            seq.cached = len(chain) * self.geometry.page_tokens
            self.counters["num_requests"] += 1
            self.counters["prompt_tokens"] += seq.prompt_tokens
            self.counters["cached_tokens"] += seq.cached
        seq.computed = len(chain) * self.geometry.page_tokens
        self.running.append(seq)
        if chain:
            self.hooks.apply("restored", None, seq=seq)

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
        pages = self.hooks.apply("publish", min(seq.computed // tokens, len(seq.full)), seq=seq)
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

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _emit(self, seq: Running, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Event:
        assert seq.output is not None
        seq.tokens.append(token)
        self.counters["generation_tokens"] += 1
        event = seq.output.push(token, logprob, top, seq.cached)
        if event.finish_reason is not None:
            self.running.remove(seq)
            self._retired.append(seq)
        return event

    def _retire(self) -> None:
        for seq in self._retired:
            self._free(seq, finished=True)
        self._retired = []

    def _free(self, seq: Running, *, finished: bool) -> None:
        """Give all pages back: locks on cached ones, the rest to the free list."""
        own = seq.full[len(seq.nodes) :]
        for page in list(seq.swa):
            self._drop_window(seq, page)
        for node in seq.nodes:
            node.locks -= 1
        for page in own:
            self.full.give(page)
        self.hooks.apply("released", None, seq=seq, pages=own, finished=finished)
        seq.nodes, seq.full = [], []

    # ---- prefill and decode as two engines ---------------------------------------------------------------------------
    def _announce(self, seq: Running, end: int, handoff: Handoff | None = None) -> None:
        tokens, last = self.geometry.page_tokens, handoff is not None
        pages = -(-end // tokens) if last else end // tokens
        first = seq.exported
        window = sorted(seq.swa) if last else []
        window = [page for page in window if (page + 1) * tokens > end - self.geometry.local_window]
        chunk = Chunk(
            seq.rid,
            seq.chunks,
            last,
            first,
            tuple(seq.full[first:pages]),
            window[0] if window else 0,
            tuple(seq.swa[page] for page in window),
            handoff,
            None if seq.request.bootstrap is None else seq.request.bootstrap.get("room"),
        )
        seq.exported, seq.chunks = max(first, pages), seq.chunks + 1
        if self.on_chunk is not None:
            self.on_chunk(chunk)

    def _hand_over(self, seq: Running, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        room = None if seq.request.bootstrap is None else seq.request.bootstrap.get("room")
        handoff = Handoff(token, logprob, top, seq.prompt_tokens, seq.cached, room)
        self.running.remove(seq)
        self.held[seq.rid] = seq
        self._announce(seq, seq.prompt_tokens, handoff)

    def release(self, rid: str) -> None:
        """Prefill role: everything was acknowledged; the pages go to the prefix cache or back to the pool."""
        seq = self.held.pop(rid, None)
        if seq is None:
            raise ValueError(f"no finished prompt with rid {rid[:60]!r}")
        self._free(seq, finished=True)

    def reserve(self, request: Request) -> Reservation:
        """Decode role: pages for a whole prompt. OutOfPages (a RuntimeError) when there are none now; ValueError as
        `add`."""
        self._retire()
        self._known(request.rid)
        seq, tokens = self._sequence(request), self.geometry.page_tokens
        pages = -(-seq.prompt_tokens // tokens)
        if pages + 1 > self.geometry.pages - 1:
            raise ValueError(f"the prompt needs {pages} pages and the pool has {self.geometry.pages - 1}")
        if not self._fits(seq) or len(self.running) + len(self.held) >= self.max_batch:
            raise OutOfPages("no room for this prompt now")
        keys = self.cache.keys(seq.tokens[: seq.prompt_tokens - 1], seq.identity)
        chain = self.hooks.apply("prefix_hit", self.cache.match(keys, window=False), seq=seq)
        self.cache.lock(chain, window=False)
        seq.nodes, seq.full = list(chain), [node.page for node in chain]
        first = max(0, seq.prompt_tokens - self.geometry.local_window) // tokens
        try:
            seq.computed = max(first, len(chain)) * tokens
            self._take_pages(seq, seq.prompt_tokens)
            for page in range(first, pages):
                if page not in seq.swa:
                    seq.swa[page] = self.cache.take_swa()
        except OutOfPages:
            self._free(seq, finished=False)
            raise
        self.held[seq.rid] = seq
        window = tuple(seq.swa[page] for page in range(first, pages))
        return Reservation(seq.rid, len(chain), tuple(seq.full[len(chain) :]), first, window)

    def start(self, rid: str, handoff: Handoff) -> None:
        """Decode role: the pages of `rid` are filled; decode from its first token on."""
        seq = self.held.pop(rid, None)
        if seq is None:
            raise ValueError(f"no reservation with rid {rid[:60]!r}")
        seq.computed, seq.cached, seq.handoff = seq.prompt_tokens, handoff.cached_tokens, handoff
        self.counters["num_requests"] += 1
        self.counters["prompt_tokens"] += seq.prompt_tokens
        self.running.append(seq)
        self._publish(seq)

    # ---- memory and figures ------------------------------------------------------------------------------------------
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
        """Empty the prefix cache; False, and nothing done, while requests run, wait or are being transferred."""
        if self.waiting or self.running or self.held:
            return False
        self._retire()
        self.cache.clear()
        return True

    def info(self) -> dict[str, Any]:
        """What the deployment says about itself: sizes in effect, not wishes."""
        g = self.geometry
        return {
            "role": self.role,
            "geometry": g.name,
            "page_size": g.page_tokens,
            "chunked_prefill_size": g.chunk_tokens,
            "context_length": g.max_context,
            "index_topk": g.top_k,
            "sliding_window": g.window,
            "compress_ratio": g.ratio,
            "layers": g.layers + 1,
            "max_running_requests": self.max_batch,
            "max_total_num_tokens": (g.pages - 1) * g.page_tokens,
            "disable_radix_cache": not self.cache.enabled,
            "kv_cache_dtype": "fp8_e4m3",
            "vocab_size": self.tokenizer.vocabulary,
            "random_seed": self.seed,
        }

    def metrics(self) -> dict[str, float]:
        """Gauges, and counters ending in _total, by SGLang's names without the prefix."""
        g, c = self.geometry, self.counters
        total = (g.pages - 1) * g.page_tokens
        free, kept = self.full.free * g.page_tokens, self.cache.evictable * g.page_tokens
        return {
            "num_running_reqs": float(len(self.running)),
            "num_queue_reqs": float(len(self.waiting)),
            "kv_available_tokens": float(free),
            "kv_evictable_tokens": float(kept),
            "kv_used_tokens": float(total - free - kept),
            "token_usage": (total - free - kept) / total,
            "cache_hit_rate": c["cached_tokens"] / max(1, c["prompt_tokens"]),
            **{f"{name}_total": float(value) for name, value in c.items()},
        }
