"""Sparse MLA decode, in plain torch: one softmax over the selected entries of one or two paged caches.

s_j = scale * q . k_j over valid entries; lse = ln sum exp(s_j), natural and without the sink; out = sum exp(s_j -
lse) v_j, times sigmoid(lse - sink) where a sink is given (FlashMLA `tests/ref.py` conventions). K and V are the same
bytes: V4 reads all 512 numbers as both, V3.2 scores with 576 (512 latent + 64 rotary) and sums the first 512.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.pages import layout_of

VALUE_DIM = 512


def gather_entries(pool: Tensor, slots: Tensor, layout: str, page_tokens: int, dtype: torch.dtype) -> Tensor:
    """Entries of a pool at slots [B, K] as numbers [B, K, dim]; zeros at slot -1, whose bytes are never read."""
    if len(slots) == 1:
        return layout_of(layout).gather(pool, slots, page_tokens=page_tokens).to(dtype)
    flat = slots.reshape(-1).long()
    used, place = torch.unique(flat[flat >= 0], return_inverse=True)  # a slot shared by many rows is decoded once
    out = torch.zeros((len(flat), layout_of(layout).dim), dtype=dtype, device=pool.device)
    if len(used):
        out[flat >= 0] = layout_of(layout).gather(pool, used, page_tokens=page_tokens).to(dtype)[place]
    return out.reshape(*slots.shape, out.shape[1])


def _attend(q: Tensor, entries: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, H, D], entries [B, K, D], valid [B, K] -> out [B, H, 512], lse [B, H] (+inf and 0 where nothing is
    valid)."""
    scores = (q @ entries.transpose(1, 2)).mul_(scale).masked_fill_(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    empty = ~valid.any(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(empty[:, None], 0.0)[..., None])
    return weights @ entries[..., :VALUE_DIM], lse.masked_fill(empty[:, None], torch.inf)


def sparse_mla_decode(
    q: Tensor,
    pool: Tensor,
    indices: Tensor,
    *,
    layout: str = "v4-mla-fp8",
    page_tokens: int = 64,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    extra_pool: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_page_tokens: int = 64,
    extra_layout: str | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One decode step over selected entries.

    q [B, H, D] (D 512, or 576 for v32-mla-fp8); pool uint8 [pages, page_bytes]; indices int32 [B, K] slots, -1 = hole
    anywhere; softmax_scale defaults to D**-0.5; sink float [H], -inf = none; topk_length int [B]: only the first n
    indices count. The extra cache has its own layout and page size; one softmax covers both (V4: the window is the
    main cache, the compressed entries are the extra one; an entry in both counts twice, by design).
    -> out [B, H, 512] and lse [B, H] in `dtype`: natural log, without the sink, +inf where a row has no entry (its
    out is 0). Raises ValueError for a slot outside the pool or shapes that do not fit.
    """
    if q.ndim != 3 or indices.ndim != 2 or len(indices) != len(q):
        raise ValueError(f"q [B, H, D] with indices [B, K], got {tuple(q.shape)} and {tuple(indices.shape)}")
    if q.shape[-1] != layout_of(layout).dim:
        raise ValueError(f"layout {layout} holds {layout_of(layout).dim} numbers an entry, q has {q.shape[-1]}")
    if (extra_pool is None) != (extra_indices is None):
        raise ValueError("extra_pool and extra_indices go together")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    slots = _limited(indices, topk_length)
    entries = gather_entries(pool, slots, layout, page_tokens, dtype)
    if extra_pool is not None and extra_indices is not None:
        extra_slots = _limited(extra_indices, extra_topk_length)
        more = gather_entries(extra_pool, extra_slots, extra_layout or layout, extra_page_tokens, dtype)
        entries, slots = torch.cat((entries, more), dim=1), torch.cat((slots, extra_slots), dim=1)
    out, lse = _attend(q.to(dtype), entries, slots >= 0, scale)
    return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse


def _limited(indices: Tensor, length: Tensor | None) -> Tensor:
    if length is None:
        return indices
    order = torch.arange(indices.shape[1], device=indices.device)
    return torch.where(order < length[:, None], indices, -1)


def sink_factor(lse: Tensor, sink: Tensor) -> Tensor:
    """What a sink leaves of the output: sigmoid(lse - sink), for lse [..., H] and sink [H]; 1 at sink -inf, 0 at
    +inf."""
    empty = torch.isinf(lse) & (lse > 0)
    return torch.sigmoid(lse.masked_fill(empty, 0.0) - sink.to(lse.dtype))


def sparse_mla_partials(
    q: Tensor, pool: Tensor, indices: Tensor, splits: int, *, layout: str = "v4-mla-fp8", page_tokens: int = 64,
    softmax_scale: float | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Split-K: the index list cut into `splits` nearly equal runs, each attended alone.

    -> outs [S, B, H, 512], each normalised by its own softmax, and lses [S, B, H] (natural log, +inf for an empty
    part).
    """
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    options = {"layout": layout, "page_tokens": page_tokens, "softmax_scale": softmax_scale, "dtype": dtype}
    parts = [sparse_mla_decode(q, pool, part, **options) for part in torch.tensor_split(indices, splits, dim=1)]  # type: ignore[arg-type]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def merge_partials(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One softmax from its parts: outs [S, B, H, D], lses [S, B, H] natural log, +inf (or -inf) = that part had no key.

    out = sum_i exp(lse_i - lse) out_i with lse = ln sum_i exp(lse_i); a sink [H] then scales out by sigmoid(lse -
    sink).
    -> (out [B, H, D], lse [B, H]), lse without the sink and +inf where no part had a key.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs [S, B, H, D] with lses [S, B, H], got {tuple(outs.shape)} and {tuple(lses.shape)}")
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    lse = torch.logsumexp(lses, dim=0)
    none = empty.all(dim=0)
    weights = torch.exp(lses - lse.masked_fill(none, 0.0)).masked_fill(empty, 0.0)
    out = (weights[..., None] * outs.masked_fill(empty[..., None], 0.0)).sum(dim=0)
    lse = lse.masked_fill(none, torch.inf)
    return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse
