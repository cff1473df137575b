"""One question to an endpoint that may well refuse it."""

from __future__ import annotations

from typing import Any

from .replies import TransportError

PROBE_TIMEOUT_S = 30.0


async def attempt(awaitable: Any) -> Any:
    """The answer, or None when there is no well-formed one."""
    try:
        return await awaitable
    except TransportError:
        return None
