"""What engines call the sizes that a loss can be held against, and what we call them: the one table of it.

Spelled as in JSON (`--page-size` is `page_size`), the most telling name first. Read in the public sources of SGLang
(`server_args.py`), vLLM (`config/`), TensorRT-LLM (`llm_args.py`) and in the `config.json` of DeepSeek-V3.2 and -V4. A
name that elsewhere means something else is left out: `top_k` is a sampling parameter, llama.cpp's `n_ctx` is shared by
its slots.
"""

from __future__ import annotations

import re

SIZES: dict[str, tuple[str, ...]] = {
    "topk": ("index_topk",),
    "ratio": ("compress_ratio", "compress_ratios"),
    "window": ("sliding_window", "swa_window"),
    "page": ("page_size", "block_size", "tokens_per_block", "page_tokens"),
    "chunk": ("chunked_prefill_size", "max_num_batched_tokens", "chunk_tokens", "chunk_size"),
    "context_limit": ("context_length", "max_model_len", "max_seq_len", "context_len", "max_context"),
}
_OURS = {told: ours for ours, names in SIZES.items() for told in (ours, *names)}


def ours(told: str) -> str | None:
    """Our name of a size, whatever an engine calls it ("--max-model-len" -> "context_limit"); None when it is none."""
    return _OURS.get(told.lstrip("-").replace("-", "_").lower())


# What else decides about a context, by the name that our tables use; then what engines and their tools call it.
SETTINGS: dict[str, tuple[str, ...]] = {
    "index_topk": SIZES["topk"],
    "page_size": SIZES["page"],
    "sliding_window": SIZES["window"],
    "chunked_prefill_size": ("max_num_batched_tokens", "max_prefill_chunk", "prefill_chunk_size"),
    "context_length": ("max_model_len", "context_len", "max_context", "num_ctx", "max_context_len"),
    "ctx_size": ("n_ctx", "c"),
    "tp_size": ("tp", "tensor_parallel_size", "tensor_parallel", "tensor_parallelism", "parallelism.tensor"),
    "pp_size": ("pp", "pipeline_parallel_size", "pipeline_parallel", "parallelism.pipeline"),
    "dp_size": ("dp", "data_parallel_size", "data_parallel", "parallelism.data"),
    "ep_size": ("ep", "expert_parallel_size", "moe_expert_parallel_size"),
    "kv_cache_dtype": ("cache_dtype", "kv_dtype", "cache_type_kv"),
    "cache_type_k": ("ctk",),
    "cache_type_v": ("ctv",),
    "model_path": ("model", "m", "model_name_or_path"),
    "quantization": ("q", "quant"),
    "attention_backend": ("attn_backend",),
    "speculative_algorithm": ("speculative_config.method", "spec_algorithm", "spec_type"),
    "kv_connector": ("kv_transfer_config.kv_connector", "connector", "transfer_backend"),
    "kv_role": ("kv_transfer_config.kv_role",),
    "kv_load_failure_policy": ("kv_transfer_config.kv_load_failure_policy",),
    "parallel": ("np", "n_parallel", "n_slots"),
    "n_gpu_layers": ("ngl", "gpu_layers"),
    "batch_size": ("b", "n_batch"),
    "ubatch_size": ("ub", "n_ubatch"),
    "flash_attn": ("fa",),
    "n_predict": ("n", "predict"),
    "model_draft": ("md",),
    "threads": ("t",),
}
_SETTING = {told: ours for ours, names in SETTINGS.items() for told in names}


def setting(told: str) -> str:
    """The name of a setting in our tables: `--page-size`, `page_size` and vLLM's `--block-size` are one. Environment
    variables keep their own, and so does what this table does not know."""
    if told.isupper():
        return told
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", told.lstrip("-").replace("-", "_"))  # a chart's maxModelLen
    name = name if len(name) == 1 else name.lower()
    return _SETTING.get(name, name)
