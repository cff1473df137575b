"""Seconds that each plain-torch reference takes over a sweep of text lengths up to 65,536 tokens, on CPU threads.

    python benchmarks/references.py [--longest 65536] [--threads N]

One request at V4's sizes: 64 query heads, one index key and one entry per four tokens, 512 selected, hidden 4,096. The
sweep takes 1,024 tokens and four times as many until the longest. Target: at most 20 s a reference.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable

import torch
from needlework.kernels import reference as ref
from needlework.pages import LAYOUTS

CHUNK = 2048  # tokens that the wide activations are made for at once; longer texts take as many calls
HIDDEN = 4096


def steps(tokens: int) -> dict[str, Callable[[], object]]:
    """What each reference does for one request of so many tokens; inputs are made before the clock starts."""
    torch.manual_seed(0)
    keys = tokens // 4
    pages = -(-keys // 64)
    table = torch.randperm(pages).int()[None]
    index, x = LAYOUTS["dsa-index-fp8"], torch.randn(pages * 64, 128)
    pool = index.encode({"values": x.view(pages, 64, 128)})
    entries = LAYOUTS["v4-mla-fp8"].encode({"values": torch.randn(pages, 64, 512)})
    lengths = torch.tensor([keys], dtype=torch.int32)
    q, weights, query = torch.randn(1, 64, 128), torch.rand(1, 64), torch.randn(1, 64, 512)
    logits, k = torch.randn(1, keys), 512
    slots = torch.randperm(pages * 64)[None, : min(k, keys)].int()
    outs, lses = torch.randn(keys // 128, 1, 64, 512), torch.randn(keys // 128, 1, 64)
    wide, narrow = torch.randn(tokens, 256), torch.randn(tokens, 128)
    norm, positions, frequencies = torch.rand(128), torch.arange(keys) * 4, ref.rope_frequencies()
    residual = torch.randn(min(tokens, CHUNK), 4, HIDDEN)
    mix = torch.randn(24, 4 * HIDDEN) * 0.01, torch.ones(3), torch.zeros(24)
    experts = torch.randn(tokens, 256)
    return {
        "store_index_keys": lambda: ref.store_index_keys(pool, torch.arange(keys), x[:keys]),
        "indexer_logits": lambda: ref.indexer_logits(q, weights, pool, table, lengths),
        "indexer_logits in float64": lambda: ref.indexer_logits(q, weights, pool, table, lengths, dtype=torch.float64),
        "select_topk": lambda: ref.select_topk(logits, lengths, k, table),
        "sparse_mla_decode": lambda: ref.sparse_mla_decode(query, entries, slots),
        "sparse_mla_decode over every entry": lambda: ref.sparse_mla_decode(
            query, entries, torch.arange(keys).int()[None]
        ),
        "merge_partials": lambda: ref.merge_partials(outs, lses),
        "compress_c4": lambda: ref.compress_c4(wide, wide, torch.zeros(4, 256)),
        "compress_c128": lambda: ref.compress_c128(narrow, narrow, torch.zeros(128, 128)),
        "finish_index_keys": lambda: ref.finish_index_keys(x[:keys], norm, positions, frequencies),
        "mhc_weights": lambda: [ref.mhc_weights(residual, *mix) for _ in range(0, tokens, CHUNK)],
        "router_topk": lambda: ref.router_topk(experts, torch.zeros(256)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=65_536, help="tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = [options.longest // 4**power for power in range(16) if options.longest // 4**power >= 1024][::-1]
    seconds: dict[str, list[float]] = {}
    for tokens in lengths:
        for name, step in steps(tokens).items():
            start = time.perf_counter()
            step()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| reference | " + " | ".join(f"{tokens:,}" for tokens in lengths) + " | sweep s |")
    print("|---|" + "---|" * (len(lengths) + 1))
    for name, times in seconds.items():
        print(f"| {name} | " + " | ".join(f"{t:.3f}" for t in times) + f" | {sum(times):.2f} |")
    return 0 if max(sum(times) for times in seconds.values()) <= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
