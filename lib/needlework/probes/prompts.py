"""The text of a prompt, seeded: a salt line, an instruction, lines of records with the facts between them, one line of
padding and the question. Lines are never cut; `fitting` chooses how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from . import words
from .specs import Fact, PromptSpec, digest, facts_of

GENERATOR = 1  # part of every trial's identity: raise it when the text of any prompt changes
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """A finished prompt. `counted_tokens` is the server's count, or an estimate when `exact` is False."""

    messages: Messages
    spec: PromptSpec
    question: str
    expected: str | None  # None: the right answer is that it was not given
    facts: tuple[Fact, ...]
    counted_tokens: int
    exact: bool
    needle_token: int | None  # tokens of the message's content before the asked value; None when there is none
    sha256: str

    @property
    def text(self) -> str:
        return self.messages[-1]["content"]


@lru_cache(maxsize=8)
def _stream(genre: str, seed: str) -> tuple[Random, list[str]]:
    return Random(seed), []


def lines(genre: str, seed: str, count: int, forbidden: tuple[str, ...] = ()) -> list[str]:
    """The first `count` lines of the seeded stream of a genre, none of them holding a forbidden value."""
    r, known = _stream(genre, seed)
    while len(known) < count:
        known.append(words.unit(genre, r))
    picked = known[:count]
    if forbidden:
        picked = [line for line in picked if not any(f in line for f in forbidden)] or picked[:0]
    return picked


def assemble(spec: PromptSpec, n_lines: int, pad: int, run_salt: str = "") -> tuple[str, str]:
    """(text of the message, text before the asked value) with `n_lines` record lines and `pad` padding words.

    run_salt    another first line for the same specification, see `Journal.salt`
    """
    facts, question, _ = facts_of(spec)
    salt = spec.salt or digest(spec.as_dict(), 12)
    if run_salt:
        salt = digest([run_salt, salt], 12)
    head = [f"Set {salt[:4]} {salt[4:8]} {salt[8:]}.\n", "Read these notes. A question follows at the end.\n"]
    avoid = tuple(f.value for f in facts if f.value and len(f.value) < 6 and not f.value.isdigit())
    asked = facts[spec.ask] if spec.control not in ("absent", "in_question") else None
    before = _lines_before(spec, n_lines)
    body = lines(spec.genre, f"a/{spec.seed}/{spec.genre}", before, avoid)
    tail = lines(spec.genre, f"b/{spec.seed}/{spec.genre}", n_lines - before, avoid)
    body += tail
    padding = "Blank" + " x" * pad + ".\n"
    # places of the facts, counted in record lines; the asked one keeps its exact place
    places: list[tuple[int, int, str]] = []
    for order, fact in enumerate(facts):
        is_asked = fact is asked
        place = before if is_asked else round(fact.depth * len(body))
        places.append((place, order, fact.sentence + "\n"))
        if is_asked and spec.pad in ("before_needle", "after_needle"):
            places.append((place, order + (0 if spec.pad == "after_needle" else -1), padding))
    out, cut = list(head), None
    if spec.pad == "start":
        out.append(padding)
    inserts = sorted(places, key=lambda p: (p[0], p[1]))
    done = 0
    for place, _, text in inserts:
        out += body[done:place]
        done = max(done, place)
        if asked is not None and text == asked.sentence + "\n":
            cut = "".join(out) + text[: text.index(asked.value)].rstrip()
        out.append(text)
    out += body[done:]
    if spec.pad == "before_question" or (asked is None and spec.pad != "start"):
        out.append(padding)
    out.append("\n" + question)
    return "".join(out), cut if cut is not None else ""


def _lines_before(spec: PromptSpec, n_lines: int) -> int:
    if spec.control == "at_end":
        return n_lines
    if spec.from_start is not None:
        return min(n_lines, _lines_for(spec, "a", spec.from_start))
    if spec.from_end is not None:
        return max(0, n_lines - _lines_for(spec, "b", spec.from_end))
    return round(spec.depth * n_lines)


def _lines_for(spec: PromptSpec, stream: str, tokens: int) -> int:
    characters, count = 0, 0
    while characters < 4 * tokens:
        characters += len(lines(spec.genre, f"{stream}/{spec.seed}/{spec.genre}", count + 1)[count])
        count += 1
    return count
