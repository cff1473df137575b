"""The recorded run of a real engine: re-read from the bundle, and the tools that made it."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import record_vllm
import torch
import vllm_worker
from needlework import analysis, pages
from needlework.evidence import Bundle
from needlework.kernels import reference

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "data/incidents/vllm-dsv32"


def dump(name: str) -> pages.Dump:
    return pages.read(BUNDLE / "pages" / f"{name}.bin")[0]


def test_the_bundle_is_sealed_small_and_complete():
    bundle = Bundle(BUNDLE)
    assert bundle.problems() == []
    assert bundle.run_names == ["equality", "faults", "power"]
    assert sum(path.stat().st_size for path in bundle.files()) < 3.2e6


def test_the_ledger_is_what_the_recording_says():
    import pack_vllm

    kept = analysis.Ledger.load(BUNDLE / "ledger.json")
    assert str(kept) == str(pack_vllm.ledger(BUNDLE))
    status = {h.code: h.status for h in kept.hypotheses}
    assert status == {"split": "exonerated", "kernel": "supported", "order": "supported"}


def test_the_runs_hold_every_length_cold_and_warm_in_both_arms():
    trials = analysis.load_trials(BUNDLE / "runs/equality")
    assert set(trials["target_tokens"]) == set(record_vllm.LENGTHS)
    assert (trials["target_tokens"] == trials["prompt_tokens"]).all()
    assert len(trials) == 6 * len(record_vllm.LENGTHS)
    for row in trials.to_dict("records"):
        blocks = (row["target_tokens"] - 1) // 64
        warm = row["send"] == 1
        assert row["prefill_cached_tokens"] == (64 * blocks if warm else 0), row["trial_id"]
        if row["arm"] == "pd":  # a warm decode server asks for what it has not: the last block
            assert row["transferred_blocks"] == (1 if warm else -(-row["target_tokens"] // 64))
    shas = trials.groupby("target_tokens")["prompt_sha"].nunique()
    assert (shas == 1).all(), "the arms were sent other prompts"


def test_prompts_are_those_that_the_runner_makes():
    trials = analysis.load_trials(BUNDLE / "runs/power")
    import hashlib

    for row in trials[trials["target_tokens"] <= 3000].to_dict("records"):
        ids = record_vllm.prompt(int(row["target_tokens"]), row["edit"])
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == row["prompt_sha"]
    plain, token, page = (record_vllm.prompt(300, edit) for edit in ("", "token", "page"))
    assert [i for i in range(300) if plain[i] != token[i]] == [5]
    assert [i for i in range(300) if plain[i] != page[i]] == list(range(64))


@pytest.mark.parametrize(("pool", "layout"), [("index.1", "dsa-index-fp8-ue8m0"), ("mla.1", "v32-mla-fp8")])
def test_healthy_pages_arrive_whole_and_are_recognised(pool, layout):
    sent, received = dump(f"prefill-{pool}-none"), dump(f"decode-{pool}-none")
    assert pages.identify(received.raw.flatten()).iloc[0]["layout"] == layout
    assert pages.compare_dumps([sent], [received]).empty
    assert sent.page_ids != received.page_ids, "both sides used the same blocks; the comparison would be of one pool"


@pytest.mark.parametrize(
    ("fault", "pool", "finding", "at"),
    [
        ("index-skip", "index", "missing", range(10)),
        ("index-swap", "index", "permuted", (2, 5)),
        ("scales-zero", "index", "partly-copied", range(10)),
        ("mla-skip", "mla", "missing", range(10)),
    ],
)
def test_each_damaged_transfer_is_named(fault, pool, finding, at):
    found = pages.compare_dumps([dump(f"prefill-{pool}.1-none")], [dump(f"decode-{pool}.1-{fault}")])
    assert set(found["name"]) == {finding}
    assert sorted(found["page"].unique()) == list(at)


def test_the_engines_own_scores_follow_from_the_pages_and_its_selection_from_the_scores():
    with np.load(BUNDLE / "evidence/steps/none.npz", allow_pickle=False) as step:
        for layer in range(3):
            q = torch.from_numpy(step[f"q.{layer}"]).view(torch.float8_e4m3fn).float()
            table = torch.arange(10, dtype=torch.int32)[None]
            weights, pool = torch.from_numpy(step[f"weights.{layer}"]), dump(f"decode-index.{layer}-none").raw
            ours = reference.indexer_logits(q, weights, pool, table, torch.tensor([600], dtype=torch.int32))[0, :600]
            engine = torch.from_numpy(step[f"logits.{layer}"])
            assert (ours - engine).norm() / engine.norm() < 2e-4
            wrong = reference.indexer_logits(
                q, weights, pool.roll(1, 0), table, torch.tensor([600], dtype=torch.int32)
            )[0, :600]
            assert (wrong - engine).norm() / engine.norm() > 0.1, "any pages would do"
    with np.load(BUNDLE / "evidence/steps/topk-256.npz", allow_pickle=False) as step:
        chosen = step["selected.0"][step["selected.0"] >= 0]
        assert set(chosen) == set(np.argsort(-step["logits.0"])[:256])


def fake_worker(fault: str, layer: int = 1) -> SimpleNamespace:
    """What the hooks of vllm_worker look at, with small caches of the real shapes."""
    caches = {}
    for n in range(3):
        caches[f"model.layers.{n}.self_attn.attn"] = torch.ones(12, 64, 656, dtype=torch.uint8)
        caches[f"model.layers.{n}.self_attn.indexer.k_cache"] = torch.ones(12, 64, 132, dtype=torch.uint8)
    modules = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    compilation = SimpleNamespace(static_forward_context=modules)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    vllm_worker.state_of(worker).update(fault=fault, layer=layer, pages=[1, 3])
    addresses = [cache.data_ptr() for cache in caches.values()]
    worker.nixl = SimpleNamespace(engine_id="e", tp_rank=0, kv_caches_base_addr={"e": {0: addresses}})
    return worker


@pytest.fixture
def descriptors(monkeypatch):
    """ids(fault, remote) -> descriptors of four blocks in six regions of twelve, as the planted fault leaves them."""
    monkeypatch.setattr(vllm_worker, "connector", lambda worker: worker.nixl)

    def ids(fault: str, remote: bool) -> np.ndarray:
        blocks = np.array([7, 2, 9, 4])
        plain = (np.arange(6)[:, None] * 12 + blocks).flatten()
        named = {"block_ids": [list(blocks)], "block_size_ratio": None if remote else 1}
        return vllm_worker.changed_ids(fake_worker(fault), plain, named)

    return ids


def test_without_a_fault_the_transfer_is_left_as_it_was(descriptors):
    for fault in ("none", "scales-zero", "topk-256"):
        assert len(descriptors(fault, True)) == 24
        assert (descriptors(fault, True) == descriptors(fault, False)).all()


def test_a_left_out_pool_is_left_out_on_both_sides_and_no_other(descriptors):
    for fault, region in (("mla-skip", 2), ("index-skip", 3)):
        for remote in (True, False):
            left = set(descriptors("none", remote)) - set(descriptors(fault, remote))
            assert left == {12 * region + block for block in (7, 2, 9, 4)}


def test_exchanged_blocks_are_exchanged_on_one_side_only(descriptors):
    assert (descriptors("index-swap", False) == descriptors("none", False)).all()
    moved = np.flatnonzero(descriptors("index-swap", True) != descriptors("none", True))
    assert list(moved) == [3 * 4 + 1, 3 * 4 + 3]


def test_zeroed_scales_leave_codes_and_other_blocks_alone():
    worker = fake_worker("scales-zero")
    vllm_worker.arrived(worker, [2, 5])
    touched = {key: (raw == 0).nonzero() for key, raw in vllm_worker.pools(worker).items()}
    assert [key for key, places in touched.items() if len(places)] == [("index", 1)]
    places = touched["index", 1]
    assert set(places[:, 0].tolist()) == {2, 5} and int(places[:, 1].min()) == 64 * 128 and len(places) == 2 * 256
    assert vllm_worker.do_blocks(worker) == {"blocks": [2, 5]}
    assert vllm_worker.do_blocks(worker) == {"blocks": []}


def test_an_order_that_fails_is_an_answer_and_never_ends_the_engine():
    worker = fake_worker("none")
    answer = vllm_worker.Extension.needlework(worker, json.dumps({"do": "fault", "kind": "no-such"}))
    assert "unknown fault" in answer["problem"]


def test_the_checkpoint_has_the_architectures_names_and_depends_on_its_seed(tmp_path):
    source = BUNDLE / "evidence/model"
    config = json.loads((source / "config.json").read_text())
    small = config | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
                      "q_lora_rank": 32, "index_n_heads": 4, "num_attention_heads": 4}  # fmt: skip
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(small))
    made = [
        record_vllm.write_checkpoint(tmp_path / "source", tmp_path / f"out{n}", seed)
        for n, seed in enumerate((0, 0, 1))
    ]
    assert made[0]["blake2b"] == made[1]["blake2b"] != made[2]["blake2b"]
    names = dict(record_vllm.tensors(small, 0))
    assert names["model.layers.0.self_attn.indexer.wq_b.weight"].shape == (4 * 128, 32)
    assert names["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (512 + 64, 64)
    recorded = json.loads((BUNDLE / "evidence/checkpoint.json").read_text())
    assert recorded["parameters"] == 99_363_584 and recorded["seed"] == 0
