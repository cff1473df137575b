"""What a deployment tells about itself beside its answers: configuration, digests of a transfer, pages, counters."""

from __future__ import annotations

import json
from typing import Any

import torch

from needlework.calibrate.inside import InsideDeployment
from needlework.pages import LAYOUTS, compare, diagnose
from needlework.serving import Endpoint, TransportError, dialects
from needlework.serving import run as run_coroutine

CONFIG = ("index_topk", "compress_ratio", "sliding_window", "page_size", "chunked_prefill_size", "context_length")
WITNESS_LINES = 110  # about 1,400 tokens: more than one pass, and more keys than the budget of the selection


def config_of(endpoint: Endpoint) -> dict[str, int]:
    """Sizes in effect as /server_info tells them: public, but only some deployments offer it."""
    info = run_coroutine(endpoint.get_json("/server_info"))
    return {name: int(info[name]) for name in CONFIG if isinstance(info.get(name), int)}


def inside_of(deployment: InsideDeployment, reference: InsideDeployment | None) -> dict[str, Any]:
    """Digests of every transfer, page findings, and counters, in the form that `analysis.diagnose` takes."""
    found: dict[str, Any] = {"logs": {}, "pages": []}
    if deployment.mode == "pd":
        found["digests"] = _digests(deployment)
    figures = [run_coroutine(dialects.read_metrics(server)) for server in deployment.servers.values()]
    failed = sum(f["transfer_failed"] or 0 for f in figures)
    found["logs"] = {"failed transfers": int(failed)}
    found["pages"] = sorted(_page_findings(deployment, reference))
    return found


def _digests(deployment: InsideDeployment) -> dict[str, bool]:
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


def _page_findings(deployment: InsideDeployment, reference: InsideDeployment | None) -> set[str]:
    """Names of findings in the pages of one witness prompt: judged alone, and against a reference's."""
    lines = [
        f"The counter of shelf {i} in the archive reads {(i * 7919) % 90000 + 10000}." for i in range(WITNESS_LINES)
    ]
    messages = [
        {"role": "user", "content": "\n".join(lines) + "\nWhat does the counter of shelf 7 in the archive read?"}
    ]
    found: set[str] = set()
    last = "decode" if deployment.mode == "pd" else "combined"
    try:
        run_coroutine(deployment.endpoint.chat(messages, max_tokens=8))
        if reference is not None:
            run_coroutine(reference.endpoint.chat(messages, max_tokens=8))
        for name in ("c4_index.0", "c4_kv.0"):
            header, here = _pages(deployment.servers[last], messages, name)
            layout = LAYOUTS[header["layout"]]
            size, entries = header["page_tokens"], header["entries"]
            pool = _pool(here, len(header["page_ids"]))
            live = (torch.arange(pool.shape[0] * size) < entries).view(-1, size)
            alone = diagnose(pool, layout, size, live=live)
            found |= set(alone[alone["severity"] == "error"]["name"])
            if reference is not None:
                other, there = _pages(reference.servers["combined"], messages, name)
                against = compare(_pool(there, len(other["page_ids"])), pool, layout, size, entries=entries)
                found |= {
                    f"{name.split('.')[0]} {n} {f}" for n, f in zip(against["name"], against["field"], strict=True)
                }
    except (TransportError, KeyError, ValueError) as error:
        found.add(f"no dump: {type(error).__name__}")
    return found


def _pool(raw: bytes, pages: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(pages, -1)


def _pages(server: Endpoint, messages: list[dict[str, str]], buffer: str) -> tuple[dict[str, Any], bytes]:
    async def fetch() -> tuple[dict[str, Any], bytes]:
        body = {"messages": messages, "buffer": buffer}
        async with server._open("POST", "/lab/pages", body) as (response, chunks):
            raw = b"".join([chunk async for chunk in chunks])
            return json.loads(response.headers["x-needlework-pages"]), raw

    return run_coroutine(fetch())
