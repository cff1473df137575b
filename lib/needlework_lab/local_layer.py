"""The local layer: what the lookup model knows about a token from the tokens just before it.

It reads words, sentences and values: a *value* starts after a marker ("is", ":", "=", …) and ends at a mark or line
end; its *topic* is the bag of words of the same sentence before the marker. Nothing here looks further back than
`LOOKBACK` tokens, so a chunk needs only the window before it, whatever the chunk size. Words are hashed by their
letters (any script; signs of scripts without spaces in pairs), not by their tokens, so the way a word falls into
tokens is of no consequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from needlework_lab.tokenizer import Tokenizer

LOOKBACK = 128  # tokens before a token that can change its features
VALUE_TOKENS = 63  # a value's last offset
TOPIC_TOKENS = 56  # a topic's words stand at most so far before the marker
OPENING = 3  # spaces and opening quotes between marker and value, at most


def _words(text: str) -> list[str]:
    return text.split()


_MARKERS = _words("""
is are was were equals reads : = -> => → ： 是 为 為 は คือ है هو هي это равен ist est es és è é är jest είναι — –
""")
_BOUNDARIES = _words("""
。 ！ ？ ؟ । …
""")
_CLOSING = [
    "，",
    "；",
    "、",
    "،",
    "|",
    "”",
    "」",
    "’",
    "```",
    "**",
    "です",
    '"',
    "`",
    ")",
    "]",
    "}",
    "\t",
    "\n",
    "\r",
    "*",
]
_ASKING = _words(
    "what which who whom whose when where why how 什么 什麼 何 ما क्या какой какая что qué cuál was quel quelle"
)
_OPENING = [" ", '"', "“", "「", "‘", "'", "`", "*", "**", "(", "\t"]
STOP_WORDS = frozenset(
    _words("""
a an the of for to in on at by and or but nor so as if is are was were be been am it its this that these those there
here i me my mine we us our you your yours he him his she her they them their what which who whom whose when where
why how do does did done can could will would shall should may might must have has had having please answer answers
reply replies respond response tell tells told give gives given say says said repeat state remember recall know
known value values only just exactly nothing else with without from then than not no yes ok okay out about into
again earlier before now also s t d ll re ve m question let lets get got el la los las un una de del y que qué cuál
cual le les des du et quel quelle der die das den dem ein eine und von für was welcher welches het een il lo gli di
o per e om och en 的 什么 什麼 何 の ما क्या какой какая что для ¿qué ¿cuál ¿quién ¿dónde ¿cómo ¿cuándo 은 는
""")
    + _MARKERS  # "is" and its like join topic and value, and say nothing of either
)
GENERAL_WORDS = frozenset(
    _words("""
secret code codes password passphrase passcode pin number id identifier key token name entry record phrase word
current new old final
""")
)
# "Note: the code is …", "But first: what is …": such words before a colon introduce a sentence and are no part of it
LEAD_IN_WORDS = frozenset(
    _words("""
note notes nb ps fyi reminder remember important attention hint tip warning info update memo quick first second third
next finally lastly last one more thing question questions follow up
""")
)
WEIGHTS = {"stop": 0.0, "general": 0.5, "content": 1.0}


def _rotl(x: np.ndarray, by: np.ndarray | int) -> np.ndarray:
    by = np.asarray(by, dtype=np.uint64) & np.uint64(63)
    return (x << by) | np.where(by == 0, np.uint64(0), x >> ((np.uint64(64) - by) & np.uint64(63)))


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: 64 well mixed bits of 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _folded(pair: bytes) -> tuple[int, int]:
    small = pair.decode().lower().encode()
    return (small[0], small[1]) if len(small) == 2 else (pair[0], pair[1])


@dataclass(frozen=True)
class Unit:
    """Words of a text: where each starts and ends (exclusive), its hash and its weight."""

    start: np.ndarray
    end: np.ndarray
    hash: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True)
class Values:
    """Values of a text: index of the first token, of the marker before it, and of the first word of the topic."""

    start: np.ndarray
    marker: np.ndarray
    topic_from: np.ndarray  # a topic's words lie in [topic_from, marker)
    request: np.ndarray  # bool: the first message of a conversation, whose topic is the mark itself


@dataclass(frozen=True)
class Features:
    """Of a run of tokens: its words, its values, and for each token the value it belongs to."""

    units: Unit
    values: Values
    value_of: np.ndarray  # index into values, -1 where the token belongs to none
    offset: np.ndarray  # place in that value; the token that ends a value has one too
    ends: np.ndarray  # bool: this token ends its value
    boundary: np.ndarray  # bool: a sentence ends here
    ids: np.ndarray


class Local:
    """Tables over the vocabulary, and the features of any run of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size = tokenizer.vocabulary
        plain = [tokenizer.bytes_of[i] for i in range(size)]
        first_mark, special = tokenizer.first_mark, range(256, tokenizer.first_mark)
        self.special = np.zeros(size, bool)
        self.special[list(special)] = True
        ending = {tokenizer.bytes_of[i].decode(): i for i in range(first_mark, first_mark + 7)}
        letters = [int(x) for x in mix(np.arange(256, dtype=np.uint64))]
        letters[ord("A") : ord("Z") + 1] = letters[ord("a") : ord("z") + 1]
        self._letters = letters

        def ids_of(signs: Iterable[str]) -> list[int]:
            wanted = {sign.encode() for sign in signs} | {b" " + sign.encode() for sign in signs if sign.strip()}
            wanted |= {sign.capitalize().encode() for sign in signs} | {
                b" " + sign.capitalize().encode() for sign in signs
            }
            return [i for i, b in enumerate(plain) if b in wanted and (i >= first_mark + 7 or i < 256)]

        def flags(signs: Iterable[str], marks: str = "", drop: str = "") -> np.ndarray:
            out = np.zeros(size, bool)
            out[ids_of(list(signs))] = True
            out[[ending[m] for m in marks]] = True
            out[[ord(c) for c in drop]] = False
            return out

        self.marker = flags(_MARKERS, ":", drop=":")
        self.tight = flags(["=", "->", "=>", "→"])  # with no space after it, a space ends the value
        self.boundary = flags(_BOUNDARIES, ".!?") | flags(["\n", "\r"]) | self.special
        self.colon = flags(["：", ":"], ":")
        self.question = flags(["？", "؟"], "?") | flags(["?"])
        self.closing = flags([*_CLOSING, *_BOUNDARIES], ".,;!?'") | self.special
        self.opening = flags(_OPENING)
        self.asking = flags(_ASKING)  # "the code is what?" states nothing
        self.spaced = np.array([b[:1].isspace() for b in plain])
        self.bare = np.arange(size)
        by_bytes = {b: i for i, b in reversed(list(enumerate(plain))) if b}
        for i, b in enumerate(plain):
            if b[:1] == b" " and len(b) > 1 and b[1:] in by_bytes:
                self.bare[i] = by_bytes[b[1:]]
        marks = {m.encode() for m in (*_BOUNDARIES, *_CLOSING, *_OPENING, "：", "；", "–", "—", "→", "…")}
        core = [b[1:] if b[:1] == b" " else b for b in plain]
        self.word = np.array(
            [bool(c) and c not in marks and all(x >= 0x80 or chr(x).isalnum() for x in c) for c in core]
        )  # a piece of a word
        self.sign = np.array([bool(c) and 0xE0 <= c[0] <= 0xF4 for c in core]) & self.word  # starts a word of its own
        self.ascii = np.array([bool(c) and c[0] < 0x80 for c in core])
        self.length = np.array([len(c) for c in core], dtype=np.int64)
        self.code = np.array([self._hash(c) if w else 0 for c, w in zip(core, self.word, strict=True)], dtype=np.uint64)
        # capital and small letters of two bytes (Cyrillic, Greek, accents) are one: pairs of bytes, folded
        self._fold = np.array([[_folded(bytes((a, b))) for b in range(0x80, 0xC0)] for a in range(0xC3, 0xD6)])
        self._classes = tuple(
            (np.sort(mix(np.array([self._hash(word.encode()) for word in words], np.uint64))), WEIGHTS[name])
            for name, words in (("stop", STOP_WORDS), ("general", GENERAL_WORDS))
        )
        self._lead_in = np.sort(mix(np.array([self._hash(word.encode()) for word in LEAD_IN_WORDS], np.uint64)))
        token = tokenizer.special
        self.user, self.eos, self.request_hash = token["<|user|>"], token["<|eos|>"], np.uint64(0x5245515545535400)

    def _hash(self, letters: bytes) -> int:
        out = 0
        for place, byte in enumerate(letters):
            code, by = self._letters[byte], place & 63
            out ^= (code << by | code >> (64 - by)) & (2**64 - 1)
        return out

    def _small(self, ids: np.ndarray) -> np.ndarray:
        """Token ids with the bytes of two-byte capitals replaced by those of their small letters."""
        pair = np.flatnonzero((ids[:-1] >= 0xC3) & (ids[:-1] < 0xD6) & (ids[1:] >= 0x80) & (ids[1:] < 0xC0))
        if not len(pair):
            return ids
        small = ids.copy()
        folded = self._fold[ids[pair] - 0xC3, ids[pair + 1] - 0x80]
        small[pair], small[pair + 1] = folded[:, 0], folded[:, 1]
        return small

    def units(self, ids: np.ndarray) -> Unit:
        """The words of a run of tokens, in order. A word that the run cuts at its start is another word."""
        word = self.word[ids]
        before = np.concatenate(([False], word[:-1]))
        sign = self.sign[ids]
        after_sign = np.zeros(len(ids), bool)
        starts = word & (~before | self.spaced[ids] | sign)
        if sign.any():  # plain letters and digits after a sign start a word
            last_sign = np.maximum.accumulate(np.where(sign, np.arange(len(ids)), -1))
            last_start = np.maximum.accumulate(np.where(starts, np.arange(len(ids)), -1))
            after_sign = word & self.ascii[ids] & (last_sign == last_start) & (last_sign >= 0) & before & ~starts
            previous_ascii = np.concatenate(([False], self.ascii[ids][:-1]))
            starts |= after_sign & ~previous_ascii
        start = np.flatnonzero(starts)
        number = np.cumsum(starts) - 1
        inside = np.flatnonzero(word)
        if not len(start):
            none = np.zeros(0, np.int64)
            return Unit(none, none, np.zeros(0, np.uint64), np.zeros(0))
        length = np.where(word, self.length[ids], 0)
        passed = np.cumsum(length) - length
        place = passed[inside] - passed[start][number[inside]]
        turned = _rotl(self.code[self._small(ids)[inside]], place.astype(np.uint64))
        first = np.searchsorted(inside, start)
        raw = np.bitwise_xor.reduceat(turned, first)
        end = np.append(inside[first[1:] - 1], inside[-1]) + 1
        hashed = mix(raw)
        weight = np.full(len(start), WEIGHTS["content"])
        for table, value in self._classes:
            at = np.searchsorted(table, hashed).clip(max=len(table) - 1)
            weight[table[at] == hashed] = value
        is_sign = self.sign[ids[start]]
        if is_sign.any():  # a sign means little alone: bind it to the sign just before it
            joined = is_sign & np.concatenate(([False], is_sign[:-1] & (end[:-1] == start[1:])))
            hashed = np.where(joined, mix(raw ^ _rotl(np.concatenate(([0], raw[:-1])).astype(np.uint64), 23)), hashed)
        return Unit(start, end, hashed, weight)

    def sentence_ends(self, ids: np.ndarray, units: Unit) -> np.ndarray:
        """bool [T]: a sentence ends here, or the words that introduce one ("But first:")."""
        ends = self.boundary[ids]
        colons = np.flatnonzero(self.colon[ids])
        if not len(colons):
            return ends
        at = np.searchsorted(self._lead_in, units.hash).clip(max=len(self._lead_in) - 1)
        says = np.where(self._lead_in[at] == units.hash, 0.0, units.weight)
        said = np.zeros(len(ids) + 1)
        np.add.at(said, units.start + 1, says)
        said = np.cumsum(said)  # weight of what is said before each token
        before = np.maximum.accumulate(np.where(ends, np.arange(len(ids)), -1))[colons]
        ends[colons[said[colons] == said[before + 1]]] = True
        return ends

    def features(self, ids: np.ndarray) -> Features:
        """All local features of tokens int [T]. Those of token t are final when at least LOOKBACK tokens precede it."""
        ids = np.asarray(ids, dtype=np.int64)
        size = len(ids)
        index = np.arange(size)
        units = self.units(ids)
        boundary, closing, opening = self.sentence_ends(ids, units), self.closing[ids], self.opening[ids]
        # the first token after each marker that is no opening quote or space
        solid = np.where(~opening, index, size)
        next_solid = np.minimum.accumulate(np.append(solid, size)[::-1])[::-1]
        markers = np.flatnonzero(self.marker[ids])
        first = next_solid[markers + 1]
        glued = (first == markers + 1) & self.word[ids[markers]]  # "is" + "land"
        glued &= (first < size) & np.append(self.word[ids] & ~self.spaced[ids], False)[first]
        glued &= ~np.append(self.sign[ids], False)[first] & ~self.sign[ids[markers]]
        good = (first < size) & (first - markers <= 1 + OPENING) & ~glued
        good &= ~np.append(closing | self.asking[ids], True)[first]
        markers, first = markers[good], first[good]
        request = np.flatnonzero((ids == self.user) & (np.concatenate(([-1], ids[:-1])) != self.eos))
        request = request[request + 1 < size]
        request = request[~closing[request + 1]]
        start = np.concatenate((first, request + 1))
        marker = np.concatenate((markers, request))
        is_request = np.concatenate((np.zeros(len(first), bool), np.ones(len(request), bool)))
        order = np.lexsort((marker, start))
        start, marker, is_request = start[order], marker[order], is_request[order]
        keep = np.append(start[1:] != start[:-1], True)[: len(start)]
        start, marker, is_request = start[keep], marker[keep], is_request[keep]
        sentence = np.maximum.accumulate(np.where(boundary, index, -1)) if size else index
        before = np.where(marker > 0, sentence[marker - 1], -1) if len(marker) else marker
        values = Values(start, marker, np.maximum(before + 1, marker - TOPIC_TOKENS), is_request)
        value_of = np.full(size, -1)
        offset = np.zeros(size, np.int64)
        ends = np.zeros(size, bool)
        if len(start):
            value_of = np.searchsorted(start, index, side="right") - 1
            inside = value_of >= 0
            offset = np.where(inside, index - start[value_of], 0)
            tight = self.tight[ids[marker]] & (start == marker + 1) & ~self.spaced[ids[start]]
            ends = inside & (offset > 0) & (closing | (tight[value_of] & self.spaced[ids]))
            passed = np.cumsum(ends) - ends  # ends before this token
            dead = passed > passed[start][value_of]
            value_of = np.where(inside & ~dead & (offset <= VALUE_TOKENS), value_of, -1)
        return Features(units, values, value_of, offset, ends, boundary, ids)
