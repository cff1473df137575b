"""An investigation: a screen over the whole space, then the prompts that tell most, until one explanation is left.

Each batch is chosen by the information it is expected to give about which law of loss holds, per second of the
server's time. Before a law is believed it has to say what fresh prompts will do: that is written into the journal, then
they are sent. All that was decided stands in the journal's plan: a stopped run goes on, a finished one is read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from .abort import ROLES, interrupted
from .bench.bench import CALIBRATION, Bench, with_beside
from .bench.budget import Budget, Limits
from .bench.journal import Journal
from .bench.trial import Confirm, Row, Stopped, Target, resolve
from .screen import KINDS, Space, Step, again, candidates, screen, space_for, step
from .turns import told_and_resent

if TYPE_CHECKING:
    import pandas as pd

    from needlework.analysis import Diagnosis
    from needlework.analysis.predictions import Judged

REQUESTS, QUICK_REQUESTS = 300, 100
TOKENS = 3_000_000  # prompt tokens of a whole investigation where the window is huge
EXCLUDE = 0.1  # loss rate that "healthy" excludes in every condition

SURE, LIKELY = 0.95, 0.8  # share of one explanation at which it has to predict; at which the last requests go to that
LEAST, LEAST_UNNAMED = 48, 150  # trials before a law, or the absence of one, is decided
BATCH = 6  # requests of a batch, at least
CANDIDATES = 96
PREDICTED, MOST_PREDICTED = 12, 36  # prompts on a side of a law; of one that loses now and then
RESERVE = 3 * PREDICTED  # requests kept for predictions
ROUNDS = 2  # of predictions: a law that failed is mended once
ALIKE_BITS = 0.004  # the best candidate tells less than this: what is left cannot be told apart from here
DECISIONS = ("screen", "chosen", "predictions")  # records that are acted on
UNNAMED = ("unexplained", "prompts")  # explanations that foretell nothing of fresh prompts
STATES = {"warm": "warm", "crowd": "in flight together", "turn": "in follow-up turns", "again": "asked again",
          "abort": "after dropped requests"}  # fmt: skip


@dataclass
class Course:
    """An investigation under way, apart from how a step is sent: `ask` returns its rows, `record` keeps a decision.

    records   decisions of this run so far, in order: they are followed before anything new is decided
    known     trials of earlier runs on the same deployment
    requests  at most; exclude: the loss rate that "healthy" has to exclude in every condition
    stated    sizes that the deployment tells (tokens, entries)
    """

    space: Space
    ask: Callable[[Step], list[Row]]
    record: Callable[[dict[str, Any]], None]
    records: Sequence[Mapping[str, Any]] = ()
    known: pd.DataFrame | None = None
    requests: int = 300
    exclude: float = 0.1
    stated: Mapping[str, Any] | None = None
    say: Callable[[str], None] = lambda sentence: None
    rows: dict[str, Row] = field(default_factory=dict)
    done: list[Step] = field(default_factory=list)
    decided: list[Mapping[str, Any]] = field(default_factory=list)
    sent: int = 0
    fit: Any = None
    ended: str = ""
    _since: Any = None  # requests since the last dropped one, by arm

    def run(self) -> None:
        """Ask until it is decided or the requests are used up; `ended` says which."""
        for entry in self.records:
            if entry.get("record") in DECISIONS:
                self._act(entry)
        if not self.decided:
            self._decide("screen", *self._screen())
        while not self.ended:
            if law := self._to_predict():
                self._decide("predictions", *self._predictions(law))
            elif not self.ended:
                self._decide("chosen", *self._choose())
        self.record_end()

    def record_end(self) -> None:
        end = {"record": "end", "why": self.ended, "requests": self.requests}
        if end not in [dict(r) for r in self.records]:
            self.record(end)

    def trials(self) -> pd.DataFrame:
        """Everything known so far: earlier runs, then this one in the order of sending."""
        import pandas as pd

        from needlework.analysis import concat

        rows = pd.DataFrame(list(self.rows.values()))
        return rows if self.known is None else concat([self.known, rows])

    @property
    def rounds(self) -> list[Judged]:
        """The predictions so far, held against what came."""
        from needlework.analysis.predictions import judge

        made = [r for r in self.decided if r["record"] == "predictions"]
        return [judge(r, self.trials()) for r in made]

    def _decide(self, record: str, steps: Sequence[Step], more: Mapping[str, Any]) -> None:
        """Write a decision down, then act on it."""
        entry = {"record": record, **more, "steps": [s.as_dict() for s in steps]}
        self.record(entry)
        self._act(entry)

    def _act(self, entry: Mapping[str, Any]) -> None:
        self.decided.append(entry)
        self.say(str(entry.get("why", "")))
        for one in map(Step.from_dict, entry.get("steps", ())):
            self.done.append(one)
            self.sent += one.requests
            for row in self.ask(one):
                self.rows[row["trial_id"]] = row

    def _screen(self) -> tuple[list[Step], dict[str, Any]]:
        steps, room = [], round(0.6 * self.requests)  # the rest is for what the screen has shown
        for one in screen(self.space, min(1.0, self.requests / 100)):
            if one.requests <= room:
                steps.append(one)
                room -= one.requests
        asked = sum(s.requests for s in steps)
        s = self.space
        why = f"{asked} requests at random: {s.lowest:,} to {s.highest:,} tokens, every place and state"
        return steps, {"why": why, "space": asdict(s)}

    def _to_predict(self) -> str:
        """The law that has to predict now, or ""; sets `ended` when there is nothing more to decide."""
        from needlework.analysis import laws

        told = laws.conditions(self.trials())
        left = self.requests - self.sent
        if not len(told):
            self.ended = "nothing was measured"
            return ""
        self._since = told.groupby("arm")["since_abort"].last() + 1
        self.fit = laws.fit(told, stated=self.stated, window=self.space.highest)
        law = max(self.fit.shares, key=self.fit.shares.get)
        share, rounds = self.fit.shares[law], self.rounds
        worst = max(bounds_of(told, self.space).values())
        whole = law == "healthy" and worst <= self.exclude and (share > SURE or not told["lost"].any())
        foretold = bool(rounds) and rounds[-1].law == law and rounds[-1].passed is True
        if rounds and not foretold and (rounds[-1].law == law or len(rounds) >= ROUNDS):
            failed = rounds[-1].passed is False
            self.ended = "a prediction failed" if failed else "too few predicted prompts were answered"
        elif foretold and (law != "healthy" or whole):
            rest = f"; a loss of more than {worst:.0%} is excluded in every condition" if whole else ""
            self.ended = f"fresh prompts came out as predicted{rest}"
        elif left < 2:
            self.ended = f"the announced {self.requests} requests are used up"
        elif law == "healthy":
            return law if not foretold and share > LIKELY and (whole or left <= RESERVE) else ""
        elif law in UNNAMED:
            if share > SURE and len(told) >= LEAST_UNNAMED:
                self.ended = "no law explains what is lost"
        elif len(told) >= LEAST and (share > SURE or (share > LIKELY and left <= RESERVE) or self._alike()):
            return law
        return ""

    def _foreseen(self, steps: Sequence[Step]) -> pd.DataFrame:
        """Every trial of these steps with its chance of a loss and the bits it is expected to tell."""
        import pandas as pd

        from needlework.analysis import laws

        rows = pd.DataFrame([{**row, "step": i} for i, one in enumerate(steps) for row in one.foreseen(self.space)])
        asked = laws.conditions(rows)
        rows = rows.loc[asked.attrs["rows"]]
        asked["order"] = float(len(self.rows))  # whatever is chosen comes next
        asked["since_abort"] = rows["since_abort"].fillna(rows["arm"].map(self._since)).to_numpy()
        return self.fit.predict(asked).set_axis(rows.index).join(rows[["step", "trial_id"]])

    def _drawn(self, r: Random, count: int) -> list[Step]:
        return candidates(self.space, r, 1000 * (1 + len(self.decided)), count, self.done)

    def _alike(self) -> bool:
        told = self._foreseen(self._drawn(Random(f"alike/{self.space.seed}/{len(self.decided)}"), CANDIDATES))
        return float(told.groupby("step")["information_bits"].sum().max()) < ALIKE_BITS

    def _choose(self) -> tuple[list[Step], dict[str, Any]]:
        """The steps that tell most a second, each the best of its own part of the candidates, and one at random."""
        r = Random(f"choose/{self.space.seed}/{len(self.decided)}")
        law, other = sorted(self.fit.shares, key=self.fit.shares.get, reverse=True)[:2]
        size = max(BATCH, len(self.rows) // 16)
        lost = any(r["outcome"] != "exact" for r in self.rows.values())
        if law == "healthy" and (len(self.decided) % 2 or not lost):
            return self._fill(r, size if lost else 4 * BATCH)
        drawn = self._drawn(r, CANDIDATES)
        bits = self._foreseen(drawn).groupby("step")["information_bits"].sum()
        seconds = pace(self.rows.values())
        worth = [bits.get(i, 0.0) / seconds(one) for i, one in enumerate(drawn)]
        parts = max(2, size // 2)
        best = [max(range(k, len(drawn), parts), key=worth.__getitem__) for k in range(parts)]
        wanted = [drawn[i] for i in sorted(best, key=worth.__getitem__, reverse=True)]
        steps = self._cut(wanted, size - 1)
        steps += self._cut([drawn[r.randrange(len(drawn))]], size, _requests(steps))
        r.shuffle(steps)
        why = f"{_what(steps)}: tells {self._said(law)!r} from {self._said(other)!r}"
        return steps, {"why": why}

    def _fill(self, r: Random, size: int) -> tuple[list[Step], dict[str, Any]]:
        """Where the least is known: nothing is lost so far, and healthy is as good as its worst bound."""
        from needlework.analysis import laws

        bounds = bounds_of(laws.conditions(self.trials()), self.space)
        worst = sorted(bounds, key=bounds.get, reverse=True)[:2]  # type: ignore[arg-type]
        wanted = []
        for i in range(size):
            arm, kind = worst[i % len(worst)]
            drawn = kind or r.choice(self.space.kinds)
            number = 1000 * (1 + len(self.decided)) + i
            wanted.append(step(self.space, r, number, drawn, arms=[arm] if arm else ()))
        if (repeat := again(self.space, r, self.done, sum(s.kind == "again" for s in self.done))) is not None:
            wanted.insert(1, repeat)
        steps = self._cut(wanted, size)
        arm, kind = worst[0]
        where = " ".join(filter(None, (f"on {arm}" if arm else "", STATES.get(kind, "alone" if kind else ""))))
        why = f"{_what(steps)}: {where} a loss of {bounds[worst[0]]:.0%} is not excluded yet"
        return steps, {"why": why}

    def _cut(self, wanted: Sequence[Step], size: int, taken: int = 0) -> list[Step]:
        """The first that fit, about `size` requests; at least one, within what may still be sent beside `taken`."""
        left, steps = self.requests - self.sent - taken, list[Step]()
        for one in wanted:
            asked = _requests(steps) + one.requests
            if asked <= left and (not steps or asked <= size):
                steps.append(one)
        if not steps and left > 0:  # too little is left for what was drawn: a plain prompt fits
            steps = [Step("plain", one.number, one.arms[:1], one.prompts[:1])]
        return steps

    def _predictions(self, law: str) -> tuple[list[Step], dict[str, Any]]:
        """Fresh prompts on both sides of the law, those on which the other explanations would say otherwise."""
        r = Random(f"predict/{self.space.seed}/{len(self.decided)}")
        drawn = [s for s in self._drawn(r, 5 * CANDIDATES) if s.kind != "again"]
        told = self._foreseen(drawn)
        most = told["p_loss"].max()
        told["expects"] = "unsure"
        if law == "healthy":
            told["expects"], wanted = "found", {"found": 2 * PREDICTED}
        else:
            told.loc[told["p_loss"] >= 0.6 * most, "expects"] = "lost"
            told.loc[told["p_loss"] <= min(0.15 * most, 0.05), "expects"] = "found"
            wanted = {"lost": min(MOST_PREDICTED, max(PREDICTED, round(4 / most))), "found": PREDICTED}
        clear = told.groupby("step").filter(lambda rows: (rows["expects"] != "unsure").all())
        by_step = {int(n): rows for n, rows in clear.groupby("step")}  # type: ignore[arg-type,call-overload]
        order = list(by_step)
        r.shuffle(order)
        steps, parts = [], []
        left = self.requests - self.sent
        while any(n > 0 for n in wanted.values()) and (order := [i for i in order if drawn[i].requests <= left]):
            some = order[:24]  # the best of a few at random: the best of all would lie in one place
            best = max(some, key=lambda i: self._worth(by_step[i], wanted) / drawn[i].requests)
            if self._worth(by_step[best], wanted) <= 0:
                order = order[24:]
                continue
            order.remove(best)
            left -= drawn[best].requests
            steps.append(drawn[best])
            parts.append(by_step[best])
            for side, n in by_step[best]["expects"].value_counts().items():
                wanted[str(side)] -= n
        r.shuffle(steps)
        rows = [row for part in parts for row in part.itertuples()]
        prompts: list[dict[str, Any]] = [
            {"trial_id": x.trial_id, "p_loss": round(float(x.p_loss), 4), "expects": x.expects}  # type: ignore[arg-type]
            for x in rows
        ]
        lost = sum(p["expects"] == "lost" for p in prompts)
        why = (
            f"{self._said(law)!r} has to predict {len(prompts)} fresh prompts: {lost} lost, {len(prompts) - lost} found"
        )
        return steps, {"why": why, "law": law, "round": 1 + len(self.rounds), "prompts": prompts}

    @staticmethod
    def _worth(rows: pd.DataFrame, wanted: Mapping[str, int]) -> float:
        needed = [wanted[side] > 0 for side in rows["expects"]]
        return float((rows["information_bits"] + 0.02)[needed].sum())

    def _said(self, law: str) -> str:
        return next((one.sentence.split(":")[0] for one in self.fit.laws if one.name == law), law)


def bounds_of(told: pd.DataFrame, space: Space) -> dict[tuple[str, str], float]:
    """(arm, kind) -> upper 95 % bound of the loss rate there; 1 where it was not asked. told: conditions of trials."""
    import numpy as np
    from scipy.stats import beta

    told = told[told["kind"] >= 0]
    kind = np.select(
        [told["since_abort"] <= 2, told["turn"] > 1, told["warm"], told["load"] > 1],
        ["abort", "turn", "warm", "crowd"], "plain",
    )  # fmt: skip
    out = {}
    for arm, one in space.conditions():
        here = ((told["arm"] == arm) | (not arm)).to_numpy() & ((kind == one) | (not one))
        lost = int(told["lost"].to_numpy()[here].sum())
        out[arm, one] = float(beta.ppf(0.95, lost + 1, here.sum() - lost)) if here.sum() > lost else 1.0
    return out


def pace(rows: Sequence[Row] | Any) -> Callable[[Step], float]:
    """Seconds that a step will take, from how long the requests so far took: a base each, and so much a token."""
    import numpy as np

    timed = [
        ((r.get("prompt_tokens") or 0) - (r.get("cached_tokens") or 0), r["latency_s"])
        for r in rows if r.get("latency_s") and (r.get("concurrency") or 1) == 1
    ]  # fmt: skip
    base, slope = 0.05, 1e-4
    if len(timed) >= 8:
        tokens, seconds = np.array(timed, float).T
        slope = float(max(1e-9, np.polyfit(tokens, seconds, 1)[0])) if np.ptp(tokens) else 1e-9
        base = float(max(1e-3, np.median(seconds - slope * tokens)))
    return lambda one: base * one.requests + slope * one.tokens * (0.6 if one.kind == "warm" else 1.0)


def _requests(steps: Sequence[Step]) -> int:
    return sum(one.requests for one in steps)


def _what(steps: Sequence[Step]) -> str:
    """ "12 prompts around 4,000 tokens, warm"."""
    lengths = sorted(n for one in steps for n, _, _ in one.prompts)
    kinds = [one.kind for one in steps]
    usual = max(set(kinds), key=kinds.count)
    state = f", {STATES[usual]}" if usual in STATES and 2 * kinds.count(usual) > len(kinds) else ""
    low, high, middle = lengths[0], lengths[-1], lengths[len(lengths) // 2]
    near = f"around {round(middle, -2 if middle > 1000 else -1):,}" if high < 2 * low else f"of {low:,} to {high:,}"
    return f"{_requests(steps)} requests {near} tokens{state}"


@dataclass(frozen=True)
class Investigation:
    """What was asked, why, what it says. `plan` are the reasons of each batch; `predictions` the laws that were held
    against fresh prompts; `ended` says why it stopped, `finished` False that the same call goes on.
    """

    diagnosis: Diagnosis
    trials: pd.DataFrame = field(repr=False)
    plan: tuple[str, ...]
    predictions: tuple[Judged, ...]
    ended: str
    finished: bool
    warnings: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # predictions as they were written down

    def __str__(self) -> str:
        state = f"Ended: {self.ended}." if self.finished else f"UNFINISHED: {self.ended}; the same command goes on."
        earlier = [f"Foretold before, by {p.law!r}: {p}" for p in self.predictions[:-1]]  # the last: in the diagnosis
        return "\n".join(
            [str(self.diagnosis), "", *earlier, f"{len(self.trials)} trials in {len(self.plan)} batches. {state}"]
        )

    def _repr_html_(self) -> str:
        from html import escape

        drawn = getattr(self.diagnosis, "_repr_html_", lambda: f"<pre>{escape(str(self.diagnosis))}</pre>")()
        below = "".join(f"<p>{escape(line)}</p>" for line in str(self).split("\n\n")[-1].split("\n"))
        why = "".join(f"<li>{escape(line)}</li>" for line in self.plan)
        return f"{drawn}{below}<details><summary>What was asked, and why</summary><ol>{why}</ol></details>"


def investigate(
    targets: Target | Mapping[str, Target],
    run: str | Path | None = None,
    *,
    requests: int | None = None,
    quick: bool = False,
    minutes: float | None = None,
    exclude: float | None = None,
    tokens: int = TOKENS,
    window: int | None = None,
    stated: Mapping[str, Any] | None = None,
    evidence: Mapping[str, Any] | None = None,
    known: pd.DataFrame | None = None,
    seed: int = 0,
    genre: str = "mixed",
    needle: str = "digits5",
    confirm: Confirm | None = None,
    progress: bool | Callable[[], Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> Investigation:
    """Find out which requests a deployment loses: ask where it tells most, then hold the answer against fresh prompts.

    targets   an endpoint, URL or recorded run, or several by arm name: all get identical prompts, all are compared
    requests  at most (default 300; quick: 100); minutes: of time; tokens: prompt tokens where the window is huge
    exclude   the loss rate that "healthy" has to exclude, at 95 %, in every condition that the endpoint offers (0.1)
    window    longest prompt in tokens, where the endpoint does not state its window
    stated    sizes that the deployment tells; evidence: what was seen inside, as `analysis.diagnose` takes it
    known     trials of earlier runs on the same deployment: they count, and are not asked again
    confirm   called with the budget before the first request; say: told each decision

    Raises RuntimeError when an endpoint does not answer at all, Stopped when the budget is not confirmed, ValueError
    when the folder `run` holds another investigation or a limit leaves nothing to ask.
    """
    arms = dict(targets) if isinstance(targets, Mapping) else {"single": targets}
    if not arms:
        raise ValueError("name at least one deployment to investigate")
    if exclude is not None and not 0 < exclude < 1:
        raise ValueError("exclude is a loss rate between 0 and 1, such as 0.05")
    recorded = [found for target in arms.values() if (found := resolve(target)[1]) is not None]
    journal = recorded[0].journal if recorded else Journal(run)
    try:
        old = next((r for r in journal.records if r.get("record") == "screen"), None)
        conditions = len(arms) * len(KINDS) if len(arms) <= 2 else len(arms) + len(KINDS)
        most = requests or (QUICK_REQUESTS if quick else REQUESTS)
        if exclude and not requests:  # so many have to pass in each condition
            most = max(most, round(1.3 * conditions * math.log(0.05) / math.log(1 - exclude)))
        done = next((r for r in journal.records if r.get("record") == "end" and r["requests"] >= most), None)
        if recorded or done:
            return _read_back(journal, evidence, known)
        if most < 12 * len(arms):
            raise ValueError(
                f"{most} requests tell nothing of {len(arms)} deployments; allow {12 * len(arms)} at least"
            )
        shared: dict[str, Any] = {"seed": seed, "genre": genre, "needle": needle}
        space = space_for(list(arms), window=window, requests=most, tokens=tokens, **shared)
        if old is not None:
            space = Space.from_dict(old["space"])
            if (space.arms, space.seed) != (tuple(arms), seed):
                raise ValueError(
                    f"this folder holds an investigation of {', '.join(space.arms)} with seed {space.seed}; go on with "
                    "that, or use another folder"
                )
        asked = sum(s.requests for s in written(journal.records) if held(journal, space, s))
        budget = _budget(space, most - asked, tokens)
        if confirm is not None and not confirm(with_beside(budget, len(arms))):
            raise Stopped("not confirmed; nothing was sent")
        hands = Hands(arms, space, journal, budget, Limits(minutes=minutes), progress)
        try:
            if old is None and window is None:
                told = [n for bench in hands.benches.values() if (n := bench.capabilities.max_model_len)]
                window = min(told, default=None)
                space = space_for(list(arms), window=window, requests=most, tokens=tokens, **shared)
            hands.space = space
            if old is None and (window is None or space.highest < 0.9 * window):
                why = f"for {window:,} the {tokens:,} prompt tokens would not do" if window else "no window is stated"
                hands.first.warn(f"prompts of at most {space.highest:,} tokens are asked: {why}; longer ones stay open")
            course = Course(
                space, hands, journal.decide, tuple(journal.records), _others(journal, space, known), most,
                exclude or EXCLUDE, stated, say or (lambda sentence: None),
            )  # fmt: skip
            try:
                course.run()
            except Stopped as reason:
                course.ended = str(reason)
                if "minutes" in course.ended:  # as announced
                    course.record_end()
            return _result(journal, evidence, known, course.ended, tuple(hands.first.warnings))
        finally:
            hands.close()
    finally:
        if not recorded:
            journal.close()


class Hands:
    """Sends steps: a bench for each arm, one journal, the first arm builds the prompts of all."""

    def __init__(
        self, arms: Mapping[str, Target], space: Space, journal: Journal, budget: Budget, limits: Limits, progress: Any
    ):  # fmt: skip
        self.benches: dict[str, Bench] = {}
        self.space = space
        for arm, target in arms.items():
            more = {"builder": self.first} if self.benches else {"limits": limits, "progress": progress}
            self.benches[arm] = Bench(target, None, probe="ask", arm=arm, journal=journal, **more)  # type: ignore[arg-type]
        self.first.meter.announce(
            Budget(budget.requests + CALIBRATION.requests, budget.prompt_tokens + CALIBRATION.prompt_tokens)
        )
        self.first.planned = budget.requests
        self._seconds: Callable[[Step], float] = pace(())
        self._rows: list[Row] = []

    @property
    def first(self) -> Bench:
        return next(iter(self.benches.values()))

    def __call__(self, one: Step) -> list[Row]:
        rows: list[Row] = []
        for arm in one.arms:
            bench = self.benches[arm]
            waves = one.waves(self.space, arm)
            if one.kind == "abort":
                group = dict(zip(("victim", *ROLES), waves[0], strict=True))
                rows += interrupted(bench, group, self._seconds(Step("plain", 0, ("",), one.prompts)))
            elif one.kind == "turn":
                rows += told_and_resent(bench, *(a for wave in waves for a in wave))
            else:
                for wave in waves:
                    rows += bench.ask(wave, concurrency=len(wave))
        self._rows += rows
        if len(self._rows) < 100 or not len(self._rows) % 10:
            self._seconds = pace(self._rows)
        return rows

    def close(self) -> None:
        for bench in reversed(self.benches.values()):
            bench.close()


def _budget(space: Space, requests: int, tokens: int) -> Budget:
    mean = (space.highest - space.lowest) / math.log(space.highest / space.lowest)
    expected = requests * mean
    return Budget(max(0, requests), round(max(expected, min(2 * expected, tokens))))


def written(records: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    """All steps of a journal's plan."""
    for record in records:
        yield from (Step.from_dict(s) for s in record.get("steps", ()))


def held(journal: Journal, space: Space, one: Step) -> bool:
    """Has the journal an answer to every request of a step?"""
    asks = (a for arm in one.arms for wave in one.waves(space, arm) for a in wave)
    return all(journal.get(a.trial_id) is not None for a in asks)  # what failed on the line is sent again


def _others(journal: Journal, space: Space, known: pd.DataFrame | None) -> pd.DataFrame | None:
    """Trials of other instruments in this folder, and those that the caller knows."""
    from needlework.analysis import concat

    own = {a.trial_id for s in written(journal.records) for arm in s.arms for w in s.waves(space, arm) for a in w}
    found = journal.frame([i for i, row in journal.rows.items() if i not in own and row.get("probe") != "calibration"])
    tables = [t for t in (known, found) if t is not None and len(t)]
    return concat(tables) if tables else None


def _read_back(journal: Journal, evidence: Mapping[str, Any] | None, known: pd.DataFrame | None) -> Investigation:
    end = [r for r in journal.records if r.get("record") == "end"]
    ended = str(end[-1].get("why", "")) if end else f"{len(journal.rows)} trials were recorded before it stopped"
    return _result(journal, evidence, known, ended, ())


def _result(
    journal: Journal, evidence: Mapping[str, Any] | None, known: Any, ended: str, warnings: tuple[str, ...]
) -> Investigation:
    from needlework.analysis import concat, diagnose
    from needlework.analysis.predictions import judge

    trials = journal.frame([i for i, row in journal.rows.items() if row.get("probe") != "calibration"])
    trials = trials.sort_values("time", kind="stable", ignore_index=True)
    made = [r for r in journal.records if r.get("record") == "predictions"]
    whole = trials if known is None or not len(known) else concat([known, trials])
    diagnosis = diagnose(whole, evidence, predictions=made)
    plan = tuple(str(r["why"]) for r in journal.records if r.get("why") and r.get("record") != "end")
    finished = any(r.get("record") == "end" for r in journal.records) or not journal.records
    told = tuple(judge(r, trials) for r in made)
    return Investigation(diagnosis, whole, plan, told, ended, finished, warnings, tuple(made))
