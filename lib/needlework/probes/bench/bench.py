"""The bench on which every instrument works: build a prompt, send it, grade the answer, write the journal.

An instrument says what it wants to know as `Ask`s; the bench finds what the journal already holds and sends the rest, a
bounded number at a time. Identity is in the ask, not in the text: replaying a recorded run sends nothing and needs no
tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import needlework
from needlework.serving import TransportError, gauges
from needlework.serving import run as run_coroutine
from needlework.serving.capabilities import DISCOVERY_REQUESTS, DISCOVERY_TOKENS, Capabilities, discover
from needlework.serving.endpoint import attempt

from . import trial as rows
from .budget import Budget, Limits, Meter
from .journal import WHOLE, Journal
from .progress import Status, Watch, open_watch
from .prompts import GENERATOR, Builder, Prompt, PromptSpec, digest, facts_of
from .result import Result, foreign, outcomes, surprising, unmeasured
from .trial import Ask, Confirm, Prepare, Row, Stopped, Target, resolve

if TYPE_CHECKING:
    import pandas as pd

MAX_CONSECUTIVE_FAILURES = 8
FEWER = {"refused": 3, "timeout": 3}  # in a row, of failures after which waiting for more is no use
LEARNED_FROM = (256, 1024)  # tokens of two prompts from whose usage lengths are learned where nothing counts them
CALIBRATION = Budget(len(LEARNED_FROM), 2 * sum(LEARNED_FROM))
AHEAD = 64  # prompts whose lines are counted together
SLACK_TOKENS = 16  # a request: a first line that makes a text new, another question than the one it was built with
SLACK_SHARE = 1.15  # lengths that are estimated until the server has counted them
LENGTH_WARNING = (
    "prompt length differs from what was sent (see the column length_note); the axis shows the server's count"
)


def with_beside(trials: Budget, arms: int) -> Budget:
    """The budget of trials on so many endpoints, with what is sent beside them: finding out what they can do, and
    calibration.
    """
    requests = trials.requests + arms * DISCOVERY_REQUESTS + CALIBRATION.requests
    tokens = trials.prompt_tokens + arms * DISCOVERY_TOKENS + CALIBRATION.prompt_tokens
    return Budget(requests, tokens, expected=trials.requests)


class Bench:
    """One instrument at work on one deployment (or one arm of several, sharing a journal).

    endpoint    an Endpoint, a URL, or a Recorded run (also "recorded:FOLDER")
    run         folder of the journal; None keeps it in memory
    limits      stop when one of them is reached
    confirm     called with the budget before the first request; False stops before anything is sent
    progress    what is shown meanwhile, see `progress.open_watch`
    tolerance   tokens by which a prompt may miss its target length
    builder     another bench that builds the prompts, so that two arms get the same bytes
    """

    def __init__(
        self,
        endpoint: Target,
        run: str | Path | None = None,
        *,
        probe: str,
        arm: str = "",
        journal: Journal | None = None,
        builder: Bench | None = None,
        limits: Limits | None = None,
        confirm: Confirm | None = None,
        progress: bool | Callable[[], Watch] | None = None,
        tolerance: int = 0,
        thinking: bool = False,
    ):
        self.endpoint, recorded = resolve(endpoint)
        self.replay = recorded is not None
        if journal is not None:
            self.journal = journal
        elif recorded is not None:
            self.journal = recorded.journal
        else:
            self.journal = Journal(run)
        self.owns_journal = journal is None and recorded is None
        self.probe, self.arm, self.thinking, self.tolerance = probe, arm, thinking, tolerance
        self.limits, self.confirm = limits or Limits(), confirm
        self.meter: Meter = builder.meter if builder is not None else Meter(self.limits)  # one for both arms
        self.budget: Budget | None = None
        self._plan: Any = None  # (asks, more, spare, tokens of the last two) that were announced
        self._announced = False
        self._name = f"{probe}{'/' + arm if arm else ''}"
        self.sent = self.planned = 0
        self.used: dict[str, None] = {}  # ids of this instrument's trials, in order
        self.warnings: dict[str, None] = {}
        self.stopped = ""  # why the instrument ended early
        self.judged: Controls | None = None
        self._own_builder = Builder(self.endpoint, self.journal, tolerance) if self.endpoint else None
        self._leader = builder or self  # builds the prompts, and shows the progress of both
        self._followers: list[Bench] = []
        if builder is not None:
            builder._followers.append(self)
        self._values: dict[str, str] = {}
        self._failures = self._alive = 0
        self._progress = progress
        self._watch: Watch | None = None
        self._since = time.perf_counter()
        self._ready = False
        self._retries: float | None = None
        if not self.replay:
            self.journal.note(
                versions={"needlework": needlework.__version__, "python": platform.python_version()},
                generator=GENERATOR,
            )

    # ---- for instruments ----

    def note(self, **parameters: Any) -> None:
        """Record the instrument's parameters in the manifest."""
        if not self.replay:
            self.journal.note(parameters={self._name: parameters})

    def plan(self, asks: Iterable[Ask], more: int = 0, *, spare: int = 0, tokens: int = 0) -> Budget:
        """Announce the budget: `asks` known now, `more` usual later ones and `spare` ones that a bad course may need,
        of `tokens` in all. Controls count twice, as they are asked again where the line failed. From then on nothing is
        sent beyond it, to this endpoint or to those of benches that build with this one.

        It is confirmed before the first request, so that a run which holds everything asks nothing. Raises ValueError
        when it passes the limit on money.
        """
        asks = list(asks)
        checks = [a.prompt.target_tokens for a in asks if a.prompt.control]
        self._plan = (asks, more, spare + len(checks), tokens + sum(checks))
        self.planned = len(asks) + more
        self.budget = self._with_discovery(self._left())
        self.budget.check(self.limits)
        return self.budget

    def _with_discovery(self, trials: Budget) -> Budget:
        """The budget with what is sent beside trials: finding out what the endpoints can do."""
        benches = (self, *self._followers) if trials.requests else ()
        unknown = sum(b.endpoint is not None and b.endpoint.capabilities is None for b in benches)
        beside, tokens = unknown * DISCOVERY_REQUESTS, trials.prompt_tokens + unknown * DISCOVERY_TOKENS
        expected = None if trials.expected is None else trials.expected + beside
        return Budget(trials.requests + beside, tokens, self.limits.cost_of(tokens), expected)

    def _left(self) -> Budget:
        """What the plan may still send: without trials that the journal holds."""
        asks, more, spare, tokens = self._plan
        todo = [a for a in asks if not self.holds(a)]
        listed = {a.trial_id for a in asks}
        extra = [self.journal.rows[i] for i in self.used if i not in listed and i in self.journal.rows]
        open_ = max(0, more + spare - len(extra)) if todo or more else 0
        requests = len(todo) + open_
        if not requests or self.replay:
            return Budget(0, 0, self.limits.cost_of(0))
        tokens = max(0, tokens - sum(r["target_tokens"] for r in extra)) if open_ else 0
        tokens += sum(a.prompt.target_tokens for a in todo) + SLACK_TOKENS * requests
        expected = len(todo) + max(0, more - len(extra))
        found = self.endpoint.capabilities if self.endpoint is not None else None
        if found is None or found.tokenize == "usage":  # lengths are estimates here
            tokens = round(tokens * SLACK_SHARE)
            if not self._ready:
                requests, expected = requests + CALIBRATION.requests, expected + CALIBRATION.requests
                tokens += CALIBRATION.prompt_tokens
        return Budget(requests, tokens, self.limits.cost_of(tokens), expected)

    def _announce(self) -> None:
        """Once, before the first request: the budget is confirmed, and the meter held to it."""
        if self._plan is None or self._announced or self.replay:
            return
        trials = self._left()
        self.budget = self._with_discovery(trials)
        if self.confirm is not None and not self.confirm(self.budget):
            raise Stopped("not confirmed; nothing was sent")
        self._announced = True
        self.meter.announce(trials)
        self.journal.note(state={self._name: "begun"})

    def ask(
        self, asks: Iterable[Ask], *, concurrency: int = 1, prepare: Prepare | None = None, graded: bool = True
    ) -> list[Row]:
        """The rows of these trials in their order, from the journal or by sending; at most `concurrency` in flight.
        graded: each has an outcome.

        Raises Stopped when a limit is reached or the endpoint fails again and again, ValueError when a recorded run
        does not hold a trial, or no outcome of it.
        """
        asks = list(asks)
        for a in asks:
            self.remember(a)
            if self.holds(a):
                self.journal.rows[a.trial_id] = a.whole(self.journal.rows[a.trial_id], graded=graded)
        missing = [a for a in asks if not self.holds(a)]
        if missing and self.replay:
            raise ValueError(
                f"the recorded run holds no {missing[0]}; use the parameters it was recorded with, or a live endpoint"
            )
        self.used |= dict.fromkeys(a.trial_id for a in asks)
        if missing:
            self.run(self._send_all(missing, concurrency, prepare))
        return [self.journal.rows[a.trial_id] for a in asks]

    def remember(self, ask: Ask) -> None:
        """Values of this prompt are known from now on: met in another answer, they are foreign content."""
        self._values.update(dict.fromkeys((f.value for f in facts_of(ask.prompt)[0] if f.value), ask.trial_id))

    async def build(self, ask: Ask) -> Prompt:
        """The prompt of an ask, built now if it was not."""
        await self._leader._prepare()
        assert self._leader._own_builder is not None
        return await self._leader._own_builder.build(ask.prompt)

    def run(self, coroutine: Any) -> Any:
        """Run what sends requests; the watch draws meanwhile."""
        leader = self._leader
        leader._announce()
        if leader._watch is None:
            leader._watch = open_watch(leader._progress)
        try:
            return run_coroutine(coroutine, tick=leader._show if leader._watch is not None else None)
        finally:
            leader._show()

    def trials(self) -> pd.DataFrame:
        """This instrument's trials so far."""
        return self.journal.frame(list(self.used))

    def result(
        self, rows: list[Row], said: tuple[str, str], table: pd.DataFrame, details: dict[str, Any] | None = None
    ) -> Result:
        """The result, with this bench's trials, warnings and why it stopped. said: sentence and verdict of `rows`,
        which failed controls overrule, and so do rows that measured nothing.
        """
        sentence, verdict = said
        if self.judged is not None and not self.judged.passed:
            sentence, verdict = self.judged.sentence, "harness"
        if lost := unmeasured(rows):
            self.warn(lost)
            measured = outcomes(rows)[1]
            if verdict == "healthy" and surprising(measured, len(rows)):
                sentence, verdict = f"{sentence} But {lost}", "not proven"
        trials = self.trials()
        control = trials["probe"] == "control"
        kept, controls = (trials[part].reset_index(drop=True) for part in (~control, control))
        return Result(
            self.probe, sentence, verdict, kept, table, tuple(self.warnings), self.stopped, details or {}, controls
        )

    def warn(self, sentence: str) -> None:
        self.warnings.setdefault(sentence)

    def ended(self) -> None:
        """The instrument came to its end, or stopped: say so in the journal, and whether a gateway's counter of retries
        has moved, which turn failures into late successes.
        """
        if not self.replay and self._announced:
            self.journal.note(state={self._name: self.stopped or WHOLE})
        if self._retries is None or self.endpoint is None:
            return
        now = run_coroutine(gauges.read(self.endpoint))["router_retries"]
        if now is not None and now > self._retries:
            self.warn(
                f"the gateway retried {now - self._retries:.0f} requests: first failures are hidden in these rows"
            )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.owns_journal:
            self.journal.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capabilities(self) -> Capabilities:
        """What the endpoint can do: asked once, or as recorded."""
        if self.replay:
            targets = self.journal.manifest.get("targets", {})
            found: dict[str, Any] = targets.get(self.arm or "single") or next(iter(targets.values()), {})
            return Capabilities.from_dict(found)
        if not self._ready:
            self.run(self._prepare())
        assert self.endpoint is not None
        return self.endpoint.capabilities

    # ---- sending ----

    async def _prepare(self) -> None:
        """Ask what the endpoint can do, refuse a folder of another target, learn lengths where nothing counts. Once."""
        if self._ready:
            return
        assert self.endpoint is not None
        try:
            found = await discover(self.endpoint)
        except TransportError as error:
            raise RuntimeError(f"the endpoint does not answer: {error.reason}") from None
        if not self.endpoint.repeatable and not self.journal.rows:  # a resumed run keeps the one that it has
            self.journal.note(run_salt=self.journal.salt or secrets.token_hex(6))
        address = "" if self.endpoint.repeatable else digest([self.journal.salt, self.endpoint.base_url], 4)
        self.journal.enter(self.arm or "single", found.as_dict(), address)
        for note in found.notes:
            self.warn(note)
        self._ready = True
        self._retries = (await gauges.read(self.endpoint))["router_retries"]
        window = found.max_model_len
        if found.tokenize == "usage" and self._leader is self:
            for size in [n for n in LEARNED_FROM if window is None or n + 64 < window]:
                asked = Ask("calibration", PromptSpec(size, seed=987), arm=self.arm)
                if self.holds(asked):
                    self._learn(await self.build(asked), self.journal.rows[asked.trial_id]["prompt_tokens"])
                else:
                    await self._one(asked)

    def _learn(self, prompt: Prompt, realised: int | None) -> None:
        """Take the server's own count of a prompt whose length was an estimate."""
        assert self._leader._own_builder is not None
        if realised is not None and not prompt.exact:
            self._leader._own_builder.learn(prompt, realised)

    async def _send_all(self, asks: list[Ask], concurrency: int, prepare: Prepare | None) -> None:
        await self._prepare()
        builder = self._leader._own_builder
        assert builder is not None
        queue, crowd = iter(enumerate(asks)), min(concurrency, len(asks))
        ahead: dict[int, asyncio.Task[None]] = {}  # lines of many prompts are counted together

        async def foreseen(block: int) -> None:
            if block not in ahead and block * AHEAD < len(asks):
                part = asks[block * AHEAD : (block + 1) * AHEAD]
                ahead[block] = asyncio.create_task(builder.foresee([a.prompt for a in part]))
            if block in ahead:
                await asyncio.shield(ahead[block])

        async def worker() -> None:
            for i, a in queue:  # shared: every worker takes the next one
                await foreseen(i // AHEAD)
                await self._one(a, prepare, crowd)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(crowd):
                    group.create_task(worker())
        except BaseExceptionGroup as group_error:  # one clear reason is worth more than the bundle
            reason = group_error.exceptions[0]
        else:
            return
        raise reason  # out here, since a notebook shows an error with the bundle in its context as a bare traceback

    async def _one(self, a: Ask, prepare: Prepare | None = None, crowd: int = 1) -> Row:
        """Build and send an ask, one of `crowd` in flight, grade the answer, write the row, and return it."""
        prompt = await self.build(a)
        assert self.endpoint is not None
        rows.check_window(a, prompt, self.endpoint.capabilities.max_model_len)
        self.count(prompt.counted_tokens)
        row = self.row(a, prompt)
        row["concurrency"] = max(crowd, a.concurrency)
        row |= await rows.exchange(
            self.endpoint, a, prompt, self._values, alone=row["concurrency"] == 1, thinking=self.thinking,
            tolerance=self.tolerance, prepare=prepare,
        )  # fmt: skip
        if row.get("length_note") and prompt.counted_by == "lines":  # then only a whole count can tell
            assert self._leader._own_builder is not None
            prompt = await self._leader._own_builder.confirm(prompt, row["prompt_tokens"])
            note = rows.length_note(prompt, row["prompt_tokens"], self.tolerance)
            row |= rows.sent_columns(prompt) | {"length_note": note}
        row = a.whole(row, graded=False)
        self.meter.correct(prompt.counted_tokens, row["prompt_tokens"])
        self.journal.append(row)
        if row["outcome"] == "transport":
            self._failures += 1
            if self._failures >= FEWER.get(row["failure"], MAX_CONSECUTIVE_FAILURES):
                if row["failure"] in FEWER or self._alive >= 3 or not await self._answers():
                    raise Stopped(f"{self._failures} requests in a row failed; the last: {row['error']}")
                self._failures, self._alive = 0, self._alive + 1  # it is these prompts that it refuses
            return row
        self._failures = 0
        self._learn(prompt, row["prompt_tokens"])
        if row.get("length_note"):
            self.warn(LENGTH_WARNING)
        return row

    async def _answers(self) -> bool:
        """Does the endpoint still answer when it is only greeted?"""
        assert self.endpoint is not None
        return await attempt(self.endpoint.chat([{"role": "user", "content": "Hello."}], max_tokens=1)) is not None

    async def trial(self, a: Ask) -> Row:
        """One ask from within a coroutine: the journal's row, or send it now."""
        known = self.journal.get(a.trial_id, final=self.replay)
        return known if known is not None else await self._one(a)

    def row(self, a: Ask, prompt: Prompt) -> Row:
        """The part of a row that is known before anything is sent."""
        return rows.before(a, prompt, run=self.journal.name, ordinal=self.sent)

    def write(self, row: Row) -> Row:
        """Keep a finished row."""
        self.journal.append(row)
        self.used.setdefault(row["trial_id"])
        return row

    def count(self, tokens: int) -> None:
        """Enter a request of so many prompt tokens that is sent now; raises Stopped when it is one too many."""
        if reason := self.meter.refused(tokens):
            raise Stopped(reason)
        self.meter.count(tokens)
        self.sent += 1

    def holds(self, a: Ask) -> bool:
        """Is this trial in the journal already?"""
        return self.journal.get(a.trial_id, final=self.replay) is not None

    def _show(self) -> None:
        if self._watch is not None:
            asked = [i for bench in (self, *self._followers) for i in list(bench.used)]
            found = [row for i in asked if (row := self.journal.rows.get(i)) is not None]
            planned, sent = max(self.planned, len(found)), self.sent + sum(b.sent for b in self._followers)
            self._watch.update(
                Status(self.probe, self.arm, len(found), planned, found, time.perf_counter() - self._since, sent)
            )


SHORT_TOKENS = 256


@dataclass(frozen=True)
class Controls:
    """`passed` False means that the harness or the model's fit is in doubt; `why` says which control and how."""

    passed: bool
    why: str
    invents: int  # absent facts answered with some value: misses may then be inventions
    rows: tuple[Row, ...]

    @property
    def sentence(self) -> str:
        """What an instrument says whose controls failed."""
        return (
            f"Harness, not recall: {self.why}. Even {SHORT_TOKENS} tokens are not answered, so either the harness does "
            "not fit this model or the deployment fails at any length; nothing is said about recall against length."
        )


def control_asks(probe: str, base: PromptSpec, *, arm: str = "", concurrency: int = 1) -> list[Ask]:
    """Four controls in the run's own genre and kind of needle."""
    specs = [
        replace(
            base, target_tokens=SHORT_TOKENS, control=kind, depth=0.5, from_start=None, from_end=None, needles=1, ask=0
        )
        for kind in ("short", "in_question", "at_end", "absent")
    ]
    seeded = [replace(s, seed=int(digest(["control", i, base.seed], 7), 16)) for i, s in enumerate(specs)]
    return [Ask(probe, s, arm=arm, concurrency=concurrency, label="control") for s in seeded]


def run_controls(bench: Bench, asks: list[Ask]) -> Controls:
    """Send the controls (or read them back) and judge them."""
    rows = bench.ask(asks)
    if any(r["outcome"] == "transport" for r in rows) and not bench.replay:
        rows = bench.ask(asks)  # one stray failure of the line is no failure of the harness: ask those again, once
    failed: list[str] = []
    invents = 0
    for ask, row in zip(asks, rows, strict=True):
        kind = ask.prompt.control
        if kind == "absent":
            withheld = facts_of(replace(ask.prompt, control=""))[2] or ""
            if withheld and withheld in (row.get("answer") or ""):
                failed.append("a value that was never given was answered")
            elif row["outcome"] not in ("refusal", "empty", "transport", "cut", "reasoning_only"):
                invents += 1
            continue
        hits, measured = outcomes([row])
        if foreign([row]):
            bench.warn("a control was answered with the value of another request")  # a finding, not a harness fault
        elif hits == 0:
            what = row["outcome"] if measured else f"{row['outcome']}, no measurement"
            what += ", the value stands in the thoughts" if row.get("in_reasoning") else ""
            failed.append(f"{kind.replace('_', ' ')} ({what})")
    if invents:
        bench.warn("asked for a fact that was not given, the model invents one: a wrong value may be an invention")
    why = f"the controls failed: {'; '.join(failed)}" if failed else ""
    return Controls(not failed, why, invents, tuple(rows))


F = TypeVar("F", bound=Callable[..., Any])


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
    asked: Mapping[str, Any] = field(default_factory=dict)  # the instrument's own parameters, for the manifest

    def spec(self, tokens: int, depth: float = 0.5, **more: Any) -> PromptSpec:
        """A prompt of these options."""
        return PromptSpec(int(tokens), float(depth), self.genre, self.needle, self.seed, **more)

    @contextlib.contextmanager
    def bench(self, probe: str, endpoint: Target, run: str | Path | None, **more: Any) -> Iterator[Bench]:
        """An instrument's bench while it is at work; what ends it early is kept in `stopped`, and what was measured
        until then is judged.
        """
        own = {"arm": self.arm, "limits": self.limits, "confirm": self.confirm, "progress": self.progress}
        with Bench(endpoint, run, probe=probe, **{**own, **more}) as bench:
            bench.note(
                **{n: _plain(v) for n, v in self.asked.items()}, genre=self.genre, needle=self.needle, seed=self.seed
            )
            try:
                yield bench
            except Stopped as reason:
                bench.stopped = str(reason)
            bench.ended()

    def begin(
        self, bench: Bench, base: PromptSpec, asks: Iterable[Ask] = (), more: int = 0, *, spare: int = 0,
        tokens: int = 0, exact: bool = False,
    ) -> bool:  # fmt: skip
        """Announce the budget (as `Bench.plan`), then send the controls; False when they failed. exact: ValueError when
        nothing counts tokens.
        """
        checks = control_asks(bench.probe, base, arm=self.arm) if self.controls else []
        bench.plan([*checks, *asks], more, spare=spare, tokens=tokens)
        if exact and bench.capabilities.tokenize == "usage":
            raise ValueError(f"{bench.probe}: this needs exact lengths, and the endpoint has no tokenise route")
        bench.judged = run_controls(bench, checks) if checks else None
        return bench.judged is None or bench.judged.passed


def _plain(value: Any) -> Any:
    """A parameter as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


class Options(TypedDict, total=False):
    """The options of Common as keywords, for type checkers and completion."""

    genre: str
    needle: str
    seed: int
    arm: str
    controls: bool
    limits: Limits | None
    confirm: Confirm | None
    progress: bool | Callable[[], Watch] | None


def instrument(*, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Show the options of Common in the signature and help of a function that takes `**options: Unpack[Options]`, and
    refuse empty lists.

    without   options that this instrument does not have
    """
    shared = [f for f in fields(Common) if f.name not in ("asked", *without)]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        several = {p.name for p in own if isinstance(p.default, tuple) and p.default}
        extra = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in shared]

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for name, value in options.items():
                if name in without:
                    raise TypeError(f"{function.__name__} has no option {name}")
                if name in several and not len(value):
                    raise ValueError(f"{name} is empty; give at least one, or leave it out")
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            asked = {p.name: bound.arguments[p.name] for p in own[2:]}  # without the deployment and the run's folder
            return function(*args, **options, asked=asked)

        call.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
        text = [x for x in (inspect.getdoc(Common) or "").split("\n") if x.split(" ")[0] not in without]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n" + "\n".join(text)
        return cast(F, call)

    return decorate
