"""Hold a kernel against its reference where kernels really fail, and say what was covered and what was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
import torch

from needlework.kernels.candidates import Candidate, available, load
from needlework.kernels.cases import Case
from needlework.kernels.execute import ALWAYS, reused, run
from needlework.kernels.operations import operation_of
from needlework.kernels.suites import suite

NEVER = "timing, races that did not show in these runs, shapes outside the cases, and what the engine hands the kernel"


@dataclass(frozen=True)
class CheckResult:
    """passed: True, False, or None where nothing could be run; table: one row a case; coverage: one row a topic."""

    candidate: str
    operation: str
    passed: bool | None
    table: pd.DataFrame
    coverage: pd.DataFrame
    note: str = ""

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
            verdict = f"{self.candidate} agrees with the reference of {self.operation} in {ran} cases{more}"
        else:
            first = self.failures.iloc[0]
            verdict = (
                f"{self.candidate} FAILS {self.operation} in {len(self.failures)} of {ran} cases{more}; "
                f"first: {first['case']}: {first['detail']}"
            )
        return f"{verdict}. Not covered: {open_topics}."

    def _repr_html_(self) -> str:
        show = self.table.drop(columns=["covers"]).style.hide(axis="index")
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
    rows = [row for _, row in sorted(run(op, function, list(chosen), device, fail_fast))]
    ran_names = {row["case"] for row in rows if row["status"] in ("ok", "FAIL")}
    stop = fail_fast and any(row["status"] == "FAIL" for row in rows)
    usable = [case for case in chosen if not stop and f"{case.name}" in ran_names]
    extra, notes = reused(op, function, usable, device)
    table = pd.DataFrame(rows + extra)
    failed, ran = (bool((table["status"] == status).any()) for status in ("FAIL", "ok"))
    note = (
        candidate.note if failed or ran else f"every case was refused or could not be built: {table['detail'].iloc[0]}"
    )
    passed = False if failed else (True if ran else None)
    return CheckResult(candidate.name, operation, passed, table, _coverage(table, notes), note)


def verdicts(operation: str, cases: Sequence[Case] | None = None, *, skip: Sequence[str] = ()) -> pd.DataFrame:
    """Every named candidate of an operation but those in `skip`: its verdict in a sentence, or why it is not here."""
    others = [c for c in available(operation) if c.name not in ("reference", *skip)]
    said = [(c.name, c.missing or str(check(c, operation, cases, size="small"))) for c in others]
    return pd.DataFrame(said, columns=["candidate", "verdict"])


def _coverage(table: pd.DataFrame, notes: dict[str, str]) -> pd.DataFrame:
    ran = table[table["status"].isin(["ok", "FAIL"])]
    rows = [{"topic": ALWAYS[key], "covered": not notes.get(key), "how": notes.get(key, "")} for key in ALWAYS]
    topics = sorted({topic for text in table["covers"] for topic in text.split(",") if topic})
    for topic in topics:
        cases = ran[ran["covers"].str.split(",").map(lambda names, t=topic: t in names)]
        left = table[table["covers"].str.split(",").map(lambda names, t=topic: t in names)]
        how = f"{len(cases)} cases" if len(cases) else "; ".join(left["detail"].unique())[:200]
        rows.append({"topic": topic, "covered": len(cases) > 0, "how": how})
    rows.append({"topic": NEVER, "covered": False, "how": "no check of one kernel can see these"})
    return pd.DataFrame(rows)
