"""The instruments on the deployment in a box: silent when it is healthy, and on the spot when it is not."""

from __future__ import annotations

import pytest
from needlework import lab, probes
from needlework.serving import Endpoint


@pytest.fixture(scope="module")
def healthy():
    with lab.start(mode="combined", geometry="tiny") as deployment:
        yield Endpoint(deployment.base_url, timeout_s=60)


def test_healthy_lab_gives_no_finding(healthy):
    for result in (
        probes.recall(healthy, lengths=(300, 900), depths=(0.1, 0.9)),
        probes.warm_cold(healthy, lengths=(400, 800), repeats=1),
        probes.turns(healthy, length=500, repeats=1),
        probes.abort(healthy, stages=("prefill", "decode"), rounds=1, length=800),
        probes.echo(healthy, trials=4, concurrency=4, lengths=(300,)),
        probes.scan_residues(healthy, start=400, period=4),
    ):
        assert result.healthy, f"{result.probe}: {result}"
        assert "model" not in str(result.warnings) and not result.stopped
    assert healthy.capabilities.engine == "sglang" and healthy.capabilities.tokenize == "chat"


def test_comb_is_found_on_the_lab():
    with lab.start(mode="combined", geometry="tiny", faults=("F07",)) as deployment:
        result = probes.scan_residues(deployment.base_url, start=400, period=8, cache=("cold",), distance=100)
    comb = result.combs["start", "cold"]
    assert (comb.state, comb.period, comb.residues) == ("comb", 4, (3,)), str(result)
