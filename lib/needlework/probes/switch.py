"""Two deployments that cannot run at once (one set of GPUs): the first is measured, a person switches, the second gets
the same bytes, then a few of them go to the first again, so that time is no excuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .bench.bench import with_beside
from .bench.budget import Budget, Limits
from .bench.journal import Journal
from .bench.trial import Confirm, Stopped, Target
from .investigate import Hands, held, written
from .screen import Space, Step

if TYPE_CHECKING:
    from needlework.evidence.plan import Plan, Role

EACH = 24  # steps that lost something, and as many that did not, for the second deployment
AGAIN, AGAIN_SEND = 8, 90  # prompts for the first once more; a number no other repeat has
STOPPED_FIRST = ("router", "decode", "prefill", "combined")  # no new requests, then no transfers, then the rest


def measure(
    first: str, arm: str, target: Target, run: str | Path, *, again: bool = False, confirm: Confirm | None = None,
    progress: Any = None, say: Callable[[str], None] | None = None, minutes: float | None = None,
) -> bool:  # fmt: skip
    """Put prompts that `first` had in this run to `arm`, byte for byte; again: `arm` is `first`, some time later.

    What the first lost and found comes in equal parts, in random order. Returns whether anything was left to send: what
    was decided stands in the journal's plan, so a stopped measurement goes on and a whole one sends nothing. Raises
    ValueError when the run holds no investigation of `first`, Stopped as `investigate`.
    """
    with Journal(run) as journal:
        screen = next((r for r in journal.records if r.get("record") == "screen"), None)
        if screen is None or first not in screen["space"]["arms"]:
            raise ValueError(f"{journal.name} holds no investigation of {first}; measure that first")
        space = Space.from_dict(screen["space"])
        kind = "again" if again else "then"
        entry = next((r for r in journal.records if r.get("record") == kind and r.get("arm") == arm), None)
        if entry is None:
            steps = _repeats(journal, space, first) if again else _same(journal, space, first, arm)
            why = f"{sum(s.requests for s in steps)} requests to {arm}: prompts that {first} had" + again * " before"
            entry = {"record": kind, "arm": arm, "why": why, "steps": [s.as_dict() for s in steps]}
        else:
            steps = [Step.from_dict(s) for s in entry["steps"]]
        left = [s for s in steps if not held(journal, space, s)]
        if not left:
            return False
        budget = Budget(sum(s.requests for s in left), round(1.1 * sum(s.tokens for s in left)))
        if confirm is not None and not confirm(with_beside(budget, 1)):
            raise Stopped("not confirmed; nothing was sent")
        if entry not in journal.records:
            journal.decide(entry)
        if say is not None:
            say(str(entry["why"]))
        hands = Hands({arm: target}, space, journal, budget, Limits(minutes=minutes), progress)
        try:
            for step in left:
                hands(step)
        finally:
            hands.close()
        return True


def _lost(journal: Journal, space: Space, step: Step, arm: str) -> bool | None:
    """Did it lose anything on this arm? None where it was not all answered."""
    rows = [journal.get(a.trial_id) for w in step.waves(space, arm) for a in w if not a.label.startswith("victim")]
    return None if None in rows else any(row["outcome"] != "exact" for row in rows if row is not None)


def _asked(journal: Journal, space: Space, arm: str) -> tuple[list[Step], list[Step]]:
    """Steps that lost something on an arm, and those that did not, each in an order drawn at random."""
    r = Random(f"switch/{space.seed}/{arm}")
    sides: tuple[list[Step], list[Step]] = ([], [])
    for step in written(r for r in journal.records if r.get("record") not in ("then", "again")):
        if step.kind not in ("control", "again") and arm in step.arms:
            lost = _lost(journal, space, step, arm)
            if lost is not None:
                sides[not lost].append(step)
    for side in sides:
        r.shuffle(side)
    return sides


def _same(journal: Journal, space: Space, first: str, arm: str) -> list[Step]:
    lost, found = _asked(journal, space, first)
    some = lost[:EACH] + found[: max(EACH, 2 * EACH - len(lost))]
    Random(f"then/{space.seed}").shuffle(some)
    control = next((s for s in written(journal.records) if s.kind == "control"), None)
    return [replace(s, arms=(arm,)) for s in ([control] if control else []) + some]


def _repeats(journal: Journal, space: Space, first: str) -> list[Step]:
    lost, found = ([s for s in side if s.kind in ("plain", "warm")] for side in _asked(journal, space, first))
    some = lost[: AGAIN // 2] + found[: max(AGAIN // 2, AGAIN - len(lost))]
    return [Step("again", s.number, (first,), s.prompts, AGAIN_SEND, cold=True) for s in some]


def instructions(first: str, second: str, address: str = "", plan: Plan | None = None) -> str:
    """What a person does to stop one deployment and start the other; nothing of it is ever run here.

    address   of the second, for its port; plan: units and ports by role, as collected
    """
    roles = [(host.name, role) for host in plan.hosts for role in host.roles] if plan is not None else []
    stop, start = _roles(roles, first, second), _roles(roles, second, first)
    port = _port(address) or next((p for _, role in reversed(start) if (p := _port(role.endpoint or ""))), None)
    closed = [p for _, role in stop if (p := _port(role.endpoint or ""))]
    said = [
        f"To go from {first} to {second}, which share their GPUs. Nothing of this is run for you: read it first.",
        f"1. Let requests end, then stop {first}, in this order:",
        *(_units("stop", stop) or ["     its router, then its decode server, then its prefill server"]),
        "2. Wait until its memory is free and its ports are closed:",
        "     nvidia-smi --query-gpu=index,memory.used --format=csv   # every GPU back to a few hundred MiB",
        *(f"     ss -ltn 'sport = :{p}'   # no line left" for p in closed),
        f"3. Start {second}, with the same checkpoint, kernels and settings but for the split:",
        *(_units("start", start[::-1]) or [f"     the server of {second}"]),
        "4. It is up when this prints 200 (loading the weights takes minutes):",
        f"     curl -s -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port or 'PORT'}/health",
        "5. Come back here, or give the same command again: what was measured is kept.",
    ]
    return "\n".join(said)


def _roles(roles: Sequence[tuple[str, Role]], arm: str, other: str) -> list[tuple[str, Role]]:
    """Units of a deployment, in the order of stopping: those of its own name, else all that the other has not."""
    own = [one for one in roles if one[1].role == arm]
    rest = own or [one for one in roles if one[1].role not in (other, "combined")]
    order = {name: i for i, name in enumerate(STOPPED_FIRST)}
    return sorted((one for one in rest if one[1].unit), key=lambda one: order.get(one[1].role, len(order)))


def _units(verb: str, roles: Sequence[tuple[str, Role]]) -> list[str]:
    return [f"     sudo systemctl {verb} {role.unit}   # {role.role}, on {host}" for host, role in roles]


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None
