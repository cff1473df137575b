"""The canonical writer: text twin to notebook, executed notebook to the same bytes every time, and the stamp that says
when it is stale."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode
from needlework.evidence import incidents
from needlework.serving.scrub import strip_ansi
from needlework.workbook import session

from needlework_press import trace

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
STAMPED = ("torch", "numpy", "pandas", "scipy", "matplotlib", "ipywidgets", "nbclient")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,16}")
_CELL_FILE = re.compile(r"/\S*ipykernel_\d+/\d+\.py")
_PROGRESS = re.compile(r"^.*\d+%\|.*$\n?", re.M)  # a tqdm bar: it shows times and rates
_STYLER = re.compile(r"#?T_([0-9a-f]{5,})")


class TwinError(ValueError):
    """A text twin or notebook that cannot be used; the message says which and why."""


def twins(root: Path | None = None) -> list[Path]:
    """The text twins in reading order: notebooks/src/NN_slug.py."""
    return sorted((root or incidents.root()).glob("notebooks/src/[0-9][0-9]_*.py"))


def notebook_path(twin: Path) -> Path:
    """The committed notebook of a twin."""
    return twin.parent.parent / f"{twin.stem}.ipynb"


def read_twin(twin: Path) -> NotebookNode:
    """The twin as a notebook without outputs: kernel python3, tags kept, ids from a hash of kind, text and place among
    equals."""
    nb = jupytext.reads(twin.read_text("utf-8"), fmt="py:percent")
    return tidy_inputs(nb)


def tidy_inputs(nb: NotebookNode) -> NotebookNode:
    """Keep of a notebook's inputs only what is canonical: cell kind, source and tags; set ids and kernel. JupyterLab
    folds what checks or draws."""
    seen: dict[str, int] = {}
    cells = []
    for cell in nb.cells:
        key = f"{cell.cell_type}\0{cell.source}"
        seen[key] = seen.get(key, 0) + 1
        digest = hashlib.sha256(f"{key}\0{seen[key]}".encode()).hexdigest()[:8]
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        fresh = make(source=cell.source, id=digest)
        if tags := cell.metadata.get("tags"):
            fresh.metadata["tags"] = list(tags)
        if cell.cell_type == "code" and (checks(cell.source) or "figures.show(" in cell.source):
            fresh.metadata["jupyter"] = {"source_hidden": True}
        cells.append(fresh)
    fresh_nb = nbformat.v4.new_notebook(cells=cells)
    fresh_nb.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    fresh_nb.metadata["language_info"] = {"name": "python"}
    return fresh_nb


def checks(source: str) -> bool:
    """Whether a cell does nothing but assert: the notebook's own test, which the report leaves out."""
    with contextlib.suppress(SyntaxError):  # magic
        found = ast.parse(source).body
        return bool(found) and all(isinstance(statement, ast.Assert) for statement in found)
    return False


def write_twin(notebook: Path, twin: Path) -> bool:
    """Bring a notebook's cells back to its text twin (`--keep`); returns whether the twin changed. Outputs stay out of
    it."""
    nb = tidy_inputs(nbformat.read(notebook, as_version=4))
    for cell in nb.cells:
        cell.pop("id", None)
        cell.metadata.pop("jupyter", None)
    nb.metadata.pop("language_info", None)
    nb.metadata["jupytext"] = {"notebook_metadata_filter": "kernelspec", "cell_metadata_filter": "tags"}
    text = jupytext.writes(nb, fmt="py:percent")
    # the header that jupytext adds repeats what every notebook has
    text = re.sub(r"\A# ---\n(?:#.*\n)*?# ---\n+", "", text)
    changed = not twin.is_file() or twin.read_text("utf-8") != text
    if changed:
        twin.write_text(text, "utf-8")
    return changed


def same_inputs(nb: NotebookNode, twin: NotebookNode) -> bool:
    """Whether the two hold the same cells: kind, source and tags, in order."""

    def shape(x: NotebookNode) -> list[tuple[str, str, tuple[str, ...]]]:
        return [(c.cell_type, c.source.rstrip(), tuple(c.metadata.get("tags", ()))) for c in x.cells]

    return shape(nb) == shape(twin)


# ---- outputs ----


def scrub(text: str, root: Path) -> str:
    """Text without what differs from run to run or machine to machine: object addresses, cell files, this folder, the
    environment, home."""
    text = _ADDRESS.sub("", _CELL_FILE.sub("<cell>", text))
    for folder, name in (
        (root, ""),
        (Path(sys.prefix), "<environment>/"),
        (Path(sys.base_prefix), "<python>/"),
        (Path.home(), "~/"),
    ):
        if len(folder.parts) > 1:  # never the root of the file system
            text = text.replace(f"{folder}/", name)
    return text


def canonical_output(output: NotebookNode, root: Path) -> NotebookNode | None:
    """One output in canonical form, or None where nothing is left of it. TwinError for a widget that has no still
    form."""
    if output.output_type == "stream":
        text = strip_ansi(scrub(output.text, root))
        if output.name == "stderr":
            text = _PROGRESS.sub("", text)
        output.text = text
        return output if text.strip() else None
    if output.output_type == "error":
        output.traceback = [strip_ansi(scrub(line, root)) for line in output.traceback]
        output.evalue = scrub(output.evalue, root)
        return output
    data = output.data
    if data.pop(WIDGET_VIEW, None) is not None and "text/html" not in data:
        if re.search(r"\d+%\||it/s|HBox\(children=\(HTML", data.get("text/plain", "")):
            return None  # a progress bar
        raise TwinError("a widget without a still form; show it through workbook.explorers")
    for mime, value in list(data.items()):
        if isinstance(value, str) and (mime.startswith("text/") or mime == "image/svg+xml"):
            data[mime] = scrub(value, root)
    return output if data else None


def canonical(nb: NotebookNode, stamp: dict[str, Any], root: Path) -> NotebookNode:
    """An executed notebook reduced to what is the same in two runs: no timing, no widget state, no address, our ids,
    the stamp."""
    fresh = tidy_inputs(nb)
    for place, (cell, source) in enumerate(zip(fresh.cells, nb.cells, strict=True), start=1):
        if cell.cell_type != "code":
            continue
        cell.execution_count = source.execution_count
        try:
            outputs = [canonical_output(o, root) for o in source.outputs]
        except TwinError as error:
            raise TwinError(f"cell {place}: {error}") from None
        cell.outputs = [o for o in outputs if o is not None]
        for i, output in enumerate(cell.outputs):
            if "data" in output and "text/html" in output.data:
                output.data["text/html"] = _fix_styler_ids(output.data["text/html"], f"{cell.id}{i}")
    fresh.metadata["needlework"] = stamp
    nbformat.validate(fresh)
    return fresh


def _fix_styler_ids(text: str, key: str) -> str:
    """A Styler made without a fixed id carries a random one; give it one from its cell."""
    random_ids = set(_STYLER.findall(text))
    fixed = hashlib.sha256(key.encode()).hexdigest()
    for i, found in enumerate(sorted(random_ids, key=text.index)):
        text = text.replace(f"T_{found}", f"T_{fixed[i : i + 8]}")
    return text


def dumps(nb: NotebookNode) -> str:
    """The notebook as canonical JSON text."""
    return nbformat.writes(nb, version=4) + "\n"


# ---- stamp ----


def stamp(twin: Path, used: dict[str, Any]) -> dict[str, Any]:
    """What the outputs rest on: digest of the twin, of each data file and library module used, package
    versions, and the kinds of target that were measured live."""
    return {
        "source": trace.file_digest(twin),
        "data": used["data"],
        "library": used["library"],
        "live": used.get("live", []),
        "versions": session.versions(STAMPED),
    }


def stamp_of(nb: NotebookNode) -> dict[str, Any]:
    """A notebook's stamp; empty when it has none, or one that `stamp` did not make: anybody may have sent it."""
    mark = nb.metadata.get("needlework")
    kinds = {"source": str, "data": dict, "library": dict, "versions": dict, "live": list, "cannot": str, "failed": str}
    if not isinstance(mark, dict) or not all(isinstance(mark.get(k, kind()), kind) for k, kind in kinds.items()):
        return {}
    return dict(mark) if "failed" in mark or {"source", "data", "library"} <= mark.keys() else {}


def why_stale(notebook: Path, twin: Path, root: Path) -> str | None:
    """Why the notebook's outputs no longer rest on what is there, in words; None when they do. Versions are not
    judged."""
    if not notebook.is_file():
        return "never executed"
    try:
        nb = nbformat.read(notebook, as_version=4)
    except Exception:
        return "not a readable notebook"
    mark = stamp_of(nb)
    if not mark:
        return "no stamp"
    if mark["source"] != trace.file_digest(twin):
        return "its source changed"
    for name, digest in mark["data"].items():
        path = root / name
        if not path.is_file() or trace.file_digest(path) != digest:
            return f"{name} changed"
    for name, digest in mark["library"].items():
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # nor is there a package that could hold it
            spec = None
        if spec is None or not spec.origin or trace.code_digest(Path(spec.origin).read_text("utf-8")) != digest:
            return f"{name} changed"
    return None
