"""Removing keys, hosts and addresses from any text that a server or an exception hands us."""

from __future__ import annotations

import functools
import re
import unicodedata
from urllib.parse import urlsplit

_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://(?:[^\s'\"<>()\[\]/]*\[[^\s\]]*\])?[^\s'\"<>)\]]*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic|token|api[-_ ]?key)\b(\s*[:=]?\s*)[\"']?[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_KEYLIKE = re.compile(r"\b(?:sk|hf|pk|rk|gh[pousr]|glpat|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{12,}")
_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b")
_IPV6 = re.compile(r"\[[0-9a-fA-F:]{2,45}\](?::\d{1,5})?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

MAX_CHARS = 240
# ECMA-48: CSI sequences, OSC strings (titles, hyperlinks), and two-character escapes
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]|[\x9b][0-?]*[ -/]*[@-~]")


def scrub(text: object, *, secrets: tuple[str, ...] = (), limit: int = 300) -> str:
    """Return `text` as one bounded line without keys, URLs, host names or addresses.

    `secrets` are exact strings to remove (an API key, a base URL). Longer text is cut to `limit` characters.
    """
    line = str(text)[: 20 * limit]
    for secret in sorted((s for s in secrets if s and len(s) >= 3), key=len, reverse=True):
        line = line.replace(secret, "[removed]")
    for pattern, replacement in (
        (_URL, "[url]"),
        (_BEARER, r"\1\2[removed]"),
        (_KEYLIKE, "[removed]"),
        (_IPV6, "[address]"),
        (_IPV4, "[address]"),
        (_CONTROL, " "),
    ):
        line = pattern.sub(replacement, line)
    line = private(" ".join(line.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


@functools.lru_cache(maxsize=4096)
def private(text: str, keep: str = "") -> str:
    """The text without what the rules of `evidence.redact` take for a secret or an identity.

    `keep` is left as it stands: the value that a probe asked for looks like a secret by design.
    """
    from needlework.evidence.redaction import clean, redact  # its patterns need half a second to load

    def without(part: str) -> str:
        after = redact(part) if part.strip() else part
        return part if after == clean(part) else after  # where nothing is secret, odd characters are data

    return keep.join(map(without, text.split(keep))) if keep else without(text)


def secrets_of(base_url: str, api_key: str | None) -> tuple[str, ...]:
    """The strings that must never leave: the key, the URL, its host and its host:port."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    # localhost is no secret, and removing short common words would mangle messages
    hosts = (parts.netloc, host) if host not in ("localhost", "") else (parts.netloc,)
    userinfo = (parts.username or "", parts.password or "")
    return tuple(s for s in (api_key or "", base_url, *hosts, *userinfo) if s)


def strip_ansi(text: str) -> str:
    """Text without terminal escape sequences."""
    return _ANSI.sub("", text)


def visible(text: str) -> str:
    """Text without escape sequences; control, direction, zero-width and private marks show as U+FFFD."""
    marks = ("Cc", "Cf", "Cs", "Co")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in marks else "\ufffd" for c in strip_ansi(text))


def plain(text: object, max_chars: int = MAX_CHARS) -> str:
    """Text from a server, log or dump made safe to *look* at: no ANSI, no control or direction marks, bounded length.

    It is not escaped for HTML; `escape` does both.
    """
    value = visible(str(text)[: 8 * max_chars])
    return value if len(value) <= max_chars else value[: max_chars - 1] + "…"
