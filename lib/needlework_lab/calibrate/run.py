"""Running cases: start the deployment, investigate it, see what else it offers, diagnose; parallel and resumable."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, as_completed
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from needlework import probes
from needlework.probes.bench.journal import lock_folder

from needlework_lab.calibrate.cases import EFFORT, GEOMETRY, Case, Effort, key
from needlework_lab.processes import worker_pool

WEIGHTS_SEED = 0  # of the lab's model: every deployment and the reference share their weights


@lru_cache(maxsize=1)
def _independent() -> Any:
    """The healthy reference of this process: one is enough, nothing of it depends on the case."""
    from needlework_lab.calibrate.in_process import start_in_process

    keep = contextlib.ExitStack()
    return keep, keep.enter_context(start_in_process("combined", (), seed=WEIGHTS_SEED, remember=True, **GEOMETRY))


@contextlib.contextmanager
def _deployments(case: Case) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The examined deployment, and the others it is compared with by arm name."""
    from needlework_lab.calibrate.in_process import start_in_process

    with contextlib.ExitStack() as stack:
        # physical pages are handed out in an order that a restart changes: so does the case's seed
        options: dict[str, Any] = {**GEOMETRY, **case.options, "seed": WEIGHTS_SEED, "page_seed": case.seed}
        examined = stack.enter_context(start_in_process(case.mode, case.planted, **options))
        others = {}
        if case.mode == "pd":
            others["combined"] = stack.enter_context(start_in_process("combined", case.planted, **options))
        if "N5" in case.faults:  # the checkpoint is the same on every server
            own = tuple(spec for spec in case.planted if spec.startswith("N5"))
            others["reference"] = stack.enter_context(start_in_process("combined", own, **options))
        else:
            others["reference"] = _independent()[1]
        yield examined, others


def run_case(case: Case, folder: str, effort: Effort = EFFORT) -> dict[str, Any]:
    """Measure one case into `folder`/<key> (or read it back) and return its row of the results."""
    here = Path(folder) / "runs" / key(case, effort)
    done = here / "evidence.json"
    if not measured(case, folder, effort):
        from needlework_lab.calibrate.evidence import config_of, has_host_tier, inside_of

        started, cpu = time.perf_counter(), time.process_time()
        with _deployments(case) as (examined, others):
            server = next(iter(examined.servers.values()))
            name = "pd" if case.mode == "pd" else "single"
            if effort.fill_tokens and has_host_tier(server):  # else nothing can come back from one
                some: dict[str, Any] = {"fill_tokens": effort.fill_tokens, "length": 500, "prompts": 10, "depth": 0.6}
                probes.reload(examined.endpoint, here, arm=name, seed=case.seed, **some)
            arms = {name: other.endpoint for name, other in others.items()} | {name: examined.endpoint}
            result = probes.investigate(
                arms, here, requests=effort.requests, window=effort.window, stated=config_of(server), seed=case.seed
            )
            facts = {
                "config": config_of(server),
                "requests": examined.transport.generated,
                "ended": result.ended,
                "foretold": [r for r in _records(here) if r["record"] == "predictions"],
                "inside": inside_of(examined, others.get("reference")),
            }
        result.trials.to_json(here / "table.jsonl", orient="records", lines=True)
        facts |= {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        temporary = done.with_suffix(".part")
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(temporary, done)
    return judge(case, folder, effort)


def _records(folder: Path) -> list[dict[str, Any]]:
    with probes.Journal(folder, read_only=True) as journal:
        return journal.records


def measured(case: Case, folder: str | Path, effort: Effort = EFFORT) -> bool:
    """Are this case's trials in `folder`, whole?"""
    return (Path(folder) / "runs" / key(case, effort) / "evidence.json").is_file()


def judge(case: Case, folder: str, effort: Effort = EFFORT) -> dict[str, Any]:
    """Diagnose a measured case, from outside alone and with what the deployment offers inside."""
    import pandas as pd
    from needlework.analysis import diagnose

    here = Path(folder) / "runs" / key(case, effort)
    facts = json.loads((here / "evidence.json").read_text(encoding="utf-8"))
    lines = (here / "table.jsonl").read_text(encoding="utf-8").splitlines()
    trials = pd.DataFrame([json.loads(line) for line in lines])
    row: dict[str, Any] = {**asdict(case), "label": case.label, "key": here.name, "requests": facts["requests"]}
    row |= {"trials": len(trials), "ended": facts["ended"], "wall_s": facts["wall_s"], "cpu_s": facts["cpu_s"]}
    for view, evidence in (
        ("outside", {"config": facts["config"]}),
        ("evidence", {"config": facts["config"], **facts["inside"]}),
    ):
        found = diagnose(trials, evidence, predictions=facts["foretold"])
        row[view] = {
            "verdict": found.verdict,
            "confidence": found.confidence,
            "groups": [list(group) for group in found.groups],
            "ranked": [r.code for r in found.ranked[:5]],
            "shares": [round(r.posterior, 3) for r in found.ranked[:5]],
            "laws": {law.name: round(law.share, 3) for law in found.laws},
        }
    return row


def calibrate(
    wanted: Iterable[Case],
    folder: str | Path,
    *,
    effort: Effort = EFFORT,
    executor: Executor | None = None,
    workers: int = 2,
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run all cases and return their rows, in the order given; each is also appended to `folder`/results.jsonl.

    executor  anything with `submit` that returns futures, for example a Dask client's `get_executor()`; its workers
              must see `folder`. Without one, `workers` processes of this machine.

    A case whose trials are in the folder is not measured again, only diagnosed with the rules as they are now. Raises
    ValueError when another process measures into `folder`: the same case measured by two at once would be neither's.
    """
    cases = list(wanted)
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        whole = all(measured(case, folder, effort) for case in cases)
        if not whole and (held := lock_folder(Path(folder))) is not None:
            stack.callback(os.close, held)
        if executor is None:
            executor = stack.enter_context(worker_pool(workers))
        futures: dict[Future[dict[str, Any]], Case] = {
            executor.submit(run_case, c, str(folder), effort): c for c in cases
        }
        with open(Path(folder) / "results.jsonl", "a", encoding="utf-8") as out:
            for future in _finished(futures):
                row = future.result()
                rows[row["key"]] = row
                out.write(json.dumps(row) + "\n")
                out.flush()
                if progress is not None:
                    progress(len(rows), len(cases), row)
    return [rows[key(case, effort)] for case in cases]


def _finished(futures: dict[Future[dict[str, Any]], Case]) -> Iterator[Future[dict[str, Any]]]:
    """Futures as they finish; those of another library only in order."""
    if all(isinstance(future, Future) for future in futures):
        yield from as_completed(futures)
    else:
        yield from futures
