"""The instruments on the deployment in a box: silent when it is healthy, and on the spot when it is not."""

from __future__ import annotations

import needlework_lab as lab
import pytest
from needlework import probes
from needlework.serving import Endpoint
from needlework_lab.calibrate.in_process import start_in_process


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


def test_the_walk_follows_the_budget_of_a_consumer_to_the_token():
    """Attention reads the first k entries of the list, in the order of the text: 4 k tokens. The last place of the
    value that hits lies before that by its own few tokens, the same number for every k.
    """
    before = {}
    for k in (128, 256):
        # the indexer takes as many entries as `high` tokens have
        options = {"geometry": "tiny", "top_k": 3 * k // 2, "chunk_tokens": 1024}
        with start_in_process("combined", (f"F05:k={k},scattered=0",), **options) as one:
            found = probes.find_cliff(one.endpoint, low=3 * k, high=6 * k, from_end=80, tolerance=0.1, controls=False,
                                      config={"topk": k, "ratio": 4})  # fmt: skip
        assert [c.value for c in found.constants] == [4 * k], str(found)
        before[k] = 4 * k - found.details["place"]
        walked = found.trials[found.trials["label"] == "walk"].groupby("needle_token")["outcome"].first()
        assert walked[found.details["place"]] == "exact"
        assert walked[found.details["place"] + 1] == "near", "the first token past the edge is the value's last digit"
    assert before[128] == before[256] == 10


@pytest.mark.parametrize("chunk", [384, 512])
def test_the_walk_ends_at_the_chunk_to_the_token(chunk):
    """The index is rebuilt by each pass: what is in the only chunk is found, one token more and there are two. One
    request at a time: with several in flight the passes share the chunk, and a short prompt is cut in two as well.
    """
    with start_in_process("combined", ("F08",), geometry="tiny", top_k=64, chunk_tokens=chunk) as one:
        found = probes.find_cliff(one.endpoint, low=chunk // 2, high=2 * chunk, depth=0.3, tolerance=0.1, walk=True,
                                  controls=False, config={"chunk": chunk})  # fmt: skip
    assert found.edge == chunk and chunk in [c.value for c in found.constants], str(found)
