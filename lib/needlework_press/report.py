"""The report: one self-contained HTML file per incident, checked before it is written. No script, nothing fetched,
maths as MathML."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from needlework.evidence import Bundle, incidents
from needlework.processes import output_of
from needlework.serving import target
from needlework.serving.scrub import plain
from needlework.workbook import onepage, tables, verdict
from needlework.workbook.machine import browser

from needlework_press import origin, render, runner, writer
from needlework_press.page_check import problems

# also for the browser tests: no sandbox for containers, nothing in the background
BROWSER_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


__all__ = ["BROWSER_FLAGS", "ReportError", "browser", "build", "page", "problems", "take_picture"]


class ReportError(RuntimeError):
    """A report that was not written because its own check failed; the message lists what is wrong."""


def build(plan: runner.Plan) -> Path:
    """Write report/<place>/index.html from the executed notebooks of `plan` and return its path.

    A notebook that was not executed is named on the page. Raises ReportError when none was, or when the page fails
    `problems`.
    """
    twins = runner.choose(plan.notebooks, plan.root)
    executed = {twin: path for twin in twins if (path := plan.executed(twin)) is not None}
    if not executed:
        raise ReportError("no notebook is executed yet; run `needlework run` first")
    notebooks = [(twin.stem, _read(path)) for twin, path in executed.items()]
    bundle = incidents.incident(plan.incident) if plan.incident in incidents.names() else None
    own = plan.default or plan.kind == "recorded"  # the incident is what was examined, not another deployment
    found = _summary(notebooks, bundle if own else None)
    text = page(
        notebooks,
        title=(bundle.title if bundle else plan.incident) if own else _headline(plan, found, notebooks),
        subtitle=_subtitle(plan, notebooks, own),
        found=found,
        missing=[twin.stem for twin in twins if twin not in executed],
        foreign="" if own else plan.incident,
    )
    wrong = problems(text, [stem for stem, _ in notebooks])
    if wrong:
        raise ReportError("the report was not written: " + "; ".join(wrong[:8]))
    path = plan.root / "report" / plan.place / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)
    for name in onepage.NAMES:  # of an earlier build
        path.with_name(name).unlink(missing_ok=True)
    if found is not None and found.brief is not None:
        onepage.write(path.parent, found.brief, whole="index.html")
    return path


def _read(path: Path) -> NotebookNode:
    try:
        nb = nbformat.read(path, as_version=4)
        nbformat.validate(nb)
    except (ValueError, AttributeError, TypeError, KeyError, nbformat.ValidationError) as error:
        raise ReportError(f"{path.name} is not a valid notebook ({type(error).__name__}); execute it again") from None
    return nb


def _finding(nb: NotebookNode) -> str:
    """The sentence that a notebook prints under *What we found*, or ""."""
    below = itertools.dropwhile(lambda cell: "## What we found" not in cell.source.splitlines(), nb.cells)
    printed = (out.get("text", "") for cell in below for out in cell.get("outputs", ()))
    return next((" ".join(text.split()) for text in printed if text.strip()), "")


def _headline(
    plan: runner.Plan, found: verdict.Summary | None, notebooks: Sequence[tuple[str, NotebookNode]] = ()
) -> str:
    """What was examined, and what it loses, or the first sentence of the verdict or of the last notebook on it."""
    if found and found.brief:
        return found.brief.title
    arms = len(target.split_arms(plan.target or ""))
    where = {
        "lab": f"The deployment in a box ({plan.target})",
        "vllm": "vLLM on this machine",
        "http": f"{arms} live endpoints" if arms > 1 else "A live endpoint",
    }.get(plan.kind, plan.kind)
    said = [(stem, said) for stem, nb in notebooks if writer.stamp_of(nb).get("live") and (said := _finding(nb))]
    stem, sentence = ("", found.verdict) if found else said[-1] if said else ("", "no verdict")
    short = plain(sentence.split(". ")[0].strip().rstrip("."), 90)
    return f"{where}: {short}{f' (notebook {stem[:2]} alone)' if stem else ''}"


def _subtitle(plan: runner.Plan, notebooks: Sequence[tuple[str, NotebookNode]], own: bool) -> str:
    days = sorted({str(day) for _, nb in notebooks if (day := writer.stamp_of(nb).get("when"))})
    if own:
        words = {"lab": "measured on the deployment in a box, beside recordings"}
        return f"Incident {plan.incident}, {words.get(plan.kind, 'rebuilt from recordings, nothing was sent')}"
    when = f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "Measured live"
    read = [stem for stem, nb in notebooks if (o := origin.origin(writer.stamp_of(nb))) and o.word == "recorded"]
    return when + (
        f"; what is marked recorded belongs to incident {plan.incident}, not this deployment" if read else ""
    )


def _summary(notebooks: Sequence[tuple[str, NotebookNode]], bundle: Bundle | None) -> verdict.Summary | None:
    """The verdict notebook's own result (the last one displayed), else what the incident's ledger holds."""
    for _, nb in reversed(notebooks):
        for cell in reversed(nb.cells):
            for out in reversed(cell.get("outputs", [])):
                value = out.get("data", {}).get(verdict.MIME)
                if value is not None:
                    return verdict.from_mapping(json.loads(value) if isinstance(value, str) else value)
    return verdict.from_ledger(bundle.load_ledger()) if bundle else None


# ---- the page ----


def page(
    notebooks: Sequence[tuple[str, NotebookNode]],
    *,
    title: str,
    subtitle: str,
    found: verdict.Summary | None,
    missing: Sequence[str] = (),
    foreign: str = "",
) -> str:
    """The report as text. notebooks: (stem, executed notebook) in reading order; missing: stems that were not executed;
    foreign: the incident to which what is recorded belongs, where another deployment was examined."""
    entries, sections = [], []
    origins = {stem[:2]: origin.origin(writer.stamp_of(nb)) for stem, nb in notebooks}
    for stem, nb in notebooks:
        number = stem[:2]
        name, question, body = render.notebook(nb, number)
        name = name or stem
        heading = f'<span class="number">{number}</span>{tables.escape(name)}'
        source = origins[number]
        mark = f'<span class="origin {source.word}">{source.word}</span>' if source else ""
        where = f'<p class="from">{mark} {tables.escape(source.text, 300)}</p>' if source else ""
        if foreign and source and source.word == "recorded":
            told = tables.escape(f"Of incident {foreign}, not of this deployment", 120)
            body = f'<details class="foreign"><summary>{told}</summary>{body}</details>'
        entries.append(
            f'<li><a href="#nb{number}">{heading}</a> {mark}<small>{tables.escape(question, 160)}</small></li>'
        )
        sections.append(
            f'<section class="notebook" id="nb{number}" aria-labelledby="nb{number}-title">'
            f'<h2 id="nb{number}-title">{heading}</h2>{where}'
            f"{body}{_stamp(nb, stem)}</section>"
        )
    css = resources.files("needlework_press").joinpath("page.css").read_text("utf-8") + render.code_css()
    css += f"@page{{@top-left{{content:{_css_text(f'{title[:100]} · Needlework')}}}}}"
    name = tables.escape(title, 120)
    said = [(stem, sentence) for stem, nb in notebooks if (sentence := _finding(nb))] if found is None else []
    half = _half_page(found, origin.overview(origins), said)
    few = f"{len(missing)} notebook{'s' * (len(missing) > 1)} not executed"
    lacking = f"<details><summary>{few}</summary>{tables.escape(', '.join(missing), 400)}</details>" if missing else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{onepage.POLICY}">'
        f'<title>{name} · Needlework</title><link rel="icon" href="data:,"><style>{css}</style></head><body>'
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>{name}</h1><p>{tables.escape(subtitle, 200)}</p></header>"
        f'<main class="frame" id="main" tabindex="-1">{half}'
        '<nav class="contents" id="contents" aria-label="Contents"><strong>Contents</strong>'
        f'<ol><li><a href="#summary">Summary</a></li>{"".join(entries)}</ol>{lacking}</nav>'
        f'<div class="notebooks">{"".join(sections)}</div></main>'
        '<a class="up" href="#contents">Contents</a></body></html>\n'
    )


def _css_text(text: str) -> str:
    """A text as a CSS string in which nothing but letters and digits stands for itself."""
    return '"' + "".join(c if c.isalnum() or c == " " else f"\\{ord(c):x} " for c in plain(text)) + '"'


def _half_page(found: verdict.Summary | None, basis: str, findings: Sequence[tuple[str, str]]) -> str:
    said = f"<p>{tables.escape(basis, 600)}</p>" if basis else ""
    if found is None:
        told = "".join(f"<li>{stem[:2]}: {tables.escape(sentence, 400)}</li>" for stem, sentence in findings)
        body = "<p>Notebook 11, which gives the verdict over all trials, was not part of this run.</p>"
        body += f"<p>What those that were say:</p><ul>{told}</ul>{said}" if told else said
    else:
        rows = [*found.rows(), *([("Live or recorded", said)] if said else [])]
        body = "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows) + "</dl>"
    return (
        '<section class="summary" id="summary" aria-labelledby="summary-title">'
        f'<h2 id="summary-title">Summary</h2>{body}</section>'
    )


def _stamp(nb: NotebookNode, stem: str) -> str:
    mark = writer.stamp_of(nb)
    if "source" not in mark:
        return ""
    versions = ", ".join(f"{n} {v}" for n, v in mark.get("versions", {}).items())
    data = "".join(
        f"<li><code>{tables.escape(n, 120)}</code> {tables.escape(d, 16)}</li>" for n, d in mark.get("data", {}).items()
    )
    listing = f"<p>Data read:</p><ul>{data}</ul>" if data else "<p>No recorded data was read.</p>"
    return (
        f'<details class="stamp"><summary>What notebook {tables.escape(stem)} rests on</summary>'
        f"<p>Source {tables.escape(mark['source'], 16)}; {tables.escape(versions, 400)}.</p>"
        f"{listing}</details>"
    )


# ---- a picture of it ----


def take_picture(
    page_path: Path, picture: Path, *, width: int = 1200, height: int = 900, timeout_s: float = 60
) -> None:
    """Write a PNG of the top of a page, quantised to 128 colours. RuntimeError when there is no Chromium or it
    fails."""
    from PIL import Image

    program = browser()
    if program is None:
        raise RuntimeError(
            "no Chromium on this machine; install one (Debian: apt-get install chromium) to take a picture"
        )
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        command = [
            *(program, *BROWSER_FLAGS, f"--user-data-dir={folder}/profile", "--hide-scrollbars"),
            *(f"--window-size={width},{height}", f"--screenshot={shot}", page_path.resolve().as_uri()),
        ]
        try:
            output_of(command, timeout_s=timeout_s).check_returncode()
        except (subprocess.SubprocessError, OSError) as error:
            raise RuntimeError(f"Chromium could not draw the report ({type(error).__name__})") from None
        picture.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(shot).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(picture, "PNG", optimize=True)
