"""The Triton twins of the references: same signatures, on a CUDA device or in Triton's interpreter (`where()`)."""

from __future__ import annotations

from needlework.kernels.triton.index import indexer_logits, store_index_keys
from needlework.kernels.triton.mla import merge_partials, sparse_mla_decode
from needlework.kernels.triton.runtime import INTERPRETED, where
from needlework.kernels.triton.topk import select_topk

__all__ = [
    "INTERPRETED",
    "indexer_logits",
    "merge_partials",
    "select_topk",
    "sparse_mla_decode",
    "store_index_keys",
    "where",
]
