"""Hundreds of secrets of many kinds in the sentences they turn up in, for every test that asks whether one leaks."""

import base64
import random
import string

LETTERS = string.ascii_letters + string.digits


def word(rng, n, alphabet=LETTERS):
    return "".join(rng.choice(alphabet) for _ in range(n))


def hexa(rng, n):
    return word(rng, n, "0123456789abcdef")


# kind -> (make a secret, sentences it turns up in); {s} is the secret that must be gone afterwards
KINDS = {
    "openai": (lambda r: "sk-" + word(r, 40), ["key {s}", "OPENAI_API_KEY={s}", '{{"error": "Incorrect API key provided: {s}"}}']),
    "openai-project": (lambda r: "sk-proj-" + word(r, 44), ["using {s}."]),
    "anthropic": (lambda r: "sk-ant-api03-" + word(r, 40), ["x-api-key: {s}"]),
    "github": (lambda r: "ghp_" + word(r, 36), ["git clone with {s}", "GITHUB_TOKEN={s}"]),
    "github-fine": (lambda r: "github_pat_" + word(r, 50), ["token {s} was used"]),
    "gitlab": (lambda r: "glpat-" + word(r, 20), ["PRIVATE-TOKEN: {s}"]),
    "hugging-face": (lambda r: "hf_" + word(r, 34), ["HF_TOKEN={s}", "Environment=HUGGING_FACE_HUB_TOKEN={s}"]),
    "nvidia": (lambda r: "nvapi-" + word(r, 50), ["NGC_API_KEY={s}", "login with {s} ok"]),
    "slack": (lambda r: "xoxb-" + word(r, 12, string.digits) + "-" + word(r, 24), ["posting with {s}"]),
    "slack-webhook": (lambda r: f"T{word(r, 8)}/B{word(r, 8)}/{word(r, 24)}", ["alert to https://hooks.slack.com/services/{s}"]),
    "aws-id": (lambda r: "AKIA" + word(r, 16, string.ascii_uppercase + string.digits), ["aws id {s}"]),
    "aws-secret": (lambda r: word(r, 40, LETTERS + "/+"), ["AWS_SECRET_ACCESS_KEY={s}", '"secretAccessKey": "{s}"']),
    "google": (lambda r: "AIza" + word(r, 35), ["maps?key={s}", "found {s}"]),
    "google-oauth": (lambda r: "ya29." + word(r, 40), ["refresh {s}"]),
    "stripe": (lambda r: "sk_live_" + word(r, 24), ["charge {s}"]),
    "sendgrid": (lambda r: f"SG.{word(r, 22)}.{word(r, 43)}", ["mail via {s}"]),
    "npm": (lambda r: "npm_" + word(r, 36), ["//registry/:_authToken={s}", "{s}"]),
    "jwt": (lambda r: f"eyJ{word(r, 20)}.eyJ{word(r, 30)}.{word(r, 40)}", ["session {s}", "Authorization: Bearer {s}"]),
    "bearer": (lambda r: word(r, 24) + "9", ["Authorization: Bearer {s}", '"authorization": "Bearer {s}"', "-H 'Authorization: Bearer {s}'"]),
    "basic": (lambda r: base64.b64encode(f"u:{word(r, 12)}".encode()).decode(), ["authorization: Basic {s}", "Proxy-Authorization: Basic {s}"]),
    "cookie": (lambda r: word(r, 24), ["Cookie: session={s}; theme=dark", "set-cookie: sid={s}; Path=/; HttpOnly"]),
    "url-credentials": (lambda r: f"svc{word(r, 4)}:{word(r, 12)}", ["pull from https://{s}@registry.example.com/v2", "redis://{s}@cache:6379/0"]),
    "url-query": (lambda r: word(r, 20), ["GET /v1/x?api_key={s}&n=1", "https://blob.example.net/a?sv=2&sig={s}", "/cb?access_token={s}"]),
    "flag": (lambda r: word(r, 16), ["launch --api-key {s} --port 30000", "--hf-token={s}", "--admin-api-key {s}", "mysql --password={s}"]),
    "password": (lambda r: word(r, 10) + "!7", ["DB_PASSWORD={s}", "password: {s}", '{{"password": "{s}"}}', "password is {s}"]),
    "named-key": (lambda r: hexa(r, 32), ["WANDB_API_KEY={s}", "client_secret={s}", '\\"api_key\\": \\"{s}\\"', "X-Api-Key: {s}"]),
    "private-key": (
        lambda r: "\n".join(word(r, 64, LETTERS + "/+") for _ in range(3)),
        ["-----BEGIN OPENSSH PRIVATE KEY-----\n{s}\n-----END OPENSSH PRIVATE KEY-----", "-----BEGIN RSA PRIVATE KEY-----\n{s}"],
    ),
    "email": (lambda r: f"{word(r, 8).lower()}@{word(r, 6).lower()}.com", ["user {s} asked", "mailto:{s}"]),
    "ipv4": (lambda r: f"10.{r.randint(0, 255)}.{r.randint(0, 255)}.{r.randint(1, 254)}", ['INFO: {s}:53422 - "POST /v1"', "http://{s}:8000/health", "peer {s}, ok"]),
    "ipv6": (lambda r: "2001:db8:" + ":".join(hexa(r, 4) for _ in range(6)), ["listen [{s}]:8998", "from {s}"]),
    "mac": (lambda r: ":".join(hexa(r, 2) for _ in range(6)), ["link {s} up"]),
    "host": (lambda r: f"gpu{r.randint(10, 99)}-{word(r, 5).lower()}.corp.example.com", ["connect to {s}:30001", "https://{s}/x", "host {s} died"]),
    "url-host": (lambda r: f"prefill-{word(r, 6).lower()}", ["POST http://{s}:30000/generate"]),
    "aws-host": (lambda r: f"{r.randint(1, 99)}-{r.randint(100, 255)}-{r.randint(0, 255)}-7", ["node ip-{s} joined"]),
    "login": (lambda r: f"{word(r, 7, string.ascii_lowercase)}@node-{word(r, 4).lower()}", ["ssh {s} uptime", "scp a {s}:/x"]),
    "user": (lambda r: word(r, 9, string.ascii_lowercase), ["USER={s}", "LOGNAME={s}"]),
    "home-path": (lambda r: f"/home/{word(r, 7, string.ascii_lowercase)}/{word(r, 8)}", ["model at {s}", "File \"{s}/run.py\", line 3"]),
}  # fmt: skip


def planted():
    rng = random.Random(7)
    cases = []
    for kind, (make, sentences) in KINDS.items():
        for number in range(max(6, 2 * len(sentences))):
            secret = make(rng)
            cases.append((kind, secret, sentences[number % len(sentences)].format(s=secret)))
    return cases


def gone(secret, text):
    return not any(part in text for part in secret.replace("/home/", "").splitlines() if len(part) > 3)
