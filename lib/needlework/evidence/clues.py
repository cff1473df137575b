"""What every match of a pattern must hold, read off the pattern itself: literals, and how far from its start.

A rule that needs "curl" is not tried where no "curl" stands. The clues are derived from the pattern and not written
beside it, so that no rule can skip a place that its own pattern would match. Python shows how it reads a pattern in
private modules only: where they are not as known here there are no clues, and every rule is tried everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

op: Any
parser: Any
try:
    from re import _constants as op  # type: ignore[attr-defined,no-redef]
    from re import _parser as parser  # type: ignore[attr-defined,no-redef]
except ImportError:
    op = parser = None

MANY = 64  # a literal with more spellings than this is no clue
FAR = 1 << 30  # without a bound
LINE = 200  # what an unbounded distance counts when clues are compared
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT) if op else ()
_ASCII_TWINS = str.maketrans({"\u0130": "i", "\u0131": "i", "\u017f": "s", "\u212a": "k"})


def fold(text: str) -> str:
    """Lower case, one character for one, as `re.IGNORECASE` compares: four other signs are ASCII letters to it."""
    return text.lower() if text.isascii() else text.translate(_ASCII_TWINS).lower()


@dataclass(frozen=True)
class Clues:
    """Every match has one of `stems` (folded) near its start, which lies in [h - farthest, h - nearest] of a stem at h.

    Where `farthest` is `FAR`, `in_line` says that the match starts in the stem's own line.
    """

    stems: dict[str, tuple[int, int]]  # stem -> (nearest, farthest)
    in_line: bool

    def cost(self) -> float:
        """Places to try for each character of a text, were twenty characters equally frequent in it."""
        return sum(20.0 ** -len(stem) * (2 + min(far - near, LINE)) for stem, (near, far) in self.stems.items())


def clues_of(pattern: str, flags: int = 0) -> Clues | None:
    """The most telling literals that every match of a pattern holds; None when it holds none for certain, or when this
    Python reads patterns into another tree than the one that is known here."""
    if parser is None:
        return None
    tree = parser.parse(pattern, flags)
    try:
        return _of_sequence(tree, tree.state)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _of_sequence(items: Sequence[Any], state: Any) -> Clues | None:
    found: list[Clues] = []
    least, most, in_line = 0, 0, True  # what stands between the start of the match and the element
    run, run_at, run_in_line = {""}, (0, 0), True  # the elements before it that are literals

    def end_run() -> None:
        if "" not in run:
            found.append(Clues(_shortest((word, run_at) for word in run), run_in_line))

    for item in items:
        spellings = _spellings(item)
        if spellings is None or len(run) * len(spellings) > MANY:
            end_run()
            run, run_at, run_in_line = spellings or {""}, (least, most), in_line
        else:
            run = {before + word for before in run for word in spellings}
        if (spellings is None or item[0] is op.ASSERT) and (inner := _of_item(item, state)):
            moved = {word: (near + least, min(FAR, far + most)) for word, (near, far) in inner.stems.items()}
            found.append(Clues(moved, in_line and inner.in_line))
        width = parser.SubPattern(state, [item]).getwidth()
        least, most, in_line = min(FAR, least + width[0]), min(FAR, most + width[1]), in_line and not _breaks([item])
        if run == {""}:
            run_at, run_in_line = (least, most), in_line
    end_run()
    return min(found, key=Clues.cost, default=None)


def _of_item(item: tuple[Any, Any], state: Any) -> Clues | None:
    kind, value = item
    if kind is op.SUBPATTERN:
        return _of_sequence(value[3], state)
    if kind is op.ATOMIC_GROUP:
        return _of_sequence(value, state)
    if kind in _REPEATS and value[0] >= 1:
        return _of_sequence(value[2], state)
    if kind is op.ASSERT:
        clues, behind = _of_sequence(value[1], state), 0 if value[0] > 0 else value[1].getwidth()[1]
        return clues and Clues(
            {w: (near - behind, far - behind) for w, (near, far) in clues.stems.items()}, clues.in_line
        )
    if kind is op.BRANCH:
        branches = [_of_sequence(branch, state) for branch in value[1]]
        if all(branches):
            words = itertools.chain.from_iterable(clues.stems.items() for clues in branches if clues)
            return Clues(_shortest(words), all(clues.in_line for clues in branches if clues))
    return None


def _shortest(words: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """One range for each word, and no word that only goes on where another one has been found in the same place."""
    ranges: dict[str, tuple[int, int]] = {}
    for word, (near, far) in words:
        known = ranges.get(word, (near, far))
        ranges[word] = (min(near, known[0]), max(far, known[1]))
    return {
        word: (near, far)
        for word, (near, far) in ranges.items()
        if not any(
            (start := ranges.get(word[:n])) and start[0] <= near and start[1] >= far for n in range(1, len(word))
        )
    }


def _spellings(item: tuple[Any, Any]) -> set[str] | None:
    """All texts, folded, that an element matches; None when they are many, unknown or not of ASCII."""
    kind, value = item
    if kind is op.LITERAL:
        return {fold(chr(value))} if value < 128 else None
    if kind is op.IN:
        codes: list[int] = []
        for member, code in value:
            if member is op.LITERAL:
                codes.append(code)
            elif member is op.RANGE and code[1] - code[0] < MANY:
                codes += range(code[0], code[1] + 1)
            else:
                return None
        return {fold(chr(code)) for code in codes} if len(codes) <= 8 and max(codes) < 128 else None
    if kind in (op.AT, op.ASSERT, op.ASSERT_NOT):
        return {""}
    if kind is op.SUBPATTERN:
        return _joined(value[3])
    if kind is op.BRANCH:
        return _union([_joined(branch) for branch in value[1]])
    if kind in _REPEATS and value[1] <= 4:
        return _union([_joined(list(value[2]) * times) for times in range(value[0], value[1] + 1)])
    return None


def _union(sets: Sequence[set[str] | None]) -> set[str] | None:
    words = {word for one in sets if one is not None for word in one}
    return words if None not in sets and len(words) <= MANY else None


def _joined(items: Sequence[Any]) -> set[str] | None:
    words = {""}
    for item in items:
        spellings = _spellings(item)
        if spellings is None or len(words) * len(spellings) > MANY:
            return None
        words = {before + word for before in words for word in spellings}
    return words


def _breaks(items: Sequence[Any]) -> bool:
    """Whether what these elements match can hold the end of a line; in doubt it can."""
    return any(_breaks_line(kind, value) for kind, value in items)


def _breaks_line(kind: Any, value: Any) -> bool:
    if kind is op.LITERAL:
        return bool(value == 10)
    if kind is op.NOT_LITERAL:
        return bool(value != 10)
    if kind in (op.AT, op.ASSERT, op.ASSERT_NOT):
        return False
    if kind is op.IN:
        has = any(
            code == 10
            if member is op.LITERAL
            else code[0] <= 10 <= code[1]
            if member is op.RANGE
            else code in (op.CATEGORY_SPACE, op.CATEGORY_NOT_DIGIT, op.CATEGORY_NOT_WORD)
            for member, code in value
            if member is not op.NEGATE
        )
        return has != (value[0][0] is op.NEGATE)
    if kind is op.SUBPATTERN:
        return _breaks(value[3])
    if kind is op.BRANCH:
        return any(_breaks(branch) for branch in value[1])
    if kind in _REPEATS:
        return _breaks(value[2])
    return True
