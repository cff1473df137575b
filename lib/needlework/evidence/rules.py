"""What counts as a secret or an identity: one pattern a kind, in the order in which `redaction` applies them."""

from __future__ import annotations

import re

from needlework.evidence.values import (
    Rule,
    any_address,
    dense,
    host_like,
    machine_made,
    mixed,
    not_level,
    not_switch,
    numbered,
    private_host,
    secret,
    token,
    user_name,
)

# What stands in every match of SECRET_NAME, and of SHORT_NAME below.
NAMES = "key secret token passw passphrase passcode pwd pgpass credential session csrf webhook connection dsn dockerconfigjson psk"
_TOKENS = (
    "auth",
    "access",
    "refresh",
    "id",
    "bearer",
    "session",
    "security",
    "hf",
    "sas",
    "bot",
    "user",
    "push",
    "deploy",
)
# NAMED leaves out "token" alone, which engines say in every line.
NAMED_KEYS = (
    NAMES.replace(" token", "") + " token_ token- " + " ".join(f"{a}{b}token" for a in _TOKENS for b in ("", "_", "-"))
)
SHORT_KEYS = "key session sid sig nonce response code auth pat jwt bearer hmac otp ticket oauth_ x-amz- x-goog-"
ENDS = "".join(
    f"{name}\n {name} \n "
    for name in ("key", "secret", "token", "passwd", "password", "passphrase", "pass", "credential", "credentials")
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
SEPARATOR = r"\s*(?:=>|:=|[=＝](?!=)|:(?!:)|：)[ \t\u00a0\u3000]*"
# The words for a password in other languages, and for an access key.
LABELS = (
    "пароль|ключ доступа|密码|密碼|口令|密钥|密鑰|秘钥|パスワード|暗証番号|비밀번호|암호|passwort|kennwort|zugangsschlüssel|api-schlüssel|"
    "mot de passe|clé d'api|contraseña|contrasena|senha|parola|hasło|heslo|wachtwoord|lösenord|adgangskode|salasana|şifre|jelszó|"
    "mật khẩu|รหัสผ่าน|كلمة المرور|סיסמה|κωδικός"
)
LABEL_KEYS = " ".join(label.split()[-1] for label in LABELS.split("|"))
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


def _tool(keys: str, names: str, flag: str, value: str = TO_BLANK) -> Rule:
    """The value of a short flag that means a password for these programs only, in a shell or in a list of arguments."""
    source = rf"\b(?:{names})\b[^\n|]{{0,300}}?(?<=[\s\"'])(?:{flag})(?:{MARK}\s*,\s*)?{value}"
    return Rule("secret", keys, source, not_switch, whole=True)


# Keys that tell whose they are: the marks, lower case, of which each holds one; then the form.
KEY_FORMS = {
    "sk- sk_ rk_ pk_": r"sk-(?:ant-|proj-|or-|svcacct-|lf-)?[A-Za-z0-9_-]{16,}|[srp]k_(?:live_|test_)?[A-Za-z0-9]{16,}",
    "gho_ ghp_ ghr_ ghs_ ghu_ github_pat_": r"(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}",
    "glpat- gldt- glrt- glcbt- glsa_ glc_": r"gl(?:pat|dt|rt|cbt)-[A-Za-z0-9_-]{16,}|gl(?:sa|c)_[A-Za-z0-9_+/=]{30,}",
    "hf_ api_org_": r"(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "nvapi-": r"nvapi-[A-Za-z0-9_-]{20,}",
    "xox xapp-": r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}",
    "akia asia aroa aida abia acca": r"(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}",
    "aiza ya29. gocspx- 1//0": r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,}",
    "whsec_ sg.": r"whsec_[A-Za-z0-9]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "npm_ pypi- r8_": r"(?:npm_|r8_)[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}",
    "dop_v1_ dckr_pat_ tgp_v1_": r"dop_v1_[a-f0-9]{40,}|dckr_pat_[A-Za-z0-9_-]{20,}|tgp_v1_[A-Za-z0-9_-]{30,}",
    "gsk_ gsk- xai_ xai- csk_ csk- pplx- fw_": r"(?:(?:gsk|xai|csk)[_-]|pplx-)[A-Za-z0-9]{30,}|fw_[A-Za-z0-9]{20,}",
    "sq0atp- sq0csp- sq0idp-": r"sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{20,}",
    "dapi lin_api_": r"dapi[a-f0-9]{32}|lin_api_[A-Za-z0-9]{30,}",
    "shpat_ shpca_ shppa_ shpss_": r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}",
    "hvs. hvb. hvr.": r"hv[sbr]\.[A-Za-z0-9_-]{20,}",
    "q~": r"[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}",
    "age-secret-key-1 cfut_": r"AGE-SECRET-KEY-1[A-Z0-9]{50,}|cfut_[A-Za-z0-9_-]{30,}",
    ":aa": r"(?:bot)?\d{8,10}:AA[A-Za-z0-9_-]{32,34}",
}
RULES: tuple[Rule, ...] = (
    Rule("private-key", "private", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", lines=200),
    Rule("private-key", "\n", r"(?m)^[ \t]*(?P<s>(?:[A-Za-z0-9+/]{64}\n[ \t]*){2,200}[A-Za-z0-9+/]{1,64}={0,2})(?![\w+/=])", dense, lines=202),
    Rule("cookie", "cookie", rf"(?im)\b(?:set-)?cookie{QUOTE}\s*[:=]\s*{QUOTE}(?P<s>[\w.-]+=[^\r\n\"']+)", secret),
    Rule("cookie", "curl", rf"(?i)\bcurl\b[^\n]{{0,400}}?\s(?:-b|--cookie)[ =]?{QUOTE}(?P<s>[\w.-]+=[^\r\n\"']+)", secret),
    Rule(
        "authorization",
        "authorization",
        rf"(?i)\b(?:proxy-)?authorization{QUOTE}\s*[:=]\s*{QUOTE}(?:(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)\s+)?"
        r"(?P<s>[^\s\"',;\\]{4,})",
        secret,
    ),
    Rule("authorization", "bearer basic auth", r"(?i)\b(?:bearer|basic|auth (?:plain|login))\s+(?P<s>[A-Za-z0-9._~+/=-]{12,})", lambda v: bool(re.search(r"[\d=._]", v))),
    # The last @ before a blank ends what a URL carries for logging in: passwords hold @, / and ?.
    Rule("credentials", "://", r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<s>[^\s/:@\"'<>]{0,100}:(?!\d{1,5}/)[^\s\"'<>]{1,200})@(?=[\w\[(])"),
    Rule("credentials", "://", r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<s>[^/\s@\"'<>]{1,200})@"),
    Rule(
        "url-secret",
        "=",
        r"(?i)[?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|api[_-]?key|key|token|access_token|id_token|sig|signature|"
        r"password|pass|pwd|secret|auth|code|sas|client_secret)=(?P<s>[^&\s\"'<>#]{3,})",
        secret,
        whole=True,
    ),
    Rule("webhook", "hooks. webhook", r"https://(?:hooks\.slack\.com/services|hooks\.zapier\.com/hooks/catch|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/(?P<s>[\w/@.-]{10,})"),
    Rule("url-secret", "/t/", r"/t/(?P<s>[\w-]{16,})/", token),
    Rule("jwt", ".local. .public.", r"\bv[1-4]\.(?:local|public)\.[A-Za-z0-9_-]{20,}"),
    Rule("jwt", "eyj", r"\beyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){2,4}"),
    Rule("key", " ".join(KEY_FORMS), rf"(?<![A-Za-z])(?:{'|'.join(KEY_FORMS.values())})"),
    # A first sign is looked for quickest where the pattern begins with it; what may not stand before it comes after.
    Rule("key", "", r"[AS](?<![A-Za-z].)[CK][a-f0-9]{32}|s(?<![A-Za-z].)\.[A-Za-z0-9]{24}(?!\w)"),
    Rule("key", "", r"[MNO](?<![A-Za-z0-9].)[A-Za-z\d_-]{23,25}\.[\w-]{6}\.[\w-]{27,38}"),
    Rule("public-key", "ssh- ecdsa-", r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-nistp\d+)\s+(?P<s>AAAA[A-Za-z0-9+/=]{16,})"),
    # A list of arguments or of headers: '--api-key', 'VALUE' and (b'x-api-key', b'VALUE').
    Rule("secret", "\"- '-", rf"(?i){MARK}--?[a-z0-9-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*{MARK}(?P<s>[^\s\"'\\]{{4,}})", not_switch, lines=2),
    Rule("secret", NAMES, rf"(?i){MARK}(?=[\w-]{{3,80}}{MARK}\s*,)[a-z0-9_-]{{0,40}}?{SECRET_NAME}{MARK}\s*,\s*b?{MARK}(?P<s>[^\s\"'\\]{{4,}})", token),
    # Several lines: name and value of a pod's environment, a block or a list of YAML, a command line that goes on below.
    Rule("secret", "name key", rf"(?i)\b(?:name|key){QUOTE}\s*[:=]\s*{QUOTE}\w{{0,60}}?(?:{SECRET_NAME}|pass|creds){QUOTE}\s{{0,40}},?\s{{0,40}}{QUOTE}value{QUOTE}\s*[:=]\s*{VALUE}", secret, whole=True, lines=8),
    Rule("secret", "\n", rf"(?im)^(?P<i>[ \t]*)(?:-[ \t]+)?[\"']?[\w.-]{{0,60}}?{NAMED}[\"']?\s*:[ \t]*[|>][-+\d]{{0,2}}[ \t]*\n(?P<s>(?:(?P=i)[ \t]+\S[^\n]*\n?){{1,60}})", secret, whole=True, lines=62),
    Rule("secret", "\n", rf"(?im)^(?P<i>[ \t]*)[\"']?[\w.-]{{0,60}}?(?:{NAMED}|tokens)[\"']?:[ \t]*\n(?P<s>(?:(?P=i)[ \t]*-[ \t]+\S[^\n]*\n?){{1,60}})", token, whole=True, lines=62),
    Rule("secret", "\"\"\" '''", rf"(?i){NAMED}\s*[:=]\s*(?:\"{{3}}|'{{3}})[ \t]*\n?[ \t]*(?P<s>[^\s\"'][^\n\"']{{3,}})", secret, lines=3),
    Rule("secret", "\\\n", rf"(?i)-(?<!\w-)-?[a-z0-9-]{{0,40}}?{SECRET_NAME}[ \t]*\\\n[ \t]*{VALUE}", not_switch, lines=2),
    Rule("secret", "machine login account", r"(?i)\b(?:machine|login|account)\s{1,20}\S{1,100}(?:\s{1,20}(?:login|account)\s{1,20}\S{1,100})?\s{1,20}password\s{1,20}(?P<s>\S{3,200})", secret, whole=True, lines=12),
    # .pgpass: host:port:database:user:password
    Rule("secret", "", r"(?m)^[^\s:/]{1,100}:(?:\d{2,5}|\*):[^\s:]{1,60}:[^\s:]{1,60}:(?P<s>\S{3,200})$", secret, whole=True),
    # Programs whose password has a flag of one letter.
    _tool("mysql mariadb mycli xtrabackup 7z rar", r"mysql\w*|mariadb[\w-]*|mycli|xtrabackup|7z[az]?|rar", "-p"),
    _tool("redis-cli keydb-cli valkey-cli", r"redis-cli|keydb-cli|valkey-cli", r"-a\s?|--pass\s"),
    _tool("sshpass mongo login cqlsh influx 7z kinit az", r"sshpass|mongo\w*|(?:docker|podman|nerdctl|buildah|skopeo|helm registry|oc|az|cf)\W{1,4}login|cqlsh|influx|7z[az]?|kinit|az ad", r"-p\s?|--pw\s"),
    _tool("sqlcmd bcp ipmitool mosquitto_ zip ssh-keygen isql", r"sqlcmd|bcp|ipmitool|mosquitto_\w+|zip|unzip|ssh-keygen|isql", r"-[PN]\s?"),
    _tool("ldap", r"ldap\w{3,10}", r"-w\s?"),
    _tool("snmp", r"snmp\w{3,10}", r"-[cAX]\s?"),
    _tool("openssl", r"openssl", r"(?:-pass(?:in|out)?\s)?pass:|-k\s"),
    _tool("smbclient rpcclient winexe net mount.cifs", r"smbclient|rpcclient|winexe|net|mount\.cifs", r"-U\s?\S{1,40}?%"),
    _tool("ftp", r"lftp|ncftp", r"-u\s?[^\s,]{1,40},"),
    _tool("curl http wget ab", r"curl|http|https|wget|ab", rf"(?:-u|-a|-U|--user|--proxy-user|--auth)[ =]?(?P<q>{MARK})[\w.@\\-]{{1,60}}:", value=rf"(?P<s>{_CLOSED})(?P=q)"),
    _tool("curl http wget ab", r"curl|http|https|wget|ab", r"(?:-u|-a|-U|--user|--proxy-user|--auth)[ =]?\\{0,7}[\"']?[\w.@\\-]{1,60}:"),
    _tool("sqlplus rman impdp expdp sqlldr", r"sqlplus|rman|impdp|expdp|sqlldr", r"\w{1,40}/", value=r"(?P<s>\S{3,100})(?=@)"),
    Rule("secret", "rabbitmqctl wpa_ htpasswd alias vault /user:", rf"\b(?:rabbitmqctl\s+(?:add_user|change_password)\s+\S+|wpa_passphrase\s+\S+|htpasswd\s+-\w*b\w*\s+(?:-\w+\s+)*\S+\s+\S+|mc\s+alias\s+set(?:\s+\S+){{3}}|vault\s+login|vault\s+kv\s+put\s+\S+\s+\w+=|net\s+use(?:\s+\S+){{1,3}}\s+/user:\S+)(?:(?<==)|\s+){TO_BLANK}", not_switch, whole=True),
    Rule("secret", "configure", rf"(?i)\baws\s+configure\s+set\s+\S*(?:key|token)\s+{TO_BLANK}", secret, whole=True),
    Rule("secret", "--from-literal", rf"--from-literal[ =]{QUOTE}[\w.-]{{1,100}}={TO_BLANK}", secret, whole=True),
    Rule("secret", "env set", rf"(?im)^\s*(?:env|setenv|setx|set)\s+(?:-\w+\s+)*\w{{0,60}}?(?:{SECRET_NAME}|pass)\s+{TO_BLANK}", secret, whole=True),
    Rule("secret", "chpasswd", r"(?i)\b(?:echo|printf|<<<)\s*[\"']?\w[\w.-]{0,31}:(?P<s>[^\s\"']{3,})[\"']?\s*\|\s*(?:sudo\s+)?chpasswd", secret, whole=True),
    # Several values, and what URLs, XML, SQL and prose make of them.
    Rule("credentials", "jdbc:oracle:", r"(?i)jdbc:oracle:\w{1,20}:(?P<s>[^\s/@]{1,60}/[^\s@]{1,100})@"),
    Rule("secret", "variable", rf"(?i)\bvariable\s+\"\w{{0,60}}?(?:{SECRET_NAME}|pass)\"\s*\{{[^}}]{{0,300}}?\bdefault\s*=\s*{VALUE}", secret, whole=True, lines=8),
    Rule("secret", "<input", rf"(?i)<input\b(?=[^<>\n]{{0,300}}\btype\s*=\s*[\"']?password)[^<>\n]{{0,300}}?\bvalue\s*=\s*{VALUE}", secret, whole=True),
    Rule("secret", "sudo", r"\b(?:echo|printf)\s+(?:-\w\s+)*[\"']?(?P<s>[^|\n\"']{3,100}?)[\"']?\s*\|\s*sudo\s+(?:-[A-Za-z]+\s+)*-[A-Za-z]*S\b", whole=True),
    Rule("secret", "passw passphrase passcode key secret token", r"(?i)\b(?:password|passphrase|passwd|passcode|api[ _-]?key|access[ _-]token|secret)\s+(?:for|of|to)\s[^.:\n]{1,60}?(?:\s(?:is|was)|:)\s+[\"'`]?(?P<s>[^\s\"'`,;]{5,})", mixed, whole=True),
    Rule("secret", "pass", r"(?i)\b(?:user(?:name)?|login)\s?/\s?pass(?:word|wd)?\s*[:=]\s*[^\s/]{1,60}\s?/\s?(?P<s>[^\s/]{3,})", secret, whole=True),
    Rule("secret", "passw passphrase secret token key", r"(?im)^\W{0,3}(?:password|passwd|passphrase|secret|api[_ -]?key|token)[ \t]+(?P<s>[^\s<>\"'=]{8,200})\s*$", token, whole=True),
    Rule("secret", LABEL_KEYS, rf"(?i)(?:{LABELS})\s*(?:[:=：＝]|是|为|為|は|은|는|\b(?:is|ist|est|es|é|jest)\b)\s*[「『\"'“]?(?P<s>[^\s\"',;」』。”]{{4,}})", secret, whole=True),
    Rule("secret", "clave", r"(?i)\bclave\s*[:=]\s*[\"']?(?P<s>[^\s\"',;]{5,})", mixed, whole=True),
    Rule("secret", "_token", rf"(?<=[A-Z0-9]_)TOKEN[\"']\s*[\],]?\s*[=:,]?\s*{VALUE}", secret, whole=True),
    # All of a Kubernetes Secret, whatever its values are called.
    Rule("secret", "stringdata:", r"(?m)^(?P<i>[ \t]*)stringData:[ \t]*\n(?P<s>(?:(?P=i)[ \t]+\S[^\n]*\n?){1,60})", whole=True, lines=62),
    Rule("secret", "secret", r"(?m)^[ \t]*kind:[ \t]*Secret\b(?:[^\n]*\n){1,30}?[ \t]*data:[ \t]*\n(?P<s>(?:[ \t]+\S[^\n]*\n?){1,60})", whole=True, lines=92),
    Rule("secret", "data:", r"(?m)^data:[ \t]*\n(?P<s>(?:[ \t]+\S[^\n]*\n){1,60})(?=(?:(?!---)[^\n]*\n){0,20}?kind:[ \t]*Secret\b)", whole=True, lines=82),
    # A key that goes on below a line's end.
    Rule("key", "\\\n", r"(?:sk-|hf_|[Kk][Ee][Yy]|[Tt][Oo][Kk][Ee][Nn]|[Ss][Ee][Cc][Rr][Ee][Tt])\S{0,20}(?:=|_|-|: ?)[\w<>-]{4,200}\\\n[ \t]*(?P<s>[A-Za-z0-9_+/=-]{8,})", token, lines=2),
    Rule("secret", "[", rf"(?i)\b(?:api[_-]?key|secret|password|credential|(?:auth|api|access)[_-]?token)s?{QUOTE}\s*[:=]\s*\[\s{{0,40}}(?P<s>{MARK}[^\]\n]{{4,400}}{MARK})\s{{0,40}}\]", secret),
    Rule("secret", "</", rf"(?i)<[\w:-]{{0,40}}?(?!token\b){SECRET_NAME}(?:\s[^<>\n]{{0,100}})?>(?P<s>[^<>\n]{{4,200}})</", secret, whole=True),
    Rule("secret", ">", rf"(?i)\b(?:name|key|id)\s?=\s?{MARK}[\w.-]{{0,60}}?{SECRET_NAME}{MARK}[^<>\n]{{0,60}}>(?P<s>[^<>\n]{{4,200}})<", secret, whole=True),
    Rule("secret", "<key>", rf"(?i)<key>[\w.-]{{0,60}}?{SECRET_NAME}</key>\s{{0,40}}<string>(?P<s>[^<>\n]{{4,200}})<", secret, whole=True, lines=4),
    Rule("secret", NAMED_KEYS, rf"(?i){NAMED}{QUOTE}\s*(?:->|\||set to)\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>|]{{10,}})", token),
    Rule("secret", "key token", rf"(?i)\b{CODE}s?(?: provided| is| was)?\s*[:=|]?\s*{QUOTE}(?P<s>[^\s\"'\\,;&<>]{{8,}})", token),
    Rule("secret", "identified", rf"(?i)\bidentified\s+(?:with\s+\S+\s+)?by\s+(?:password\s+)?{VALUE}", secret, whole=True),
    Rule("secret", "requirepass masterauth bindpw login", r"(?i)\b(?:requirepass|masterauth|bindpw|(?:wandb|modal|replicate) login|login \S{1,60} password)\s+(?P<s>[^\s\"']{4,})", not_switch),
    Rule("secret", "user", r"\buser \S{1,60} [^\n]{0,80}?[ ]>(?P<s>[^\s\"']{3,})", secret, whole=True),
    Rule("secret", "auth", rf"\bauth{MARK}\s*:\s*{MARK}(?P<s>[A-Za-z0-9+/=]{{12,}}){MARK}", secret),
    # --api-key VALUE and --password=VALUE on a command line, also one word a line, as /proc gives it.
    Rule("secret", NAMES + " pass", rf"(?i)-(?<!\w-)-?(?:[a-z0-9-]*{SECRET_NAME}|pass)[ =]{TO_BLANK}", not_switch, whole=True),
    Rule("secret", ENDS, rf"(?i)-(?<!\w-)-?(?:[a-z0-9-]*{SECRET_NAME}|pass)[ \t]*\n[ \t]*{TO_BLANK}", not_switch, whole=True, lines=2),
    # One quoted argument: -e "PASSWORD=two words". After a colon the quotes are those of a JSON text, which goes on.
    Rule("secret", NAMED_KEYS + " pass pw", rf"(?i)(?<=[\s=])(?<!: )(?P<q>[\"'])[\w.-]{{0,60}}?(?:{NAMED}|pass|pw)=(?P<s>[^\"'\n]{{3,400}})(?P=q)", secret, whole=True),
    # NAME=value as in an environment, then name=value, "name": "value", name: value wherever they stand.
    Rule("secret", NAMED_KEYS, rf"(?i)(?-i:(?=[A-Z0-9_]+=)){NAMED}={TO_BLANK}", secret, whole=True),
    Rule("secret", "pass pat creds pw", rf"(?<![A-Za-z])(?:PASS|PAT|CREDS|PW)(?:_?\d)?={TO_BLANK}", secret, whole=True),
    Rule("secret", NAMED_KEYS, rf"(?i){NAMED}(?:\"|')?\]?{QUOTE}{SEPARATOR}{VALUE}", secret, whole=True),
    Rule("secret", ":\n", rf"(?i){MARK}[\w.-]{{0,40}}?{NAMED}{MARK}[ \t]*:[ \t]*\n[ \t]*(?=[\"']){VALUE}", secret, whole=True, lines=2),
    Rule("secret", "\t", rf"(?im){NAMED}{QUOTE}\t[ \t]*(?P<s>\S{{4,200}})$", token, whole=True),
    Rule("secret", ":\n", rf"(?im){NAMED}{QUOTE}:[ \t]*\n[ \t]*(?P<s>\S{{4,200}})$", token, whole=True, lines=2),
    Rule("secret", "pass pw creds", rf"(?i)(?<![A-Za-z])(?:pass|pw|creds|userpass){QUOTE}\s*=[ \t]*{VALUE}", secret, whole=True),
    Rule("secret", "pass pw creds", rf"(?i){MARK}(?:[\w-]{{0,40}}_)?(?:pass|pw|creds){MARK}\s*:\s*{VALUE}", secret, whole=True),
    Rule("secret", "pass: pw: creds: pat:", rf"(?i)(?<![A-Za-z])(?:pass|pw|creds|pat):[ \t]*{VALUE}", token, whole=True),
    Rule("secret", "_token", rf"(?<=[A-Z0-9]_)TOKEN={TO_BLANK}", secret, whole=True),
    Rule("secret", "token", rf"(?i)(?<![A-Za-z])token{QUOTE}{SEPARATOR}{VALUE}", token, whole=True),
    Rule("secret", SHORT_KEYS, rf"(?i)(?<![A-Za-z.])(?:{SHORT_NAME}){QUOTE}{SEPARATOR}{VALUE}", machine_made, whole=True),
    Rule("secret", "key token secret", r"(?i)\b(?:key|token|secret)\s+(?:is|was)\s+(?P<s>[^\s\"',;]{4,})", machine_made),
    Rule("secret", "passphrase passwd password", r"(?i)\b(?:password|passphrase|passwd)\s+(?:is|was)\s+(?P<s>[^\s\"',;]{4,})", secret),
    Rule("secret", "passphrase passwd passcode password token secret", r"(?i)\b(?:password|passphrase|passwd|passcode|token|secret)\s+(?P<q>[\"'`])(?P<s>[^\"'`\n]{4,100})(?P=q)", secret),
    Rule("secret", "passphrase passwd passcode password", r"(?i)\b(?:with|using|the) (?:password|passphrase|passwd|passcode)\s+(?P<s>[^\s\"',;]{6,100})", token),
    Rule("email", "@", r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.)+[^\W\d_]{2,24}\b", lambda v: not UNIT_SUFFIX.search(v)),
    Rule("address", "", r"\d(?<![\w.-].)(?<!==.)(?<!rev .)(?<!release .)(?<!ersion .)(?<!ersion: .)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?![\w]|\.\d)", any_address),
    Rule("address", "", r"(?<=>-)(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", any_address),
    Rule("address", "ip-", r"(?i)(?<=\bip-)\d{1,3}(?:-\d{1,3}){3}\b"),
    Rule("address", ":", r"(?i)(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%(?:25)?[a-z][\w.-]{0,20})?(?![\w:])", any_address),
    Rule("mac", "", r"[0-9a-fA-F](?<![\w:-].)[0-9a-fA-F][:-](?:[0-9a-fA-F]{2}[:-]){4}[0-9a-fA-F]{2}(?![\w:-])"),
    Rule("mac", "", r"[0-9a-fA-F](?<![\w.].)[0-9a-fA-F]{3}\.[0-9a-fA-F]{4}\.[0-9a-fA-F]{4}(?![\w.])", lambda v: bool(re.search("[a-fA-F]", v))),
    Rule("mac", "guid", r"(?i)\bguid[\"']?\s*[:=]\s*[\"']?(?P<s>(?:0x)?[0-9a-f]{4}(?:[:-]?[0-9a-f]{4}){3})\b"),
    Rule("host", ".com .org .net .io .ai .dev .cloud .local .internal .corp .lan .intra .edu .gov .mil .de .fr .uk .eu .cn .jp .kr .ch .nl .se .at .pl .us .ca .au .in .br .tech .systems .svc .compute .hpc .cluster .arpa", rf"(?i)(?<![\w./-])(?<!from )(?<!import )(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w(.-]|\.\w)", private_host),
    Rule("host", "://", rf"(?i)(?<=://)(?:[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?\.){{1,6}}(?:{HOST_SUFFIX})(?![\w-]|\.\w)", private_host),
    Rule("host", "://", r"(?i)(?<=://)(?!localhost\b|www\b)[a-z][a-z0-9-]{2,62}(?=[:/\s\"']|$)"),
    Rule("host", "host nodename node_name node-name", r"(?i)\b(?:hostname|_hostname|nodename|node[_-]?name|host[_-]?name|peer[_-]?host|rhost)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z][a-z0-9.-]{2,62})", secret),
    Rule("host", "host master server endpoint addr", r"(?i)(?<![a-z-])(?:[a-z_]{0,30}_)?(?:host|master(?:_addr)?|server|rdzv_endpoint|endpoints?|addr(?:ess)?)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<s>[a-z][a-z0-9-]{2,62})(?![\w.(\[])", host_like),
    # Flags and variables that name another machine; what NCCL, syslog, ray and Kubernetes put before or around it.
    Rule("host", "addr rdzv head-node", r"(?i)--?(?:dist[-_]init[-_]addr|(?:[a-z]+[-_])?(?:master|head|node)[-_](?:node[-_])?addr(?:ess)?|rdzv[-_]endpoint)[ =][\"']?(?P<s>[a-z][a-z0-9.-]{2,62})(?=[:\s,\"'\\]|$)", private_host),
    Rule("host", "addr host server endpoint prefill decode master node peer", r"(?i)--?(?:[a-z0-9]+[-_])*(?:addr(?:ess)?|host(?:name)?|server|endpoints?|prefill|decode|master|nodes?|peer)[ =][\"']?(?P<s>[a-z][a-z0-9.-]{2,62})(?=[:\s,\"'\\]|$)", host_like),
    Rule("host", "nccl", r"(?P<s>[A-Za-z][\w.-]{2,62}):\d+:\d+ \[\d+\] NCCL ", private_host),
    Rule("host", ": :", r"(?m)^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)(?= \S+ [\w@./-]+\[\d+\]:)) (?P<s>[A-Za-z0-9][\w.-]{1,62}) [\w@./<>()-]+(?:\[\d+\])?: ", not_level),
    Rule("host", "host node machine server", r"(?i)\b(?:host|node|machine|server)[ /](?P<s>[a-z][a-z0-9]*(?:[-.][a-z0-9]+)*)(?![\w(=]|\.\w)", numbered),
    Rule("host", "node:", r"(?m)\bNode:[ \t]+(?P<s>[a-z][a-z0-9.-]{2,62})/"),
    Rule("host", "assigned", r"(?i)\bassigned \S{1,200} to (?P<s>[a-z][a-z0-9.-]{2,62})(?=\s|$)", host_like),
    Rule("host", "ipmitool", r"\bipmitool\b[^\n]{0,200}?\s-H\s*(?P<s>[A-Za-z][\w.-]{2,62})", private_host),
    Rule("host", "ssh sftp mosh", r"\b(?:ssh|sftp|mosh)\s+(?:-[1246AaCfGgKkMNnqsTtVvXxYy]+\s+|-[bcDEeFIiJLlmOopQRSWw]\s*\S+\s+){0,8}(?P<s>[A-Za-z][A-Za-z0-9-]{2,62})(?=\s|$|[\"'])", host_like),
    Rule("host", "scp rsync", r"\b(?:scp|rsync)\b[^\n]{0,200}?\s(?P<s>[A-Za-z][A-Za-z0-9-]{2,62})(?=:[/~.\w])", host_like),
    Rule("host", "\\\\", r"(?<![\w\\])\\{2,4}(?P<s>[A-Za-z][\w-]{1,62})(?=\\{1,2}[\w$]+)", host_like),
    Rule("user", "user login logname acct", r"(?i)\b(?:user(?:name)?|logname|sudo_user|ssh_user|login|ruser|acct)\\?[\"']?\s*(?:=\s*\\?[\"']?|:\s*\\?[\"'](?=[\w.-]+\\?[\"'])|:\s*(?=[\w.-]+\s*(?:$|[,;}\])])))(?P<s>[a-z_][a-z0-9_.-]{1,31})\b", user_name),
    Rule("user", "user", r"(?im)\b(?:for|by) (?:invalid )?user (?P<s>[a-z_][a-z0-9_.-]{1,31})\b(?=\s+(?:from|by|on|via)\b|\(|[:;,.]?\s*$)", user_name),
    Rule("user", "accepted failed", r"\b(?:Accepted|Failed) [\w/-]+ for (?:invalid user )?(?P<s>[\w.-]{2,32}) from\b", user_name),
    Rule("user", "id=", r"\b[ug]id=\d+\((?P<s>[\w.-]{2,32})\)", user_name),
    Rule("user", "sudo", r"\bsudo(?:\[\d+\])?:\s+(?P<s>[a-z_][\w.-]{1,31}) : ", user_name),
    Rule("user", "ssh", r"\bssh\s[^\n]{0,100}?-l\s*(?P<s>[a-z_][\w.-]{1,31})\b", user_name),
    # Bytes as text, wherever they stand.
    Rule("key", "", r"[A-Za-z0-9+/](?<![\w+/=.-].)[A-Za-z0-9+/]{31,}={0,2}(?![\w+/=])", dense),
)  # fmt: skip
HOME_PATH = re.compile(
    r"(?:/home/|/Users/|/root/|/(?:data|mnt|nfs|export|opt|lustre|gpfs|cephfs|fs|work)(?:/\w{1,20})?/(?:users?|homes?)/|"
    r"/(?:scratch|lustre|gpfs)/(?!(?:models?|data|datasets?|shared?|cache|hf|hub|huggingface|checkpoints?|ckpts?|weights|logs?|tmp)\b)|"
    r"~(?:[a-z_][\w-]{0,31})?/|[A-Za-z]:(?:\\{1,8}|/)Users(?:\\{1,8}|/)(?:[\w.-]+(?: [\w.-]+){1,3}(?=[\\/]))?)"
    r"[^\s\"'`:,;|<>(){}\[\]]+"
)
LOGIN_AT = re.compile(r"(?i)(?<![\w.@/-])(?P<user>[a-z_][a-z0-9_-]{0,31})@(?P<host>[a-z0-9][a-z0-9.-]{2,62})(?![\w@])")
