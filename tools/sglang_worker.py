"""What `tools/record_sglang.py` asks of a running SGLang scheduler: the pages of one request as it ends, one captured
decode step, kernel checks, and two exchanged index pages; and random weights of a scale at which prompts matter.

Written against SGLang 0.5.14 and loaded by its own plugin route (entry point group `sglang.srt.plugins`; the recorder
writes the few lines of metadata that name it). Orders are files in the folder that NEEDLEWORK_ORDERS names:
`order.json` holds {"name": …, "tokens": …}, and the next request whose prompt has so many tokens leaves `name`.npz
(every pool's pages of that request, uint8 [pages, page bytes], as "pool.layer"), if "step" is true `name`-step.npz too
(prompts above the budget: below it nothing is scored), and then `name`.json: page ids, or the problem. "swap": [a, b]
exchanges two of the pages that prefill names as the source of the indexer's transfer; "check": true runs the kernel
checks instead of a dump.

Pools: DeepSeek-V3.2 `index` and `mla`; DeepSeek-V4 `c4`, `c128`, `index` of the whole prompt, `window` of its end, and
`state`, `index_state` (what a partial group has so far) for the pages of that window.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import worker_checks  # beside this file
from worker_checks import INDEX_BYTES, MLA_BYTES, PAGE_TOKENS

STATE: dict[str, Any] = {"scheduler": None, "capture": None, "swap": None, "problem": None}


def install() -> None:
    """The plugin's entry point: sets the hooks. Without an order they change nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", begins, HookType.BEFORE)
    HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", ends, HookType.BEFORE)
    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVSender.send", sends, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", scale_weights, HookType.AFTER
    )


def scale_weights(_: None, model: Any, *rest: Any, **named: Any) -> None:
    """Weights of --load-format dummy, drawn again: as small as the engine draws them, the output hardly depends on the
    prompt. Projections keep unit variance, norms multiply by one, small vectors stay as they are. Seeded by name."""
    import torch

    gains = {"wq_b": 2.5, "lm_head": 3.0}  # attention picks tens of entries; logits spread
    for name, weight in model.named_parameters():
        if weight.dtype.itemsize < 2 or not weight.is_floating_point():
            continue
        generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
        if weight.ndim >= 2:
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            spread = 1.0 if "embed" in name else gain / weight.shape[-1] ** 0.5
            weight.data.copy_(torch.randn(weight.shape, generator=generator, device=weight.device) * spread)
        elif "norm" in name:
            weight.data.fill_(1.0)


def folder() -> Path:
    return Path(os.environ["NEEDLEWORK_ORDERS"])


def order() -> dict[str, Any] | None:
    """The order that waits, or None."""
    try:
        return json.loads((folder() / "order.json").read_text())
    except FileNotFoundError:
        return None


def begins(scheduler: Any) -> None:
    """The scheduler starts: remember it, and listen to what the indexer scores."""
    STATE["scheduler"] = scheduler
    try:
        import deep_gemm
    except ImportError:
        return
    plain = deep_gemm.fp8_paged_mqa_logits

    def scored(q: Any, cache: Any, weights: Any, lengths: Any, table: Any, *rest: Any, **named: Any) -> Any:
        out = plain(q, cache, weights, lengths, table, *rest, **named)
        wanted = order()
        if wanted and wanted.get("step") and len(q) == 1:
            try:
                keep_step(wanted, q, cache, weights, lengths, table, out)
            except Exception as problem:  # an exception here would end the engine
                STATE["problem"] = f"{type(problem).__name__}: {str(problem)[:400]}"
        return out

    deep_gemm.fp8_paged_mqa_logits = scored


def keep_step(wanted: dict[str, Any], q: Any, cache: Any, weights: Any, lengths: Any, table: Any, out: Any) -> None:
    """The first decode step's scores of each layer, and what they were made of; the layers come in order."""
    import torch

    kept = STATE["capture"] = STATE["capture"] or {}
    length, layer = int(lengths.flatten()[0]), len(kept)
    if length != wanted["tokens"] + 1 or layer >= STATE["scheduler"].model_config.num_hidden_layers:
        return
    pages = table[0, : -(-length // PAGE_TOKENS)].long()
    kept[layer] = {
        "q": q.reshape(q.shape[-2:])[None].view(torch.uint8), "weights": weights.reshape(1, -1).float(),
        "length": torch.tensor(length), "logits": out[0, :length].float(),
        "pages": cache.view(torch.uint8).reshape(len(cache), -1)[pages],
    }  # fmt: skip
    kept[layer] = {name: value.cpu().numpy().copy() for name, value in kept[layer].items()}


def sends(sender: Any, kv_indices: Any, state_indices: Any = None) -> Any:
    """Prefill hands pages over: exchange two of the indexer's, if that is the order."""
    wanted = order()
    if not wanted or not wanted.get("swap") or not state_indices:
        return None
    import numpy as np

    a, b = wanted["swap"]
    first = np.array(state_indices[0])
    first[[a, b]] = first[[b, a]]
    STATE["swap"] = [a, b]
    return (sender, kv_indices, [first, *state_indices[1:]]), {}


def ends(req: Any, tree_cache: Any, *rest: Any, **named: Any) -> None:
    """A request ends and still holds its pages: do what the order says."""
    wanted = order()
    if wanted is None or STATE["scheduler"] is None or len(req.origin_input_ids) != wanted["tokens"]:
        return
    (folder() / "order.json").unlink()
    path = folder() / wanted["name"]
    try:
        if wanted.get("check"):
            said: dict[str, Any] = {"says": check(path.with_suffix(".checks.json"), wanted.get("size", "small"))}
        else:
            said = {"page_ids": dump(path, req, wanted["tokens"]), "swap": STATE["swap"], "step": STATE["problem"]}
    except Exception as problem:  # an exception here would end the engine
        said = {"problem": f"{type(problem).__name__}: {str(problem)[:400]}"}
    STATE.update(capture=None, swap=None, problem=None)
    path.with_suffix(".part").write_text(json.dumps(said))
    path.with_suffix(".part").rename(path.with_suffix(".json"))


def dump(path: Path, req: Any, tokens: int) -> dict[str, list[int]]:
    """Write every pool's pages of the request; returns the physical pages by pool."""
    import numpy as np
    import torch

    torch.cuda.synchronize() if torch.cuda.is_available() else None
    scheduler = STATE["scheduler"]
    allocator = scheduler.token_to_kv_pool_allocator
    slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, :tokens].long()
    pool = allocator.get_kvcache()
    found = v4_pools(pool, slots) if hasattr(pool, "c4_kv_pool") else v32_pools(pool, slots)
    np.savez(path.with_suffix(".npz"), **{name: raw[pages].cpu().numpy() for name, (raw, pages) in found.items()})
    if STATE["capture"]:
        flat = {f"{name}.{layer}": v for layer, step in STATE["capture"].items() for name, v in step.items()}
        np.savez(path.with_name(f"{path.name}-step.npz"), **flat)
    return {name: pages.tolist() for name, (_, pages) in found.items()}


def whole_bytes(buffer: Any, page_bytes: int) -> Any:
    """A contiguous buffer as uint8 [pages, page bytes]."""
    import torch

    return buffer.view(torch.uint8).reshape(-1, page_bytes)


def v32_pools(pool: Any, slots: Any) -> dict[str, tuple[Any, Any]]:
    """'pool.layer' -> (all pages, the request's pages in order)."""
    pages = slots[::PAGE_TOKENS] // PAGE_TOKENS
    found = {}
    for layer, (index, mla) in enumerate(zip(pool.index_k_with_scale_buffer, pool.kv_buffer, strict=True)):
        found[f"index.{layer}"] = whole_bytes(index, PAGE_TOKENS * INDEX_BYTES), pages
        found[f"mla.{layer}"] = whole_bytes(mla, PAGE_TOKENS * MLA_BYTES), pages
    return found


def v4_pools(pool: Any, slots: Any) -> dict[str, tuple[Any, Any]]:
    """As `v32_pools`; the layers of c4, c128 and index are counted within their pool, the others are the model's."""
    size, window = pool.page_size, pool.sliding_window
    pages = slots[::size] // size
    start = max(0, len(slots) - window) // size * size
    near = pool.translate_loc_from_full_to_swa(slots[start:]).long()[::size] // pool.swa_page_size
    found = {}
    for name, part, kept in (("window", pool.swa_kv_pool, near), ("c4", pool.c4_kv_pool, pages),
                             ("c128", pool.c128_kv_pool, pages)):  # fmt: skip
        for layer, raw in enumerate(part.kv_buffer):
            found[f"{name}.{layer}"] = whole_bytes(raw, raw[0].nbytes), kept
    for layer, raw in enumerate(pool.c4_indexer_kv_pool.index_k_with_scale_buffer):
        found[f"index.{layer}"] = whole_bytes(raw, raw[0].nbytes), pages
    for name, states in (("state", pool.compress_state_pools), ("index_state", pool.indexer_compress_state_pools)):
        for layer, state in enumerate(states):
            if state is not None:
                rows = state.kv_score_buffer.kv_score
                whole = len(rows) // state.ring_size * state.ring_size
                found[f"{name}.{layer}"] = whole_bytes(rows[:whole], rows[0].nbytes * state.ring_size), near
    return found


def check(path: Path, size: str) -> list[str]:
    """The kernels that this process calls, each held against the reference."""
    functions = {
        ("DeepGEMM fp8_paged_mqa_logits", worker_checks.SCORES): deployed_logits,
        ("FlashMLA sparse decode", worker_checks.DECODE): deployed_decode,
    }
    return worker_checks.run(functions, path, size, "SGLang's scheduler")


def deployed_logits(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
    """The reference's arguments, handed to the scoring function that the engine calls."""
    import deep_gemm
    import torch

    rows, cache, weights, lens = worker_checks.scoring_arguments(q, weights, pool, lengths, page_tokens, layout)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    plan = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE_TOKENS, processors)
    out = deep_gemm.fp8_paged_mqa_logits(
        rows, cache, weights, lens, page_table.contiguous(), plan, page_table.shape[1] * PAGE_TOKENS, clean_logits=False
    )
    return out.reshape(*q.shape[:-2], -1)


def deployed_decode(q, pool, indices, *, layout="v32-mla-fp8", page_tokens=64, softmax_scale=None, sink=None, **more):
    """The reference's arguments, handed to the attention function that the engine calls for decode."""
    import torch
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    rows, cache, slots = worker_checks.decode_arguments(q, pool, indices, page_tokens, layout, more | {"sink": sink})
    heads = rows.shape[2]
    lens = torch.full((len(q),), slots.shape[-1], dtype=torch.int32, device=q.device)
    plan, splits = get_mla_metadata(
        cache_seqlens=lens, num_q_tokens_per_head_k=heads, num_heads_k=1, num_heads_q=heads, is_fp8_kvcache=True,
        topk=slots.shape[-1],
    )  # fmt: skip
    out, lse = flash_mla_with_kvcache(
        q=rows, k_cache=cache, cache_seqlens=lens, head_dim_v=512, tile_scheduler_metadata=plan, num_splits=splits,
        block_table=torch.empty((len(q), 0), dtype=torch.int32, device=q.device), is_fp8_kvcache=True, indices=slots,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
    )  # fmt: skip
    return out[:, 0], lse.reshape(q.shape[:2])
