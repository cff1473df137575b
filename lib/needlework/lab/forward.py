"""One forward pass over paged pools: new tokens into pages, and reads of the last position out of them.

Everything a token leaves behind goes through the page layouts (index keys as fp8 with a scale, entries as 584-byte
records), and everything read comes back from those bytes: index logits, top-k, page-table translation, sparse decode
over window and compressed entries, merged by log-sum-exp. `hooks` name the places where planted faults act.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from needlework.kernels.reference import indexer_logits, merge_partials, select_topk, slots_of, sparse_mla_decode
from needlework.lab.asking import Asking
from needlework.lab.local import LOOKBACK
from needlework.lab.model import OVERLAP, SLOTS, Model
from needlework.lab.pools import DRAFT_INDEX, INDEX_LAYOUT, KV, STATE_ROWS, Pools
from needlework.lab.types import Geometry, Hooks, Request
from needlework.pages import LAYOUTS


@dataclass(eq=False)
class Sequence:
    """A running request as the model sees it: tokens, how many are in the cache, and where."""

    request: Request
    tokens: list[int]
    computed: int = 0
    full: list[int] = field(default_factory=list)  # physical page of each logical page
    swa: dict[int, int] = field(default_factory=dict)  # logical page -> physical window page, trailing ones
    passes: int = 0  # forward passes so far
    cached: int = 0  # tokens that came from the prefix cache
    cached_host: int = 0  # of these, tokens that came back from its host tier

    @property
    def rid(self) -> str:
        return self.request.rid


class Forward:
    """The model over one engine's pools."""

    def __init__(self, model: Model, pools: Pools, geometry: Geometry, hooks: Hooks) -> None:
        self.model, self.pools, self.geometry, self.hooks = model, pools, geometry, hooks
        self.asking = Asking(model)

    # ---- writing -----------------------------------------------------------------------------------------------------
    def extend(self, seq: Sequence, end: int) -> None:
        """Put tokens [seq.computed, end) of a sequence into its pages; their pages must be in its tables."""
        start, model = seq.computed, self.model
        place = {"seq": seq, "start": start, "end": end}
        ids = torch.tensor(seq.tokens[start:end], dtype=torch.int64)
        positions = torch.arange(start, end)
        window_slots = self.window_slots(seq, positions)
        before = self.window_tokens(seq, max(0, start - LOOKBACK), start)
        self._store("swa_kv.0", KV, window_slots, model.embed(ids), place)
        self._note(seq, positions, ids)
        features = model.local.features(np.concatenate((before, ids.numpy())))
        first = start // SLOTS * SLOTS - OVERLAP  # first token of the first group that can complete now
        groups = torch.arange(start // SLOTS, end // SLOTS)
        entry_slots = self._entry_slots(seq, groups)
        for layer, rows in enumerate(model.rows(features, len(before), start)):
            self._store(f"swa_kv.{layer + 1}", KV, window_slots, rows.window, place)
            state = torch.cat((self._load_state(f"c4_state.{layer}", seq, first, start, place), rows.state))
            index = torch.cat((self._load_state(f"c4_index_state.{layer}", seq, first, start, place), rows.index))
            if len(groups):
                entries, keys = model.compress(
                    state[: len(groups) * SLOTS], index[: len(groups) * SLOTS], int(groups[0])
                )
                self._store(f"c4_kv.{layer}", KV, entry_slots, entries, place)
                self._store(f"c4_index.{layer}", INDEX_LAYOUT, entry_slots, keys, place)
            self._save_state(f"c4_state.{layer}", seq, start, rows.state)
            self._save_state(f"c4_index_state.{layer}", seq, start, rows.index)
        seq.computed, seq.passes = end, seq.passes + 1

    def _store(self, buffer: str, layout: str, slots: Tensor, values: Tensor, place: dict) -> None:
        slots, values = self.hooks.apply("store", (slots, values), buffer=buffer, **place)
        entries = self.pools.buffers[buffer].page_entries
        LAYOUTS[layout].scatter(self.pools[buffer], slots, values, page_tokens=entries)
        self.hooks.apply("stored", slots, buffer=buffer, **place)

    def window_slots(self, seq: Sequence, positions: Tensor) -> Tensor:
        """Window-pool slots of positions; -1 where the window page is gone."""
        tokens = self.geometry.page_tokens
        pages = positions // tokens
        low, high = (int(pages.min()), int(pages.max())) if len(pages) else (0, -1)
        table = torch.tensor([seq.swa.get(page, -1) for page in range(low, high + 1)] or [-1])
        physical = table[pages - low]
        return torch.where(physical >= 0, physical * tokens + positions % tokens, -1)

    def window_tokens(self, seq: Sequence, start: int, end: int) -> np.ndarray:
        """Token ids of positions [start, end) as the window of layer 0 holds them."""
        if start >= end:
            return np.zeros(0, dtype=np.int64)
        slots = self.window_slots(seq, torch.arange(start, end))
        entries = LAYOUTS[KV].gather(self.pools["swa_kv.0"], slots, page_tokens=self.geometry.page_tokens)
        ids = self.model.unembed(entries).numpy()
        return self.hooks.apply("window_tokens", ids, seq=seq, start=start, end=end)

    def _entry_slots(self, seq: Sequence, groups: Tensor) -> Tensor:
        entries = self.geometry.page_entries
        return torch.tensor(seq.full, dtype=torch.int64)[groups // entries] * entries + groups % entries

    def _load_state(self, buffer: str, seq: Sequence, first: int, start: int, place: dict) -> Tensor:
        """Compressor rows of positions [first, start), zeros before 0."""
        rows = self.pools.rows(buffer)
        out = torch.zeros(start - first, rows.shape[2])
        for position in range(max(0, first), start):
            page = seq.swa.get(position // self.geometry.page_tokens, 0)
            out[position - first] = rows[page, position % STATE_ROWS]
        return self.hooks.apply("state_rows", out, buffer=buffer, first=first, **place)

    def _save_state(self, buffer: str, seq: Sequence, start: int, new: Tensor) -> None:
        """Keep the last eight rows of each window page and of the sequence, where the next pass looks for them."""
        rows, tokens, end = self.pools.rows(buffer), self.geometry.page_tokens, start + len(new)
        for page in range(start // tokens, (end - 1) // tokens + 1):
            high = min(end, (page + 1) * tokens)
            kept = torch.arange(max(start, high - STATE_ROWS), high)
            rows[seq.swa[page], kept % STATE_ROWS] = new[kept - start]

    # ---- drafts ------------------------------------------------------------------------------------------------------
    def _note(self, seq: Sequence, positions: Tensor, ids: Tensor) -> None:
        """Keep token ids where the draft looks for what followed before."""
        if DRAFT_INDEX in self.pools.buffers:
            tokens = self.geometry.page_tokens
            pages = torch.tensor(seq.full, dtype=torch.int64)[positions // tokens]
            self.pools.words(DRAFT_INDEX)[pages, positions % tokens] = ids.int()

    def drafts(self, seq: Sequence, most: int) -> list[int]:
        """At most `most` tokens that may follow a sequence: what followed the last place in its pages where the same
        three tokens stood, or the same two (an n-gram draft, as in sglang 0.5.23 `srt/speculative/ngram_worker.py`)."""
        pages = seq.full[: -(-seq.computed // self.geometry.page_tokens)]
        rows = self.pools.words(DRAFT_INDEX)[pages].flatten()[: seq.computed]
        rows = self.hooks.apply("draft_rows", rows, seq=seq)
        for size in (3, 2):
            if len(rows) > size:
                same = torch.ones(len(rows) - size, dtype=torch.bool)
                for place, token in enumerate(seq.tokens[-size:]):
                    same &= rows[place : place + len(same)] == token
                found = torch.nonzero(same)
                if len(found):
                    at = int(found[-1]) + size
                    return rows[at : at + most].tolist()
        return []

    def keep_state(self, seq: Sequence) -> list[tuple[str, int, Tensor]]:
        """The compressor rows of the page that the next token goes to: (buffer, page, rows), to roll drafts back."""
        page = seq.swa.get(seq.computed // self.geometry.page_tokens)
        names = [name for name in self.pools.buffers if name.startswith(("c4_state.", "c4_index_state."))]
        return [] if page is None else [(name, page, self.pools.rows(name)[page].clone()) for name in names]

    def roll_back(self, seq: Sequence, end: int, kept: list[tuple[str, int, Tensor]]) -> None:
        """Forget tokens from `end` on. What they wrote in pages stays until it is overwritten, past every length; the
        compressor's rows, which they share with tokens eight places before, come back."""
        lost = torch.arange(end, seq.computed) % STATE_ROWS
        for name, page, rows in kept:
            self.pools.rows(name)[page, lost] = rows[lost]
        seq.computed = end

    # ---- reading -----------------------------------------------------------------------------------------------------
    def logits(self, seqs: list[Sequence]) -> list[Tensor]:
        """Next-token logits [V] of each sequence, all of whose tokens are in the cache."""
        asks, queries = [], []
        for seq in seqs:
            window = self.window_tokens(seq, max(0, seq.computed - self.geometry.local_window), seq.computed)
            ask, known = self.asking.next(window)
            asks.append(ask)
            queries.append(None if ask.forced is not None else self.asking.queries(ask, known, seq.computed - 1))
        reads: list[list[Tensor]] = [[] for _ in seqs]
        open_rows = [row for row, query in enumerate(queries) if query is not None]  # a fixed word reads nothing
        for layer in range(self.model.layers if open_rows else 0):
            parts = [query[layer] for query in queries if query is not None]
            for row, read in zip(open_rows, self._attend(layer, [seqs[row] for row in open_rows], parts), strict=True):
                reads[row].append(read)
        return [self.asking.logits(ask, read) for ask, read in zip(asks, reads, strict=True)]

    def _attend(self, layer: int, seqs: list[Sequence], queries: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Attention output [B, 8, 512] of one layer at the last position of each sequence."""
        g, hooks = self.geometry, self.hooks
        place = {"layer": layer, "seqs": seqs}
        q, index_q, weights = (torch.stack(parts) for parts in zip(*queries, strict=True))
        q, index_q = hooks.apply("queries", (q, index_q), **place)
        lengths = torch.tensor([seq.computed // g.ratio for seq in seqs], dtype=torch.int32)
        lengths = hooks.apply("lengths", lengths, **place)
        width = max(1, max(-(-int(n) // g.page_entries) for n in lengths))
        table = torch.full((len(seqs), width), -1, dtype=torch.int32)
        for row, seq in enumerate(seqs):
            used = seq.full[:width]
            table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        index_table = hooks.apply("index_table", table, **place)
        scores = None
        if int(lengths.max()) > g.top_k or hooks.installed("scores"):  # with fewer keys nothing is scored, as upstream
            scores = indexer_logits(
                index_q, weights, self.pools[f"c4_index.{layer}"], index_table, lengths, page_tokens=g.page_entries
            )
            scores = hooks.apply("scores", scores, lengths=lengths, **place)
        else:
            scores = torch.zeros(len(seqs), width * g.page_entries)
        picked = select_topk(scores, lengths, g.top_k)
        picked = hooks.apply("selection", picked, scores=scores, lengths=lengths, **place)
        slots = slots_of(picked, hooks.apply("entry_table", table, **place), g.page_entries)
        slots = hooks.apply("entry_slots", slots, **place)
        last = torch.tensor([seq.computed - 1 for seq in seqs])
        window = torch.stack(
            [
                self.window_slots(seq, torch.arange(int(p) - g.window + 1, int(p) + 1).clamp(min=-1))
                for seq, p in zip(seqs, last, strict=True)
            ]
        )
        window = hooks.apply("window_slots", window, **place)
        main = sparse_mla_decode(
            q, self.pools[f"swa_kv.{layer + 1}"], window.int(), layout=KV, page_tokens=g.page_tokens, softmax_scale=1.0
        )
        extra = sparse_mla_decode(
            q, self.pools[f"c4_kv.{layer}"], slots.int(), layout=KV, page_tokens=g.page_entries, softmax_scale=1.0
        )
        outs, lses = torch.stack((main[0], extra[0])), torch.stack((main[1], extra[1]))
        outs, lses = hooks.apply("partials", (outs, lses), **place)
        out, lse = merge_partials(outs, lses, self.model.sink)
        return out * self.model.shares(lse)[..., None]
