"""`needlework diagnose WHAT`: a table of trials, or a live deployment that is asked the whole battery first."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework import analysis, probes
from needlework.evidence import Collection, as_evidence, incidents
from needlework.probes.bench.trial import Stopped
from needlework.probes.cli import confirm_in_terminal, constants
from needlework.serving import settings as about
from needlework.serving.target import open_target

if TYPE_CHECKING:
    import pandas as pd

    from needlework.analysis import Diagnosis

CONSTANTS = "constants"  # in a run's manifest: sizes that the examined deployment states
ROOM_FOR_ANSWER = 128  # tokens of the window that question and answer need beside a prompt


def main(argv: list[str]) -> int:
    """Print what each instrument found and the diagnosis; 0 when it is healthy, 1 when not, 2 on a user error."""
    options = _parser().parse_args(argv)
    collected = as_evidence(Collection.read(options.evidence)) if options.evidence else {}
    if Path(options.what).exists():
        trials, known = _recorded(Path(options.what))
        for limit in _limits(trials):
            print(f"note: {limit}", file=sys.stderr)
        found = analysis.diagnose(trials, _inside(collected, {**known, **options.constants}))
    else:
        found = _measure(options, collected)
    print(found)
    for line in _said(collected, found.causes):
        print(line)
    return 0 if found.verdict == "healthy" else 1


def _inside(collected: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Evidence from inside: what was collected, and the sizes that somebody told."""
    return {"logs": collected.get("logs") or None, "config": {**collected.get("config", {}), **config}}


def _said(collected: dict[str, Any], causes: tuple[str, ...]) -> list[str]:
    """What the collection names for the causes, with the file, unit or flag; for no cause the most telling of all."""
    by_class = collected.get("findings", {})
    codes = [code for code in causes if code in by_class] or list(by_class)
    lines = dict.fromkeys(sentence for code in codes for sentence in by_class[code])
    return [f"Collected: {line}." for line in list(lines)[:4]]


def _recorded(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The trials, of a run folder in the order of sending, and the sizes that the deployment told when it was asked."""
    trials = analysis.load_trials(path)
    if not path.is_dir() or "probe" not in trials or "time" not in trials:
        return trials, {}
    asked = trials[trials["probe"] != "calibration"].sort_values("time", kind="stable", ignore_index=True)
    with probes.Journal(path, read_only=True) as journal:
        told = journal.manifest.get(CONSTANTS)
    known = {str(n): v for n, v in told.items() if _is_size(v)} if isinstance(told, dict) else {}
    return asked.assign(ordinal=range(len(asked))), known


def _is_size(value: object) -> bool:
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in several
    )


def _limits(trials: pd.DataFrame) -> list[str]:
    """What a table does not tell for lack of columns, in sentences; ValueError when it tells nothing at all."""

    def lacks(*names: str) -> bool:
        return not any(name in trials and trials[name].notna().any() for name in names)

    if lacks("outcome", "score"):
        raise ValueError(
            f"none of {len(trials):,} trials says whether the answer was right; add a column outcome "
            f"({', '.join(analysis.OUTCOMES[:4])} …, or right and wrong) or a score between 0 and 1"
        )
    parts = {"length": ("prompt_tokens", "target_tokens"), "the place in the prompt": ("depth",)}
    return [
        f"the table has no {' or '.join(names)}: nothing is said about {part}"
        for part, names in parts.items()
        if lacks(*names)
    ]


def _measure(options: argparse.Namespace, collected: dict[str, Any]) -> Diagnosis:
    if options.run is None:
        table = (
            f"; to diagnose a table, name a file or a run folder that exists (there is no {options.what[:60]!r} here)"
        )
        raise ValueError(
            "name a folder for the journal with --run, so that a run that was stopped can go on"
            + ("" if "://" in options.what else table)
        )
    plan = probes.QUICK if options.quick else probes.Plan()
    with open_target(options.what, model=options.model) as target:
        *others, examined = target.arms  # the arm that users talk to is the last one
        stated = about.deployed(incidents.incident(), target)
        config = {**stated.config, **options.constants}
        if window := config.get("context_limit"):
            plan = plan.within(int(window) - ROOM_FOR_ANSWER)
        try:
            measured = probes.battery(
                target.arms[examined],
                options.run,
                name="single" if examined == "target" else examined,
                others={name: target.arms[name] for name in others},
                plan=plan,
                seed=options.seed,
                step=lambda name: print(f"asking: {name}", file=sys.stderr),
                confirm=confirm_in_terminal(options.yes),
            )
        except Stopped:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"{error}; what was measured is kept, the same command goes on") from None
        with probes.Journal(options.run) as journal:  # the folder can then be diagnosed again without the deployment
            journal.note(**{CONSTANTS: config})
    print(f"{target.describe()}\n{stated}\n\n{measured}\n")
    return analysis.diagnose(measured.trials, _inside(collected, config))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="needlework diagnose",
        description="Rank the fault classes and lookalikes for a table of trials, or for a live deployment: the "
        "battery of instruments with which the diagnosis is calibrated is run on it first.",
        epilog="Exit status: 0 healthy, 1 anything else, 2 bad input. The classes are explained in docs/classes.md.",
    )
    parser.add_argument(
        "what",
        help="a table (CSV, JSON lines, parquet) or a run folder; or a target as in `needlework run --target`: "
        "http://…, or combined=http://…,pd=http://… (the last arm is examined, the others get identical prompts)",
    )
    parser.add_argument("--evidence", metavar="DIR", help="what `needlework collect` wrote of this deployment")
    parser.add_argument("--run", metavar="DIR", help="folder of the journal; a run that was stopped goes on from it")
    parser.add_argument("--quick", action="store_true", help="a third of the requests: fewer lengths, 16 residues")
    parser.add_argument("--yes", action="store_true", help="send without asking once the budget is shown")
    parser.add_argument("--seed", type=int, default=0, help="changes text, keys and values together")
    parser.add_argument("--model", help="model name; default: NEEDLEWORK_MODEL, or the first one that is listed")
    parser.add_argument(
        "--constants",
        type=constants,
        default={},
        metavar="topk=512,ratio=4",
        help="what the deployment does not tell of itself: topk, ratio, window, page, chunk, context_limit",
    )
    return parser
