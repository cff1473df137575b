"""The engines of these tests, each started once: one server, and a prefill/decode pair behind vllm-router.

Both stay up until the last test, so that the notebook compares two deployments. On two cores they need a minute and a
half to start and about three gigabytes together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from needlework import workbook
from needlework_lab import vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("NEEDLEWORK_ENGINES"):
        for item in items:
            if item.get_closest_marker("engines"):
                item.add_marker(pytest.mark.skip(reason="the real engine is tested by `make test-engines`"))


@pytest.fixture(scope="session")
def one() -> Iterator[vllm.Engine]:
    with vllm.start("combined") as engine:
        yield engine


@pytest.fixture(scope="session")
def target() -> Iterator[workbook.Target]:
    """The pair as `--target vllm` opens it; its decode server, asked directly, is the combined arm."""
    with workbook.open_target("vllm") as opened:
        yield opened
