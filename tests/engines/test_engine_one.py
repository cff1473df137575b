"""The probes against one real server: vLLM for CPU with SmolLM2-135M (`make test-engines` sets it up).

The model answers short prompts; what must hold is what the engine says about them: lengths to the token, the dialect,
the blocks that came out of its cache.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from needlework import probes
from needlework.serving import Endpoint, capabilities, run
from needlework_lab import vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PARENT = """
import sys
from needlework_lab import vllm
with vllm.start("combined"):
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def endpoint(one) -> Endpoint:
    return Endpoint(one.base_url)


def test_the_dialect_is_found_by_asking(endpoint):
    found = run(capabilities.discover(endpoint))
    assert found.engine == "vllm" and found.model == vllm.MODEL_NAME and found.max_model_len == vllm.CONTEXT_TOKENS
    assert found.tokenize == "chat" and found.cached_tokens and found.salt == "cache_salt" and found.logprobs


def test_short_prompts_are_remembered_and_the_controls_pass(endpoint, tmp_path):
    result = probes.recall(endpoint, tmp_path / "run", lengths=(300, 600), depths=(0.2, 0.8), seed=1)
    assert result.verdict != "harness", str(result)
    assert result.table["hits"].sum() >= 3 and result.table["measured"].sum() == 4, str(result)
    rows = result.trials[result.trials["probe"] == "recall"]
    assert (rows["prompt_tokens"] == rows["target_tokens"]).all(), "lengths are exact to the token as the engine counts"


def test_warm_is_proved_in_blocks_of_the_engine(endpoint):
    result = probes.warm_cold(endpoint, lengths=(500, 900), repeats=1, controls=False, seed=2)
    assert endpoint.capabilities.cached_by == "usage"
    assert result.details["proved"] == result.details["pairs"] == 2, str(result)
    assert result.details["page"] % vllm.BLOCK_TOKENS == 0, result.table


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
