"""What a prompt is to hold: its specification, and the facts, question and answer that follow from it.

No tokenizer and no text of records is needed here, so a recorded run is replayed with this module alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from . import values, words

PAD_PLACES = ("start", "before_needle", "after_needle", "before_question")
CONTROLS = ("", "absent", "at_end", "in_question", "short")
STYLES = ("literal", "relation", "chain")
LONGEST = 1 << 24  # tokens: longer than any window, and the text of such a prompt still fits the memory


@dataclass(frozen=True)
class PromptSpec:
    """All that decides a prompt's text, apart from the server's tokenizer.

    target_tokens   wished length of the whole request as the server counts it
    depth           place of the asked needle, 0 (first) to 1 (last before the question), unless from_start or from_end
    from_start      about so many tokens before the needle (4 characters a token), exactly equal for all lengths
    from_end        the same between needle and question
    needle          kind of value, see values.KINDS
    needles         facts in the prompt; the asked one is number `ask`, the others lie evenly spread
    distractors     facts with a similar key, or a value one digit away, that are never asked
    control         "" or one of CONTROLS: what the answer should be is known whatever the deployment does
    style           "literal", or the question asks by a "relation" or through a "chain" given in the prompt
    pad             where the padding line stands, one of PAD_PLACES
    seed            changes haystack, keys and values together
    salt            first line; "" derives it from all the rest, so that no two prompts share their first block
    """

    target_tokens: int
    depth: float = 0.5
    genre: str = "mixed"
    needle: str = "digits5"
    seed: int = 0
    needles: int = 1
    ask: int = 0
    distractors: int = 0
    control: str = ""
    style: str = "literal"
    pad: str = "before_question"
    from_start: int | None = None
    from_end: int | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if self.target_tokens > LONGEST:
            raise ValueError(
                f"a prompt of {self.target_tokens:,} tokens is longer than any window; at most {LONGEST:,}"
            )
        if not 0 <= self.depth <= 1:
            raise ValueError(f"depth {self.depth} is not between 0 and 1")
        if self.genre != "mixed" and self.genre not in words.GENRES:
            raise ValueError(f"unknown haystack {self.genre!r}; choose mixed or one of {', '.join(words.GENRES)}")
        for value, allowed in ((self.pad, PAD_PLACES), (self.control, CONTROLS), (self.style, STYLES)):
            if value not in allowed:
                raise ValueError(f"unknown option {value!r}; choose one of {', '.join(filter(None, allowed))}")
        if self.needle not in values.KINDS:
            raise ValueError(f"unknown kind of needle {self.needle!r}; choose one of {', '.join(values.KINDS)}")
        if not 0 <= self.ask < self.needles:
            raise ValueError(f"there is no needle {self.ask} among {self.needles}")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fact:
    """One statement in a prompt: `key` has `value`; role "needle", "distractor"; `depth` is its share of the lines."""

    key: str
    value: str
    role: str
    depth: float
    sentence: str


def digest(value: Any, length: int = 16) -> str:
    """Short content hash of anything JSON can hold."""
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(raw).hexdigest()[:length]


def question_for(key: str, spec: PromptSpec | None = None, relation: str = "") -> str:
    """The question about a key, with the wish for the value alone and a way out."""
    subject = relation or key
    return (
        f"What is the secret code for {subject}? Answer with the value only, "
        "or say that you have no prior context if it was not given."
    )


def statement(key: str, value: str) -> str:
    """The sentence that states a fact."""
    return f"The secret code for {key} is {value}."


def facts_of(spec: PromptSpec) -> tuple[tuple[Fact, ...], str, str | None]:
    """(facts, question, expected answer) of a specification; no tokenizer needed."""
    r = Random(f"facts/{spec.seed}/{spec.needle}/{spec.needles}/{spec.distractors}")
    taken: set[str] = set()
    facts: list[Fact] = []
    used: set[str] = set()
    place = 1.0 if spec.control == "at_end" else spec.depth
    for i in range(spec.needles):
        key, value = words.key_phrase(r, taken), values.draw(spec.needle, r)
        while value in used:
            value = values.draw(spec.needle, r)
        used.add(value)
        depth = place if i == spec.ask else (i + 0.5) / spec.needles
        facts.append(Fact(key, value, "needle", depth, statement(key, value)))
    asked = facts[spec.ask]
    for i in range(spec.distractors):
        if i % 2 == 0:  # similar key: same noun and place, another adjective
            _, _, *rest = asked.key.split(" ")
            free = [a for a in words.ADJECTIVES if a not in taken]
            if not free:
                raise ValueError("too many distractors; ask for fewer")
            adjective = r.choice(free)
            taken.add(adjective)
            key, value = " ".join(["the", adjective, *rest]), values.draw(spec.needle, r)
        else:  # near value under a key of its own
            key, value = words.key_phrase(r, taken), values.neighbour(asked.value, r)
        while value in used:
            value = values.draw(spec.needle, r)
        used.add(value)
        facts.append(Fact(key, value, "distractor", r.random(), statement(key, value)))
    question, expected = question_for(asked.key), asked.value
    if spec.style == "relation":
        owner = r.choice(words.PEOPLE)
        facts[spec.ask] = replace(asked, sentence=f"{asked.sentence} Only {owner} looks after {asked.key}.")
        question = question_for(asked.key, relation=f"the thing that only {owner} looks after")
    elif spec.style == "chain":
        other = words.key_phrase(r, taken)
        link = f"Whoever asks for {other} is sent on to {asked.key}."
        facts.append(Fact(other, "", "link", r.random(), link))
        question = question_for(asked.key, relation=f"the place where whoever asks for {other} is sent on to")
    if spec.control == "absent":
        facts = [f for i, f in enumerate(facts) if i != spec.ask]
        return tuple(facts), question, None
    if spec.control == "in_question":
        facts = [f for i, f in enumerate(facts) if i != spec.ask]
        question = f"{asked.sentence} {question}"
    return tuple(facts), question, expected
