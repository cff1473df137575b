"""Take secrets and identities out of text, and keep what lets rows join.

Every secret becomes `<kind-N>`: the same value always becomes the same placeholder within one `Redactor`, so an
address in a log line still joins with the same address in a unit file, and nothing in the output leads back to it.
Our own rules come first (they know headers, units, command lines and paths); the maintained plugins of
detect-secrets (https://github.com/Yelp/detect-secrets) run after them over what is left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from needlework.evidence.rules import (
    CANDIDATE,
    COMMON_USERS,
    FILE_NAME,
    HOME_PATH,
    LOGIN_AT,
    PLUGINS,
    RULES,
    UNIT_SUFFIX,
    Rule,
)

MAX_LINE_CHARS = 20_000  # a longer line is cut: patterns over megabytes of one line are a way to hang a reader

PLACEHOLDER = re.compile(r"<(?:[a-z]+-)+\d+>")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|\x9b[0-?]*[ -/]*[@-~]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


@cache
def _plugins() -> list[Any]:
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError as error:  # redacting with half the rules must not pass for redacting
        raise RuntimeError("redaction needs detect-secrets: pip install -e '.[run]'") from error
    found: dict[str, Any] = get_mapping_from_secret_type_to_class()
    classes = {plugin.__name__: plugin for plugin in found.values()}
    return [classes[name]() for name in PLUGINS]


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
                name = name.strip().lower()
                if (
                    len(name) >= 3
                    and name not in COMMON_USERS | {"localhost"}
                    and not name.isdigit()
                    and "<" not in name
                ):
                    self._known[name] = kind
        if self._known:
            names_by_length = sorted(self._known, key=len, reverse=True)
            self._known_pattern = re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(map(re.escape, names_by_length))})(?![\w-])")

    def placeholder(self, kind: str, value: str) -> str:
        key = (kind, value.lower() if kind in ("host", "user", "email") else value)
        if key not in self._names:
            self._names[key] = f"<{kind}-{1 + sum(k == kind for k, _ in self._names)}>"
        self._counts[kind] += 1
        return self._names[key]

    def text(self, text: str) -> str:
        """The text with every secret replaced. Idempotent: a second pass changes nothing."""
        text = clean(text)
        for rule in RULES:
            text = self._apply(rule, text)
        text = self._detect_secrets(text)
        text = self._outside(HOME_PATH, text, self._home_path)
        if self._known_pattern:
            text = self._outside(self._known_pattern, text, lambda m: self.placeholder(self._known[m[0].lower()], m[0]))
        return self._outside(LOGIN_AT, text, self._login)

    def _apply(self, rule: Rule, text: str) -> str:
        group = "s" if "s" in rule.pattern.groupindex else 0

        def replace(match: re.Match[str]) -> str:
            value = match[group]
            if not rule.accept(value) or PLACEHOLDER.fullmatch(value):
                return match[0]
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            return match[0][:start] + self.placeholder(rule.kind, value) + match[0][end:]

        return self._outside(rule.pattern, text, replace)

    @staticmethod
    def _outside(pattern: re.Pattern[str], text: str, replace: Callable[[re.Match[str]], str]) -> str:
        """Substitute, but never inside a placeholder made before."""
        spans = [match.span() for match in PLACEHOLDER.finditer(text)]

        def guarded(match: re.Match[str]) -> str:
            group = "s" if "s" in pattern.groupindex else 0
            start, end = match.span(group)
            return match[0] if any(a < end and start < b for a, b in spans) else replace(match)

        return pattern.sub(guarded, text)

    def _detect_secrets(self, text: str) -> str:
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if not CANDIDATE.search(PLACEHOLDER.sub("", line)):
                continue
            for plugin in _plugins():
                for value in plugin.analyze_string(line):
                    if value and not PLACEHOLDER.search(value) and value in lines[number]:
                        lines[number] = lines[number].replace(value, self.placeholder("key", value))
        return "\n".join(lines)

    def _login(self, match: re.Match[str]) -> str:
        if UNIT_SUFFIX.search(match[0]) or match["host"].isdigit():
            return match[0]
        user = match["user"] if match["user"] in COMMON_USERS else self.placeholder("user", match["user"])
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
    leaks = []
    if "PRIVATE KEY-----" in text:
        leaks.append(Leak(text[: text.index("PRIVATE KEY-----")].count("\n") + 1, "private-key"))
    for number, line in enumerate(text.split("\n"), 1):
        redactor = Redactor()
        if redactor.text(line) != clean(line):
            leaks += [Leak(number, kind) for kind in redactor.report() if kind != "private-key"]
    if not leaks:  # a secret may stand on another line than its name
        redactor = Redactor()
        for number, (found, right) in enumerate(
            zip(clean(text).split("\n"), redactor.text(text).split("\n"), strict=False), 1
        ):
            if found != right:
                leaks += [Leak(number, kind) for kind in redactor.report()]
                break
    return leaks
