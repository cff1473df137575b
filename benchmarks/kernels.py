"""Times the Triton twins beside the public kernels on one CUDA device, and writes the table as JSON.

    python benchmarks/kernels.py [--out FILE] [--sweep FILE]

Public kernels are used where they import: sgl-deep-gemm 0.1.2 (with apache-tvm-ffi 0.1.9), sgl-flash-mla 1.0.0, and an
unpacked sglang 0.5.23 wheel on PYTHONPATH for its top-k and its sm_120 file; the top-k needs nvcc. Each time is the
median over replays of a CUDA graph of many calls, after the result was compared with the public kernel's. Calls rotate
over several input sets where one set would fit in the L2 cache. `--sweep` times block sizes instead.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import platform
import re
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from needlework.kernels import triton as twins
from needlework.kernels.candidates import load_file
from needlework.kernels.candidates.public import footer_view, topk_module
from needlework.kernels.candidates.public_triton import package_file
from needlework.kernels.triton.index import logits_config
from needlework.kernels.triton.mla import decode_config
from needlework.kernels.triton.runtime import multiprocessors
from needlework.kernels.triton.topk import topk_config
from needlework.pages import LAYOUTS
from torch import Tensor

Call = Callable[[], Any]
DEVICE = torch.device("cuda")
ROTATE_BYTES = 160e6  # more than twice the largest L2 (H200: 60 MB)
LOGITS_SHAPES = (
    *((1, length) for length in (512, 4096, 16384, 65536, 262144)),
    *((8, length) for length in (4096, 131072)),
    *((64, length) for length in (512, 4096, 32768, 131072)),
    (32, 32768),
)
TOPK_SHAPES = (
    *((1, length) for length in (512, 4096, 16384, 65536, 262144)),
    *((8, length) for length in (4096, 131072)),
    *((64, length) for length in (512, 4096, 16384, 131072)),
)
BARS: dict[
    str, dict[str, dict[str, float]]
] = {  # operation -> shape -> baseline -> largest ratio of our time to theirs
    "indexer_logits": {f"B{b}x{n}": {"deep_gemm": 1.0} for b, n in LOGITS_SHAPES},
    "select_topk": {f"B{b}x{n}": {"sglang-topk-v1": 1.0, "sglang-topk-v2": 1.0} for b, n in TOPK_SHAPES},
    "sparse_mla_decode": {
        "v4 B4 K512": {"flash_mla": 1.0, "sglang-sm120-triton": 0.1},
        "v4 B64 K512": {"flash_mla": 1.0},
        "v32 B4 K2048": {"flash_mla": 1.2},
        "v32 B64 K2048": {"flash_mla": 1.2},
    },
}

MLA_SHAPES = (("v4-mla-fp8", 4, 512), ("v4-mla-fp8", 64, 512), ("v32-mla-fp8", 4, 2048), ("v32-mla-fp8", 64, 2048))
LIMITS = {  # what keeps our time from falling further
    "indexer_logits": "device memory: 90 to 98 % of copy bandwidth from B8x131072 on; in small shapes start-up"
    " (page id, then keys: two dependent reads) and launch",
    "select_topk": "latency of one program a row: sums over all its threads, each with barriers, and one trip of the "
    "candidates through memory. SGLang's second version takes half the time, and drops winners where a "
    "long row crowds one bin",
    "sparse_mla_decode": "eight warps a multiprocessor, 255 registers each, mostly waiting for entries to arrive "
    "(data/kernels/v32_counters_h200.json); FlashMLA lets a third group of warps fetch and convert. No "
    "part of V3.2 decode alone is the limit (data/kernels/v32_ablation_h200.json); split parts pass "
    "through memory once",
}


# ---- timing ----------------------------------------------------------------------------------------------------------
def timed(calls: list[Call], replays: int = 15, target_s: float = 2e-3) -> dict[str, float]:
    """Microseconds a call: median, 10th and 90th percentile over graph replays; `calls` alternate inside the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2] * 2:
            call()
        stream.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        for call in calls:
            call()
        end.record(stream)
        stream.synchronize()
        count = len(calls) * max(1, min(64, math.ceil(target_s / (start.elapsed_time(end) * 1e-3))))
        many = list(itertools.islice(itertools.cycle(calls), count))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                for call in many:
                    call()
            method, play = "graph", graph.replay
        except RuntimeError:  # a kernel that refuses capture: launches back to back, host time included
            torch.cuda.synchronize()
            method, play = "events", lambda: [call() for call in many]
        times = []
        for replay in range(replays + 3):
            start.record(stream)
            play()
            end.record(stream)
            stream.synchronize()
            if replay >= 3:
                times.append(start.elapsed_time(end) * 1e3 / count)
    del graph
    times.sort()
    return {
        "median_us": round(statistics.median(times), 2),
        "p10_us": round(times[len(times) // 10], 2),
        "p90_us": round(times[-1 - len(times) // 10], 2),
        "method": method,
        "replays": replays,
        "calls": count,
    }


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a device-to-device copy of 4 GiB: median of ten."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(13):
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * a.nbytes / statistics.median(times[3:])


# ---- inputs ----------------------------------------------------------------------------------------------------------
def index_inputs(batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random index pages in a random physical order, every row of the same length."""
    rng = torch.Generator("cuda").manual_seed(seed)
    columns = length // 64
    pool = torch.empty(batch * columns, 8448, dtype=torch.uint8, device="cuda")
    for part in pool.split(4096):
        keys = torch.randn(len(part), 64 * 128, generator=rng, device="cuda")
        part[:, :8192] = (keys * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, 8192:] = (torch.rand(len(part), 64, generator=rng, device="cuda") * 0.01 + 1e-3).view(torch.uint8)
    return {
        "q": torch.randn(batch, 64, 128, generator=rng, device="cuda").to(torch.float8_e4m3fn),
        "weights": torch.randn(batch, 64, generator=rng, device="cuda"),
        "pool": pool,
        "page_table": torch.randperm(batch * columns, generator=rng, device="cuda").int().view(batch, columns),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
    }


def topk_inputs(batch: int, length: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator("cuda").manual_seed(seed)
    return {
        "logits": torch.randn(batch, length, generator=rng, device="cuda"),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        "page_table": torch.stack(
            [torch.randperm(length // 64, generator=rng, device="cuda").int() for _ in range(batch)]
        ),
    }


def mla_inputs(batch: int, entries: int, layout: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator("cuda").manual_seed(seed)
    dim, pages = LAYOUTS[layout].dim, max(64, batch * entries // 64)
    pool = torch.zeros(pages, LAYOUTS[layout].page_bytes(64), dtype=torch.uint8, device="cuda")
    for at in range(0, pages * 64, 32768):
        slots = torch.arange(at, min(at + 32768, pages * 64), device="cuda")
        LAYOUTS[layout].scatter(pool, slots, torch.randn(len(slots), dim, generator=rng, device="cuda"))
    picked = [torch.randperm(pages * 64, generator=rng, device="cuda")[:entries].int() for _ in range(batch)]
    return {
        "q": torch.randn(batch, 64, dim, generator=rng, device="cuda").to(torch.bfloat16),
        "pool": pool,
        "indices": torch.stack(picked),
    }


def sets_for(build: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """As many input sets as it takes to pass the L2 cache."""
    first = build(0)
    size = sum(tensor.nbytes for tensor in first.values())
    return [first, *(build(seed) for seed in range(1, max(1, min(64, math.ceil(ROTATE_BYTES / size)))))]


# ---- public kernels --------------------------------------------------------------------------------------------------
def deep_gemm_call(x: dict[str, Tensor]) -> Call:
    import deep_gemm

    lengths = x["lengths"][:, None].contiguous()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, processors)
    cache, q, width = x["pool"].view(-1, 64, 1, 132), x["q"][:, None], x["page_table"].shape[1] * 64
    return lambda: deep_gemm.fp8_paged_mqa_logits(
        q, cache, x["weights"], lengths, x["page_table"], plan, width, clean_logits=False
    )


def sglang_topk_call(x: dict[str, Tensor], k: int, version: int) -> Call:
    module = topk_module(version)
    out = torch.empty(len(x["logits"]), k, dtype=torch.int32, device="cuda")
    plan = torch.zeros(len(out) + 1, 2, dtype=torch.int32, device="cuda")
    if version == 2:  # made once a step and used by every layer, so it stays out of the time
        module.plan(x["lengths"], plan, -1)

    def call() -> Tensor:
        if version == 1:
            module.transform(x["logits"], x["lengths"], x["page_table"], out, 64, None)
        else:
            module.transform_paged(x["logits"], x["lengths"], x["page_table"], out, 64, plan, None)
        return out

    return call


def row_view(pool: Tensor, layout: str) -> Tensor:
    if layout == "v4-mla-fp8":
        return footer_view(pool, 64)
    return pool.as_strided((len(pool), 64, 1, 656), (pool.stride(0), 656, 656, 1))


def flash_mla_call(x: dict[str, Tensor], layout: str) -> Call:
    import flash_mla

    meta, _ = flash_mla.get_mla_metadata()
    cache, v4 = row_view(x["pool"], layout), layout == "v4-mla-fp8"
    q, indices = x["q"][:, None], x["indices"][:, None]

    def call() -> tuple[Tensor, Tensor]:
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, meta, None, is_fp8_kvcache=True, indices=indices, use_legacy=True,
            kv_format="V4" if v4 else "V32",
        )  # fmt: skip
        return out[:, 0], lse[..., 0]

    return call


def sm120_call(x: dict[str, Tensor]) -> Call:
    file = load_file(package_file("sglang", "kernels/ops/attention/flash_mla_sm120_triton.py"))
    decode = file.flash_mla_sparse_decode_triton
    cache, q, indices = footer_view(x["pool"], 64), x["q"][:, None], x["indices"][:, None]

    def call() -> tuple[Tensor, Tensor]:
        out, lse = decode(q, cache, indices, None, None, 512, 512**-0.5)
        return out[:, 0], lse[..., 0]

    return call


# ---- comparison ------------------------------------------------------------------------------------------------------
def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def topk_gap(found: Tensor, x: dict[str, Tensor]) -> float:
    """Share of rows whose selected scores differ, as a multiset, from torch.topk's."""
    inverse = torch.argsort(x["page_table"].long(), dim=1)
    at = inverse.gather(1, (found // 64).long()) * 64 + found % 64
    best = torch.topk(x["logits"], found.shape[1], dim=1).values.sort(dim=1).values
    return float((x["logits"].gather(1, at).sort(dim=1).values != best).any(dim=1).double().mean())


# ---- the table -------------------------------------------------------------------------------------------------------
def measure(operation: str, shape: str, sets: list, makers: dict[str, Callable], error: Callable, moved: int, flop: int,
            copy: float, bars: dict[str, float], config: dict | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """One row a kernel: correctness against the first maker that runs besides ours, then time."""
    rows: list[dict[str, Any]] = []
    for name, make in makers.items():
        row: dict[str, Any] = {"operation": operation, "shape": shape, "kernel": name}
        if name == "needlework" and config:
            row["config"] = config
        try:
            calls = [make(x) for x in sets]
            row["error"] = error(calls[0](), sets[0])
            row |= timed(calls)
            row["bytes"], row["flop"] = moved, flop
            row["TB_per_s"] = round(moved / row["median_us"] * 1e-6, 3)
            row["share_of_copy"] = round(moved / (row["median_us"] * 1e-6) / copy, 3)
            row["TFLOP_per_s"] = round(flop / row["median_us"] * 1e-6, 1)
        except Exception as problem:  # a public kernel that is absent or refuses is a row of the table, not an end
            row["problem"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("bytes", "flop", "calls", "replays")}, flush=True)
    mine = next(row for row in rows if row["kernel"] == "needlework")
    for row in rows:
        if row is not mine and "median_us" in row and "median_us" in mine:
            row["ours_over_this"] = round(mine["median_us"] / row["median_us"], 3)
            if row["kernel"] in bars:
                row["bar"], row["met"] = bars[row["kernel"]], row["ours_over_this"] <= bars[row["kernel"]]
    return rows


def benchmark(best: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row of the table. `best`: a sweep's result, whose fastest block sizes are used instead of the defaults."""
    copy = copy_bandwidth()

    def chosen(key: str) -> dict[str, int] | None:
        first = next(iter(best.get(key, [])), None)
        return first and {k: v for k, v in first.items() if k not in ("us", "error")}

    rows: list[dict[str, Any]] = [
        {"operation": "copy", "shape": "4 GiB", "kernel": "torch copy_", "TB_per_s": round(copy / 1e12, 3)}
    ]
    for batch, length in LOGITS_SHAPES:
        shape = f"B{batch}x{length}"
        sets = sets_for(functools.partial(index_inputs, batch, length))
        want = index_oracle(sets[0])
        config = chosen(f"logits B{batch}x{length}") or logits_config(batch, length, multiprocessors(DEVICE))
        makers = {"needlework": lambda x, c=config: lambda: run_logits(x, c), "deep_gemm": deep_gemm_call}
        rows += measure(
            "indexer_logits", shape, sets, makers, lambda got, x, want=want: gap(got[:1], want),
            batch * length * (132 + 4), 2 * batch * length * 64 * 128, copy, BARS["indexer_logits"][shape], config,
        )  # fmt: skip
        del sets
    for batch, length in TOPK_SHAPES:
        shape = f"B{batch}x{length}"
        sets = sets_for(functools.partial(topk_inputs, batch, length))
        config = chosen(f"topk B{batch}x{length}") or topk_config(batch, length)
        makers = {
            "needlework": lambda x, c=config: lambda: run_topk(x, c),
            "sglang-topk-v1": lambda x: sglang_topk_call(x, 512, 1),
            "sglang-topk-v2": lambda x: sglang_topk_call(x, 512, 2),
            "torch.topk": lambda x: lambda: torch.topk(x["logits"], 512, dim=1, sorted=False),
        }
        rows += measure(
            "select_topk", shape, sets, makers, lambda got, x: topk_gap(got, x) if isinstance(got, Tensor) else 0.0,
            batch * length * 4, 0, copy, BARS["select_topk"][shape], config,
        )  # fmt: skip
        del sets
    for layout, batch, entries in MLA_SHAPES:
        shape = f"{layout.split('-')[0]} B{batch} K{entries}"
        sets = sets_for(functools.partial(mla_inputs, batch, entries, layout))
        want = mla_oracle(sets[0], layout)
        config = chosen(f"{layout} B{batch}") or decode_config(batch, entries, DEVICE, layout)
        makers = {
            "needlework": lambda x, layout=layout, c=config: lambda: run_mla(x, c, layout),
            "flash_mla": lambda x, layout=layout: flash_mla_call(x, layout),
        }
        if layout == "v4-mla-fp8":
            makers["sglang-sm120-triton"] = sm120_call
        entry = 576 + 8 if layout == "v4-mla-fp8" else 656
        dim = LAYOUTS[layout].dim
        rows += measure(
            "sparse_mla_decode", shape, sets, makers,
            lambda got, x, want=want: gap(got[0], want[0]) + float((got[1].double() - want[1]).abs().max()),
            batch * (entries * (entry + 4) + 64 * (dim + 512) * 2), 2 * batch * 64 * entries * (dim + 512), copy,
            BARS["sparse_mla_decode"].get(shape, {}), config,
        )  # fmt: skip
        del sets
    rows += own_rows(copy)
    return rows


def index_oracle(x: dict[str, Tensor]) -> Tensor:
    """float64 logits of the first row."""
    pages = x["pool"][x["page_table"][0].long()]
    keys = pages[:, :8192].reshape(-1, 128).view(torch.float8_e4m3fn).double()
    scales = pages[:, 8192:].contiguous().view(torch.float32).double().flatten()
    return ((x["weights"][0].double() @ torch.relu(x["q"][0].double() @ keys.T)) * scales)[None]


def mla_oracle(x: dict[str, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """float64 output and log-sum-exp."""
    entries = LAYOUTS[layout].gather(x["pool"], x["indices"]).double()
    scores = torch.einsum("bhd,bkd->bhk", x["q"].double(), entries) * x["q"].shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return torch.einsum("bhk,bkd->bhd", (scores - lse[..., None]).exp(), entries[..., :512]), lse


def own_rows(copy: float) -> list[dict[str, Any]]:
    """Twins for which no public kernel is timed: index store and merge."""
    rng = torch.Generator("cuda").manual_seed(0)
    count = 1 << 20
    pool = torch.zeros(count // 64, 8448, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(count, generator=rng, device="cuda")
    keys = torch.randn(count, 128, generator=rng, device="cuda").to(torch.bfloat16)
    outs = torch.randn(8, 64, 64, 512, generator=rng, device="cuda")
    lses = torch.randn(8, 64, 64, generator=rng, device="cuda")

    def stored(_got: Any, _x: Any) -> float:  # on the CPU: CUDA divides by a constant through its reciprocal
        some = slots < 64 * 1024
        wanted = torch.zeros(1024, 8448, dtype=torch.uint8)
        LAYOUTS["dsa-index-fp8"].scatter(wanted, slots[some].cpu(), keys[some].float().cpu())
        return float((wanted != pool[:1024].cpu()).double().mean())

    def merged(got: tuple[Tensor, Tensor], _x: Any) -> float:
        weights = torch.softmax(lses.double(), 0)
        return gap(got[0], (weights[..., None] * outs.double()).sum(0))

    rows = measure(
        "store_index_keys", f"N{count}", [None],
        {"needlework": lambda x: lambda: twins.store_index_keys(pool, slots, keys)},
        stored, count * (256 + 132 + 8), 0, copy, {},
    )  # fmt: skip
    rows += measure(
        "merge_partials", "S8 B64 H64", [None],
        {"needlework": lambda x: lambda: twins.merge_partials(outs, lses, dtype=torch.bfloat16)},
        merged, outs.nbytes + lses.nbytes + outs.nbytes // 16, 0, copy, {},
    )  # fmt: skip
    return rows


# ---- block sizes -----------------------------------------------------------------------------------------------------
LOGITS_SWEEP = [  # BLOCK 64: the kernel that moves whole pages
    {"BLOCK": 64, "STAGES": stages, "num_warps": 4} for stages in (2, 3, 4)
] + [{"BLOCK": 256, "STAGES": 3, "num_warps": 8}]  # fmt: skip
TOPK_SWEEP = [
    {"CHUNK": chunk, "num_warps": warps} for chunk, warps in ((8192, 8), (8192, 16), (16384, 16), (16384, 32))
]
MLA_SWEEP = [
    {"num_warps": warps, "BLOCK": block, "STAGES": stages, "HALVES": halves}
    for warps, block, stages, halves in (
        (8, 64, 1, 1), (8, 64, 2, 1), (8, 64, 3, 1), (8, 32, 2, 1), (8, 128, 1, 1), (8, 128, 2, 1), (4, 64, 1, 2),
        (4, 64, 2, 2), (4, 32, 2, 2), (4, 32, 3, 2), (4, 128, 1, 2), (8, 128, 1, 2),
    )
]  # fmt: skip


def compile_one(job: tuple[str, dict[str, int]]) -> str:
    """Run one configuration once in a process of its own, so that the compiled kernel lies in Triton's cache."""
    kind, config = job
    try:
        if kind == "logits":
            run_logits(index_inputs(1, 4096, 0), config | {"STEPS": 2})
        elif kind == "topk":
            for length in (config["CHUNK"], 8 * config["CHUNK"]):
                run_topk(topk_inputs(2, length, 0), config)
        else:
            x = mla_inputs(2, 512, kind, 0)
            for splits in (1, 2):
                run_mla(x, config | {"SPLITS": splits}, kind)
        torch.cuda.synchronize()
        return ""
    except Exception as problem:
        return f"{kind} {config}: {type(problem).__name__}: {str(problem)[:150]}"


def run_logits(x: dict[str, Tensor], config: dict[str, int] | None = None) -> Tensor:
    return twins.indexer_logits(**x, config=config)


def run_topk(x: dict[str, Tensor], config: dict[str, int] | None = None) -> Tensor:
    return twins.select_topk(x["logits"], x["lengths"], 512, x["page_table"], config=config)


def run_mla(x: dict[str, Tensor], config: dict[str, int] | None = None, layout: str = "v4-mla-fp8") -> Any:
    return twins.sparse_mla_decode(**x, layout=layout, dtype=torch.bfloat16, config=config)


def sweep(kinds: list[str]) -> dict[str, Any]:
    """Configurations of each kind and shape, fastest first."""
    jobs = [("logits", c) for c in LOGITS_SWEEP] + [("topk", c) for c in TOPK_SWEEP]
    jobs += [("v4-mla-fp8", c) for c in MLA_SWEEP] + [("v32-mla-fp8", c) for c in MLA_SWEEP]
    jobs = [job for job in jobs if ("mla" if "mla" in job[0] else job[0]) in kinds]
    jobs.sort(key=lambda job: job[0], reverse=True)  # the slow ones first
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = [text for text in pool.map(compile_one, jobs) if text]
    print("\n".join(failed), flush=True)
    found: dict[str, Any] = {"failed": failed}
    for batch, length in LOGITS_SHAPES if "logits" in kinds else ():
        sets = sets_for(functools.partial(index_inputs, batch, length))
        want = index_oracle(sets[0])
        # programs a multiprocessor holds at once (seen: 8, 6, 5, 2); one or two rounds of them
        held = {2: 8, 3: 6, 4: 5}
        tries = []
        for c in LOGITS_SWEEP:
            slots = 132 * (2 if c["BLOCK"] == 256 else held[c["STAGES"]])
            for waves in (1, 2):
                programs = max(1, waves * slots // batch)
                tries.append(c | {"STEPS": max(1, math.ceil(length // c["BLOCK"] / programs))})
        found[f"logits B{batch}x{length}"] = ranked(sets, tries, run_logits, lambda got, want=want: gap(got[:1], want))
    for batch, length in TOPK_SHAPES if "topk" in kinds else ():
        sets = sets_for(functools.partial(topk_inputs, batch, length))
        found[f"topk B{batch}x{length}"] = ranked(sets, TOPK_SWEEP, run_topk, lambda got, x=sets[0]: topk_gap(got, x))
    for layout, batch, entries in MLA_SHAPES if "mla" in kinds else ():
        sets = sets_for(functools.partial(mla_inputs, batch, entries, layout))
        want = mla_oracle(sets[0], layout)
        tries = [c | {"SPLITS": s} for c in MLA_SWEEP for s in ((2, 4, 8, 16) if batch == 4 else (1, 2, 4))]
        found[f"{layout} B{batch}"] = ranked(
            sets, tries, functools.partial(run_mla, layout=layout), lambda got, want=want: gap(got[0], want[0])
        )
    return found


def ranked(sets: list, tries: list[dict[str, int]], call: Callable, error: Callable) -> list[dict[str, Any]]:
    results = []
    for config in tries:
        try:
            calls = [functools.partial(call, x, config) for x in sets]
            wrong = error(calls[0]())
            results.append({"us": timed(calls, replays=5, target_s=5e-4)["median_us"], "error": wrong, **config})
        except Exception as problem:
            results.append({"us": math.inf, "problem": f"{type(problem).__name__}: {str(problem)[:80]}", **config})
    results.sort(key=lambda row: row["us"])
    print(*results[:6], sep="\n", flush=True)
    return results


def driver_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", path.read_text()) if path.exists() else None
    return found[1] if found else "unknown"


def setting() -> dict[str, Any]:
    """Card and versions; nothing about the machine beyond them."""
    versions = {}
    for package in ("torch", "triton", "sgl-deep-gemm", "apache-tvm-ffi", "sgl-flash-mla"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    versions["sglang"] = "0.5.23 (files of the wheel)" if importlib.util.find_spec("sglang") else "absent"
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "timing": "CUDA-graph replays of many calls, cold L2 by rotating inputs; medians over replays",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the table here as JSON")
    parser.add_argument("--sweep", type=Path, help="time block sizes and write them here")
    parser.add_argument("--kinds", nargs="+", choices=("logits", "topk", "mla"), default=["logits", "topk", "mla"])
    parser.add_argument("--configs", type=Path, help="a sweep's file: use its fastest block sizes, not the defaults")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a CUDA device; recorded results are in data/kernels/", file=sys.stderr)
        return 2
    if options.sweep:
        options.sweep.write_text(json.dumps(sweep(options.kinds), indent=0))
        return 0
    best = json.loads(options.configs.read_text()) if options.configs else {}
    command = "python benchmarks/kernels.py --out data/kernels/h200.json"
    if options.configs:
        command = f"python benchmarks/kernels.py --sweep sweep.json && {command} --configs sweep.json"
    result = {"setting": setting(), "command": command, "rows": benchmark(best), "limits": LIMITS}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    missed = [f"{r['operation']} {r['shape']}: {r['ours_over_this']} x {r['kernel']}, bar {r['bar']}"
              for r in result["rows"] if r.get("met") is False]  # fmt: skip
    print("bars missed:", "; ".join(missed) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
