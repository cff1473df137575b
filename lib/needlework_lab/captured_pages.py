"""What a request's pages held at the moment of handover: digests and bytes, kept for the last few requests.

Both servers of a pair take a capture of the same pages at the same point of a request's life: prefill when everything
was acknowledged (its forward passes are over), decode when everything arrived and before it writes its first own
entry. Equal buffers have equal digests whatever physical pages they lie in.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from needlework_lab.types import Buffer, Geometry

KEPT_CAPTURES = 512
KEPT_BYTES = 64 << 20


def prompt_key(tokens: Sequence[int], cache_salt: str = "", extra_key: str = "") -> str:
    """A short name for a prompt as the cache sees it: tokens and salts."""
    return hashlib.blake2b(repr((tuple(tokens), cache_salt, extra_key)).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Span:
    """Physical pages of one group in logical order: `ids[i]` is logical page `first_page + i`."""

    first_page: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Capture:
    """One request's pages in one server. `digests` are Adler-32 as in SGLang's transfer checksum (1 for no page)."""

    rid: str
    key: str
    role: str
    prompt_tokens: int
    room: int | None
    spans: dict[str, Span]
    digests: dict[str, int]
    data: dict[str, bytes] = field(repr=False)

    def summary(self, buffers: dict[str, Buffer]) -> dict[str, Any]:
        """A JSON form without the bytes."""
        return {
            "rid": self.rid,
            "prompt": self.key,
            "role": self.role,
            "prompt_tokens": self.prompt_tokens,
            "bootstrap_room": self.room,
            "buffers": {
                name: {
                    "digest": digest,
                    "group": buffers[name].group,
                    "layout": buffers[name].layout,
                    "first_page": self.spans[buffers[name].group].first_page,
                    "pages": list(self.spans[buffers[name].group].ids),
                    "item_bytes": buffers[name].item_bytes,
                }
                for name, digest in self.digests.items()
            },
        }

    def header(self, buffer: Buffer, geometry: Geometry) -> dict[str, Any]:
        """What the bytes of one buffer are: the fields of `pages.Dump`, and the digest they must have."""
        span, compressed = self.spans[buffer.group], buffer.group == "full"
        pool, _, layer = buffer.name.partition(".")
        tokens = self.prompt_tokens - span.first_page * geometry.page_tokens
        return {
            "layout": buffer.layout,
            "page_tokens": buffer.page_entries,
            "page_ids": list(span.ids),
            "pool": pool,
            "layer": int(layer or 0),
            "request": self.rid,
            "role": self.role,
            "entries": tokens // geometry.ratio if compressed else tokens,
            "tokens_per_entry": geometry.ratio if compressed else 1,
            "digest": self.digests[buffer.name],
        }


class Captures:
    """The last captures, newest last; bytes of old ones are dropped first, their digests stay a little longer."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Capture] = OrderedDict()

    def take(
        self, engine: Any, role: str, request: Any, spans: dict[str, Span], buffers: Iterable[Buffer], room: int | None
    ) -> Capture:
        """Read the pages of `spans` out of the engine's pools and remember them. Call it in the engine's thread."""
        data = {b.name: engine.read_pages(b.name, list(spans[b.group].ids)) for b in buffers if b.group in spans}
        capture = Capture(
            request.rid,
            prompt_key(request.tokens, request.cache_salt, request.extra_key),
            role,
            len(request.tokens),
            room,
            spans,
            {name: zlib.adler32(raw) for name, raw in data.items()},
            data,
        )
        self._kept.pop(capture.rid, None)
        self._kept[capture.rid] = capture
        while len(self._kept) > KEPT_CAPTURES:
            self._kept.popitem(last=False)
        total = 0
        for old in reversed(self._kept.values()):
            if not old.data:
                break
            total += sum(map(len, old.data.values()))
            if total > KEPT_BYTES and old is not capture:
                old.data.clear()
        return capture

    def newest(self) -> list[Capture]:
        """All that is remembered, oldest first."""
        return list(self._kept.values())

    def find(self, *, rid: str | None = None, key: str | None = None, room: int | None = None) -> Capture | None:
        """The newest capture with this request id, prompt key or bootstrap room."""
        for capture in reversed(self._kept.values()):
            if rid is not None and capture.rid == rid:
                return capture
            if key is not None and capture.key == key:
                return capture
            if room is not None and capture.room == room:
                return capture
        return None
