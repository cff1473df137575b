"""The lab's tokenizer: exact round trip for any text, one token per digit, common words whole, the rest in small
pieces.

A word, with the space before it, is one token when it is in `words.txt` (the words most used in the comments of
Python's standard library, plus some of conversation); other words fall into pairs of letters, and what is left into
bytes. A mark that ends something (a full stop before a space, say) is another token than the same mark inside a number
or a path, so that the model sees the difference at the mark itself; both decode to the same character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files

SPECIALS = (
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|eos|>",
    "<|reply|>",
    "<|null|>",
    "<|task|>",
)
MARKS = ".,;:!?'"  # each has a second token for the place where it ends something
# marks and short words of several bytes that the model's local layer must know as such; joined to their space where
# one stands
SIGNS = (
    "。", "，", "、", "；", "：", "？", "！", "؟", "،", "।", "」", "「", "“", "”", "‘", "’", "…", "–",
    "—", "→", "->", "=>", "```", "**", "是", "为", "為", "は", "です", "는", "은", "คือ", "है", "هو",
    "هي", "это", "равен", "ist", "est", "es", "és", "è", "é", "är", "jest", "είναι", "e",
    "la", "el", "le", "der", "die", "das", "ein", "eine", "que", "qué", "cuál", "was", "welcher", "quel",
    "quelle", "什么", "什麼", "何", "无", "的", "の", "ما", "क्या", "какой", "какая", "что",
    "для", "はい",
)  # fmt: skip
_AFTER = r"(?=\s|$|[\"'”’)\]}。，])"
_SPLIT = re.compile(
    r" ?[A-Za-z]+|[0-9]|[.,;:!?']" + _AFTER + r"|:(?=[0-9])(?<=[A-Za-z]:)|[.,;:!?']| ?(?:->|=>|=|\||→|—|–)|```|\*\*"
    r"|[^\x00-\x7f]+| [^\x00-\x7f]+|[\x00-\x7f]"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROLES = {
    "system": "<|system|>",
    "developer": "<|system|>",
    "user": "<|user|>",
    "tool": "<|user|>",
    "assistant": "<|assistant|>",
}


class Tokenizer:
    """Text to ids and back. Ids: 256 bytes, special tokens, marks that end something, then words and pieces."""

    def __init__(self) -> None:
        words = files("needlework_lab").joinpath("words.txt").read_text(encoding="utf-8").split()
        table: list[str] = list(MARKS)
        for word in words:
            table += [word, " " + word, word.capitalize(), " " + word.capitalize()]
        for a in _LETTERS:
            table += [" " + a, " " + a.upper()]
            for b in _LETTERS:
                table += [a + b, " " + a + b, a.upper() + b, " " + a.upper() + b]
        for sign in (*SIGNS, "=", "|"):
            table += [sign, " " + sign]
        pieces = list(dict.fromkeys(table[len(MARKS) :]))
        pieces = [piece for piece in pieces if len(piece.encode()) > 1]
        self.first_mark = 256 + len(SPECIALS)
        self.bytes_of: list[bytes] = [bytes([b]) for b in range(256)] + [b""] * len(SPECIALS)
        self.bytes_of += [piece.encode() for piece in [*MARKS, *pieces]]
        self.special = {name: 256 + i for i, name in enumerate(SPECIALS)}
        first = self.first_mark + len(MARKS)
        self._ids: dict[str, int] = {piece: first + i for i, piece in enumerate(pieces)}
        self._ending = {mark: self.first_mark + i for i, mark in enumerate(MARKS)}
        self._pieces = lru_cache(maxsize=65536)(self._split)
        signs = sorted({s for s in SIGNS if not s.isascii()}, key=len, reverse=True)
        self._signs = re.compile("|".join(re.escape(s) for s in signs))

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self.bytes_of)

    def encode(self, text: str) -> list[int]:
        """Ids of any text; special tokens are never made from text. decode(encode(text)) == text, always."""
        ids: list[int] = []
        known, pieces, ending = self._ids, self._pieces, self._ending
        extend, append = ids.extend, ids.append
        for match in _SPLIT.finditer(text):
            part = match.group()
            if part in known:
                append(known[part])
            elif part in ending and _ends(text, match.end(), part):
                append(ending[part])
            else:
                extend(pieces(part))
        return ids

    def _split(self, part: str) -> tuple[int, ...]:
        """Ids of one run that is no token by itself: known signs and pairs of letters whole, the rest in bytes."""
        if not part.isascii():
            out: list[int] = []
            place = 0
            for match in self._signs.finditer(part):
                out += part[place : match.start()].encode("utf-8", "surrogatepass")
                out.append(self._ids[match.group()])
                place = match.end()
            return tuple(out + list(part[place:].encode("utf-8", "surrogatepass")))
        out, place = [], 0
        while place < len(part):
            for size in (3, 2, 1):
                piece = part[place : place + size]
                if len(piece) == size and piece in self._ids and (size < 3 or piece[0] == " "):
                    out.append(self._ids[piece])
                    place += size
                    break
            else:
                out.append(ord(part[place]))
                place += 1
        return tuple(out)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out, or named. Bytes that are no text become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        data = self.bytes(ids, special=special)
        try:
            return data.decode("utf-8", "surrogatepass")  # text with lone surrogates comes back as it was
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")

    def bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of ids, which may end inside a character."""
        out = []
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocabulary}")
            named = special and 256 <= token < self.first_mark
            out.append(SPECIALS[token - 256].encode() if named else self.bytes_of[token])
        return b"".join(out)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation. An assistant's message ends in <|eos|>, any other in <|end|>: a follow-up can be told.

        `content` is a string or a list of {"type": "text", "text": …}; None counts as empty. ValueError otherwise.
        """
        ids = [self.special["<|bos|>"]]
        for number, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise ValueError(f"message {number} has role {str(role)[:40]!r}; use one of {', '.join(ROLES)}")
            ids.append(self.special[ROLES[str(role)]])
            if role == "assistant":
                ids.append(self.special["<|reply|>"])
            ids += self.encode(_content(content, number))
            if continue_final_message and number == len(messages) - 1:
                return ids
            ids.append(self.special["<|eos|>" if role == "assistant" else "<|end|>"])
        if add_generation_prompt:
            ids.append(self.special["<|assistant|>"])
        return ids


def _ends(text: str, end: int, mark: str) -> bool:
    """Does the mark before `end` end something: space, end of text or a closing mark follows (or `code:8`)?"""
    following = text[end : end + 1]
    if not following or following.isspace() or following in "\"'”’)]}。，":
        return True
    return mark == ":" and following.isdigit() and text[end - 2 : end - 1].isalpha()


def _content(content: object, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError(f"the content of message {number} must be text, or a list of text parts")


class Stream:
    """Text of one answer as it grows: a character appears when its last byte does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._pending = tokenizer, b""

    def push(self, token: int, *, final: bool = False) -> str:
        data = self._pending + self._tokenizer.bytes((token,))
        keep = 0 if final else _unfinished(data)
        self._pending = data[len(data) - keep :]
        return data[: len(data) - keep].decode("utf-8", "replace")

    def end(self) -> str:
        """What is left when the answer ends inside a character."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


def _unfinished(data: bytes) -> int:
    """How many bytes at the end belong to a character that is not complete yet."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if need > back else 0
        if byte < 0x80:
            return 0
    return 0
