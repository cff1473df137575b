"""Values of a pool in plain torch: slices of pages that meet a core's cache between one step and the next.

A core takes slice after slice by itself, so that no step waits for another core; torch's own threads would meet at the
end of every step, some microseconds of work each. All views are made once: a step on a slice is one torch call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    On a CPU as many threads as torch is set to use (torch.get_num_threads()). Memory of its own: two bytes for each
    value of one slice and thread, and the scales of the whole pool in float32. The caller has checked shapes
    (`Layout.values`).
    """
    step = max(1, (GPU_SLICE_VALUES if pool.is_cuda else SLICE_VALUES) // (page_tokens * layout.dim))
    job = _Job(layout, pool, page_tokens, out)
    share(job.work, len(pool), step, 1 if pool.is_cuda else torch.get_num_threads())


def share(work: Callable[[Iterator[int], int], None], pages: int, step: int, threads: int) -> None:
    """Call `work(firsts, step)` on `threads` threads until the slices of `step` pages that begin at `firsts` are done:
    whichever thread is free takes the next one. In `work` torch itself uses one thread."""
    firsts = iter(range(0, pages, step))
    threads = min(threads, -(-pages // step))
    if threads == 1:
        return work(firsts, step)
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            for done in [workers.submit(work, firsts, step) for _ in range(threads)]:
                done.result()
    finally:
        torch.set_num_threads(before)  # what the workers set is also what later threads would start with


class _Job:
    """The views that every slice is cut from."""

    def __init__(self, layout: Layout, pool: Tensor, page_tokens: int, out: Tensor) -> None:
        self.format, self.shape = layout["codes"].format, (page_tokens, layout["codes"].count)
        codes = layout["codes"].view(pool, page_tokens)
        self.codes = codes if layout["codes"].tile else codes[:, :, 0, 0]  # fewer dimensions, faster reductions
        self.scales = formats.decode(layout["scales"].stored(pool, page_tokens), layout["scales"].format)
        self.target, self.rope, self.rest = out[..., : self.shape[1]], None, out[..., self.shape[1] :]
        if "rope" in layout:
            stored = layout["rope"].view(pool, page_tokens)[:, :, 0, 0]
            odd = stored.storage_offset() % 2 or any(step % 2 for step in stored.stride()[:-1])
            self.rope = (stored.contiguous() if odd else stored).view(torch.bfloat16)

    def work(self, firsts: Iterator[int], step: int) -> None:
        step = min(step, len(self.codes))
        scratch = torch.empty(step, *self.shape, dtype=torch.int16, device=self.codes.device)
        for first in firsts:
            part = slice(first, first + step)
            codes, target = self.codes[part], self.target[part]
            widened, bias = formats.halves(codes, self.format, scratch[: len(codes)])
            formats.scale_up(target.copy_(widened), self.scales[part], bias)
            if self.rope is not None:
                self.rest[part].copy_(self.rope[part])
