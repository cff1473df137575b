"""`needlework check OPERATION --candidate SPEC`: hold a kernel against its reference and print the table."""

from __future__ import annotations

import argparse

from needlework.kernels import candidates
from needlework.kernels.check import CheckResult, check
from needlework.kernels.check.operations import OPERATIONS


def main(argv: list[str]) -> int:
    """Exit status: 0 the candidate agrees, 1 it fails, 2 bad input or nothing could be run."""
    parser = argparse.ArgumentParser(
        prog="needlework check",
        description=__doc__,
        epilog=f"a file of your own adapts the deployed kernel to the reference's arguments:\n\n"
        f"{candidates.adapter_example()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", nargs="?", help=", ".join(OPERATIONS))
    parser.add_argument(
        "--candidate",
        default="triton",
        metavar="SPEC",
        help=f"{', '.join(candidates.names())}, or path/to/file.py:function (the file is run: only code you trust)",
    )
    parser.add_argument("--size", choices=("small", "full"), help="small on a CPU, full on a CUDA device by default")
    parser.add_argument("--seed", type=int, default=0, help="other numbers at the same edges")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--list", action="store_true", help="operations and candidates, and whether they are here")
    options = parser.parse_args(argv)
    if options.list or options.operation is None:
        print(_listing())
        return 0 if options.list else 2
    result = check(options.candidate, options.operation, size=options.size, seed=options.seed, device=options.device)
    print(render(result))
    return {True: 0, False: 1, None: 2}[result.passed]


def render(result: CheckResult) -> str:
    """The result as plain text: the table, the coverage, the sentence."""
    if result.passed is None:
        return str(result)
    table = result.table[["status", "case", "norm_error", "element_error", "detail"]].copy()
    for column in ("norm_error", "element_error"):
        table[column] = table[column].map("{:.1e}".format)
    widths = {column: max(len(column), *table[column].str.len()) for column in table.columns[:-1]}
    lines = ["  ".join(f"{name:<{widths.get(name, 0)}}" for name in table.columns)]
    lines += [
        "  ".join(f"{row[name]:<{widths.get(name, 0)}}" for name in table.columns).rstrip()
        for _, row in table.iterrows()
    ]
    lines += ["", "covered"]
    for topic, covered, how in result.coverage[["topic", "covered", "how"]].to_numpy():
        lines.append(f"  {'yes' if covered else 'no '}  {topic}{f' ({how})' if how else ''}")
    return "\n".join([*lines, "", str(result)])


def _listing() -> str:
    lines = ["operations"] + [f"  {op.name:<18} {op.summary}" for op in OPERATIONS.values()] + ["", "candidates"]
    return "\n".join(lines + [f"  {candidates.load(name)}" for name in candidates.names()])
