"""`needlework pages identify|diagnose|compare FILE…`: the tables of this room on a terminal.

Exit status: 0 nothing found (identify: a layout was found), 1 findings (identify: no layout fits), 2 bad input.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

import pandas as pd

from .dumps import Dump, read
from .findings import AS_ROWS, NONE, diagnose, identify
from .layouts import LAYOUTS
from .transfer import compare_dumps


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="needlework pages",
        description="Identify, diagnose or compare dumps of KV pages (.bin + .json, .safetensors, .npy, .npz).",
        epilog=f"Layouts: {', '.join(LAYOUTS)}. Exit status: 0 nothing found, 1 findings, 2 bad input.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("identify", "rank the layouts that explain the bytes"),
        ("diagnose", "list what is wrong in a pool"),
        ("compare", "list what a reader loses between two pools: SENT RECEIVED"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text)
        sub.add_argument("file", nargs=2 if verb == "compare" else "+")
        sub.add_argument("--page-tokens", type=int, help="entries a page (default: what the dump says, or 64)")
        if verb != "identify":
            sub.add_argument("--layout", choices=LAYOUTS, metavar="LAYOUT", help="layout of dumps that name none")
            sub.add_argument("--entries", type=int, help="live entries, counted from the first page")
        if verb == "diagnose":
            sub.add_argument(
                "--before", help="dump of the same pool from before the request: unchanged pages are stale"
            )
        if verb == "compare":
            sub.add_argument(
                "--tolerance", type=float, default=0.0, help="accepted difference, part of the largest value"
            )
        sub.add_argument(
            "--limit-mib",
            type=int,
            default=128,
            help="largest file that is read (default 128; memory takes 12 times as much)",
        )
        sub.add_argument("--csv", action="store_true", help="print comma-separated values")
    return parser


def _load(path: str, args: argparse.Namespace) -> list[Dump]:
    out = []
    for dump in read(path, args.limit_mib << 20):
        layout = args.layout or dump.layout
        if layout is None:
            best = identify(dump.raw, args.page_tokens).iloc[0]
            if best["layout"] == NONE:
                raise ValueError(f"{path}: {best['sentence']}; say which with --layout")
            layout, tokens = str(best["layout"]).removesuffix(AS_ROWS), int(best["page_tokens"])
            dump = replace(dump, stride=dump.stride or int(best["page_bytes"]))
        else:
            tokens = args.page_tokens or dump.page_tokens
        dump = replace(dump, entries=dump.entries if args.entries is None else args.entries)
        out.append(dump.with_layout(layout, tokens))
    return out


def _print(table: pd.DataFrame, csv: bool) -> None:
    if csv:  # text that a spreadsheet would run as a formula gets a leading apostrophe
        print(table.replace(re.compile("^(?=[=+@'\t\r-])"), "'").to_csv(index=False), end="")
    elif len(table):
        with pd.option_context("display.max_colwidth", None, "display.width", None):
            print(table.to_string(index=False, max_rows=200))


def main(argv: list[str]) -> int:
    """Run one verb; returns the exit status. ValueError and OSError go to the dispatcher, which prints one sentence."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed usage
        return 0 if stop.code == 0 else 2
    found = False
    if args.verb == "compare":
        sent, received = (_load(path, args) for path in args.file)
        table = compare_dumps(sent, received, tolerance=args.tolerance)
        _print(table, args.csv)
        found = len(table) > 0
        if not found and not args.csv:
            print(f"{len(sent)} pool{'s' * (len(sent) != 1)} arrived, byte for byte")
        return int(found)
    for path in args.file:
        if args.verb == "identify":
            for dump in read(path, args.limit_mib << 20):
                table = identify(dump.raw, args.page_tokens)
                print(f"{path}: {table['layout'].iloc[0]}" if not args.csv else "", end="" if args.csv else "\n")
                _print(table.head(5), args.csv)
                found |= table["layout"].iloc[0] == NONE
            continue
        before = _load(args.before, args)[0] if args.before else None
        for dump in _load(path, args):
            table = diagnose(
                dump.raw,
                dump.record,
                dump.page_tokens,
                live=dump.live,
                before=None if before is None else before.raw,
                digests=dump.page_digests or None,
            )
            if not args.csv:
                print(f"{path}: {dump}: {len(table)} finding{'s' * (len(table) != 1)}")
            _print(table, args.csv)
            found |= len(table) > 0
    return int(found)
