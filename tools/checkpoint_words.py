"""The calibration checkpoint's tokenizer: whole words of the probes' prompts, single letters and digits for the rest,
and DeepSeek-V3.2's own marks, because engines that know the model write its conversations themselves.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

SPECIALS = (
    "<pad>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "</think>",
    "<think>",
)
PAD, BOS, EOS, USER, ASSISTANT, ANSWERS, THINKS = range(7)
REFUSAL = ("I", " have", " no", " prior", " context")
ENDS = (".", ",", ";", "!", "?", "\n")  # copied, each of them ends the answer
TEMPLATE = (
    f"{{{{ '{SPECIALS[BOS]}' }}}}{{% for m in messages %}}"
    f"{{% if m['role'] == 'assistant' %}}{{{{ m['content'] + '{SPECIALS[EOS]}' }}}}"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}"
    f"{{% else %}}{{{{ '{SPECIALS[USER]}' + m['content'] + '{SPECIALS[ASSISTANT]}{SPECIALS[ANSWERS]}' }}}}"
    "{% endif %}{% endfor %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) if b in plain else chr(256 + sum(x not in plain for x in range(b))) for b in range(256)]


def vocabulary() -> list[str]:
    """Specials, the 256 bytes, and whole words with and without a space before: those of the probes' prompts."""
    from needlework.probes.bench import prompts, words

    r = Random("needlework checkpoint")
    texts = [
        prompts.question_for("the"),
        prompts.statement("the", "of"),
        "Set Blank x. Read these notes. A question follows at the end.",
    ]
    texts += [words.unit(genre, r) for genre in words.GENRES for _ in range(400)]
    lists = (words.ADJECTIVES, words.NOUNS, words.PLACES, words.PEOPLE, words.ITEMS, words.DAYS, words.PARTS,
             words.DEEDS, words.THINGS, words.MOODS, words.TOPICS, words.WISHES, words.MOVES, words.ACTIONS,
             words.REASONS)  # fmt: skip
    found = {
        w for text in [*texts, *(t for given in lists for t in given), *REFUSAL] for w in re.findall(r"[A-Za-z]+", text)
    }
    letters = byte_letters()
    whole = [letters[32] * space + word for word in sorted(found) for space in (0, 1) if len(word) + space > 1]
    return [*SPECIALS, *letters, *whole]


class Tokenizer:
    """The same cutting as the tokenizer.json written here, for ASCII text without marks: a run of letters is one token
    if it is in the vocabulary and single letters otherwise; all else is single characters."""

    def __init__(self, pieces: list[str]):
        self.pieces, self.ids = pieces, {piece: i for i, piece in enumerate(pieces)}
        self.letters = byte_letters()
        self._cut = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s+(?!\S)|\s")

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for match in self._cut.finditer(text):
            piece = "".join(self.letters[b] for b in match[0].encode())
            out += [self.ids[piece]] if piece in self.ids else [self.ids[letter] for letter in piece]
        return out

    def decode(self, ids: list[int]) -> str:
        kept = "".join(self.pieces[i] for i in ids if i >= len(SPECIALS))
        return bytes(self.letters.index(letter) for letter in kept).decode("utf-8", "replace")

    def chat(self, content: str) -> list[int]:
        """One message of a user and the start of the reply, as the chat template has it."""
        return [BOS, USER, *self.encode(content), ASSISTANT, ANSWERS]


def tokenizer_files(pieces: list[str]) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json: words are looked up whole, nothing is merged."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    begin = SPECIALS[BOS]
    single = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    after = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [BOS], "tokens": [begin]}},
    }
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    model |= {"vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": mark, **flags} for i, mark in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": after,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "model_max_length": 65536,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
