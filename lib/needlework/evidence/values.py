"""Is this value a secret? What a rule's pattern found is judged here: engines log keys, tokens, hosts that are none."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from needlework.evidence.finder import Finder

NOT_SECRET = re.compile(
    r"(?i)^(?:true|false|none|null|nil|undefined|yes|no|on|off|auto|default|disabled|enabled|required|optional|missing|"
    r"invalid|expired|unset|empty|redacted|\*+|x{3,}|\.\.\.|str|string|int|bool|bytes|\$\{?\w+\}?|%\w+%?|-?\d{1,6}(?:\.\d+)?|"
    r"\$\{\{.*|\{\{.*|\[(?!.*\d.*[a-z]).*|\{.*|\(.*|(?:self|cls|args|config|settings|options|os|server_args)\.[\w.]+(?:\(.*)?|"
    r"(?:optional|union|list|dict)\[.*|f?[\"']?\{\w+\}[\"']?|(?:str|getpass|getenv|input|len)\(.*|\w*(?:key|password|token|secret)\)?|"
    r"(?:str|int|bool|bytes)\s*(?:\||=|,).*)$"
)
# Version numbers, attributes in source code, and the labels that a collection plan gives to hosts.
NOT_HOST = re.compile(
    r"[\d.]+|(?:self|cls|args|cfg|config|model|np|torch|os|sys|threading|needlework)\..*|(?:node|host)-(?:[a-z]|\d{1,2})"
)
PUBLIC_HOSTS = {
    "github.com",
    "huggingface.co",
    "www.apache.org",
    "docs.vllm.ai",
    "docs.sglang.ai",
    "docs.python.org",
    "www.w3.org",
}
COMMON_USERS = {"root", "nobody", "daemon", "bin", "sys", "www-data", "systemd", "user", "admin", "service", "ubuntu"}


@dataclass(frozen=True)
class Rule:
    """One kind of secret: the finder's group `s` (or the whole match) is replaced when `accept` agrees.

    `whole`: the name beside it says that all of the value is secret, so it is replaced also around a placeholder that
    an earlier rule has put into it.
    """

    kind: str
    finder: Finder
    accept: Callable[[str], bool] = bool
    whole: bool = False


def secret(text: str) -> bool:
    """A value after a name that says "secret": anything but the words that configurations and logs put there."""
    return not NOT_SECRET.match(text) and not re.match(r"<(?![a-z-]+-\d+>)", text)


def not_switch(text: str) -> bool:
    return secret(text) and not text.startswith("-")


def token(text: str) -> bool:
    """After a bare "token" a value is one only when it looks made by a machine: engines log tokens all day long."""
    return secret(text) and len(text) >= 8 and bool(re.search(r"\d", text)) and bool(re.search(r"[A-Za-z]", text))


def changes(text: str) -> float:
    """Share of neighbours in a text's letters and digits that differ in class (lower, upper, digit): words have few."""
    classes = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in text if c.isalnum()]
    return sum(a != b for a, b in itertools.pairwise(classes)) / max(1, len(classes) - 1)


def machine_made(text: str) -> bool:
    """Long, of one piece, letters and digits in turn: what follows `key`, `session` or `auth` when it is a secret."""
    return token(text) and len(text) >= 12 and re.fullmatch(r"[\w+/=~-]+", text) is not None and changes(text) >= 0.3


def dense(text: str) -> bool:
    """Text that stands for bytes: base64 or base62, wherever it stands. Hexadecimal is not, for digests are kept."""
    if text.startswith(("iVBORw0KGgo", "PHN2Zy", "/9j/", "R0lGOD")):  # a picture
        return False
    kinds = [bool(re.search(kind, text)) for kind in ("[a-z]", "[A-Z]", r"\d")]
    return all(kinds) and changes(text) >= 0.45 and not re.fullmatch(r"(?i)(?:0x)?[0-9a-f]+", text)


def any_address(text: str) -> bool:
    if re.fullmatch(r"\d{0,4}::\d{0,4}", text):  # a slice of Python, not an address
        return False
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    # Loopback and "any" say how a server is bound and name nobody.
    return not (address.is_loopback or address.is_unspecified)


def private_host(text: str) -> bool:
    return text.lower() not in PUBLIC_HOSTS and not NOT_HOST.fullmatch(text)


def host_like(text: str) -> bool:
    """A name of one word that looks like a machine's: letters with a digit or a hyphen."""
    return private_host(text) and bool(re.search(r"[A-Za-z]", text)) and bool(re.search(r"[\d-]", text))


def user_name(text: str) -> bool:
    return text.lower() not in COMMON_USERS and secret(text)
