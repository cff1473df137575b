"""Endpoints that answer short prompts alone: the law of what failed leads in the server's words; nobody is accused."""

from __future__ import annotations

import re

import hostile
import pytest
from needlework.__main__ import main


def told(url: str, tmp_path, capsys, *more: str) -> tuple[int, str]:
    status = main(["diagnose", url, "--run", str(tmp_path / "run"), "--requests", "48", "--yes", *more])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("name", ["status_500", "resets_at_once", "error_line"])
def test_prompts_that_fail_beyond_a_length_are_told_by_their_law(name, tmp_path, capsys):
    with hostile.serve() as base:
        status, out = told(f"{base}/{name}", tmp_path, capsys)
    edge = re.match(r"Not proven: prompts above ([\d,]+) to ([\d,]+) tokens: 0 of \d+ answered", out)
    assert status == 1 and edge, out
    low, high = (int(n.replace(",", "")) for n in edge.groups())
    assert low < hostile.ABOVE <= high and "Mechanism" not in out and "Lost:" not in out, out
    words = {"resets_at_once": "reset"}
    assert words.get(name, hostile.WORDS) in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero_tokens", "answered with nothing (0 completion tokens)"),
        ("reasons_only_stream", "lost values stand in the reasoning, with no answer after it (finish reason stop)"),
    ],
)
def test_an_answer_that_never_came_is_a_lookalike_in_words(name, words, tmp_path, capsys):
    with hostile.serve() as base:
        status, out = told(f"{base}/{name}", tmp_path, capsys)
    assert status == 1 and words in out, out
    assert re.search(r"Mechanism: N3 \d+ %", out) and not re.search(r"\bF(?!16)\d\d\b", out), out


def test_the_same_server_without_a_fault_accuses_nobody(tmp_path, capsys):
    with hostile.serve() as base:
        _, out = told(f"{base}/right_byte_by_byte", tmp_path, capsys)
    assert not re.search(r"Not answered|Mechanism|Lost:|Inside", out), out
