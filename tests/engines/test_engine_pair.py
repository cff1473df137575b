"""The probes against a real engine: vLLM for CPU with SmolLM2-135M, a prefill/decode pair behind vllm-router.

`make test-engines` sets the engine up and runs these. The pair's decode server, asked directly, is the combined arm:
it computes the whole prompt itself. Answers need not be equal between the arms, because a prompt that was computed
elsewhere is batched differently; what must hold is the way in which they were produced.
"""

from __future__ import annotations

import pytest
from needlework import probes
from needlework.serving import Endpoint, run
from needlework_lab import vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(target) -> vllm.Engine:
    return target.deployments["pd"]


def combined(target) -> Endpoint:
    return target.arms["combined"]


def test_the_configuration_in_force_is_what_was_asked_for(pair):
    info = pair.server_info()
    assert set(info) == {"prefill", "decode"}
    assert "NixlConnector" in str(info["prefill"]) and "kv_producer" in str(info["prefill"])
    assert "kv_consumer" in str(info["decode"])


def test_warm_is_proved_where_prompts_are_computed(target):
    endpoint = target.arms["pd"]
    result = probes.warm_cold(endpoint, lengths=(300, 600), repeats=1, controls=False, seed=2)
    # a decode server may call every transferred token cached: whoever is believed must tell cold from warm
    assert endpoint.capabilities.cached_by in ("usage", "counter")
    assert result.details["proved"] == result.details["pairs"] == 2, str(result)
    assert result.details["page"] % vllm.BLOCK_TOKENS == 0, result.table


def test_the_split_transfers_and_remembers(target, pair):
    before = pair.transfer_counts()
    result = probes.compare_arms(
        target.arms, lengths=(300, 600), depths=(0.5,), repeats=1, aa_pairs=0, controls=False, seed=3
    )
    after = pair.transfer_counts()
    trials = result.trials
    assert not (trials["outcome"] == "transport").any(), trials[["arm", "error"]].dropna()
    split = trials[(trials["arm"] == "pd") & (trials["probe"] == "arms")]
    assert len(split) == 2, str(result)
    sent = after["nixl_bytes_transferred_count"] - before.get("nixl_bytes_transferred_count", 0)
    assert sent >= len(split), f"{sent} transfers for {len(split)} prompts: decode computed the prompt itself"
    assert after["nixl_bytes_transferred_sum"] > before.get("nixl_bytes_transferred_sum", 0)
    for name in ("nixl_num_failed_transfers", "nixl_num_failed_notifications"):
        assert after.get(name, 0) == before.get(name, 0), name
    assert (split["outcome"] == "exact").any(), "a prompt of some hundred tokens is within this model's reach"


def test_a_direct_request_transfers_nothing(target, pair):
    before = pair.transfer_counts()
    reply = run(combined(target).chat([{"role": "user", "content": "Say yes. " * 60}], max_tokens=4))
    assert reply.completion_tokens and pair.transfer_counts() == before
