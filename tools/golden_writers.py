"""Run SGLang's own page writers on a CUDA device and keep what they wrote, as test data.

    python tools/golden_writers.py --out tests/data/golden/writer_pages_b.npz

Needs a sglang 0.5.23 wheel unpacked on PYTHONPATH (--no-deps is enough), apache-tvm-ffi and nvcc: the writers are built
from the wheel's `store.cuh`. One set of rows goes through every writer and page size: ordinary rows, and rows that a
rounding gets wrong (zero rows, equal values, halves between codes, signed zeros, values from 1e-38 to 3e38). The file
holds the rows as bf16 bits, the slots, and each pool after the write; what was not written still holds 0xA5.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

PAGES = (2, 64, 256)
FLASH_MLA = {"V4": "v4-mla-fp8", "V41": "v41-mla-fp8", "V41_FP4": "v41-mla-fp4", "V41_NEW": "v41-mla-fp8-interleaved",
             "V41_FP4_NEW": "v41-mla-fp4-interleaved"}  # fmt: skip
LAYOUT_NAMES = {"idx": "dsa-index-fp8", **FLASH_MLA}
UNTOUCHED = 0xA5


def rows(width: int) -> torch.Tensor:
    """bf16 [48, width]: sixteen ordinary rows of growing size, then the awkward ones."""
    g = torch.Generator().manual_seed(20261129 + width)
    x = torch.randn(48, width, generator=g) * torch.logspace(-6, 4, 48)[:, None]
    x[16], x[17], x[18] = 0.0, -0.0, 1.0
    x[19] = torch.linspace(-448, 448, width)
    x[20] = (torch.arange(width) % 129 - 64) / 64 * 6  # multiples of 3/32: halves between fp4 and fp8 codes
    x[21] = torch.where(torch.arange(width) % 2 == 0, 448.0, -448.0)
    x[22] = 2.0 ** (torch.arange(width) % 24 - 16).float()
    x[23] = torch.randn(width, generator=g) * 1e-38
    x[24] = torch.randn(width, generator=g).clamp(-3, 3) * 1e38
    x[25, ::7] = 0.0
    x[26] = torch.where(torch.rand(width, generator=g) < 0.02, 1000.0, 1e-3)
    x[27] = 1e-4 * torch.rand(width, generator=g)  # under the floor of the largest magnitude
    return x.to(torch.bfloat16)


def build(pages: tuple[int, ...]):
    """The writers as one module: functions `<layout>_<page>`."""
    import tvm_ffi.cpp
    from needlework.kernels.candidates.public_triton import package_file

    source = package_file("sglang", "kernels/jit/csrc/deepseek_v4/store.cuh")
    exports = []
    for page in pages:
        for name in FLASH_MLA:
            kernel = (f"sglang::FusedStoreCacheFlashMLAKernel<__nv_bfloat16, int64_t, {page}, "
                      f"sglang::deepseek_v4::KVLayout::{name}, true>::run")  # fmt: skip
            exports.append(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}_{page}, ({kernel}));")
        kernel = f"sglang::FusedStoreCacheIndexerKernel<__nv_bfloat16, int64_t, {page}, true>::run"
        exports.append(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(idx_{page}, ({kernel}));")
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    return tvm_ffi.cpp.load_inline(
        "needlework_golden_writers", cuda_sources="\n".join([f'#include "{source}"', *exports]),
        extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++20", "-O3",
                           "--expt-relaxed-constexpr", f"-DSGL_CUDA_ARCH={major}{minor}0"],
        extra_include_paths=[str(source.parents[2] / "include")],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from needlework.pages import LAYOUTS

    module = build(PAGES)
    out: dict[str, np.ndarray] = {"pages": np.array(PAGES)}
    for width in (128, 512):
        out[f"x{width}"] = rows(width).view(torch.int16).numpy()
    for page in PAGES:
        capacity = -(-48 // page) * page + page
        slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(page))[:48]
        out[f"slots_{page}"] = slots.numpy()
        for name, layout in LAYOUT_NAMES.items():
            size = LAYOUTS[layout].page_bytes(page)
            pool = torch.full((capacity // page, size), UNTOUCHED, dtype=torch.uint8, device="cuda")
            x = rows(128 if name == "idx" else 512).cuda()
            getattr(module, f"{name}_{page}")(x, pool, slots.cuda())
            torch.cuda.synchronize()
            out[f"{name}_{page}"] = pool.cpu().numpy()
            mine = torch.full_like(pool, UNTOUCHED).cpu()
            LAYOUTS[layout].scatter(mine, slots, x.float().cpu(), page)
            print(f"{name:12s} page {page:3d}: {int((mine != pool.cpu()).sum())} of {pool.numel():,} bytes differ",
                  flush=True)  # fmt: skip
    np.savez_compressed(options.out, allow_pickle=False, **out)
    print(f"{options.out.name}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
