"""Deployments shared by the lab's tests: one of each kind for a whole session."""

from __future__ import annotations

import needlework_lab as lab
import pytest
from lab_client import Client


@pytest.fixture(scope="session")
def combined():
    with lab.start(mode="combined", geometry="tiny") as deployment:
        yield Client(deployment)


@pytest.fixture(scope="session")
def pd():
    with lab.start(mode="pd", geometry="tiny") as deployment:
        yield Client(deployment)
