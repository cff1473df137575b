"""Index keys and their logits, in plain torch: what the sparse indexer stores, and the score that decides what is read.

The score of key j for one query (sglang 0.5.23 `srt/layers/attention/dsv4/indexer.py`, DeepGEMM
`tests/test_attention.py`):

    logit[j] = s_k[j] * sum_h w[h] * max(0, q[h] . k8[j])

q is what the kernel multiplies (fp8 codes as numbers); the query's own scale, 1/sqrt(128) and 1/sqrt(heads) are already
in w. The key scale stands outside the ReLU, so a broken (negative) scale turns the sign of a logit instead of
clearing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlework.pages import LAYOUTS, Layout, formats, layout_of

INDEX_DIM = 128


def quantize_index_keys(
    keys: Tensor, *, layout: str = "dsa-index-fp8", writer: str | None = None
) -> tuple[Tensor, Tensor]:
    """Index keys as fp8: one float32 scale for each row of 128 numbers.

    keys [N, 128], any float dtype -> codes uint8 [N, 128] (e4m3fn bits), scales float32 [N]. scale = max(amax, 1e-4) /
    448 (sglang 0.5.23 `kernels/jit/csrc/dsa/fused_store_index_cache.cuh`); layout "dsa-index-fp8-ue8m0" rounds it up to
    a power of two. `writer` picks another public writer of that layout. Raises ValueError for another row width.
    """
    if keys.ndim != 2 or keys.shape[1] != INDEX_DIM:
        raise ValueError(f"index keys must be [N, {INDEX_DIM}], got {tuple(keys.shape)}")
    stored = LAYOUTS[layout].quantise(keys, writer)
    return stored["codes"], stored["scales"][:, 0]


def store_index_keys(pool: Tensor, slots: Tensor, keys: Tensor, page_tokens: int = 64) -> None:
    """Quantise keys [N, 128] and write them at slots [N] of an index pool, uint8 [pages, 8448] for 64-token pages, in
    place.

    slot = page * page_tokens + offset; slot -1 is skipped. Values and scales lie in two blocks of a page: 128 bytes at
    offset * 128 and 4 bytes at page_tokens * 128 + offset * 4. Raises ValueError for shapes that do not fit.
    """
    if slots.ndim != 1 or len(slots) != len(keys):
        raise ValueError(f"one slot per key: {tuple(slots.shape)} slots for {tuple(keys.shape)} keys")
    LAYOUTS["dsa-index-fp8"].scatter(pool, slots, keys.to(torch.float32), page_tokens=page_tokens)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform over the last axis (a power of two long): scaled by 1/sqrt(n), its own
    inverse.

    The official V4 script rotates queries and index keys with it before fp8; done on both sides it leaves every
    dot product as it was, on one side it destroys all of them.
    """
    n = x.shape[-1]
    if n == 0 or n & (n - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got {n}")
    out, width = x, 1
    while width < n:
        pairs = out.reshape(*x.shape[:-1], n // (2 * width), 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out, width = torch.stack((a + b, a - b), dim=-2).reshape(x.shape), width * 2
    return out * n**-0.5


def visible_keys(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed keys a query at each position may score: (p + 1) div ratio. The token that completes a
    group sees it."""
    return (positions + 1) // ratio


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    page_tokens: int = 64,
    layout: str = "dsa-index-fp8",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Score every index key of each request.

    q [B, H, D] (or [B, N, H, D]) float or fp8; weights [B, H] (or [B, N, H]) float32; pool uint8 [pages, page_bytes];
    page_table int32 [B, max_pages], -1 = hole; lengths int32 [B] (or [B, N]): the exclusive end of each row, in keys.
    -> [B, max_pages * page_tokens] (or [B, N, ...]) in `dtype`, -inf at and past the length and in holes.
    Only pages below the longest row of a request are read. Raises ValueError for shapes that do not fit.
    """
    if q.ndim == 3:
        out = indexer_logits(
            q[:, None],
            weights[:, None],
            pool,
            page_table,
            lengths[:, None],
            page_tokens=page_tokens,
            layout=layout,
            dtype=dtype,
        )
        return out[:, 0]
    batch, rows, heads, _ = q.shape
    if weights.shape != (batch, rows, heads) or lengths.shape != (batch, rows) or page_table.shape[0] != batch:
        raise ValueError(
            f"q {tuple(q.shape)} needs weights {(batch, rows, heads)} and lengths {(batch, rows)}, "
            f"got {tuple(weights.shape)} and {tuple(lengths.shape)}, page table {tuple(page_table.shape)}"
        )
    width = page_table.shape[1] * page_tokens
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > width:
        raise ValueError(f"length {longest} does not fit in {page_table.shape[1]} pages of {page_tokens} keys")
    out = torch.full((batch, rows, width), -torch.inf, dtype=dtype, device=q.device)
    for b in range(batch):
        used = -(-int(lengths[b].max()) // page_tokens)
        ids = page_table[b, :used].long()
        there = torch.nonzero(ids >= 0).flatten()
        if not len(there):
            continue
        keys, scales = _keys_and_scales(pool, ids[there], layout_of(layout), page_tokens, dtype)
        columns = (there[:, None] * page_tokens + torch.arange(page_tokens, device=q.device)).flatten()
        for n in range(rows):
            dots = torch.relu_(q[b, n].to(dtype) @ keys.T)
            row = (weights[b, n].to(dtype) @ dots) * scales
            out[b, n, columns] = row.masked_fill_(columns >= lengths[b, n], -torch.inf)
    return out


def _keys_and_scales(
    pool: Tensor, pages: Tensor, layout: Layout, page_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys of some pages without their scale [L, D], and the scale [L], where a row has one; else dequantised keys
    and ones."""
    layout.check(pool, page_tokens)
    if layout["scales"].count > 1:
        keys = layout.decode(pool[pages], page_tokens)["values"].reshape(-1, layout.dim).to(dtype)
        return keys, torch.ones(len(keys), dtype=dtype, device=keys.device)
    stored = [
        layout[name].take(pool, page_tokens, pages).reshape(len(pages) * page_tokens, -1)
        for name in ("codes", "scales")
    ]
    keys = formats.decode(stored[0], layout["codes"].format).to(dtype)
    return keys, stored[1].view(torch.float32)[:, 0].to(dtype)
