"""What a deployment tells about itself beside its answers: configuration, digests of a transfer, pages."""

from __future__ import annotations

import json
from typing import Any

import torch
from needlework.pages import LAYOUTS, compare, diagnose
from needlework.serving import Endpoint, TransportError
from needlework.serving import run as run_coroutine

from needlework_lab.calibrate.in_process import InProcessDeployment

CONFIG = ("index_topk", "compress_ratio", "sliding_window", "page_size", "chunked_prefill_size", "context_length")
VALUE = "58213"
PLACES = 9  # times that one content is put into other pages


def config_of(endpoint: Endpoint) -> dict[str, int]:
    """Sizes in effect as /server_info tells them: public, but only some deployments offer it."""
    info = run_coroutine(endpoint.get_json("/server_info"))
    return {name: int(info[name]) for name in CONFIG if isinstance(info.get(name), int)}


def has_host_tier(endpoint: Endpoint) -> bool:
    """Does the server say that its prefix cache has a slower tier behind the device?"""
    return bool(run_coroutine(endpoint.get_json("/server_info")).get("enable_hierarchical_cache"))


def inside_of(deployment: InProcessDeployment, reference: InProcessDeployment | None) -> dict[str, Any]:
    """Digests of every transfer, page findings and places, in the form that `analysis.diagnose` takes.

    Counters of failed transfers are left out: the investigation's own aborts move them.
    """
    found: dict[str, Any] = {}
    if deployment.mode == "pd":
        found["digests"] = _digests(deployment)
    try:
        found["pages"] = sorted(_page_findings(deployment, reference))
        found["placement"] = _placement(deployment)
    except TransportError:
        pass  # a deployment that can not be asked any more offers nothing
    return found


def _digests(deployment: InProcessDeployment) -> dict[str, bool]:
    """Buffer -> did every transfer that both sides remember arrive as it was sent?"""
    sent, got = (run_coroutine(deployment.servers[role].get_json("/lab/captures")) for role in ("prefill", "decode"))
    by_room = {entry["bootstrap_room"]: entry["buffers"] for entry in sent}
    equal: dict[str, bool] = {}
    for entry in got:
        there = by_room.get(entry["bootstrap_room"], {})
        for name, buffer in entry["buffers"].items():
            if name in there:
                equal[name] = equal.get(name, True) and buffer["digest"] == there[name]["digest"]
    return equal


def _witness() -> tuple[list[dict[str, str]], str]:
    """A prompt of about 1,000 tokens (more than one pass, more keys than the selection's budget) and the text up to
    its fact."""
    lines = [f"The counter of shelf {i} in the archive reads {(i * 7919) % 90000 + 10000}." for i in range(72)]
    head = "\n".join(lines[:30]) + "\nThe secret code of the amber falcon is "
    text = head + VALUE + ".\n" + "\n".join(lines[30:]) + "\nWhat is the secret code of the amber falcon?"
    return [{"role": "user", "content": text}], head


def _page_findings(deployment: InProcessDeployment, reference: InProcessDeployment | None) -> set[str]:
    """Names of findings in the pages of one witness prompt: judged alone, and against a reference's."""
    messages, _ = _witness()
    found: set[str] = set()
    run_coroutine(deployment.endpoint.chat(messages, max_tokens=8))
    if reference is not None:
        run_coroutine(reference.endpoint.chat(messages, max_tokens=8))
    for name in ("c4_index.0", "c4_kv.0"):
        header, pool = _pages(_reader(deployment), messages, name)
        layout, size, entries = LAYOUTS[header["layout"]], header["page_tokens"], header["entries"]
        live = (torch.arange(pool.shape[0] * size) < entries).view(-1, size)
        alone = diagnose(pool, layout, size, live=live)
        found |= set(alone[alone["severity"] == "error"]["name"])
        if reference is not None:
            _, right = _pages(_reader(reference), messages, name)
            against = compare(right, pool, layout, size, entries=entries)
            pairs = zip(against["name"], against["field"], strict=True)
            found |= {f"{name.split('.')[0]} {what} {field}" for what, field in pairs}
    return found


def _placement(deployment: InProcessDeployment) -> list[tuple[int, int]]:
    """(physical page of the fact, hit): one prompt under several salts lies in other pages each time."""
    server, (messages, head) = _reader(deployment), _witness()
    prefix = {"messages": [{"role": "user", "content": head}]}
    token = run_coroutine(deployment.servers[next(iter(deployment.servers))].post_json("/tokenize", prefix))["count"]
    page_tokens = config_of(server)["page_size"]
    out = []
    for number in range(PLACES):
        salt = {"cache_salt": f"place {number}"}
        reply = run_coroutine(deployment.endpoint.chat(messages, max_tokens=8, fields=salt))
        told = run_coroutine(server.post_json("/lab/digests", {"messages": messages, **salt}))["buffers"]["c4_kv.0"]
        page = int(token) // page_tokens - told["first_page"]
        if 0 <= page < len(told["pages"]):
            out.append((int(told["pages"][page]), int(VALUE in reply.text)))
    return out


def _reader(deployment: InProcessDeployment) -> Endpoint:
    """The server that decodes."""
    return deployment.servers["decode" if deployment.mode == "pd" else "combined"]


def _pages(server: Endpoint, messages: list[dict[str, str]], buffer: str) -> tuple[dict[str, Any], torch.Tensor]:
    async def fetch() -> tuple[dict[str, Any], bytes]:
        body = {"messages": messages, "buffer": buffer}
        async with server._open("POST", "/lab/pages", body) as (response, chunks):
            raw = b"".join([chunk async for chunk in chunks])
            return json.loads(response.headers["x-needlework-pages"]), raw

    header, raw = run_coroutine(fetch())
    return header, torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(header["page_ids"]), -1)
