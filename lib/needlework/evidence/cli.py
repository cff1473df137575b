"""`needlework collect | redact | bundle`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from needlework.evidence import redaction
from needlework.evidence.bundle import Bundle, from_run, unzip
from needlework.evidence.collect import collect
from needlework.evidence.findings import findings
from needlework.evidence.plan import load_plan
from needlework.evidence.settings import effective

MAX_SETTINGS = 60  # of a role, printed


def main(argv: list[str]) -> int:
    verb, rest = argv[0], argv[1:]
    return {"collect": _collect, "redact": _redact, "bundle": _bundle}[verb](rest)


def _collect(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "needlework collect", description="Collect as a plan says. Only reads; redacts before it writes."
    )
    parser.add_argument("plan", help="the collection plan, incident.toml")
    parser.add_argument("--out", default="evidence", help="folder to write (default: evidence)")
    options = parser.parse_args(argv)
    plan = load_plan(options.plan)
    if (Path(options.out) / "collection.json").exists():
        raise ValueError(
            f"{options.out} already holds a collection; choose another --out, nothing was asked or overwritten"
        )
    collection = collect(plan, progress=lambda line: print(line, file=sys.stderr))
    collection.write(options.out)
    came = sum(item["state"] == "ok" for item in collection.items)
    places = sum(row["places"] for row in collection.replaced.values())
    print(f"{came} of {len(collection.items)} items collected, {places} secrets and names replaced; see {options.out}")
    for row in findings(collection).rows:
        print(row)
    table = effective(collection)
    for (host, role), part in table[table["source"] != "process environment"].groupby(["host", "role"], sort=False):
        told = ", ".join(f"{row.setting} {row.value}" for row in part.head(MAX_SETTINGS).itertuples())
        print(f"{host}/{role}: {len(part)} settings: {told}{' …' if len(part) > MAX_SETTINGS else ''}")
    return 0 if came else 1


def _redact(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "needlework redact", description="Redact a text file, or check that files hold nothing to redact."
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when a file holds a secret or an identity"
    )
    parser.add_argument("-o", "--out", help="write the redacted text here (default: standard output)")
    options = parser.parse_args(argv)
    if not options.check and len(options.files) > 1:
        raise ValueError("redact one file at a time, so that it is clear where each result goes")
    leaks = 0
    for name in options.files:
        text = _read(name)
        if options.check:
            found = redaction.check(text)
            leaks += len(found)
            for leak in found:
                print(f"{name}:{leak.line}: {leak.kind}")
        elif options.out:
            if Path(options.out).exists():
                raise ValueError(f"{options.out} exists; nothing was overwritten")
            Path(options.out).write_text(redaction.redact(text), encoding="utf-8")
        else:
            sys.stdout.write(redaction.redact(text))
    if options.check:
        print(
            f"{leaks} places to redact in {len(options.files)} file(s)"
            if leaks
            else f"{len(options.files)} file(s) hold nothing to redact"
        )
    return 1 if leaks else 0


def _read(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: no such file")
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        raise ValueError(f"{name} is not text; page dumps and archives cannot be redacted as text")
    return data.decode("utf-8", "replace")


def _bundle(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "needlework bundle", description="Make, check, seal, pack or unpack an incident bundle."
    )
    parser.add_argument("action", choices=("new", "check", "seal", "zip", "unzip"))
    parser.add_argument("path", nargs="?", help="the bundle's folder, or the zip to unpack")
    parser.add_argument("--run", help="new: the folder of a run, as `needlework diagnose --run` wrote it")
    parser.add_argument(
        "--out", help="new: the bundle's folder; zip: the file to write; unzip: where to unpack (default: here)"
    )
    options = parser.parse_args(argv)
    if options.action == "new":
        if not (options.run and options.out) or options.path:
            parser.error("new needs --run DIR and --out NAME")
        made = from_run(options.run, options.out)
        print(f"wrote {made.path}: read it over, then `needlework bundle zip {made.path}`")
        return 0
    if not options.path:
        parser.error(f"{options.action} needs the path of a bundle")
    if options.action == "unzip":
        bundle = unzip(options.path, options.out or ".")
        print(f"unpacked {bundle.path}; to read it: needlework run --incident {bundle.path}")
    else:
        bundle = Bundle(Path(options.path))
    if options.action == "seal":
        bundle.seal()
    if options.action == "zip":
        print(f"wrote {bundle.zip(options.out or f'{bundle.path.name}.zip')}")
        return 0
    problems = bundle.problems()
    for problem in problems:
        print(problem)
    print(
        f"{bundle.path.name}: {len(problems)} problem(s)"
        if problems
        else f"{bundle.path.name}: schema, digests and secrecy hold"
    )
    return 1 if problems else 0
