"""What a run will cost, said before it starts, and the limits at which it stops."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MOST_TRIALS = 50_000  # of one instrument: they are listed before the budget is shown, and sent for a day


def check_trials(count: int) -> None:
    """Raises ValueError when `count` trials are more than one instrument plans: before any of them is listed."""
    if count > MOST_TRIALS:
        raise ValueError(
            f"that is {count:,} trials, more than the {MOST_TRIALS:,} that one run plans; ask for fewer, or split them "
            "into runs with seeds of their own"
        )


@dataclass(frozen=True)
class Limits:
    """Stop rules. None means no limit. `price` is money for a million prompt tokens, in the user's currency."""

    requests: int | None = None
    prompt_tokens: int | None = None
    minutes: float | None = None
    cost: float | None = None
    price: float | None = None

    def cost_of(self, prompt_tokens: int) -> float | None:
        return None if self.price is None else prompt_tokens / 1e6 * self.price

    def reached(self, requests: int, prompt_tokens: int, minutes: float) -> str | None:
        """The limit that was reached, in words, or None."""
        cost = self.cost_of(prompt_tokens)
        if self.requests is not None and requests >= self.requests:
            return f"stopped at the limit of {self.requests} requests"
        if self.prompt_tokens is not None and prompt_tokens >= self.prompt_tokens:
            return f"stopped at the limit of {self.prompt_tokens:,} prompt tokens"
        if self.minutes is not None and minutes >= self.minutes:
            return f"stopped at the limit of {self.minutes:g} minutes"
        if self.cost is not None and cost is not None and cost >= self.cost:
            return f"stopped at the limit of {self.cost:g} (money)"
        return None


@dataclass(frozen=True)
class Budget:
    """What may still be sent, at most: the bench stops there. `expected` requests are usual, None for all of them."""

    requests: int
    prompt_tokens: int
    cost: float | None = None
    expected: int | None = None

    def check(self, limits: Limits) -> None:
        """Raises ValueError when even the plan passes a limit on money; the other limits stop the run when reached."""
        if limits.cost is not None and self.cost is not None and self.cost > limits.cost:
            raise ValueError(f"the run would cost about {self.cost:.2f}, more than the limit of {limits.cost:.2f}")

    def __str__(self) -> str:
        usual = f"about {self.expected:,} requests, " if self.expected not in (None, self.requests) else ""
        parts = [f"{usual}{self.requests:,} at most" if usual else f"{self.requests:,} requests at most"]
        parts.append(f"{self.prompt_tokens:,} prompt tokens at most")
        if self.cost is not None:
            parts.append(f"about {self.cost:.2f} at the given price")
        return ", ".join(parts)


@dataclass
class Meter:
    """Counts what one instrument sends, to one endpoint or several, and holds it to its limits and to its budget.

    A request is entered with the tokens that it was built with and corrected by the server's own count.
    """

    limits: Limits
    requests: int = 0
    prompt_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    _ends: tuple[int, int] | None = None  # requests and tokens at which the announced budget is used up
    _budget: Budget | None = None

    def announce(self, budget: Budget) -> None:
        """From here on at most this much."""
        self._budget, self._ends = budget, (self.requests + budget.requests, self.prompt_tokens + budget.prompt_tokens)

    def refused(self, tokens: int) -> str | None:
        """Why a further request of `tokens` may not be sent, in words, or None."""
        minutes = (time.perf_counter() - self.started) / 60
        if reason := self.limits.reached(self.requests, self.prompt_tokens, minutes):
            return reason
        if self._ends is None or self._budget is None:
            return None
        if self.requests + 1 > self._ends[0]:
            return f"stopped at the announced {self._budget.requests} requests"
        if self.prompt_tokens + tokens > self._ends[1]:
            return f"stopped before passing the announced {self._budget.prompt_tokens:,} prompt tokens"
        return None

    def count(self, tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += tokens

    def correct(self, tokens: int, realised: int | None) -> None:
        """The server has counted `realised` tokens where `tokens` were entered."""
        if realised is not None:
            self.prompt_tokens += realised - tokens
