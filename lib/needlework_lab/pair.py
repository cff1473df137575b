"""What the two halves of a prefill/decode pair share: the room of a request, what both must agree on, how a failure
ends.

Prefill (module `prefill`) waits until the decode server has registered the request's room, so that every chunk has a
place to go; it runs the forward passes, sends each chunk's pages as soon as they are final, and answers its own HTTP
request when the decode server has confirmed everything. Decode (module `decode`) sets pages aside, registers, and
starts when the last chunk is in place. Both conclude with an error when the other side fails, and free their pages.
(SGLang: srt/disaggregation/prefill.py, decode.py.)
"""

from __future__ import annotations

from typing import Any

from needlework_lab.json_bodies import HttpError
from needlework_lab.types import Event, Request

GIVEN_UP = "the request was aborted"


def signature_of(engine: Any) -> str:
    """What both servers of a pair must agree on, as one line: pools, layouts, page sizes, weights."""
    pools = ",".join(f"{b.name}:{b.group}:{b.layout}:{b.page_entries}:{b.item_bytes}" for b in engine.pools().values())
    return f"{engine.geometry.name};page={engine.geometry.page_tokens};seed={engine.seed};{pools}"


def room_of(request: Request) -> int:
    if request.bootstrap is None:
        raise ValueError(
            "this server is one half of a prefill/decode pair: send requests to the router, or give bootstrap_host, "
            "bootstrap_port and bootstrap_room"
        )
    return int(request.bootstrap["room"])


def ending(rid: str, reason: str, side: str) -> Event | HttpError:
    """How a request ends when its transfer did: an abort asked for on the other side is no server error."""
    if reason == GIVEN_UP and side == "Prefill":
        return Event(rid, None, finish_reason="abort")
    return HttpError(500, f"{side} transfer failed for request {rid}: {reason}")
