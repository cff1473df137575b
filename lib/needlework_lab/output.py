"""From logits to a token, and from tokens to events: sampling, stop conditions, honest finish reasons."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from needlework_lab.intent import log_probabilities
from needlework_lab.tokenizer import Stream, Tokenizer
from needlework_lab.types import Event, Request


def draw(logits: Tensor, request: Request, position: int) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    """(token, its log-probability at temperature 1, the best few (token, log-probability)) of logits [V].

    Greedy at temperature 0. Otherwise sampled with a generator made of the request's seed and the position alone, so
    that neither the batch nor the chunk size changes the draw.
    """
    sampling = request.sampling
    if not all(
        isfinite(end) for end in torch.aminmax(logits)
    ):  # nothing can be said: every token is as good, and the first one wins
        logits = torch.zeros_like(logits)
    logprobs = log_probabilities(logits)
    if sampling.temperature <= 0:
        token = int(logits.numpy().argmax())
    else:
        scaled = logits / sampling.temperature
        if sampling.top_k > 0:
            kept = torch.topk(scaled, min(sampling.top_k, len(scaled))).values[-1]
            scaled = scaled.masked_fill(scaled < kept, -torch.inf)
        chances = torch.softmax(scaled, dim=-1)
        if sampling.top_p < 1:
            order = torch.argsort(chances, descending=True)
            passed = torch.cumsum(chances[order], 0) - chances[order]
            chances[order[passed >= sampling.top_p]] = 0.0
        generator = torch.Generator().manual_seed((sampling.seed * 1_000_003 + position) % (1 << 62))
        token = int(torch.multinomial(chances, 1, generator=generator))
    top: tuple[tuple[int, float], ...] = ()
    if request.top_logprobs > 0:
        best = torch.topk(logprobs, min(request.top_logprobs, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return token, float(logprobs[token]), top


class Output:
    """What one request has said so far, and whether it is finished."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt_tokens: int, limit: int) -> None:
        self.request, self.prompt_tokens = request, prompt_tokens
        self.tokens: list[int] = []
        self.limit = limit
        self.verified = 0  # steps that verified drafts
        self._stream = Stream(tokenizer)
        self._text, self._sent = "", 0
        self._eos = tokenizer.special["<|eos|>"]

    @property
    def left(self) -> int:
        """Tokens that may still be said."""
        return self.limit - len(self.tokens)

    def push(
        self, token: int, logprob: float, top: tuple[tuple[int, float], ...], cached: int, cached_host: int
    ) -> Event:
        """The event of one more token. Text that may turn out to begin a stop string is held back."""
        sampling = self.request.sampling
        self.tokens.append(token)
        finish: str | None = None
        matched: int | str | None = None
        if (token == self._eos and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish, matched = "stop", token
        else:
            self._text += self._stream.push(token)
        if finish is None and len(self.tokens) >= self.limit:
            finish = "length"
        if finish is not None:
            self._text += self._stream.end()
        end = len(self._text)
        for stop in sampling.stop:
            at = self._text.find(stop, max(0, self._sent - len(stop)))
            if stop and 0 <= at <= end and (at < end or matched is None):
                end, finish, matched = at, "stop", stop
        if finish is None:
            end -= max((_overlap(self._text, stop) for stop in sampling.stop), default=0)
        text, self._sent = self._text[self._sent : end], max(self._sent, end)
        wanted = self.request.logprobs or self.request.top_logprobs > 0
        return Event(
            self.request.rid, token, text, logprob if wanted else None, top, finish, matched,
            self.prompt_tokens, len(self.tokens), cached, cached_host, self.verified,
        )  # fmt: skip

    def aborted(self, cached: int, cached_host: int) -> Event:
        """The last event of a request that was given up."""
        return Event(
            self.request.rid, None, finish_reason="abort", prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens), cached_tokens=cached,
            cached_host_tokens=cached_host, verified=self.verified,
        )  # fmt: skip

    def failed(self, reason: str) -> Event:
        """The last event of a request that the engine could not serve."""
        return Event(
            self.request.rid, None, finish_reason="error", error=reason, prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens),
        )  # fmt: skip


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
