"""Secret patterns of detect-secrets (https://github.com/Yelp/detect-secrets), asked about lines that can hold one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

# Nothing these plugins look for is shorter or has another alphabet.
CANDIDATE = re.compile(r"[A-Za-z0-9_+/=.:-]{16}")
# plugin -> literals, lower case, of which each of its matches holds one (forms without any are rules of our own)
PLUGINS = {
    "AWSKeyDetector": "a3t abia acca akia asia aws",
    "ArtifactoryDetector": "akc ap0 ap1 ap2 ap3 ap4 ap5 ap6 ap7 ap8 ap9 apa apb apc apd ape apf",
    "AzureStorageKeyDetector": "accountkey=",
    "BasicAuthDetector": "://",
    "CloudantDetector": "cloudant cl_ cl- clou_ clou- clapi clkey clpw clpass cltoken",
    "GitHubTokenDetector": "gho_ ghp_ ghr_ ghs_ ghu_",
    "GitLabTokenDetector": "glpat- gldt- glft- glsoat- glrt- gr1348941 glcbt- glimt- glptt- glagent- gloas-",
    "IbmCloudIamDetector": "ibm cloud",
    "IbmCosHmacDetector": "secret",
    "JwtTokenDetector": "eyj",
    "MailchimpDetector": "-us",
    "NpmDetector": "/:_authtoken=",
    "OpenAIDetector": "t3blbkfj",
    "PypiTokenDetector": "pypi-age",
    "SendGridDetector": "sg.",
    "SlackDetector": "xox hooks.slack.com",
    "SoftlayerDetector": "softlayer sl_ sl- slapi slkey slpw slpass sltoken",
    "SquareOAuthDetector": "sq0csp-",
    "StripeDetector": "rk_live_ sk_live_",
}


@cache
def _plugins() -> list[tuple[tuple[str, ...], Any]]:
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError as error:  # redacting with half the rules must not pass for redacting
        raise RuntimeError("redaction needs detect-secrets, which is not installed here") from error
    found: dict[str, Any] = get_mapping_from_secret_type_to_class()
    classes = {plugin.__name__: plugin for plugin in found.values()}
    return [(tuple(keys.split()), classes[name]()) for name, keys in PLUGINS.items()]


def values(line: str, folded: str, placeholder: re.Pattern[str]) -> Iterator[str]:
    """The secrets that any plugin finds in a line (`folded`: in lower case) beside placeholders."""
    if CANDIDATE.search(line) and CANDIDATE.search(placeholder.sub("", line)):
        for keys, plugin in _plugins():
            if any(key in folded for key in keys):
                yield from (value for value in plugin.analyze_string(line) if value and not placeholder.search(value))
