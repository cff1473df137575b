"""One forward pass over paged pools: new tokens into pages, and reads of the last position out of them.

Everything a token leaves behind goes through the page layouts (index keys as fp8 with a scale, entries as 584-byte
records), and everything read comes back from those bytes: index logits, top-k, page-table translation, sparse decode
over window and compressed entries, merged by log-sum-exp. `hooks` name the places where planted faults act.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from needlework.kernels.reference import indexer_logits, merge_partials, select_topk, slots_of, sparse_mla_decode
from needlework.pages import LAYOUTS
from torch import Tensor

from needlework_lab.intent import Intents
from needlework_lab.local_layer import LOOKBACK
from needlework_lab.model import OVERLAP, SLOTS, Model
from needlework_lab.pools import DRAFT_INDEX, INDEX_LAYOUT, KV, STATE_ROWS, Pools
from needlework_lab.types import Geometry, Hooks, Request


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


@cache
def token_records() -> dict[str, Tensor]:
    """The window record of layer 0 of every token, quantised: it says the id and nothing else."""
    model = Model()
    return LAYOUTS[KV].quantise(model.embed(torch.arange(model.tokenizer.vocabulary)))


class Forward:
    """The model over one engine's pools."""

    def __init__(self, model: Model, pools: Pools, geometry: Geometry, hooks: Hooks) -> None:
        self.model, self.pools, self.geometry, self.hooks = model, pools, geometry, hooks
        self.intents = Intents(model)
        self._records = token_records()

    # ---- writing -----------------------------------------------------------------------------------------------------
    def extend(self, seq: Sequence, end: int) -> None:
        """Put tokens [seq.computed, end) of a sequence into its pages; their pages must be in its tables."""
        start, model = seq.computed, self.model
        place = {"seq": seq, "start": start, "end": end}
        ids = torch.tensor(seq.tokens[start:end], dtype=torch.int64)
        positions = torch.arange(start, end)
        window_slots = self.window_slots(seq, positions)
        before = self.window_tokens(seq, max(0, start - LOOKBACK), start)
        features = model.local.features(np.concatenate((before, ids.numpy())))
        layers = model.rows(features, len(before), start)
        self._put("swa_kv.0", KV, window_slots, {name: rows[ids] for name, rows in self._records.items()}, place)
        self._store(KV, window_slots, {f"swa_kv.{layer + 1}": rows.window for layer, rows in enumerate(layers)}, place)
        self._note(seq, positions, ids)
        first = start // SLOTS * SLOTS - OVERLAP  # first token of the first group that can complete now
        groups = torch.arange(start // SLOTS, end // SLOTS)
        entries, keys = {}, {}
        for layer, rows in enumerate(layers):
            state = torch.cat((self._load_state(f"c4_state.{layer}", seq, first, start), rows.state))
            index = torch.cat((self._load_state(f"c4_index_state.{layer}", seq, first, start), rows.index))
            if len(groups):
                entries[f"c4_kv.{layer}"], keys[f"c4_index.{layer}"] = model.compress(
                    state[: len(groups) * SLOTS], index[: len(groups) * SLOTS], int(groups[0])
                )
            self._save_state(f"c4_state.{layer}", seq, start, rows.state)
            self._save_state(f"c4_index_state.{layer}", seq, start, rows.index)
        if len(groups):
            entry_slots = self._entry_slots(seq, groups)
            self._store(KV, entry_slots, entries, place)
            self._store(INDEX_LAYOUT, entry_slots, keys, place)
        seq.computed, seq.passes = end, seq.passes + 1

    def _store(self, layout: str, slots: Tensor, rows: dict[str, Tensor], place: dict) -> None:
        """Put the rows of several buffers of one layout at the same slots of each; they are quantised together."""
        stored = LAYOUTS[layout].quantise(torch.cat(list(rows.values())))
        first = 0
        for name, own in rows.items():
            part = {field: data[first : first + len(own)] for field, data in stored.items()}
            first += len(own)
            self._put(name, layout, slots, part, place)

    def _put(self, name: str, layout: str, slots: Tensor, stored: dict[str, Tensor], place: dict) -> None:
        LAYOUTS[layout].put(self.pools[name], slots, stored, self.pools.buffers[name].page_entries)
        self.hooks.apply("stored", slots, buffer=name, **place)

    def window_slots(self, seq: Sequence, positions: Tensor) -> Tensor:
        """Window-pool slots of positions; -1 where the window page is gone."""
        pages, offsets = np.divmod(positions.numpy(), self.geometry.page_tokens)
        low, high = (int(pages.min()), int(pages.max())) if len(pages) else (0, -1)
        table = np.array([seq.swa.get(page, -1) for page in range(low, high + 1)] or [-1])
        physical = table[pages - low]
        return torch.from_numpy(np.where(physical >= 0, physical * self.geometry.page_tokens + offsets, -1))

    def window_tokens(self, seq: Sequence, start: int, end: int) -> np.ndarray:
        """Token ids of positions [start, end) as the window of layer 0 holds them."""
        if start >= end:
            return np.zeros(0, dtype=np.int64)
        slots, ids = self.window_slots(seq, torch.arange(start, end)), np.array(seq.tokens[start:end])
        pool, tokens = self.pools["swa_kv.0"], self.geometry.page_tokens
        stored = LAYOUTS[KV].taken(pool, slots.clamp(min=0), tokens)
        other = slots.numpy() < 0
        for name in ("codes", "scales"):  # what equals a token's own record says that token; the rest is decoded
            other |= (stored[name].numpy() != self._records[name].numpy()[ids]).any(axis=1)
        if other.any():
            ids[other] = self.model.unembed(LAYOUTS[KV].gather(pool, slots[other], page_tokens=tokens)).numpy()
        return ids

    def _entry_slots(self, seq: Sequence, groups: Tensor) -> Tensor:
        entries = self.geometry.page_entries
        return torch.tensor(seq.full, dtype=torch.int64)[groups // entries] * entries + groups % entries

    def _load_state(self, buffer: str, seq: Sequence, first: int, start: int) -> Tensor:
        """Compressor rows of positions [first, start), zeros before 0."""
        rows = self.pools.rows(buffer).numpy()
        out = np.zeros((start - first, rows.shape[2]), np.float32)
        for position in range(max(0, first), start):
            page = seq.swa.get(position // self.geometry.page_tokens, 0)
            out[position - first] = rows[page, position % STATE_ROWS]
        return torch.from_numpy(out)

    def _save_state(self, buffer: str, seq: Sequence, start: int, new: Tensor) -> None:
        """Keep the last eight rows of each window page and of the sequence, where the next pass looks for them."""
        rows, tokens, end = self.pools.rows(buffer).numpy(), self.geometry.page_tokens, start + len(new)
        for page in range(start // tokens, (end - 1) // tokens + 1):
            high = min(end, (page + 1) * tokens)
            kept = np.arange(max(start, high - STATE_ROWS), high)
            rows[seq.swa[page], kept % STATE_ROWS] = new.numpy()[kept - start]

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
        intents, queries = [], []
        for seq in seqs:
            window = self.window_tokens(seq, max(0, seq.computed - self.geometry.local_window), seq.computed)
            intent = self.intents.next(window)
            intents.append(intent)
            queries.append(None if intent.forced is not None else self.intents.queries(intent, seq.computed - 1))
        reads: list[list[Tensor]] = [[] for _ in seqs]
        open_rows = [row for row, query in enumerate(queries) if query is not None]  # a fixed word reads nothing
        asking = [seqs[row] for row in open_rows]
        windows = torch.stack([self._window(seq) for seq in asking]) if asking else torch.empty(0)
        for layer in range(self.model.layers if asking else 0):
            parts = [query[layer] for query in queries if query is not None]
            for row, read in zip(open_rows, self._attend(layer, asking, parts, windows), strict=True):
                reads[row].append(read)
        return [self.intents.logits(intent, read) for intent, read in zip(intents, reads, strict=True)]

    def _window(self, seq: Sequence) -> Tensor:
        """Slots [window] of the last tokens of a sequence; -1 before its first."""
        end = seq.computed
        return self.window_slots(seq, torch.arange(end - self.geometry.window, end).clamp(min=-1))

    def _attend(
        self, layer: int, seqs: list[Sequence], queries: list[tuple[Tensor, Tensor, Tensor]], window: Tensor
    ) -> Tensor:
        """Attention output [B, 8, 512] of one layer at the last position of each sequence."""
        g, hooks = self.geometry, self.hooks
        place = {"layer": layer, "seqs": seqs}
        q, index_q, weights = (torch.stack(parts) for parts in zip(*queries, strict=True))
        q, index_q = hooks.apply("queries", (q, index_q), **place)
        lengths = torch.tensor([seq.computed // g.ratio for seq in seqs], dtype=torch.int32)
        lengths = hooks.apply("lengths", lengths, **place)
        longest = max(lengths.tolist())
        width = max(1, -(-longest // g.page_entries))
        pages = np.full((len(seqs), width), -1, np.int32)
        for row, seq in enumerate(seqs):
            used = seq.full[:width]
            pages[row, : len(used)] = used
        table = torch.from_numpy(pages)
        index_table = hooks.apply("index_table", table, **place)
        if longest > g.top_k:  # with fewer keys nothing is scored, as upstream
            scores = indexer_logits(
                index_q, weights, self.pools[f"c4_index.{layer}"], index_table, lengths, page_tokens=g.page_entries
            )
        else:
            scores = torch.zeros(len(seqs), width * g.page_entries)
        picked = select_topk(scores, lengths, g.top_k)
        picked = hooks.apply("selection", picked, scores=scores, lengths=lengths, **place)
        slots = slots_of(picked, hooks.apply("entry_table", table, **place), g.page_entries)
        slots = hooks.apply("entry_slots", slots, **place)
        main = sparse_mla_decode(
            q, self.pools[f"swa_kv.{layer + 1}"], window.int(), layout=KV, page_tokens=g.page_tokens, softmax_scale=1.0
        )
        extra = sparse_mla_decode(
            q, self.pools[f"c4_kv.{layer}"], slots.int(), layout=KV, page_tokens=g.page_entries, softmax_scale=1.0
        )
        outs, lses = torch.stack((main[0], extra[0])), torch.stack((main[1], extra[1]))
        out, lse = merge_partials(outs, lses, self.model.sink)
        return out * self.model.shares(lse)[..., None]
