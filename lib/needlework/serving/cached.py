"""How much of a prompt came out of a prefix cache: who tells it, whether it is true, and how a prompt is made cold."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from .attempts import PROBE_TIMEOUT_S, attempt
from .capabilities import SALTS, salt_value
from .endpoint import Endpoint
from .gauges import read_gauges
from .replies import Message, Reply


async def chat(endpoint: Endpoint, messages: list[Message], *, alone: bool, **options: Any) -> Reply:
    """`endpoint.chat`, with cached tokens from the source that was found to be right. alone: no other request is under
    way, as a counter needs it; without it such an endpoint's cached tokens are not known.
    """
    found = endpoint.capabilities
    if found.cached_tokens and found.cached_by == "usage":
        reply = await endpoint.chat(messages, **options)
        silent = reply.cached_tokens is None and reply.prompt_tokens is not None  # a zero is left out by some engines
        return replace(reply, cached_tokens=0) if silent else reply
    if not found.cached_tokens or not alone:
        return replace(await endpoint.chat(messages, **options), cached_tokens=None)
    return await _counted(endpoint, messages, **options)


async def cached_source(endpoint: Endpoint, notes: list[str]) -> str | None:
    """Who tells the truth on cached tokens: "usage", "counter", or nobody.

    A text that was never sent cannot be cached. The decode server of a pair reports it as cached all the same, because
    its keys and values came from elsewhere (vllm 0.32.0 `v1/core/sched/scheduler.py`); then only the counter of the
    server that computes prompts can tell.
    """
    fresh = _lamps(secrets.token_hex(8))
    reply = await attempt(endpoint.chat(fresh, max_tokens=1))
    if reply is not None and reply.cached_tokens is None:  # vllm 0.23.0 and sglang 0.5.14 leave a zero out
        again = await attempt(endpoint.chat(fresh, max_tokens=1))
        if again is not None and again.cached_tokens:
            return "usage"
    if reply is None or reply.cached_tokens is None:
        notes.append("cached tokens are not reported, so warm and cold cannot be proved")
        return None
    if 2 * reply.cached_tokens < (reply.prompt_tokens or 0):
        return "usage"
    if await _cache_hits(endpoint) is not None:
        return "counter"
    notes.append(
        "a text that was never sent is reported as cached (a decode server counts what it was sent), so warm and cold "
        "cannot be proved; name the prefill server as cache_url"
    )
    return None


async def accepted_salt(endpoint: Endpoint, source: str | None, notes: list[str]) -> str | None:
    """A salt field that is accepted *and* seen to work: the same prompt under a new salt has no cached tokens."""
    if source is None:
        return None
    text, send = _lamps("twice"), _counted if source == "counter" else Endpoint.chat
    await attempt(send(endpoint, text, max_tokens=1))
    again = await attempt(send(endpoint, text, max_tokens=1))
    if again is None or not again.cached_tokens:
        notes.append("a repeated prompt had no cached tokens: the prefix cache seems to be off")
        return None
    for name in SALTS:
        # a salt used in an earlier probe would be warm already
        fields = {name: salt_value(name, secrets.token_hex(8))}
        salted = await attempt(send(endpoint, text, max_tokens=1, fields=fields))
        if salted is not None and (salted.cached_tokens or 0) < again.cached_tokens:
            return name
    notes.append("no salt field is honoured; cold prompts start with a new first line instead")
    return None


async def _counted(endpoint: Endpoint, messages: list[Message], **options: Any) -> Reply:
    before = await _cache_hits(endpoint)
    reply = await endpoint.chat(messages, **options)
    after = await _cache_hits(endpoint)
    found = None if before is None or after is None else round(after - before)
    if found is not None and not 0 <= found <= (reply.prompt_tokens or 0):
        found = None  # somebody else's request, or a restart, is in the difference
    return replace(reply, cached_tokens=found)


async def _cache_hits(endpoint: Endpoint) -> float | None:
    """Tokens that the prefix cache at `cache_url` has served so far; None where it does not tell."""
    if endpoint.cache_url is None:
        return None
    text = await attempt(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=endpoint.cache_url))
    return read_gauges(text or "")["cached_tokens"]


def _lamps(first: str) -> list[Message]:
    """A text that fills some pages of any prefix cache; `first` makes it another one."""
    return [{"role": "user", "content": f"Cache check {first}. " + "The lamp is on the table. " * 120}]
