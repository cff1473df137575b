"""How a kernel is held against its reference: on poisoned memory, twice, over two backgrounds, again with the same
buffers; and the result, which says what was covered and what was not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.kernels.candidates import Candidate, available, load
from needlework.kernels.check.cases import Case
from needlework.kernels.check.compare import Comparison
from needlework.kernels.check.operations import Inputs, Operation, Outputs, extent, operation_of
from needlework.kernels.check.suites import suite

if TYPE_CHECKING:
    import pandas as pd

NEVER = "timing, races that did not show in these runs, shapes outside the cases, and what the engine hands the kernel"
ALWAYS = {
    "poison": "outputs and scratch hold NaN, then large numbers, before each run",
    "background": "bytes and columns that must not count hold NaN, then finite garbage",
    "repeat": "run twice, in another order, and compared bit for bit",
    "inputs": "inputs are left as they were",
    "reuse": "the same buffers again with other lengths and numbers",
    "graph": "captured in a CUDA graph and replayed with other lengths",
    "stream": "run on a second stream",
}


class EmptyGraph(RuntimeError):
    """A capture that recorded nothing, so that a replay would prove nothing."""


class Poison(TorchDispatchMode):
    """Fill every uninitialised tensor that the kernel allocates, on any device: NaN, or numbers too large to go
    unseen."""

    FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.FRESH and isinstance(out, Tensor) and out.numel():
            if out.dtype.is_floating_point and out.element_size() > 1:
                out.fill_(self.value)
            elif out.dtype != torch.bool:
                out.view(torch.uint8).fill_(0x7F if self.value != self.value else 0x35)
        return out


def run(
    op: Operation, function: Callable[..., Any], cases: list[Case], device: str, fail_fast: bool
) -> Iterator[tuple[int, dict]]:
    """Forwards over NaN, then backwards over noise, so that what one case leaves behind meets a smaller and a larger
    one."""
    first: dict[int, tuple[Outputs, list[Comparison], dict[str, int]]] = {}
    for i, case in enumerate(cases):
        try:
            inputs = case.inputs("nan", device)
        except (MemoryError, RuntimeError) as error:  # a pool past 2^31 bytes does not fit everywhere
            yield i, _row(case, "not run", detail=_said(error))
            continue
        row, got = _attempt(op, function, case, inputs, float("nan"))
        size = extent(inputs)
        if got is None:
            yield i, row | size
            if fail_fast and row["status"] == "FAIL":
                return
            continue
        first[i] = (got, _judged(op, inputs, got, op.want(inputs)), size)
        if fail_fast and not all(c.passed for c in first[i][1]):
            yield i, _case_row(case, first[i][1], "") | size
            return
    for i in sorted(first, reverse=True):
        case, (got, comparisons, size) = cases[i], first.pop(i)
        inputs = case.inputs("noise", device)
        row, again = _attempt(op, function, case, inputs, 1e30)
        if again is None:
            row["detail"] = f"ran once, then failed on the second run: {row['detail']}"
            yield i, row | size
            continue
        if all(c.passed for c in comparisons):
            second = _judged(op, inputs, again, op.want(inputs))
            comparisons = comparisons if all(c.passed for c in second) else second
        differs = "" if not all(c.passed for c in comparisons) else _differs(op, inputs, got, again)
        yield i, _case_row(case, comparisons, differs) | size


def _attempt(op: Operation, function, case: Case, inputs: Inputs, poison: float) -> tuple[dict, Outputs | None]:
    before = {name: _bits(value).clone() for name, value in inputs.items() if _small(value)}
    try:
        with Poison(poison):
            got = op.invoke(function, inputs)
        got = tuple(out.detach().cpu() for out in got)
    except Exception as error:  # whatever a kernel under test raises is a finding, not an accident of the check
        refused = case.optional and isinstance(error, ValueError | NotImplementedError)
        detail = f"refuses {case.optional}: {_said(error)}" if refused else f"raises {_said(error)}"
        return _row(case, "refused" if refused else "FAIL", detail=detail), None
    changed = [name for name, bits in before.items() if not torch.equal(bits, _bits(inputs[name]))]
    if changed:
        return _row(case, "FAIL", detail=f"writes into its input {', '.join(changed)}"), None
    return {}, got


def _small(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() <= 64 << 20


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.ndim else value


def _judged(op: Operation, inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    """The comparisons; where one lies past a third of its limit, all of them again against float64."""
    comparisons = op.compare(inputs, got, want)
    doubtful = any(not c.passed or c.norm_error > c.limit.norm / 3 for c in comparisons)
    if not (op.double and doubtful):
        return comparisons
    return [replace(c, precision="float64") for c in op.compare(inputs, got, op.want(inputs, torch.float64))]


def _differs(op: Operation, inputs: Inputs, got: Outputs, again: Outputs) -> str:
    """What two runs over different backgrounds disagree on. A selection may come in another order."""
    if not op.repeatable:
        return ""
    for one, two in zip(got, again, strict=True):
        if op.name == "store_index_keys":  # the untouched bytes are the background itself
            continue
        a, b = one, two
        if op.name == "indexer_logits":
            past = torch.arange(a.shape[-1]) >= inputs["lengths"].cpu()[..., None]
            a, b = a.masked_fill(past, 0.0), b.masked_fill(past, 0.0)
        if not torch.equal(_bits(a), _bits(b)):
            return f"two runs differ in {int((a != b).sum())} elements"
    return ""


def reused(op: Operation, function, cases: list[Case], device: str) -> tuple[list[dict], dict[str, str]]:
    """Buffers filled again with a case of the same shapes: plainly, on a second stream, and as a replayed graph."""
    rows: list[dict] = []
    notes = {"reuse": "", "graph": "no CUDA device", "stream": "no CUDA device"}
    if device == "cuda":
        notes |= {"graph": "", "stream": ""}
    picked = [c for c in cases if {"batch", "lengths", "holes"} & set(c.covers) and "long" not in c.covers][
        :3
    ] or cases[:3]
    picked += [c for c in cases if "many rows" in c.covers and c not in picked]  # launched otherwise than few rows
    captured, empty = False, ""
    for case in picked:
        ways = ("reuse", "graph", "stream") if device == "cuda" else ("reuse",)
        for way in ways:
            varied, buffers = case.varied(), case.inputs("nan", device)
            fresh = varied.inputs("nan", device)
            same = all(not isinstance(v, Tensor) or v.shape == fresh[n].shape for n, v in buffers.items())
            if not same:
                continue
            try:
                got = _again(op, function, buffers, fresh, way)
            except EmptyGraph as error:
                empty = empty or f"{case.name}: {error}"
                continue
            except Exception as error:
                if way == "graph":
                    notes["graph"] = f"cannot be captured: {_said(error)}"
                else:
                    rows.append(_row(case, "FAIL", prefix=f"{ALWAYS[way]}: ", detail=f"raises {_said(error)}"))
                continue
            captured |= way == "graph"
            rows.append(_case_row(case, _judged(op, fresh, got, op.want(fresh)), "", prefix=f"{ALWAYS[way]}: "))
    if empty and not captured:
        notes["graph"] = empty
    return rows, notes


def _again(op: Operation, function, buffers: Inputs, fresh: Inputs, way: str) -> Outputs:
    def refill() -> None:
        for name, value in buffers.items():
            if isinstance(value, Tensor):
                value.view(torch.uint8).copy_(
                    fresh[name].view(torch.uint8)
                ) if value.element_size() == 1 else value.copy_(fresh[name])

    got: Outputs = ()
    if way == "reuse":
        op.invoke(function, buffers)
        refill()
        got = op.invoke(function, buffers)
    elif way == "stream":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            refill()
            got = op.invoke(function, buffers)
        stream.synchronize()
    else:
        with _warm_stream():
            op.invoke(function, buffers)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with torch.cuda.graph(graph):
                got = op.invoke(function, buffers)
        if any("graph is empty" in str(one.message).lower() for one in said):
            raise EmptyGraph("the captured graph holds no node: nothing ran on the stream under capture")
        # what the capture itself left in the outputs must not pass for what the replay writes
        for out in got:
            out.fill_(torch.nan if out.is_floating_point() else 0x7F)
        refill()
        graph.replay()
        torch.cuda.synchronize()
    return tuple(out.detach().cpu() for out in got)


@contextmanager
def _warm_stream() -> Iterator[None]:
    """A side stream for the run before a capture: it loads and compiles, which a capture may not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _row(case: Case, status: str, *, prefix: str = "", detail: str = "", worst: Comparison | None = None) -> dict:
    return {
        "case": f"{prefix}{case.name}",
        "status": status,
        "norm_error": worst.norm_error if worst else float("nan"),
        "element_error": worst.element_error if worst else float("nan"),
        "worst": worst.worst if worst else "",
        "precision": worst.precision if worst else "",
        "detail": detail,
        "covers": ",".join(case.covers),
        "row": 0,
        "batch": 0,
        "page": 0,
    }


def _case_row(case: Case, comparisons: list[Comparison], differs: str, prefix: str = "") -> dict:
    wrong = [c for c in comparisons if not c.passed]
    worst = wrong[0] if wrong else max(comparisons, key=lambda c: c.norm_error / max(c.limit.norm, 1e-30))
    if wrong:
        detail = f"{worst.what}: {worst.detail}" + (f" at {worst.worst}" if worst.worst else "")
        return _row(case, "FAIL", prefix=prefix, detail=detail, worst=worst)
    return _row(case, "FAIL" if differs else "ok", prefix=prefix, detail=differs, worst=worst)


@dataclass(frozen=True)
class CheckResult:
    """passed: True, False, or None where nothing could be run; table: one row a case; coverage: one row a topic;
    reached: the longest row, largest batch and highest page among the cases that ran, in words."""

    candidate: str
    operation: str
    passed: bool | None
    table: pd.DataFrame
    coverage: pd.DataFrame
    note: str = ""
    reached: str = ""

    @property
    def failures(self) -> pd.DataFrame:
        return self.table[self.table["status"] == "FAIL"]

    def __str__(self) -> str:
        if self.passed is None:
            return f"{self.candidate}: {self.operation} was not checked: {self.note}"
        counts = self.table["status"].value_counts()
        ran, refused = int(counts.get("ok", 0) + counts.get("FAIL", 0)), int(counts.get("refused", 0))
        open_topics = ", ".join(self.coverage.loc[~self.coverage["covered"], "topic"]) or "nothing on the list"
        more = f", {refused} refused" if refused else ""
        if self.passed:
            verdict = f"agrees with the reference of {self.operation} in {ran} cases{more}, {self.reached}"
        else:
            first = self.failures.iloc[0]
            failed = f"{len(self.failures)} of {ran} cases{more}; first: {first['case']}: {first['detail']}"
            verdict = f"FAILS {self.operation} in {failed}"
        return f"{self.candidate} {verdict}. Not covered: {open_topics}."

    def _repr_html_(self) -> str:
        show = self.table.drop(columns=["covers", "row", "batch", "page"]).style.hide(axis="index")
        show = show.format({"norm_error": "{:.1e}", "element_error": "{:.1e}"}, escape="html").set_uuid("check")
        return f"<p>{escape(str(self))}</p>{show.to_html()}"


def check(
    candidate: Candidate | Callable[..., Any] | str,
    operation: str,
    cases: Sequence[Case] | None = None,
    *,
    size: str | None = None,
    seed: int = 0,
    device: str | None = None,
    fail_fast: bool = False,
) -> CheckResult:
    """Run a candidate over the cases of an operation and hold it against the reference.

    candidate: a `Candidate`, a spec for `candidates.load`, or a function with the reference's signature; cases: default
    `suite(operation, size, seed)`, size "full" on a CUDA device and "small" elsewhere. Each case runs on poisoned
    memory, twice, over two backgrounds; a difference near its limit is judged anew against the reference in float64.
    `fail_fast` ends with the first case that fails. Raises ValueError for an unknown operation or spec; a failing or
    raising kernel is a result, never an exception.
    """
    import pandas as pd

    op = operation_of(operation)
    if isinstance(candidate, str):
        candidate = load(candidate)
    if not isinstance(candidate, Candidate):
        candidate = Candidate(getattr(candidate, "__name__", "function"), {operation: candidate})
    function = candidate.functions.get(operation)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    reason = candidate.missing
    if not reason and function is None:
        reason = f"it offers {', '.join(candidate.functions)} only"
    if not reason and candidate.needs_cuda and device != "cuda":
        reason = "it needs a CUDA device"
    if reason or function is None:
        return CheckResult(candidate.name, operation, None, pd.DataFrame(), pd.DataFrame(), reason)
    chosen = suite(operation, size or ("full" if device == "cuda" else "small"), seed) if cases is None else cases
    rows = [row for _, row in sorted(run(op, function, list(chosen), device, fail_fast), key=lambda found: found[0])]
    ran_names = {row["case"] for row in rows if row["status"] in ("ok", "FAIL")}
    stop = fail_fast and any(row["status"] == "FAIL" for row in rows)
    extra, notes = reused(op, function, [c for c in chosen if not stop and c.name in ran_names], device)
    table = pd.DataFrame(rows + extra)
    failed, ran = (bool((table["status"] == status).any()) for status in ("FAIL", "ok"))
    passed = False if failed else (True if ran else None)
    note = candidate.note
    if passed is None:
        note = f"every case was refused or could not be built: {table['detail'].iloc[0]}"
    largest = table.loc[table["status"].isin(["ok", "FAIL"]), ["row", "batch", "page"]].max()
    sizes = {} if passed is None else {str(what): int(n) for what, n in largest.items() if n}
    words = {"row": f"rows of {{:,}} {op.unit}", "batch": "batches of {:,}", "page": "page {:,}"}
    reached = "up to " + ", ".join(words[what].format(n) for what, n in sizes.items())
    return CheckResult(candidate.name, operation, passed, table, _coverage(table, notes, sizes, op.unit), note, reached)


def verdicts(operation: str, cases: Sequence[Case] | None = None, *, skip: Sequence[str] = ()) -> pd.DataFrame:
    """Every named candidate of an operation but those in `skip`: its verdict in a sentence, or why it is not here."""
    import pandas as pd

    others = [c for c in available(operation) if c.name not in ("reference", *skip)]
    said = [(c.name, c.missing or str(check(c, operation, cases, size="small"))) for c in others]
    return pd.DataFrame(said, columns=["candidate", "verdict"])


def _coverage(table: pd.DataFrame, notes: dict[str, str], sizes: dict[str, int], unit: str) -> pd.DataFrame:
    import pandas as pd

    rows = [{"topic": ALWAYS[key], "covered": not notes.get(key), "how": notes.get(key, "")} for key in ALWAYS]
    names = {"row": f"longest row, in {unit}", "batch": "largest batch, in rows", "page": "highest page id"}
    rows += [{"topic": names[what], "covered": True, "how": f"{n:,}"} for what, n in sizes.items()]
    for topic in sorted({topic for text in table["covers"] for topic in text.split(",") if topic}):
        of = table[[topic in text.split(",") for text in table["covers"]]]
        ran = int(of["status"].isin(["ok", "FAIL"]).sum())
        rows.append({"topic": topic, "covered": ran > 0,
                     "how": f"{ran} cases" if ran else "; ".join(of["detail"].unique())[:200]})  # fmt: skip
    rows.append({"topic": NEVER, "covered": False, "how": "no check of one kernel can see these"})
    return pd.DataFrame(rows)
