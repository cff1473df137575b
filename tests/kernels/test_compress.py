"""Compressors, mHC and router: three forms of one arithmetic agree, and the public invariants hold."""

from __future__ import annotations

import pytest
import torch
from needlework.kernels import reference as ref


class RingCompressor:
    """The decode form: one token a call against a ring of raw rows, as an engine keeps it (sglang 0.5.23 compress
    states).

    c4 holds 8 rows at position mod 8, c128 holds 128. `step` returns the entry when the token completes a group, else
    None. Another formulation of the same arithmetic, so that the three forms can be held against one another.
    """

    def __init__(self, ape: torch.Tensor, *, overlap: bool) -> None:
        ratio, width = ape.shape
        self.ape, self.ratio, self.overlap = ape, ratio, overlap
        self.kv = ape.new_zeros((2 * ratio if overlap else ratio, width))
        self.scores = torch.full_like(self.kv, -torch.inf)
        self.position = 0

    def step(self, kv: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | None:
        """kv, scores [width] of one token -> entry [d], or None while the group is unfinished."""
        size = len(self.kv)
        self.kv[self.position % size], self.scores[self.position % size] = kv, scores
        self.position += 1
        if self.position % self.ratio:
            return None
        row = torch.arange(self.position - size, self.position) % size
        rows, logits = self.kv[row], self.scores[row] + self.ape.repeat(size // self.ratio, 1)
        if self.overlap:
            d = rows.shape[1] // 2
            rows = torch.cat((rows[: self.ratio, :d], rows[self.ratio :, d:]))
            logits = torch.cat((logits[: self.ratio, :d], logits[self.ratio :, d:]))
        return (torch.softmax(logits, dim=0) * rows).sum(dim=0)


def _tokens(ratio: int, count: int, d: int = 16, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    width = 2 * d if ratio == 4 else d
    kv, scores = (torch.randn(count, width, generator=g, dtype=torch.float64) for _ in range(2))
    return kv, scores, torch.randn(ratio, width, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 127, 128, 129, 385])
def test_one_shot_chunked_and_stepwise_entries_agree(ratio, count):
    compress = {4: ref.compress_c4, 128: ref.compress_c128}[ratio]
    kv, scores, ape = _tokens(ratio, count)
    whole, _ = compress(kv, scores, ape)
    assert len(whole) == count // ratio
    for cuts in ([1], [2, 3], [4, 8], [5, 6, 7], [127, 128], [3, 130, 131]):
        state, parts, start = None, [], 0
        for end in [*[c for c in cuts if c < count], count]:
            entries, state = compress(kv[start:end], scores[start:end], ape, state)
            parts.append(entries)
            start = end
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    ring = RingCompressor(ape, overlap=ratio == 4)
    stepped = [entry for row in zip(kv, scores, strict=True) if (entry := ring.step(*row)) is not None]
    assert len(stepped) == len(whole)
    if stepped:
        torch.testing.assert_close(torch.stack(stepped), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ratio", "reach"), [(4, 2), (128, 1)])
def test_a_token_alters_only_its_own_entry_and_for_c4_the_next(ratio, reach):
    compress = {4: ref.compress_c4, 128: ref.compress_c128}[ratio]
    kv, scores, ape = _tokens(ratio, 4 * ratio)
    before, _ = compress(kv, scores, ape)
    token = ratio + 1
    kv[token] += 1.0
    after, _ = compress(kv, scores, ape)
    changed = torch.nonzero((before != after).any(dim=1)).flatten().tolist()
    assert changed == list(range(token // ratio, token // ratio + reach))


def test_a_dropped_overlap_half_changes_every_entry_but_the_first():
    kv, scores, ape = _tokens(4, 32)
    whole, _ = ref.compress_c4(kv, scores, ape)
    alone = torch.cat([ref.compress_c4(kv[i : i + 4], scores[i : i + 4], ape)[0] for i in range(0, 32, 4)])
    assert torch.equal(whole[0], alone[0])
    assert bool(((whole - alone).abs().amax(dim=1)[1:] > 1e-3).all())


def test_compressor_rejects_a_bias_of_the_wrong_shape():
    kv, scores, ape = _tokens(4, 8)
    with pytest.raises(ValueError, match="c4 needs"):
        ref.compress_c4(kv, scores, ape[:, :-2])


def test_rotation_keeps_length_and_depends_on_relative_position_only():
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 128, generator=g, dtype=torch.float64)
    freq = ref.rope_frequencies(64, 160_000.0, factor=16.0)
    dots = []
    for shift in (0, 1000):
        a = ref.rotate(q, torch.tensor([70 + shift]), freq)
        b = ref.rotate(k, torch.tensor([50 + shift]), freq)
        torch.testing.assert_close(a.norm(), q.norm())
        dots.append((a * b).sum())
    torch.testing.assert_close(dots[0], dots[1], rtol=1e-9, atol=1e-9)
    half = ref.rotate(q, torch.tensor([70]), freq, interleaved=False)
    assert not torch.allclose(half, ref.rotate(q, torch.tensor([70]), freq))


def test_yarn_leaves_fast_angles_and_stretches_slow_ones_by_the_factor():
    plain, yarn = ref.rope_frequencies(64), ref.rope_frequencies(64, factor=16.0)
    assert plain[0] == yarn[0]
    torch.testing.assert_close(yarn[-1] * 16, plain[-1])
    assert bool((yarn <= plain).all())


def test_hadamard_on_both_sides_keeps_dots_and_on_one_side_does_not():
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 8, 128, generator=g, dtype=torch.float64)
    torch.testing.assert_close(ref.hadamard(q) @ ref.hadamard(k).T, q @ k.T)
    torch.testing.assert_close(ref.hadamard(ref.hadamard(q)), q)
    assert not torch.allclose(ref.hadamard(q) @ k.T, q @ k.T, atol=1.0)
    with pytest.raises(ValueError, match="power of two"):
        ref.hadamard(q[:, :100])


def _streams(tokens: int = 7, hidden: int = 96, seed: int = 3):
    g = torch.Generator().manual_seed(seed)
    residual = torch.randn(tokens, 4, hidden, generator=g).to(torch.bfloat16)
    weight = torch.randn(24, 4 * hidden, generator=g) * 0.1
    return residual, weight, torch.tensor([1.0, 1.0, 1.5]), torch.randn(24, generator=g)


def test_mhc_weights_lie_in_their_ranges_and_columns_sum_to_one():
    residual, weight, scale, bias = _streams()
    pre, post, comb = ref.mhc_mix(ref.mhc_project(residual, weight, gemm="float64"), scale.double(), bias.double())
    assert bool(((pre >= 1e-6) & (pre <= 1 + 1e-6)).all()) and bool(((post >= 0) & (post <= 2)).all())
    assert bool((comb >= 0).all())
    torch.testing.assert_close(comb.sum(dim=1), torch.ones(7, 4, dtype=torch.float64), rtol=0, atol=3e-6)
    assert float((comb.sum(dim=2) - 1).abs().max()) < 1e-2  # rows only converge
    once = ref.sinkhorn(torch.log(comb), iterations=1)
    assert not torch.allclose(once.sum(dim=1), once.sum(dim=2))


def test_mhc_transposed_mixing_is_told_apart():
    residual, weight, scale, bias = _streams()
    pre, post, comb = ref.mhc_mix(ref.mhc_project(residual, weight), scale, bias)
    out = ref.mhc_enter(residual, pre)
    right, wrong = ref.mhc_leave(out, residual, post, comb), ref.mhc_leave(out, residual, post, comb.transpose(1, 2))
    assert float((right.float() - wrong.float()).norm() / right.float().norm()) > 0.05
    by_hand = sum(comb[2, i, 1] * residual[2, i].float() for i in range(4)) + post[2, 1] * out[2].float()
    torch.testing.assert_close(right[2, 1], by_hand.to(torch.bfloat16))


def test_mhc_gemm_errors_are_ordered_and_unknown_gemm_is_refused():
    residual, weight, _, _ = _streams(tokens=64, hidden=1024)
    exact = ref.mhc_project(residual, weight, gemm="float64")
    error = {g: float((ref.mhc_project(residual, weight, gemm=g) - exact).norm() / exact.norm()) for g in ref_gemms()}
    assert error["float32"] < 1e-6 < error["tf32"] < 1e-3 < error["bfloat16"] < 1e-2
    with pytest.raises(ValueError, match="gemm must be one of"):
        ref.mhc_project(residual, weight, gemm="fp8")


def ref_gemms():
    return ("float32", "tf32", "bfloat16")


def test_router_weights_sum_to_the_scaling_and_ignore_the_bias():
    g = torch.Generator().manual_seed(4)
    logits, bias = torch.randn(32, 64, generator=g), torch.randn(64, generator=g) * 0.1
    ids, weights = ref.router_topk(logits, bias, 6, scaling=1.5)
    torch.testing.assert_close(weights.sum(dim=1), torch.full((32,), 1.5))
    shifted, _ = ref.router_topk(logits, bias + 3.0, 6)
    assert torch.equal(ids.sort(dim=1).values, shifted.sort(dim=1).values)
    scores = ref.router_scores(logits).gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(dim=1, keepdim=True) * 1.5)
    coarse = ref.router_topk(logits, bias, 6, scaling=1.5, scaling_dtype=torch.bfloat16)[1]
    assert 0 < float((coarse - weights).abs().max()) < 0.01


def test_router_scores_hold_at_both_ends():
    x = torch.tensor([-100.0, -20.0, 0.0, 20.0, 100.0])
    expected = torch.sqrt(torch.nn.functional.softplus(x.double()))
    torch.testing.assert_close(ref.router_scores(x).double(), expected, rtol=1e-5, atol=1e-20)
