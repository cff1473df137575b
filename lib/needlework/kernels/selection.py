"""Top-k over index logits, in plain torch: which k keys the sparse attention may read, and where they lie."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(positions: Tensor, page_table: Tensor, page_tokens: int = 64) -> Tensor:
    """Positions int32 [B, k] (-1 = none) as pool slots: page_table[b, position // page_tokens] * page_tokens +
    position % page_tokens.

    A position in a hole of the table (-1), or past its last column, becomes -1. int32 [B, k].
    """
    column = (positions // page_tokens).long()
    inside = (positions >= 0) & (column < page_table.shape[1])
    page = page_table.gather(1, column.clamp(0, page_table.shape[1] - 1))
    slot = page * page_tokens + positions % page_tokens
    return torch.where(inside & (page >= 0), slot, -1).to(torch.int32)


def select_topk(
    logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None = None, *, page_tokens: int = 64
) -> Tensor:
    """The k best of the first `lengths[b]` logits of each row.

    logits [B, L] float; lengths int [B]; page_table int32 [B, max_pages] -> int32 [B, k], unsorted, -1 padded: slots
    where a page table is given, else positions. A row with at most k keys gives 0, 1, … length-1 in order, then -1
    (its logits are not looked at: sglang 0.5.23 and vllm 0.33.0 skip them). Among equal scores any choice is right.
    Columns at or past the length are never read. NaN counts as the largest score, as in torch.topk. Raises ValueError
    for shapes that do not fit.
    """
    if logits.ndim != 2 or lengths.shape != logits.shape[:1]:
        raise ValueError(f"logits [B, L] with lengths [B], got {tuple(logits.shape)} and {tuple(lengths.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if len(lengths) and int(lengths.max()) > logits.shape[1]:
        raise ValueError(f"a length of {int(lengths.max())} passes the {logits.shape[1]} columns of the logits")
    order = torch.arange(k, dtype=torch.int32, device=logits.device)
    picked = torch.where(order < lengths[:, None], order, -1).to(torch.int32)
    for b in torch.nonzero(lengths > k).flatten().tolist():
        picked[b] = torch.topk(logits[b, : int(lengths[b])], k, sorted=False).indices
    return picked if page_table is None else slots_of(picked, page_table, page_tokens)
