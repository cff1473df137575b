"""Needle values: kinds that can be graded digit by digit, with a check digit that exposes a mixed answer."""

from __future__ import annotations

from random import Random

from .words import ADJECTIVES, NOUNS

KINDS = ("digits5", "digits7", "uuid", "words2", "word_number")


def check_digit(digits: str) -> str:
    """Luhn's check digit of a string of digits: any single wrong digit and most swaps change it."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def draw(kind: str, r: Random) -> str:
    """A value of the kind; raises ValueError for an unknown kind."""
    if kind in ("digits5", "digits7"):
        length = int(kind[-1])
        body = str(r.randrange(1, 10)) + "".join(r.choice("0123456789") for _ in range(length - 2))
        return body + check_digit(body)
    if kind == "uuid":
        raw = f"{r.getrandbits(128):032x}"
        return f"{raw[:8]}-{raw[8:12]}-4{raw[13:16]}-a{raw[17:20]}-{raw[20:]}"
    if kind == "words2":
        return f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}"
    if kind == "word_number":
        return f"{r.choice(NOUNS)}-{r.randrange(1000, 9999)}"
    raise ValueError(f"unknown kind of needle value {kind!r}; choose one of {', '.join(KINDS)}")


def neighbour(value: str, r: Random) -> str:
    """A value that differs in one digit (or the first letter): a distractor that only careful reading tells apart."""
    places = [i for i, c in enumerate(value) if c.isdigit()] or [0]
    place = r.choice(places)
    old = value[place]
    new = r.choice([c for c in ("0123456789" if old.isdigit() else "bcdfgklmnprst") if c != old.lower()])
    return value[:place] + new + value[place + 1 :]
