"""Execute notebooks from a clean kernel: text twin in, canonical notebook out, nothing left running."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import html
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbclient.util import ensure_async
from nbformat import NotebookNode
from needlework.evidence import incidents
from needlework.probes.bench.journal import UNFINISHED
from needlework.probes.bench.trial import PromptTooLong
from needlework.serving import target as targets
from needlework.serving.scrub import plain, scrub, strip_ansi
from needlework.workbook import cannot
from needlework.workbook.session import EARLIER

from needlework_press import writer

VERDICT = "11_verdict"  # reads what the other notebooks of the run have measured
LIVE = "live: set NEEDLEWORK_TARGET to its address"  # what an executed notebook holds where the address was
# what ends a notebook with one sentence and no failure: the target is not one to which its question can be put
UNANSWERED = (cannot.CannotAnswer.__name__, PromptTooLong.__name__)
TIMEOUT_S = 300.0  # for one notebook; the aim is 30
_TRACE = '__import__("needlework_press.trace", fromlist=["_"])'


class NotebookFailed(RuntimeError):
    """A notebook that did not run to its end; the message is a short block naming notebook, cell and error."""

    def __init__(self, name: str, reason: str, notebook: NotebookNode | None = None):
        super().__init__(f"{name} {reason}")
        self.notebook = notebook


@dataclass(frozen=True)
class Done:
    """One notebook of a run: executed (seconds), or up to date, or failed (error)."""

    name: str
    seconds: float = 0.0
    executed: bool = False
    error: str = ""
    cannot: str = ""  # why it has no answer for this target; what it measured until then stands

    def __str__(self) -> str:
        if self.error:
            return f"{self.name:<28} failed after {self.seconds:.1f} s"
        told = f"{self.name:<28} {f'{self.seconds:.1f} s' if self.executed else 'up to date'}"
        return f"{told}\n    not for this target: {self.cannot}" if self.cannot else told


# ---- one notebook ----


def with_parameters(nb: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """The notebook with a cell after its `parameters` cell that sets those of `values` which that cell defines."""
    for place, cell in enumerate(nb.cells):
        if "parameters" in cell.metadata.get("tags", ()):
            assigned = [t for n in ast.parse(cell.source).body if isinstance(n, ast.Assign) for t in n.targets]
            known = {name.id for target in assigned for name in ast.walk(target) if isinstance(name, ast.Name)}
            lines = [f"{name} = {value!r}" for name, value in values.items() if name in known]
            if lines:
                extra = nbformat.v4.new_code_cell(source="\n".join(lines))
                extra.metadata["tags"] = ["injected-parameters"]
                nb.cells.insert(place + 1, extra)
            return writer.tidy_inputs(nb)
    return nb


async def execute(
    twin: Path,
    *,
    root: Path,
    parameters: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> NotebookNode:
    """Execute a twin in a fresh kernel `python3` and return the canonical notebook.

    A cell that raises one of UNANSWERED ends it: the sentence takes the place of the error, and the stamp holds it too.
    Raises NotebookFailed when a cell raises, the kernel dies or timeout_s passes. Kernel and all its children are gone
    on return.
    """
    nb = with_parameters(writer.read_twin(twin), parameters or {})
    sockets = tempfile.TemporaryDirectory(prefix="nw-")  # channels of this user alone, no TCP port
    manager = AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=f"{sockets.name}/k", connection_file=f"{sockets.name}/kernel.json"
    )
    client = NotebookClient(
        nb, km=manager, timeout=None, record_timing=False, store_widget_state=False, coalesce_streams=True
    )
    client.reset_execution_trackers()
    env = {**os.environ, "PYTHONHASHSEED": "0", "NO_COLOR": "1", "MPLBACKEND": "agg"}
    env |= {"NEEDLEWORK_ROOT": str(root), "NEEDLEWORK_NOTEBOOK": twin.stem}
    env.setdefault("OMP_NUM_THREADS", "1")  # two notebooks run side by side
    env.update(environment or {})
    await manager.start_kernel(
        cwd=str(root / "notebooks"),
        env=env,
        extra_arguments=["--HistoryManager.hist_file=:memory:"],
        stderr=subprocess.DEVNULL,  # the polite end is an interrupt, which the kernel would report as an error
    )
    finished, reason = False, ""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            await client.async_start_new_kernel_client()
            await _silently(client, f"{_TRACE}.begin({str(root)!r})")
            for index, cell in enumerate(nb.cells):
                try:
                    await client.async_execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
                except CellExecutionError as error:
                    if error.ename not in UNANSWERED:
                        raise
                    reason = _ended(cell, root)
                    break
            used = ast.literal_eval(await _silently(client, "", f"{_TRACE}.report()"))
            finished = True
    except CellExecutionError as error:
        raise NotebookFailed(twin.stem, _cell_error(nb, error, root), nb) from None
    except (DeadKernelError, TimeoutError, asyncio.CancelledError):
        if scope.expired():
            raise NotebookFailed(twin.stem, f"took longer than {timeout_s:.0f} s and was stopped", nb) from None
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nbclient turns a cancellation into a dead kernel
            raise asyncio.CancelledError from None
        raise NotebookFailed(twin.stem, "lost its kernel (it died; was it out of memory?)", nb) from None
    finally:
        await asyncio.shield(_stop(manager, client, finished))
        sockets.cleanup()
    try:
        stamp = writer.stamp(twin, used) | ({"cannot": reason} if reason else {})
        return writer.canonical(nb, stamp, root)
    except writer.TwinError as error:
        raise NotebookFailed(twin.stem, f"cannot be written: {error}", nb) from None


async def _silently(client: NotebookClient, code: str, expression: str = "None") -> str:
    """Run code in the kernel without a trace in history or outputs; returns the repr of `expression`."""
    assert client.kc is not None
    message = client.kc.execute(code, silent=True, store_history=False, user_expressions={"value": expression})
    while (reply := await ensure_async(client.kc.shell_channel.get_msg(timeout=60)))["parent_header"].get(
        "msg_id"
    ) != message:
        pass
    value = reply["content"].get("user_expressions", {}).get("value", {})
    if value.get("status") != "ok":
        raise RuntimeError(f"the kernel could not evaluate {expression[:60]}: {value.get('evalue', 'no answer')}")
    return str(value["data"]["text/plain"])


async def _stop(manager: AsyncKernelManager, client: NotebookClient, finished: bool) -> None:
    """End the kernel and everything it started: politely first, so that its own clean-up runs."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error, AttributeError, TypeError):
        children = psutil.Process(manager.provisioner.process.pid).children(recursive=True)  # type: ignore[union-attr,attr-defined]
    with contextlib.suppress(Exception):
        if not finished and await manager.is_alive():
            await manager.interrupt_kernel()  # context managers in the running cell close what they opened
            await asyncio.sleep(0.5)
        await manager.shutdown_kernel(now=False)
    with contextlib.suppress(Exception):
        await manager.shutdown_kernel(now=True)
    if client.kc is not None:
        client.kc.stop_channels()
    left = [p for p in children if p.is_running()]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, 3)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _ended(cell: NotebookNode, root: Path) -> str:
    """The sentence of a cell that raised one of UNANSWERED, which it shows from now on instead of the error."""
    raised = next(o for o in cell.outputs if o.output_type == "error")
    sentence = plain(writer.scrub(raised.evalue, root), 600)
    _show_instead(cell, raised, "Not for this target", sentence)
    return sentence


def _show_instead(cell: NotebookNode, raised: NotebookNode, what: str, sentence: str) -> None:
    shown = {
        "text/html": f"<p><strong>{what}.</strong> {html.escape(sentence)}</p>",
        "text/plain": f"{what}: {sentence}",
    }
    cell.outputs = [o for o in cell.outputs if o is not raised]
    cell.outputs.append(nbformat.v4.new_output("display_data", data=shown))


def failed_notebook(twin: Path, failure: NotebookFailed, root: Path) -> NotebookNode:
    """What a failed notebook had shown until then, the error as a sentence without keys and addresses, and a stamp that
    says why: its section of the report."""
    nb = writer.read_twin(twin) if failure.notebook is None else failure.notebook
    for cell in nb.cells:
        for raised in [o for o in cell.get("outputs", ()) if o.output_type == "error"]:
            sentence = scrub(writer.scrub(f"{raised.ename}: {raised.evalue}", root), limit=600)
            _show_instead(cell, raised, "This notebook ended here", sentence)
    reason = scrub(" ".join(str(failure).removeprefix(twin.stem).split()), limit=600)
    try:
        return writer.canonical(nb, {"failed": reason}, root)
    except writer.TwinError:  # one of its outputs cannot be kept
        return writer.canonical(writer.read_twin(twin), {"failed": reason}, root)


def _cell_error(nb: NotebookNode, error: CellExecutionError, root: Path) -> str:
    """`failed in cell N`, the line that raised, and the error in its own words."""
    for place, cell in enumerate(nb.cells, start=1):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                trace = strip_ansi("\n".join(output.traceback))
                arrows = re.findall(r"^-+> *\d+ (.*)$", trace, re.M)
                line = arrows[0].strip() if arrows else cell.source.strip().splitlines()[0]
                said = writer.scrub(strip_ansi(output.evalue), root).strip() or "(no message)"
                short = "\n    ".join(said.splitlines()[:6])[:800]
                return f"failed in cell {place}\n    {line[:160]}\n    {output.ename}: {short}"
    return f"failed: {error.ename}: {writer.scrub(strip_ansi(error.evalue), root)[:800]}"


# ---- a set of notebooks ----


@dataclass(frozen=True)
class Plan:
    """What one run executes and where it writes. The default incident on the default target writes notebooks/, every
    other pair of incident and target a folder of its own under build/: what one target answered is never another's."""

    root: Path
    incident: str = incidents.DEFAULT
    target: str | None = None
    notebooks: tuple[str, ...] = ()  # an incident may name the notebooks that apply to it; empty means all
    record: bool = False  # keep what each notebook measures as runs/<notebook> of the incident
    settings: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # parameters by notebook, as the incident says

    @property
    def default(self) -> bool:
        return self.incident == incidents.DEFAULT and self.target in (None, "", "lab")

    @property
    def kind(self) -> str:
        """The kind of target: lab, vllm, recorded or http."""
        try:
            return targets.kind_of(next(iter(targets.split_arms(self.target or "lab").values())))
        except targets.TargetError:
            return "http"  # opening it will say what is wrong with it; until then it may hold an address

    @property
    def place(self) -> str:
        """Folder under build/ and report/: the incident, and the target unless the incident is always read with it. An
        address shows only as a digest."""
        if self.default or (self.incident != incidents.DEFAULT and self.target in (None, "", "recorded")):
            return self.incident
        target = self.target or "lab"
        short = re.sub(r"[^\w.-]+", "-", target)
        if self.kind == "http" or "/" in target or len(short) > 40:
            short = f"{self.kind}-{hashlib.sha256(target.encode()).hexdigest()[:8]}"
        return f"{self.incident}-{short}"

    @property
    def repeatable(self) -> bool:
        """Whether the target answers the same tomorrow, so that an executed notebook can be up to date."""
        return self.kind in ("lab", "recorded")

    @property
    def jobs(self) -> int:
        """Notebooks at a time: on live endpoints one, or each would measure beside the load of another."""
        return 1 if self.kind == "http" else 2

    def output(self, twin: Path) -> Path:
        return writer.notebook_path(twin) if self.default else self.root / "build" / self.place / f"{twin.stem}.ipynb"

    def failed(self, twin: Path) -> Path:
        """Where a notebook that failed lies, beside the last one that came to its end, until it does so again."""
        return self.root / "build" / self.place / f"{twin.stem}.failed.ipynb"

    def executed(self, twin: Path) -> Path | None:
        """What the last run made of it: the notebook, failed or not; None when there was none."""
        return next((path for path in (self.failed(twin), self.output(twin)) if path.is_file()), None)

    def parameters(self, twin: Path) -> dict[str, Any]:
        """What is set after the notebook's `parameters` cell; nothing for the default incident and target."""
        if self.default:
            return {}
        address_free = LIVE if self.kind == "http" else self.target
        target = {"target": address_free} if self.target else {}
        return {"incident": self.incident, **target, **self.settings.get(twin.stem, {})}

    def environment(self, twin: Path, earlier: Sequence[Path] = ()) -> dict[str, str]:
        """What one notebook is told beside its own name: the incident, the target, where to record, and the folders of
        what others of this run have measured."""
        found = {"NEEDLEWORK_INCIDENT": self.incident}
        if self.target:
            found["NEEDLEWORK_TARGET"] = self.target
        if self.keeps:
            found["NEEDLEWORK_RECORD"] = str(self.unfinished(twin))
        if earlier:
            found[EARLIER] = os.pathsep.join(map(str, earlier))
        return found

    @property
    def keeps(self) -> bool:
        """Whether what is measured is kept as a run: always of another deployment than the default one, where the
        verdict reads it; with `record` as a part of the incident."""
        return self.record or not (self.default or self.kind == "recorded")

    @property
    def bundle(self) -> Path:
        return (
            incidents.incident(self.incident).path
            if self.incident in incidents.names()
            else (self.root / "data" / "incidents" / self.incident)
        )

    def recording(self, twin: Path) -> Path:
        """Where what this notebook measures is kept."""
        return (self.bundle if self.record else self.root / "build" / self.place) / "runs" / twin.stem

    def unfinished(self, twin: Path) -> Path:
        """Where it lies until the notebook has come to its end; a recording that was stopped goes on from there."""
        return self.recording(twin).with_name(f"{twin.stem}{UNFINISHED}")


def choose(names: Sequence[str], root: Path) -> list[Path]:
    """Twins whose name starts with one of `names` ("03", "03_recall"); all when there is none. ValueError names what
    is there."""
    every = writer.twins(root)
    if not names:
        return every
    chosen = []
    for name in names:
        found = [t for t in every if t.stem == name or t.stem.startswith(name if "_" in name else f"{name.zfill(2)}_")]
        if not found:
            raise ValueError(f"no notebook {name[:40]!r}; there are {', '.join(t.stem for t in every) or 'none'}")
        chosen += found
    return sorted(set(chosen))


async def run_all(
    plan: Plan,
    chosen: Sequence[Path],
    *,
    everything: bool = False,
    jobs: int | None = None,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] = print,
) -> list[Done]:
    """Execute those of `chosen` that are stale (all with `everything`, or when the target may answer otherwise today),
    `jobs` (the plan's, unless given) at a time in file order; the verdict waits for the others where what they measure
    is kept, and reads it. `tell` gets one line per notebook as it ends."""
    everything = everything or not plan.repeatable
    gate = asyncio.Semaphore(max(1, plan.jobs if jobs is None else jobs))

    async def one(twin: Path, earlier: Sequence[Path] = (), again: bool = False) -> Done:
        async with gate:
            output = plan.output(twin)
            failed = plan.failed(twin)
            if not (everything or again) and not failed.is_file() and writer.why_stale(output, twin, plan.root) is None:
                done = Done(twin.stem, cannot=_reason(output))
                tell(str(done))
                return done
            began = time.perf_counter()
            error = reason = ""
            if plan.keeps and not plan.record:  # of another day; the deployment may be another one today
                for old in (plan.recording(twin), plan.unfinished(twin)):
                    shutil.rmtree(old, ignore_errors=True)
            try:
                nb = await execute(
                    twin,
                    root=plan.root,
                    parameters=plan.parameters(twin),
                    environment=plan.environment(twin, earlier),
                    timeout_s=timeout_s,
                )
                if not plan.repeatable:
                    nb.metadata["needlework"]["when"] = time.strftime("%Y-%m-%d")
                _replace(output, writer.dumps(nb))
                failed.unlink(missing_ok=True)
                reason = nb.metadata["needlework"].get("cannot", "")
                if plan.keeps and plan.unfinished(twin).is_dir():
                    os.replace(plan.unfinished(twin), plan.recording(twin))
            except NotebookFailed as failure:
                error = str(failure)
                _replace(failed, writer.dumps(failed_notebook(twin, failure, plan.root)))
            done = Done(twin.stem, time.perf_counter() - began, True, error, reason)
            tell(str(done) + (f"\n{error}" if error else ""))
            return done

    later = [twin for twin in chosen if plan.keeps and twin.stem == VERDICT]
    first = [twin for twin in chosen if twin not in later]
    tasks = [asyncio.ensure_future(one(twin)) for twin in first]
    try:
        results = list(await asyncio.gather(*tasks))
        ended = [twin for twin, done in zip(first, results, strict=True) if not done.error]
        earlier = [run for twin in ended if (run := plan.recording(twin)).is_dir()]
        results += [await one(twin, earlier, any(done.executed for done in results)) for twin in later]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return results


def _reason(output: Path) -> str:
    """Why an executed notebook has no answer for its target, or ""."""
    return str(writer.stamp_of(nbformat.read(output, as_version=4)).get("cannot", ""))


def _replace(path: Path, text: str) -> None:
    """Write through a neighbour file, so that a stopped run leaves the old notebook whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".ipynb.part")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)


def run(plan: Plan, names: Sequence[str] = (), **options: Any) -> list[Done]:
    """`run_all` from synchronous code. Ctrl-C stops every kernel and its children before KeyboardInterrupt is
    raised."""
    chosen = choose(names, plan.root)
    if not chosen:
        raise ValueError("there is no notebook under notebooks/src")
    return asyncio.run(run_all(plan, chosen, **options))
