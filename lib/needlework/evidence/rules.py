"""What counts as a secret or an identity: one pattern a kind. Read by `redaction`, which does the replacing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

# Names whose value is a secret, and names that only look so (an engine's log is full of "token").
SECRET_NAME = (
    r"(?:api[_-]?key|apikey|access[_-]?key(?:[_-]?id)?|account[_-]?key|secret[_-]?key|private[_-]?key|signing[_-]?key|"
    r"encryption[_-]?key|license[_-]?key|client[_-]?secret|secret[_-]?access[_-]?key|secret|auth[_-]?token|"
    r"access[_-]?token|refresh[_-]?token|id[_-]?token|bearer[_-]?token|session[_-]?token|hf[_-]?token|token|"
    r"passwd|password|passphrase|pwd|pgpassword|credentials?|session[_-]?id|sessionid|csrf[a-z_-]*|"
    r"webhook[_-]?url|connection[_-]?string|dsn)"
)
NOT_SECRET = re.compile(
    r"(?i)^(?:true|false|none|null|nil|undefined|yes|no|on|off|auto|default|disabled|enabled|required|optional|missing|"
    r"invalid|expired|unset|empty|redacted|\*+|x{3,}|\.\.\.|str|string|int|bool|bytes|\$\{?\w+\}?|%\w+%?|-?\d{1,6}(?:\.\d+)?|"
    r"\[.*|\{.*|\(.*)$"
)
HOST_SUFFIX = (
    "com|org|net|io|ai|dev|cloud|local|localdomain|internal|corp|lan|intra|intranet|edu|gov|mil|de|fr|uk|eu|cn|jp|kr|"
    "ch|nl|se|at|pl|us|ca|au|in|br|tech|systems|network|svc|compute|hpc|cluster|arpa"
)
PUBLIC_HOSTS = {"github.com", "huggingface.co", "www.apache.org", "docs.vllm.ai", "docs.sglang.ai", "docs.python.org"}
UNIT_SUFFIX = re.compile(r"\.(?:service|socket|timer|slice|target|mount|scope|path|device|swap)$")
COMMON_USERS = {"root", "nobody", "daemon", "bin", "sys", "www-data", "systemd", "user", "admin", "service", "ubuntu"}
FILE_NAME = re.compile(
    r"^[\w.+-]{1,80}\.(?:py|sh|service|conf|json|jsonl|toml|yaml|yml|log|md|txt|cu|cuh|so|safetensors|bin)$"
)


@dataclass(frozen=True)
class Rule:
    """One kind of secret: the pattern's group `s` (or the whole match) is replaced when `accept` agrees."""

    kind: str
    pattern: re.Pattern[str]
    accept: Callable[[str], bool] = bool


def _rx(text: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(text, flags)


def _address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    # Loopback and "any" say how a server is bound and name nobody.
    return not (address.is_loopback or address.is_unspecified)


def _secret_value(text: str) -> bool:
    return not NOT_SECRET.match(text) and not text.startswith("<")


def _token_value(text: str) -> bool:
    """A value after a bare "token": only when it looks made by a machine, for engines log tokens all day long."""
    return (
        _secret_value(text) and len(text) >= 10 and bool(re.search(r"\d", text)) and bool(re.search(r"[A-Za-z]", text))
    )


def _host(text: str) -> bool:
    return text.lower() not in PUBLIC_HOSTS and not re.fullmatch(r"[\d.]+", text)


QUOTE = r"""\\{0,7}(?:["']|&quot;|&#3[49];)?"""  # as JSON inside JSON inside HTML writes it
MARK = r"""\\{0,7}["']"""
CODE = r"(?:api|access|secret|private|auth)[ ](?:key|token)"
RULES: tuple[Rule, ...] = (
    Rule("private-key", _rx(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)")),
    Rule("cookie", _rx(rf"(?im)\b(?:set-)?cookie{QUOTE}\s*[:=]\s*{QUOTE}(?P<s>[\w.-]+=[^\r\n\"']+)"), _secret_value),
    Rule(
        "authorization",
        _rx(
            rf"(?i)\b(?:proxy-)?authorization{QUOTE}\s*[:=]\s*{QUOTE}(?:(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)\s+)?"
            r"(?P<s>[^\s\"',;\\]{4,})"
        ),
        _secret_value,
    ),
    Rule("authorization", _rx(r"(?i)\b(?:bearer|basic)\s+(?P<s>[A-Za-z0-9._~+/=-]{12,})"), lambda v: bool(re.search(r"[\d=._]", v))),
    Rule("credentials", _rx(r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<s>[^/\s@\"'<>]{1,200})@")),
    Rule(
        "url-secret",
        _rx(
            r"(?i)[?&](?:x-amz-(?:signature|credential|security-token)|api[_-]?key|key|token|access_token|id_token|sig|signature|"
            r"password|pass|secret|auth|code|sas|client_secret)=(?P<s>[^&\s\"'<>#]{3,})"
        ),
        _secret_value,
    ),
    Rule("webhook", _rx(r"https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/(?P<s>[\w/@.-]{10,})")),
    Rule("jwt", _rx(r"\beyJ[A-Za-z0-9_-]{5,}\.eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*")),
    Rule(
        "key",
        _rx(
            r"\b(?:sk-(?:ant-|proj-|or-|svcacct-|lf-)?[A-Za-z0-9_-]{16,}|(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}|gl(?:pat|dt|rt|cbt)-[A-Za-z0-9_-]{16,}|"
            r"hf_[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}|"
            r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|(?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|"
            r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dop_v1_[a-f0-9]{40,}|dckr_pat_[A-Za-z0-9_-]{20,}|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{30,}|"
            r"pplx-[A-Za-z0-9]{30,}|tgp_v1_[A-Za-z0-9_-]{30,}|fw_[A-Za-z0-9]{20,}|SK[a-f0-9]{32}|AC[a-f0-9]{32}|sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{20,}|"
            r"dapi[a-f0-9]{32}|lin_api_[A-Za-z0-9]{30,}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|glsa_[A-Za-z0-9_]{30,}|hvs\.[A-Za-z0-9_-]{20,}|"
            r"AGE-SECRET-KEY-1[A-Z0-9]{50,}|cfut_[A-Za-z0-9_-]{30,}|\d{8,10}:AA[A-Za-z0-9_-]{32,34}|[MNO][A-Za-z\d_-]{23,25}\.[\w-]{6}\.[\w-]{27,38})"
        ),
    ),
    # A list of arguments or of headers: '--api-key', 'VALUE' and (b'x-api-key', b'VALUE').
    Rule("secret", _rx(rf"(?i){MARK}--?[a-z0-9-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*{MARK}(?P<s>[^\s\"'\\]{{4,}})"), lambda v: _secret_value(v) and not v.startswith("-")),
    Rule("secret", _rx(rf"(?i){MARK}[a-z0-9_-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*b?{MARK}(?P<s>[^\s\"'\\]{{4,}})"), _token_value),
    # A pair of lines: name and value of a pod's environment, a block of YAML or TOML, a command line that goes on below.
    Rule("secret", _rx(rf"(?i)\b(?:name|key){QUOTE}\s*[:=]\s*{QUOTE}\w{{0,60}}?{SECRET_NAME}{QUOTE}\s{{0,40}},?\s{{0,40}}{QUOTE}value{QUOTE}\s*[:=]\s*{QUOTE}(?P<s>[^\s\"'\\,&<>]{{4,}})"), _secret_value),
    Rule("secret", _rx(rf"(?i)(?:\b|_){SECRET_NAME}\s*[:=]\s*(?:[|>][-+\d]{{0,2}}|\"{{3}}|'{{3}})[ \t]*\n[ \t]*(?P<s>[^\s\"'][^\n\"']{{3,}})"), _secret_value),
    Rule("secret", _rx(rf"(?i)(?<!\w)--?[a-z0-9-]{{0,40}}?{SECRET_NAME}[ \t]*\\\n[ \t]*{QUOTE}(?P<s>[^\s\"'\\]{{4,}})"), lambda v: _secret_value(v) and not v.startswith("-")),
    # Several values, values with blanks, and what URLs, XML and prose make of them.
    Rule("secret", _rx(rf"(?i)\b(?:api[_-]?key|secret|password|credential|(?:auth|api|access)[_-]?token)s?{QUOTE}\s*[:=]\s*\[\s{{0,40}}(?P<s>{MARK}[^\]\n]{{4,400}}{MARK})\s{{0,40}}\]"), _secret_value),
    Rule("secret", _rx(r"(?i)(?:password|passphrase|passwd|secret|api[_-]?key)\\{0,7}[\"']?\s*[:=]\s*(?P<q>\\{0,7}[\"'])(?P<s>[^\"'\\\n]{4,200})(?P=q)"), _secret_value),
    Rule("url-secret", _rx(rf"(?i){SECRET_NAME}%(?:25){{0,3}}3d(?P<s>[^&\s\"'%<>]{{4,}})"), _secret_value),
    Rule("credentials", _rx(r"(?i)%3a%2f%2f(?P<s>[^\s%\"'<>]{1,100}%3a[^\s%\"'<>]{1,100})%40")),
    Rule("secret", _rx(rf"(?i)<[\w:-]{{0,40}}?(?!token>){SECRET_NAME}>(?P<s>[^<>\s]{{4,}})</"), _secret_value),
    Rule("secret", _rx(rf"(?i){SECRET_NAME}{QUOTE}\s*(?:=>|->|:=|：|\||set to)\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>|]{{10,}})"), _token_value),
    Rule("secret", _rx(rf"(?i)\b{CODE}s?(?: provided| is| was)?\s*[:=]?\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{10,}})"), _token_value),
    Rule("secret", _rx(rf"(?<=[A-Z0-9]_)(?:PASS|PAT|CREDS)\s*[=:]\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{6,}})"), _secret_value),
    Rule("secret", _rx(rf"(?i)\bcurl\b[^\n]{{0,400}}?\s(?:-u|--user)[ =]?{QUOTE}[\w.@-]{{1,60}}:(?P<s>[^\s\"']{{3,}})"), _secret_value),
    Rule("secret", _rx(r"(?i)\b(?:requirepass|masterauth|login \S{1,60} password)\s+(?P<s>[^\s\"']{4,})"), _secret_value),
    Rule("secret", _rx(rf"\bauth{MARK}\s*:\s*{MARK}(?P<s>[A-Za-z0-9+/=]{{12,}}){MARK}"), _secret_value),
    Rule("user", _rx(r"(?i)(?:%2f|\\{1,7}/)(?:home|users)(?:%2f|\\{1,7}/)(?P<s>[\w.-]{2,32})")),
    Rule("user", _rx(r"(?i)\b[a-z]:\\{2,8}Users\\{2,8}(?P<s>[^\s\\\"':]{2,32})")),
    Rule("address", _rx(r"(?i)(?<=%2f)(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"), _address),
    # --api-key VALUE and --password=VALUE on a command line.
    Rule("secret", _rx(rf"(?i)(?<!\w)--?[a-z0-9-]*{SECRET_NAME}[ =]{QUOTE}(?P<s>[^\s\"'\\]{{4,}})"), lambda v: _secret_value(v) and not v.startswith("-")),
    # NAME=value, "name": "value", name: value; "token" alone is judged by its value.
    Rule("secret", _rx(rf"(?i)(?:\b|_)(?!token\b)[a-z0-9_.-]{{0,60}}?(?<![a-z])(?!token\b){SECRET_NAME}{QUOTE}\s*(?:=|:)\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{4,}})"), _secret_value),
    Rule("secret", _rx(rf"(?i)\btoken{QUOTE}\s*[=:]\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{6,}})"), _token_value),
    Rule("secret", _rx(r"(?i)\b(?:password|passphrase|passwd)\s+(?:is|was)\s+(?P<s>[^\s\"',;]{4,})"), _secret_value),
    Rule("email", _rx(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b"), lambda v: not UNIT_SUFFIX.search(v)),
    Rule("address", _rx(r"(?<![\w.-])(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)"), _address),
    Rule("address", _rx(r"(?i)(?<=\bip-)\d{1,3}(?:-\d{1,3}){3}\b")),
    Rule("address", _rx(r"(?i)(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])"), _address),
    Rule("mac", _rx(r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])")),
    Rule("host", _rx(rf"(?i)(?<![\w./-])(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w(.-]|\.\w)"), _host),
    Rule("host", _rx(rf"(?i)(?<=://)(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w-]|\.\w)"), _host),
    Rule("host", _rx(r"(?i)(?<=://)(?!localhost\b)[a-z][a-z0-9-]{2,62}(?=[:/\s\"']|$)"), lambda v: True),
    Rule("host", _rx(r"(?i)\b(?:hostname|_hostname|nodename|node[_-]?name|host[_-]?name|peer[_-]?host)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z][a-z0-9.-]{2,62})"), _secret_value),
    Rule("user", _rx(r"(?i)\b(?:user(?:name)?|logname|sudo_user|ssh_user|login)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z_][a-z0-9_.-]{1,31})\b"), lambda v: v.lower() not in COMMON_USERS and _secret_value(v)),
    Rule("user", _rx(r"(?i)\b(?:for|by) (?:invalid )?user (?P<s>[a-z_][a-z0-9_.-]{1,31})\b"), lambda v: v.lower() not in COMMON_USERS),
)  # fmt: skip
HOME_PATH = re.compile(r"(?:/home/|/Users/|/root/|~/|[A-Za-z]:\\Users\\)[^\s\"'`:,;|<>(){}\[\]]+")
LOGIN_AT = re.compile(r"(?<![\w.@/-])(?P<user>[a-z_][a-z0-9_-]{0,31})@(?P<host>[a-z0-9][a-z0-9.-]{2,62})(?![\w@])")
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
