"""Tokens as the server counts them: of a request before it is sent (the routes differ, and some take messages where
others take text), and of a prompt that came out of a prefix cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .endpoint import PROBE_TIMEOUT_S, Endpoint, attempt
from .gauges import parse
from .replies import Message, Reply

# llama.cpp `tools/server/server-context.cpp`: the first counts a chat request, older builds only render it
LLAMA_COUNT, LLAMA_RENDER = "/v1/chat/completions/input_tokens", "/apply-template"


async def count_tokens(endpoint: Endpoint, messages: list[Message]) -> int | None:
    """Tokens of the whole request as the server's template renders it; None when no tokenise route answers.

    The text form counts the contents without the template; the caller learns the template's share from usage. The
    endpoint must have been probed.
    """
    found = endpoint.capabilities
    if found.tokenize_path is None:
        return None
    if found.tokenize == "chat":
        switch = {k: v for k, v in found.fields().items() if k == "chat_template_kwargs"}
        return await _chat_count(endpoint, found.tokenize_path, found.model, messages, switch)
    body = _text_body(found.tokenize_path, found.model, "\n".join(m["content"] for m in messages))
    base = endpoint.tokenizer_url or endpoint.base_url
    return _count(await endpoint.post_json(found.tokenize_path, body, base=base))


async def ids(endpoint: Endpoint, text: str) -> list[int] | None:
    """Token ids of a plain text, without special tokens; None where no route lists as many as it counts."""
    base = endpoint.tokenizer_url or endpoint.base_url
    for path in (endpoint.ids_path,) if endpoint.ids_path else ("/tokenize", "/v1/tokenize", "/tokenize#content"):
        body = await attempt(endpoint.post_json(path, _text_body(path, endpoint.capabilities.model, text), base=base))
        found = body.get("tokens") if isinstance(body, dict) else None
        if isinstance(found, list) and found and len(found) == _count(body) and set(map(type, found)) == {int}:
            endpoint.ids_path = path
            return found
    return None


async def tokenize_form(endpoint: Endpoint, model: str, hello: list[Message]) -> tuple[str, str | None]:
    """(form, route) that counts: "chat" or "text", else ("usage", None)."""
    base = endpoint.tokenizer_url or endpoint.base_url
    longer: list[Message] = [{"role": "user", "content": "Hello. " * 40}]
    for path in ("/tokenize", "/v1/tokenize", LLAMA_COUNT, LLAMA_RENDER):
        counts = [
            await attempt(_chat_count(endpoint, path, model, messages, timeout_s=PROBE_TIMEOUT_S))
            for messages in (hello, longer)
        ]
        # a route that ignores `messages` counts an empty prompt: the longer text must count more
        if counts[0] and counts[1] and counts[1] >= counts[0] + 39:
            return "chat", path
    for path in ("/tokenize", "/v1/tokenize", "/_internal/tokenize", "/tokenize#content"):
        short, long = (_text_body(path, model, m[0]["content"]) for m in (hello, longer))
        counts = [
            _count(await attempt(endpoint.post_json(path, body, base=base, timeout_s=PROBE_TIMEOUT_S)))
            for body in (short, long)
        ]
        if counts[0] and counts[1] and counts[1] >= counts[0] + 39:
            return "text", path
    return "usage", None


async def _chat_count(
    endpoint: Endpoint, path: str, model: str, messages: list[Message], switch: dict[str, Any] | None = None,
    **options: Any,
) -> int | None:  # fmt: skip
    """Tokens of a chat request by a route that renders the template itself, or by rendering it, then counting."""
    base = endpoint.tokenizer_url or endpoint.base_url
    body = {"model": model, "messages": messages, "add_generation_prompt": True, **(switch or {})}
    answer = await endpoint.post_json(path, body, base=base, **options)
    if path == LLAMA_RENDER:
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            return None
        # as the server reads a rendered prompt: its marks are tokens, and a first token is added if the model has one
        body = {"content": text, "add_special": True, "parse_special": True}
        answer = await endpoint.post_json("/tokenize", body, base=base, **options)
    return _count(answer)


def _text_body(path: str, model: str, text: str) -> dict[str, Any]:
    if path.endswith("#content"):  # llama.cpp
        return {"content": text, "add_special": False}
    return {"model": model, "prompt": text, "add_special_tokens": False}


def _count(body: Any) -> int | None:
    if not isinstance(body, dict):
        return None
    count, tokens = body.get("count", body.get("input_tokens")), body.get("tokens")
    if isinstance(count, list):  # a batch of one
        count = count[0] if len(count) == 1 else None
    if isinstance(count, int) and not isinstance(count, bool):
        return count if 0 <= count < 1 << 53 else None
    return len(tokens) if isinstance(tokens, list) else None


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
    return await counted(endpoint, messages, **options)


async def counted(endpoint: Endpoint, messages: list[Message], **options: Any) -> Reply:
    before = await cache_hits(endpoint)
    reply = await endpoint.chat(messages, **options)
    after = await cache_hits(endpoint)
    found = None if before is None or after is None else round(after - before)
    if found is not None and not 0 <= found <= (reply.prompt_tokens or 0):
        found = None  # somebody else's request, or a restart, is in the difference
    return replace(reply, cached_tokens=found)


async def cache_hits(endpoint: Endpoint) -> float | None:
    """Tokens that the prefix cache at `cache_url` has served so far; None where it does not tell."""
    if endpoint.cache_url is None:
        return None
    text = await attempt(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=endpoint.cache_url))
    return parse(text or "")["cached_tokens"]
