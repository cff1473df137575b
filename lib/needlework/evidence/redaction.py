"""Take secrets and identities out of text, and keep what lets rows join.

Every secret becomes `<kind-N>`: the same value always becomes the same placeholder within one `Redactor`, so an
address in a log line still joins with the same address in a unit file, and nothing in the output leads back to it.
Our own rules come first (they know headers, units, command lines and paths); maintained `plugins` run after them over
what is left.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import quote

from needlework.evidence import plugins
from needlework.evidence.escapes import HIDES, Written
from needlework.evidence.rules import FILE_NAME, HOME_PATH, LOGIN_AT, RULES, TRAILING, UNIT_SUFFIX
from needlework.evidence.values import COMMON_USERS, Rule, host_like, lasting, token

MAX_LINE_CHARS = 20_000  # a longer line is cut: patterns over megabytes of one line are a way to hang a reader
MIN_CHARS = 3  # a shorter value would turn half of a log into placeholders
MIN_STRING_CHARS = 6
MAX_NESTING = 3  # JSON inside JSON inside JSON
Edit = tuple[int, int, str]  # from, to, new text
JSON = json.JSONDecoder(strict=False)
JSON_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)(?:"|$)')
PLACEHOLDER = re.compile(r"<(?:[a-z]+-)+\d+>")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|\x9b[0-?]*[ -/]*[@-~]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
KEYS = sorted({word for rule in RULES for word in rule.words})
BATCH = 2000  # lines
# One line of journalctl or of a container's log: each of its strings is a text of its own.
JOURNAL_LINE = re.compile(
    r'\{(?:"(?:__REALTIME_TIMESTAMP|_SYSTEMD_UNIT|SYSLOG_IDENTIFIER|PRIORITY|_PID|MESSAGE|log|stream|time)": ?'
    r'"(?:[^"\\]++|\\.)*+"(?:, ?|(?=\}$)))+\}'
)
ACROSS = tuple(rule for rule in RULES if rule.lines > 1)
# What no rule finds by its form alone is looked for again by its value.
SECRETS = ("secret", "key", "authorization", "cookie", "credentials", "url-secret", "webhook", "jwt")
_ASCII_TWINS = str.maketrans({"\u0130": "i", "\u0131": "i", "\u017f": "s", "\u212a": "k"})


def fold(text: str) -> str:
    """Lower case, one character for one, as `re.IGNORECASE` compares: four other signs are ASCII letters to it."""
    return text.lower() if text.isascii() else text.translate(_ASCII_TWINS).lower()


@lru_cache(4096)
def _tried(keys: frozenset[str]) -> tuple[Rule, ...]:
    """The rules, in order, for a text that holds these keys."""
    return tuple(rule for rule in RULES if not rule.words or not keys.isdisjoint(rule.words))


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
    stand as a word, also where no rule would know them, and so is what a rule has once recognised.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._values: Counter[str] = Counter()  # different ones by kind
        self._places: Counter[str] = Counter()
        self._known: dict[str, tuple[str, str]] = {}  # a text, or a name in lower case -> kind and value
        self.learn(hosts, users)

    def learn(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        """Add host and user names; generic ones (localhost, root, …) are left alone."""
        for kind, names in (("host", hosts), ("user", users)):
            for name in names:
                name = fold(name.strip())
                if len(name) >= 3 and name not in COMMON_USERS and not name.isdigit() and "<" not in name:
                    self._known[name] = (kind, name)

    def placeholder(self, kind: str, value: str) -> str:
        key = (kind, value.lower() if kind in ("host", "user", "email") else value)
        if key not in self._names:
            self._values[kind] += 1
            self._names[key] = f"<{kind}-{self._values[kind]}>"
            self._remember(kind, value)
        return self._names[key]

    def _remember(self, kind: str, value: str) -> None:
        if kind == "host":
            self.learn(hosts=(name for name in {value, value.split(".")[0]} if host_like(name) or "." in name))
        elif kind == "user":
            self.learn(users=[value] if len(value) > 3 else [])
        elif kind in SECRETS:
            parts = {part for part in re.split(r"[\s\"'`=:;,&|<>{}()\[\]]+", value) if len(part) > 9 and token(part)}
            for text in {value.strip("\"'")} | parts if "\n" not in value else parts:
                if lasting(text) and "<" not in text:
                    written = {text, quote(text, safe=""), json.dumps(text)[1:-1]}
                    self._known |= {form: (kind, text) for form in written if form not in self._known}

    def text(self, text: str) -> str:
        """The text with every secret replaced, also where it is written in escapes. Idempotent: a second pass changes
        nothing."""
        text = clean(text)
        new = self._body(text, {})
        self._places += _placed(new) - _placed(text)
        return self.again(new)

    def again(self, text: str) -> str:
        """Replace what was recognised anywhere before, wherever it stands in a text that `text` gave."""
        folded = fold(text)
        runs = set(re.findall(r"[a-z0-9]{3,}", folded))
        here = [known for known in self._known if _longest_run(known) in runs and fold(known) in folded]
        if not here:
            return text
        names = "|".join(map(re.escape, sorted(here, key=lambda known: (-len(known), known))))
        found = re.compile(rf"{PLACEHOLDER.pattern}|(?<![^\W_])(?P<known>{names})(?![^\W_])", re.IGNORECASE)

        def instead(match: re.Match[str]) -> str:
            # a name in any case, anything else as it was; and no name that only begins or ends another one
            known = self._known.get(match["known"] or "") or self._known.get(fold(match["known"] or ""))
            if known is None or (known[0] in ("host", "user") and _goes_on(text, *match.span())):
                return match[0]
            return self.placeholder(*known)

        new = found.sub(instead, text)
        self._places += _placed(new) - _placed(text)
        return new

    def _body(self, text: str, done: dict[str, str], depth: int = 0, keys: Iterable[str] = KEYS) -> str:
        """A cleaned text line by line, what JSON strings in it say first: in a journal every message stands in one."""
        lines, told = text.split("\n"), set()
        for start in range(0, len(lines), BATCH):
            some = _keys_in("\n".join(lines[start : start + BATCH])) if len(lines) > BATCH else keys
            replace = partial(self._string, done=done, depth=depth, keys=some)
            for number, line in enumerate(lines[start : start + BATCH], start):
                if depth < MAX_NESTING and line.lstrip()[:1] in ("{", "[", '"'):
                    lines[number] = JSON_STRING.sub(replace, line)
                    if JOURNAL_LINE.fullmatch(lines[number]):
                        told.add(lines[number])
        lines = (self._across("\n".join(lines)) if len(lines) > 1 else lines[0]).split("\n")
        seen = {line: line for line in told}  # these hold nothing but what was looked at
        for start in range(0, len(lines), BATCH):
            some = _keys_in("\n".join(lines[start : start + BATCH])) if len(lines) > BATCH else keys
            seen |= {line: self._line(line, some) for line in lines[start : start + BATCH] if line not in seen}
        return "\n".join(map(seen.__getitem__, lines))

    def _string(self, match: re.Match[str], done: dict[str, str], depth: int, keys: Iterable[str]) -> str:
        literal = match[1]
        if len(literal) < MIN_STRING_CHARS or literal.isdigit() or not match[0].endswith('"'):
            return match[0]
        if literal not in done:
            done[literal] = match[0]
            try:
                said = JSON.decode(match[0]) if "\\" in literal else literal
            except json.JSONDecodeError:
                return match[0]
            new = self._body(clean(said), done, depth + 1, KEYS if "\\" in literal else keys)
            if new != said:
                done[literal] = json.dumps(new, ensure_ascii=False)
        return done[literal]

    def _across(self, text: str) -> str:
        """The rules that look at several lines, each near the lines that hold one of its keys."""
        folded = fold(text)
        for rule in ACROSS:
            anywhere = rule.words == ("\n",)
            spans: list[list[int]] = [[0, len(text)]] if anywhere else []
            for at in () if anywhere else sorted(at for word in rule.words for at in _places(word, folded)):
                start, end = text.rfind("\n", 0, at) + 1, at
                if spans and at < spans[-1][2]:  # the line is known
                    continue
                line_end = end = text.find("\n", at) + 1 or len(text)
                for _ in range(rule.lines - 1):
                    end = text.find("\n", end) + 1 or len(text)
                if spans and start <= spans[-1][1]:
                    spans[-1][1:] = [end, line_end]
                else:
                    spans.append([start, end, line_end])
            matches = (match for start, end, *_ in spans for match in rule.pattern.finditer(text, start, end))
            if edits := self._edits(rule, text, matches):
                page = Written(text)
                page.replace(edits)
                text, folded = page.text, fold(page.text)
        return text

    def _line(self, line: str, keys: Iterable[str]) -> str:
        if HIDES.search(line):
            page = Written.decoded(line)
            self._rules(page, KEYS)
            line = page.written()
        page = Written(line)
        self._rules(page, keys)
        return page.text

    def _rules(self, page: Written, keys: Iterable[str]) -> None:
        """All rules over a short text, which holds no other keys than these."""
        folded = fold(page.text)
        for rule in _tried(frozenset(key for key in keys if key in folded)):
            page.replace(self._edits(rule, page.text, rule.pattern.finditer(page.text)))
        found = sorted(set(plugins.values(page.text, folded, PLACEHOLDER)), key=lambda value: (-len(value), value))
        if found:
            matches = re.finditer("|".join(map(re.escape, found)), page.text)
            page.replace(self._unplaced(page.text, matches, lambda match: self.placeholder("key", match[0])))
        page.replace(self._unplaced(page.text, HOME_PATH.finditer(page.text), self._home_path))
        if "@" in folded:
            page.replace(self._unplaced(page.text, LOGIN_AT.finditer(page.text), self._login))

    def _edits(self, rule: Rule, text: str, matches: Iterable[re.Match[str]]) -> list[Edit]:
        placed: list[tuple[int, int]] | None = None
        edits = []
        for match in matches:
            start, end = match.span("s" if "s" in match.re.groupindex else 0)
            value = text[start:end]
            if rule.whole:  # the name says that all of the value is secret, also around a part replaced before
                value = TRAILING.sub("", value)
                end = start + len(value)
                known = PLACEHOLDER.sub("", value) != value
                if len(value) < MIN_CHARS or (known and len(re.findall(r"\w", PLACEHOLDER.sub("", value))) < 2):
                    continue
            else:
                placed = _spans(text) if placed is None else placed
                if _touches(placed, start, end):
                    continue
            if value and rule.accept(value):
                edits.append((start, end, self.placeholder(rule.kind, value)))
        return edits

    @staticmethod
    def _unplaced(text: str, matches: Iterable[re.Match[str]], new: Callable[[re.Match[str]], str]) -> list[Edit]:
        """New text for each match that is not inside a placeholder made before."""
        found = list(matches)
        placed = _spans(text) if found else []
        return [(*match.span(), new(match)) for match in found if not _touches(placed, *match.span())]

    def _login(self, match: re.Match[str]) -> str:
        if UNIT_SUFFIX.search(match[0]) or match["host"].isdigit():
            return match[0]
        known = match["user"].lower() in COMMON_USERS
        user = match["user"] if known else self.placeholder("user", match["user"])
        return f"{user}@{self.placeholder('host', match['host'])}"

    def _home_path(self, match: re.Match[str]) -> str:
        if user := re.match(r"/(?:home|Users)/([^/]+)", match[0]):
            self.learn(users=[user[1]])
        path = match[0].rstrip(".")
        tail = match[0][len(path) :]
        folder, _, name = path.replace("\\", "/").rpartition("/")
        keep = f"/{name}" if FILE_NAME.match(name) and (folder.count("/") >= 2 or folder == "/root") else ""
        return self.placeholder("path", folder if keep else path.rstrip("/")) + keep + tail

    def report(self) -> dict[str, dict[str, int]]:
        """What was replaced: per kind, how many different values and how many places. No part of any value."""
        return {kind: {"values": self._values[kind], "places": self._places[kind]} for kind in sorted(self._values)}


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


def _spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in PLACEHOLDER.finditer(text)]


def _touches(spans: list[tuple[int, int]], start: int, end: int) -> bool:
    at = bisect.bisect_left(spans, (end, 0))
    return at > 0 and spans[at - 1][1] > start


def _placed(text: str) -> Counter[str]:
    return Counter(found[1:-1].rpartition("-")[0] for found in PLACEHOLDER.findall(text))


def _keys_in(text: str) -> list[str]:
    """The keys that stand in a text of many lines, looked for in its different words only."""
    words = " ".join(set(re.sub(r"\d+", "0", fold(text)).split()))
    return [key for key in KEYS if key in words or (re.search(r"[\d\n]", key) and key in fold(text))]


def _places(word: str, text: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


@lru_cache(1 << 14)
def _longest_run(text: str) -> str:
    return max(re.findall(r"[a-z0-9]+", fold(text)), key=len, default="")


def _goes_on(text: str, start: int, end: int) -> bool:
    return text[start - 1 : start] in ("-", "_") or text[end : end + 1] in ("-", "_")
