"""How public kernels turn values into codes and scales: one declarative record a writer.

Page shapes are shared between engines, bytes are not: writers differ in the floor under the largest magnitude, in
whether the scale is a power of two, and in a multiplication by a reciprocal where another divides. Each rule below
that is marked `exact` reproduces bytes which the named kernel wrote on a GPU; the others follow its source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import formats

BLOCK_VALUES = 1 << 18


@dataclass(frozen=True)
class Writer:
    """Rule for one scale group. `floor` applies to the largest magnitude ("amax") or to the scale itself ("scale")."""

    source: str
    floor: float = 1e-4
    floor_on: str = "amax"
    power_of_two: bool = False
    reciprocal: bool = False  # codes = x * (1 / scale) instead of x / scale
    scaled_by_reciprocal: bool = False  # scale = amax * (1 / largest) instead of amax / largest
    float_log2: bool = False  # ceil(log2(scale)) in floating point instead of exponent bits
    through_bf16: bool = False  # values are rounded to bf16 first
    ties: str = "even"  # e2m1 only
    negative_zero: bool = True  # e2m1 only
    clears_pad: bool = False  # writes 0 into the pad byte of the scale row
    exact: bool = False
    serving: bool = True  # written by an engine, not only by a test's helper

    def smallest_scale(self, code_format: str) -> float:
        """The least scale this writer gives a written token (0.0 where it has no floor)."""
        if not self.floor:
            return 0.0
        scale = torch.tensor(self.floor)
        if self.floor_on == "amax":
            scale = scale / formats.FORMATS[code_format].largest
        if self.power_of_two:
            scale = formats.decode(formats.ceil_exponent(scale.view(1)), "ue8m0")
        return float(scale)

    def quantise(self, values: Tensor, group: int, code_format: str, scale_format: str) -> tuple[Tensor, Tensor]:
        """Codes uint8 [..., n] (n/2 for e2m1) and stored scales [..., n/group] of float `values` [..., n]."""
        if not values.is_cuda and values.numel() > 2 * BLOCK_VALUES:  # blocks that stay in a core's cache
            rows = values.reshape(-1, values.shape[-1]).split(max(1, BLOCK_VALUES // values.shape[-1]))
            parts = [self.quantise(part, group, code_format, scale_format) for part in rows]
            whole = [torch.cat(part) for part in zip(*parts, strict=True)]
            return whole[0].reshape(*values.shape[:-1], -1), whole[1].reshape(*values.shape[:-1], -1)
        x = values.to(torch.float32)
        if self.through_bf16:
            x = x.to(torch.bfloat16).to(torch.float32)
        x = x.unflatten(-1, (-1, group))
        largest = formats.FORMATS[code_format].largest
        amax = x.abs().amax(-1)
        if self.floor_on == "amax":
            amax = amax.clamp(min=self.floor)
        # a tensor divides truly everywhere; CUDA divides by a Python number through its reciprocal
        divisor = torch.tensor(largest, dtype=torch.float32, device=x.device)
        scale = amax * torch.tensor(1 / largest, device=x.device) if self.scaled_by_reciprocal else amax / divisor
        if self.floor_on == "scale":
            scale = scale.clamp(min=self.floor)
        if scale_format == "e4m3fn":  # the scale itself is rounded to e4m3, never to zero
            stored = formats.encode_e4m3(scale).clamp(min=1)
            scale = formats.decode(stored, "e4m3fn")
        elif self.power_of_two:
            if self.float_log2:
                exponent = (torch.ceil(torch.log2(scale)) + 127).clamp(0, 254).to(torch.uint8)
            else:
                exponent = formats.ceil_exponent(scale)
            scale = formats.decode(exponent, "ue8m0")
            stored = exponent if scale_format == "ue8m0" else scale
        else:
            stored = scale
        step = scale.unsqueeze(-1)
        ratio = x * (1 / step) if self.reciprocal else x / step
        # a zero group under a writer without floor: 0/0. Its kernel's clamp gives a NaN-free code; we store +0.
        if not self.floor:
            ratio = torch.where(step == 0, 0.0, ratio)
        ratio = ratio.flatten(-2)
        if code_format == "e2m1":
            return formats.encode_e2m1(ratio.clamp(-largest, largest), self.ties, self.negative_zero), stored
        return formats.encode_e4m3(ratio, code_format), stored


_STORE = "sglang 0.5.23 kernels/jit/csrc/deepseek_v4/store.cuh"
_VLLM = "vllm 0.33.0 models/deepseek_v4/common/ops"

INDEX_FP8 = {
    "sglang": Writer("sglang 0.5.23 kernels/jit/csrc/dsa/fused_store_index_cache.cuh", reciprocal=True, exact=True),
    "deepgemm": Writer("DeepGEMM 54e2261 tests/test_attention.py"),
}
INDEX_FP8_UE8M0 = {
    "sglang": Writer("sglang 0.5.23 kernels/ops/quantization/act_quant_triton.py, scale_fmt ue8m0", power_of_two=True),
    "official": Writer("DeepSeek-V4-Flash inference/kernel.py act_quant", power_of_two=True),
    "vllm": Writer(f"{_VLLM}/fused_compress_quant_cache.py", power_of_two=True, float_log2=True, through_bf16=True),
}
INDEX_FP4 = {
    "sglang": Writer(
        "sglang 0.5.23 kernels/jit/csrc/deepseek_v4/fused_norm_rope_v2.cuh",
        power_of_two=True,
        ties="down",
        negative_zero=False,
    ),
    "sglang-standalone": Writer(
        "sglang 0.5.23 kernels/ops/quantization/fp4_indexer_quant.py",
        floor_on="scale",
        power_of_two=True,
        ties="down",
        negative_zero=False,
    ),
    "vllm": Writer(f"{_VLLM}/fused_indexer_q.py", floor=6 * 2.0**-126, power_of_two=True, float_log2=True),
}
V32 = {
    "sglang": Writer(
        "sglang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py", floor=0.0, scaled_by_reciprocal=True, exact=True
    )
}
V32_UE8M0 = {"flashmla": Writer("FlashMLA 9241ae3 tests/quant.py", power_of_two=True)}
V4 = {
    "sglang": Writer(_STORE, power_of_two=True, exact=True),
    "vllm": Writer(f"{_VLLM}/cache_utils.py", power_of_two=True, float_log2=True, clears_pad=True),
    "flashmla": Writer("FlashMLA 9241ae3 tests/quant.py", floor=1e-8, power_of_two=True, serving=False),
}
V41_FP8 = {"sglang": Writer(_STORE, floor_on="scale", power_of_two=True, exact=True)}
V41_FP4 = {"sglang": Writer(_STORE, floor=0.0, exact=True)}
