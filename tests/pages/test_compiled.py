"""The compiled pass for large pools: equal to the plain path for every layout, code and scale."""

from __future__ import annotations

import pytest
import torch
from needlework.pages import LAYOUTS, compiled, slices

from .test_device import adversarial_pool, same


def plain(layout, pool, tokens):
    out = torch.empty(len(pool), tokens, layout.dim)
    slices.values(layout, pool, tokens, out)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_pass_equals_plain_path(name, monkeypatch):
    """Every byte of codes under adversarial scales, pages of several sizes, by way of `Layout.values`."""
    monkeypatch.setattr("needlework.pages.layout.COMPILED_VALUES", 1)
    monkeypatch.setattr(compiled, "SLICE_VALUES", 3000)  # several slices, the last one short
    passes = []
    monkeypatch.setattr(compiled, "_compiled", lambda *a, real=compiled._compiled: passes.append(a) or real(*a))
    layout = LAYOUTS[name]
    for tokens in (16, 64, 128):
        pool = adversarial_pool(layout, tokens)
        want = plain(layout, pool, tokens)
        assert want.isnan().any() and (want == 0).any()
        assert same(layout.values(pool, tokens), want)
        assert same(layout.decode(pool, tokens)["values"], want)
    assert len(passes) > 6


def test_pages_may_lie_apart_and_start_anywhere():
    layout = LAYOUTS["v32-mla-fp8"]
    dense = adversarial_pool(layout, 16)
    wide = torch.full((len(dense), dense.shape[1] + 13), 7, dtype=torch.uint8)
    wide[:, 3 : 3 + dense.shape[1]] = dense
    out = torch.full((len(dense) + 2, 16, layout.dim), 123.0)
    compiled.values(layout, wide[:, 3 : 3 + dense.shape[1]], 16, out[1:-1])
    assert same(out[1:-1], plain(layout, dense, 16))
    assert (out[0] == 123.0).all() and (out[-1] == 123.0).all()


def test_a_wrong_byte_would_be_seen():
    layout = LAYOUTS["dsa-index-fp4"]
    pool = adversarial_pool(layout, 64)
    want = plain(layout, pool, 64)
    pool[0, 7 * 64 + 30] ^= 1
    out = torch.empty_like(want)
    compiled.values(layout, pool, 64, out)
    assert not same(out, want)


def test_what_cannot_be_stored_in_whole_lines_takes_the_plain_path(monkeypatch):
    monkeypatch.setattr("needlework.pages.layout.COMPILED_VALUES", 1)
    layout = LAYOUTS["dsa-index-fp8"]
    pool = adversarial_pool(layout, 64)
    shifted = torch.empty(4 * 64 * 128 + 1)[1:].view(4, 64, 128)
    assert not compiled.takes(layout, shifted)
    assert same(layout.values(pool, 64, out=shifted), plain(layout, pool, 64))
