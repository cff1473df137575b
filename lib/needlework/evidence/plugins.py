"""Secret patterns of detect-secrets (https://github.com/Yelp/detect-secrets), asked about lines that can hold one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from needlework.evidence.finder import Finder, Searched

# Nothing these plugins look for is shorter or has another alphabet: lines without such a run are not worth their time.
CANDIDATE = re.compile(r"[A-Za-z0-9_+/=.:-]{16}")
PLUGINS = (
    "AWSKeyDetector",
    "ArtifactoryDetector",
    "AzureStorageKeyDetector",
    "BasicAuthDetector",
    "CloudantDetector",
    "DiscordBotTokenDetector",
    "GitHubTokenDetector",
    "GitLabTokenDetector",
    "IbmCloudIamDetector",
    "IbmCosHmacDetector",
    "JwtTokenDetector",
    "MailchimpDetector",
    "NpmDetector",
    "OpenAIDetector",
    "PypiTokenDetector",
    "SendGridDetector",
    "SlackDetector",
    "SoftlayerDetector",
    "SquareOAuthDetector",
    "StripeDetector",
    "TelegramBotTokenDetector",
    "TwilioKeyDetector",
)


@cache
def _plugins() -> list[Any]:
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError as error:  # redacting with half the rules must not pass for redacting
        raise RuntimeError("redaction needs detect-secrets: pip install -e '.[run]'") from error
    found: dict[str, Any] = get_mapping_from_secret_type_to_class()
    classes = {plugin.__name__: plugin for plugin in found.values()}
    return [classes[name]() for name in PLUGINS]


@cache
def finders() -> tuple[Finder, ...]:
    """One finder for each pattern of the plugins."""
    return tuple(Finder(pattern.pattern, pattern.flags) for plugin in _plugins() for pattern in plugin.denylist)


def values(page: Searched, placeholder: re.Pattern[str]) -> Iterator[tuple[int, set[str]]]:
    """The line's number, from 0, and the secrets in it, for each line in which a plugin finds any."""
    candidates = (finder.lines(page) for finder in finders() if finder.may_match(page))
    for number in sorted(set().union(*candidates)):
        line = page.lines[number]
        if CANDIDATE.search(placeholder.sub("", line)):
            found = {value for plugin in _plugins() for value in plugin.analyze_string(line) if value}
            found = {value for value in found if not placeholder.search(value)}
            if found:
                yield number, found
