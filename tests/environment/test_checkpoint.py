"""The calibration checkpoint: its weights on a plain forward pass, and what was recorded of it on real engines."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import checkpoint_reference as plain
import checkpoint_words as words
import httpx
import make_checkpoint as made
import numpy as np
import pair_proxy
import pytest
import record_checkpoint
import record_vllm
import torch
from needlework import analysis, pages
from needlework.evidence.bundle import Bundle
from needlework.probes import PromptSpec
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "checkpoint"


@pytest.fixture(scope="module")
def model() -> tuple[dict[str, torch.Tensor], words.Tokenizer]:
    pieces = words.vocabulary()
    return plain.compact(made.tensors(pieces, 0)), words.Tokenizer(pieces)


def test_names_and_shapes_are_those_of_the_architecture(model, tmp_path):
    known = json.loads((DATA / "vllm" / "evidence" / "built.json").read_text())
    assert made.write(tmp_path, 0) == known, "what is built here is not what was recorded"
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if ".layers.1" not in name}  # noqa: SIM118
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1}
    expected = {name: tuple(t.shape) for name, t in record_vllm.tensors(config, 0)}
    assert {name: shape for name, shape in shapes.items() if ".layers.2" not in name} == expected
    assert len(set(model[1].pieces)) == len(model[1].pieces) == config["vocab_size"]


def test_a_value_is_recalled_and_an_absent_key_refused(model):
    for spec, said in ((PromptSpec(300, 0.2, seed=3, distractors=2), None), (PromptSpec(300, 0.8, seed=4), None),
                       (PromptSpec(260, 0.5, seed=5, needle="words2"), None),
                       (PromptSpec(260, 0.5, seed=6, control="absent"), "I have no prior context")):  # fmt: skip
        prompt = plain.built(spec, model[1])
        assert plain.ask(*model, prompt) == (prompt.expected or said)


def test_planted_faults_lose_the_value_on_the_plain_forward_pass(model):
    prompt = plain.built(PromptSpec(400, 0.2, seed=7), model[1])
    assert plain.ask(*model, prompt, topk=128) == prompt.expected
    assert plain.ask(*model, prompt, topk=8) != prompt.expected  # fewer places than line ends
    assert plain.ask(*model, prompt, fault="mla-skip") != prompt.expected
    with pytest.raises(ValueError, match="page 30 is to be exchanged"):
        plain.ask(*model, prompt, fault="index-swap")


def test_a_wrong_rotary_pairing_is_caught(model, monkeypatch):
    prompt = plain.built(PromptSpec(260, 0.5, seed=8), model[1])
    right = plain.turned
    monkeypatch.setattr(plain, "turned", lambda x, positions, *, halves: right(x, positions, halves=not halves))
    assert plain.ask(*model, prompt) != prompt.expected


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_card_says_what_the_journals_hold(engine):
    card = json.loads((DATA / engine / "card.json").read_text())
    assert card == json.loads(json.dumps(record_checkpoint.card(DATA / engine)))
    assert all(row["hits"] == row["trials"] for row in card["recall_by_length"])
    assert all(refused == asked for refused, asked in card["absent_refused"].values())


def test_recall_falls_where_a_prompt_has_more_line_ends_than_the_cut_selection_holds(model):
    card = json.loads((DATA / "vllm" / "card.json").read_text())
    found = {row["target_tokens"]: row["hits"] for row in card["faults"] if row["arm"] == "topk-256"}
    newline = model[1].ids[words.byte_letters()[10]]
    for tokens, hits in found.items():
        if tokens <= 9000:
            ids = model[1].chat(plain.built(PromptSpec(tokens, seed=1), model[1]).text)
            assert (hits == 3) is (ids.count(newline) < 254), tokens
    assert sum(row["trials"] for row in card["recall"]) >= 300


@pytest.mark.parametrize("fault", record_checkpoint.CLASS_OF)
def test_the_diagnosis_names_each_planted_fault(fault):
    said = record_checkpoint.diagnosed(DATA / "vllm", fault)
    wanted = record_checkpoint.CLASS_OF[fault]
    assert (said.verdict, said.causes) == (("healthy", ()) if fault == "none" else ("named", (wanted,))), str(said)


def test_exchanged_pages_are_told_from_pages_that_stayed_away_only_by_looking_at_them(monkeypatch):
    assert record_checkpoint.diagnosed(DATA / "vllm", "index-swap", pages_seen=False).confidence == "weak"
    permuted = record_checkpoint.diagnosed(DATA / "vllm", "index-swap")
    stale = {"digests": {"index.2": False, "mla.2": True}, "pages": ["stale index"]}
    monkeypatch.setattr(record_checkpoint, "inside", lambda out, fault: stale)
    stayed = record_checkpoint.diagnosed(DATA / "vllm", "index-swap")
    share = [{r.code: r.posterior for r in one.ranked}["F14"] for one in (permuted, stayed)]
    assert permuted.causes == ("F13",) and share[1] > 3 * share[0]


def test_a_cold_prompt_of_the_pair_is_proved_cold():
    trials = analysis.load_trials(DATA / "vllm" / "runs" / "recall").query("probe == 'arms' and arm == 'pd'")
    assert len(trials) == 165 and (trials["cached_tokens"] == 0).all()


@pytest.mark.parametrize(("name", "instruments"), [("false_alarms", 11), ("false_alarms_pair", 13)])
def test_no_instrument_accused_the_healthy_engine(name, instruments):
    runs = json.loads((DATA / "vllm" / f"{name}.json").read_text())["runs"]
    assert len(runs) == instruments and {len(rows) for rows in runs.values()} == {100}
    assert {row["verdict"] for rows in runs.values() for row in rows} == {"healthy"}


def test_what_the_pair_says_of_cached_tokens_is_prefills_count():
    rows = json.loads((DATA / "vllm" / "evidence" / "cached_tokens.json").read_text())["rows"]
    assert len(rows) == 18 and all((row["usage"] or 0) == row["prefill_hits"] for row in rows)
    assert sum(row["decode_hits"] != row["prefill_hits"] for row in rows) == 6


def test_the_pages_serve_line_was_up_within_the_bar():
    load = json.loads((DATA / "vllm" / "evidence" / "load.json").read_text())
    commands = json.loads((DATA / "vllm" / "evidence" / "readme.json").read_text())["commands"]
    assert all(command in (ROOT / "docs/checkpoint.md").read_text() for command in commands)
    times = [start["up_s"] for start in load["starts"] if start["arguments"] == ["--enforce-eager"]
             and start["variables"]]  # fmt: skip
    assert f"{load['command']} --enforce-eager" == commands[1] and len(times) == 3 and max(times) <= 90


def test_the_recording_is_as_it_was_sealed():
    sealed = json.loads((DATA / "vllm" / "digests.json").read_text())["sha256"]
    assert Bundle(DATA / "vllm").digests() == sealed


def dump(role: str, fault: str, pool: str) -> pages.Dump:
    with np.load(DATA / "vllm" / "pages" / f"{role}-{pool}-{fault}.npz", allow_pickle=False) as file:
        raw = torch.from_numpy(file["arr_0"])
    layout = record_checkpoint.POOL_OF[pool]
    return pages.Dump(raw, layout, 64, (), pool, 2, "", role, record_checkpoint.DUMP_TOKENS - 1)


@pytest.mark.parametrize(("fault", "pool", "name", "count"), [
    ("index-skip", "index", "stale", 38), ("index-swap", "index", "permuted", 2),
    ("scales-zero", "index", "partly-copied", 38), ("mla-skip", "mla", "stale", 38), ("none", "index", None, 0),
])  # fmt: skip
def test_the_real_pages_name_the_fault(fault, pool, name, count):
    found = pages.compare_dumps([dump("prefill", fault, pool)], [dump("decode", fault, pool)])
    assert set(found["name"]) == ({name} if name else set()) and found["page"].nunique() == count


def test_the_plain_forward_pass_writes_the_engines_pages(model):
    prompt = plain.built(record_checkpoint.in_page(2, record_checkpoint.DUMP_TOKENS, 9), model[1])
    ours = plain.Reference(model[0], tokens=256)
    ours.read(model[1].chat(prompt.text)[:256])
    for pool, layout, mine, most in (
        ("index", plain.INDEX, ours.pools[2][0], 0.03),
        ("mla", plain.MLA, ours.pools[2][1], 0.006),
    ):
        slots = torch.arange(256)
        fault = {"index": "none", "mla": "mla-skip"}[pool]  # what prefill wrote is whole in both
        theirs = layout.gather(dump("prefill", fault, pool).raw, slots, 64)
        assert (theirs - layout.gather(mine, slots, 64)).norm() < most * theirs.norm()


class _Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append(body)
        raw = json.dumps({"kv_transfer_params": {"blocks": [7]}, "port": self.server.server_port}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.mark.parametrize("engine", pair_proxy.ENGINES)
def test_the_pair_hands_a_request_to_both_sides(engine):
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Server) for _ in range(2)]
    for server in servers:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
    prefill, decode = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        with pair_proxy.pair(engine, prefill, decode, port=0) as url:
            answer = httpx.post(
                url + "/v1/completions", json={"prompt": "a", "max_tokens": 5, "stream": True}, timeout=20
            )
        assert answer.json()["port"] == servers[1].server_port
        first, second = servers[0].got[0], servers[1].got[0]
        if engine == "vllm":
            assert (
                first["max_tokens"] == 1 and "stream" not in first and first["kv_transfer_params"]["do_remote_decode"]
            )
            assert second["kv_transfer_params"] == {"blocks": [7]} and second["max_tokens"] == 5
        else:
            assert first == second and 0 <= first["bootstrap_room"] < 2**62
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
