"""The KV-cache page layouts that public code uses, one declarative record each. A new layout is one record here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import writers
from .fields import Field
from .layout import Layout
from .writers import Writer

__all__ = ["LAYOUTS", "Field", "Layout", "layout_of"]


def _footer(name: str, meaning: str, codes: Field, scales: Field, **more) -> Layout:
    """Index page: every entry's codes, then every entry's scales."""
    data = replace(codes, stride=codes.bytes)
    return Layout(name, meaning, (data, replace(scales, base=data.bytes, stride=scales.bytes)), **more)


def _v4(name: str, meaning: str, code_format: str = "e4m3fn") -> Layout:
    return Layout(
        name,
        meaning,
        (
            Field("codes", code_format, 448, stride=576),
            Field("rope", "bf16", 64, offset=448, stride=576),
            Field("scales", "ue8m0", 7, base=576, stride=8),
            Field("pad", "raw", 1, base=576, offset=7, stride=8),
        ),
        group=64,
        writers=writers.V4,
        align=576,
        page_tokens=(64, 256, 2, 128),
        source="sglang 0.5.23 mem_cache/deepseek_v4_memory_pool.py, FlashMLA 9241ae3 tests/quant.py",
    )


def _v32(name: str, meaning: str, rules: Mapping[str, Writer]) -> Layout:
    return Layout(
        name,
        meaning,
        (
            Field("codes", "e4m3fn", 512, stride=656),
            Field("scales", "f32", 4, offset=512, stride=656),
            Field("rope", "bf16", 64, offset=528, stride=656),
        ),
        group=128,
        writers=rules,
        source="FlashMLA 9241ae3 README, sglang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py",
    )


def _v41(name: str, meaning: str, codes: Field, scales: Field, align: int, interleaved: bool, group: int) -> Layout:
    row = codes.bytes + scales.bytes
    if interleaved:
        fields = (replace(codes, stride=row), replace(scales, offset=codes.bytes, stride=row))
    else:
        fields = (replace(codes, stride=codes.bytes), replace(scales, base=codes.bytes, stride=scales.bytes))
    return Layout(
        name,
        meaning,
        fields,
        group=group,
        writers=writers.V41_FP8 if group == 32 else writers.V41_FP4,
        align=1 if interleaved else align,
        page_tokens=(64, 256, 2, 128),
        source="sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py",
    )


_INDEX = "sglang 0.5.23 kernels/ops/kvcache/dsa_index_k_cache.py"
_E4M3_128, _F32_1 = Field("codes", "e4m3fn", 128), Field("scales", "f32", 1)
_E4M3_512, _E2M1_512 = Field("codes", "e4m3fn", 512), Field("codes", "e2m1", 512)
_PER_32, _PER_16 = Field("scales", "ue8m0", 16), Field("scales", "e4m3fn", 32)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _footer("dsa-index-fp8", "indexer keys, one plain float32 scale each", _E4M3_128, _F32_1,
                group=128, writers=writers.INDEX_FP8, source=_INDEX),
        _footer("dsa-index-fp8-ue8m0", "indexer keys, float32 scale that is a power of two", _E4M3_128, _F32_1,
                group=128, writers=writers.INDEX_FP8_UE8M0, source=_INDEX),
        _footer("dsa-index-fp8-mx", "indexer keys, the scale as four packed exponent bytes", _E4M3_128,
                Field("scales", "ue8m0", 4), group=128, writers=writers.INDEX_FP8_UE8M0,
                source="vllm 0.33.0 models/deepseek_v4/common/ops/fused_compress_quant_cache.py"),
        _footer("dsa-index-fp8-fnuz", "indexer keys in AMD's FNUZ codes", Field("codes", "e4m3fnuz", 128), _F32_1,
                group=128, writers=writers.INDEX_FP8,
                source="sglang 0.5.23 kernels/jit/include/sgl_kernel/deepseek_v4/fp8_utils.cuh"),
        _footer("dsa-index-fp8-preshuffle", "indexer keys in 16x16 tiles (aiter), scales in order",
                replace(_E4M3_128, tile=(16, 16)), _F32_1, group=128, writers=writers.INDEX_FP8, source=_INDEX),
        _footer("dsa-index-fp4", "indexer keys in MXFP4, one exponent byte per 32", Field("codes", "e2m1", 128),
                Field("scales", "ue8m0", 4), group=32, writers=writers.INDEX_FP4,
                source="sglang 0.5.23 kernels/ops/quantization/fp4_indexer_quant.py"),
        _v32("v32-mla-fp8", "DeepSeek-V3.2 latent, plain float32 scales per 128", writers.V32),
        _v32("v32-mla-fp8-ue8m0", "DeepSeek-V3.2 latent, power-of-two float32 scales", writers.V32_UE8M0),
        _v4("v4-mla-fp8", "DeepSeek-V4 entry, exponent bytes per 64 in the footer"),
        _v4("v4-mla-fp8-fnuz", "DeepSeek-V4 entry in AMD's FNUZ codes", "e4m3fnuz"),
        _v41("v41-mla-fp8", "DeepSeek-V4.1 entry, footer", _E4M3_512, _PER_32, 512, False, 32),
        _v41("v41-mla-fp4", "DeepSeek-V4.1 entry in 4 bits, footer", _E2M1_512, _PER_16, 256, False, 16),
        _v41("v41-mla-fp8-interleaved", "DeepSeek-V4.1 entry, scales beside it", _E4M3_512, _PER_32, 512, True, 32),
        _v41("v41-mla-fp4-interleaved", "DeepSeek-V4.1 in 4 bits, scales beside it", _E2M1_512, _PER_16, 256, True, 16),
    )
}  # fmt: skip


def layout_of(layout: str | Layout) -> Layout:
    """A layout by name. Raises ValueError that lists the known names."""
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {str(layout)[:60]!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]
