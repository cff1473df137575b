"""Which data files and library modules a notebook used, found while it runs, for the stamp that says when it is
stale."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from needlework import neighbours

_opened: set[str] = set()
_data: str = ""


def begin(root: str) -> None:
    """Start noting files under `root`/data that this process opens for reading."""
    global _data
    first = not _data
    _data = os.path.join(os.path.realpath(root), "data") + os.sep
    if first:
        sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], (str, bytes)):
        return
    mode = arguments[1]
    if isinstance(mode, str) and not set("wax+") & set(mode):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(_data):
            _opened.add(path)


def report() -> dict[str, Any]:
    """What was used so far: {"data": {path below the root: digest}, "library": {module: digest}, "live": [kind of each
    target that was measured live]}."""
    root = Path(_data).parent
    data = {str(Path(p).relative_to(root)): file_digest(Path(p)) for p in _opened if os.path.isfile(p)}
    live = live_kinds()
    return {"data": dict(sorted(data.items())), "library": dict(sorted(library_in_use(live).items())), "live": live}


def live_kinds() -> list[str]:
    """Kinds of target that this process measured live; a notebook that opened none has not loaded the module."""
    target = sys.modules.get("needlework.serving.target")
    return target.live_kinds() if target else []


def library_in_use(live: Iterable[str] = ()) -> dict[str, str]:
    """Digest by name of each needlework module that is imported now, and of the whole package that provides a target of
    `live`: its server processes import the rest."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] == "needlework" and file and file.endswith(".py"):
            found[name] = code_digest(Path(file).read_text("utf-8"))
    points = neighbours.found(neighbours.TARGETS)
    for package in {points[kind].module.split(".")[0] for kind in live if kind in points}:
        room = Path(str(sys.modules[package].__file__)).parent
        for path in sorted(room.rglob("*.py")):
            parts = [p for p in path.relative_to(room).with_suffix("").parts if p != "__init__"]
            found[".".join([package, *parts])] = code_digest(path.read_text("utf-8"))
    return found


def file_digest(path: Path) -> str:
    """First 16 hex digits of the file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def code_digest(text: str) -> str:
    """Digest of Python code without its comments, docstrings and white space: what it does, not how it is laid out."""
    lines = text.splitlines(keepends=True)
    spans = [
        (t.start, t.end) for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                # ast counts columns in bytes, and a docstring's line starts with white space only
                end_column = len(lines[(first.end_lineno or 1) - 1].encode()[: first.end_col_offset].decode())
                spans.append(((first.lineno, first.col_offset), (first.end_lineno or 1, end_column)))
    for (line, column), (end_line, end_column) in sorted(spans, reverse=True):
        head, tail = lines[line - 1][:column], lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [head + tail] + [""] * (end_line - line)
    return hashlib.sha256(re.sub(r"\s+", "", "".join(lines)).encode()).hexdigest()[:16]
