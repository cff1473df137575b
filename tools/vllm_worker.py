"""What `tools/record_vllm.py` asks of a running vLLM worker: dumps of its caches, one captured decode step, kernel
checks, and faults that are planted and taken out again while the engine runs.

Written against vLLM 0.23.0. The engine is started with `--worker-extension-cls vllm_worker.Extension` and this folder
on PYTHONPATH; vLLM mixes the class into its worker, and its development route POST /collective_rpc calls
`needlework(order)`, an order being one JSON object {"do": name, …}. `reload` reads this file again, so that a change
needs no restart of the engine.

Faults (one at a time, each at one layer; `none` takes the last one out):
    index-skip    the blocks of the indexer pool are left out of what decode reads from prefill
    index-swap    two blocks of the indexer pool are read in exchanged order
    scales-zero   the scales of the indexer pages are zeroed once they have arrived
    mla-skip      the blocks of the attention pool are left out (a control that must show at every length)
    topk-256      the indexer of every layer selects 256 entries and not what the configuration says
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import vllm_faults  # these two beside this file
import worker_checks
from worker_checks import INDEX_BYTES, MLA_BYTES, PAGE_TOKENS

FAULTS = ("none", "index-skip", "index-swap", "scales-zero", "mla-skip", "topk-256")


class Extension:
    """Mixed into vLLM's worker class."""

    def needlework(self, order: str) -> dict[str, Any]:
        wanted = json.loads(order)
        module = sys.modules[__name__]
        if wanted["do"] == "reload":
            importlib.reload(module)
            return {"reloaded": True}
        try:
            found = getattr(module, f"do_{wanted.pop('do')}")(self, **wanted)
            return json.loads(json.dumps(found, default=str))  # plain types: anything else would end the engine
        except Exception as problem:  # an exception here would end the engine
            return {"problem": f"{type(problem).__name__}: {str(problem)[:400]}"}


def state_of(worker: Any) -> dict[str, Any]:
    """What the hooks share; it lives on the worker, so that a reload keeps it."""
    if not hasattr(worker, "_needlework"):
        worker._needlework = {"fault": "none", "layer": 0, "pages": [0, 1], "blocks": [], "capture": None}
    return worker._needlework


def pools(worker: Any) -> dict[tuple[str, int], Any]:
    """(pool, layer) -> uint8 view [blocks, page bytes] of the cache, the layer being the model's."""
    import torch

    found = {}
    for name, module in worker.vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(module, "kv_cache", None)
        cache = cache[0] if isinstance(cache, list | tuple) and cache else cache
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None or not hasattr(cache, "shape") or cache.ndim != 3:
            continue
        raw = cache.view(torch.uint8)
        width = raw.shape[1] * raw.shape[2]
        pool = {INDEX_BYTES: "index", MLA_BYTES: "mla"}.get(raw.shape[2])
        if pool is not None:
            found[pool, int(layer[1])] = raw.as_strided((raw.shape[0], width), (raw.stride(0), 1))
    return found


def indexers(worker: Any) -> dict[int, Any]:
    """layer -> the module that scores and selects."""
    found = {}
    for name, module in worker.model_runner.model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", name)
        if type(module).__name__ == "SparseAttnIndexer" and layer is not None:
            found[int(layer[1])] = module
    return found


def connector(worker: Any) -> Any:
    """The worker half of the NIXL connector, or None in a server that transfers nothing."""
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker
    except AssertionError:
        return None


def region_of(worker: Any, pool: str, layer: int) -> int:
    """The place of a cache among the regions that the connector registered."""
    nixl = connector(worker)
    address = pools(worker)[pool, layer].data_ptr()
    return nixl.kv_caches_base_addr[nixl.engine_id][nixl.tp_rank].index(address)


# ---- hooks, set once ----


def do_install(worker: Any) -> dict[str, Any]:
    """Set the hooks; with no fault and nothing armed they change nothing."""
    state = state_of(worker)
    if state.get("installed"):
        return {"installed": "before"}
    nixl = connector(worker)
    if nixl is not None:
        plain_ids, plain_pop = nixl._compute_desc_ids, nixl._pop_done_transfers

        def ids(*args: Any, **named: Any) -> Any:
            return sys.modules[__name__].changed_ids(worker, plain_ids(*args, **named), named)

        def pop(transfers: Any) -> Any:
            done = plain_pop(transfers)
            if transfers is nixl._recving_transfers:
                for request in done:
                    meta = nixl._recving_metadata.get(request)
                    if meta is not None:
                        sys.modules[__name__].arrived(worker, list(meta.local_physical_block_ids[0]))
            return done

        nixl._compute_desc_ids, nixl._pop_done_transfers = ids, pop
    for layer, module in indexers(worker).items():
        module._forward_method = captured(worker, layer, module, module._forward_method)
    scoring = sys.modules["vllm.model_executor.layers.sparse_attn_indexer"]
    plain_logits = scoring.fp8_fp4_paged_mqa_logits

    def logits(*args: Any, **named: Any) -> Any:
        out = plain_logits(*args, **named)
        if state["capture"] is not None:
            state["logits"] = out
        return out

    scoring.fp8_fp4_paged_mqa_logits = logits
    state["installed"] = True
    return {"installed": True, "connector": nixl is not None, "indexers": len(indexers(worker))}


def changed_ids(worker: Any, ids: Any, named: dict[str, Any]) -> Any:
    """The transfer's descriptors, [regions x blocks] laid flat, as the planted fault wants them. The remote side's are
    asked for without a block size ratio."""
    import numpy as np

    state = state_of(worker)
    kind = {"index-skip": "index", "index-swap": "index", "mla-skip": "mla"}.get(state["fault"])
    blocks = sum(len(group) for group in named["block_ids"])
    if kind is None or blocks == 0:
        return ids
    region = region_of(worker, kind, state["layer"])
    rows = np.asarray(ids).reshape(-1, blocks).copy()
    if state["fault"] == "index-swap":
        first, second = state["pages"]
        if named.get("block_size_ratio") is None and max(first, second) < blocks:
            rows[region, [first, second]] = rows[region, [second, first]]
        return rows.flatten()
    return np.delete(rows, region, axis=0).flatten()


def arrived(worker: Any, blocks: list[int]) -> None:
    """A request's blocks are here: remember them, and zero the scales if that is the fault."""
    state = state_of(worker)
    state["blocks"] = blocks
    if state["fault"] == "scales-zero":
        import torch

        with torch.inference_mode():  # the caches were made in it
            pools(worker)["index", state["layer"]][blocks, PAGE_TOKENS * 128 :] = 0


def captured(worker: Any, layer: int, module: Any, plain: Any) -> Any:
    """The indexer's forward, keeping what one decode step of one request read and gave while a capture is armed."""
    state = state_of(worker)

    def forward(hidden: Any, q: Any, k: Any, weights: Any) -> Any:
        out = plain(hidden, q, k, weights)
        kept = state["capture"]
        if kept is None or layer in kept:
            return out
        from vllm.forward_context import get_forward_context

        everything = get_forward_context().attn_metadata
        meta = everything.get(module.k_cache.prefix) if isinstance(everything, dict) else None
        if meta is None or meta.num_decodes != 1 or meta.num_prefills:
            return out
        length = int(meta.decode.seq_lens.flatten()[0])
        pages = -(-length // PAGE_TOKENS)
        import torch

        kept[layer] = {
            "q": q[:1].view(torch.uint8).cpu().numpy(),
            "weights": weights[:1].float().cpu().numpy(),
            "length": length,
            "blocks": meta.decode.block_table[0, :pages].cpu().numpy(),
            "logits": state["logits"][0, :length].float().cpu().numpy(),
            "selected": out[0].cpu().numpy().copy(),
        }
        return out

    return forward


# ---- orders ----


def do_describe(worker: Any) -> dict[str, Any]:
    import torch

    caches = {
        f"{pool}.{layer}": {"blocks": len(raw), "page_bytes": raw.shape[1], "stride_bytes": raw.stride(0)}
        for (pool, layer), raw in sorted(pools(worker).items())
    }
    backends = {
        name: module.get_attn_backend().get_name()
        for name, module in worker.vllm_config.compilation_config.static_forward_context.items()
        if hasattr(module, "get_attn_backend")
    }
    nixl = connector(worker)
    return {
        "caches": caches, "backends": backends, "torch": str(torch.__version__), "cuda": torch.version.cuda,
        "card": torch.cuda.get_device_name(), "topk": {str(n): int(m.topk_tokens) for n, m in indexers(worker).items()},
        "kv_cache_dtype": worker.vllm_config.cache_config.cache_dtype,
        "block_size": worker.vllm_config.cache_config.block_size,
        "regions": None if nixl is None else int(nixl.num_regions),
    }  # fmt: skip


def do_fault(worker: Any, kind: str, layer: int = 1, pages: list[int] | None = None) -> dict[str, Any]:
    if kind not in FAULTS:
        raise ValueError(f"unknown fault {kind}; one of {', '.join(FAULTS)}")
    state = state_of(worker)
    state.update(fault=kind, layer=layer, pages=pages or [0, 1])
    for module in indexers(worker).values():
        module.topk_tokens = 256 if kind == "topk-256" else worker.model_runner.model_config.hf_config.index_topk
    return {"fault": kind, "layer": layer, "pages": state["pages"]}


def do_plant(worker: Any, name: str, strength: str = "severe", seed: int = 0) -> dict[str, Any]:
    """A fault of tools/vllm_faults.py, or "none"; the caches are emptied."""
    if not hasattr(worker, "_site"):
        core = vllm_faults.engine_core()
        worker._site = vllm_faults.Site(worker, pools(worker), core.scheduler, connector(worker))
    return vllm_faults.plant(worker, worker._site, indexers(worker), name, strength, seed)


def do_failed(worker: Any) -> dict[str, Any]:
    """Why the planted fault took itself out, or ""."""
    return {"failed": worker._problem}


def do_ended(worker: Any) -> dict[str, Any]:
    """Blocks of the request that ended last, in its order; a fault must have been planted once, or "none"."""
    return {"blocks": worker._site.last}


def do_blocks(worker: Any) -> dict[str, Any]:
    """Blocks of the request whose transfer ended last, in the request's order; empty if none came since the last
    asking."""
    state = state_of(worker)
    blocks, state["blocks"] = state["blocks"], []
    return {"blocks": [int(block) for block in blocks]}


def do_dump(worker: Any, path: str, blocks: list[int], names: list[str]) -> dict[str, Any]:
    """Write the blocks of each pool.layer in `names` to one .npz of uint8 [pages, page bytes]."""
    import numpy as np
    import torch

    torch.cuda.synchronize()
    chosen = {f"{pool}.{layer}": raw for (pool, layer), raw in pools(worker).items()}
    np.savez(path, **{name: chosen[name][blocks].cpu().numpy() for name in names})
    return {"pages": len(blocks), "pools": len(names)}


def do_capture(worker: Any) -> dict[str, Any]:
    """Keep the next decode step's inputs and outputs of every layer's indexer."""
    state_of(worker)["capture"] = {}
    return {"armed": True}


def do_captured(worker: Any, path: str) -> dict[str, Any]:
    import numpy as np

    state = state_of(worker)
    kept, state["capture"] = state["capture"] or {}, None
    np.savez(path, **{f"{name}.{layer}": value for layer, step in kept.items() for name, value in step.items()})
    return {"layers": sorted(kept)}


def do_check(worker: Any, path: str, size: str = "small") -> dict[str, Any]:
    """The kernels that this process calls, each held against the reference."""
    functions = {
        ("DeepGEMM fp8_fp4_paged_mqa_logits", worker_checks.SCORES): deployed_logits,
        ("FlashMLA sparse decode", worker_checks.DECODE): deployed_decode,
    }
    return {"says": worker_checks.run(functions, path, size, "vLLM's worker")}


def deployed_logits(q, weights, pool, page_table, lengths, *, page_tokens=64, layout="dsa-index-fp8"):
    """The reference's arguments, handed to the scoring function that the engine calls."""
    import torch
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    rows, cache, weights, lens = worker_checks.scoring_arguments(q, weights, pool, lengths, page_tokens, layout)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    out = fp8_fp4_paged_mqa_logits(
        (rows, None), cache, weights, lens, page_table.contiguous(),
        get_paged_mqa_logits_metadata(lens, PAGE_TOKENS, processors),
        max_model_len=page_table.shape[1] * PAGE_TOKENS, clean_logits=False,
    )  # fmt: skip
    return out.reshape(*q.shape[:-2], -1)


def deployed_decode(q, pool, indices, *, layout="v32-mla-fp8", page_tokens=64, softmax_scale=None, sink=None, **more):
    """The reference's arguments, handed to the attention function that the engine calls for decode."""
    import torch
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    rows, cache, slots = worker_checks.decode_arguments(q, pool, indices, page_tokens, layout, more)
    named = {} if sink is None else {"attn_sink": sink}
    lens = torch.full((len(q),), len(pool) * page_tokens, dtype=torch.int32, device=q.device)
    out, lse = flash_mla_with_kvcache(
        q=rows, k_cache=cache, head_dim_v=512, cache_seqlens=lens,
        block_table=torch.zeros(len(q), 1, dtype=torch.int32, device=q.device),
        tile_scheduler_metadata=get_mla_metadata()[0], is_fp8_kvcache=True, indices=slots,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, **named,
    )  # fmt: skip
    return out[:, 0], lse.reshape(q.shape[:2])
