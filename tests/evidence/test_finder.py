"""Looking near literals finds what looking everywhere finds: no rule skips a place that its own pattern would match."""

import random
import re
import sys
from pathlib import Path

import pytest
from forms import FORMS
from hypothesis import given, settings
from hypothesis import strategies as st
from needlework.evidence import clues, plugins
from needlework.evidence.clues import clues_of, fold
from needlework.evidence.finder import Finder, Parts, Searched
from needlework.evidence.rules import HOME_PATH, LOGIN_AT, RULES
from planted import planted

ROOT = Path(__file__).resolve().parents[2]
FINDERS = [*(rule.finder for rule in RULES), HOME_PATH, LOGIN_AT]
PARTS = Parts([*FINDERS, *plugins.finders()])
FORM_TEXTS = [form.format(s=value) for form, values in FORMS.values() for value in values]
WORDS = r"""
password token api_key secret key auth session code host user login curl mysql -p -u --token -- - = : == => | http:// ://
@ . / \ \" ' " &quot; %3D > < , ; {} [] PASS= TOKEN= 10.1.2.3 gpu-7 node.corp.com a1B2c3D4e5F6g7H8 aa:bb:cc:dd:ee:ff
fe80::1 /home/al/x 12345678:AAabcdefghijklmnopqrstuvwxyz0123456
"""
PIECES = [*re.split(r"\s+", WORDS.strip()), "\n", " ", "\n  ", "\t", "\u017fecret", "to\u212aen"]


def differences(finders, text, parts=PARTS):
    """Finders whose matches, or lines, are not those of a plain search."""
    page = Searched(text, parts)
    wrong = []
    for finder in finders:
        plain = re.compile(finder.source, finder.flags)
        spans = [match.span() for match in finder.matches(page)]
        lines = {number for number, line in enumerate(text.split("\n")) if plain.search(line)}
        missed = spans and not finder.may_match(page)
        if missed or spans != [match.span() for match in plain.finditer(text)] or finder.lines(page) != lines:
            wrong.append(finder.source)
    return wrong


def texts():
    rng = random.Random(3)
    sentences = [sentence for _, _, sentence in planted()]
    yield "\n".join(sentences)
    yield "\n".join(FORM_TEXTS)
    yield "\n".join(rng.choice(sentences + FORM_TEXTS)[rng.randrange(12) :] for _ in range(300))
    yield "\n".join(rng.choice((" ", "")).join(rng.choices(PIECES, k=rng.randint(2, 30))) for _ in range(300))
    yield (ROOT / "data/incidents/context-loss/evidence/node-a/decode/journal").read_text()[:60_000]
    yield (ROOT / "lib/needlework/evidence/rules.py").read_text()


@pytest.mark.parametrize("text", texts(), ids=["planted", "forms", "cut", "pieces", "journal", "source"])
def test_matches_are_those_of_a_plain_search(text):
    assert differences([*FINDERS, *plugins.finders()], text) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES + FORM_TEXTS), min_size=1, max_size=12), st.sampled_from(["", " ", "\n"]))
def test_matches_are_those_of_a_plain_search_in_any_mix(pieces, between):
    # what stands beside a short text makes it one that is not searched at once
    assert differences(FINDERS, between.join(pieces) + "\n" + " plain words" * 15) == []


def test_a_clue_that_asks_too_much_is_noticed():
    asks = Finder(r"(?:\d{1,3}\.){3}\d{1,3}", stands={".": r"\.(?=\d\d\.)"})
    text = "peer 10.11.12.13 and 10.1.2.3" + " " * 200
    assert differences([asks], text, Parts([asks])) == [asks.source]
    right = Finder(r"(?:\d{1,3}\.){3}\d{1,3}", stands={".": r"\.(?=\d{1,3}\.)"})
    assert differences([right], text, Parts([right])) == []


@pytest.mark.parametrize(
    ("pattern", "stems"),
    [
        (r"(?i)\bcurl\b.*-u", {"curl": (0, 0)}),
        (r"[a-z]{2,9}://x", {"://x": (2, 9)}),
        (r"(?<=://)\w+", {"://": (-3, -3)}),
        (r"api[_-]?key", {"apikey": (0, 0), "api_key": (0, 0), "api-key": (0, 0)}),
        (r"\w{3}(?:ab|abc|d)\d", {"ab": (3, 3), "d": (3, 3)}),
        (r"(?=\w*Z)\d+", {"z": (0, 1 << 30)}),
        (r"(?:x\d)+y?", {"x": (0, 0)}),
    ],
)
def test_clues_are_read_off_the_pattern(pattern, stems):
    assert clues_of(pattern).stems == stems


@pytest.mark.parametrize("pattern", [r"\w+", r"(?:ab)?\d", r"a|\d", r"(?!ab)\d", r"(?:é|ü)\d"])
def test_what_is_not_in_every_match_is_no_clue(pattern):
    assert clues_of(pattern) is None


class OtherTree:
    """A Python that reads patterns into something else."""

    @staticmethod
    def parse(pattern, flags):
        return [("LITERAL",), 3]


@pytest.mark.parametrize("parser", [None, OtherTree])
def test_without_the_private_parser_the_same_is_found(parser, monkeypatch):
    monkeypatch.setattr(clues, "parser", parser)
    plain = [Finder(finder.source, finder.flags) for finder in FINDERS]
    assert not any(finder.clues for finder in plain)
    assert differences(plain, "\n".join(FORM_TEXTS[:60]), Parts(plain)) == []


def test_a_match_is_sought_before_its_line_only_where_it_may_begin_there():
    assert clues_of(r"[ \t]*name").in_line and not clues_of(r"\s*name").in_line and not clues_of(r"[^a]*name").in_line


def test_folding_keeps_places_and_compares_as_regular_expressions_do():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert len(fold(every)) == len(every)
    letters = set(re.findall(r"(?i)[a-z]", every))
    assert len(letters) == 56 and set(map(fold, letters)) == set("abcdefghijklmnopqrstuvwxyz")
    assert all(re.fullmatch(fold(sign), sign, re.IGNORECASE) for sign in letters)
