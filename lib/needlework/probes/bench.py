"""The bench on which every instrument works: build a prompt, send it, grade the answer, write the journal.

An instrument says what it wants to know as `Ask`s; the bench finds what the journal already holds and sends the rest, a
bounded number at a time. Identity is in the ask, not in the text: replaying a recorded run sends nothing and needs no
tokenizer.
"""

from __future__ import annotations

import asyncio
import datetime
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import needlework
from needlework.serving import Endpoint, Reply, TransportError, dialects
from needlework.serving import run as run_coroutine

from . import prompts
from .budget import Budget, Limits, Speed
from .grade import grade
from .journal import Journal, Recorded
from .prompts import Messages, Prompt, PromptSpec

if TYPE_CHECKING:
    import pandas as pd

Target = Endpoint | Recorded | str
Row = dict[str, Any]
Confirm = Callable[[Budget], bool]
# Earlier turns of a conversation: sends them, returns the final messages and columns to add to the trial's row.
Prepare = Callable[["Ask", Prompt, Endpoint], Awaitable[tuple[Messages, dict[str, Any]]]]
MAX_CONSECUTIVE_FAILURES = 8


@dataclass(frozen=True)
class Ask:
    """One trial to be made. All fields are part of its identity, so change one and it is another trial.

    arm     which deployment or condition answers; cache: the state that is wanted ("cold", "warm", "unknown")
    send    a number that tells repeated sends of one prompt apart (0 = first)
    label   anything else that makes it another question
    """

    probe: str
    prompt: PromptSpec
    arm: str = ""
    repeat: int = 0
    cache: str = "cold"
    send: int = 0
    turn: int = 1
    concurrency: int = 1
    ordinal: int | None = None
    label: str = ""
    max_tokens: int = 48
    temperature: float = 0.0

    @cached_property
    def trial_id(self) -> str:
        """Hash of what is asked."""
        names = (f.name for f in fields(self) if f.name != "ordinal")  # which says when, not what
        identity = {name: getattr(self, name) for name in names} | {"prompt": self.prompt.as_dict()}
        return prompts.digest({"generator": prompts.GENERATOR, **identity})


class Stopped(RuntimeError):
    """An instrument stopped early: the reason is one sentence; what was measured is in the journal."""


class Bench:
    """One instrument at work on one deployment (or one arm of several, sharing a journal).

    endpoint    an Endpoint, a URL, or a Recorded run (also "recorded:FOLDER")
    run         folder of the journal; None keeps it in memory
    limits      stop when one of them is reached
    confirm     called with the budget before the first request; False stops before anything is sent
    progress    a tqdm bar on stderr
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
        progress: bool = False,
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
        self.probe, self.arm, self.builder = probe, arm, builder
        self.limits, self.confirm, self.progress = limits or Limits(), confirm, progress
        self.tolerance, self.thinking = tolerance, thinking
        self.budget: Budget | None = None
        self.speed = Speed()
        self.sent = self.sent_tokens = 0
        self.used: dict[str, None] = {}  # ids of this instrument's trials, in order
        self.warnings: dict[str, None] = {}
        self._ratios: dict[str, prompts.Ratio] = {}
        self._built: dict[str, Prompt] = {}
        self._values: dict[str, str] = {}
        self._failures = 0
        self._started = time.perf_counter()
        self._bar: Any = None
        self._ready = False
        self._overhead: int | None = None
        self._retries: float | None = None
        if not self.replay:
            self.journal.note(
                versions={"needlework": needlework.__version__, "python": platform.python_version()},
                generator=prompts.GENERATOR,
            )

    # ---- for instruments ----

    def note(self, **parameters: Any) -> None:
        """Record the instrument's parameters in the manifest."""
        if not self.replay:
            self.journal.note(parameters={f"{self.probe}{'/' + self.arm if self.arm else ''}": parameters})

    def plan(self, asks: Iterable[Ask], more: int = 0, more_tokens: int = 0) -> Budget:
        """Budget of what is still to be sent: `asks` known now and at most `more` later ones.

        Raises Stopped when it is not confirmed, ValueError when it passes the limit on money.
        """
        todo = [a for a in asks if self.journal.get(a.trial_id, final=self.replay) is None]
        requests = len(todo) + more
        tokens = sum(a.prompt.target_tokens for a in todo) + more_tokens
        if requests and not self.replay:
            run_coroutine(self._prepare())
        self.budget = Budget(requests, tokens, self.speed.minutes(requests, tokens), self.limits.cost_of(tokens))
        if requests and not self.replay:
            self.budget.check(self.limits)
            if self.confirm is not None and not self.confirm(self.budget):
                raise Stopped("not confirmed; nothing was sent")
        return self.budget

    def ask(self, asks: Iterable[Ask], *, concurrency: int = 1, prepare: Prepare | None = None) -> list[Row]:
        """The rows of these trials in their order, from the journal or by sending; at most `concurrency` in flight.

        Raises Stopped when a limit is reached or the endpoint fails again and again, ValueError when a recorded run
        does not hold a trial.
        """
        asks = list(asks)
        for a in asks:
            self.remember(a)
        missing = [a for a in asks if self.journal.get(a.trial_id, final=self.replay) is None]
        if missing and self.replay:
            a = missing[0]
            raise ValueError(
                f"the recorded run holds no {a.probe} trial of {a.prompt.target_tokens} tokens at depth "
                f"{a.prompt.depth:g} (seed {a.prompt.seed}{', arm ' + a.arm if a.arm else ''}); "
                "use the parameters it was recorded with, or a live endpoint"
            )
        if missing:
            run_coroutine(self._send_all(missing, concurrency, prepare))
        for a in asks:
            self.used.setdefault(a.trial_id)
        return [self.journal.rows[a.trial_id] for a in asks]

    def remember(self, ask: Ask) -> None:
        """Values of this prompt are known from now on: met in another answer, they are foreign content."""
        self._values.update(dict.fromkeys((f.value for f in prompts.facts_of(ask.prompt)[0] if f.value), ask.trial_id))

    async def build(self, ask: Ask) -> Prompt:
        """The prompt of an ask, built now if it was not."""
        return await (self.builder or self)._build(ask.prompt)

    def trials(self) -> pd.DataFrame:
        """This instrument's trials so far."""
        return self.journal.frame(list(self.used))

    def warn(self, sentence: str) -> None:
        self.warnings.setdefault(sentence)

    def check_retries(self) -> None:
        """A gateway that retries turns failures into late successes: say so when its counter has moved."""
        if self._retries is None or self.endpoint is None:
            return
        now = run_coroutine(dialects.read_metrics(self.endpoint))["router_retries"]
        if now is not None and now > self._retries:
            self.warn(
                f"the gateway retried {now - self._retries:.0f} requests: first failures are hidden in these rows"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.owns_journal:
            self.journal.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capabilities(self) -> dialects.Capabilities:
        """What the endpoint can do: asked once, or as recorded."""
        if self.replay:
            targets = self.journal.manifest.get("targets", {})
            found: dict[str, Any] = targets.get(self.arm or "single") or next(iter(targets.values()), {})
            return dialects.Capabilities.from_dict(found)
        run_coroutine(self._prepare())
        assert self.endpoint is not None
        return self.endpoint.capabilities

    # ---- sending ----

    async def _prepare(self) -> None:
        """Ask what the endpoint can do, refuse a folder of another target, calibrate the speed. Once."""
        if self._ready:
            return
        assert self.endpoint is not None
        try:
            found = await dialects.probe(self.endpoint)
        except TransportError as error:
            raise RuntimeError(f"the endpoint does not answer: {error.reason}") from None
        known = self.journal.manifest.get("targets", {}).get(self.arm or "single")
        if known and (known.get("engine"), known.get("model")) != (found.engine, found.model):
            raise ValueError(
                f"this run folder measured {known.get('engine')} with model {known.get('model')!r}, not "
                f"{found.engine} with {found.model!r}; use another folder"
            )
        self.journal.note(targets={self.arm or "single": found.as_dict()})
        for note in found.notes:
            self.warn(note)
        self._ready = True
        window = found.max_model_len
        self._retries = (await dialects.read_metrics(self.endpoint))["router_retries"]
        sizes = [n for n in (256, 1024) if window is None or n + 64 < window]
        for size in sizes:  # two points give the seconds a request and the seconds a token
            a = Ask("calibration", PromptSpec(size, seed=987), arm=self.arm)
            row = self.journal.get(a.trial_id) or await self._one(a)
            if row["outcome"] != "transport":
                self.speed.add(row["prompt_tokens"] or size, row["latency_s"])

    async def _send_all(self, asks: list[Ask], concurrency: int, prepare: Prepare | None) -> None:
        await self._prepare()
        self._start_bar(len(asks))
        queue = iter(asks)

        async def worker() -> None:
            for a in queue:  # shared: every worker takes the next one
                self._stop_if_over()
                await self._one(a, prepare)
                if self._bar is not None:
                    self._bar.update(1)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(asks))):
                    group.create_task(worker())
        except BaseExceptionGroup as group_error:  # one clear reason is worth more than the bundle
            raise group_error.exceptions[0] from None

    async def _one(self, a: Ask, prepare: Prepare | None = None) -> Row:
        prompt = await (self.builder or self)._build(a.prompt)
        found = self.endpoint.capabilities if self.endpoint else None
        assert self.endpoint is not None and found is not None
        limit = found.max_model_len
        if limit and prompt.counted_tokens + a.max_tokens > limit:
            raise ValueError(
                f"a prompt of {prompt.counted_tokens} tokens and {a.max_tokens} for the answer do not fit the window "
                f"of {limit} tokens; ask for shorter prompts"
            )
        return await self._send(a, prompt, prepare)

    async def trial(self, a: Ask) -> Row:
        """One ask from within a coroutine: the journal's row, or send it now."""
        known = self.journal.get(a.trial_id, final=self.replay)
        return known if known is not None else await self._one(a)

    def row(self, a: Ask, prompt: Prompt) -> Row:
        """The part of a row that is known before anything is sent."""
        return {
            "trial_id": a.trial_id,
            "run": self.journal.name,
            "probe": "control" if prompt.spec.control else a.probe,
            "arm": a.arm or "single",
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "target_tokens": prompt.spec.target_tokens,
            "counted_tokens": prompt.counted_tokens if prompt.exact else None,
            "depth": prompt.spec.depth,
            "needle_token": prompt.needle_token,
            "question": prompt.question,
            "expected": prompt.expected,
            "turn": a.turn,
            "concurrency": a.concurrency,
            "ordinal": a.ordinal if a.ordinal is not None else self.sent,
            "seed": prompt.spec.seed,
            "repeat": a.repeat,
            "send": a.send,
            "wanted_cache": a.cache,
            "label": a.label,
            "control": prompt.spec.control,
            "genre": prompt.spec.genre,
            "needle": prompt.spec.needle,
            "prompt_sha": prompt.sha256,
        }

    def write(self, row: Row) -> Row:
        """Keep a finished row."""
        self.journal.append(row)
        self.used.setdefault(row["trial_id"])
        return row

    def count_sent(self, prompt: Prompt) -> None:
        """For instruments that send themselves: the budget's limits count what they send."""
        self._stop_if_over()
        self.sent += 1
        self.sent_tokens += prompt.counted_tokens

    async def _send(self, a: Ask, prompt: Prompt, prepare: Prepare | None) -> Row:
        """Send an ask, grade the answer, write the row, and return it."""
        assert self.endpoint is not None
        found = self.endpoint.capabilities
        row = self.row(a, prompt)
        self.sent += 1
        self.sent_tokens += prompt.counted_tokens
        # the same text again and yet cold: only a salt in the request does that
        salt = a.trial_id if a.cache == "cold" and a.send > 0 else None
        extra = found.fields(salt=salt, thinking=self.thinking)
        messages = prompt.messages
        more: Row = {}
        try:
            if prepare is not None:
                messages, more = await prepare(a, prompt, self.endpoint)
            reply = await self.endpoint.chat(
                messages, max_tokens=a.max_tokens, temperature=a.temperature, logprobs=found.logprobs, fields=extra
            )
        except TransportError as error:
            row |= {"outcome": "transport", "error": error.reason, "cache": "unknown", "prompt_tokens": None}
            self.journal.append(row)
            self._failures += 1
            if self._failures >= MAX_CONSECUTIVE_FAILURES:
                raise Stopped(f"{self._failures} requests in a row failed; the last: {error.reason}") from None
            return row
        self._failures = 0
        if reply.prompt_tokens is not None:
            self._learn(prompt, reply.prompt_tokens)
        row |= self.columns(a, prompt, reply) | more
        row["error"] = self._length_error(prompt, reply.prompt_tokens) if prepare is None else None
        self.journal.append(row)
        return row

    def columns(self, a: Ask, prompt: Prompt, reply: Reply) -> Row:
        """The part of a row that a reply decides."""
        result = grade(reply, prompt.expected, prompt.facts)
        if result.outcome not in ("exact", "empty", "cut", "reasoning_only"):  # only then can it be foreign content
            own, own_id = {f.value for f in prompt.facts}, a.trial_id
            elsewhere = {v: t for v, t in self._values.items() if t != own_id and v not in own}
            result = grade(reply, prompt.expected, prompt.facts, elsewhere)
        counted = prompt.counted_tokens if prompt.exact else None
        return {
            "prompt_tokens": reply.prompt_tokens if reply.prompt_tokens is not None else counted,
            "answer": result.answer,
            "outcome": result.outcome,
            "score": result.score,
            "logprob": result.logprob,
            "distance": result.distance,
            "answered_from": result.answered_from,
            "finish_reason": reply.finish_reason,
            "completion_tokens": reply.completion_tokens,
            "reasoning_tokens": reply.reasoning_tokens,
            "cached_tokens": reply.cached_tokens,
            "cache": cache_state(reply.cached_tokens, reply.prompt_tokens),
            "ttft_s": _rounded(reply.ttft_s),
            "latency_s": _rounded(reply.latency_s),
            "accept_length": reply.accept_length,
            "worker": reply.worker,
            "fingerprint": reply.fingerprint,
        }

    async def _build(self, spec: PromptSpec) -> Prompt:
        key = prompts.digest(spec.as_dict())
        if key not in self._built:
            await self._prepare()
            ratio = self._ratios.setdefault(spec.genre, prompts.Ratio())
            counted = self.endpoint is not None and self.endpoint.capabilities.tokenize != "usage"
            if len(self._built) > 64:
                self._built.pop(next(iter(self._built)))
            try:
                self._built[key] = await prompts.build(
                    spec, self._count if counted else None, ratio, tolerance=self.tolerance
                )
            except TransportError as error:
                raise RuntimeError(f"the endpoint's tokenize route fails: {error.reason}") from None
        return self._built[key]

    async def _count(self, messages: Messages) -> int:
        assert self.endpoint is not None
        found = self.endpoint.capabilities
        sha = prompts.digest([found.model, found.tokenize, messages], 32)
        count = self.journal.count(sha)
        if count is None:
            count = await dialects.count_tokens(self.endpoint, messages)
            if count is None:
                raise TransportError("the tokenize route gave no count")
            self.journal.add_count(sha, count)
        if found.tokenize == "text":  # the template's share is not counted by the text form: learn it from usage, once
            if self._overhead is None:
                hello = [{"role": "user", "content": "Hello."}]
                reply = await self.endpoint.chat(hello, max_tokens=1, fields=found.fields())
                bare = await dialects.count_tokens(self.endpoint, hello)
                self._overhead = max(0, (reply.prompt_tokens or bare or 0) - (bare or 0))
            count += self._overhead
        return count

    def _learn(self, prompt: Prompt, realised: int) -> None:
        if not prompt.exact:
            self._ratios.setdefault(prompt.spec.genre, prompts.Ratio()).learn(prompt.text, realised)

    def _length_error(self, prompt: Prompt, realised: int | None) -> str | None:
        """A server that counts other than it tokenises has cut, or added to, the prompt: said loudly."""
        if realised is None:
            return None
        off = realised - prompt.counted_tokens
        allowed = max(2, self.tolerance) if prompt.exact else max(64, prompt.counted_tokens // 5)
        if abs(off) <= allowed:
            return None
        sentence = f"the server reports {realised} prompt tokens where {prompt.counted_tokens} were sent" + (
            ": the prompt may be cut before the model sees it" if off < 0 else ""
        )
        self.warn("prompt length differs from what was sent (see the error column); the axis shows the server's count")
        return sentence

    def _stop_if_over(self) -> None:
        minutes = (time.perf_counter() - self._started) / 60
        if reason := self.limits.reached(self.sent, self.sent_tokens, minutes):
            raise Stopped(reason)

    def _start_bar(self, count: int) -> None:
        if not self.progress:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=0, desc=f"{self.probe} {self.arm}".strip(), unit="trial", leave=False)
        self._bar.total += count
        self._bar.refresh()


def resolve(endpoint: Target) -> tuple[Endpoint | None, Recorded | None]:
    """(live endpoint, None) or (None, recorded run) from what the user named; raises ValueError for anything else."""
    if isinstance(endpoint, Recorded):
        return None, endpoint
    if isinstance(endpoint, str):
        if endpoint.startswith("recorded:"):
            return None, Recorded(endpoint.removeprefix("recorded:"))
        return Endpoint(endpoint), None
    if isinstance(endpoint, Endpoint):
        return endpoint, None
    raise ValueError("give an Endpoint, a URL that starts with http, or a Recorded run")


def cache_state(cached: int | None, prompt_tokens: int | None) -> str:
    """ "cold" only when nothing was cached, "warm" only when at least half of the prompt was; else "unknown"."""
    if cached is None or not prompt_tokens:
        return "unknown"
    if cached == 0:
        return "cold"
    return "warm" if 2 * cached >= prompt_tokens else "unknown"


def with_seed(spec: PromptSpec, *parts: int) -> PromptSpec:
    """The same specification with a seed mixed from its own and `parts`: fresh text, reproducible."""
    return replace(spec, seed=int(prompts.digest([spec.seed, *parts], 7), 16))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
