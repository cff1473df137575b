"""A client of one deployment, and prompts whose right answer is known."""

from __future__ import annotations

import time

import httpx
import needlework_lab as lab

MODEL = "needlework-lookup"
FILLER = "The garden was quiet and the light came slowly over the hills. "


class Client:
    """A client of one deployment that speaks plain HTTP and hides nothing."""

    def __init__(self, deployment: lab.Deployment):
        self.deployment = deployment
        self.http = httpx.Client(base_url=deployment.base_url, timeout=60.0, trust_env=False)
        # the router has no /tokenize, /abort_request or /lab routes: those are asked of the servers themselves
        self.prefill = httpx.Client(base_url=deployment.prefill_url, timeout=60.0, trust_env=False)
        self.decode = httpx.Client(base_url=deployment.decode_url, timeout=60.0, trust_env=False)

    def chat(self, content: str, *, expect: int = 200, **fields):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == expect, response.text
        return response.json()

    def complete(self, prompt, *, expect: int = 200, **fields):
        response = self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})
        assert response.status_code == expect, response.text
        return response.json()

    def metric(self, name: str, role: str = "decode") -> float:
        text = getattr(self, role).get("/metrics").text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
        assert values, f"no metric {name} in {text}"
        return float(values[0])


def story(sentences: int, needle: str = "", depth: float = 0.3) -> str:
    """Filler text of so many sentences, a needle at a relative depth, and no question."""
    before = int(sentences * depth)
    return FILLER * before + needle + FILLER * (sentences - before)


def ask(sentences: int, value: str = "49929", depth: float = 0.3) -> str:
    needle = f"The secret harbour code of Lisbon is {value}. "
    return story(sentences, needle, depth) + "\nWhat is the secret harbour code of Lisbon?"


def until(condition, timeout_s: float = 10.0) -> bool:
    """Wait for a condition; False when it did not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
