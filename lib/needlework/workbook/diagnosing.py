"""`needlework diagnose WHAT`: a table of trials, or a live deployment that is asked first, where it tells most."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework import analysis, probes
from needlework.evidence import Collection, as_evidence, incidents
from needlework.probes import switch
from needlework.probes.cli import confirm_in_terminal, constants
from needlework.serving import settings as about
from needlework.serving.target import Target, TargetError, open_target, split_arms
from needlework.workbook import onepage

if TYPE_CHECKING:
    import pandas as pd

    from needlework.analysis import Diagnosis

CONSTANTS = "constants"  # in a run's manifest: sizes that the examined deployment states


def main(argv: list[str]) -> int:
    """Print what was found and how sure it is; 0 when it is healthy, 1 when not or not finished, 2 on a user error."""
    options = _parser().parse_args(argv)
    (here,) = options.what if len(options.what) == 1 else (",".join(w.strip(",") for w in options.what),)
    options.told = {}
    options.collected = as_evidence(Collection.read(options.evidence)) if options.evidence else {}
    if Path(here).exists():
        return _print(*_recorded(Path(here), options), options)
    if options.run is None:
        table = f"; to diagnose a table, name a file or a run folder that exists (there is no {here[:60]!r} here)"
        raise ValueError(
            "name a folder for the journal with --run, so that a run that was stopped can go on"
            + ("" if "://" in here else table)
        )
    return _print(*(_one_after_the_other if options.then else _measure)(here, options), options)


def _print(found: Any, finished: bool, options: argparse.Namespace) -> int:
    print(found)
    diagnosis = getattr(found, "diagnosis", found)
    if options.report:
        trials = found.trials if diagnosis is not found else options.trials
        what = "A live deployment" if diagnosis is not found else "A recorded run"
        arms = ", ".join(sorted(set(trials["arm"].dropna().astype(str)))) if "arm" in trials else ""
        made = onepage.brief(
            diagnosis, trials, what=what, facts={**options.told, "Arms": arms}, config=options.constants
        )
        print(f"wrote {onepage.write(options.report, made)}, and issue.md and repro.py beside it")
    for line in _said(options.collected, diagnosis.causes):
        print(line)
    return 0 if diagnosis.verdict == "healthy" and finished else 1


def _inside(options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Evidence from inside: what was collected, and the sizes that somebody told."""
    collected = options.collected
    return {"logs": collected.get("logs") or None,
            "config": {**collected.get("config", {}), **config, **options.constants}}  # fmt: skip


def _said(collected: dict[str, Any], causes: tuple[str, ...]) -> list[str]:
    """What the collection names for the causes, with the file, unit or flag; for no cause the most telling of all."""
    by_class = collected.get("findings", {})
    codes = [code for code in causes if code in by_class] or list(by_class)
    lines = dict.fromkeys(sentence for code in codes for sentence in by_class[code])
    return [f"Collected: {line}." for line in list(lines)[:4]]


def _recorded(path: Path, options: argparse.Namespace) -> tuple[Diagnosis, bool]:
    """A table as it is; a run folder in the order of sending, with what its deployment told and its law foretold."""
    trials = analysis.load_trials(path)
    records: list[Any] = []
    known: dict[str, Any] = {}
    if path.is_dir():
        with probes.Journal(path, read_only=True) as journal:
            records, sizes = journal.records, journal.manifest.get(CONSTANTS)
        known = {str(n): v for n, v in sizes.items() if _is_size(v)} if isinstance(sizes, dict) else {}
        if "probe" in trials and "time" in trials:
            trials = trials[trials["probe"] != "calibration"].sort_values("time", kind="stable", ignore_index=True)
    for limit in _limits(trials):
        print(f"note: {limit}", file=sys.stderr)
    options.trials = trials
    finished = not records or any(r.get("record") == "end" for r in records)
    if not finished:
        print(f"UNFINISHED: this run was stopped after {len(trials)} trials; what follows holds for those. The command "
              "that began it goes on.", file=sys.stderr)  # fmt: skip
    return analysis.diagnose(trials, _inside(options, known), predictions=records), finished


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


@contextlib.contextmanager
def _opened(spec: str, options: argparse.Namespace) -> Iterator[Target]:
    """The target with the options of the command, and the same limits on each of its endpoints."""
    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise ValueError("the environment variable that --api-key-env names is not set; give its name, never the key")
    more = {"timeout_s": options.timeout, "ca_file": options.ca}
    with open_target(spec, model=options.model, api_key=key, **more) as target:
        yield target


def _arms(target: Target) -> dict[str, Any]:
    return {"single" if name == "target" else name: target.arms[name] for name in target.arms}


def _measure(spec: str, options: argparse.Namespace) -> tuple[probes.Investigation, bool]:
    with _opened(spec, options) as target:
        stated = about.deployed(incidents.incident(), target)
        config = dict(_inside(options, dict(stated.config))["config"])
        options.told = {"Version": stated.version, "Deployment": target.describe()}
        print(f"{target.describe()}\n{stated}", file=sys.stderr)
        found = _investigated(_arms(target), options, config)
    return found, found.finished


def _investigated(arms: Any, options: argparse.Namespace, config: dict[str, Any]) -> probes.Investigation:
    window = config.get("context_limit")
    try:
        found = probes.investigate(
            arms, options.run, requests=options.requests, quick=options.quick, minutes=options.minutes,
            exclude=options.exclude, window=int(window) if window else None, stated=config,
            evidence=_inside(options, config), seed=options.seed, confirm=confirm_in_terminal(options.yes),
            progress=sys.stderr.isatty() or None, say=_say,
        )  # fmt: skip
    except probes.Stopped:
        raise
    except RuntimeError as error:
        raise RuntimeError(f"{error}; what was measured is kept, the same command goes on") from None
    with probes.Journal(options.run) as journal:  # the folder can then be diagnosed again without the deployment
        journal.note(**{CONSTANTS: config})
    for warning in found.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return found


def _say(sentence: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"asking {sentence}", file=sys.stderr)


def _one_after_the_other(spec: str, options: argparse.Namespace) -> tuple[probes.Investigation, bool]:
    """The first deployment, the switch by a person, the second on the same bytes, the first again where it answers."""
    pairs = [split_arms(part) for part in (spec, options.then)]
    if any(len(pair) != 1 or "target" in pair for pair in pairs) or pairs[0].keys() == pairs[1].keys():
        raise ValueError("name both deployments, for example: diagnose pd=http://… --then combined=http://…")
    (first,), (second,) = pairs
    plan = None
    if options.plan:
        from needlework.evidence.plan import load_plan

        plan = load_plan(options.plan)
    ended = False
    if Path(options.run, "plan.jsonl").is_file():
        with probes.Journal(options.run, read_only=True) as journal:
            ended = any(r.get("record") == "end" for r in journal.records)
    if not ended:
        found, finished = _measure(spec, options)
        if not finished:
            return found, False
    more: dict[str, Any] = {"confirm": confirm_in_terminal(options.yes), "progress": sys.stderr.isatty() or None,
                            "say": _say, "minutes": options.minutes}  # fmt: skip
    steps = switch.instructions(first, second, pairs[1][second].partition("+")[0], plan)
    done = _when_up(
        options.then, options, steps, lambda t: switch.measure(first, second, _only(t), options.run, **more)
    )
    if done:  # only now is the first of use again
        back = f"{first} once more would show that time is not the cause: switch back and give the same command again."
        done = _when_up(
            spec,
            options,
            back,
            lambda t: switch.measure(first, first, _only(t), options.run, again=True, **more),
            wait=False,
        )
    with probes.Journal(options.run, read_only=True) as journal:
        told = {str(n): v for n, v in journal.manifest.get(CONSTANTS, {}).items() if _is_size(v)}
    return probes.investigate(probes.Recorded(options.run), evidence=_inside(options, told)), done


def _only(target: Target) -> Any:
    return next(iter(_arms(target).values()))


def _when_up(spec: str, options: argparse.Namespace, steps: str, act: Any, *, wait: bool = True) -> bool:
    """Act on a target once it answers; in a terminal a person is asked to switch, elsewhere the next call goes on."""
    while True:
        try:
            with _opened(spec, options) as target:
                act(target)
                return True
        except TargetError as error:
            print(f"{steps}\n({error})", file=sys.stderr)
            if not (wait and sys.stdin.isatty()):
                return False
            try:
                input("Enter when it is up, Ctrl-D to go on later: ")
            except EOFError:
                return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="needlework diagnose",
        description="What a deployment loses, which mechanism would lose just that, and how sure it is: for a table of "
        "trials, or for a live deployment, which is asked where it tells most until one explanation is left and has "
        "foretold fresh prompts.",
        epilog="Exit status: 0 healthy, 1 anything else, 2 bad input. The classes are explained in docs/classes.md.",
    )
    parser.add_argument(
        "what", nargs="+",
        help="a table (CSV, JSON lines, parquet) or a run folder; or a target as in `needlework run --target`: "
        "http://…, or any number of them by name: combined=http://… pd=http://…",
    )  # fmt: skip
    add = parser.add_argument
    add("--run", metavar="DIR", help="folder of the journal; a run that was stopped goes on from it")
    add("--report", metavar="DIR", help="also write one or two pages there: summary.html, issue.md, repro.py")
    add("--evidence", metavar="DIR", help="what `needlework collect` wrote of this deployment")
    add("--then", metavar="NAME=URL", help="a deployment that cannot run beside the first: it gets the same prompts")
    add("--plan", metavar="FILE", help="with --then: the incident.toml that names units and ports, to print the switch")
    add("--quick", action="store_true", help=f"at most {probes.QUICK_REQUESTS} requests")
    add("--requests", type=int, metavar="N", help=f"at most so many requests ({probes.REQUESTS})")
    add("--minutes", type=float, metavar="M", help="at most so long")
    add("--exclude", type=float, metavar="RATE", help="loss rate that healthy has to exclude in each condition (0.1)")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for one request (%(default)g)")
    add("--yes", action="store_true", help="send without asking once the budget is shown")
    add("--seed", type=int, default=0, metavar="N", help="changes text, keys and values together")
    add("--model", metavar="NAME", help="model name; default: NEEDLEWORK_MODEL, or the first one that is listed")
    add("--constants", type=constants, default={}, metavar="topk=512,ratio=4",
        help="what the deployment does not tell: topk, ratio, window, page, chunk, context_limit")  # fmt: skip
    add("--ca", metavar="FILE", help="certificates to trust beside the system's, for a server that signed its own")
    add("--api-key-env", metavar="NAME", help="environment variable with the key (default NEEDLEWORK_API_KEY)")
    return parser
