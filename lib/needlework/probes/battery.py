"""The battery: the fixed set of instruments that a sensible investigator runs before any theory, in one call.

It asks the questions whose answers separate the fault classes: recall over length and place, identical prompts on every
other server at hand (with an A/A first), residues cold and warm, cold against warm, follow-up turns, a crowd of padded
and of captured sizes, and the aftermath of aborts. Everything goes into one journal, so it resumes and replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.serving import TransportError

from .abort import abort
from .arms import compare_arms
from .bench.budget import Budget, Limits
from .bench.result import Result
from .bench.trial import Stopped, Target
from .echo import echo
from .recall import recall
from .reload import reload
from .residues import scan_residues
from .turns import turns
from .warm import warm_cold

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Plan:
    """How much to ask; all lengths in tokens. The default suits a deployment of 16k tokens and more.

    lengths         of the recall grid; arm_lengths: of the identical prompts on two servers
    aa_pairs        identical prompts sent to the examined server twice, of aa_lengths (none: of arm_lengths)
    residue_start   first length of the residue scan, `period` lengths long, in at most `residue_requests`
    warm_lengths    of the cold and warm pairs; turn_length: of the first turn
    crowd           (requests in flight, trials): sizes on both sides of captured batch sizes; crowd_lengths
    abort_length    of the aborted requests, each stage `abort_rounds` times
    fill_tokens     size of the device's pool, to push prompts out of it that reload (0: not tried)
    instruments     which of them to run
    """

    lengths: tuple[int, ...] = (384, 768, 1536, 3072, 6144, 12288)
    depths: tuple[float, ...] = (0.0, 0.5, 0.9)  # the very first place tells an edge in position from one in length
    arm_lengths: tuple[int, ...] = (2048, 4096, 8192)
    aa_pairs: int = 8
    aa_lengths: tuple[int, ...] = ()
    residue_start: int = 3092  # a few tokens past whole pages of 256: what follows a hit is shorter than a window
    period: int = 128
    residue_requests: int = 400
    warm_lengths: tuple[int, ...] = (1024, 4096)
    warm_repeats: int = 4
    turn_length: int = 2048
    turn_repeats: int = 2
    crowd: tuple[tuple[int, int], ...] = ((3, 12), (5, 15), (8, 24))
    crowd_lengths: tuple[int, ...] = (512, 1024)
    abort_length: int = 4096
    abort_rounds: int = 3
    fill_tokens: int = 0
    reload_length: int = 1024
    reload_prompts: int = 10
    instruments: tuple[str, ...] = ("recall", "arms", "residues", "warm_cold", "turns", "reload", "echo", "abort")

    def within(self, tokens: int) -> Plan:
        """The plan without prompts longer than `tokens`."""
        names = ("lengths", "arm_lengths", "aa_lengths", "warm_lengths", "crowd_lengths")
        kept: dict[str, Any] = {name: tuple(n for n in getattr(self, name) if n <= tokens) for name in names}
        period = min(self.period, max(0, tokens - self.residue_start))
        dropped = {"recall"} if not kept["lengths"] else set()
        dropped |= {"arms"} if not kept["arm_lengths"] else set()
        dropped |= {"warm_cold"} if not kept["warm_lengths"] else set()
        dropped |= {"echo"} if not kept["crowd_lengths"] else set()
        dropped |= {"residues"} if period < 2 else set()
        dropped |= {"turns"} if self.turn_length > tokens else set()
        dropped |= {"abort"} if self.abort_length > tokens else set()
        left = tuple(name for name in self.instruments if name not in dropped)
        return replace(self, **kept, period=period, instruments=left)


# a third of the requests and a sixth of the tokens: it asks about every class, with less to hold against chance
QUICK = Plan(
    lengths=(384, 1024, 2560, 6144),
    arm_lengths=(1536, 2560, 3584, 4608, 6144),
    aa_pairs=4,
    residue_start=1044,
    period=16,
    residue_requests=60,
    warm_lengths=(1024, 4096),
    warm_repeats=2,
    crowd=((3, 6), (5, 10)),
    abort_length=2048,
    abort_rounds=2,
)


@dataclass(frozen=True)
class BatteryResult:
    """`trials` of all instruments, each instrument's own `results`, and `skipped` ones with the reason."""

    trials: pd.DataFrame
    results: Mapping[str, Result] = field(repr=False)
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.trials)} trials of {len(self.results)} instruments."]
        lines += [f"{name}: {result.sentence}" for name, result in self.results.items()]
        lines += [f"{name} was skipped: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return "".join(f"<p>{escape(line)}</p>" for line in str(self).split("\n"))


def battery(
    endpoint: Target,
    run: str | Path,
    *,
    name: str = "single",
    others: Mapping[str, Target] | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    step: Callable[[str], None] | None = None,
    confirm: Callable[[Budget], bool] | None = None,
) -> BatteryResult:
    """Run every instrument against `endpoint`; the journal is the folder `run`.

    name    of the examined deployment as an arm: "pd" or "combined" where that is what it is
    others  servers to send identical prompts to, by arm name: "combined" (the same build without the split), and
            "reference" (an independent server with the same weights)
    step    called with each instrument's name before it runs
    confirm called with the budget of all instruments together before any of them asks; False stops there

    An instrument that the endpoint does not allow (no tokenise route, a window too short) is skipped with its reason.
    Raises RuntimeError when the endpoint does not answer at all, Stopped when the budget is not confirmed.
    """
    p = plan or Plan()
    gate = _Gate(confirm is None)
    common: dict[str, Any] = {"run": run, "seed": seed, "confirm": gate}
    work: dict[str, Callable[[], Result]] = {
        "recall": lambda: recall(endpoint, lengths=p.lengths, depths=p.depths, arm=name, max_tokens=24, **common)
    }
    for number, (other, target) in enumerate((others or {}).items()):

        def arms(other: str = other, target: Target = target, first: bool = number == 0) -> Result:
            # the second comparison has prompts of its own: its seed differs
            own = {**common, "seed": seed if first else seed + 1}
            pairs = {name: endpoint, other: target}
            return compare_arms(
                pairs, lengths=p.arm_lengths, depths=p.depths, repeats=1, aa_pairs=p.aa_pairs if first else 0,
                aa_lengths=p.aa_lengths, controls=False, **own,
            )  # fmt: skip

        work[f"arms {other}"] = arms
    quiet = {**common, "arm": name, "controls": False}
    work["residues"] = lambda: scan_residues(
        endpoint,
        start=p.residue_start,
        period=p.period,
        distance=80,
        batch=1,  # serial, as its rows say
        max_tokens=24,
        limits=Limits(requests=p.residue_requests),
        **quiet,
    )
    work["warm_cold"] = lambda: warm_cold(endpoint, lengths=p.warm_lengths, repeats=p.warm_repeats, **quiet)
    work["turns"] = lambda: turns(
        endpoint, shapes=("tell_ask", "interrupted"), length=p.turn_length, repeats=p.turn_repeats, **quiet
    )
    if p.fill_tokens:
        loose = {**common, "arm": name}
        work["reload"] = lambda: reload(
            endpoint, fill_tokens=p.fill_tokens, length=p.reload_length, prompts=p.reload_prompts, depth=0.6, **loose
        )
    for size, trials in p.crowd:

        def crowd(size: int = size, trials: int = trials) -> Result:
            own = {**quiet, "seed": seed + 1000 * size}  # fresh text: a prompt met before would be warm
            return echo(endpoint, concurrency=size, trials=trials, lengths=p.crowd_lengths, **own)

        work[f"echo {size}"] = crowd
    work["abort"] = lambda: abort(
        endpoint, stages=("prefill", "decode"), rounds=p.abort_rounds, length=p.abort_length, **quiet
    )
    work = {title: instrument for title, instrument in work.items() if title.split()[0] in p.instruments}
    if confirm is not None:
        for instrument in work.values():  # each says what it would send, and is stopped there
            with contextlib.suppress(ValueError, TransportError, Stopped):
                instrument()
        if not confirm(gate.total()):
            raise Stopped("not confirmed; nothing was sent")
        gate.open = True
    results, skipped = {}, {}
    for title, instrument in work.items():
        if step is not None:
            step(title)
        try:
            results[title] = instrument()
        except (ValueError, TransportError) as reason:
            skipped[title] = str(reason)
    return BatteryResult(_together(results), results, skipped)


class _Gate:
    """What each instrument asks before it sends: closed, it keeps the budgets and lets nothing through."""

    def __init__(self, is_open: bool):
        self.open, self.budgets = is_open, list[Budget]()

    def __call__(self, budget: Budget) -> bool:
        if not self.open:
            self.budgets.append(budget)
        return self.open

    def total(self) -> Budget:
        return Budget(sum(b.requests for b in self.budgets), sum(b.prompt_tokens for b in self.budgets))


def _together(results: Mapping[str, Result]) -> pd.DataFrame:
    """One table of all trials, each once, in the order of sending."""
    import pandas as pd

    tables = [t for r in results.values() for t in (r.controls, r.trials) if t is not None and len(t)]
    if not tables:
        return pd.DataFrame()
    joined: pd.DataFrame = pd.concat([t.astype(object) for t in tables], ignore_index=True).drop_duplicates("trial_id")
    return joined.sort_values("time", kind="stable", ignore_index=True).assign(ordinal=range(len(joined)))
