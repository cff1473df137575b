"""The space of what a deployment may be asked: prompts drawn over all of it, and the steps that put them to it.

Lengths are log-uniform and of any residue, places anywhere and at both ends, prompts cold and sent again, alone and in
flight with others, in follow-up turns, beside and after dropped requests, on every arm with the same bytes. Where the
prompts lie matters more than how many there are: an edge, a period or a chunk that no prompt straddles is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from .abort import ROLES
from .abort import ask_of as abort_ask
from .bench.bench import control_asks
from .bench.prompts import PromptSpec
from .bench.trial import Ask, Row, with_seed
from .turns import MODES, REPLY_TOKENS, TALK_TOKENS

SHORTEST_TOKENS, LEAST_TOKENS = 300, 128  # of the shortest prompts, and where the window itself is small
ANSWER_TOKENS = 48
CROWDS = (2, 3, 4, 6, 8)
STAGES = ("prefill", "decode")
KINDS = ("plain", "warm", "crowd", "turn", "abort")
SHARES = {"plain": 0.42, "warm": 0.2, "crowd": 0.14, "turn": 0.12, "abort": 0.12}  # of drawn steps
ENDS = 0.15  # of the places at the very first line, and as many just before the question
NEAR_END_TOKENS = (8, 1024)  # between value and question, log-uniform, of a tenth of the prompts
UNSTATED_WINDOW_TOKENS = 32768


@dataclass(frozen=True)
class Space:
    """What may be asked: lengths from `lowest` to `highest` tokens, on `arms`, of the kinds that the endpoints offer.

    seed, genre, needle as of every instrument; they decide the prompts of all steps.
    """

    arms: tuple[str, ...]
    highest: int
    lowest: int = SHORTEST_TOKENS
    kinds: tuple[str, ...] = KINDS
    crowds: tuple[int, ...] = CROWDS
    seed: int = 0
    genre: str = "mixed"
    needle: str = "digits5"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Space:
        """The space of a record; raises ValueError when it is none."""
        try:
            several = {name: tuple(data[name]) for name in ("arms", "kinds", "crowds")}
            return cls(**{**data, **several})
        except (KeyError, TypeError):
            raise ValueError("the journal's plan holds no space that can be read; use another folder") from None

    def spec(self, step: Step, i: int) -> PromptSpec:
        """The `i`-th prompt of a step: the same bytes for every arm."""
        length, depth, from_end = step.prompts[i]
        base = PromptSpec(length, depth, self.genre, self.needle, self.seed, from_end=from_end)
        return with_seed(base, step.number, i)

    def conditions(self) -> list[tuple[str, str]]:
        """(arm, kind) of all that can be excluded one by one; with many arms each arm, and each kind on any of them."""
        if len(self.arms) <= 2:
            return [(arm, kind) for arm in self.arms for kind in self.kinds]
        return [(arm, "") for arm in self.arms] + [("", kind) for kind in self.kinds]


@dataclass(frozen=True)
class Step:
    """One thing to do; its trials follow from it and the space alone.

    kind     of KINDS, "control" (the harness), or "again": an earlier prompt once more
    number   seeds the prompts: steps with one number have the same bytes
    arms     who is asked, one after another, in this order
    prompts  (tokens, depth, tokens between value and question or None): several for a crowd
    send     tells repeated sends apart; cold: a repeat that asks for no cached prefix
    """

    kind: str
    number: int
    arms: tuple[str, ...]
    prompts: tuple[tuple[int, float, int | None], ...]
    send: int = 0
    cold: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        """The step of a record; raises ValueError when it is none."""
        try:
            prompts = tuple((int(n), float(d), None if e is None else int(e)) for n, d, e in data["prompts"])
            arms = tuple(str(arm) for arm in data["arms"])
            step = cls(str(data["kind"]), int(data["number"]), arms, prompts, int(data["send"]), bool(data["cold"]))
        except (KeyError, TypeError, ValueError):
            raise ValueError("the journal's plan holds a step that cannot be read; use another folder") from None
        if step.kind not in (*KINDS, "again", "control") or not arms or not prompts:
            raise ValueError(f"the journal's plan holds a step of unknown kind {step.kind[:20]!r}; use another folder")
        return step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def requests(self) -> int:
        """Requests that it sends, earlier turns with them."""
        each = {"warm": 2, "turn": 3, "abort": 1 + len(ROLES), "control": 4}.get(self.kind, len(self.prompts))
        return each * len(self.arms)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all its requests, at most."""
        if self.kind == "control":
            return 4 * LEAST_TOKENS * 2 * len(self.arms)
        more = {"warm": 1.0, "turn": 2.0, "abort": float(len(ROLES))}.get(self.kind, 0.0)
        extra = 3 * (REPLY_TOKENS + TALK_TOKENS) if self.kind == "turn" else 0
        return len(self.arms) * round(sum(n for n, _, _ in self.prompts) * (1 + more) + extra)

    def waves(self, space: Space, arm: str) -> list[list[Ask]]:
        """The asks on one arm, each list sent when the one before is answered; those of one list go out together."""
        if self.kind == "control":
            base = PromptSpec(2 * LEAST_TOKENS, 0.5, space.genre, space.needle, space.seed)
            return [[a] for a in control_asks("ask", base, arm=arm)]
        specs = [space.spec(self, i) for i in range(len(self.prompts))]
        first = Ask("ask", specs[0], arm=arm, label=self.kind, max_tokens=ANSWER_TOKENS)
        if self.kind == "warm":
            return [[first], [replace(first, cache="warm", send=1)]]
        if self.kind == "again":
            return [[replace(first, label="again", cache="cold" if self.cold else "warm", send=self.send)]]
        if self.kind == "turn":
            turn = replace(first, probe="turns", turn=2)
            return [
                [replace(turn, label=f"tell_ask/{mode}", cache="warm" if k == 0 else "cold", send=k)]
                for k, mode in enumerate(MODES)
            ]
        if self.kind == "abort":
            stage = STAGES[self.number % len(STAGES)]
            return [[abort_ask(specs[0], arm, stage, role, 0, 0) for role in ("victim", *ROLES)]]
        return [[replace(first, prompt=spec, concurrency=len(specs)) for spec in specs]]

    def foreseen(self, space: Space) -> list[Row]:
        """Rows as its trials will be, as far as that is known before: outcome and answer are not."""
        rows = []
        for arm in self.arms if self.kind != "control" else ():
            for wave in self.waves(space, arm):
                rows += [_foreseen(a) for a in wave if not a.label.startswith("victim")]
        return rows

    def __str__(self) -> str:
        """ "4,113 tokens, warm"."""
        longest = max(n for n, _, _ in self.prompts)
        many = f"{len(self.prompts)} in flight" if self.kind == "crowd" else ""
        said = {"plain": "", "turn": "follow-up turn", "abort": "after a dropped request"}.get(self.kind, self.kind)
        return ", ".join(filter(None, (f"{longest:,} tokens", many or said)))


def _foreseen(a: Ask) -> Row:
    of = a.prompt
    place = of.target_tokens - of.from_end if of.from_end is not None else round(of.depth * of.target_tokens)
    cached = of.target_tokens - 64 if a.cache == "warm" else 0
    return {
        "trial_id": a.trial_id, "probe": a.probe, "arm": a.arm, "target_tokens": of.target_tokens,
        "prompt_tokens": of.target_tokens, "depth": of.depth, "needle_token": max(0, min(place, of.target_tokens - 24)),
        "cached_tokens": max(0, cached), "cache": a.cache, "wanted_cache": a.cache, "turn": a.turn, "label": a.label,
        "concurrency": a.concurrency, "seed": of.seed, "repeat": a.repeat, "send": a.send, "control": "",
        "expected": "0", "outcome": "exact",
        "since_abort": float(ROLES.index(role)) if (role := a.label.split("/")[0]) in ROLES else None,
    }  # fmt: skip


def space_for(
    arms: Sequence[str], *, window: int | None, requests: int, tokens: int, kinds: Sequence[str] = KINDS, **options: Any
) -> Space:
    """The space within a window of so many tokens (None: not stated), and within `tokens` prompt tokens in all.

    Raises ValueError when the window holds no prompt at all.
    """
    room = (window or UNSTATED_WINDOW_TOKENS) - ANSWER_TOKENS - 16
    if room < LEAST_TOKENS + 32:
        raise ValueError(f"a window of {window} tokens has no room for a prompt of {LEAST_TOKENS + 32} and its answer")
    lowest = max(LEAST_TOKENS, min(SHORTEST_TOKENS, room // 8))
    highest = room
    while highest > 4 * lowest and requests * (highest - lowest) / math.log(highest / lowest) > tokens:
        highest = round(0.95 * highest)
    kinds = tuple(k for k in kinds if k != "turn" or highest > 2 * (REPLY_TOKENS + TALK_TOKENS))
    return Space(tuple(arms), highest, lowest, kinds, **options)


def prompt(space: Space, r: Random, quantile: float | None = None) -> tuple[int, float, int | None]:
    """Length log-uniform (at `quantile` of it, or at random), place anywhere, at an end, or near the question."""
    u = r.random() if quantile is None else quantile
    length = round(space.lowest * (space.highest / space.lowest) ** u)
    where = r.random()
    if where < 2 * ENDS:
        return length, 0.0 if where < ENDS else 1.0, None
    if where < 2 * ENDS + 0.1:
        low, high = NEAR_END_TOKENS
        distance = round(low * (min(high, length / 2) / low) ** r.random())
        return length, round(1 - distance / length, 4), distance
    return length, round(r.random(), 4), None


def step(
    space: Space, r: Random, number: int, kind: str, *, quantile: float | None = None, arms: Sequence[str] = ()
) -> Step:
    """One step of a kind, its prompts drawn; on one arm at random unless told."""
    on = tuple(arms) or (r.choice(space.arms),)
    if kind != "crowd":
        length, *place = prompt(space, r, quantile)
        if kind == "turn":  # room for what the turns add
            length = max(space.lowest, min(length, space.highest - REPLY_TOKENS - TALK_TOKENS))
        return Step(kind, number, on, ((length, *place),))  # type: ignore[arg-type]
    size = r.choice(space.crowds)
    return Step(kind, number, on, tuple(prompt(space, r, quantile if i == 0 else None) for i in range(size)))


def again(space: Space, r: Random, done: Sequence[Step], sends: int) -> Step | None:
    """An earlier prompt once more: cold tells chance from place, warm a loss of the cache from both."""
    earlier = [s for s in done if s.kind in ("plain", "warm")]
    if not earlier:
        return None
    old = r.choice(earlier)
    return Step("again", old.number, (r.choice(old.arms),), old.prompts, 2 + sends, r.random() < 0.5)


def screen(space: Space, size: float = 1) -> list[Step]:
    """The first look: every kind, every arm, lengths over the whole range, in an order drawn at random.

    size    1 is about 60 requests to one deployment
    """
    r = Random(f"screen/{space.seed}")
    arms = len(space.arms)
    usual = {"plain": max(16 / arms, 6), "warm": 5, "crowd": 3, "turn": 2, "abort": 2}
    counts = {kind: max(1, round(n * size)) for kind, n in usual.items()}
    wanted = [kind for kind in space.kinds for _ in range(counts[kind] * max(1, arms // 2 if kind == "plain" else 1))]
    lengths = [(i + r.random()) / len(wanted) for i in range(len(wanted))]
    r.shuffle(lengths)
    asked = dict.fromkeys(space.arms, 0)
    steps = []
    for number, (kind, quantile) in enumerate(zip(wanted, lengths, strict=True)):
        together = min(2, arms) if kind in ("plain", "warm") else 1  # the least asked ones
        on = sorted(space.arms, key=lambda arm: (asked[arm], r.random()))[:together]
        asked |= {arm: asked[arm] + 1 for arm in on}
        r.shuffle(on)
        steps.append(step(space, r, number, kind, quantile=quantile, arms=on))
    r.shuffle(steps)
    repeats = [again(space, r, steps[: len(steps) // 2], k) for k in range(max(1, round(3 * size)))]
    for repeat in repeats:
        if repeat is not None:  # behind what it repeats
            steps.insert(r.randrange(len(steps) // 2, len(steps) + 1), repeat)
    return [Step("control", 0, space.arms, ((2 * LEAST_TOKENS, 0.5, None),)), *steps]


def candidates(space: Space, r: Random, number: int, count: int, done: Sequence[Step]) -> list[Step]:
    """`count` steps that may come next."""
    kinds = [k for k in space.kinds if k in SHARES]
    drawn = r.choices(kinds, [SHARES[k] for k in kinds], k=count)
    out = [step(space, r, number + i, kind) for i, kind in enumerate(drawn)]
    sends = sum(s.kind == "again" for s in done)
    out += [s for i in range(count // 8) if (s := again(space, r, done, sends + i)) is not None]
    return out
