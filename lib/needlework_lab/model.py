"""The lookup model: weights set by construction, so that the right answer of a healthy stack is known without training.

Every token of a value carries a *key*: the bag of words of its sentence before the value, turned by the token's place
in the value. Asking for place i of the value of a topic is then one dot product, which is 1 for the right token,
about 0 for text about other things, and in between for a sentence that shares only some words. A *sink* (what an
attention head attends to when nothing matches) lies at 0.8. Two layers with independent codes must agree, or the
answer is that there is no prior context.

A compressed entry holds four tokens: one key (all four belong to one value, as a rule) and four token codes; head k
asks for the entry whose token k is the wanted one. The position in the 64 rotary numbers makes the later of two equal
matches win. What is not attention (codes, bags, turns) is the local layer and the projections of these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from needlework_lab.local_layer import Features, Local, mix
from needlework_lab.tokenizer import Tokenizer

KEY, CODE, SLOTS, ENTRY = (
    256,
    48,
    4,
    512,
)  # numbers of a key, of a token's code, tokens in an entry, numbers in an entry
NOPE = KEY + SLOTS * CODE  # 448: what is stored in fp8; the other 64 are bf16
INDEX, INDEX_CODE = 128, 120  # numbers of an index key; the last eight say only that the key was written
PRESENCE, PRESENCE_QUERY = 0.25, 0.3
OVERLAP = 2  # an entry covers this many tokens of the group before its own, and four minus as many of its own
SHARPNESS, SINK, RECENCY = 300.0, 0.8, 0.03
GAIN, NULL, TASK = (
    20.0,
    1.5,
    1.8,
)  # logits: per layer of full evidence; what no answer is worth; what a request is worth
HEADS = 2 * SLOTS  # four ask for the topic, four for the request that opened the conversation
ID_BITS, ID_COPIES = 16, NOPE // 16
KNOWN_BAGS = 4096


@dataclass(frozen=True)
class Rows:
    """What one layer makes of tokens [T]: window entries, and their share of compressed entries and index keys."""

    window: Tensor  # [T, 512]
    state: Tensor  # [T, 304] key share and token code
    index: Tensor  # [T, 128]


def signs(hashes: np.ndarray, salt: int, count: int) -> np.ndarray:
    """Random codes of hashes: float32 [N, count] of +-1/sqrt(count), the same for the same hash and salt."""
    lanes = -(-count // 64)
    seeds = mix(
        hashes[:, None] + (np.arange(lanes, dtype=np.uint64) + np.uint64(salt * 64)) * np.uint64(0xD1B54A32D192ED03)
    )
    bits = np.unpackbits(np.ascontiguousarray(seeds).view(np.uint8), axis=1)[:, :count]
    return (bits.astype(np.float32) * 2 - 1) / np.float32(np.sqrt(count))


@cache
def tables() -> tuple[Tokenizer, Local]:
    """Vocabulary and local layer: the same for every seed, and never written to."""
    tokenizer = Tokenizer()
    return tokenizer, Local(tokenizer)


class Model:
    """The weights (all from `seed`) and the maps from tokens to entries, from questions to queries, from reads to
    logits."""

    def __init__(self, *, seed: int = 0, layers: int = 2) -> None:
        self.tokenizer, self.local = tables()
        self.layers, self.seed = layers, seed
        self._bag = lru_cache(KNOWN_BAGS)(self._sum)  # a question is asked at each step of its answer
        self.reach = 0  # tokens after which a match has faded; 0: none fades
        size = self.tokenizer.vocabulary
        ids = mix(np.arange(size, dtype=np.uint64) + np.uint64(seed << 20))
        self.codes = [torch.from_numpy(signs(ids, 100 + layer, CODE)) * CODE**0.5 for layer in range(layers)]
        self._bits = torch.tensor([1 << b for b in range(ID_BITS)])
        token = self.tokenizer.special
        self.eos, self.null, self.task = token["<|eos|>"], token["<|null|>"], token["<|task|>"]

    # ---- layer 0: the window holds the tokens themselves -------------------------------------------------------------
    def embed(self, ids: Tensor) -> Tensor:
        """Window entries [T, 512] of layer 0: the token id in binary, +-1, 28 times."""
        out = torch.zeros(len(ids), ENTRY)
        bits = ((ids[:, None] & self._bits) > 0).float() * 2 - 1
        out[:, :NOPE].view(len(ids), ID_COPIES, ID_BITS)[:] = bits[:, None]
        return out

    def unembed(self, entries: Tensor) -> Tensor:
        """Token ids int64 [T] back from entries [T, 512], by majority; an id past the vocabulary reads as token 0."""
        votes = entries[:, :NOPE].reshape(len(entries), ID_COPIES, ID_BITS).nan_to_num().sum(1)
        ids = ((votes > 0) * self._bits).sum(1)
        return torch.where(ids < self.tokenizer.vocabulary, ids, 0)

    # ---- keys --------------------------------------------------------------------------------------------------------
    def topics(self, features: Features, values: np.ndarray, salt: int, count: int) -> np.ndarray:
        """Bags of words [len(values), count] of some values of a run, not normalised; zero where a topic has no
        word."""
        units, table = features.units, features.values
        low = np.searchsorted(units.start, table.topic_from[values])
        high = np.searchsorted(units.end, table.marker[values], side="right")
        out = np.zeros((len(values), count), np.float32)
        for row, (value, a, b) in enumerate(zip(values.tolist(), low.tolist(), high.tolist(), strict=True)):
            if table.request[value]:
                out[row] = self.bag(np.array([self.local.request_hash]), np.ones(1), salt, count)
            elif b > a:
                out[row] = self.bag(units.hash[a:b], units.weight[a:b], salt, count)
        return out

    def bag(self, hashes: np.ndarray, weights: np.ndarray, salt: int, count: int) -> np.ndarray:
        """One bag of words, float32 [count]."""
        return self._bag(hashes.tobytes(), weights.tobytes(), salt, count)

    def _sum(self, hashes: bytes, weights: bytes, salt: int, count: int) -> np.ndarray:
        kept = np.frombuffer(weights)
        used = kept > 0
        codes = signs(np.frombuffer(hashes, np.uint64)[used], salt + 1000 * self.seed, count)
        return (codes * kept[used, None].astype(np.float32)).sum(0)

    def rows(self, features: Features, first: int, position: int) -> list[Rows]:
        """What each layer makes of the tokens of a run from index `first` on; `position` is that token's place."""
        ids, count = features.ids[first:], len(features.ids) - first
        value, offset = features.value_of[first:], features.offset[first:]
        place = np.arange(position, position + count)
        slot = (place + OVERLAP) % SLOTS
        inside = np.flatnonzero(value >= 0)
        source = np.where(
            features.ends[first:] & (value >= 0), self.eos, np.where(offset == 0, self.local.bare[ids], ids)
        )
        source = np.where((offset == 0) & (value < 0), ids, source)
        digits = place_digits(place)
        # text that belongs to no value has index keys too: codes of pairs of tokens, one for each group
        plain = np.flatnonzero((slot == 0) & (value < 0))
        before = features.ids[first + plain - 1] * (first + plain > 0)
        pair = mix(ids[plain].astype(np.uint64) * np.uint64(65599) + before.astype(np.uint64))
        if len(inside):
            used, which = np.unique(value[inside], return_inverse=True)
            opening = (slot[inside] == 0) | (offset[inside] == 0)  # once for each value of a group
            opens, chosen = inside[opening], which[opening]
            back = offset[opens] - slot[opens]
        out = []
        for layer in range(self.layers):
            window, state = np.zeros((count, ENTRY), np.float32), np.zeros((count, KEY + CODE), np.float32)
            index = np.zeros((count, INDEX), np.float32)
            window[:, KEY : KEY + CODE] = state[:, KEY:] = self.codes[layer].numpy()[source]
            window[:, NOPE : NOPE + 4], window[:, NOPE + 4] = digits, 1.0
            index[plain, :INDEX_CODE] = signs(pair, 50 + layer, INDEX_CODE)
            if len(inside):
                bags = self.topics(features, used, 2 * layer, KEY)
                norm = np.linalg.norm(bags, axis=1, keepdims=True)
                keys = np.divide(bags, np.sqrt(norm), out=np.zeros_like(bags), where=norm > 0)
                bags = self.topics(features, used, 2 * layer + 1, INDEX_CODE)
                norm = np.linalg.norm(bags, axis=1, keepdims=True)
                marks = np.divide(bags, norm, out=np.zeros_like(bags), where=norm > 0)
                window[inside, :KEY] = turn(keys[which], offset[inside])
                state[opens, :KEY] = turn(keys[chosen], back)
                index[opens, :INDEX_CODE] = turn(marks[chosen], back)
            out.append(Rows(*map(torch.from_numpy, (window, state, index))))
        return out

    def compress(self, state: Tensor, index: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Entries [G, 512] and index keys [G, 128] of whole groups from rows of tokens 4*group - 2 on (zeros before 0).

        The position bias of a V4 compressor picks, for each channel, the rows that count; with fixed picks its pooling
        is this sum and this concatenation of eight rows: half of each entry comes from the group before.
        """
        groups = len(state) // SLOTS
        four = state[: groups * SLOTS].reshape(groups, SLOTS, -1)
        place = (group + np.arange(groups)) * SLOTS
        entry = torch.zeros(groups, ENTRY)
        entry[:, :KEY] = four[..., :KEY].sum(1)
        entry[:, KEY:NOPE] = four[..., KEY:].reshape(groups, -1)
        entry[:, NOPE : NOPE + 4] = torch.from_numpy(place_digits(place))
        key = index[: groups * SLOTS].reshape(groups, SLOTS, -1).sum(1)
        key[:, INDEX_CODE:] = PRESENCE
        return entry, key

    # ---- queries and logits ------------------------------------------------------------------------------------------
    def query(self, bag_of, layer: int, offset: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """(MLA query [8, 512], index query [8, 128], index head weights [8]) of one layer for `offset` of a value.

        `bag_of(salt, count)` gives the bags asked for: [topic or None, request or None].
        """
        q, index, weights = (
            np.zeros((HEADS, ENTRY), np.float32),
            np.zeros((HEADS, INDEX), np.float32),
            np.zeros(HEADS, np.float32),
        )
        turns = offset - np.arange(SLOTS)
        slope, level = RECENCY / (position + 1), 0.0
        if self.reach:  # a full match at this distance is just worth the sink
            slope = (1 - SINK) / self.reach
            level = RECENCY / 2 - slope * (position + 1)
        bags = zip(bag_of(2 * layer, KEY), bag_of(2 * layer + 1, INDEX_CODE), strict=True)
        for half, (wide, narrow) in enumerate(bags):
            heads = slice(half * SLOTS, (half + 1) * SLOTS)
            if wide is None or narrow is None:
                continue
            q[heads, :KEY] = turn(np.repeat((wide / np.linalg.norm(wide) ** 1.5)[None], SLOTS, 0), turns)
            q[heads, NOPE : NOPE + 4] = np.array([16384, 128, 1, 0]) * slope
            q[heads, NOPE + 3] = level
            q[half * SLOTS + 1 : (half + 1) * SLOTS, NOPE + 4] = -1.0  # a window entry holds one token: for head 0
            index[heads, :INDEX_CODE] = turn(np.repeat((narrow / np.linalg.norm(narrow))[None], SLOTS, 0), turns)
            index[heads, INDEX_CODE:] = PRESENCE_QUERY
            weights[heads] = 1.0
        if not weights.any():  # nothing is asked: the index still ranks what is written
            index[:, INDEX_CODE:], weights[:] = PRESENCE_QUERY, 1.0
        return torch.from_numpy(q) * SHARPNESS, torch.from_numpy(index), torch.from_numpy(weights)

    @property
    def sink(self) -> Tensor:
        """The sink of every head [8], in the units of the scaled scores."""
        return torch.full((HEADS,), SHARPNESS * (SINK + RECENCY / 2))

    def shares(self, lse: Tensor) -> Tensor:
        """What each head's read counts [B, 8], from its log-sum-exp: the four heads of a half are one softmax.

        Two matches in different slots are read by different heads, and the later one must win there too."""
        halves = lse.masked_fill(torch.isinf(lse), -torch.inf).unflatten(-1, (2, SLOTS))
        return torch.exp(halves - halves.amax(-1, keepdim=True).clamp(min=-1e30)).flatten(-2)

    def evidence(self, reads: list[Tensor], half: int) -> Tensor:
        """How much each token of the vocabulary was read [V], summed over layers, at most 1 each.

        reads: per layer the attention output [8, 512]; half 0: topic heads, 1: request heads.
        """
        total = torch.zeros(self.tokenizer.vocabulary)
        for layer, out in enumerate(reads):
            read, heads = np.zeros(CODE, np.float32), out.numpy()[half * SLOTS : (half + 1) * SLOTS]
            for k in range(SLOTS):
                read += heads[k, KEY + k * CODE : KEY + (k + 1) * CODE]
            total += (self.codes[layer] @ torch.from_numpy(read)).div_(CODE).clamp_(max=1.0)
        return total


def place_digits(place: np.ndarray) -> np.ndarray:
    """Positions [N] as numbers that bf16 holds exactly: three digits to the base 128, and a one, float32 [N, 4]."""
    return np.stack((place >> 14, (place >> 7) & 127, place & 127, np.ones_like(place)), 1).astype(np.float32)


def turn(vectors: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Each row of vectors [N, D] rolled by its own step [N]."""
    size = vectors.shape[1]
    return np.take_along_axis(vectors, (np.arange(size)[None] - by[:, None]) % size, axis=1)
