"""`needlework run` and `needlework report`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

from needlework.evidence import Bundle, incidents

from needlework_press import report, runner, writer

NO_ANSWER = 3  # exit status: the report is built, and some notebooks say why they have no answer for this target


def run(argv: list[str]) -> int:
    """Returns the exit status: 0, 1 when a notebook failed, 3 when one has no answer for the target."""
    parser = argparse.ArgumentParser(prog="needlework run", description="Execute the notebooks and build the report.")
    parser.add_argument(
        "notebook", nargs="*", help="two digits or the start of a name, e.g. 03; all when none is given"
    )
    parser.add_argument("--all", action="store_true", help="execute also what is up to date")
    parser.add_argument(
        "--incident",
        help="rebuild this incident from its recordings: a folder of data/incidents, or the path of a bundle",
    )
    parser.add_argument(
        "--target",
        help="lab, lab:pd:F14, vllm, llama, http://…, a=http://…,b=http://…, recorded (each notebook from its own "
        "recorded run), recorded:<run>; http://…+tokenizer=http://… where a router has none; default: what the "
        "incident says, and the deployment in a box when none is named",
    )
    parser.add_argument("--keep", metavar="NN", help="bring the cells of notebook NN back to its text twin, and stop")
    parser.add_argument("--jobs", type=int, help="notebooks at a time (default 2; on live endpoints 1)")
    parser.add_argument("--timeout", type=float, default=runner.TIMEOUT_S, help="seconds for one notebook")
    parser.add_argument(
        "--record", action="store_true", help="keep what each notebook measures in the incident's runs/<notebook>"
    )
    parser.add_argument("--no-report", action="store_true", help="execute only")
    options = parser.parse_args(argv)
    root = incidents.root()
    if options.keep:
        return _keep(options.keep, root)
    plan = dataclasses.replace(_plan(root, options.incident, options.target), record=options.record)
    if options.record:
        if (plan.target or "lab").startswith("recorded"):
            raise ValueError("there is nothing to record from a recording; name a live target: --record --target lab")
        _refuse_to_overwrite(plan, options.notebook)
    began = time.perf_counter()
    try:
        results = runner.run(
            plan,
            options.notebook or plan.notebooks,
            everything=options.all or incidents.ELSEWHERE in os.environ,  # what lies elsewhere has no stamp
            jobs=options.jobs,
            timeout_s=options.timeout,
        )
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if options.record and not any(d.error for d in results) and (plan.bundle / "digests.json").is_file():
        Bundle(plan.bundle).seal()
    if not options.no_report:
        try:
            page = report.build(plan)
            seconds = time.perf_counter() - began
            print(f"{page.relative_to(root)}  {page.stat().st_size / 1e6:.1f} MB  ({seconds:.0f} s in all)")
        except report.ReportError as error:
            if not any(d.error for d in results):
                raise
            print(f"needlework run: {error}", file=sys.stderr)
    n = len(results)
    if skipped := [d.name for d in results if d.cannot]:
        told = f"{len(skipped)} of {n} notebooks have no answer for this target: {', '.join(skipped)}"
        print(f"needlework run: {told}", file=sys.stderr)
    if failed := [d.name for d in results if d.error]:
        print(f"needlework run: {len(failed)} of {n} notebooks failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else NO_ANSWER if skipped else 0


def _plan(root: Path, incident: str | None, target: str | None) -> runner.Plan:
    if incident and ("/" in incident or incident.startswith(".")):
        incident = incidents.adopt(incident)
    name = incident or os.environ.get("NEEDLEWORK_INCIDENT") or incidents.DEFAULT
    target = target or os.environ.get("NEEDLEWORK_TARGET") or None
    if incident or incidents.names():
        bundle = incidents.incident(name)
        settings = bundle.settings.get("workbook", {})
        # a bare `needlework run` measures; an incident asked for by name is rebuilt as it says
        default = settings.get("target") if incident or name != incidents.DEFAULT else None
        _check_settings(name, settings)
        return runner.Plan(
            root,
            name,
            target or default,
            tuple(settings.get("notebooks", ())),
            settings=settings.get("parameters", {}),
        )
    return runner.Plan(root, name, target)


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """The [workbook] table of an incident that somebody sent: a wrong type is one sentence, not a traceback."""
    notebooks, parameters = settings.get("notebooks", []), settings.get("parameters", {})
    if not isinstance(settings.get("target", ""), str):
        raise ValueError(f"incident {name}: [workbook] target must be a text")
    if not isinstance(notebooks, list) or not all(isinstance(n, str) for n in notebooks):
        raise ValueError(f"incident {name}: [workbook] notebooks must be a list of notebook names")
    if not isinstance(parameters, dict) or not all(isinstance(p, dict) for p in parameters.values()):
        raise ValueError(f"incident {name}: [workbook.parameters.<notebook>] must be tables of parameters")


def _refuse_to_overwrite(plan: runner.Plan, names: list[str]) -> None:
    """A recorded run is evidence: it is added to by nobody and replaced only by hand."""
    there = [twin.stem for twin in runner.choose(names, plan.root) if plan.recording(twin).exists()]
    if there:
        raise ValueError(f"already recorded: {', '.join(there)}; remove runs/<notebook> of the incident to record anew")


def _keep(name: str, root: Path) -> int:
    for twin in runner.choose([name], root):
        notebook = writer.notebook_path(twin)
        if not notebook.is_file():
            raise ValueError(f"there is no notebooks/{notebook.name} to take cells from; execute it first")
        changed = writer.write_twin(notebook, twin)
        print(f"{twin.relative_to(root)}  {'changed' if changed else 'as before'}")
    return 0


def rebuild(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="needlework report", description="Build the report from the notebooks as they are."
    )
    parser.add_argument("--incident", help=f"a folder of data/incidents (default {incidents.DEFAULT})")
    parser.add_argument("--target", help="the target that the notebooks were executed on, where it was not the default")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help="also take a picture of the top of the report (needs Chromium)"
    )
    options = parser.parse_args(argv)
    root = incidents.root()
    plan = _plan(root, options.incident, options.target)
    page = report.build(plan)
    print(f"{page.relative_to(root)}  {page.stat().st_size / 1e6:.1f} MB")
    if options.picture:
        report.take_picture(page, options.picture)
        print(options.picture)
    return 0
