"""The kernels that a serving process calls, held against the reference inside that process: what vLLM's and SGLang's
workers share. Both call DeepGEMM for the indexer's scores and FlashMLA for sparse decode, each through its own module;
here are the arguments as those functions take them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

INDEX_BYTES, MLA_BYTES, PAGE_TOKENS = 132, 656, 64  # bytes an entry: 128 e4m3 + f32; 512 e4m3 + 4 f32 + 64 bf16
SCORES, DECODE = "indexer_logits", "sparse_mla_decode"


def scoring_arguments(q, weights, pool, lengths, page_tokens: int, layout: str) -> tuple[Any, Any, Any, Any]:
    """The reference's arguments as DeepGEMM takes them: fp8 queries [B, N, H, D], pages [pages, 64, 1, 132], weights
    [B*N, H], lengths [B, N]. Raises ValueError for what the kernel does not take."""
    import torch

    if layout != "dsa-index-fp8" or page_tokens != PAGE_TOKENS or q.shape[-2] not in (32, 64):
        raise ValueError("this kernel takes dsa-index-fp8 pages of 64, and 32 or 64 heads")
    rows = (q if q.ndim == 4 else q[:, None]).to(torch.float8_e4m3fn).contiguous()
    lens = (lengths if lengths.ndim == 2 else lengths[:, None]).to(torch.int32).contiguous()
    cache = pool.as_strided((len(pool), PAGE_TOKENS, 1, INDEX_BYTES), (pool.stride(0), INDEX_BYTES, INDEX_BYTES, 1))
    return rows, cache, weights.reshape(-1, q.shape[-2]).float().contiguous(), lens


def decode_arguments(q, pool, indices, page_tokens: int, layout: str, more: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The reference's arguments as FlashMLA takes them: queries [B, 1, H, D] bf16, pages [pages, 64, 1, 656], slots
    [B, 1, K] with K a multiple of 64. Raises ValueError for what the kernel does not take."""
    import torch

    if layout != "v32-mla-fp8" or q.shape[1] not in (64, 128) or any(value is not None for value in more.values()):
        raise ValueError("this kernel takes V3.2 pages of one pool, and 64 or 128 heads")
    cache = pool.as_strided((len(pool), page_tokens, 1, MLA_BYTES), (pool.stride(0), MLA_BYTES, MLA_BYTES, 1))
    slots = torch.nn.functional.pad(indices, (0, -indices.shape[1] % 64), value=-1)[:, None].contiguous()
    return q.to(torch.bfloat16)[:, None].contiguous(), cache, slots


def run(functions: Mapping[tuple[str, str], Callable[..., Any]], path: str | Path, size: str, note: str) -> list[str]:
    """Check each (name, operation) -> function and write all cases to `path` as JSON; returns the verdicts' words."""
    from needlework.kernels import check
    from needlework.kernels.candidates import Candidate
    from needlework.kernels.check.suites import suite

    cases = [case for case in suite(DECODE, size) if "V4.1" not in case.name]
    chosen = {DECODE: [replace(case, layout="v32-mla-fp8") for case in cases]}  # the pages of these engines
    found = []
    for (name, operation), function in functions.items():
        candidate = Candidate(name, {operation: function}, needs_cuda=True, note=note)
        result = check(candidate, operation, chosen.get(operation), size=size)
        rows = json.loads(result.table.to_json(orient="records"))
        found.append({"candidate": name, "operation": operation, "passed": result.passed, "says": str(result),
                      "cases": rows})  # fmt: skip
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
    return [row["says"] for row in found]
