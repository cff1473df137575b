"""Kernels under test, each behind the reference's signature: ours, public ones where they are installed, and a user's
file.

A user's kernel needs an adapter of about ten lines, in a file that the user names (the file is run as trusted code:
check only what you would run yourself). `candidates.load("my_kernel.py:decode")` takes the function `decode` from it:

    import torch
    from my_package import my_decode                                   # the deployed kernel

    def decode(q, pool, indices, *, layout, page_tokens, softmax_scale=None, sink=None, **more):
        if more or layout != "v4-mla-fp8":
            raise ValueError("one cache of V4 pages only")             # a refusal, where the check allows one
        cache = pool.as_strided((len(pool), page_tokens, 1, 584), (pool.stride(0), 584, 584, 1))
        out, lse = my_decode(q.unsqueeze(1), cache, indices.unsqueeze(1), softmax_scale or q.shape[-1] ** -0.5, sink)
        return out.squeeze(1), lse.reshape(q.shape[:2])

The arguments are those of the reference of the same operation; a function may also be called as `my_kernel.py:decode`
for any operation in `operations.OPERATIONS`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from needlework.kernels.candidates import public

Function = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """name; functions by operation; missing: why it cannot run here ("" = it can), with what to install; note: its
    source."""

    name: str
    functions: Mapping[str, Function] = field(repr=False)
    missing: str = ""
    needs_cuda: bool = False
    note: str = ""

    def __str__(self) -> str:
        what = ", ".join(self.functions) or "nothing"
        return f"{self.name}: {self.missing}" if self.missing else f"{self.name}: {what} ({self.note})"


def load(spec: str) -> Candidate:
    """A candidate by name, or a function of a file as "path/to/file.py:function".

    A named kernel whose package is not installed gives a candidate that says so (`missing`). Raises ValueError for an
    unknown name, a file or function that is not there, or a file that does not import.
    """
    if spec in names():
        return _named(spec)
    path, colon, name = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), name)
    raise ValueError(f"unknown candidate {spec[:80]!r}: give one of {', '.join(names())}, or path/to/file.py:function")


def names() -> tuple[str, ...]:
    """The named candidates, here or not."""
    return ("reference", "triton", *public.PUBLIC)


def available(operation: str) -> list[Candidate]:
    """Every named candidate for an operation, those that are not here included (their `missing` says why)."""
    built = [_named(name) for name in names()]
    return [c for c in built if operation in c.functions or (c.missing and operation in c.note)]


def _from_file(path: Path, name: str) -> Candidate:
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise ValueError(f"{path.name} has no function {name[:60]!r}")
    from needlework.kernels.check.operations import OPERATIONS

    return Candidate(f"{path.name}:{name}", dict.fromkeys(OPERATIONS, function), note=f"the file {path.name}")


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own. Raises ValueError, in one sentence, where it is not there or fails."""
    from needlework.kernels.triton import runtime  # noqa: F401  chooses Triton's interpreter before the file imports it

    if not path.is_file():
        raise ValueError(f"there is no file {path.name} at the path given")
    module_spec = importlib.util.spec_from_file_location(f"needlework_candidate_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # Triton looks a kernel's module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        del sys.modules[module_spec.name]
        raise ValueError(f"{path.name} does not import: {type(error).__name__}: {str(error)[:200]}") from error
    return module


TWINS = ("store_index_keys", "indexer_logits", "select_topk", "sparse_mla_decode", "merge_partials")


def _named(name: str) -> Candidate:
    if name == "reference":
        from needlework.kernels.check.operations import OPERATIONS

        return Candidate(name, {op.name: op.reference for op in OPERATIONS.values()}, note="plain torch")
    if name == "triton":
        try:
            from needlework.kernels import triton as twins
        except ImportError as error:
            return Candidate(name, {}, missing=f"not here: {error}", note=", ".join(TWINS))
        return Candidate(name, {twin: getattr(twins, twin) for twin in TWINS}, note=twins.where())
    entry = public.PUBLIC[name]
    missing = entry.missing()
    functions = {} if missing else {entry.operation: entry.build(load_file)}
    return Candidate(name, functions, missing, entry.needs_cuda, f"{entry.operation}: {entry.source}")


def launched(function: Function) -> list[Any]:
    """The Triton kernels that a function of Python launches, as they stand in its module."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)  # type: ignore[attr-defined]
    return [kernel for kernel in named if hasattr(kernel, "fn")]


def adapter_example() -> str:
    """The documented adapter, for a notebook or a terminal."""
    text = inspect.getdoc(sys.modules[__name__]) or ""
    return text[text.index("    import torch") : text.index("The arguments are")].rstrip()


__all__ = ["Candidate", "adapter_example", "available", "launched", "load", "load_file", "names"]
