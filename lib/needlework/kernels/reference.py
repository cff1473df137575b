"""The references: what each kernel must compute, in plain torch, float32 by default and float64 on request.

A pool is uint8 [pages, page_bytes]; a page table is int32 [B, max_pages] with -1 for a hole; a slot is page_id *
page_tokens + offset. Each function says its shapes, its convention where public kernels differ, and its source.
"""

from __future__ import annotations

from needlework.kernels.attention import (
    gather_entries,
    merge_partials,
    sink_factor,
    sparse_mla_decode,
    sparse_mla_partials,
)
from needlework.kernels.compress import (
    CompressorState,
    RingCompressor,
    compress_c4,
    compress_c128,
    finish_index_keys,
    rms_norm,
    rope_frequencies,
    rotate,
)
from needlework.kernels.indexing import hadamard, indexer_logits, quantize_index_keys, store_index_keys, visible_keys
from needlework.kernels.mhc import mhc_enter, mhc_head, mhc_leave, mhc_mix, mhc_project, mhc_weights, sinkhorn
from needlework.kernels.router import router_hash, router_scores, router_topk
from needlework.kernels.selection import select_topk, slots_of

__all__ = [
    "CompressorState",
    "RingCompressor",
    "compress_c4",
    "compress_c128",
    "finish_index_keys",
    "gather_entries",
    "hadamard",
    "indexer_logits",
    "merge_partials",
    "mhc_enter",
    "mhc_head",
    "mhc_leave",
    "mhc_mix",
    "mhc_project",
    "mhc_weights",
    "quantize_index_keys",
    "rms_norm",
    "rope_frequencies",
    "rotate",
    "router_hash",
    "router_scores",
    "router_topk",
    "select_topk",
    "sink_factor",
    "sinkhorn",
    "slots_of",
    "sparse_mla_decode",
    "sparse_mla_partials",
    "store_index_keys",
    "visible_keys",
]
