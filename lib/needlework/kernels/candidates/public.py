"""Adapters of public kernels: what each wants its arguments to look like. Nothing of a package is imported before it
is used.

Each entry was written against the version in `source`; a later one may want other arguments, and then a case fails
with the kernel's own message. Wheels can be unpacked beside the environment: `pip install --no-deps --target DIR
PACKAGE` and DIR on PYTHONPATH is enough for all of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from needlework.kernels.candidates import public_triton
from needlework.kernels.candidates.public_triton import only, package_file

Function = Callable[..., Any]


@dataclass(frozen=True)
class Public:
    """operation; package as imported, and as installed; build(load_file) -> function; needs_cuda; source with
    version."""

    operation: str
    package: str
    install: str
    build: Callable[[Callable[[Path], Any]], Function]
    source: str
    needs_cuda: bool = True
    also: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why it cannot run here, or "". Looks for the package without importing it."""
        absent = [name for name in (self.package, *self.also) if importlib.util.find_spec(name) is None]
        if absent:
            return f"not here (no package {', '.join(absent)}): install {self.install}"
        if self.needs_cuda and not torch.cuda.is_available():
            return "not here: it needs a CUDA device"
        return ""


def footer_view(pool: Tensor, page_tokens: int) -> Tensor:
    """V4 pages as the public kernels want to see them: [pages, P, 1, 584], strided by whole pages. The 584 is a
    fiction."""
    return pool.as_strided((len(pool), page_tokens, 1, 584), (pool.stride(0), 584, 584, 1))


class OneConfig:
    """A kernel without its autotuner (which Triton's interpreter cannot run), launched with one of its
    configurations."""

    def __init__(self, kernel: Any, **config: int) -> None:
        self.kernel, self.config = kernel, config

    def __getitem__(self, grid: Any) -> Function:
        return lambda *args, **more: self.kernel[grid](*args, **more, **self.config)


def _sm120(load_file: Callable[[Path], Any]) -> Function:
    module = load_file(package_file("sglang", "kernels/ops/attention/flash_mla_sm120_triton.py"))
    tuned = module._tiled_sparse_decode_kernel
    if not torch.cuda.is_available():
        module._tiled_sparse_decode_kernel = OneConfig(tuned.fn, BLOCK_T=16)

    def decode(q, pool, indices, *, layout="v4-mla-fp8", page_tokens=64, softmax_scale=None, sink=None, extra_pool=None,
               extra_indices=None, extra_page_tokens=64, extra_layout=None, topk_length=None,
               extra_topk_length=None):  # fmt: skip
        only(layout == "v4-mla-fp8" and extra_layout in (None, layout), "V4 pages")
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        extra = None if extra_pool is None else footer_view(extra_pool, extra_page_tokens)

        def run(with_sink):
            return module.flash_mla_sparse_decode_triton(
                q.to(torch.bfloat16).unsqueeze(1), footer_view(pool, page_tokens), indices.unsqueeze(1), topk_length,
                with_sink, 512, scale, extra, extra_indices, extra_topk_length,
            )  # fmt: skip

        out, lse = run(sink)
        if sink is not None:  # this kernel counts the sink into its log-sum-exp, the reference does not
            lse = run(None)[1]
        return out.squeeze(1), lse.reshape(q.shape[:2])

    return decode


def _merge_state(load_file: Callable[[Path], Any]) -> Function:
    module = load_file(package_file("sglang", "kernels/ops/attention/merge_state.py"))

    def merge(outs, lses, sink=None):
        out, lse = outs[0].contiguous(), lses[0].contiguous()
        for part, level in zip(outs[1:], lses[1:], strict=True):
            out, lse = module.merge_state_triton(out, lse, part.contiguous(), level.contiguous())
        if sink is not None:  # this kernel knows no sink: what an engine does after it
            out = out * torch.sigmoid(lse - sink)[..., None]
        return out, lse

    return merge


def _deep_gemm(load_file: Callable[[Path], Any]) -> Function:
    import deep_gemm

    def logits(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
        only(layout == "dsa-index-fp8" and page_tokens == 64, "dsa-index-fp8 pages of 64")
        only(q.shape[-2] in (32, 64), "32 or 64 heads")
        rows = q if q.ndim == 4 else q[:, None]
        lens = (lengths if lengths.ndim == 2 else lengths[:, None]).to(torch.int32).contiguous()
        cache = pool.as_strided((len(pool), 64, 1, 132), (pool.stride(0), 132, 132, 1))
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        plan = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, processors)
        out = deep_gemm.fp8_paged_mqa_logits(
            rows.to(torch.float8_e4m3fn).contiguous(), cache,
            weights.reshape(-1, q.shape[-2]).float().contiguous(), lens,
            page_table.contiguous(), plan, page_table.shape[1] * 64, clean_logits=False,
        )  # fmt: skip
        return out.reshape(*q.shape[:-2], -1)

    return logits


def _flash_mla(load_file: Callable[[Path], Any]) -> Function:
    import flash_mla

    def decode(q, pool, indices, *, layout="v4-mla-fp8", page_tokens=64, softmax_scale=None, sink=None, extra_pool=None,
               extra_indices=None, extra_page_tokens=64, extra_layout=None, topk_length=None,
               extra_topk_length=None):  # fmt: skip
        only(layout in ("v4-mla-fp8", "v32-mla-fp8") and extra_layout in (None, layout), "V4 or V3.2 pages")
        only(q.shape[1] in (64, 128), "64 or 128 heads")
        v4 = layout == "v4-mla-fp8"

        def cache(pages, tokens):
            row = 584 if v4 else 656
            return pages.as_strided((len(pages), tokens, 1, row), (pages.stride(0), row, row, 1))

        def padded(slots):  # the kernel works in blocks of 64 indices
            return torch.nn.functional.pad(slots, (0, -slots.shape[1] % 64), value=-1)[:, None].contiguous()

        more = {} if extra_pool is None else {
            "extra_k_cache": cache(extra_pool, extra_page_tokens), "extra_indices_in_kvcache": padded(extra_indices),
            "extra_topk_length": extra_topk_length,
        }  # fmt: skip
        out, lse = flash_mla.flash_mla_with_kvcache(
            q.to(torch.bfloat16)[:, None].contiguous(), cache(pool, page_tokens), None, None, 512,
            flash_mla.get_mla_metadata()[0], None, softmax_scale=softmax_scale, causal=False, is_fp8_kvcache=True,
            indices=padded(indices), attn_sink=sink, topk_length=topk_length, use_legacy=True,
            kv_format="V4" if v4 else "V32", **more,
        )  # fmt: skip
        return out[:, 0], lse.reshape(q.shape[:2])

    return decode


@cache
def topk_module(version: int) -> Any:
    """SGLang's JIT selection, built from the wheel's CUDA sources with tvm_ffi (needs nvcc; about ten seconds)."""
    import tvm_ffi.cpp

    source = package_file("sglang", f"kernels/jit/csrc/deepseek_v4/topk_v{version}.cuh")
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    exports = ["transform"] if version == 1 else ["transform_paged", "plan"]
    lines = [f'#include "{source}"']
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, (sglang::TopKKernel<true>::{name}));" for name in exports]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++20", "-O3", "--expt-relaxed-constexpr",
             f"-DSGL_CUDA_ARCH={major}{minor}0"]  # fmt: skip
    include = [str(package_file("sglang", "kernels/jit/include"))]
    name, text = f"needlework_topk_v{version}", "\n".join(lines)
    return tvm_ffi.cpp.load_inline(name, cuda_sources=text, extra_cuda_cflags=flags, extra_include_paths=include)


def _topk(version: int) -> Callable[[Callable[[Path], Any]], Function]:
    def select(logits, lengths, k, page_table=None, *, page_tokens=64):
        only(page_table is not None, "a page table")
        only(k <= (1024 if version == 1 else 2048), f"k up to {1024 if version == 1 else 2048}")
        module, out = topk_module(version), torch.empty((len(logits), k), dtype=torch.int32, device=logits.device)
        lens, table = lengths.to(torch.int32).contiguous(), page_table.contiguous()
        if version == 1:
            module.transform(logits, lens, table, out, page_tokens, None)
        else:
            plan = torch.zeros((len(logits) + 1, 2), dtype=torch.int32, device=logits.device)
            module.plan(lens, plan, -1)
            module.transform_paged(logits, lens, table, out, page_tokens, plan, None)
        return out

    return lambda load_file: select


PUBLIC = {
    "sglang-sm120-triton": Public("sparse_mla_decode", "sglang", "sglang==0.5.23 (--no-deps is enough)", _sm120,
        "sglang 0.5.23 kernels/ops/attention/flash_mla_sm120_triton.py", needs_cuda=False, also=("triton",)),
    "flash_mla": Public("sparse_mla_decode", "flash_mla", "sgl-flash-mla==1.0.0", _flash_mla, "sgl-flash-mla 1.0.0"),
    "deep_gemm": Public("indexer_logits", "deep_gemm", "sgl-deep-gemm==0.1.2 and apache-tvm-ffi==0.1.9", _deep_gemm,
        "sgl-deep-gemm 0.1.2 fp8_paged_mqa_logits"),
    "sglang-topk-v1": Public("select_topk", "sglang", "sglang==0.5.23 (--no-deps is enough) and apache-tvm-ffi==0.1.9",
        _topk(1), "sglang 0.5.23 kernels/jit/csrc/deepseek_v4/topk_v1.cuh", also=("tvm_ffi",)),
    "sglang-topk-v2": Public("select_topk", "sglang", "sglang==0.5.23 (--no-deps is enough) and apache-tvm-ffi==0.1.9",
        _topk(2), "sglang 0.5.23 kernels/jit/csrc/deepseek_v4/topk_v2.cuh", also=("tvm_ffi",)),
    "sglang-merge-state": Public("merge_partials", "sglang", "sglang==0.5.23 (--no-deps is enough)", _merge_state,
        "sglang 0.5.23 kernels/ops/attention/merge_state.py", needs_cuda=False, also=("triton",)),
    "sglang-act-quant": Public("store_index_keys", "sglang", "sglang==0.5.23 (--no-deps is enough)",
        public_triton.sglang_act_quant, "sglang 0.5.23 kernels/ops/quantization/act_quant_triton.py", also=("triton",)),
    "sglang-transform-index": Public("select_topk", "sglang", "sglang==0.5.23 (--no-deps is enough)",
        public_triton.sglang_transform_index, "sglang 0.5.23 kernels/ops/attention/dsa/transform_index.py",
        needs_cuda=False, also=("triton",)),
    "sglang-sparse-mla": Public("sparse_mla_decode", "sglang", "sglang==0.5.23 (--no-deps is enough)",
        public_triton.sglang_sparse_mla, "sglang 0.5.23 kernels/ops/attention/dsa/triton_sparse_mla_prefill.py",
        also=("triton",)),
    "vllm-sparse-mla": Public("sparse_mla_decode", "vllm", "vllm==0.23.0 (--no-deps is enough)",
        public_triton.vllm_sparse_mla, "vllm 0.23.0 models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py", also=("triton",)),
    "vllm-merge-attn-states": Public("merge_partials", "vllm", "vllm==0.23.0 (--no-deps is enough)",
        public_triton.vllm_merge, "vllm 0.23.0 v1/attention/ops/triton_merge_attn_states.py", needs_cuda=False,
        also=("triton",)),
}  # fmt: skip
