"""Adapters of public Triton files that run alone: one file of an installed package, loaded by its path.

Which of the files that touch sparse attention import alone (torch and triton only), and what is done with them:

* SGLang 0.5.23, `sglang/kernels/ops/`: `attention/flash_mla_sm120_triton.py` and `attention/merge_state.py` (in
  `public`), `attention/dsa/triton_sparse_mla_prefill.py`, `attention/dsa/transform_index.py` and
  `quantization/act_quant_triton.py` (here). Alone, but without an operation of ours: `attention/dsa/dequant_k_cache.py`
  and `quantization/dsa_quant_k_cache.py` (pages to numbers and back: `needlework.pages` is held against their bytes),
  `attention/dsa/triton_kernel.py` (compacts index lists), `attention/suffix_attention_merge.py` (attends to a dense
  suffix), `moe/triton_hash_topk.py` and `moe/gate_topk.py` (other routers than V4's scored one).
  Not alone, each imports `sglang.srt` or `sglang.kernels.jit`: `kvcache/dsa_index_k_cache.py`,
  `attention/dsa/triton_sparse_mla.py`, `attention/dsv4/*` (its fused decode, unified pages and FP4 indexer).
* vLLM 0.23.0: no file imports triton itself, all take it from `vllm.triton_utils`, which needs vLLM whole. Of those
  that want nothing else, `v1/attention/ops/xpu_mla_sparse.py` with `models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py`,
  and `v1/attention/ops/triton_merge_attn_states.py`, are here: `_vllm_file` gives them those names from triton itself.
  `v1/attention/backends/mla/sparse_utils.py` (slot translation), `models/deepseek_v4/common/ops/save_partial_states.py`
  and the fused norms would load the same way, but have no operation of ours. Not without vLLM:
  `v1/attention/ops/rocm_aiter_mla_sparse.py` (its index writer and logits), `backends/mla/indexer.py`,
  `deepseek_v4/common/ops/cache_utils.py`, `fused_compress_quant_cache.py` and `sparse_mla.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from needlework.kernels.reference import gather_entries, sink_factor, slots_of
from needlework.pages import LAYOUTS

Function = Callable[..., Any]
LoadFile = Callable[[Path], Any]


def package_file(package: str, relative: str) -> Path:
    """A file inside an installed package, without importing it. Raises ValueError where it is not there."""
    from importlib.util import find_spec

    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / relative
        if path.exists():
            return path
    raise ValueError(f"the installed {package} has no {relative}; this adapter was written for another version")


def only(condition: bool, what: str) -> None:
    """Refuse what a kernel does not take."""
    if not condition:
        raise ValueError(f"this kernel takes {what}")


# ---- SGLang ----------------------------------------------------------------------------------------------------------
def sglang_act_quant(load_file: LoadFile) -> Function:
    """The index keys' quantisation; the file does not write pages, so codes and scales are placed here. It divides
    where SGLang's page writer multiplies by the reciprocal, so that a few codes of bf16 keys fall to the neighbour."""
    module = load_file(package_file("sglang", "kernels/ops/quantization/act_quant_triton.py"))
    layout = LAYOUTS["dsa-index-fp8"]

    def store(pool, slots, keys, page_tokens=64):
        codes, scales = module.act_quant(keys.float().contiguous(), 128)
        live = slots >= 0
        page, offset = slots[live].long() // page_tokens, slots[live].long() % page_tokens
        for name, data in (("codes", codes.view(torch.uint8)), ("scales", scales.view(torch.uint8))):
            field = layout[name]
            field.view(pool, page_tokens)[(page, *field.place(offset))] = data[live].reshape(-1, 1, field.bytes)

    return store


def sglang_transform_index(load_file: LoadFile) -> Function:
    """Translation of positions to slots; positions are torch's, and the page table is spread out to one slot a key."""
    module = load_file(package_file("sglang", "kernels/ops/attention/dsa/transform_index.py"))
    from needlework.kernels.reference import select_topk

    def select(logits, lengths, k, page_table=None, *, page_tokens=64):
        only(page_table is not None, "a page table")
        every = torch.arange(page_table.shape[1] * page_tokens, device=logits.device).expand(len(logits), -1)
        slots = slots_of(every.int(), page_table, page_tokens).contiguous()
        positions = select_topk(logits, lengths, k).contiguous()
        return module.transform_index_page_table_decode(slots, positions)

    return select


def sglang_sparse_mla(load_file: LoadFile) -> Function:
    """Sparse attention over plain bf16 entries, one program a query; pages are decoded for it. It returns no
    log-sum-exp and knows no sink."""
    module = load_file(package_file("sglang", "kernels/ops/attention/dsa/triton_sparse_mla_prefill.py"))

    def decode(q, pool, indices, *, layout="v4-mla-fp8", page_tokens=64, softmax_scale=None, sink=None,
               topk_length=None, **extra):  # fmt: skip
        only(sink is None, "no sink")
        only(not any(value is not None for value in extra.values()), "one cache")
        only(layout in ("v4-mla-fp8", "v32-mla-fp8"), "V4 or V3.2 entries")
        if topk_length is not None:
            order = torch.arange(indices.shape[1], device=indices.device)
            indices = torch.where(order < topk_length[:, None], indices, -1)
        entries, slots = _gathered(pool, indices, layout, page_tokens)
        query = q.to(torch.bfloat16)
        if query.shape[-1] == 512:  # the file wants rotary numbers apart: V4 has none beside its 512
            query = torch.nn.functional.pad(query, (0, 64))
            entries = torch.nn.functional.pad(entries, (0, 64))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return module.sparse_mla_prefill(query, entries, slots, scale)

    return decode


def _gathered(pool: Tensor, indices: Tensor, layout: str, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Entries at indices [B, K] decoded to bf16 [B * K, dim], and their rows in it int32 [B, K], -1 in holes."""
    entries = gather_entries(pool, indices, layout, page_tokens, torch.float32).to(torch.bfloat16)
    rows = torch.arange(indices.numel(), dtype=torch.int32, device=indices.device).view(indices.shape)
    return entries.flatten(0, 1), torch.where(indices >= 0, rows, -1)


# ---- vLLM ------------------------------------------------------------------------------------------------------------
@contextmanager
def _vllm_names() -> Iterator[None]:
    """While a file loads: the names that vLLM's Triton files take from vLLM, as vLLM would resolve them on a GPU."""
    import triton
    import triton.language as tl

    names: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": []},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "LOG2E": math.log2(math.e), "LOGE2": math.log(2)},
        "vllm.platforms": {"current_platform": type("Platform", (), {"fp8_dtype": lambda self=None: E4M3})()},
    }
    kept = {name: sys.modules.get(name) for name in names}
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, before in kept.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before


E4M3 = torch.float8_e4m3fn


def _vllm_file(load_file: LoadFile, relative: str, **needs: Any) -> Any:
    """A file of vLLM without vLLM; `needs` are modules (dotted names with `__`) that it imports besides."""
    path = package_file("vllm", relative)
    with _vllm_names():
        more = {name.replace("__", "."): module for name, module in needs.items()}
        sys.modules.update(more)
        try:
            return load_file(path)
        finally:
            for name in more:
                del sys.modules[name]


def vllm_merge(load_file: LoadFile) -> Function:
    """Merge of two parts, called once for each part after the first."""
    module = _vllm_file(load_file, "v1/attention/ops/triton_merge_attn_states.py")

    def merge(outs, lses, sink=None):
        out, lse = outs[0].contiguous(), lses[0]
        for part, level in zip(outs[1:], lses[1:], strict=True):
            merged, total = torch.empty_like(out), torch.empty_like(lse.t().contiguous())
            module.merge_attn_states(
                merged, out, lse.t().contiguous(), part.contiguous(), level.t().contiguous(), total
            )
            out, lse = merged, total.t()
        return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse.contiguous()

    return merge


def vllm_sparse_mla(load_file: LoadFile) -> Function:
    """V4 pages to bf16 by one kernel, attention over them by another (vLLM's path for Intel GPUs; Triton runs it on
    NVIDIA too). Holes are moved to the end of each row, as its caller does; the sink is applied after it."""
    attention = _vllm_file(load_file, "v1/attention/ops/xpu_mla_sparse.py")
    pages = _vllm_file(
        load_file, "models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py", vllm__v1__attention__ops__xpu_mla_sparse=attention
    )

    def decode(q, pool, indices, *, layout="v4-mla-fp8", page_tokens=64, softmax_scale=None, sink=None,
               topk_length=None, extra_pool=None, extra_indices=None, extra_page_tokens=64, extra_layout=None,
               extra_topk_length=None):  # fmt: skip
        only(layout == "v4-mla-fp8" and extra_layout in (None, layout), "V4 pages")
        caches = [(pool, indices, page_tokens, topk_length)]
        if extra_pool is not None:
            caches.append((extra_pool, extra_indices, extra_page_tokens, extra_topk_length))
        numbers, slots = [], []
        for cache, picked, tokens, length in caches:
            if length is not None:
                order = torch.arange(picked.shape[1], device=picked.device)
                picked = torch.where(order < length[:, None], picked, -1)
            buffer = torch.empty(picked.numel(), 512, dtype=torch.bfloat16, device=q.device)
            view = cache.as_strided((len(cache), tokens, 584), (cache.stride(0), 584, 1))
            pages.dequant_gather_slots(buffer, view, picked.reshape(-1).int().contiguous(), tokens)
            numbers.append(buffer.view(*picked.shape, 512))
            slots.append(picked)
        entries, live = torch.cat(numbers, 1), torch.cat(slots, 1) >= 0
        rows = torch.arange(live.numel(), dtype=torch.int32, device=q.device).view(live.shape)
        packed = torch.where(live, rows, -1).gather(1, torch.argsort((~live).int(), dim=1, stable=True))
        packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 16), value=-1)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, _, lse = attention.triton_bf16_mla_sparse_interface(
            q.to(torch.bfloat16).contiguous(), entries.flatten(0, 1)[:, None], packed[:, None].contiguous(), scale,
            block_dpe=0,
        )  # fmt: skip
        return (out if sink is None else out * sink_factor(lse, sink)[..., None]), lse

    return decode
