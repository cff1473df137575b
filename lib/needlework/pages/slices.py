"""Values of a pool in plain torch: slices of pages that meet a core's cache between one step and the next.

A core takes slice after slice by itself, so that no step waits for another core; torch's own threads would meet at the
end of every step, some microseconds of work each.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import formats

if TYPE_CHECKING:
    from .layout import Layout

SLICE_VALUES = 1 << 18  # half a MiB of halves and one of floats: within the second cache of a server's core
GPU_SLICE_VALUES = 1 << 24  # a GPU's kernels want millions of values a launch


def values(layout: Layout, pool: Tensor, page_tokens: int, out: Tensor) -> None:
    """Write float32 values of `pool` uint8 [pages, page_bytes] into `out` [pages, page_tokens, dim], on any device.

    On a CPU as many threads as torch is set to use (torch.get_num_threads()). Memory of its own: about four bytes for
    each value of one slice and thread. The caller has checked shapes (`Layout.values`).
    """
    step = max(1, (GPU_SLICE_VALUES if pool.is_cuda else SLICE_VALUES) // (page_tokens * layout.dim))
    firsts = iter(range(0, len(pool), step))  # shared: whichever thread is free takes the next slice
    threads = 1 if pool.is_cuda else min(torch.get_num_threads(), -(-len(pool) // step))
    if threads == 1:
        return _work(layout, pool, page_tokens, out, firsts, step)
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            jobs = [workers.submit(_work, layout, pool, page_tokens, out, firsts, step) for _ in range(threads)]
            for job in jobs:
                job.result()
    finally:
        torch.set_num_threads(before)  # what the workers set is also what later threads would start with


def _work(layout: Layout, pool: Tensor, page_tokens: int, out: Tensor, firsts: Iterator[int], step: int) -> None:
    codes, scales = layout["codes"], layout["scales"]
    scratch = torch.empty(min(step, len(pool)), page_tokens, codes.count, dtype=torch.int16, device=pool.device)
    for first in firsts:
        part, target = pool[first : first + step], out[first : first + step]
        scale = formats.decode(scales.stored(part, page_tokens), scales.format)
        formats.dequantise(
            codes.stored(part, page_tokens), codes.format, scale, target[..., : codes.count], scratch[: len(part)]
        )
        if "rope" in layout:
            target[..., codes.count :] = layout["rope"].stored(part, page_tokens)
