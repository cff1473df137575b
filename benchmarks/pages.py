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
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from needlework.pages import LAYOUTS, Layout


def timed(steps: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Seconds of the fastest of `repeats` runs of each step after one warm-up. The steps take turns, so that a moment
    at which the machine is slow meets all of them."""
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(repeats + 1):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            kept = step()  # freed after the clock is read
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
            del kept
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
    output = pages * 64 * layout.dim * 4
    copy_s, decode_s = in_place(layout, pool, device, repeats)
    before = reset_peak(device)
    layout.decode(pool)
    peak = read_peak(device) - before
    best = timed({"clone": pool.clone, "decode": lambda: layout.decode(pool)}, device, repeats=2)
    moved, copied = pool.numel() + output, 2 * pool.numel()
    ratio, new = (s / d * moved / copied for s, d in ((copy_s, decode_s), (best["clone"], best["decode"])))
    print(
        f"| {name} | {pool.numel() / 2**30:.2f} | {copied / copy_s / 1e9:.1f} | {moved / decode_s / 1e9:.1f} | "
        f"{ratio:.2f} | {new:.2f} | {peak / output:.2f} | {os.getloadavg()[0]:.1f} |",
        flush=True,
    )
    return ratio >= 0.5 and peak <= 2 * output


def in_place(layout: Layout, pool: torch.Tensor, device: str, repeats: int) -> tuple[float, float]:
    """Seconds of the fastest copy, and of a decode, into memory that is there already."""
    other, out = torch.empty_like(pool), torch.empty(len(pool), 64, layout.dim, device=device)
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(pool),
        "decode": lambda: layout.values(pool, 64, out=out),
    }
    if device == "cpu":
        steps["memmove"] = lambda: copy_memory(other, pool)
    best = timed(steps, device, repeats)
    decode_s = best.pop("decode")
    return min(best.values()), decode_s


def reset_peak(device: str) -> int:
    """Bytes in use now; the peak counts from here."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return read_peak(device)


def read_peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def copy_memory(target: torch.Tensor, source: torch.Tensor) -> None:
    """memmove of a contiguous tensor, one part a thread."""
    threads = torch.get_num_threads()
    parts = list(zip(target.view(-1).chunk(threads), source.view(-1).chunk(threads), strict=True))
    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(lambda pair: ctypes.memmove(pair[0].data_ptr(), pair[1].data_ptr(), pair[1].numel()), parts))


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
