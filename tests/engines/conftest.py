"""The engines of these tests, each started once: one server, and a prefill/decode pair behind vllm-router.

Both stay up until the last test, so that the notebook compares two deployments. On two cores they need a minute and a
half to start and about three gigabytes together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nbformat import NotebookNode
from needlework import workbook
from needlework_lab import vllm
from needlework_press import runner

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("NEEDLEWORK_ENGINES"):
        for item in items:
            if item.get_closest_marker("engines"):
                item.add_marker(pytest.mark.skip(reason="the real engine is tested by `make test-engines`"))


@pytest.fixture(scope="session")
def executed() -> Callable[..., tuple[NotebookNode, list[str]]]:
    """Executes a notebook on a live target, as `needlework run NAME --target` does; gives it, and what it printed."""

    def execute(name: str, target: str, record: Path, **parameters: object) -> tuple[NotebookNode, list[str]]:
        (twin,) = runner.choose([name], ROOT)
        notebook = asyncio.run(
            runner.execute(
                twin,
                root=ROOT,
                parameters=parameters | {"target": target},
                environment={"NEEDLEWORK_TARGET": target, "NEEDLEWORK_RECORD": str(record)},
                timeout_s=900,
            )
        )
        outputs = (out for cell in notebook.cells for out in cell.get("outputs", ()))
        return notebook, [out.text for out in outputs if out.get("name") == "stdout"]

    return execute


@pytest.fixture(scope="session")
def one() -> Iterator[vllm.Engine]:
    with vllm.start("combined") as engine:
        yield engine


@pytest.fixture(scope="session")
def target() -> Iterator[workbook.Target]:
    """The pair as `--target vllm` opens it; its decode server, asked directly, is the combined arm."""
    with workbook.open_target("vllm") as opened:
        yield opened
