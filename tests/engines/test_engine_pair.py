"""The probes against a real engine: vLLM for CPU with SmolLM2-135M, a prefill/decode pair behind vllm-router.

`make test-engines` sets the engine up and runs these. The pair's decode server, asked directly, is the combined arm:
it computes the whole prompt itself. Answers need not be equal between the arms, because a prompt that was computed
elsewhere is batched differently; what must hold is the way in which they were produced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from needlework import probes, workbook
from needlework.serving import Endpoint, dialects, run, vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
if not os.environ.get("NEEDLEWORK_ENGINES"):
    pytest.skip("the real engine is tested by `make test-engines`", allow_module_level=True)

PARENT = """
import sys
from needlework.serving import vllm
with vllm.start("combined"):
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def target() -> Iterator[workbook.targets.Target]:
    with workbook.open_target("vllm") as opened:
        yield opened


@pytest.fixture(scope="module")
def pair(target) -> vllm.Engine:
    return target.deployments["pd"]


def combined(target) -> Endpoint:
    return target.arms["combined"]


def test_the_dialect_is_found_by_asking(target):
    found = run(dialects.probe(combined(target)))
    assert found.engine == "vllm" and found.model == vllm.MODEL_NAME and found.max_model_len == vllm.CONTEXT_TOKENS
    assert found.tokenize == "chat" and found.cached_tokens and found.salt == "cache_salt" and found.logprobs


def test_the_configuration_in_force_is_what_was_asked_for(pair):
    info = pair.server_info()
    assert set(info) == {"prefill", "decode"}
    assert "NixlConnector" in str(info["prefill"]) and "kv_producer" in str(info["prefill"])
    assert "kv_consumer" in str(info["decode"])


def test_short_prompts_are_remembered_and_the_controls_pass(target, tmp_path):
    result = probes.recall(combined(target), tmp_path / "run", lengths=(300, 600), depths=(0.2, 0.8), seed=1)
    assert result.verdict != "harness", str(result)
    assert result.table["hits"].sum() >= 3 and result.table["measured"].sum() == 4, str(result)
    rows = result.trials[result.trials["probe"] == "recall"]
    assert (rows["prompt_tokens"] == rows["target_tokens"]).all(), "lengths are exact to the token as the engine counts"


@pytest.mark.parametrize("arm", ["combined", "pd"])
def test_warm_is_proved_in_blocks_of_the_engine(target, arm):
    endpoint = target.arms[arm]
    result = probes.warm_cold(endpoint, lengths=(500, 900), repeats=1, controls=False, seed=2)
    # the pair's decode server calls every transferred token cached; its prefill server's counter does not
    assert endpoint.capabilities.cached_by == {"combined": "usage", "pd": "counter"}[arm]
    assert result.details["proved"] == result.details["pairs"] == 2, str(result)
    assert result.details["page"] % vllm.BLOCK_TOKENS == 0, result.table


def test_the_split_transfers_and_remembers(target, pair):
    before = pair.transfer_counts()
    result = probes.compare_arms(target.arms, lengths=(300, 700), depths=(0.5,), repeats=1, aa_pairs=1, seed=3)
    after = pair.transfer_counts()
    trials = result.trials
    assert not (trials["outcome"] == "transport").any(), trials[["arm", "error"]].dropna()
    split = trials[(trials["arm"] == "pd") & (trials["probe"] == "arms")]
    assert len(split) == 2 and result.verdict != "harness", str(result)
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


def test_nothing_is_left_when_the_parent_is_killed():
    before = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE)
    family = until(lambda: found if len(found := descendants(parent.pid)) >= 2 else set(), 60)
    time.sleep(3)  # the server is importing; its workers come later, and must not be needed for it to end
    family |= descendants(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert until(lambda: not any(alive(pid) for pid in family), vllm.GRACE_S + 10), "the engine outlived its parent"
    assert not set(Path("/dev/shm").iterdir()) - before, "segments are left in shared memory"


def until(condition, timeout_s: float):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def stat(pid: int) -> list[str]:
    """State and parent of a process, then the rest of /proc/<pid>/stat; empty when it has ended."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    return (stat(pid) or ["Z"])[0] != "Z"


def descendants(pid: int) -> set[int]:
    parents = {int(e.name): int(s[1]) for e in Path("/proc").iterdir() if e.name.isdigit() and (s := stat(int(e.name)))}
    found, level = set(), {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found |= level
    return found
