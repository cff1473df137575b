"""What to do about a class of fault: what keeps users served meanwhile, and where to look first, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# class -> (meanwhile, first look). The first is a work-around that avoids the path, not a cure; each costs something.
ADVICE = {
    "N1": ("send shorter prompts, or raise the limit that cuts them", "compare tokens sent with tokens counted"),
    "N2": ("nothing is lost; pin the batch size where answers must repeat", "replay serially and compare bit by bit"),
    "N3": ("trust no recall number until the harness is mended", "read ten answers by hand, with their finish reason"),
    "N4": ("trust no alarm that only this detector raised", "prove warm trials by their cached tokens"),
    "N5": ("use another checkpoint for long prompts", "send the same prompts to an independent server"),
    "F01": (
        "go back to the last version whose cache writer and attention backend were released together",
        "write a page through the deployed writer and read it back through the reader",
    ),
    "F02": ("keep prompts below the edge that was measured", "look where tokens, entries and pages are converted"),
    "F03": ("give the cache less memory: no address of 2^31", "print the largest page number times stride"),
    "F04": ("select with the exact top-k of the framework", "compare selected scores on a captured row"),
    "F05": ("keep prompts below the edge that was measured", "print the top-k that each consumer really uses"),
    "F06": ("use the reference indexer, or one request a batch", "compare the indexer's scores layer by layer"),
    "F07": ("pad prompts to whole groups", "follow the last, partial group from compressor to reader"),
    "F08": ("prefill in one pass (a chunk as long as the longest prompt)", "compare state at each chunk's edge"),
    "F09": ("switch the prefix cache off", "check that a hit restores window and compressor state too"),
    "F10": ("switch the prefix cache off", "check what an aborted prefill leaves in the prefix tree"),
    "F11": ("switch the prefix cache off, or serve one identity a server", "print the cache key of both identities"),
    "F12": ("serve few requests at a time, cancel none", "follow one page from its release to its reuse"),
    "F13": (
        "serve from one combined server",
        "check the order of the forward's end, the sending and the notice, chunk by chunk",
    ),
    "F14": (
        "serve from one combined server, which moves nothing",
        "read which buffers the transfer registers: index keys and compressor state must be among them",
    ),
    "F15": ("switch the slower cache tier off", "force the wait before the first read and compare rates"),
    "F16": ("alarm on warnings and fallback counters", "inject one failure and see whether anybody is told"),
    "F17": ("switch CUDA graphs off", "compare batch sizes that equal a captured size with their neighbours"),
    "F18": ("zero pages when they are handed out", "poison free pages with NaN and find the first layer that shows it"),
    "F19": ("switch speculative decoding off", "compare greedy output with and without drafts"),
    "F20": ("store the cache in bf16", "dequantise a page against a reference with odd scales"),
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """`what` is the class in words; `meanwhile` a work-around; `look` the first look; `proof` the decisive test."""

    code: str
    what: str
    meanwhile: str
    look: str
    proof: str

    def __str__(self) -> str:
        return f"Meanwhile: {self.meanwhile}. Then: {self.look}."


def advice(code: str) -> Advice:
    """Advice on a class of `analysis.BY_CODE`; raises ValueError for an unknown one and for "healthy"."""
    from needlework import analysis

    if code not in ADVICE:
        raise ValueError(f"there is no advice on {code[:20]!r}; classes are {', '.join(ADVICE)}")
    known: Any = analysis.BY_CODE[code]
    return Advice(code, known.title, *ADVICE[code], known.decisive)
