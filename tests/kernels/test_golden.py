"""The references against what public kernels put out on an H200 (see README.md beside the golden files)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from needlework.kernels import reference as ref
from needlework.pages import LAYOUTS

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def golden(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.bfloat16).to(torch.float32)


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_index_logits_agree_with_deep_gemm(dtype):
    g = golden("index_logits_a")
    q = g["q_fp8"].view(torch.float8_e4m3fn).to(torch.float32)
    ours = ref.indexer_logits(q, g["weights"], g["index_pool"], g["page_table"], g["lengths"], dtype=dtype)
    assert ours.shape == (3, 1024) and ours.dtype == dtype
    for b, length in enumerate(g["lengths"].tolist()):
        assert rel(ours[b, :length], g["logits"][b, :length]) < 2e-4  # README: 1.4e-4
        assert bool(torch.isneginf(ours[b, length:]).all())


def test_our_writer_gives_the_bytes_of_the_public_index_writer():
    g = golden("index_logits_a")
    pool = g["index_pool"].clone()
    pool[:] = 7
    for b in range(3):
        keys = bf16(g[f"key{b}"])
        position = torch.arange(len(keys))
        slots = g["page_table"][b].long()[position // 64] * 64 + position % 64
        ref.store_index_keys(pool, slots, keys)
        codes, scales = LAYOUTS["dsa-index-fp8"]["codes"], LAYOUTS["dsa-index-fp8"]["scales"]
        for item in (codes, scales):
            ours, theirs = (item.view(p, 64)[slots // 64, slots % 64, 0] for p in (pool, g["index_pool"]))
            assert torch.equal(ours, theirs), item.name
        quantised, scale = ref.quantize_index_keys(keys)
        stored = codes.view(pool, 64)[slots // 64, slots % 64, 0].flatten(1)
        assert torch.equal(quantised, stored) and scale.dtype == torch.float32


def test_topk_agrees_with_the_public_radix_select():
    g = golden("topk512_a")
    positions = ref.select_topk(g["scores"], g["lengths"], 512)
    slots = ref.select_topk(g["scores"], g["lengths"], 512, g["page_table"])
    for b, length in enumerate(g["lengths"].tolist()):
        ours, theirs = positions[b][positions[b] >= 0].long(), g["positions"][b][g["positions"][b] >= 0].long()
        assert len(ours) == len(theirs) == min(512, length)
        row = g["scores"][b]
        assert torch.equal(row[ours].sort().values, row[theirs].sort().values)  # as multisets: ties are free
        assert torch.equal(ref.slots_of(positions[b : b + 1], g["page_table"][b : b + 1]), slots[b : b + 1])
        translated = ref.slots_of(g["positions"][b : b + 1], g["page_table"][b : b + 1])
        assert torch.equal(translated, g["slots"][b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["plain", "sink", "sink_extra", "sm120"])
def test_v4_sparse_decode_agrees_with_flash_mla(name, dtype):
    g = golden("sparse_mla_v4_a")
    more = {}
    if name.startswith("sink"):
        more["sink"] = g["sink"]
    if name == "sink_extra":
        more |= {"extra_pool": g["extra_pool"], "extra_indices": g["extra_indices"][:, 0]}
    out, lse = ref.sparse_mla_decode(bf16(g["q"])[:, 0], g["pool"], g["indices"][:, 0], dtype=dtype, **more)
    suffix = "" if name == "plain" else f"_{name}"
    theirs = bf16(g["sm120_out"] if name == "sm120" else g[f"out{suffix}"])[:, 0]
    their_lse = g["sm120_lse"][:, 0] if name == "sm120" else g[f"lse{suffix}"][..., 0]
    assert rel(out, theirs) < 2.1e-3  # README: 1.9e-3, bf16 output and probabilities
    torch.testing.assert_close(lse.float(), their_lse, rtol=1e-6, atol=2e-6)


def test_v32_sparse_decode_agrees_with_flash_mla():
    g = golden("sparse_mla_v32_a")
    pool = g["pool"].reshape(4, -1)
    out, lse = ref.sparse_mla_decode(bf16(g["q"])[:, 0], pool, g["indices"][:, 0], layout="v32-mla-fp8")
    assert rel(out, bf16(g["out"])[:, 0]) < 4.3e-3  # README: 4.2e-3: keys pass through bf16 there
    assert float((lse - g["lse"][..., 0]).abs().max()) < 3.7e-3


def test_golden_check_fails_on_a_page_off_by_one():
    g = golden("sparse_mla_v4_a")
    out, _ = ref.sparse_mla_decode(bf16(g["q"])[:, 0], g["pool"], (g["indices"][:, 0] + 64) % 256)
    assert rel(out, bf16(g["out"])[:, 0]) > 0.1
