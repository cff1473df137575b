"""Broken kernels on purpose: each is a reference with one public fault put in. check() must catch every one of them.

A mutant keeps the reference's signature. Faults that depend on memory or timing are written so that they misbehave in
plain torch: an int32 wrap turns an address into another page, a race drops one of two updates, a stale graph
remembers lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from needlework.kernels import reference as ref
from needlework.pages import LAYOUTS

INDEX = LAYOUTS["dsa-index-fp8"]


@dataclass(frozen=True)
class Mutant:
    operation: str
    fault: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.operation}: {self.fault}"


MUTANTS: list[Mutant] = []


def mutant(operation: str, fault: str):
    def keep(function):
        MUTANTS.append(Mutant(operation, fault, function))
        return function

    return keep


def add(operation: str, **functions) -> None:
    for fault, function in functions.items():
        MUTANTS.append(Mutant(operation, fault.replace("_", " "), function))


def wrapped(page: torch.Tensor, page_bytes: int, pages: int) -> torch.Tensor:
    """The page that a 32-bit byte offset ends up in: a negative offset is clamped into the pool."""
    offset = (page.long() * page_bytes + 2**31) % 2**32 - 2**31
    return torch.where(offset < 0, offset % (pages * page_bytes), offset) // page_bytes


# ---- store_index_keys ------------------------------------------------------------------------------------------------
def put(pool, slots, codes, scales, page_tokens=64, *, scale_at=None, code_at=None):
    """Write codes and scales byte by byte, at addresses that a mutant may get wrong."""
    keep = slots >= 0
    page, offset = slots[keep] // page_tokens, slots[keep] % page_tokens
    code_at = offset * 128 if code_at is None else code_at(offset)
    scale_at = page_tokens * 128 + offset * 4 if scale_at is None else scale_at(offset)
    pool[page[:, None], code_at[:, None] + torch.arange(128)] = codes[keep]
    pool[page[:, None], scale_at[:, None] + torch.arange(4)] = (
        scales[keep].contiguous().view(torch.uint8).reshape(-1, 4)
    )


def stores(change):
    """A writer that quantises rightly and then lets `change` alter (slots, codes, scales)."""

    def store(pool, slots, keys, page_tokens=64):
        codes, scales = ref.quantize_index_keys(keys)
        put(pool, *change(slots, codes, scales), page_tokens)

    return store


def put_at(**where):
    def store(pool, slots, keys, page_tokens=64):
        put(pool, slots, *ref.quantize_index_keys(keys), page_tokens, **where)

    return store


def requantised(keys, scales):
    codes = (keys.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def stores_with_scale(rule):
    def store(pool, slots, keys, page_tokens=64):
        put(pool, slots, *requantised(keys, rule(keys.float())), page_tokens)

    return store


@mutant("store_index_keys", "int32 wrap of page times stride")
def _(pool, slots, keys, page_tokens=64):
    page = wrapped(slots // page_tokens, pool.shape[1], len(pool))
    ref.store_index_keys(
        pool, torch.where(slots < 0, slots, page * page_tokens + slots % page_tokens), keys, page_tokens
    )


add(
    "store_index_keys",
    page_off_by_one=stores(lambda s, c, a: (torch.where(s >= 0, s - 64, s), c, a)),
    scale_offset_in_elements_not_bytes=put_at(scale_at=lambda o: 8192 + o),
    one_record_of_132_bytes=put_at(code_at=lambda o: o * 132, scale_at=lambda o: o * 132 + 128),
    padding_wraps_to_the_last_slot=lambda pool, slots, keys, page_tokens=64: ref.store_index_keys(
        pool, slots % (len(pool) * page_tokens), keys, page_tokens
    ),
    padding_writes_slot_0=lambda pool, slots, keys, page_tokens=64: ref.store_index_keys(
        pool, slots.clamp_min(0), keys, page_tokens
    ),
    scale_rounded_down_to_a_power_of_two=stores_with_scale(
        lambda k: 2.0 ** torch.floor(torch.log2(k.abs().amax(1).clamp_min(1e-4) / 448))
    ),
    scale_narrowed_to_fp16=stores(lambda s, c, a: (s, c, a.half().float())),
    one_scale_for_the_batch=stores_with_scale(lambda k: (k.abs().amax() / 448).clamp_min(1e-7).expand(len(k)).clone()),
    no_floor_under_the_scale=stores_with_scale(lambda k: k.abs().amax(1) / 448),
    last_partial_group_of_64_skipped=stores(lambda s, c, a: tuple(x[: len(s) // 64 * 64] for x in (s, c, a))),
    codes_of_the_row_before=stores(lambda s, c, a: (s, c.roll(1, 0), a)),
    codes_truncated_not_rounded=stores(lambda s, c, a: (s, torch.where(c & 0x7F > 0, c - 1, c), a)),
)


# ---- indexer_logits --------------------------------------------------------------------------------------------------
def dense(pool, page_table, page_tokens):
    """Keys [B, L, 128] without their scales [B, L], as they lie behind the page table (holes as page 0)."""
    pages = page_table.clamp_min(0).long()
    keys = INDEX["codes"].view(pool, page_tokens)[pages].flatten(3).reshape(len(pages), -1, 128)
    scales = INDEX["scales"].view(pool, page_tokens)[pages].reshape(len(pages), -1, 4)
    return keys.view(torch.float8_e4m3fn).float(), scales.contiguous().view(torch.float32)[..., 0]


def logits(*, dot=None, head_sum=None, scale=lambda s: s, table=lambda t: t, keys=lambda k: k, ends=lambda n: n):
    """Index logits whose steps a mutant may replace."""

    def run(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
        if layout != "dsa-index-fp8":
            raise ValueError("fp8 pages only")
        k, s = dense(pool, table(page_table), page_tokens)
        k, s = keys(k), scale(s)
        rows = q.ndim == 4
        q4, w4 = (q, weights) if rows else (q[:, None], weights[:, None])
        dots = torch.einsum("bnhd,bld->bnhl", q4.float(), k)
        dots = torch.relu(dots) if dot is None else dot(dots)
        out = torch.einsum("bnh,bnhl->bnl", w4, dots) if head_sum is None else head_sum(w4, dots)
        out = out * s[:, None]
        n = ends(lengths if rows else lengths[:, None])
        out = out.masked_fill(torch.arange(out.shape[-1]) >= n[..., None], -torch.inf)
        return out if rows else out[:, 0]

    return run


def unwritten_tail(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
    want = ref.indexer_logits(q, weights, pool, page_table, lengths, page_tokens=page_tokens, layout=layout)
    out = torch.empty_like(want)  # whole pages are written, the last partial one is left as the allocator gave it
    full = torch.arange(want.shape[-1]) < (lengths // page_tokens * page_tokens)[..., None]
    out[full] = want[full]
    return out


class StaleLengths:
    """Lengths as they were when these buffers were first seen: a captured launch that was given numbers, not the
    tensor."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}
        self.alive: list[torch.Tensor] = []

    def __call__(self, q, weights, pool, page_table, lengths, **more):
        if lengths.data_ptr() not in self.seen:
            self.seen[lengths.data_ptr()] = lengths.clone()
            self.alive.append(lengths)
        old = self.seen[lengths.data_ptr()]
        out = ref.indexer_logits(q, weights, pool, page_table, lengths, **more)
        return out.masked_fill(torch.arange(out.shape[-1]) >= old[..., None], -torch.inf)


turn = itertools.count()


add(
    "indexer_logits",
    last_column_is_the_one_before=logits(table=lambda t: torch.cat([t[:, :-1], t[:, :-1][:, -1:]], 1)),
)


def racing(weights, dots):
    """Two programs add half of the heads each; on every other block the second one overwrites the first."""
    half = dots.shape[2] // 2
    a = torch.einsum("bnh,bnhl->bnl", weights[:, :, :half], dots[:, :, :half])
    b = torch.einsum("bnh,bnhl->bnl", weights[:, :, half:], dots[:, :, half:])
    lost = (torch.arange(dots.shape[-1]) // 64 + next(turn)) % 2 == 1
    return torch.where(lost, b, a + b)


@mutant("indexer_logits", "int32 wrap of page times stride")
def _(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
    table = torch.where(page_table < 0, page_table, wrapped(page_table, pool.shape[1], len(pool)).to(torch.int32))
    return ref.indexer_logits(q, weights, pool, table, lengths, page_tokens=page_tokens, layout=layout)


@mutant("indexer_logits", "writes into its weights")
def _(q, weights, pool, page_table, lengths, **more):
    out = ref.indexer_logits(q, weights, pool, page_table, lengths, **more)
    weights.mul_(1.0001)
    return out


def capped(out, cap):
    out[..., cap:] = out[..., cap:].clamp_min(-1e30) * 0
    return out


add(
    "indexer_logits",
    missing_ReLU=logits(dot=lambda d: d),
    ReLU_after_the_weights=logits(head_sum=lambda w, d: torch.relu(torch.einsum("bnh,bnhl->bnl", w, d))),
    scale_of_the_next_key=logits(scale=lambda s: s.roll(-1, 1)),
    one_scale_per_page=logits(scale=lambda s: s.unflatten(1, (-1, 64))[:, :, :1].expand(-1, -1, 64).flatten(1)),
    scale_applied_twice=logits(scale=lambda s: s * s),
    page_table_off_by_one=logits(table=lambda t: t.roll(1, 1)),
    page_table_ignored=logits(table=lambda t: torch.arange(t.shape[1]).expand_as(t)),
    every_request_reads_the_first_table=logits(table=lambda t: t[:1].expand_as(t)),
    last_key_left_out=logits(ends=lambda n: n - 1),
    last_partial_page_skipped=logits(ends=lambda n: n // 64 * 64),
    first_rows_length_for_all_rows=logits(ends=lambda n: n.flatten()[0].expand_as(n)),
    only_32_heads=logits(head_sum=lambda w, d: torch.einsum("bnh,bnhl->bnl", w[:, :, :32], d[:, :, :32])),
    weights_without_sign=logits(head_sum=lambda w, d: torch.einsum("bnh,bnhl->bnl", w.abs(), d)),
    fp16_dot_products=logits(dot=lambda d: torch.relu(d.half().float())),
    keys_in_another_rotation=logits(keys=lambda k: torch.cat((k[..., 0::2], k[..., 1::2]), -1)),
    Hadamard_on_one_side=logits(keys=ref.hadamard),
    stops_at_4096_keys=lambda *a, **m: capped(ref.indexer_logits(*a, **m), 4096),
    partial_page_left_uninitialised=unwritten_tail,
    race_between_two_programs=logits(head_sum=racing),
    stale_graph_lengths=StaleLengths(),
)


# ---- select_topk -----------------------------------------------------------------------------------------------------
def selects(pick):
    """Top-k whose choice among a row's first n scores a mutant may replace: pick(scores [n], k) -> positions."""

    def select(logits, lengths, k, page_table=None, *, page_tokens=64):
        out = ref.select_topk(logits, lengths, k)
        for b in torch.nonzero(lengths > k).flatten().tolist():
            chosen = pick(logits[b, : int(lengths[b])], k)
            out[b] = -1
            out[b, : len(chosen)] = chosen.to(torch.int32)
        return out if page_table is None else ref.slots_of(out, page_table, page_tokens)

    return select


def stash(size: int):
    """Two passes: a coarse 8-bit bin of the fp16 score, then an exact choice among the first `size` of the last bin."""

    def pick(scores, k):
        bits = scores.half().view(torch.int16).to(torch.int32) & 0xFFFF
        coarse = torch.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000) >> 8
        edge = int(coarse.sort(descending=True).values[k - 1])
        sure, last = torch.nonzero(coarse > edge).flatten(), torch.nonzero(coarse == edge).flatten()[:size]
        best = last[torch.topk(scores[last], min(k - len(sure), len(last))).indices]
        return torch.cat((sure, best))

    return pick


def after(change):
    """The right selection, then spoilt: change(positions or slots, lengths, k, table) -> result."""

    def select(logits, lengths, k, page_table=None, *, page_tokens=64):
        positions = ref.select_topk(logits, lengths, k)
        return change(positions, lengths, k, page_table, page_tokens)

    return select


def slots(positions, table, page_tokens):
    return positions if table is None else ref.slots_of(positions, table, page_tokens)


def top(key):
    return selects(lambda s, k: torch.topk(key(s), k).indices)


@mutant("select_topk", "columns past the length compete")
def _(logits, lengths, k, page_table=None, *, page_tokens=64):
    masked = logits * (torch.arange(logits.shape[1]) < lengths[:, None])  # NaN times zero stays NaN
    full = torch.full_like(lengths, logits.shape[1])
    picked = torch.where((lengths > k)[:, None], ref.select_topk(masked, full, k), ref.select_topk(logits, lengths, k))
    return slots(picked, page_table, page_tokens)


@mutant("select_topk", "row start taken from the first row")
def _(logits, lengths, k, page_table=None, *, page_tokens=64):
    return ref.select_topk(
        logits[:1].expand_as(logits).nan_to_num(0.0), lengths, k, page_table, page_tokens=page_tokens
    )


add(
    "select_topk",
    stash_of_4096=selects(stash(4096)),
    stash_of_16384=selects(stash(16384)),
    fp16_pre_pass=top(lambda s: s.half()),
    bf16_scores=top(lambda s: s.bfloat16()),
    eight_bits_of_the_score=top(lambda s: s.view(torch.int32) >> 24),
    sign_ignored=top(lambda s: s.abs()),
    signed_bits_compared_as_integers=top(lambda s: s.view(torch.int32)),
    ties_at_the_edge_dropped=selects(lambda s, k: torch.nonzero(s > s.sort(descending=True).values[k - 1]).flatten()),
    ties_taken_twice=selects(
        lambda s, k: (lambda i: torch.cat((i[: k // 2], i[: k - k // 2])))(torch.topk(s, k).indices)
    ),
    first_k_keys=selects(lambda s, k: torch.arange(k)),
    last_key_never_seen=selects(lambda s, k: torch.topk(s[:-1], k).indices),
    budget_hard_coded_512=selects(lambda s, k: torch.topk(s, min(k, 512)).indices),
    padded_with_0=after(lambda p, n, k, t, m: slots(p, t, m).clamp_min(0)),
    positions_instead_of_slots=after(lambda p, n, k, t, m: p),
    table_read_in_blocks_of_16=after(
        lambda p, n, k, t, m: p if t is None else ref.slots_of(p, t.repeat_interleave(4, 1)[:, : t.shape[1]], 16)
    ),
    short_rows_reversed=after(lambda p, n, k, t, m: slots(torch.where((n <= k)[:, None], p.flip(1), p), t, m)),
    one_page_too_far=after(lambda p, n, k, t, m: torch.where(slots(p, t, m) >= 0, slots(p, t, m) + m, -1)),
)


__all__ = ["MUTANTS", "Mutant", "add", "mutant", "wrapped"]
