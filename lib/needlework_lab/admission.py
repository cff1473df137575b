"""Requests at an engine's door, and the two halves of a pair: what prefill announces, what decode sets aside."""

from __future__ import annotations

from collections.abc import Callable

from needlework_lab.model import Model
from needlework_lab.output import Output
from needlework_lab.paging import Paging, Running
from needlework_lab.pools import OutOfPages
from needlework_lab.types import Chunk, Event, Geometry, Handoff, Request, Reservation


class Admission(Paging):
    """Requests by the stage they are in."""

    def __init__(
        self, geometry: Geometry, role: str, seed: int, *, order: int, prefix_cache: bool, max_batch: int
    ) -> None:
        super().__init__(geometry, role, order, prefix_cache)
        self.seed, self.max_batch = seed, max_batch
        self.model = Model(seed=seed, layers=geometry.layers)
        self.tokenizer = self.model.tokenizer
        self.on_chunk: Callable[[Chunk], None] | None = None
        self._aborted: list[Event] = []
        self.counters = dict.fromkeys(
            (
                "num_requests",
                "prompt_tokens",
                "generation_tokens",
                "cached_tokens",
                "cached_host_tokens",
                "num_retracted_reqs",
                "forward_passes",
                "spec_verify_ct",
                "spec_proposed_tokens",
                "spec_accepted_tokens",
            ),
            0,
        )

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
                self._aborted.append(seq.output.aborted(seq.cached, seq.cached_host))

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
        handoff = Handoff(token, logprob, top, seq.prompt_tokens, seq.cached, room, seq.cached_host)
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
        seq.computed, seq.handoff = seq.prompt_tokens, handoff
        seq.cached, seq.cached_host = handoff.cached_tokens, handoff.cached_host_tokens
        self.counters["num_requests"] += 1
        self.counters["prompt_tokens"] += seq.prompt_tokens
        self.running.append(seq)
        self._publish(seq)
