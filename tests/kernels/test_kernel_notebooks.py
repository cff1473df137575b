"""The kernel notebooks on a candidate that fails or raises: each ends in a true sentence, never in an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from needlework.kernels.check import run
from needlework.kernels.check.suites import suite
from needlework.workbook.cannot import CannotAnswer

TWINS = Path(__file__).parents[2] / "notebooks" / "src"
CASES = {  # enough for what the exercises claim
    "indexer_logits": ("page edges", "32,769 keys"),
    "select_topk": ("odd lengths in one batch", "planted needle", "one bin scores", "16,384 and one more in one bin"),
    "sparse_mla_decode": ("random entries", "holes anywhere"),
    "merge_partials": ("2 parts", "parts without a key"),
}
WRONG = """
import torch
from needlework.kernels import reference as ref

def logits(*args, **more):
    return ref.indexer_logits(*args, **more) * 1.5

def decode(*args, **more):
    out, lse = ref.sparse_mla_decode(*args, **more)
    return out.nan_to_num() + 1, lse

def merge(outs, lses, sink=None):
    return outs[0], lses[0]

def raises(*args, **more):
    raise RuntimeError("out of registers")
"""


def executed(name: str, **parameters: object) -> dict:
    """A notebook's cells run in a row with these parameters."""
    text = next(TWINS.glob(f"{name}_*.py")).read_text()
    for key, value in parameters.items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value!r}", text, flags=re.MULTILINE)
        assert count, key
    sys.modules["twin"] = module = ModuleType("twin")
    exec(compile(text, name, "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture
def broken(tmp_path, monkeypatch, capsys):
    def few(operation, size="small", seed=0):
        return tuple(case for case in suite(operation, size, seed) if case.kind in CASES[operation])

    monkeypatch.setattr(run, "suite", few)
    (tmp_path / "broken.py").write_text(WRONG)
    return f"{tmp_path / 'broken.py'}:"


SMALL = {"06": {"sweep_tokens": [1024, 4096]}, "07": {"needles_each": 4}, "08": {"sweep_tokens": [1024]}}


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("06", {"candidate": "logits"}, ["FAILS indexer_logits", "past its limit from 256 keys on"]),
        ("07", {"candidate": "raises"}, ["FAILS select_topk", "does NOT reach"]),
        ("08", {"candidate": "decode", "merger": "merge"}, ["FAILS sparse_mla_decode", "NOT the same"]),
        ("08", {"candidate": "raises", "merger": "raises"}, ["out of registers", "raises at 64 parts", "NOT the same"]),
    ],
)
def test_a_broken_candidate_ends_in_a_true_sentence(name, parameters, says, broken, capsys):
    executed(name, **SMALL[name], **{key: broken + value for key, value in parameters.items()})
    said = capsys.readouterr().out
    for sentence in says:
        assert sentence in said, (sentence, said[-2000:])


@pytest.mark.parametrize(("name", "candidate"), [("06", "no such kernel"), ("07", "deep_gemm"), ("08", "flash_mla")])
def test_a_candidate_that_is_not_here_ends_the_notebook_with_a_sentence(name, candidate, broken):
    with pytest.raises(CannotAnswer, match=r"unknown candidate|cannot run here"):
        executed(name, candidate=candidate)
