"""What runs inside SGLang's scheduler and between its servers, on pools of the real shapes in ordinary memory."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pair_proxy
import pytest
import record_sglang
import sglang_worker
import torch
import worker_checks

PAGES, RING = 6, 8
STREAM = (
    b'data: {"choices": []}\n\ndata: {"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}\n\ndata: [DONE]\n\n'
)


def v32_pool() -> SimpleNamespace:
    rows = torch.arange(PAGES, dtype=torch.uint8)
    index = [rows[:, None].repeat(1, 8448) + layer for layer in range(2)]
    mla = [rows.repeat_interleave(64)[:, None, None].repeat(1, 1, 656) + 10 * layer for layer in range(2)]
    return SimpleNamespace(index_k_with_scale_buffer=index, kv_buffer=mla)


def v4_pool() -> SimpleNamespace:
    rows = torch.arange(PAGES, dtype=torch.uint8)[:, None]
    state = SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.arange(RING * PAGES + 3.0)[:, None]),
                            ring_size=RING)  # fmt: skip
    part = SimpleNamespace(kv_buffer=[rows.repeat(1, 20)])
    return SimpleNamespace(
        page_size=256, swa_page_size=256, sliding_window=128, swa_kv_pool=part, c4_kv_pool=part, c128_kv_pool=part,
        c4_indexer_kv_pool=SimpleNamespace(index_k_with_scale_buffer=[rows.repeat(1, 30)]),
        compress_state_pools=[None, state], indexer_compress_state_pools=[None, None],
        translate_loc_from_full_to_swa=lambda slots: slots - 256,
    )  # fmt: skip


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """place(pool, slots, order) -> a request of so many tokens; the order waits for it."""
    monkeypatch.setenv("NEEDLEWORK_ORDERS", str(tmp_path))

    def place(pool, slots: list[int], **order):
        table = torch.zeros(3, len(slots), dtype=torch.int32)
        table[2] = torch.tensor(slots)
        known = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )
        monkeypatch.setitem(sglang_worker.STATE, "scheduler", known)
        (tmp_path / "order.json").write_text(json.dumps({"name": "kept", **order}))
        return SimpleNamespace(origin_input_ids=[5] * len(slots), req_pool_idx=2)

    return place


def test_a_request_leaves_its_own_pages_in_its_own_order(scheduler, tmp_path):
    slots = [*range(256, 320), *range(64, 128), *range(320, 330)]  # pages 4, 1 and a part of 5
    request = scheduler(v32_pool(), slots, tokens=138)
    sglang_worker.ends(SimpleNamespace(origin_input_ids=[5], req_pool_idx=2), None)
    assert (tmp_path / "order.json").exists(), "another request's end was taken for the one that was ordered"
    sglang_worker.ends(request, None)
    said = json.loads((tmp_path / "kept.json").read_text())
    assert set(said["page_ids"]) == {"index.0", "index.1", "mla.0", "mla.1"} and said["page_ids"]["mla.1"] == [4, 1, 5]
    with np.load(tmp_path / "kept.npz") as file:
        assert file["index.1"].shape == (3, 8448) and list(file["index.1"][:, 7]) == [5, 2, 6]
        assert file["mla.1"].shape == (3, 64 * 656) and list(file["mla.1"][:, 7]) == [14, 11, 15]
    assert not (tmp_path / "order.json").exists()


def test_v4_pools_are_kept_whole_and_the_window_from_its_own_pages(scheduler, tmp_path):
    sglang_worker.ends(scheduler(v4_pool(), list(range(512, 512 + 700)), tokens=700), None)
    said = json.loads((tmp_path / "kept.json").read_text())["page_ids"]
    assert said["c4.0"] == said["c128.0"] == said["index.0"] == [2, 3, 4]
    assert said["window.0"] == said["state.1"] == [3]  # the page of tokens 572 to 699, one earlier in that pool
    with np.load(tmp_path / "kept.npz") as file:
        assert list(file["state.1"].view(np.float32).ravel()) == list(range(3 * RING, 4 * RING))


def test_a_dump_that_fails_is_an_answer_and_never_ends_the_engine(scheduler, tmp_path):
    sglang_worker.ends(scheduler(SimpleNamespace(), [1, 2], tokens=2), None)
    assert "AttributeError" in json.loads((tmp_path / "kept.json").read_text())["problem"]


def test_two_index_pages_are_exchanged_and_nothing_else(scheduler):
    scheduler(v32_pool(), [1], tokens=1, swap=[0, 2])
    sent = (np.array([7, 8]), [np.array([4, 5, 6]), np.array([9])])
    (_, pages, states), named = sglang_worker.sends("sender", *sent)
    assert list(pages) == [7, 8] and [list(state) for state in states] == [[6, 5, 4], [9]] and named == {}
    assert list(sent[1][0]) == [4, 5, 6], "the prefill server's own pages were changed"
    scheduler(v32_pool(), [1], tokens=1)
    assert sglang_worker.sends("sender", *sent) is None


def test_random_weights_keep_the_scale_of_what_passes_through_them():
    model = torch.nn.ModuleDict({"wk": torch.nn.Linear(400, 300, bias=False), "norm": torch.nn.LayerNorm(400)})
    for _ in range(2):
        sglang_worker.scale_weights(None, model)
        kept = model["wk"].weight.clone()
        assert 0.9 < float(model["wk"](torch.randn(50, 400)).detach().std()) < 1.1 and (model["norm"].weight == 1).all()
    assert (kept == model["wk"].weight).all(), "servers would hold other weights"


def test_the_plugin_is_found_by_its_metadata(tmp_path):
    from importlib.metadata import PathDistribution

    at = record_sglang.plugin(tmp_path, None).split(":")[0]
    (entry,) = PathDistribution(next((tmp_path / "plugin").iterdir())).entry_points
    assert entry.group == "sglang.srt.plugins" and at == str(tmp_path / "plugin")
    assert entry.load() is sglang_worker.install


@pytest.mark.parametrize(("body", "had"), [
    (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}, "id": 1}', 9),
    (b'{"meta_info": {"cached_tokens": 3}}', 3), (b'{"usage": {"prompt_tokens_details": null}}', 0),
    (STREAM, 5),
    (b"not json", None), (b'{"choices": []}', None),
])  # fmt: skip
def test_the_pair_says_what_prefill_had_cached(body, had):
    assert pair_proxy.cached_tokens(body) == had
    told = pair_proxy.with_cached_tokens(body, 64)
    assert pair_proxy.cached_tokens(told) == (None if had is None else 64)
    if had is None:
        assert told == body
    elif body.startswith(b"data:"):
        assert told.endswith(b"data: [DONE]\n\n") and told.startswith(b'data: {"choices": []}\n\n')


def test_the_kernels_get_the_references_arguments_in_their_own_shapes():
    q, pool, lengths = torch.randn(2, 64, 128), torch.zeros(5, 9000, dtype=torch.uint8)[:, :8448], torch.tensor([70, 9])
    rows, cache, weights, lens = worker_checks.scoring_arguments(
        q, torch.ones(2, 64), pool, lengths, 64, "dsa-index-fp8"
    )
    assert rows.shape == (2, 1, 64, 128) and rows.dtype == torch.float8_e4m3fn and lens.tolist() == [[70], [9]]
    assert cache.shape == (5, 64, 1, 132) and cache.stride(0) == 9000 and weights.shape == (2, 64)
    q, pool = torch.randn(3, 64, 576), torch.zeros(4, 64 * 656, dtype=torch.uint8)
    chosen = torch.arange(3 * 70, dtype=torch.int32).view(3, 70)
    rows, cache, slots = worker_checks.decode_arguments(q, pool, chosen, 64, "v32-mla-fp8", {"sink": None})
    assert rows.shape == (3, 1, 64, 576) and cache.shape == (4, 64, 1, 656) and slots.shape == (3, 1, 128)
    assert (slots[:, 0, :70] == chosen).all() and (slots[:, 0, 70:] == -1).all()
    for call in (lambda: worker_checks.scoring_arguments(q, None, pool, None, 16, "dsa-index-fp8"),
                 lambda: worker_checks.decode_arguments(q, pool, chosen, 64, "v32-mla-fp8", {"sink": q})):  # fmt: skip
        with pytest.raises(ValueError, match="this kernel takes"):
            call()
