"""Take secrets and identities out of text, and keep what lets rows join.

Every secret becomes `<kind-N>`: the same value always becomes the same placeholder within one `Redactor`, so an
address in a log line still joins with the same address in a unit file, and nothing in the output leads back to it.
Our own rules come first (they know headers, units, command lines and paths); maintained `plugins` run after them over
what is left.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from needlework.evidence import plugins
from needlework.evidence.clues import fold
from needlework.evidence.escapes import HIDES, Written
from needlework.evidence.finder import Parts, Searched
from needlework.evidence.rules import FILE_NAME, HOME_PATH, LOGIN_AT, RULES, TRAILING, UNIT_SUFFIX
from needlework.evidence.values import COMMON_USERS, Rule

MAX_LINE_CHARS = 20_000  # a longer line is cut: patterns over megabytes of one line are a way to hang a reader

MIN_CHARS = 3  # a shorter value would turn half of a log into placeholders
MIN_STRING_CHARS = 6
MAX_NESTING = 3  # JSON inside JSON inside JSON
Matches = Iterable[re.Match[str]]
Edit = tuple[int, int, str]  # from, to, new text
JSON = json.JSONDecoder(strict=False)
JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
PLACEHOLDER = re.compile(r"<(?:[a-z]+-)+\d+>")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|\x9b[0-?]*[ -/]*[@-~]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


@cache
def _parts() -> Parts:
    return Parts([*(rule.finder for rule in RULES), *plugins.finders(), HOME_PATH, LOGIN_AT])


def clean(text: str) -> str:
    """Drop ANSI sequences and invisible characters and cut endless lines: they hide secrets and fool terminals."""
    text = CONTROL.sub("", ANSI.sub("", text.replace("\r\n", "\n")))
    if len(text) <= MAX_LINE_CHARS:
        return text
    lines = (
        line
        if len(line) <= MAX_LINE_CHARS
        else f"{line[:MAX_LINE_CHARS]} … [{len(line) - MAX_LINE_CHARS} characters cut]"
        for line in text.split("\n")
    )
    return "\n".join(lines)


class Redactor:
    """Replaces secrets by stable placeholders; one instance per bundle.

    `hosts` and `users` are names known beforehand (from the plan, from journal fields): they are replaced wherever they
    stand as a word, also where no rule would know them.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: Counter[str] = Counter()
        self._known: dict[str, str] = {}
        self._known_pattern: re.Pattern[str] | None = None
        self.learn(hosts, users)

    def learn(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        """Add host and user names; generic ones (localhost, root, …) are left alone."""
        for kind, names in (("host", hosts), ("user", users)):
            for name in names:
                name = fold(name.strip())
                if (
                    len(name) >= 3
                    and name not in COMMON_USERS | {"localhost"}
                    and not name.isdigit()
                    and "<" not in name
                ):
                    self._known[name] = kind
        if self._known:
            names_by_length = sorted(self._known, key=len, reverse=True)
            self._known_pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names_by_length))})(?![\w-])")

    def placeholder(self, kind: str, value: str) -> str:
        key = (kind, value.lower() if kind in ("host", "user", "email") else value)
        if key not in self._names:
            self._names[key] = f"<{kind}-{1 + sum(k == kind for k, _ in self._names)}>"
        self._counts[kind] += 1
        return self._names[key]

    def text(self, text: str) -> str:
        """The text with every secret replaced, also where it is written in escapes. Idempotent: a second pass changes
        nothing."""
        lines = clean(text).split("\n")
        self._inside_strings(lines)
        escaped = [number for number, line in enumerate(lines) if HIDES.search(line)]
        for batch in _batches(escaped, lines):
            found = self._decoded("\n".join(lines[number] for number in batch)).split("\n")
            if len(found) != len(batch):  # something over several lines went as one: read these one by one
                found = [self._decoded(lines[number]) for number in batch]
            for number, line in zip(batch, found, strict=True):
                lines[number] = line
        page = Written("\n".join(lines))
        self._pass(page)
        return page.text

    def _inside_strings(self, lines: list[str], depth: int = 0) -> None:
        """Redact what JSON strings say, each as a text of its own: in a journal every message stands in one."""
        literals = {
            number: JSON_STRING.findall(line)
            for number, line in enumerate(lines)
            if line.lstrip()[:1] in ("{", "[", '"')
        }
        distinct = dict.fromkeys(itertools.chain.from_iterable(literals.values()))
        said = {literal: text for literal in distinct if (text := _said(literal)) is not None}
        contents = list(dict.fromkeys(said.values()))
        if not contents:
            return
        single = [text for text in contents if "\n" not in text]
        if depth < MAX_NESTING:
            self._inside_strings(single, depth + 1)
        page = Written("\n".join(single))
        self._pass(page)
        after = page.text.split("\n")
        if len(after) != len(single):  # something over several of them went as one
            after = [self._alone(text) for text in single]
        new = dict(zip((text for text in contents if "\n" not in text), after, strict=True))
        new |= {text: self._alone(text) for text in contents if "\n" in text}
        instead = {
            literal: json.dumps(new[text], ensure_ascii=False)
            for literal, text in said.items()
            if new[text] != text or ("\\" in literal and JSON.decode(f'"{literal}"') != text)
        }
        for number, found in literals.items():
            if not instead.keys().isdisjoint(found):
                lines[number] = JSON_STRING.sub(lambda match: instead.get(match[1], match[0]), lines[number])

    def _alone(self, text: str) -> str:
        page = Written(text)
        self._pass(page)
        return page.text

    def _decoded(self, text: str) -> str:
        page = Written.decoded(text)
        self._pass(page)
        return page.written()

    def _pass(self, page: Written) -> None:
        now = Searched(page.text, _parts())
        for rule in RULES:
            if rule.finder.may_match(now):
                now = _edit(page, now, self._edits_of_rule(rule, now))
        now = _edit(page, now, self._edits_of_plugins(now))
        now = _edit(page, now, self._edits(now, HOME_PATH.matches(now), self._home_path))
        if self._known_pattern and any(name in now.folded for name in self._known):
            known = self._known_pattern.finditer(now.folded)
            now = _edit(page, now, self._edits(now, known, self._known_name))
        _edit(page, now, self._edits(now, LOGIN_AT.matches(now), self._login))

    def _edits_of_rule(self, rule: Rule, page: Searched) -> list[Edit]:
        placed: list[tuple[int, int]] | None = None
        edits = []
        for match in rule.finder.matches(page):
            start, end = match.span("s" if "s" in match.re.groupindex else 0)
            value = page.text[start:end]
            if rule.whole:  # the name says that all of the value is secret, also around a part replaced before
                value = TRAILING.sub("", value)
                end = start + len(value)
                known = PLACEHOLDER.sub("", value) != value
                if len(value) < MIN_CHARS or (known and len(re.findall(r"\w", PLACEHOLDER.sub("", value))) < 2):
                    continue
            else:
                placed = _spans(page.text) if placed is None else placed
                if _touches(placed, start, end):
                    continue
            if value and rule.accept(value):
                edits.append((start, end, self.placeholder(rule.kind, value)))
        return edits

    def _edits_of_plugins(self, page: Searched) -> list[Edit]:
        edits = []
        for number, values in plugins.values(page, PLACEHOLDER):
            any_value = re.compile("|".join(map(re.escape, sorted(values, key=lambda v: (-len(v), v)))))
            at = page.line_starts[number]
            found = any_value.finditer(page.lines[number])
            edits += [(at + m.start(), at + m.end(), self.placeholder("key", m[0])) for m in found]
        return edits

    def _edits(self, page: Searched, matches: Matches, new: Callable[[re.Match[str]], str]) -> list[Edit]:
        """New text for each match that is not inside a placeholder made before."""
        placed: list[tuple[int, int]] | None = None
        edits = []
        for match in matches:
            placed = _spans(page.text) if placed is None else placed
            if not _touches(placed, *match.span()):
                edits.append((*match.span(), new(match)))
        return edits

    def _known_name(self, match: re.Match[str]) -> str:
        return self.placeholder(self._known[match[0]], match[0])

    def _login(self, match: re.Match[str]) -> str:
        if UNIT_SUFFIX.search(match[0]) or match["host"].isdigit():
            return match[0]
        known = match["user"].lower() in COMMON_USERS
        user = match["user"] if known else self.placeholder("user", match["user"])
        return f"{user}@{self.placeholder('host', match['host'])}"

    def _home_path(self, match: re.Match[str]) -> str:
        path = match[0].rstrip(".")
        tail = match[0][len(path) :]
        folder, _, name = path.replace("\\", "/").rpartition("/")
        keep = f"/{name}" if FILE_NAME.match(name) and (folder.count("/") >= 2 or folder == "/root") else ""
        return self.placeholder("path", folder if keep else path.rstrip("/")) + keep + tail

    def report(self) -> dict[str, dict[str, int]]:
        """What was replaced: per kind, how many different values and how many places. No part of any value."""
        distinct = Counter(kind for kind, _ in self._names)
        return {kind: {"values": distinct[kind], "places": self._counts[kind]} for kind in sorted(distinct)}


def redact(text: str, redactor: Redactor | None = None) -> str:
    """Redact one text. Give one `Redactor` for several texts whose rows must still join."""
    return (redactor or Redactor()).text(text)


@dataclass(frozen=True)
class Leak:
    """A place that still holds something a redaction would replace; the value itself is never kept."""

    line: int
    kind: str


def check(text: str) -> list[Leak]:
    """Every line of a text that is not yet redacted: line number (from 1) and kind."""
    redactor = Redactor()
    right = redactor.text(text)
    cleaned = clean(text)
    if right == cleaned:
        return []
    kept, leaks = set(right.split("\n")), []
    for number, line in enumerate(cleaned.split("\n"), 1):
        if line not in kept:
            own = Redactor()
            own.text(line)
            leaks += [Leak(number, kind) for kind in own.report()]
    if not leaks:  # a secret may stand on another line than its name
        number = next((n for n, line in enumerate(cleaned.split("\n"), 1) if line not in kept), 1)
        leaks = [Leak(number, kind) for kind in redactor.report()]
    return leaks


def _said(literal: str) -> str | None:
    """What a string of a cleaned line of JSON says, itself cleaned; None when it is too short to hold anything or no
    JSON string at all."""
    if len(literal) < MIN_STRING_CHARS:
        return None
    if "\\" not in literal:
        return clean(literal) if len(literal) > MAX_LINE_CHARS else literal
    try:
        return clean(JSON.decode(f'"{literal}"'))
    except json.JSONDecodeError:
        return None


def _edit(written: Written, page: Searched, edits: list[Edit]) -> Searched:
    """Make the edits, which are in order and apart; returns the text as it is then."""
    if not edits:
        return page
    written.replace(edits)
    return page.edited(written.text, (new for _, _, new in edits))


def _spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in PLACEHOLDER.finditer(text)]


def _touches(spans: list[tuple[int, int]], start: int, end: int) -> bool:
    at = bisect.bisect_left(spans, (end, 0))
    return at > 0 and spans[at - 1][1] > start


def _batches(numbers: list[int], lines: list[str]) -> Iterator[list[int]]:
    """Line numbers in groups of about a million characters: decoding keeps a list entry per character."""
    group: list[int] = []
    size = 0
    for number in numbers:
        group.append(number)
        size += len(lines[number])
        if size > 1 << 20:
            yield group
            group, size = [], 0
    if group:
        yield group
