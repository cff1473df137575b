"""Where the Triton twins run: compiled on a CUDA device, or in Triton's interpreter where there is none.

Import this module before `triton`: Triton chooses between its compiler and its interpreter when a kernel is defined,
and without a CUDA device only the interpreter works. The interpreter gives right results slowly, and says nothing
about compilation or speed on a GPU. What it gets wrong (triton 3.9.0: bf16 products and rounding, fp8 encoding) the
kernels avoid: they multiply in float32 there and encode fp8 with integer arithmetic everywhere.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
except ImportError as missing:
    raise ImportError("the Triton twins need the package triton (Linux only): pip install 'triton>=3.7.1'") from missing

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True where the kernels run in Triton's interpreter."""


LAUNCH: dict[str, bool] = {"PDL": False}
"""How every kernel is launched. PDL, programmatic dependent launch (compute capability 9.0 and later): a kernel is set
up while the one before it still runs, and waits for it before its first read."""
if not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
    LAUNCH |= {"PDL": True, "launch_pdl": True}


def where() -> str:
    """One sentence: what the Triton kernels run on here."""
    if INTERPRETED:
        return (
            f"Triton {triton.__version__} runs in its interpreter on the CPU (no CUDA device, or TRITON_INTERPRET is "
            "set): results count, times do not."
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CUDA device, and there is none here"
    return f"Triton {triton.__version__} compiles for {device}."


logging.getLogger(__name__).info(where())


def check_device(*tensors: Tensor | None) -> None:
    """Raise ValueError where tensors lie on different devices, or on one that the kernels cannot run on."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must lie on one device, found {', '.join(sorted(map(str, devices)))}")
    if not INTERPRETED and next(iter(devices)).type != "cuda":
        raise ValueError("the Triton kernels were compiled for CUDA: move the tensors there, or set TRITON_INTERPRET=1")


def check_pool(pool: Tensor, page_bytes: int, multiple: int) -> None:
    """Raise ValueError unless `pool` is uint8 [pages, >= page_bytes] whose pages start at multiples of `multiple`."""
    if pool.dtype != torch.uint8 or pool.ndim != 2 or pool.shape[1] < page_bytes or pool.stride(1) != 1:
        raise ValueError(
            f"a pool is uint8 [pages, {page_bytes:,} bytes] with contiguous pages; "
            f"found {pool.dtype} {list(pool.shape)} with strides {list(pool.stride())}"
        )
    if pool.stride(0) % multiple or pool.data_ptr() % multiple:
        raise ValueError(f"pages must start at a multiple of {multiple} bytes; the stride is {pool.stride(0)}")


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 in the interpreter, which runs one program at a time."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take on a CUDA device."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
