"""The lab's vocabulary: geometry, requests, what comes back, what travels between prefill and decode.

The engine (`lab.engine.Engine`) is a plain object without threads or sockets. The server calls, in one thread,

    engine.add(request)                 # ValueError with one sentence when the request cannot run
    events = engine.step()              # one forward pass of everything that runs; [] when idle
    engine.abort(rid)                   # at any stage; answers with an Event of finish_reason "abort" in the next step
    engine.busy                         # True while a step would do work
    engine.flush_cache() -> bool        # False (and no effect) while requests run or wait
    engine.info() -> dict; engine.metrics() -> dict[str, float]
    engine.tokenizer                    # .encode(text) -> list[int], .decode(ids) -> str, .chat(messages, ...) ->
    list[int] engine.pools() -> dict[str, Buffer]; engine.pool(name) -> uint8 tensor [pages, item_bytes] (the live
    memory) engine.read_pages(name, ids) -> bytes; engine.write_pages(name, ids, data) -> None
    engine.digest(name, ids) -> int     # Adler-32 over the pages in the order given; 1 for no page
    engine.pages_of(rid) -> dict        # group -> (first logical page, physical ids in logical order) of a request that
                                        # holds its pages (else ValueError): for dumps and digests

Prefill role: a request with `bootstrap` set runs its forward passes and nothing else. `engine.on_chunk(chunk)` is
called inside `step()` each time a chunk's bytes are final, once with `last=True`, also when that chunk has no page.
The callee must read the pages before it returns (or copy them): afterwards the engine may go on writing. The pages
stay allocated until `engine.release(rid)` (all bytes acknowledged) or `engine.abort(rid)`.

Decode role: `engine.reserve(request) -> Reservation` takes pages for the whole prompt (RuntimeError when the pools are
full: keep the request and try again after a step), the transfer fills them with `write_pages`, and
`engine.start(rid, handoff)` begins to decode: the next step reports the handed-over first token and then goes on.
`engine.abort(rid)` gives up a reservation at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Geometry:
    """Sizes of one deployment, in tokens unless the name says otherwise."""

    name: str
    page_tokens: int  # a logical page; physical page ids address every compressed pool
    window: int  # tokens each query sees uncompressed, itself included
    top_k: int  # compressed entries each query may select
    chunk_tokens: int  # prompt tokens per forward pass, all requests together
    max_context: int  # prompt + output
    pages: int  # pages of the compressed pools; page 0 is reserved
    swa_pages: int  # pages of the window pools; page 0 is reserved
    ratio: int = 4  # tokens per compressed entry
    layers: int = 2  # layers with a compressor and an indexer, after the local layer 0
    local_window: int = 128  # tokens that the local layer looks back
    host_pages: int = 0  # pages of the host tier behind the prefix cache; 0: there is none
    draft_tokens: int = 0  # tokens that a draft proposes in a step, at most; 0: no speculative decoding

    @property
    def page_entries(self) -> int:
        """Compressed entries in a page."""
        return self.page_tokens // self.ratio


MAX_DRAFTS = 7  # a step's tokens, with the last sampled one, must not share a row of the compressor's state

GEOMETRIES: dict[str, Geometry] = {
    "v4": Geometry(
        "v4", page_tokens=256, window=128, top_k=512, chunk_tokens=2048, max_context=131072, pages=769, swa_pages=129
    ),
    "tiny": Geometry(
        "tiny", page_tokens=64, window=32, top_k=16, chunk_tokens=64, max_context=16384, pages=513, swa_pages=129
    ),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; `temperature` 0 is greedy. `seed` makes sampling repeatable whatever else runs beside
    it."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt. `cache_salt` and `extra_key` are part of the prefix-cache key, not of the content."""

    rid: str
    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: str = ""
    extra_key: str = ""
    logprobs: bool = False
    top_logprobs: int = 0
    bootstrap: dict[str, Any] | None = None  # {"host", "port", "room"}: set on both sides of a prefill/decode pair


@dataclass(frozen=True)
class Event:
    """One token of one request, or its end. `token` is None when a request ends without a further token (abort)."""

    rid: str
    token: int | None
    text: str = ""  # whole characters only: bytes of a character come with its last byte; markers are ""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, natural-log probability), best first
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    matched_stop: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0  # of these, tokens that came from the host tier
    verified: int = 0  # steps of the target model so far, each of which may accept several drafts; 0 without drafts
    error: str | None = None


@dataclass(frozen=True)
class Buffer:
    """A registered pool: what a transfer must move. `group` says which page ids address it: "full" or "swa"."""

    name: str  # "c4_kv.0", "c4_index.1", "swa_kv.0", "c4_state.0", "c4_index_state.0", …
    group: str
    layout: str  # a name of needlework.pages.LAYOUTS, or "fp32"/"int32" for rows of plain numbers
    page_entries: int  # entries (or rows) in a page
    item_bytes: int  # bytes of a page
    pages: int


@dataclass(frozen=True)
class Chunk:
    """What one forward pass of a prompt made final. Page lists are physical ids, in logical order.

    `full_pages[i]` is logical page `first_page + i`. Chunks are disjoint and in order; a page that is still being
    filled goes with the chunk that fills it, or with the last. Window pages, state and `handoff` come with the last
    chunk only: `swa_pages[i]` is logical page `swa_first_page + i`.
    """

    rid: str
    index: int
    last: bool
    first_page: int
    full_pages: tuple[int, ...]
    swa_first_page: int = 0
    swa_pages: tuple[int, ...] = ()
    handoff: Handoff | None = None
    room: int | None = None


@dataclass(frozen=True)
class Handoff:
    """The metadata row of a finished prompt (the auxiliary buffer): all that decode needs besides pages."""

    token: int  # the first token, sampled by prefill
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    prompt_tokens: int
    cached_tokens: int
    room: int | None = None
    cached_host_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Handoff:
        top = tuple((int(token), float(value)) for token, value in data["top_logprobs"])
        return Handoff(**{**data, "top_logprobs": top})


@dataclass(frozen=True)
class Reservation:
    """Decode pages for a prompt. `full_pages[i]` is logical page `prefix_pages + i` (a decode-side prefix hit needs no
    transfer); `swa_pages[i]` is logical page `swa_first_page + i`."""

    rid: str
    prefix_pages: int
    full_pages: tuple[int, ...]
    swa_first_page: int
    swa_pages: tuple[int, ...]


# Every place where a fault may act: name -> what the value is that a fault may change. Each hook takes the value (and
# keywords that describe the place) and returns it; healthy code returns what it was given.
HOOKS: dict[str, str] = {
    # transfer between prefill and decode
    "chunk_buffers": "tuple of buffer names that the transfer moves for `chunk` (keywords: chunk)",
    "handoff": "Handoff as it is sent (keywords: chunk)",
    "transfer_failed": "exception of a failed transfer; None swallows it and decode goes on (keywords: rid)",
    "announce_early": "False: a chunk is announced after its forward pass (keywords: seq, start, end, last)",
    # writing
    "pass_begins": "None, before the new tokens of a sequence are written (keywords: seq, start, end)",
    "stored": "slots just written (keywords: buffer, seq, start, end)",
    # reading
    "queries": "(MLA queries, index queries) of a batch (keywords: layer, seqs)",
    "lengths": "visible compressed entries of each row (keywords: layer, seqs)",
    "index_table": "page table of the index pool (keywords: layer, seqs)",
    "selection": "selected positions (keywords: layer, seqs, scores, lengths)",
    "entry_table": "page table of the entry pool (keywords: layer, seqs)",
    "entry_slots": "slots of the selected entries (keywords: layer, seqs)",
    # bookkeeping
    "prompt": "token ids of a request as they reach the model (keywords: request)",
    "budget": "tokens that the answer may have (keywords: request)",
    "cache_identity": "string that separates tenants in the prefix cache (keywords: request)",
    "prefix_hit": "cached nodes that a request takes over (keywords: seq)",
    "restored": "None, after a request has taken over cached pages (keywords: seq)",
    "page_taken": "a page just handed out (keywords: group, seq)",
    "released": "None, after a sequence has given its pages back (keywords: seq, pages, finished)",
    "evicted": "node that the prefix cache gives up (no keywords)",
    "tier_copy": 'None, in the host tier\'s thread before each copy (keywords: side, "store" or "load")',
    "tier_wait": "copies that must be done before their pages are used (keywords: side, seq)",
    "draft_rows": "token ids of a sequence as its draft sees them (keywords: seq)",
    "accepted": "number of drafts that the cache keeps (keywords: seq, drafts)",
    "step_begins": "None, before each step (no keywords)",
    "batch": "sequences whose next token is about to be computed (no keywords)",
    "logits": "next-token logits of one sequence (keywords: seq)",
}


class Hooks:
    """Named places at which planted faults act. Healthy: every hook returns what it is given."""

    def __init__(self, names: dict[str, str] | None = None) -> None:
        self._functions: dict[str, list[Callable[..., Any]]] = {name: [] for name in (names or HOOKS)}

    def install(self, name: str, function: Callable[..., Any]) -> None:
        """Add `function(value, **place) -> value` at `name`; ValueError for a name that is not a hook."""
        if name not in self._functions:
            raise ValueError(f"no hook named {name!r}; the hooks are {', '.join(sorted(self._functions))}")
        self._functions[name].append(function)

    def active(self) -> dict[str, int]:
        """How many functions act at each place."""
        return {name: len(functions) for name, functions in self._functions.items() if functions}

    def apply(self, name: str, value: Any, **place: Any) -> Any:
        for function in self._functions[name]:
            value = function(value, **place)
        return value
