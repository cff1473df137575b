"""More broken kernels: attention, merging, compressors, key preparation, mHC and router (see mutants.py)."""

from __future__ import annotations

import itertools

import torch
from mutants import add, mutant, wrapped
from needlework.kernels import reference as ref
from needlework.kernels.reference import VALUE_DIM
from needlework.pages import layout_of


# ---- sparse_mla_decode -----------------------------------------------------------------------------------------------
def decodes(*, slots=lambda s, pool, m: s, read=None, score=lambda x: x, weigh=None, lse=lambda x: x,
            values=lambda v: v, limit=True, extra=True, scale=lambda x: x, sinks=1, valid=lambda v: v):  # fmt: skip
    """Sparse decode in plain steps, each of which a mutant may replace."""

    def run(q, pool, indices, *, layout="v4-mla-fp8", page_tokens=64, softmax_scale=None, sink=None, extra_pool=None,
            extra_indices=None, extra_page_tokens=64, extra_layout=None, topk_length=None):  # fmt: skip
        parts = [(pool, indices, page_tokens)]
        if extra_pool is not None and extra:
            parts.append((extra_pool, extra_indices, extra_page_tokens))
        entries, alive = [], []
        for i, (cache, ids, tokens) in enumerate(parts):
            ids = slots(ids, cache, tokens)
            alive.append(valid(ids >= 0))
            if i == 0 and topk_length is not None and limit:
                alive[0] = alive[0] & (torch.arange(ids.shape[1]) < topk_length[:, None])
            used = torch.where(alive[-1], ids, -1)
            entries.append((read or gather)(cache, used, layout, tokens))
        k, ok = torch.cat(entries, 1), torch.cat(alive, 1)
        s = score(q.float() @ k.transpose(1, 2)) * scale(
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        )
        s = s.masked_fill(~ok[:, None], -torch.inf)
        total = torch.logsumexp(s, -1)
        none = ~ok.any(-1)[:, None]
        p = torch.exp(s - total.masked_fill(none, 0.0)[..., None]) if weigh is None else weigh(s)
        out = p @ values(k[..., :VALUE_DIM])
        natural = total.masked_fill(none, torch.inf)
        for _ in range(sinks if sink is not None else 0):
            out = out * ref.sink_factor(natural, sink)[..., None]
        return out, lse(natural)

    return run


def gather(pool, ids, layout, tokens):
    return ref.gather_entries(pool, ids, layout, tokens, torch.float32)


def raw_v4(*, row=576, scale_base=576, bias=127, scales=lambda s: s):
    """V4 entries read byte by byte, with addresses and exponent bias a mutant may get wrong. Holes read as zeros."""

    def read(pool, ids, layout, tokens):
        if layout != "v4-mla-fp8":
            return gather(pool, ids, layout, tokens)
        page, offset = ids.clamp_min(0).long() // tokens, ids.clamp_min(0).long() % tokens
        base = offset * row
        end = pool.shape[1] - 1
        codes = (
            pool[page[..., None], (base[..., None] + torch.arange(448)).clamp_max(end)]
            .view(torch.float8_e4m3fn)
            .float()
        )
        rope = pool[page[..., None], (base[..., None] + 448 + torch.arange(128)).clamp_max(end)].contiguous()
        at = tokens * scale_base + offset * 8
        power = scales(pool[page[..., None], (at[..., None] + torch.arange(7)).clamp_max(end)].float())
        value = (codes.unflatten(-1, (7, 64)) * torch.exp2(power - bias)[..., None]).flatten(-2)
        out = torch.cat((value, rope.view(torch.bfloat16).float()), -1)
        return torch.where((ids >= 0)[..., None], out, 0.0)

    return read


def unmasked(s):
    """Masked keys count as score 0 in the denominator."""
    s = s.masked_fill(torch.isneginf(s), 0.0)
    return torch.softmax(s, -1)


def no_maximum(s):
    e = torch.exp(s)
    return (e / e.sum(-1, keepdim=True)).nan_to_num(0.0, posinf=torch.inf)


class KeepsScratch:
    """A scratch buffer that is kept between calls and only written where the new, shorter list has entries."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def __call__(self, q, pool, indices, **more):
        keys = indices.shape[1]
        if self.buffer is None or self.buffer.shape[0] != len(q) or self.buffer.shape[1] < keys:
            self.buffer = torch.full((len(q), max(keys, 128)), -1, dtype=torch.int32)
        self.buffer[:, :keys] = torch.where(indices >= 0, indices, self.buffer[:, :keys])  # a hole keeps what was there
        kept = torch.where(self.buffer[:, :keys] >= 0, self.buffer[:, :keys] % (len(pool) * more["page_tokens"]), -1)
        return ref.sparse_mla_decode(q, pool, kept, **more)


turn = itertools.count()


def drops_an_update(s):
    p = torch.softmax(s, -1).nan_to_num(0.0)
    p[..., next(turn) % 2 :: 2] *= 0.9
    return p


@mutant("sparse_mla_decode", "NaN survives a zero weight")
def _(q, pool, indices, **more):
    more.pop("sink", None)
    entries = gather(pool, indices.clamp_min(0), more.get("layout", "v4-mla-fp8"), more["page_tokens"])
    out, lse = ref.sparse_mla_decode(q, pool, indices, **more)
    return out + (0.0 * entries[..., :VALUE_DIM]).sum(1)[:, None], lse


@mutant("sparse_mla_decode", "uninitialised output where a row has no entry")
def _(q, pool, indices, **more):
    out, lse = ref.sparse_mla_decode(q, pool, indices, **more)
    fresh = torch.empty_like(out)
    some = torch.isfinite(lse)
    fresh[some] = out[some]
    return fresh, lse


@mutant("sparse_mla_decode", "parts averaged instead of merged")
def _(q, pool, indices, **more):
    out, lse = ref.sparse_mla_decode(q, pool, indices, **more)
    if indices.shape[1] < 64 or "extra_pool" in more or "topk_length" in more:
        return out, lse
    halves = [ref.sparse_mla_decode(q, pool, part, **more)[0] for part in indices.chunk(2, 1)]
    return (halves[0] + halves[1]) / 2, lse


@mutant("sparse_mla_decode", "request 0's indices for every request")
def _(q, pool, indices, **more):
    return ref.sparse_mla_decode(q, pool, indices[:1].expand_as(indices), **more)


def int32_slots(s, pool, tokens):
    page = wrapped(s.clamp_min(0) // tokens, pool.shape[1], len(pool))
    return torch.where(s < 0, s, (page * tokens + s % tokens).to(s.dtype))


add(
    "sparse_mla_decode",
    hole_read_as_slot_0=decodes(slots=lambda s, p, m: s.clamp_min(0)),
    hole_wraps_to_the_last_slot=decodes(slots=lambda s, p, m: s % (len(p) * m)),
    holes_count_as_score_0=decodes(weigh=unmasked),
    int32_wrap_of_page_times_stride=decodes(slots=int32_slots),
    page_off_by_one=decodes(slots=lambda s, p, m: torch.where(s >= 0, s - m, s)),
    sink_twice=decodes(sinks=2),
    sink_ignored=decodes(sinks=0),
    LSE_in_log2=decodes(lse=lambda x: x * 1.4426950408889634),
    maximum_not_subtracted=decodes(weigh=no_maximum),
    token_stride_584=decodes(read=raw_v4(row=584)),
    scales_at_584_times_P=decodes(read=raw_v4(scale_base=584)),
    exponent_bias_126=decodes(read=raw_v4(bias=126)),
    first_tile_scale_for_all_tiles=decodes(read=raw_v4(scales=lambda s: s[..., :1].expand_as(s))),
    scale_of_the_tile_before=decodes(read=raw_v4(scales=lambda s: s.roll(1, -1))),
    rope_left_out_of_the_score=decodes(
        read=lambda p, i, n, m: gather(p, i, n, m) * (torch.arange(layout_of(n).dim) < 448)
    ),
    index_limit_ignored=decodes(limit=False),
    second_cache_ignored=decodes(extra=False),
    last_partial_block_of_64_skipped=decodes(
        valid=lambda v: v & (torch.arange(v.shape[1]) < max(v.shape[1] // 64 * 64, min(v.shape[1], 64)))
    ),
    only_the_first_64_entries=decodes(valid=lambda v: v & (torch.arange(v.shape[1]) < 64)),
    scale_of_448_dims=decodes(scale=lambda x: x * (512 / 448) ** 0.5),
    values_shifted_by_one_channel=decodes(values=lambda v: v.roll(1, -1)),
    heads_swapped_in_pairs=decodes(score=lambda x: x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)),
    bf16_scores=decodes(score=lambda x: x.bfloat16().float()),
    race_between_two_programs=decodes(weigh=drops_an_update),
    scratch_of_the_call_before=KeepsScratch(),
)


# ---- merge_partials --------------------------------------------------------------------------------------------------
def merges(weight, sinks=1, empty=True):
    def run(outs, lses, sink=None):
        _, lse = ref.merge_partials(outs, lses, sink if sinks == 1 else None)
        gone = torch.isinf(lses)
        w = weight(lses.masked_fill(gone, -torch.inf))
        w = w.masked_fill(gone, 0.0) if empty else w
        out = (w[..., None] * (outs.masked_fill(gone[..., None], 0.0) if empty else outs)).sum(0)
        out = out / w.sum(0).clamp_min(1e-30)[..., None]
        for _ in range(sinks if sink is not None else 0):
            out = out * ref.sink_factor(lse, sink)[..., None]
        return out, lse

    return run


def top(lses):
    return lses.amax(0).nan_to_num(0.0, neginf=0.0)


add(
    "merge_partials",
    parts_weighed_alike=merges(torch.ones_like),
    LSE_taken_as_log2=merges(lambda x: torch.exp2(x - top(x))),
    sink_twice=merges(lambda x: torch.exp(x - top(x)), sinks=2),
    empty_parts_read=merges(lambda x: torch.exp(x - top(x)), empty=False),
    maximum_not_subtracted=merges(lambda x: torch.exp(x * 1.0).where(x < 80, torch.inf)),
    last_part_dropped=lambda outs, lses, sink=None: ref.merge_partials(outs[: max(1, len(outs) - 1)],
                                                                      lses[: max(1, len(outs) - 1)], sink),
    parts_rounded_to_bf16=lambda outs, lses, sink=None: ref.merge_partials(outs.bfloat16().float(), lses, sink),
    sink_in_the_LSE=lambda outs, lses, sink=None: (lambda o, n: (o, n if sink is None else torch.logaddexp(n, sink)))(
        *ref.merge_partials(outs, lses, sink)
    ),
)  # fmt: skip


# ---- compressors -----------------------------------------------------------------------------------------------------
def c4_without_overlap(kv, scores, ape, state=None):
    d = kv.shape[1] // 2
    scores = scores.clone()
    entries, after = ref.compress_c4(kv, scores, ape, state)
    rows = torch.cat((state.kv, kv)) if state is not None else kv
    full = len(entries)
    if not full:
        return entries, after
    logit = torch.cat((state.scores, scores)) if state is not None else scores
    first = 0 if state is None else state.position - len(state.kv)
    start = (0 if state is None else state.position) // 4 * 4 - first
    own = slice(start, start + 4 * full)
    p = torch.softmax(logit[own].reshape(full, 4, -1) + ape, 1)
    return (p * rows[own].reshape(full, 4, -1)).sum(1)[:, d:], after


def forgets_on_single_steps(kv, scores, ape, state=None):
    """The overlap half is lost when one decode step completes a group (public fault: length mod 4 = 3 is hit)."""
    return (c4_without_overlap if len(kv) == 1 else ref.compress_c4)(kv, scores, ape, state)


def chunk_forgets_state(compress):
    def run(kv, scores, ape, state=None):
        if state is not None:
            gone = state.position // len(ape) * len(ape)
            keep = max(0, len(state.kv) - (state.position - gone))
            kept = torch.zeros_like(state.kv), torch.full_like(state.scores, -1e30)
            kept[0][keep:], kept[1][keep:] = state.kv[keep:], state.scores[keep:] * 0
            state = ref.CompressorState(kept[0], kept[1], state.position)
        return compress(kv, scores, ape, state)

    return run


class SharedState:
    """One state for all requests: what the last request left behind enters the first group of the next."""

    def __init__(self, compress) -> None:
        self.compress, self.left = compress, None

    def __call__(self, kv, scores, ape, state=None):
        if state is None and self.left is not None and self.left.kv.shape[1] == kv.shape[1]:
            rows = self.left.kv[-len(ape) :]
            kv = kv.clone()
            kv[: len(rows)] += 0.01 * rows[: len(kv)].sum()
        out, after = self.compress(kv, scores, ape, state)
        self.left = after
        return out, after


def swapped(kv, scores, ape, state=None):
    half = kv.shape[1] // 2
    flip = [torch.cat((x[:, half:], x[:, :half]), 1) for x in (kv, scores, ape)]
    return ref.compress_c4(*flip, state)


for name, compress in (("compress_c4", ref.compress_c4), ("compress_c128", ref.compress_c128)):
    add(
        name,
        position_bias_off_by_one=lambda kv, s, ape, state=None, f=compress: f(kv, s, ape.roll(1, 0), state),
        position_bias_left_out=lambda kv, s, ape, state=None, f=compress: f(kv, s, torch.zeros_like(ape), state),
        plain_mean_instead_of_softmax=lambda kv, s, ape, state=None, f=compress: f(kv, s * 0, ape * 0, state),
        state_lost_between_chunks=chunk_forgets_state(compress),
        state_shared_between_requests=SharedState(compress),
        last_group_dropped=lambda kv, s, ape, state=None, f=compress: (lambda e, after: (e[:-1], after))(
            *f(kv, s, ape, state)
        ),
    )
add(
    "compress_c4",
    overlap_half_dropped=c4_without_overlap,
    overlap_lost_on_a_single_step=forgets_on_single_steps,
    channel_halves_swapped=swapped,
)


# ---- finish_index_keys, mhc_weights, router_topk ---------------------------------------------------------------------
def finishes(*, turn=None, norm=ref.rms_norm, transform=ref.hadamard, shift=0, base=lambda f: f):
    def run(pooled, weight, positions, frequencies):
        x, freq = norm(pooled, weight), base(frequencies)
        return transform((turn or ref.rotate)(x, positions + shift, freq))

    return run


add(
    "finish_index_keys",
    half_split_rotation=finishes(turn=lambda x, p, f: ref.rotate(x, p, f, interleaved=False)),
    first_64_rotated=finishes(turn=lambda x, p, f: ref.rotate(x, p, f, last=False)),
    rotated_backwards=finishes(turn=lambda x, p, f: ref.rotate(x, -p, f)),
    position_of_the_last_token=finishes(shift=3),
    plain_rotary_base=finishes(base=lambda f: ref.rope_frequencies(64, 10_000.0)),
    Hadamard_left_out=finishes(transform=lambda x: x),
    Hadamard_not_scaled=finishes(transform=lambda x: ref.hadamard(x) * 128**0.5),
    Hadamard_before_the_rotation=lambda pooled, weight, positions, frequencies: ref.rotate(
        ref.hadamard(ref.rms_norm(pooled, weight)), positions, frequencies
    ),
    norm_over_the_sum=finishes(norm=lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * w),
    norm_weight_plus_one=finishes(norm=lambda x, w: ref.rms_norm(x, 1 + w)),
)

add(
    "mhc_weights",
    mixing_transposed=lambda **a: (lambda pre, post, comb: (pre, post, comb.transpose(1, 2)))(*ref.mhc_weights(**a)),
    ten_Sinkhorn_rounds=lambda **a: ref.mhc_weights(**a, iterations=10),
    post_without_its_factor_2=lambda **a: (lambda pre, post, comb: (pre, post / 2, comb))(*ref.mhc_weights(**a)),
    bf16_GEMM=lambda **a: ref.mhc_weights(**a, gemm="bfloat16"),
    row_step_last=lambda **a: (lambda pre, post, comb: (pre, post, comb / comb.sum(2, keepdim=True)))(
        *ref.mhc_weights(**a)
    ),
)


def routes(score, scaling=1.0, biased=False, renorm=True):
    def run(logits, bias, k=6, **more):
        s = score(logits)
        ids = torch.topk(s + bias, k).indices
        w = (s + bias if biased else s).gather(1, ids)
        w = w / w.sum(1, keepdim=True) if renorm else w
        return ids, w * more["scaling"] * scaling

    return run


add(
    "router_topk",
    bias_kept_in_the_weights=routes(ref.router_scores, biased=True),
    softmax_scores=routes(lambda x: torch.softmax(x, -1)),
    sigmoid_scores=routes(torch.sigmoid),
    weights_not_normalised=routes(ref.router_scores, renorm=False),
    scaling_left_out=routes(ref.router_scores, scaling=1 / 1.5),
    scaling_in_bf16=lambda logits, bias, k, scaling: ref.router_topk(
        logits, bias, k, scaling=scaling, scaling_dtype=torch.bfloat16
    ),
)
