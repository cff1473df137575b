"""Prompts of an exact length: how many record lines and padding words make the wished number of tokens.

The number of lines is the largest that fits and the padding makes up the rest, so the result depends on the
specification and the server's tokenizer alone, not on the path by which it was found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .prompts import Messages, Prompt, assemble, lines
from .specs import PromptSpec, digest, facts_of

CHARACTERS_A_TOKEN = (0.25, 16.0)  # of any text here: a server that cuts prompts counts as if there were hundreds
CountTokens = Callable[[Messages], Awaitable[int]]


class LengthError(RuntimeError):
    """A prompt of the wished length could not be built; says how far off it came."""


@dataclass
class Ratio:
    """Tokens of a text of one genre on one server, learnt from counts: a template's share and characters a token."""

    characters: float = 4.0
    template: float = 8.0
    points: tuple[tuple[int, int], ...] = ()  # (characters, tokens)

    def learn(self, text: str, tokens: int) -> None:
        self.points = (*self.points[-7:], (len(text), tokens))
        (c0, t0), (c1, t1) = min(self.points), max(self.points)
        if c1 >= 2 * c0 and t1 > t0:
            self.characters = self._bounded((c1 - c0) / (t1 - t0))
            self.template = max(0.0, t0 - c0 / self.characters)
        elif tokens > self.template + 10:
            self.characters = self._bounded(len(text) / (tokens - self.template))

    @staticmethod
    def _bounded(characters: float) -> float:
        low, high = CHARACTERS_A_TOKEN
        return min(high, max(low, characters))

    def tokens(self, characters: int) -> int:
        return round(self.template + characters / self.characters)

    def length(self, tokens: int) -> float:
        return (tokens - self.template) * self.characters


async def build(
    spec: PromptSpec, count: CountTokens | None, ratio: Ratio, *, tolerance: int = 0, run_salt: str = ""
) -> Prompt:
    """Build the prompt of `spec`, `tolerance` tokens from its target at most, by asking `count`.

    Without `count` the length is an estimate by `ratio` and the prompt says `exact=False`; the server's own usage then
    tells the realised length. Raises LengthError when the length cannot be met, ValueError when it is too short for
    the question.
    """
    mean = sum(map(len, lines(spec.genre, f"a/{spec.seed}/{spec.genre}", 32))) / 32
    empty = len(assemble(spec, 0, 0, run_salt)[0])
    guess = max(0, round((ratio.length(spec.target_tokens) - empty) / mean))
    if count is None:
        text, prefix = assemble(spec, guess, 0, run_salt)
        tokens = ratio.tokens(len(text))
        return _finish(spec, text, prefix, tokens, False, round(len(prefix) / ratio.characters) if prefix else None)

    seen: dict[tuple[int, int], int] = {}

    async def measure(n: int, pad: int) -> int:
        if (n, pad) not in seen:
            text = assemble(spec, n, pad, run_salt)[0]
            seen[n, pad] = await count([{"role": "user", "content": text}])
            ratio.learn(text, seen[n, pad])
        return seen[n, pad]

    n = await _most_lines(spec.target_tokens, guess, mean, ratio, measure)
    pad = spec.target_tokens - await measure(n, 0)
    for _ in range(6):
        short = spec.target_tokens - await measure(n, pad)
        if abs(short) <= tolerance:
            text, prefix = assemble(spec, n, pad, run_salt)
            needle = await count([{"role": "user", "content": prefix}]) if prefix else None
            bare = await measure_empty(count) if needle is not None else 0
            return _finish(spec, text, prefix, seen[n, pad], True, None if needle is None else max(0, needle - bare))
        pad = max(0, pad + short)
    raise LengthError(
        f"a prompt of exactly {spec.target_tokens} tokens could not be built: padding words do not count one token "
        f"each (reached {seen.get((n, pad), 'another length')}); allow a tolerance"
    )


async def measure_empty(count: CountTokens) -> int:
    """Tokens of the chat template around an empty message."""
    return await count([{"role": "user", "content": ""}])


async def _most_lines(
    target: int, guess: int, mean: float, ratio: Ratio, measure: Callable[[int, int], Awaitable[int]]
) -> int:
    """The largest number of lines that does not pass the target: independent of the first guess."""
    low, high = -1, None  # measured: low fits, high does not
    n = guess
    for _ in range(40):
        tokens = await measure(n, 0)
        if tokens <= target:
            low = max(low, n)
        else:
            high = n if high is None else min(high, n)
        if high is not None and high - low == 1:
            break
        step = (target - tokens) / max(1.0, mean / ratio.characters)
        n = n + (max(1, int(step)) if tokens <= target else min(-1, int(step) - 1))
        n = max(low + 1, n) if high is None else min(max(low + 1, n), high - 1)
    if low < 0:
        raise ValueError(f"{target} tokens are too few for the question alone; ask for a longer prompt")
    return low


def _finish(spec: PromptSpec, text: str, prefix: str, tokens: int, exact: bool, needle: int | None) -> Prompt:
    facts, question, expected = facts_of(spec)
    messages = [{"role": "user", "content": text}]
    place = needle if spec.control not in ("absent", "in_question") else None
    return Prompt(messages, spec, question, expected, facts, tokens, exact, place, digest(messages, 32))
