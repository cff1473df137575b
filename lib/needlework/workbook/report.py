"""The report: one self-contained HTML file per incident, checked before it is written. No script, nothing fetched,
maths as MathML."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from needlework.workbook import figures, incidents, render, runner, tables, verdict

MAX_BYTES = 5_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# also for the browser tests: no sandbox for containers, nothing in the background
BROWSER_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class ReportError(RuntimeError):
    """A report that was not written because its own check failed; the message lists what is wrong."""


def build(plan: runner.Plan) -> Path:
    """Write report/<incident>/index.html from the executed notebooks of `plan` and return its path.

    A notebook that was not executed is named on the page. Raises ReportError when none was, or when the page fails
    `problems`.
    """
    twins = runner.choose(plan.notebooks, plan.root)
    notebooks = [(t.stem, nbformat.read(plan.output(t), as_version=4)) for t in twins if plan.output(t).is_file()]
    if not notebooks:
        raise ReportError("no notebook is executed yet; run `needlework run` first")
    missing = [t.stem for t in twins if not plan.output(t).is_file()]
    bundle = incidents.incident(plan.incident) if plan.incident in incidents.names() else None
    text = page(
        notebooks,
        title=bundle.title if bundle else plan.incident,
        subtitle=_subtitle(plan, bundle),
        found=_summary(notebooks, bundle),
        missing=missing,
    )
    wrong = problems(text, [stem for stem, _ in notebooks])
    if wrong:
        raise ReportError("the report was not written: " + "; ".join(wrong[:8]))
    path = plan.root / "report" / plan.incident / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)
    return path


def _subtitle(plan: runner.Plan, bundle: incidents.Incident | None) -> str:
    target = plan.target or (bundle.settings.get("workbook", {}).get("target") if bundle else None) or "lab"
    kind = re.split(r"[:=,]", target)[0]
    words = {
        "lab": "measured on the deployment in a box",
        "vllm": "measured on vLLM on this machine",
        "recorded": "rebuilt from recordings, nothing was sent",
    }
    return f"Incident {plan.incident}, {words.get(kind, 'measured on a live endpoint')}"


def _summary(
    notebooks: Sequence[tuple[str, NotebookNode]], bundle: incidents.Incident | None
) -> verdict.Summary | None:
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
) -> str:
    """The report as text. notebooks: (stem, executed notebook) in reading order; missing: stems that were not
    executed."""
    entries, sections = [], []
    for stem, nb in notebooks:
        number = stem[:2]
        name, question, body = render.notebook(nb, number)
        name = name or stem
        heading = f'<span class="number">{number}</span>{tables.escape(name)}'
        entries.append(f'<li><a href="#nb{number}">{heading}</a><small>{tables.escape(question, 160)}</small></li>')
        sections.append(
            f'<section class="notebook" id="nb{number}" aria-labelledby="nb{number}-title">'
            f'<h2 id="nb{number}-title">{heading}</h2>'
            f"{body}{_stamp(nb, stem)}</section>"
        )
    css = resources.files("needlework.workbook").joinpath("page.css").read_text("utf-8") + render.code_css()
    name = tables.escape(title, 120)
    lacking = f"<p>Not executed: {tables.escape(', '.join(missing), 400)}</p>" if missing else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<title>{name} · Needlework</title><link rel="icon" href="data:,"><style>{css}</style></head><body>'
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>{name}</h1><p>{tables.escape(subtitle, 200)}</p></header>"
        '<div class="frame"><nav class="contents" aria-label="Contents"><strong>Contents</strong>'
        f"<ol>{''.join(entries)}</ol>{lacking}</nav>"
        f'<main id="main" tabindex="-1">{_half_page(found)}{"".join(sections)}</main></div></body></html>\n'
    )


def _half_page(found: verdict.Summary | None) -> str:
    if found is None:
        body = "<p>No verdict was reached: the notebooks that give one were not part of this run.</p>"
    else:
        body = "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in found.rows()) + "</dl>"
    return (
        f'<section class="summary" aria-labelledby="summary-title"><h2 id="summary-title">Summary</h2>{body}</section>'
    )


def _stamp(nb: NotebookNode, stem: str) -> str:
    mark = nb.metadata.get("needlework", {})
    versions = ", ".join(f"{n} {v}" for n, v in mark.get("versions", {}).items())
    data = "".join(
        f"<li><code>{tables.escape(n, 120)}</code> {tables.escape(d, 16)}</li>" for n, d in mark.get("data", {}).items()
    )
    listing = f"<p>Data read:</p><ul>{data}</ul>" if data else "<p>No recorded data was read.</p>"
    return (
        f'<details class="stamp"><summary>What notebook {tables.escape(stem)} rests on</summary>'
        f"<p>Source {tables.escape(mark.get('source', 'unknown'), 16)}; {tables.escape(versions, 400)}.</p>"
        f"{listing}</details>"
    )


# ---- the page's own check ----


class _Reader(HTMLParser):
    FORBIDDEN = frozenset(
        (
            "script",
            "iframe",
            "frame",
            "object",
            "embed",
            "base",
            "applet",
            "form",
            "audio",
            "video",
            "source",
            "track",
            "portal",
        )
    )
    FETCHING = frozenset(
        (
            "src",
            "srcset",
            "poster",
            "data",
            "background",
            "action",
            "formaction",
            "xlink:href",
            "manifest",
            "ping",
            "imagesrcset",
        )
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.headings: list[str] = []
        self.landmarks: list[str] = []
        self._within: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        if tag in self.FORBIDDEN:
            self.found.append(f"a <{tag}> element")
        for name, value in values.items():
            compact = re.sub(r"[\s\x00-\x1f]", "", value).lower()
            if name.startswith("on"):
                self.found.append(f"an event handler {name[:20]} on <{tag}>")
            elif name in self.FETCHING and not compact.startswith(("data:image/", "#")):
                self.found.append(f"{name} of <{tag}> points outside: {value[:60]!r}")
            elif name == "href" and not compact.startswith(
                ("#", "data:,") if tag == "link" else ("#", "https://", "http://", "mailto:")
            ):
                self.found.append(f"href of <{tag}> is not a plain link: {value[:60]!r}")
            elif name == "style":
                self._css(value)
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh":
            self.found.append("a page refresh")
        if tag == "img":
            self._alt(values.get("alt"))
        if (identity := values.get("id")) is not None:
            if identity in self.ids:
                self.found.append(f"two elements with the id {identity[:40]!r}")
            self.ids.add(identity)
        self._within = tag if tag in ("style", "h2") else self._within
        if tag == "h2":
            self.headings.append("")
        if tag in ("main", "nav", "header"):
            self.landmarks.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._within:
            self._within = None

    def handle_data(self, data: str) -> None:
        if self._within == "style":
            self._css(data)
        elif self._within == "h2":
            self.headings[-1] += data

    def _css(self, text: str) -> None:
        plain = re.sub(r"/\*.*?\*/|\s|\\", "", text, flags=re.S).lower()
        if (
            "@import" in plain
            or re.search(r"url\((?![\"']?(?:data:|#))", plain)
            or "expression(" in plain
            or "image-set(" in plain
        ):
            self.found.append("a style that fetches something")

    def _alt(self, alt: str | None) -> None:
        try:
            figures.check_alt(alt or "")
        except ValueError as error:
            self.found.append(f"a picture without useful alt text ({error})")


def problems(text: str, stems: Sequence[str] = ()) -> list[str]:
    """What keeps this page from being published: scripts, anything fetched, missing alt text, double ids, a lost
    notebook, a bare widget, size."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    found = list(dict.fromkeys(reader.found))
    if len(text.encode()) > MAX_BYTES:
        found.append(f"the page has {len(text.encode()) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}")
    for stem in stems:
        heading = next((h for h in reader.headings if h.startswith(stem[:2])), None)
        if heading is None or heading == stem[:2] + stem:
            found.append(f"no title from notebook {stem}")
    if sorted(reader.landmarks) != ["header", "main", "nav"]:
        found.append("not exactly one header, nav and main")
    bare = re.findall(
        r"\b(?:VBox|HBox|IntSlider|SelectionSlider|Dropdown)\((?:children|description|options|value)=", text
    )
    return found + [f"a widget shown as text: {widget[:20]}" for widget in sorted(set(bare))]


# ---- a picture of it ----


def browser() -> str | None:
    """Path of a Chromium on this machine, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


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
            subprocess.run(command, capture_output=True, timeout=timeout_s, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise RuntimeError(f"Chromium could not draw the report ({type(error).__name__})") from None
        picture.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(shot).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(picture, "PNG", optimize=True)
