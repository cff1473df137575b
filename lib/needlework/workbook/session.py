"""The first cell of every notebook: seed, style, and one line that says what ran."""

from __future__ import annotations

import html
import importlib.metadata
import inspect
import json
import os
import platform
import random
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from needlework.evidence import Bundle

SHOWN = ("torch", "numpy", "pandas", "matplotlib")
EARLIER = "NEEDLEWORK_RUNS"  # folders of what other notebooks of the same run have measured, set by the runner


def versions(packages: tuple[str, ...] = SHOWN) -> dict[str, str]:
    """Installed versions by package name, Needlework and Python first; no time, host or path."""
    found = {"needlework": "", "python": platform.python_version()}
    for name in ("needlework", *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def start(title: str, *, seed: int = 0) -> None:
    """Seed random, numpy and (where it is imported) torch, set the figure style, and print one line of versions.

    The line carries no time and no host, so that two executions of a notebook give the same bytes.
    """
    import numpy as np

    from needlework.workbook import figures

    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:  # a notebook that does not use torch need not wait for it
        sys.modules["torch"].manual_seed(seed)
    figures.use_style()
    if "IPython" in sys.modules and not os.environ.get("NEEDLEWORK_NOTEBOOK"):
        from needlework.workbook import live

        live.enable()
    print(" · ".join([*(f"{name} {version}" for name, version in versions().items()), f"seed {seed}"]))


def measured() -> list[Path]:
    """Run folders of what the other notebooks of this `needlework run` have measured on its target; none where this
    notebook runs alone, or on the target that it has by default."""
    return [Path(name) for name in os.environ.get(EARLIER, "").split(os.pathsep) if name]


def digests(bundle: Bundle) -> dict[str, bool]:
    """Buffer -> whether both sides of the transfer hold the same content, from the page dumps that the bundle keeps."""
    sides = [(sent, sent.with_name(sent.name.replace("prefill", "decode", 1)))
             for sent in sorted(bundle.pages.glob("prefill-*.json"))]  # fmt: skip
    read = [[json.loads(path.read_text("utf-8"))["digest"] for path in pair] for pair in sides]
    return {sent.stem.removeprefix("prefill-"): a == b for (sent, _), (a, b) in zip(sides, read, strict=True)}


@dataclass(frozen=True)
class Source:
    """The text of library functions: the first folded, those that stand beside it open."""

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n\n".join(text for _, text in self.parts)

    def _repr_html_(self) -> str:
        return "".join(
            f"<details{' open' if i else ''}><summary>Source of <code>{html.escape(name)}</code></summary>"
            f"<pre tabindex='0'><code>{html.escape(text)}</code></pre></details>"
            for i, (name, text) in enumerate(self.parts)
        )


def source(*objects: Any) -> Source:
    """The source of functions, classes or Triton kernels, so that a reader sees the real thing and not a copy."""
    plain = [getattr(obj, "fn", obj) for obj in objects]  # a Triton kernel holds its function
    return Source(tuple((f"{f.__module__}.{f.__qualname__}", textwrap.dedent(inspect.getsource(f))) for f in plain))
