"""The options that every instrument takes, in one place, and the decorator that gives them to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .asks import Ask, Confirm, Target
from .bench import Bench
from .budget import Limits
from .controls import again_at_most, control_asks, run_controls
from .progress import Watch
from .specs import PromptSpec

R = TypeVar("R")


@dataclass(frozen=True)
class Common:
    """Options of every instrument:

    genre     haystack: "mixed", log, stock, minutes, table, code or noise
    needle    kind of value: digits5, digits7, uuid, words2 or word_number
    seed      changes text, keys and values together
    arm       name of the deployment in the rows
    controls  ask first what must be answered whatever the deployment does to long prompts; failing is "harness"
    limits    stop rules; what was measured until then is judged
    confirm   called with the budget before the first request; False sends nothing
    progress  None shows what the surface offers (a partial plot in a live notebook), True also text, False nothing
    """

    genre: str = "mixed"
    needle: str = "digits5"
    seed: int = 0
    arm: str = ""
    controls: bool = True
    limits: Limits | None = None
    confirm: Confirm | None = None
    progress: bool | Callable[[], Watch] | None = None

    def spec(self, tokens: int, depth: float = 0.5, **more: Any) -> PromptSpec:
        """A prompt of these options."""
        return PromptSpec(int(tokens), float(depth), self.genre, self.needle, self.seed, **more)

    def bench(self, probe: str, endpoint: Target, run: str | Path | None, **more: Any) -> Bench:
        """The bench of an instrument with these options."""
        own = {"arm": self.arm, "limits": self.limits, "confirm": self.confirm, "progress": self.progress}
        return Bench(endpoint, run, probe=probe, **{**own, **more})

    def begin(
        self, bench: Bench, base: PromptSpec, asks: Iterable[Ask] = (), *, more: int = 0, more_tokens: int = 0,
        spare: int = 0, spare_tokens: int = 0,
    ) -> bool:  # fmt: skip
        """Announce the budget (as `Bench.plan`), then send the controls; False when they failed."""
        checks = control_asks(bench.probe, base, arm=self.arm) if self.controls else []
        again, tokens = again_at_most(checks)
        bench.plan([*checks, *asks], more, more_tokens, spare=spare + again, spare_tokens=spare_tokens + tokens)
        bench.judged = run_controls(bench, checks) if checks else None
        return bench.judged is None or bench.judged.passed


def instrument(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a function that takes `common` the options of Common as keywords of its own, in signature and help.

    without   options that this instrument does not have
    """
    shared = [f for f in fields(Common) if f.name not in without]
    assert all(f.default is not MISSING for f in shared)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.name != "common"]
        several = {p.name for p in own if isinstance(p.default, tuple) and p.default}
        extra = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in shared]

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> R:
            for name, value in options.items():
                if name in several and not len(value):
                    raise ValueError(f"{name} is empty; give at least one, or leave it out")
            common = Common(**{f.name: options.pop(f.name) for f in shared if f.name in options})
            return function(*args, common=common, **options)

        call.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
        text = [x for x in inspect.getdoc(Common).split("\n") if x.split(" ")[0] not in without]  # type: ignore[union-attr]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n" + "\n".join(text)
        return call

    return decorate
