"""What engines call the sizes that a loss can be held against, and what we call them: the one table of it.

Spelled as in JSON (`--page-size` is `page_size`), the most telling name first. Read in the public sources of SGLang
(`server_args.py`), vLLM (`config/`), TensorRT-LLM (`llm_args.py`) and in the `config.json` of DeepSeek-V3.2 and -V4. A
name that elsewhere means something else is left out: `top_k` is a sampling parameter, llama.cpp's `n_ctx` is shared by
its slots.
"""

from __future__ import annotations

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
