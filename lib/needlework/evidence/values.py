"""Is this value a secret? What a rule's pattern found is judged here: engines log keys, tokens, hosts that are none."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

NOT_SECRET = re.compile(
    r"(?i)^(?:true|false|none|null|nil|undefined|yes|no|on|off|auto|default|disabled|enabled|required|optional|missing|"
    r"invalid|expired|unset|empty|redacted|\*+|x{3,}|\.\.\.|str|string|int|bool|bytes|\$\{?\w+\}?|%\w+%?|-?\d{1,6}(?:\.\d+)?|"
    r"\$\{\{.*|\{\{.*|\[(?!.*\d.*[a-z]).*|\{.*|\(.*|(?:self|cls|args|config|settings|options|os|server_args)\.[\w.]+(?:\(.*)?|"
    r"(?:optional|union|list|dict)\[.*|f?[\"']?\{\w+\}[\"']?|(?:str|getpass|getenv|input|len)\(.*|[a-z_]*(?:key|password|token|secret)\)?|"
    r"(?:str|int|bool|bytes)\s*(?:\||=|,).*)$"
)
# Version numbers, attributes in source code, and the labels that a collection plan gives to hosts.
NOT_HOST = re.compile(
    r"[\d.]+|(?:self|cls|args|cfg|config|model|np|torch|os|sys|threading|needlework)\..*|(?:node|host)-(?:[a-z]|\d{1,2})"
)
# Names that everybody's manifests, images and documents hold.
PUBLIC_HOSTS = set(
    """github.com huggingface.co www.apache.org docs.vllm.ai docs.sglang.ai docs.python.org www.w3.org
    pytorch.org download.pytorch.org nvidia.com developer.nvidia.com docs.nvidia.com nvcr.io ghcr.io quay.io docker.io
    registry.k8s.io k8s.io kubernetes.io app.kubernetes.io networking.k8s.io storage.k8s.io
    inference.networking.k8s.io kserve.io
    inference.networking.x-k8s.io serving.kserve.io ray.io llm-d.ai vllm.ai ollama.com ollama.ai registry.ollama.ai
    modelscope.cn lmsys.org sglang.ai""".split()  # noqa: SIM905
)
# No name of a person or a machine, whatever stands before it.
COMMON_USERS = set(
    """root nobody daemon bin sys www-data systemd user users admin service ubuntu debian ec2-user localhost default
    guest test ollama vllm sglang ktransformers lmcache mooncake dynamo triton nvidia kserve llama llama-server ray
    llama-cpp docker prefill decode router combined server serve engine worker model models python none null true false
    shared public data work tmp cache gpu app apps code home project projects workspace dev prod jovyan runner git www
    logs checkpoints weights datasets main head node local""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Rule:
    """One kind of secret: the pattern's group `s` (or the whole match) is replaced when `accept` agrees.

    `keys`: literals, lower case, with blanks between them, of which every match holds one in its first line (a line
    end alone: it goes over several); a line without any is not tried. `whole`: the name beside it says that all of the
    value is secret, so it is replaced also around a placeholder that an earlier rule has put into it. `lines`: how many
    a match may go over.
    """

    kind: str
    keys: str
    source: str
    accept: Callable[[str], bool] = bool
    whole: bool = False
    lines: int = 1

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.source)

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(key for key in self.keys.split(" ") if key)


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
    return text.lower() not in COMMON_USERS and text.lower() not in PUBLIC_HOSTS and not NOT_HOST.fullmatch(text)


def host_like(text: str) -> bool:
    """A name of one word that looks like a machine's: letters with a digit or a hyphen."""
    return private_host(text) and bool(re.search(r"[A-Za-z]", text)) and bool(re.search(r"[\d-]", text))


def user_name(text: str) -> bool:
    return text.lower() not in COMMON_USERS and secret(text)


def lasting(text: str) -> bool:
    """A secret that can be looked for by its value alone: nothing that a log may well say for another reason."""
    if len(text) < 6 or text.isdigit() or NOT_SECRET.match(text):
        return False
    plain = text.isalpha() and (text.islower() or text.istitle() or text.isupper())
    return len(text) >= 8 if plain else changes(text) > 0 or not text.isalnum()


def mixed(text: str) -> bool:
    """Letters and digits together: what prose says after "the password for the … is" when it tells one."""
    return secret(text) and bool(re.search(r"\d", text)) and bool(re.search(r"[^\W\d_]", text))


def numbered(text: str) -> bool:
    """A machine's name in prose: a word with a number, and no part of a machine (cuda:0, rank3)."""
    parts = "cuda|tp|pp|dp|ep|rank|worker|device|stage|numa|shard|layer|group|tier|port|pid"
    part = re.match(rf"(?i)(?:(?:{parts})[-_.]?\d{{0,2}}|gpu[-_.]?\d)$", text)
    return len(text) > 4 and not part and host_like(text) and bool(re.search(r"\d", text))


def not_level(text: str) -> bool:
    levels = "info warn warning error debug trace fatal critical notice stderr stdout"
    return private_host(text) and text.lower() not in levels.split() and not text.isdigit()
