"""Engines without servers: ask one, or a prefill/decode pair joined by a copy of pages."""

from __future__ import annotations

from itertools import count
from random import Random

from needlework.probes.bench import words
from needlework_lab.engine import Engine
from needlework_lab.types import Chunk, Event, Request, Sampling

NEEDLE = "The secret code for the amber falcon of Kelbrook is {}."
QUESTION = "What is the secret code for the amber falcon of Kelbrook? Answer with the value only."
REFUSAL = "I have no prior context for that."
_rids = count()


def haystack(
    engine: Engine, tokens: int, depth: float, value: str = "81392", seed: int = 1, needle: str = NEEDLE
) -> str:
    """About `tokens` tokens of records with the needle at `depth` of the lines, and the question."""
    r, lines, size = Random(seed), [], 60
    while size < tokens:
        line = words.unit(r.choice(list(words.GENRES)), r)
        size += len(engine.tokenizer.encode(line + "\n"))
        lines.append(line)
    lines.insert(int(depth * len(lines)), needle.format(value))
    return "\n".join(lines) + "\n" + QUESTION


def request(engine: Engine, prompt, **options) -> Request:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    sampling = Sampling(**{"max_tokens": 64, **options.pop("sampling", {})})
    tokens = tuple(engine.tokenizer.chat(messages))
    return Request(options.pop("rid", f"r{next(_rids)}"), tokens, sampling, logprobs=True, **options)


def run(engine: Engine, requests: list[Request], limit: int = 2000) -> dict[str, list[Event]]:
    """Add all requests and step until nothing is left to do: rid -> events."""
    for one in requests:
        engine.add(one)
    out: dict[str, list[Event]] = {one.rid: [] for one in requests}
    for _ in range(limit):
        if not engine.busy:
            return out
        for event in engine.step():
            out.setdefault(event.rid, []).append(event)
    raise AssertionError("the engine did not come to an end")


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def ask(engine: Engine, prompt, **options) -> list[Event]:
    one = request(engine, prompt, **options)
    return run(engine, [one])[one.rid]


def answer(engine: Engine, prompt, **options) -> str:
    return text(ask(engine, prompt, **options))


class Pair:
    """A prefill and a decode engine; each chunk's pages are copied while prefill announces it, as the transfer does."""

    def __init__(self, geometry: str = "tiny", faults=(), **options) -> None:
        self.prefill = Engine(geometry, role="prefill", faults=faults, **options)
        self.decode = Engine(geometry, role="decode", faults=faults, **options)
        self.prefill.on_chunk = self._chunk
        self.chunks: list[Chunk] = []
        self._reservation = None
        self._handoff = None

    def _chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        reserved, buffers = self._reservation, self.prefill.pools()
        for name in self.prefill.hooks.apply("chunk_buffers", tuple(buffers), chunk=chunk, buffers=buffers):
            if buffers[name].group == "full":
                source, first, target, base = (
                    chunk.full_pages,
                    chunk.first_page,
                    reserved.full_pages,
                    reserved.prefix_pages,
                )
            else:
                source, first, target, base = (
                    chunk.swa_pages,
                    chunk.swa_first_page,
                    reserved.swa_pages,
                    reserved.swa_first_page,
                )
            pairs = [(page, target[first + i - base]) for i, page in enumerate(source) if first + i >= base]
            if pairs:
                data = self.prefill.read_pages(name, [source for source, _ in pairs])
                pages = [target for _, target in pairs]
                self.decode.write_pages(name, pages, data)
        if chunk.last:
            self._handoff = self.prefill.hooks.apply("handoff", chunk.handoff, chunk=chunk)

    def ask(self, prompt, **options) -> list[Event]:
        one = request(self.prefill, prompt, bootstrap={"host": "127.0.0.1", "port": 1, "room": next(_rids)}, **options)
        self._reservation = self.decode.reserve(one)
        run(self.prefill, [one])
        self.decode.start(one.rid, self._handoff)
        self.prefill.release(one.rid)
        return run(self.decode, [])[one.rid]

    def answer(self, prompt, **options) -> str:
        return text(self.ask(prompt, **options))
