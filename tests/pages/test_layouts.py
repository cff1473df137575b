"""Sizes and addresses of every layout, bit-exact round trips, and the public writers' rounding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needlework.pages import LAYOUTS, formats, identify
from needlework.pages.layouts import layout_of

NAMES = list(LAYOUTS)
SIZES = {  # layout: {entries a page: bytes}; one line for a new layout
    "dsa-index-fp8": {64: 8448},
    "dsa-index-fp8-ue8m0": {64: 8448},
    "dsa-index-fp8-mx": {64: 8448},
    "dsa-index-fp8-fnuz": {64: 8448},
    "dsa-index-fp8-preshuffle": {64: 8448},
    "dsa-index-fp4": {64: 4352},
    "v32-mla-fp8": {1: 656, 64: 41984},
    "v32-mla-fp8-ue8m0": {1: 656, 64: 41984},
    "v4-mla-fp8": {2: 1728, 64: 37440, 128: 74880, 256: 149760},
    "v4-mla-fp8-fnuz": {2: 1728, 64: 37440, 128: 74880, 256: 149760},
    "v41-mla-fp8": {64: 33792, 2: 1536},
    "v41-mla-fp4": {64: 18432, 2: 768},
    "v41-mla-fp8-interleaved": {64: 33792, 2: 1056},
    "v41-mla-fp4-interleaved": {64: 18432, 2: 576},
}


def test_every_layout_has_its_sizes():
    assert SIZES.keys() == LAYOUTS.keys()
    for name, sizes in SIZES.items():
        assert {tokens: LAYOUTS[name].page_bytes(tokens) for tokens in sizes} == sizes


def test_addresses_of_the_seeds():
    layout = LAYOUTS["dsa-index-fp8"]
    codes, scales = layout["codes"].address(64), layout["scales"].address(64)
    assert codes[9, 5] == 9 * 128 + 5
    assert scales[9, 0] == 8192 + 9 * 4
    assert layout.page_bytes() // 4 == 2112 and int(scales[0, 0]) // 4 == 2048
    v4 = LAYOUTS["v4-mla-fp8"]
    assert v4["scales"].start(256) == 147456
    assert v4["rope"].address(64)[3, 0] == 3 * 576 + 448


@pytest.mark.parametrize("name", NAMES)
def test_byte_map_covers_each_byte_once(name):
    layout = LAYOUTS[name]
    total = torch.zeros(layout.page_bytes(64), dtype=torch.int64)
    for item in layout.fields:
        total.index_add_(0, item.address(64).flatten(), torch.ones(64 * item.bytes, dtype=torch.int64))
    assert int(total.max()) == 1 and int(total.sum()) == 64 * layout.token_bytes
    spans = layout.byte_map(64)
    assert spans[0][1] == 0 and spans[-1][2] == layout.page_bytes(64)
    assert all(a[2] == b[1] for a, b in pairwise(spans))


def test_preshuffle_address_formula():
    address = LAYOUTS["dsa-index-fp8-preshuffle"]["codes"].address(64)
    for token, column in ((0, 0), (17, 33), (63, 127), (5, 16)):
        expected = token // 16 * (16 * 128) + column // 16 * 256 + token % 16 * 16 + column % 16
        assert address[token, column] == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from([16, 64, 32]), st.integers(1, 3), st.integers(0, 2**31), st.integers(0, 3)
)
def test_any_bytes_survive_decode_and_encode(name, tokens, pages, seed, pattern):
    """The exact inverse, for random bytes and for constant ones: NaN codes, NaN scales, ±0, subnormals, padding."""
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (pages, layout.page_bytes(tokens)), dtype=torch.uint8, generator=generator)
    if pattern:
        raw[:, : raw.shape[1] // pattern] = (0, 0x7F, 0x80, 0xFF)[seed % 4]
    assert torch.equal(layout.encode(layout.decode(raw, tokens), tokens), raw)


ADVERSARIAL = st.sampled_from(
    [0.0, -0.0, 1e-45, 1e-38, 2**-9, 2**-10, 2**-11, 1e-4, 1e-4 / 448, 0.25, 0.75, 2.5, 5.0, 6.0, 223.9, 224.0, 240.0,
     448.0, -448.0, 449.0, 464.0, 465.0, 1e4, 3e38]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.lists(ADVERSARIAL, min_size=1, max_size=6), st.integers(0, 10**6))
def test_quantised_values_are_a_fixed_point_and_near(name, values, seed):
    """Adversarial values: what the writer stored decodes near the input, and the bytes survive a round trip."""
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(values), (1, 16, layout.dim), generator=generator)
    x = torch.tensor(values)[pick]
    x[0, 0], x[0, 1] = 0.0, values[0]  # a zero row and an all-equal row
    raw = layout.encode({"values": x}, 16)
    decoded = layout.decode(raw, 16)
    assert torch.equal(layout.encode(decoded, 16), raw)
    count = layout["codes"].count
    got, want = decoded["values"][..., :count], x[..., :count]
    assert not got.isnan().any()
    scale = decoded["scale_values"].repeat_interleave(count // decoded["scale_values"].shape[-1], -1)
    if layout["codes"].format == "e2m1":
        bound = want.abs() / 4 + scale * 0.26
        # 3.5 × 2^126 and more rounds to 4 × 2^126, which float32 cannot hold
        bound = torch.where(got.isinf() & (want.abs() >= 3.5 * 2.0**126), torch.inf, bound)
        if layout["scales"].format == "e4m3fn":  # a rounded scale may clip, and reaches no further than 448
            bound = bound + torch.where(scale >= 448, torch.inf, want.abs() / 8 + scale)
    else:
        bound = want.abs() / 16 * 1.001 + scale * 2.0**-9
        bound = bound + 448 * 2.0**-149  # a scale without a floor is itself a multiple of the least subnormal
    assert ((got - want).abs() <= bound).all()
    assert torch.equal(got[0, 0].abs(), torch.zeros(count))


@pytest.mark.parametrize("name", NAMES)
def test_scatter_and_gather_agree_with_whole_pages(name):
    layout = LAYOUTS[name]
    torch.manual_seed(3)
    values = torch.randn(3 * 16, layout.dim)
    pool = torch.zeros(3, layout.page_bytes(16), dtype=torch.uint8)
    order = torch.randperm(48)
    layout.scatter(pool, order, values[order], 16)
    assert torch.equal(pool, layout.encode({"values": values.view(3, 16, -1)}, 16))
    slots = torch.tensor([[5, -1], [47, 5]])
    got = layout.gather(pool, slots, 16)
    whole = layout.decode(pool, 16)["values"].view(48, -1)
    assert torch.equal(got[1, 0], whole[47]) and torch.equal(got[0, 0], got[1, 1]) and not got[0, 1].any()
    assert torch.equal(layout.values(pool, 16).view(48, -1), whole)
    untouched = pool.clone()
    layout.scatter(pool, torch.tensor([-1, -1]), values[:2], 16)
    assert torch.equal(pool, untouched)


def test_scatter_leaves_padding_alone_but_vllm_clears_the_pad_byte():
    layout = LAYOUTS["v4-mla-fp8"]
    pool = torch.full((1, layout.page_bytes(64)), 9, dtype=torch.uint8)
    layout.scatter(pool, torch.arange(64), torch.randn(64, 512))
    decoded = layout.decode(pool)
    assert (decoded["pad"] == 9).all() and (decoded["padding"] == 9).all()
    layout.scatter(pool, torch.arange(64), torch.randn(64, 512), writer="vllm")
    assert not layout.decode(pool)["pad"].any()


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_fast_decode_equals_torch_for_every_code(name):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(getattr(torch, f"float8_{name}")).float()
    for scale in (1.0, 2.0**-149, 3e38, float("inf"), float("nan"), -2.5):
        got = torch.empty(1, 1, 256)
        formats.dequantise(codes[None, None], name, torch.full((1, 1, 1), scale), got)
        assert torch.equal(got[0, 0].nan_to_num(7e30, 1e31, -1e31), (want * scale).nan_to_num(7e30, 1e31, -1e31))


def test_e2m1_rounding_of_every_tie():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25])
    even = formats.decode(formats.encode_e2m1(ties), "e2m1")
    down = formats.decode(formats.encode_e2m1(ties, "down", negative_zero=False), "e2m1")
    assert even.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0]
    assert down.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 0.0]
    assert formats.encode_e2m1(torch.tensor([-0.1, 0.1])).item() == 0x08
    assert formats.encode_e2m1(torch.tensor([-0.1, 0.1]), negative_zero=False).item() == 0


def test_fnuz_has_no_negative_zero():
    assert formats.encode_e4m3(torch.tensor([-1e-9, -0.0, 300.0]), "e4m3fnuz").tolist() == [0, 0, 0x7E]


def test_smallest_scales_of_the_writers():
    index = LAYOUTS["dsa-index-fp8"].writer()
    assert torch.tensor(index.smallest_scale("e4m3fn")).view(torch.int32).item() == 0x346FACAD
    assert LAYOUTS["v4-mla-fp8"].writer().smallest_scale("e4m3fn") == 2.0**-22
    assert LAYOUTS["dsa-index-fp4"].writer().smallest_scale("e2m1") == 2.0**-15
    assert LAYOUTS["dsa-index-fp4"].writer("sglang-standalone").smallest_scale("e2m1") == 2.0**-13


# ---- what public kernels wrote ---------------------------------------------------------------------------------------
GOLDEN = {
    "idx": "dsa-index-fp8",
    "V4": "v4-mla-fp8",
    "V41": "v41-mla-fp8",
    "V41_FP4": "v41-mla-fp4",
    "V41_NEW": "v41-mla-fp8-interleaved",
    "V41_FP4_NEW": "v41-mla-fp4-interleaved",
}


@pytest.mark.parametrize("key", GOLDEN)
def test_bytes_of_the_public_writers(key, request):
    data = np.load(request.path.parents[1] / "data" / "golden" / "writer_pools_a.npz", allow_pickle=False)
    layout = LAYOUTS[GOLDEN[key]]
    x = torch.from_numpy(data[f"{key}_x"]).view(torch.bfloat16).float()
    slots = torch.from_numpy(data[f"{key}_slots"])
    pool, want = torch.from_numpy(data[f"{key}_before"].copy()), torch.from_numpy(data[f"{key}_pool"])
    layout.scatter(pool, slots, x)
    assert torch.equal(pool, want)
    error = (layout.gather(want, slots) - x).abs() / x.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert float(error.max()) < (0.18 if "FP4" in key else 0.06)
    # the golden pools hold random bytes in unwritten slots: only the written pages' rows can be identified
    full = torch.zeros(1, layout.page_bytes(64), dtype=torch.uint8)
    layout.scatter(full, torch.arange(64), x[:64])
    assert identify(full)["layout"][0] == layout.name


@pytest.mark.parametrize("page", (2, 64, 256))
@pytest.mark.parametrize("key", GOLDEN)
def test_bytes_of_the_public_writers_on_awkward_rows(key, page, request):
    """Zero rows, equal values, halves between codes, signed zeros, 1e-38 to 1e38: the whole pool, byte for byte."""
    data = np.load(request.path.parents[1] / "data" / "golden" / "writer_pages_b.npz", allow_pickle=False)
    layout = LAYOUTS[GOLDEN[key]]
    x = torch.from_numpy(data["x128" if key == "idx" else "x512"]).view(torch.bfloat16).float()
    want, slots = torch.from_numpy(data[f"{key}_{page}"]), torch.from_numpy(data[f"slots_{page}"])
    pool = torch.full_like(want, 0xA5)
    layout.scatter(pool, slots, x, page)
    assert torch.equal(pool, want)
    pool[int(slots[7]) // page, layout["codes"].address(page)[int(slots[7]) % page, 5]] ^= 1
    assert not torch.equal(pool, want)


def test_bytes_of_the_v32_writer(request):
    data = np.load(request.path.parents[1] / "data" / "golden" / "sparse_mla_v32_a.npz", allow_pickle=False)
    layout = LAYOUTS["v32-mla-fp8"]
    x = torch.from_numpy(data["kv"].copy()).view(torch.bfloat16).float().reshape(4, 64, 576)
    want = torch.from_numpy(data["pool"].copy()).view(torch.uint8).reshape(4, -1)
    assert torch.equal(layout.encode({"values": x}), want)


def test_a_wrong_rounding_would_be_seen(request):
    """The golden check can fail: a writer that divides where the kernel multiplies differs in some bytes."""
    data = np.load(request.path.parents[1] / "data" / "golden" / "writer_pools_a.npz", allow_pickle=False)
    layout = LAYOUTS["dsa-index-fp8"]
    pool = torch.from_numpy(data["idx_before"].copy())
    x = torch.from_numpy(data["idx_x"]).view(torch.bfloat16).float()
    layout.scatter(pool, torch.from_numpy(data["idx_slots"]), x, writer="deepgemm")
    assert 0 < int((pool != torch.from_numpy(data["idx_pool"])).sum()) < 10


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_bad_input_is_one_sentence_with_sizes():
    layout = LAYOUTS["dsa-index-fp8"]
    with pytest.raises(ValueError, match=r"8,448 bytes; found 1 pages of 100"):
        layout.decode(torch.zeros(1, 100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="at least one page"):
        layout.decode(torch.zeros(0, 8448, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        layout.decode(torch.zeros(1, 8448))
    with pytest.raises(ValueError, match="slot 64 lies outside a pool of 64 slots"):
        layout.gather(torch.zeros(1, 8448, dtype=torch.uint8), torch.tensor([64]))
    with pytest.raises(ValueError, match="stores 128 values"):
        layout.quantise(torch.zeros(1, 127))
    with pytest.raises(ValueError, match="need values"):
        layout.scatter(torch.zeros(1, 8448, dtype=torch.uint8), torch.tensor([1]), torch.zeros(2, 128))
    with pytest.raises(ValueError, match="known: dsa-index-fp8"):
        layout_of("nonsense")
    with pytest.raises(ValueError, match="no writer"):
        layout.writer("nobody")
    with pytest.raises(ValueError, match="multiple of 16"):
        LAYOUTS["dsa-index-fp8-preshuffle"].page_bytes(24)
    with pytest.raises(ValueError, match="codes"):
        layout.encode({"codes": torch.zeros(1, 64, 3, dtype=torch.uint8), "scales": torch.zeros(1, 64, 1)})
