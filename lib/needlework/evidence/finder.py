"""Find all matches of many patterns in one text, without trying each pattern at each character.

What `re.finditer` yields is what `Finder.matches` yields: its pattern is tried only near the literals that every match
of it must hold (`clues`), and these are looked up once for all patterns.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable, Iterator

from needlework.evidence.clues import FAR, LINE, Clues, clues_of, fold

PIECE = 64  # places that one attempt tries at most, beside the first
PER_PLACE = 12  # what looking at one place costs, in characters that a plain search reads in the time
SHORT = 150  # a text this short is searched at once
_WORD = re.compile("[a-z]+")
_GLOBAL_FLAGS = re.compile(r"^\(\?([ims]+)\)")
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}


class Stems:
    """Literals by a word that each of them holds, or by itself where it holds none."""

    def __init__(self, stems: Iterable[str]) -> None:
        self.by_part: dict[str, list[str]] = {}
        for stem in sorted(stems):
            self.by_part.setdefault(max(_WORD.findall(stem), key=len, default=stem), []).append(stem)
        self.key = "\n".join(sorted(stems))  # the same for the many rules that look for the same names


class Parts:
    """The words and signs of many finders' stems."""

    def __init__(self, finders: Iterable[Finder]) -> None:
        parts = frozenset(part for finder in finders for part in finder.parts)
        self.signs = frozenset(part for part in parts if not part.isalpha())
        self._words = parts - self.signs
        self.words_of = functools.lru_cache(1024)(lambda text: self.words_in(fold(text)))

    def words_in(self, folded: str) -> frozenset[str]:
        return frozenset(word for word in self._words if word in folded)


class Searched:
    """One text, and where literals stand in it: to be searched by the finders that `parts` knows."""

    def __init__(self, text: str, parts: Parts, known: frozenset[str] | None = None) -> None:
        self.text = text
        self.folded = fold(text)
        self._asked = parts
        words = parts.words_in(" ".join(set(_WORD.findall(self.folded)))) if known is None else known
        self._words = words  # after edits maybe some that no longer stand there
        self.parts = words.union(sign for sign in parts.signs if sign in self.folded)
        self._places: dict[str, dict[str, list[int]]] = {}

    def edited(self, text: str, added: Iterable[str]) -> Searched:
        """The text after edits that put `added`, none of which begins or ends with a letter, in place of something."""
        return Searched(text, self._asked, self._words.union(*map(self._asked.words_of, set(added))))

    def places(self, stems: Stems) -> dict[str, list[int]]:
        """Where each of some literals stands, overlapping or not; those that do not are left out."""
        found = self._places.get(stems.key)
        if found is None:
            found = self._places[stems.key] = {}
            for part, literals in stems.by_part.items():
                for stem in literals if part in self.parts else ():
                    at = self.folded.find(stem)
                    if at >= 0:
                        found[stem] = places = [at]
                        while (at := self.folded.find(stem, at + 1)) >= 0:
                            places.append(at)
        return found

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @functools.cached_property
    def line_starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts[:-1]

    def line_at(self, place: int) -> int:
        """The number, from 0, of the line that holds a place."""
        return bisect.bisect_right(self.line_starts, place) - 1


class Finder:
    """A pattern that is compiled, and tried, only where it can match.

    `stands`, for a clue that stands everywhere (a dot, a colon): what else is there in every match. A pattern by stem,
    searched for in the folded text; it begins with the stem, so that this is quick.
    """

    def __init__(self, source: str, flags: int = 0, stands: dict[str, str] | None = None) -> None:
        if inline := _GLOBAL_FLAGS.match(source):
            source = source[inline.end() :]
            flags = functools.reduce(lambda all_, letter: all_ | _FLAGS[letter], inline[1], flags)
        self.source, self.flags = source, flags
        self._stands = {stem: re.compile(pattern) for stem, pattern in (stands or {}).items()}

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.source, self.flags)

    @functools.cached_property
    def clues(self) -> Clues | None:
        return clues_of(self.source, self.flags)

    @functools.cached_property
    def _stems(self) -> Stems:
        return Stems(self.clues.stems if self.clues else ())

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Words and signs: a text without any of them has no match. Empty: nothing is known."""
        return frozenset(self._stems.by_part)

    def may_match(self, page: Searched) -> bool:
        """False where a look at the words of the text is enough to say that there is no match."""
        return not self.parts or not page.parts.isdisjoint(self.parts)

    @functools.cached_property
    def _piece(self) -> int:
        """How many places, beside the first, one attempt tries."""
        spans = self.clues.stems.values() if self.clues else ()
        return min(PIECE, max((far - near for near, far in spans), default=PIECE))

    @functools.cached_property
    def _next(self) -> re.Pattern[str]:
        """Matches, and ends where the pattern does match, when one of the places of a piece is such a place."""
        return re.compile(rf"(?s:.{{0,{self._piece}}}?)(?={self.source})", self.flags)

    @functools.cached_property
    def _at_line_start(self) -> bool:
        return self.source.startswith("^") and bool(self.flags & re.MULTILINE)

    def matches(self, page: Searched) -> Iterator[re.Match[str]]:
        """As `re.finditer`: from left to right and without overlap."""
        windows = self._windows(page, PER_PLACE)
        if windows is None:
            yield from self.pattern.finditer(page.text)
            return
        done = 0
        for first, last in windows:
            at = first if first > done else done
            while at <= last:
                if first < last:
                    found = self._next.match(page.text, at)
                    if not found:
                        at += self._piece + 1
                        continue
                    at = found.end()
                match = self.pattern.match(page.text, at)
                if match:
                    yield match
                at = match.end() if match else at + 1
            done = at

    def lines(self, page: Searched) -> set[int]:
        """Numbers, from 0, of the lines that hold a match when each line is a text of its own."""
        windows = self._windows(page, 10 * PER_PLACE)
        if windows is None:
            return {number for number, line in enumerate(page.lines) if self.pattern.search(line)}
        found: set[int] = set()
        for first, last in windows:
            for number in range(page.line_at(max(0, first)), page.line_at(last) + 1):
                if number not in found:
                    start, line = page.line_starts[number], page.lines[number]
                    if first == last:
                        match = self.pattern.match(line, first - start)
                    else:
                        places = range(max(0, first - start), min(last - start, len(line)) + 1, self._piece + 1)
                        match = next(filter(None, (self._next.match(line, place) for place in places)), None)
                    if match:
                        found.add(number)
        return found

    def _windows(self, page: Searched, per_place: int) -> list[tuple[int, int]] | None:
        """From where to where matches may start, in order; None: anywhere, or a plain search is as quick."""
        if self.clues is None or len(page.text) < SHORT:
            return None
        windows: list[tuple[int, int]] = []
        cost = 0
        for stem, places in page.places(self._stems).items():
            if stem in self._stands:  # too many to look at one by one
                places = [match.start() for match in self._stands[stem].finditer(page.folded)]
            nearest, farthest = self.clues.stems[stem]
            cost += len(places) * (per_place + min(farthest - nearest, LINE))
            if cost > len(page.text) or (farthest >= FAR and not self.clues.in_line):
                return None
            if farthest < FAR:
                windows += [(place - farthest, place - nearest) for place in places]
            else:
                starts = [page.text.rfind("\n", 0, place) + 1 for place in places]
                ends = starts if self._at_line_start else [place - nearest for place in places]
                windows += zip(starts, ends, strict=True)
        windows.sort()
        return windows
