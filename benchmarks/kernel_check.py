"""How often check() cries wolf: 500 good runs of each operation, each with other numbers; or every mutant once.

    python benchmarks/kernel_check.py [--runs 500] [--operation NAME]
    python benchmarks/kernel_check.py --mutants-on cpu|cuda [--operation NAME]     # the mutants, at full size on cuda

A good run is a kernel that is right but computes otherwise: the reference in float64, its output rounded to the
format that a deployed kernel writes (bf16 attention), heads and parts summed in another order, selections in another
order with other ties.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from needlework.kernels import check
from needlework.kernels import reference as ref
from needlework.kernels.check.operations import OPERATIONS
from needlework.kernels.check.suites import suite

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))


def logits(q, weights, pool, page_table, lengths, **more):
    order = torch.randperm(q.shape[-2], generator=torch.Generator().manual_seed(1))
    out = ref.indexer_logits(q.float()[..., order, :], weights[..., order], pool, page_table, lengths, **more)
    return torch.where(torch.isneginf(out), 0.0, out)  # some public kernels leave zeros behind the end


def select(logits, lengths, k, page_table=None, *, page_tokens=64):
    """Ties go to the last position, the order is reversed, and short rows keep their contract."""
    flipped = ref.select_topk(logits, lengths, k)
    for b in torch.nonzero(lengths > k).flatten().tolist():
        n = int(lengths[b])
        flipped[b] = n - 1 - torch.sort(logits[b, :n].flip(0), descending=True, stable=True).indices[:k]
    return flipped if page_table is None else ref.slots_of(flipped, page_table, page_tokens)


def decode(q, pool, indices, *, sink=None, **more):
    order = torch.randperm(indices.shape[1], generator=torch.Generator().manual_seed(1))
    if "topk_length" in more:
        order = torch.arange(indices.shape[1])
    out, lse = ref.sparse_mla_decode(q, pool, indices[:, order], sink=sink, dtype=torch.float64, **more)
    return out.to(torch.bfloat16), lse.float()


def merge(outs, lses, sink=None):
    return ref.merge_partials(outs.flip(0), lses.flip(0), sink)


def store(pool, slots, keys, page_tokens=64):
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    ref.store_index_keys(pool, slots[order], keys[order], page_tokens)


def in_float64(function):
    def run(*args, **inputs):
        double = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        named = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()
        }
        return function(*double, **named)

    return run


def mhc(residual, weight, scale, bias):
    mixed = ref.mhc_project(residual, weight, gemm="float64")
    return ref.mhc_mix(mixed, scale.double(), bias.double())


GOOD = {
    "store_index_keys": store,
    "indexer_logits": logits,
    "select_topk": select,
    "sparse_mla_decode": decode,
    "merge_partials": merge,
    "compress_c4": in_float64(ref.compress_c4),
    "compress_c128": in_float64(ref.compress_c128),
    "finish_index_keys": in_float64(ref.finish_index_keys),
    "mhc_weights": mhc,
    "router_topk": in_float64(ref.router_topk),
}


def good_runs(operation: str, runs: int) -> dict:
    """`runs` cases, drawn round the suite with a new seed each time; page ids past 2^31 bytes only in the first
    round."""
    started, alarms, said = time.perf_counter(), 0, ""
    size = len(suite(operation))
    batches = [
        [c for c in suite(operation, seed=s) if s == 0 or "high pages" not in c.covers]
        for s in range(runs // max(size - 1, 1) + 2)
    ]
    cases = list(itertools.islice(itertools.chain.from_iterable(batches), runs))
    for start in range(0, len(cases), size):
        result = check(GOOD[operation], operation, cases[start : start + size], device="cpu")
        failures = result.failures
        alarms += len(failures)
        said = said or ("" if not len(failures) else f"{failures.iloc[0]['case']}: {failures.iloc[0]['detail']}")
    return {
        "operation": operation,
        "good runs": len(cases),
        "false alarms": alarms,
        "first": said,
        "seconds": round(time.perf_counter() - started, 1),
    }


def caught(operations: Sequence[str], device: str = "cpu") -> pd.DataFrame:
    """Mutants caught, of all. One that only raises is not caught: it may merely not run on this device."""
    import mutants
    import mutants_attention  # noqa: F401  registers its mutants
    from mutants_long import LONG_MUTANTS

    def there(function):
        def run(*args, **inputs):
            with torch.device(device):
                return function(*args, **inputs)

        return run if device != "cpu" else function

    rows = []
    for m in (*mutants.MUTANTS, *LONG_MUTANTS):
        if m.operation in operations:
            failures = check(there(m.function), m.operation, fail_fast=True, device=device).failures
            rows.append((m.operation, bool((~failures["detail"].str.startswith("raises")).any())))
    table = pd.DataFrame(rows, columns=["operation", "caught"])
    return (
        table.groupby("operation")["caught"].agg(["sum", "count"]).rename(columns={"sum": "caught", "count": "mutants"})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--operation", choices=list(OPERATIONS), action="append")
    parser.add_argument("--mutants-on", metavar="DEVICE", help="the mutants instead, on cpu or cuda")
    options = parser.parse_args()
    if options.mutants_on:
        print(caught(options.operation or list(OPERATIONS), options.mutants_on).to_string())
        return
    table = pd.DataFrame([good_runs(name, options.runs) for name in options.operation or OPERATIONS])
    print(table.to_string(index=False))
    print(f"\n{table['false alarms'].sum()} false alarms in {table['good runs'].sum()} good runs")


if __name__ == "__main__":
    main()
