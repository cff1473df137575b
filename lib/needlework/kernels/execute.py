"""How check() runs a kernel: on poisoned memory, twice, over two backgrounds, and again with the same buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.kernels.cases import Case
from needlework.kernels.compare import Comparison
from needlework.kernels.operations import Inputs, Operation, Outputs

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
    first: dict[int, tuple[Outputs, list[Comparison]]] = {}
    for i, case in enumerate(cases):
        try:
            inputs = case.inputs("nan", device)
        except (MemoryError, RuntimeError) as error:  # a pool past 2^31 bytes does not fit everywhere
            yield i, _row(case, "not run", detail=_said(error))
            continue
        row, got = _attempt(op, function, case, inputs, float("nan"))
        if got is None:
            yield i, row
            if fail_fast and row["status"] == "FAIL":
                return
            continue
        first[i] = (got, _judged(op, inputs, got, op.want(inputs)))
        if fail_fast and not all(c.passed for c in first[i][1]):
            yield i, _case_row(case, first[i][1], "")
            return
    for i in sorted(first, reverse=True):
        case, (got, comparisons) = cases[i], first.pop(i)
        inputs = case.inputs("noise", device)
        row, again = _attempt(op, function, case, inputs, 1e30)
        if again is None:
            row["detail"] = f"ran once, then failed on the second run: {row['detail']}"
            yield i, row
            continue
        if all(c.passed for c in comparisons):
            second = _judged(op, inputs, again, op.want(inputs))
            comparisons = comparisons if all(c.passed for c in second) else second
        differs = "" if not all(c.passed for c in comparisons) else _differs(op, inputs, got, again)
        yield i, _case_row(case, comparisons, differs)


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
    }


def _case_row(case: Case, comparisons: list[Comparison], differs: str, prefix: str = "") -> dict:
    wrong = [c for c in comparisons if not c.passed]
    worst = wrong[0] if wrong else max(comparisons, key=lambda c: c.norm_error / max(c.limit.norm, 1e-30))
    if wrong:
        detail = f"{worst.what}: {worst.detail}" + (f" at {worst.worst}" if worst.worst else "")
        return _row(case, "FAIL", prefix=prefix, detail=detail, worst=worst)
    return _row(case, "FAIL" if differs else "ok", prefix=prefix, detail=differs, worst=worst)
