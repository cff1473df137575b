"""What a deployment says of itself is used, what nobody said is not known; a target's helpers; advice by class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mock_endpoint import mock_endpoint
from needlework import analysis, names, workbook
from needlework.evidence import Bundle
from needlework.serving import settings as about
from needlework.serving import target as targets


def bundle(folder: Path, **roles: object) -> Bundle:
    folder.mkdir(exist_ok=True)
    for role, said in roles.items():
        (folder / "evidence/node" / role).mkdir(parents=True)
        text = said if isinstance(said, str) else json.dumps(said)
        (folder / "evidence/node" / role / "http-server_info").write_text(text)
    return Bundle(folder)


def test_only_what_was_collected_is_known(tmp_path: Path) -> None:
    said = {"index_topk": 2048, "chunked_prefill_size": 8192, "sliding_window": "128", "page_size": True}
    one = bundle(tmp_path, decode="not json", prefill=said, router={"version": "9 <b>", "index_topk": 1})
    (tmp_path / "evidence/node/prefill/a.sh").write_text("#!/bin/sh\nexec serve --topk 2048\n")
    found = workbook.deployed(one)
    assert found.config == {"topk": 2048, "chunk": 8192} and found.version == "9 <b>"
    assert found.command == ("prefill: serve --topk 2048",) and found.source["topk"] == "server_info of prefill"
    table = found.table().set_index("setting")["value"]
    assert table["window"] == table["page"] == about.NOT_KNOWN and "<b>" not in found._repr_html_()
    assert workbook.deployed(bundle(tmp_path / "empty")) == about.Deployed()


def test_a_live_server_is_asked_and_the_incident_is_not_mistaken_for_it(tmp_path: Path) -> None:
    one = bundle(tmp_path, prefill={"index_topk": 2048, "version": "of the incident"})
    with mock_endpoint("vllm") as mock, workbook.open_target(mock.base_url) as target:
        found = workbook.deployed(one, target)
    assert found.config == {"context_limit": 131072} and found.version == about.NOT_KNOWN and not found.command
    with mock_endpoint("llama.cpp") as mock, workbook.open_target(mock.base_url) as target:
        found = workbook.deployed(one, target)  # prompts are drawn within the window that this names
    assert found.config == {"context_limit": 131072} and found.version == "b1-0c1e57098"


def test_an_arm_without_a_tokenizer_borrows_one_or_names_one() -> None:
    with mock_endpoint("sglang") as able, mock_endpoint("openai") as bare:
        with workbook.open_target(f"one={able.base_url},two={bare.base_url}") as target:
            assert target.arms["two"].tokenizer_url == able.base_url and "one counts for it" in target.describe()
        with workbook.open_target(f"{bare.base_url}+tokenizer={able.base_url}") as target:
            assert target.first.tokenizer_url == able.base_url and target.first.base_url == bare.base_url
        with workbook.open_target(bare.base_url) as target:
            assert target.first.tokenizer_url is None
        with (
            pytest.raises(targets.TargetError, match=r"\+tokenizer=http"),
            workbook.open_target(f"{bare.base_url}+words=x"),
        ):
            pass


def test_there_is_advice_on_every_class_of_fault() -> None:
    for code in analysis.MECHANISMS:
        told = analysis.MECHANISMS[code]
        assert told.meanwhile and told.look and told.test


@pytest.mark.parametrize(
    ("told", "ours"),
    [
        ("--page-size", "page"),
        ("block_size", "page"),
        ("--max-num-batched-tokens", "chunk"),
        ("max_seq_len", "context_limit"),
        ("topk", "topk"),
        ("top_k", None),  # of sampling: never the indexer's budget
        ("n_ctx", None),
    ],
)
def test_what_engines_call_a_size(told: str, ours: str | None) -> None:
    assert names.ours(told) == ours


def test_a_name_stands_for_one_size() -> None:
    told = [name for several in names.SIZES.values() for name in several]
    assert len(told) == len(set(told)) and not set(told) & names.SIZES.keys()
