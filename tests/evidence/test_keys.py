"""A rule is tried only where one of its keys stands: no rule may skip a place that its own pattern would match."""

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from forms import FORMS
from hypothesis import given, settings
from hypothesis import strategies as st
from needlework.evidence import plugins
from needlework.evidence.redaction import Redactor, fold
from needlework.evidence.rules import RULES
from planted import planted
from trade import LEAKS

ROOT = Path(__file__).resolve().parents[2]
FORM_TEXTS = [form.format(s=value) for form, values in FORMS.values() for value in values]
WORDS = r"""
password token api_key secret key auth session code host user login curl mysql -p -u --token -- - = : == => | http:// ://
@ . / \ \" ' " &quot; %3D > < , ; {} [] PASS= TOKEN= 10.1.2.3 gpu-7 node.corp.com a1B2c3D4e5F6g7H8 aa:bb:cc:dd:ee:ff
fe80::1 /home/al/x 12345678:AAabcdefghijklmnopqrstuvwxyz0123456 sl_ AKIA AC SK ibm_cloud_iam -us12 hooks.slack.com eyJ
"""
PIECES = [*re.split(r"\s+", WORDS.strip()), "\n", " ", "\n  ", "\t", "\u017fecret", "to\u212aen"]


def skipped(text, rules=RULES):
    """Patterns with a match in whose first line none of the rule's keys stands."""
    wrong = []
    for rule in rules:
        for match in re.finditer(rule.source, text):
            start = text.rfind("\n", 0, match.start()) + 1
            end = (
                text.find("\n", match.end() if rule.lines == 1 or rule.words == ("\n",) else match.start()) + 1 or None
            )
            if rule.words and not any(word in fold(text[start:end]) for word in rule.words):
                wrong.append((rule.source[:60], text[start:end]))
            # what goes over lines is looked for in so many lines
            if rule.lines > 1 and match[0].rstrip("\n").count("\n") >= rule.lines:
                wrong.append((rule.source[:60], "lines"))
    for line in text.split("\n"):
        for keys, plugin in plugins._plugins():
            if any(plugin.analyze_string(line)) and not any(key in fold(line) for key in keys):
                wrong.append((type(plugin).__name__, line))
    return wrong


def texts():
    rng = random.Random(3)
    sentences = [sentence for _, _, sentence in planted()]
    yield "\n".join(sentences)
    yield "\n".join(FORM_TEXTS)
    yield "\n".join(text for text, _ in LEAKS)
    yield "\n".join(rng.choice(sentences + FORM_TEXTS)[rng.randrange(12) :] for _ in range(300))
    yield "\n".join(rng.choice((" ", "")).join(rng.choices(PIECES, k=rng.randint(2, 30))) for _ in range(300))
    yield (ROOT / "data/incidents/context-loss/evidence/node-a/decode/journal").read_text()[:60_000]
    yield (ROOT / "lib/needlework/evidence/rules.py").read_text()


@pytest.mark.parametrize("text", texts(), ids=["planted", "forms", "trade", "cut", "pieces", "journal", "source"])
def test_every_match_holds_a_key_of_its_rule(text):
    assert skipped(text) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES + FORM_TEXTS), min_size=1, max_size=12), st.sampled_from(["", " ", "\n"]))
def test_every_match_holds_a_key_in_any_mix(pieces, between):
    assert skipped(between.join(pieces)) == []


def test_a_key_that_asks_too_much_is_noticed():
    """Each rule with keys, and one of them forgotten: some text shows it, or the key was not needed."""
    everything = "\n".join([*FORM_TEXTS, *(text for _, _, text in planted()), *(text for text, _ in LEAKS)])
    blind = [rule for rule in RULES if rule.words and not skipped(everything, [replace(rule, keys="no-such-key")])]
    assert [rule.source[:70] for rule in blind] == [], "a rule that no text of the tests shows at work"


def test_many_lines_are_read_as_each_alone():
    """Keys are looked for in batches of lines, and equal lines once."""
    lines = [text for text in FORM_TEXTS if "\n" not in text] * 12
    whole = Redactor().text("\n".join(lines)).split("\n")
    plain = re.compile(r"-\d+>")
    alone = {line: plain.sub(">", Redactor().text(line)) for line in set(lines)}
    left = [(line, found) for line, found in zip(lines, whole, strict=True) if "<" in alone[line] and "<" not in found]
    assert left == []


def test_folding_keeps_places_and_compares_as_regular_expressions_do():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert len(fold(every)) == len(every)
    letters = set(re.findall(r"(?i)[a-z]", every))
    assert len(letters) == 56 and set(map(fold, letters)) == set("abcdefghijklmnopqrstuvwxyz")
    assert all(re.fullmatch(fold(sign), sign, re.IGNORECASE) for sign in letters)
