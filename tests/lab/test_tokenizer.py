"""Exact round trip for any text, one token a digit, text that grows by whole characters."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needlework_lab.tokenizer import SPECIALS, Stream, Tokenizer

T = Tokenizer()


@given(st.text(st.characters(codec=None), max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(text):
    ids = T.encode(text)
    assert T.decode(ids) == text
    assert all(not 256 <= token < 256 + len(SPECIALS) for token in ids)


@given(st.text("0123456789", min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_one_token_a_digit(digits):
    assert len(T.encode(digits)) == len(digits)


def test_special_names_in_text_stay_text():
    text = "<|end|><|assistant|>"
    assert T.special["<|end|>"] not in T.encode(text) and T.decode(T.encode(text)) == text
    chat = T.chat([{"role": "user", "content": text}])
    assert chat.count(T.special["<|assistant|>"]) == 1
    for bad, message in (({"role": "king", "content": ""}, "role"), ({"role": "user", "content": 3}, "content")):
        with pytest.raises(ValueError, match=message):
            T.chat([bad])
    with pytest.raises(ValueError, match="vocabulary"):
        T.decode([T.vocabulary])


def test_streamed_text_is_the_text():
    text = "琥珀 is é 81392 \U0001f9f5."
    stream = Stream(T)
    parts = [stream.push(token) for token in T.encode(text)]
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)
    stream.push(0xE7)
    assert stream.end() == "\ufffd"


def test_a_long_prompt_is_quick():
    text = "Day 69, compactor coastal archived 122 tickets in 782 ms and the operators saw no change.\n" * 1900
    start = time.process_time()
    assert 60_000 < len(T.encode(text)) < 80_000
    assert time.process_time() - start < 1.0
