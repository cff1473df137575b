"""Decode throughput of KV pages against this machine's own copy bandwidth, and peak memory against the output's size.

    python benchmarks/pages.py [--device cuda] [--gib 1] [--threads N] [--layouts NAME …]

Bandwidth counts bytes read plus bytes written, for decode and for copy alike; the best of the repeats counts for both.
On a CPU both have the same threads, and the copy is the faster of torch's and the C library's (whose stores pass the
cache by). "new" is `Layout.decode`, which allocates its output, against `clone` of the pool. The pool holds what the
public writer stores for random keys. Targets: decode >= 0.5 x copy, peak <= 2 x output; any that is missed ends in 1.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from needlework.pages import LAYOUTS


def timed(step, device: str, repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs after one warm-up."""
    best = float("inf")
    for turn in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def describe(device: str) -> str:
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def measure(name: str, gib: float, device: str, repeats: int) -> bool:
    layout = LAYOUTS[name]
    size = layout.page_bytes(64)
    pages = int(gib * 2**30) // size
    generator = torch.Generator().manual_seed(0)
    written = layout.encode({"values": torch.randn(64, 64, layout.dim, generator=generator)})
    pool = written.repeat(-(-pages // 64), 1)[:pages].contiguous().to(device)
    other = torch.empty_like(pool)
    copy_s = timed(lambda: other.copy_(pool), device, repeats)
    if device == "cpu":
        copy_s = min(copy_s, timed(lambda: copy_memory(other, pool), device, repeats))
    other = None
    out = torch.empty(pages, 64, layout.dim, device=device)
    decode_s = timed(lambda: layout.values(pool, 64, out=out), device, repeats)
    output = out.numel() * 4
    out = None
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoded = layout.decode(pool)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        before = current_rss()
        decoded = layout.decode(pool)
        peak = max(current_rss(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - before
    del decoded
    moved, copied = pool.numel() + output, 2 * pool.numel()
    ratio = (moved / decode_s) / (copied / copy_s)
    new = (moved / timed(lambda: layout.decode(pool), device, 1)) / (copied / timed(lambda: pool.clone(), device, 1))
    print(
        f"| {name} | {pool.numel() / 2**30:.2f} | {copied / copy_s / 1e9:.1f} | {moved / decode_s / 1e9:.1f} | "
        f"{ratio:.2f} | {new:.2f} | {peak / output:.2f} | {os.getloadavg()[0]:.1f} |",
        flush=True,
    )
    return ratio >= 0.5 and peak <= 2 * output


def copy_memory(target: torch.Tensor, source: torch.Tensor) -> None:
    """memmove of a contiguous tensor, one part a thread."""
    threads = torch.get_num_threads()
    parts = list(zip(target.view(-1).chunk(threads), source.view(-1).chunk(threads), strict=True))
    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(lambda pair: ctypes.memmove(pair[0].data_ptr(), pair[1].data_ptr(), pair[1].numel()), parts))


def current_rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the pool")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe(args.device))
    print("| layout | pool GiB | copy GB/s | decode GB/s | decode : copy | new | peak : output | load average |")
    print("|---|---|---|---|---|---|---|---|")
    met = [measure(name, args.gib, args.device, args.repeats) for name in args.layouts]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
