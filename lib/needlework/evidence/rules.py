"""What counts as a secret or an identity: one pattern a kind, in the order in which `redaction` applies them."""

from __future__ import annotations

import re

from needlework.evidence.finder import Finder
from needlework.evidence.values import (
    Rule,
    any_address,
    dense,
    host_like,
    machine_made,
    not_switch,
    private_host,
    secret,
    token,
    user_name,
)

# Names whose value is a secret. "token" alone and short words are judged by their value: an engine's log is full of them.
STRONG = r"password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
SECRET_NAME = (
    r"(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key(?:[_-]?id)?|secret[_-]?access[_-]?key|(?:client[_-]?)?key[_-]?data|"
    r"(?:account|secret|signing|encryption|license|auth|app|master|shared|storage|deploy|subscription|functions?|routing|"
    r"recovery|pre[_-]?shared|consumer)[_-]?key|client[_-]?secret|api[_-]?secret|secret|"
    r"(?:auth|access|refresh|id|bearer|session|security|hf|sas|bot|user|push|deploy)[_-]?token|token|passwd|password|passphrase|"
    r"passcode|pwd(?![\"']?[=:][\"']?/)|pgpass|credentials?|session[_-]?id|csrf[a-z_-]*|webhook[_-]?url|connection[_-]?string|dsn|"
    r"dockerconfigjson|psk)"
    r"(?:s\b|[_-]?(?:\d{1,3}|prod(?:uction)?|dev|test|staging|primary|secondary|base|main|value|old|new)\b)?"
)
NAMED = rf"(?=[abcdefhiklmprstuw])(?:(?<![A-Za-z])|(?-i:(?<=[a-z0-9])(?=[A-Z]))|(?={STRONG}))(?!tokens?\b){SECRET_NAME}"
SHORT_NAME = (
    r"key|session|sid|sig|signature|c?nonce|response|code|auth|pat|jwt|bearer|hmac|otp|ticket|phpsessid|jsessionid|"
    r"oauth_\w{1,30}|x-auth[\w-]{0,20}|x-(?:amz|goog)-[\w-]{1,30}"
)
QUOTE = r"""\\{0,7}(?:["']|&quot;|&#3[49];)?"""  # as JSON inside JSON inside HTML writes it
MARK = r"""\\{0,7}["']"""
SEPARATOR = r"\s*(?:=>|:=|=(?!=)|:(?!:)|：)[ \t]*"
# A value in the open holds signs and inner quotes. It ends at a blank, at a quote that closes something, and at a sign
# that begins the next `name=`; after an environment variable only at the first two.
_SIGN = r"""[^\s"'\\<>;,&]|\\(?:\\|[^"'\\\s])|["'](?=\w)|<[a-z-]+-\d+>|<(?![/!])|>(?=\w)"""
_NEXT = r"""\\{0,7}["']?[A-Za-z_][\w.-]{0,40}\\{0,7}["']?\s?[:=]"""
_ENTITY = r"(?:quot|amp|lt|gt|apos|#\d{2,3}|#x[0-9A-Fa-f]{2});"
_NO_TAG = r"(?!<(?![a-z-]+-\d+>))"
OPEN = rf"{_NO_TAG}(?:{_SIGN}|[;,&](?!\s|$|{MARK}|{_NEXT}|{_ENTITY})){{1,2000}}"
OPEN_TO_BLANK = rf"{_NO_TAG}(?:{_SIGN}|[;,&>](?!\s|$|{MARK}|{_ENTITY})){{1,2000}}"
# In quotes: all up to the same quote, itself unescaped.
_CLOSED = r"(?:(?!(?<!\\)(?:(?P=q)|\"))[^\n]){3,400}"
VALUE = rf"(?:(?P<q>{MARK})(?={_CLOSED}(?P=q)))?(?(q)|{QUOTE})(?P<s>(?(q){_CLOSED}|{OPEN}))"
TO_BLANK = rf"(?:(?P<q>{MARK})(?={_CLOSED}(?P=q)))?(?(q)|{QUOTE})(?P<s>(?(q){_CLOSED}|{OPEN_TO_BLANK}))"
TRAILING = re.compile(
    r"""(?:[.,;:)\]}"'`!?]|\\(?=[.,;:)\]}"'`!?]|$))+$"""
)  # a sentence or a bracket ends here, not the value
CODE = r"(?:api|access|secret|private|auth|session|bearer)[ ](?:key|token)"

HOST_SUFFIX = (
    "com|org|net|io|ai|dev|cloud|local|localdomain|internal|corp|lan|intra|intranet|edu|gov|mil|de|fr|uk|eu|cn|jp|kr|"
    "ch|nl|se|at|pl|us|ca|au|in|br|tech|systems|network|svc|compute|hpc|cluster|arpa"
)
UNIT_SUFFIX = re.compile(r"\.(?:service|socket|timer|slice|target|mount|scope|path|device|swap)$")
FILE_NAME = re.compile(
    r"^[\w.+-]{1,80}\.(?:py|sh|service|conf|json|jsonl|toml|yaml|yml|log|md|txt|cu|cuh|so|safetensors|bin)$"
)


def _tool(names: str, flag: str, value: str = TO_BLANK) -> Rule:
    """The value of a short flag that means a password for these programs only, in a shell or in a list of arguments."""
    return Rule("secret", Finder(rf"\b(?:{names})\b[^\n|]{{0,300}}?(?<=[\s\"'])(?:{flag})(?:{MARK}\s*,\s*)?{value}"), not_switch, whole=True)  # fmt: skip


RULES: tuple[Rule, ...] = (
    Rule("private-key", Finder(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)")),
    Rule("private-key", Finder(r"(?m)^[ \t]*(?P<s>(?:[A-Za-z0-9+/]{64}\n[ \t]*){2,200}[A-Za-z0-9+/]{1,64}={0,2})(?![\w+/=])", stands={"\n": r"\n(?<=[a-z0-9+/]{64}\n)"}), dense),
    Rule("cookie", Finder(rf"(?im)\b(?:set-)?cookie{QUOTE}\s*[:=]\s*{QUOTE}(?P<s>[\w.-]+=[^\r\n\"']+)"), secret),
    Rule("cookie", Finder(rf"(?i)\bcurl\b[^\n]{{0,400}}?\s(?:-b|--cookie)[ =]?{QUOTE}(?P<s>[\w.-]+=[^\r\n\"']+)"), secret),
    Rule(
        "authorization",
        Finder(
            rf"(?i)\b(?:proxy-)?authorization{QUOTE}\s*[:=]\s*{QUOTE}(?:(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)\s+)?"
            r"(?P<s>[^\s\"',;\\]{4,})"
        ),
        secret,
    ),
    Rule("authorization", Finder(r"(?i)\b(?:bearer|basic|auth (?:plain|login))\s+(?P<s>[A-Za-z0-9._~+/=-]{12,})"), lambda v: bool(re.search(r"[\d=._]", v))),
    # The last @ before a blank ends what a URL carries for logging in: passwords hold @, / and ?.
    Rule("credentials", Finder(r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<s>[^\s/:@\"'<>]{0,100}:(?!\d{1,5}/)[^\s\"'<>]{1,200})@(?=[\w\[(])")),
    Rule("credentials", Finder(r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<s>[^/\s@\"'<>]{1,200})@")),
    Rule(
        "url-secret",
        Finder(
            r"(?i)[?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|api[_-]?key|key|token|access_token|id_token|sig|signature|"
            r"password|pass|pwd|secret|auth|code|sas|client_secret)=(?P<s>[^&\s\"'<>#]{3,})"
        ),
        secret,
        whole=True,
    ),
    Rule("webhook", Finder(r"https://(?:hooks\.slack\.com/services|hooks\.zapier\.com/hooks/catch|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/(?P<s>[\w/@.-]{10,})")),
    Rule("url-secret", Finder(r"/t/(?P<s>[\w-]{16,})/"), token),
    Rule("jwt", Finder(r"\bv[1-4]\.(?:local|public)\.[A-Za-z0-9_-]{20,}")),
    Rule("jwt", Finder(r"\beyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){2,4}")),
    Rule(
        "key",
        Finder(
            r"(?<![A-Za-z0-9])(?:sk-(?:ant-|proj-|or-|svcacct-|lf-)?[A-Za-z0-9_-]{16,}|(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}|gl(?:pat|dt|rt|cbt)-[A-Za-z0-9_-]{16,}|"
            r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}|"
            r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,}|(?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|"
            r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dop_v1_[a-f0-9]{40,}|dckr_pat_[A-Za-z0-9_-]{20,}|r8_[A-Za-z0-9]{30,}|(?:gsk|xai|csk)[_-][A-Za-z0-9]{30,}|"
            r"pplx-[A-Za-z0-9]{30,}|tgp_v1_[A-Za-z0-9_-]{30,}|fw_[A-Za-z0-9]{20,}|SK[a-f0-9]{32}|AC[a-f0-9]{32}|sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{20,}|"
            r"dapi[a-f0-9]{32}|lin_api_[A-Za-z0-9]{30,}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|gl(?:sa|c)_[A-Za-z0-9_+/=]{30,}|hv[sbr]\.[A-Za-z0-9_-]{20,}|s\.[A-Za-z0-9]{24}(?!\w)|"
            r"[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}|AGE-SECRET-KEY-1[A-Z0-9]{50,}|cfut_[A-Za-z0-9_-]{30,}|(?:bot)?\d{8,10}:AA[A-Za-z0-9_-]{32,34}|[MNO][A-Za-z\d_-]{23,25}\.[\w-]{6}\.[\w-]{27,38})",
            stands={".": r"\.(?=[\w-]{6}\.[\w-]{27})"},
        ),
    ),
    Rule("public-key", Finder(r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-nistp\d+)\s+(?P<s>AAAA[A-Za-z0-9+/=]{16,})")),
    # A list of arguments or of headers: '--api-key', 'VALUE' and (b'x-api-key', b'VALUE').
    Rule("secret", Finder(rf"(?i){MARK}--?[a-z0-9-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*{MARK}(?P<s>[^\s\"'\\]{{4,}})"), not_switch),
    Rule("secret", Finder(rf"(?i){MARK}(?=[\w-]{{3,80}}{MARK}\s*,)[a-z0-9_-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*b?{MARK}(?P<s>[^\s\"'\\]{{4,}})"), token),
    # Several lines: name and value of a pod's environment, a block or a list of YAML, a command line that goes on below.
    Rule("secret", Finder(rf"(?i)\b(?:name|key){QUOTE}\s*[:=]\s*{QUOTE}\w{{0,60}}?(?:{SECRET_NAME}|pass|creds){QUOTE}\s{{0,40}},?\s{{0,40}}{QUOTE}value{QUOTE}\s*[:=]\s*{VALUE}"), secret, whole=True),
    Rule("secret", Finder(rf"(?im)^(?P<i>[ \t]*)(?:-[ \t]+)?[\"']?[\w.-]{{0,60}}?{NAMED}[\"']?\s*:[ \t]*[|>][-+\d]{{0,2}}[ \t]*\n(?P<s>(?:(?P=i)[ \t]+\S[^\n]*\n?){{1,60}})"), secret, whole=True),
    Rule("secret", Finder(rf"(?im)^(?P<i>[ \t]*)[\"']?[\w.-]{{0,60}}?(?:{NAMED}|tokens)[\"']?:[ \t]*\n(?P<s>(?:(?P=i)[ \t]*-[ \t]+\S[^\n]*\n?){{1,60}})"), token, whole=True),
    Rule("secret", Finder(rf"(?i){NAMED}\s*[:=]\s*(?:\"{{3}}|'{{3}})[ \t]*\n?[ \t]*(?P<s>[^\s\"'][^\n\"']{{3,}})"), secret),
    Rule("secret", Finder(rf"(?i)-(?<!\w-)-?[a-z0-9-]{{0,40}}?{SECRET_NAME}[ \t]*\\\n[ \t]*{VALUE}"), not_switch),
    Rule("secret", Finder(r"(?i)\b(?:machine|login|account)\s{1,20}\S{1,100}(?:\s{1,20}(?:login|account)\s{1,20}\S{1,100})?\s{1,20}password\s{1,20}(?P<s>\S{3,200})"), secret, whole=True),
    # .pgpass: host:port:database:user:password
    Rule("secret", Finder(r"(?m)^[^\s:/]{1,100}:(?:\d{2,5}|\*):[^\s:]{1,60}:[^\s:]{1,60}:(?P<s>\S{3,200})$", stands={":": r":(?=(?:\d{2,5}|\*):[^\s:]+:[^\s:]+:)"}), secret, whole=True),
    # Programs whose password has a flag of one letter.
    _tool(r"mysql\w*|mariadb[\w-]*|mycli|xtrabackup|7z[az]?|rar", "-p"),
    _tool(r"redis-cli|keydb-cli|valkey-cli", r"-a\s?|--pass\s"),
    _tool(r"sshpass|mongo\w*|(?:docker|podman|nerdctl|buildah|skopeo|helm registry|oc|az|cf)\W{1,4}login|cqlsh|influx|7z[az]?|kinit|az ad", r"-p\s?|--pw\s"),
    _tool(r"sqlcmd|bcp|ipmitool|mosquitto_\w+|zip|unzip|ssh-keygen|isql", r"-[PN]\s?"),
    _tool(r"ldap\w{3,10}", r"-w\s?"),
    _tool(r"snmp\w{3,10}", r"-[cAX]\s?"),
    _tool(r"openssl", r"(?:-pass(?:in|out)?\s)?pass:|-k\s"),
    _tool(r"smbclient|rpcclient|winexe|net|mount\.cifs", r"-U\s?\S{1,40}?%"),
    _tool(r"lftp|ncftp", r"-u\s?[^\s,]{1,40},"),
    _tool(r"curl|http|https|wget|ab", rf"(?:-u|-a|-U|--user|--proxy-user|--auth)[ =]?(?P<q>{MARK})[\w.@\\-]{{1,60}}:", value=rf"(?P<s>{_CLOSED})(?P=q)"),
    _tool(r"curl|http|https|wget|ab", r"(?:-u|-a|-U|--user|--proxy-user|--auth)[ =]?\\{0,7}[\"']?[\w.@\\-]{1,60}:"),
    _tool(r"sqlplus|rman|impdp|expdp|sqlldr", r"\w{1,40}/", value=r"(?P<s>\S{3,100})(?=@)"),
    Rule("secret", Finder(rf"\b(?:rabbitmqctl\s+(?:add_user|change_password)\s+\S+|wpa_passphrase\s+\S+|htpasswd\s+-\w*b\w*\s+(?:-\w+\s+)*\S+\s+\S+|mc\s+alias\s+set(?:\s+\S+){{3}}|vault\s+login|vault\s+kv\s+put\s+\S+\s+\w+=|net\s+use(?:\s+\S+){{1,3}}\s+/user:\S+)(?:(?<==)|\s+){TO_BLANK}"), not_switch, whole=True),
    Rule("secret", Finder(rf"(?i)\baws\s+configure\s+set\s+\S*(?:key|token)\s+{TO_BLANK}"), secret, whole=True),
    Rule("secret", Finder(rf"--from-literal[ =]{QUOTE}[\w.-]{{1,100}}={TO_BLANK}"), secret, whole=True),
    Rule("secret", Finder(rf"(?im)^\s*(?:env|setenv|setx|set)\s+(?:-\w+\s+)*\w{{0,60}}?(?:{SECRET_NAME}|pass)\s+{TO_BLANK}"), secret, whole=True),
    Rule("secret", Finder(r"(?i)\b(?:echo|printf|<<<)\s*[\"']?\w[\w.-]{0,31}:(?P<s>[^\s\"']{3,})[\"']?\s*\|\s*(?:sudo\s+)?chpasswd"), secret, whole=True),
    # Several values, and what URLs, XML, SQL and prose make of them.
    Rule("secret", Finder(rf"(?i)\b(?:api[_-]?key|secret|password|credential|(?:auth|api|access)[_-]?token)s?{QUOTE}\s*[:=]\s*\[\s{{0,40}}(?P<s>{MARK}[^\]\n]{{4,400}}{MARK})\s{{0,40}}\]"), secret),
    Rule("secret", Finder(rf"(?i)<[\w:-]{{0,40}}?(?!token\b){SECRET_NAME}(?:\s[^<>\n]{{0,100}})?>(?P<s>[^<>\n]{{4,200}})</"), secret, whole=True),
    Rule("secret", Finder(rf"(?i)\b(?:name|key|id)\s?=\s?{MARK}[\w.-]{{0,60}}?{SECRET_NAME}{MARK}[^<>\n]{{0,60}}>(?P<s>[^<>\n]{{4,200}})<"), secret, whole=True),
    Rule("secret", Finder(rf"(?i)<key>[\w.-]{{0,60}}?{SECRET_NAME}</key>\s{{0,40}}<string>(?P<s>[^<>\n]{{4,200}})<"), secret, whole=True),
    Rule("secret", Finder(rf"(?i){NAMED}{QUOTE}\s*(?:->|\||set to)\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>|]{{10,}})"), token),
    Rule("secret", Finder(rf"(?i)\b{CODE}s?(?: provided| is| was)?\s*[:=]?\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{8,}})"), token),
    Rule("secret", Finder(rf"(?i)\bidentified\s+(?:with\s+\S+\s+)?by\s+(?:password\s+)?{VALUE}"), secret, whole=True),
    Rule("secret", Finder(r"(?i)\b(?:requirepass|masterauth|bindpw|(?:wandb|modal|replicate) login|login \S{1,60} password)\s+(?P<s>[^\s\"']{4,})"), not_switch),
    Rule("secret", Finder(r"\buser \S{1,60} [^\n]{0,80}?[ ]>(?P<s>[^\s\"']{3,})"), secret, whole=True),
    Rule("secret", Finder(rf"\bauth{MARK}\s*:\s*{MARK}(?P<s>[A-Za-z0-9+/=]{{12,}}){MARK}"), secret),
    # --api-key VALUE and --password=VALUE on a command line, also one word a line, as /proc gives it.
    Rule("secret", Finder(rf"(?i)-(?<!\w-)-?(?:[a-z0-9-]*{SECRET_NAME}|pass)(?:[ =]|\n[ \t]*){TO_BLANK}"), not_switch, whole=True),
    # One quoted argument: -e "PASSWORD=two words". After a colon the quotes are those of a JSON text, which goes on.
    Rule("secret", Finder(rf"(?i)(?<=[\s=])(?<!: )(?P<q>[\"'])[\w.-]{{0,60}}?(?:{NAMED}|pass|pw)=(?P<s>[^\"'\n]{{3,400}})(?P=q)"), secret, whole=True),
    # NAME=value as in an environment, then name=value, "name": "value", name: value wherever they stand.
    Rule("secret", Finder(rf"(?-i:(?=[A-Z0-9_]+=)){NAMED}={TO_BLANK}", re.IGNORECASE), secret, whole=True),
    Rule("secret", Finder(rf"(?<![A-Za-z])(?:PASS|PAT|CREDS|PW)(?:_?\d)?={TO_BLANK}"), secret, whole=True),
    Rule("secret", Finder(rf"(?i){NAMED}(?:\"|')?\]?{QUOTE}{SEPARATOR}{VALUE}"), secret, whole=True),
    Rule("secret", Finder(rf"(?i){MARK}[\w.-]{{0,40}}?{NAMED}{MARK}[ \t]*:[ \t]*\n[ \t]*(?=[\"']){VALUE}"), secret, whole=True),
    Rule("secret", Finder(rf"(?im){NAMED}{QUOTE}(?:\t|:[ \t]*\n)[ \t]*(?P<s>\S{{4,200}})$"), token, whole=True),
    Rule("secret", Finder(rf"(?i)(?<![A-Za-z])(?:pass|pw|creds|userpass){QUOTE}\s*=[ \t]*{VALUE}"), secret, whole=True),
    Rule("secret", Finder(rf"(?i){MARK}(?:[\w-]{{0,40}}_)?(?:pass|pw|creds){MARK}\s*:\s*{VALUE}"), secret, whole=True),
    Rule("secret", Finder(rf"(?i)(?<![A-Za-z])(?:pass|pw|creds|pat):[ \t]*{VALUE}"), token, whole=True),
    Rule("secret", Finder(rf"(?<=[A-Z0-9]_)TOKEN={TO_BLANK}"), secret, whole=True),
    Rule("secret", Finder(rf"(?i)(?<![A-Za-z])token{QUOTE}{SEPARATOR}{VALUE}"), token, whole=True),
    Rule("secret", Finder(rf"(?i)(?<![A-Za-z.])(?:{SHORT_NAME}){QUOTE}{SEPARATOR}{VALUE}"), machine_made, whole=True),
    Rule("secret", Finder(r"(?i)\b(?:key|token|secret)\s+(?:is|was)\s+(?P<s>[^\s\"',;]{4,})"), machine_made),
    Rule("secret", Finder(r"(?i)\b(?:password|passphrase|passwd)\s+(?:is|was)\s+(?P<s>[^\s\"',;]{4,})"), secret),
    Rule("secret", Finder(r"(?i)\b(?:password|passphrase|passwd|passcode|token|secret)\s+(?P<q>[\"'`])(?P<s>[^\"'`\n]{4,100})(?P=q)"), secret),
    Rule("secret", Finder(r"(?i)\b(?:with|using|the) (?:password|passphrase|passwd|passcode)\s+(?P<s>[^\s\"',;]{6,100})"), token),
    Rule("email", Finder(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b"), lambda v: not UNIT_SUFFIX.search(v)),
    Rule("address", Finder(r"(?<![\w.-])(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", stands={".": r"\.(?=\d{1,3}\.\d{1,3}\.\d)"}), any_address),
    Rule("address", Finder(r"(?<=>-)(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)"), any_address),
    Rule("address", Finder(r"(?i)(?<=\bip-)\d{1,3}(?:-\d{1,3}){3}\b")),
    Rule("address", Finder(r"(?i)(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%(?:25)?[a-z][\w.-]{0,20})?(?![\w:])", stands={":": r":(?=[0-9a-f]{0,4}:)"}), any_address),
    Rule("mac", Finder(r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])", stands={sign: sign + r"(?=[0-9a-f]{2}[:-][0-9a-f]{2}[:-])" for sign in ":-"})),
    Rule("mac", Finder(r"(?i)(?<![\w.])(?=[0-9.]*[a-f])[0-9a-f]{4}\.[0-9a-f]{4}\.[0-9a-f]{4}(?![\w.])", stands={".": r"\.(?=[0-9a-f]{4}\.[0-9a-f]{4})"})),
    Rule("mac", Finder(r"(?i)\bguid[\"']?\s*[:=]\s*[\"']?(?P<s>(?:0x)?[0-9a-f]{4}(?:[:-]?[0-9a-f]{4}){3})\b")),
    Rule("host", Finder(rf"(?i)(?<![\w./-])(?<!from )(?<!import )(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w(.-]|\.\w)", stands={".": rf"\.(?=(?:[^\W_][a-z0-9-]{{0,62}}\.){{0,5}}(?:{HOST_SUFFIX})(?![\w(.-]))"}), private_host),
    Rule("host", Finder(rf"(?i)(?<=://)(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w-]|\.\w)"), private_host),
    Rule("host", Finder(r"(?i)(?<=://)(?!localhost\b|www\b)[a-z][a-z0-9-]{2,62}(?=[:/\s\"']|$)")),
    Rule("host", Finder(r"(?i)\b(?:hostname|_hostname|nodename|node[_-]?name|host[_-]?name|peer[_-]?host|rhost)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z][a-z0-9.-]{2,62})"), secret),
    Rule("host", Finder(r"(?i)(?<![a-z-])(?:[a-z_]{0,30}_)?(?:host|master_addr|rdzv_endpoint)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z][a-z0-9-]{2,62})(?![\w.(\[])"), host_like),
    Rule("host", Finder(r"\b(?:ssh|sftp|mosh)\s+(?:-[1246AaCfGgKkMNnqsTtVvXxYy]+\s+|-[bcDEeFIiJLlmOopQRSWw]\s*\S+\s+){0,8}(?P<s>[A-Za-z][A-Za-z0-9-]{2,62})(?=\s|$|[\"'])"), host_like),
    Rule("host", Finder(r"\b(?:scp|rsync)\b[^\n]{0,200}?\s(?P<s>[A-Za-z][A-Za-z0-9-]{2,62})(?=:[/~.\w])"), host_like),
    Rule("host", Finder(r"(?<![\w\\])\\{2,4}(?P<s>[A-Za-z][\w-]{1,62})(?=\\{1,2}[\w$]+)"), host_like),
    Rule("user", Finder(r"(?i)\b(?:user(?:name)?|logname|sudo_user|ssh_user|login|ruser|acct)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z_][a-z0-9_.-]{1,31})\b"), user_name),
    Rule("user", Finder(r"(?i)\b(?:for|by) (?:invalid )?user (?P<s>[a-z_][a-z0-9_.-]{1,31})\b"), user_name),
    Rule("user", Finder(r"\b(?:Accepted|Failed) [\w/-]+ for (?:invalid user )?(?P<s>[\w.-]{2,32}) from\b"), user_name),
    Rule("user", Finder(r"\b[ug]id=\d+\((?P<s>[\w.-]{2,32})\)"), user_name),
    Rule("user", Finder(r"\bsudo(?:\[\d+\])?:\s+(?P<s>[a-z_][\w.-]{1,31}) : "), user_name),
    Rule("user", Finder(r"\bssh\s[^\n]{0,100}?-l\s*(?P<s>[a-z_][\w.-]{1,31})\b"), user_name),
    # Bytes as text, wherever they stand.
    Rule("key", Finder(r"(?<![\w+/=.-])[A-Za-z0-9+/]{32,}={0,2}(?![\w+/=])"), dense),
)  # fmt: skip
HOME_PATH = Finder(
    r"(?:/home/|/Users/|/root/|~(?:[a-z_][\w-]{0,31})?/|[A-Za-z]:(?:\\{1,8}|/)Users(?:\\{1,8}|/)(?:[\w.-]+(?: [\w.-]+){1,3}(?=[\\/]))?)"
    r"[^\s\"'`:,;|<>(){}\[\]]+"
)
LOGIN_AT = Finder(r"(?i)(?<![\w.@/-])(?P<user>[a-z_][a-z0-9_-]{0,31})@(?P<host>[a-z0-9][a-z0-9.-]{2,62})(?![\w@])")
