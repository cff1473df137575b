"""The fused kernel for GPUs, compiled where there is one, else in Triton's interpreter: equal to the plain path."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from needlework.pages import LAYOUTS, Layout

device = pytest.importorskip("needlework.pages.gpu", reason="needs Triton (Linux only)")

WHERE = "cpu" if device.triton.knobs.runtime.interpret else "cuda"
# f32 scales as bits: ±0, least subnormals, the writers' floors, powers of two, 448, largest, ±inf, quiet and other NaN
SCALES = (0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x346FACAD, 0x38D1B717, 0x3F800000, 0x3FC00000,
          0x43E00000, 0x7E967699, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)  # fmt: skip


def adversarial_pool(layout: Layout, tokens: int) -> torch.Tensor:
    """A pool in which every byte of codes meets adversarial scales: entry t holds the codes t, t + 1, … mod 256 scaled
    by number t of the list above (byte scales: t, t + 37, …). Rope bytes are random, so NaN and subnormals occur."""
    pages = 256 // tokens
    generator = torch.Generator().manual_seed(5)
    pool = torch.randint(0, 256, (pages, layout.page_bytes(tokens)), dtype=torch.uint8, generator=generator)
    entry = torch.arange(256)[:, None]
    codes, scales = layout["codes"], layout["scales"]
    stored = {"codes": (entry + torch.arange(codes.bytes)) % 256}
    if scales.format == "f32":
        words = torch.tensor(SCALES)[(entry + torch.arange(scales.count)) % len(SCALES)]
        stored["scales"] = words[..., None] >> torch.tensor([0, 8, 16, 24])
    else:
        stored["scales"] = entry + 37 * torch.arange(scales.count)
    for name, data in stored.items():
        view = layout[name].view(pool, tokens)
        view.copy_((data & 255).to(torch.uint8).reshape(view.shape))
    return pool


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, zeros' signs included; a NaN needs only be a NaN."""
    nan = want.isnan()
    bits = [x.masked_fill(nan, 0.0).view(torch.int32) for x in (got, want)]
    return torch.equal(got.isnan(), nan) and torch.equal(*bits)


def fused(layout: Layout, pool: torch.Tensor, tokens: int) -> torch.Tensor:
    out = torch.full((len(pool), tokens, layout.dim), 123.0, device=WHERE)
    device.values(layout, pool.to(WHERE), tokens, out)
    return out.cpu()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning")
def test_kernel_equals_plain_path(name):
    layout = LAYOUTS[name]
    for tokens in (16, 128) if name == "v4-mla-fp8" else (64,):
        pool = adversarial_pool(layout, tokens)
        assert same(fused(layout, pool, tokens), layout.values(pool, tokens))


def test_a_part_of_a_block_is_masked():
    """Three entries: the rest of the program's rows must not be written."""
    layout = LAYOUTS["v32-mla-fp8"]
    pool = adversarial_pool(layout, 1)[3:6]
    padded = torch.full((4, 1, layout.dim), 123.0, device=WHERE)
    device.values(layout, pool.to(WHERE), 1, padded[:3])
    assert same(padded[:3].cpu(), layout.values(pool, 1)) and (padded[3] == 123.0).all()


@pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning")
def test_a_wrong_byte_would_be_seen():
    layout = LAYOUTS["dsa-index-fp8"]
    pool = adversarial_pool(layout, 64)
    want = layout.values(pool)
    pool[0, 7 * 128 + 60] ^= 1
    assert not same(fused(layout, pool, 64), want)


def test_slices_over_threads_equal_one_thread(monkeypatch):
    """More slices than threads, the last one short; torch's own setting for threads stays, also for later threads."""
    layout = LAYOUTS["v4-mla-fp8"]
    pool = adversarial_pool(layout, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = layout.values(pool, 16)
        monkeypatch.setattr("needlework.pages.layouts.SLICE_VALUES", 3 * 16 * layout.dim)
        torch.set_num_threads(3)
        assert same(layout.values(pool, 16), want)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_values_say_what_out_must_be():
    layout = LAYOUTS["dsa-index-fp8"]
    pool = torch.zeros(2, 8448, dtype=torch.uint8)
    for out in (torch.empty(2, 64, 127), torch.empty(2, 64, 128).half(), torch.empty(2, 64, 256)[..., ::2]):
        with pytest.raises(ValueError, match=r"contiguous torch.float32 \[2, 64, 128\] on cpu; found"):
            layout.values(pool, out=out)
