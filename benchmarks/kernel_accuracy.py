"""How far each kernel lies from float64, by row length and distribution of the scores, as JSON.

    python benchmarks/kernel_accuracy.py --out FILE [--device cpu]

Inputs are the check's own cases; public kernels are used where they import (see benchmarks/kernels.py). On a CPU the
twins run in Triton's interpreter, in float32: their error there says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from needlework.kernels import candidates
from needlework.kernels.check.cases import Case, DecodeCase, LogitsCase
from needlework.kernels.check.operations import OPERATIONS

LENGTHS = (256, 1024, 4096, 16_384, 65_536, 262_144)
LOGITS_DATA = ("random", "concentrated", "spread", "negative")
ENTRIES = (64, 128, 512, 2048)
DECODE_DATA = ("random", "equal", "peaked", "outlier", "large")
LIMIT_S = 100.0


def cases() -> Iterator[tuple[str, str, Case]]:
    """Operation, layout and case, short rows first, so that a run cut short lacks the long ones."""
    for length, data in itertools.product(LENGTHS, LOGITS_DATA):
        yield "indexer_logits", "dsa-index-fp8", LogitsCase(data, 1, lengths=(length,), data=data)
    for keys, layout, data in itertools.product(ENTRIES, ("v4-mla-fp8", "v32-mla-fp8"), DECODE_DATA):
        yield "sparse_mla_decode", layout, DecodeCase(data, 1, batch=2, keys=keys, layout=layout, data=data)


def measured(operation: str, layout: str, case: Any, device: str) -> Iterator[dict[str, Any]]:
    """One row a kernel and output: norm error and worst element against the reference in float64."""
    op, inputs = OPERATIONS[operation], case.inputs("noise", device)
    want = op.want(inputs, torch.float64)
    keys = case.lengths[0] if operation == "indexer_logits" else case.keys
    for kernel in candidates.available(operation):
        row = {"operation": operation, "kernel": kernel.name, "layout": layout, "data": case.data, "keys": keys}
        try:
            with torch.no_grad():
                got = tuple(out.cpu() for out in op.invoke(kernel.functions[operation], inputs))
            for c in op.compare(inputs, got, want):
                yield row | {"output": c.what, "norm_error": c.norm_error, "element_error": c.element_error}
        except (KeyError, ValueError, NotImplementedError, RuntimeError):  # not here, or it refuses this layout
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    rows, left, start = [], 0, time.monotonic()
    for case in cases():
        if time.monotonic() - start > LIMIT_S:
            left += 1
            continue
        rows += measured(*case, options.device)
    card = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    setting = {"card": card, "torch": torch.__version__, "command": "python benchmarks/kernel_accuracy.py --out FILE"}
    options.out.write_text(json.dumps({"setting": setting, "cases_left_out": left, "rows": rows}, indent=0) + "\n")
    print(f"{len(rows)} rows, {left} cases left out, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
