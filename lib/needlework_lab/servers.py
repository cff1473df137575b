"""A deployment on this machine, seen by role: where each of its processes answers, and what it last wrote.

The deployment in a box and the real engines share this: one server, or a prefill and a decode server behind a router.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from needlework.processes import Child

from needlework_lab.processes import LOOPBACK

MAX_ANSWER_BYTES = 1 << 30  # the pages of a long request are large; nothing else is


def call(
    port: int, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 30.0
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """(status, headers, bytes) of one request to a process on this machine, past any proxy; OSError when nobody
    answers, or not in the form of HTTP.
    """
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"content-type": "application/json"} if payload else {})
        response = connection.getresponse()
        return response.status, response.headers, response.read(MAX_ANSWER_BYTES)
    except http.client.HTTPException as error:
        raise ConnectionError(f"no well-formed answer ({type(error).__name__})") from None
    finally:
        connection.close()


def last_words(role: str, child: Child) -> str:
    """How a process ended that was still starting."""
    status, tail = child.process.returncode, child.log_tail()
    return f"the {role} process ended with status {status} while starting; it last wrote:\n{tail}"


def wait_until_ready(
    children: Mapping[str, Child],
    timeout_s: float,
    ready: Callable[[str], bool],
    error: Callable[[str], Exception],
    *,
    poll_s: float,
    ended: Callable[[str, Child], str] = last_words,
) -> None:
    """Wait until every process is `ready`, one role after the other; raises `error` with the last log lines when one
    ends or stays silent.
    """
    deadline, waiting = time.monotonic() + timeout_s, list(children)
    while waiting:
        for role, child in children.items():
            if not child.alive:
                raise error(ended(role, child))
        if ready(waiting[0]):
            waiting.pop(0)
        elif time.monotonic() > deadline:
            tail = children[waiting[0]].log_tail()
            raise error(f"the {waiting[0]} process was not ready within {timeout_s:g} s; it last wrote:\n{tail}")
        else:
            time.sleep(poll_s)


@dataclass(frozen=True)
class Servers:
    """Addresses by role. URLs have no /v1; `base_url` is the router's in PD mode (a router has no /tokenize: ask a
    server).
    """

    mode: str  # "combined" or "pd"
    ports: dict[str, int]
    children: dict[str, Child] = field(repr=False)

    def _url(self, role: str) -> str:
        return f"http://{LOOPBACK}:{self.ports[role]}"

    @property
    def base_url(self) -> str:
        return self._url("router" if self.mode == "pd" else "combined")

    @property
    def prefill_url(self) -> str:
        """The server that runs prompts (in combined mode the only one)."""
        return self._url("prefill" if self.mode == "pd" else "combined")

    @property
    def decode_url(self) -> str:
        """The server that decodes (in combined mode the only one)."""
        return self._url("decode" if self.mode == "pd" else "combined")

    @property
    def tokenizer_url(self) -> str:
        """Where /tokenize is offered."""
        return self.prefill_url

    @property
    def metrics_url(self) -> str | None:
        """A router offers its own metrics on a port of their own; a server offers them beside everything else."""
        return self._url("router-metrics") if "router-metrics" in self.ports else None

    @property
    def roles(self) -> tuple[str, ...]:
        """The server processes, without the router."""
        return ("prefill", "decode") if self.mode == "pd" else ("combined",)

    def log_tail(self, role: str, lines: int = 15) -> str:
        """The last lines that a process wrote."""
        return self.children[role].log_tail(lines)
