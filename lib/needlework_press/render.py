"""A notebook as an HTML fragment: markdown with MathML, folded code, outputs with their alt text. No script, nothing
fetched."""

from __future__ import annotations

import base64
import functools
import html
import re
import struct
from typing import Any

import latex2mathml.converter
import pygments
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from needlework.serving.scrub import visible
from needlework.workbook import figures, tables
from needlework.workbook.explorers import MARK
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES, Token, _TokenType

from needlework_press import writer

# richest form first; the live widget view is not among them, its still is text/html
ORDER = ("text/html", "text/markdown", "image/svg+xml", "image/png", "text/plain")
MAX_TEXT = 20_000
TALL, NARROW = 30, 34  # lines above which a text may scroll by itself, and characters of a line on a telephone
_NOTEBOOK_LINK = re.compile(r"(?:\./|\.\./|notebooks/)*(\d\d)_\w+\.(?:ipynb|py)(?:#.*)?$")
_FORMATTER = HtmlFormatter(nowrap=True)
STYLES = ("default", "github-dark")  # of code, on light and on dark
_REFERENCE = re.compile(r"&#(?:\d{1,7}|[xX][0-9a-fA-F]{1,6});?|&[a-zA-Z]{2,30};")
_PICTURE = re.compile(r'<img src="(data:image/(?:svg\+xml|png);base64,([^"]*)")')


def mathml(tex: str, display: bool) -> str:
    """TeX as MathML; TeX that cannot be read is shown as code."""
    try:
        found = latex2mathml.converter.convert(tex, display="block" if display else "inline")
        found = found.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")  # HTML knows the element without it
        return found.replace("<math ", '<math tabindex="0" ', 1) if display else found  # it may scroll
    except Exception:
        return f"<code>{html.escape(tex)}</code>"


class Renderer(IPythonRenderer):
    """nbconvert's markdown renderer with maths as MathML, headings one level lower, and links between notebooks kept
    inside the page."""

    def __init__(self, prefix: str, **options: Any):
        super().__init__(**options)
        self.prefix = prefix
        self.headings: list[tuple[int, str]] = []

    def block_math(self, body: str) -> str:
        return mathml(body, True)

    def multiline_math(self, text: str) -> str:
        return mathml(text.strip("$"), True)

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", True)

    def inline_math(self, body: str) -> str:
        return mathml(body, False)

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        words = html.unescape(re.sub(r"<[^>]+>", "", text))
        self.headings.append((level, words))
        anchor = f"{self.prefix}-{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}-{len(self.headings)}"
        return f'<h{min(level + 1, 6)} id="{anchor}">{text}</h{min(level + 1, 6)}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if match := _NOTEBOOK_LINK.fullmatch(url):
            return f'<a href="#nb{match[1]}">{text}</a>'
        if re.match(r"https?://|mailto:|#", url):
            return f'<a href="{html.escape(url)}" rel="noreferrer">{text}</a>'
        return f"<span>{text}</span>"  # a file of the repository: nothing to open beside a single page


def markdown(text: str, prefix: str, *, trusted: bool) -> tuple[str, list[tuple[int, str]]]:
    """Markdown as HTML and its headings (level, text). Raw HTML passes only when trusted: the notebook's own cells,
    never an output."""
    renderer = Renderer(prefix, escape=not trusted)
    body = str(MarkdownWithMath(renderer=renderer).render(visible(text)))
    return re.sub(r"<(pre|table)>", r'<\1 tabindex="0">', body), renderer.headings  # what may scroll is reached by keys


def code(source: str) -> str:
    """A code cell, folded; its first line that is not an import names it."""
    lines = [
        x for x in source.splitlines() if x.strip() and not x.startswith(("import ", "from ", "#"))
    ] or source.splitlines()
    first = tables.escape(lines[0] if lines else "", 80)
    tokens = PythonLexer().get_tokens(visible(source))
    body = pygments.format(((Token if _colourless(kind, text) else kind, text) for kind, text in tokens), _FORMATTER)
    return (
        f'<details class="code"><summary><span>Code</span> <code>{first}</code></summary>'
        f'<pre class="highlight" tabindex="0"><code>{body}</code></pre></details>'
    )


def _colourless(kind: _TokenType, text: str) -> bool:
    """Whether a token is shown as plain text: most look so anyway, and an element for each makes a page slow."""
    return text.isspace() or kind in _colourless_kinds()


@functools.cache
def _colourless_kinds() -> frozenset[_TokenType]:
    styles = [get_style_by_name(name) for name in STYLES]
    plain = {k for k in STANDARD_TYPES if all(s.style_for_token(k) == s.style_for_token(Token) for s in styles)}
    return frozenset(plain | {Token.Operator})


def lazy(body: str) -> str:
    """Pictures that are read when they come near the window, or are printed, and have their room before."""
    return _PICTURE.sub(lambda m: f'<img loading="lazy" decoding="async"{_size(m[2])} src="{m[1]}', body)


def _size(packed: str) -> str:
    """width and height in pixels of a picture in base64, as attributes; nothing when its head does not tell."""
    try:
        head = base64.b64decode(packed[:1600])
    except ValueError:
        return ""
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        width, height = struct.unpack(">II", head[16:24])
    elif found := re.search(rb"<svg\b[^>]*", head):
        sides = [re.search(rb"\b" + side + rb'="([\d.]+)pt"', found[0]) for side in (b"width", b"height")]
        if None in sides:
            return ""
        width, height = (round(float(side[1]) * 4 / 3) for side in sides if side)
    else:
        return ""
    return f' width="{width}" height="{height}"'


def output(out: NotebookNode, prefix: str, what: str) -> str:
    """One output as HTML; prefix makes ids unique on the page, what names the place for a screen reader."""
    if out.output_type == "stream":
        return _text(out.text)
    if out.output_type == "error":
        return f'<div class="error">{_text(f"{out.ename}: {out.evalue}")}</div>'
    data = out.data
    mime = next((m for m in ORDER if m in data), None)
    if mime is None:
        return ""
    value = "".join(data[mime]) if isinstance(data[mime], list) else data[mime]
    value = value if mime.startswith("image/") else visible(value)
    if mime == "text/html":
        value = _REFERENCE.sub(lambda m: m[0] if visible(c := html.unescape(m[0])) == c else "\ufffd", value)
        value = re.sub(rf"\b{MARK}([0-9a-f]{{8}})", rf"{MARK}{prefix}-\1", value)
        value = re.sub(r"\bT_([0-9a-f]{8})", rf"T_{prefix}-\1", value)  # two notebooks may show the same table
        wide = f' tabindex="0" role="region" aria-label="{html.escape(what)}"' if "<table" in value else ""
        return f'<div class="out wide"{wide}>{value}</div>'
    if mime == "text/markdown":
        return f'<div class="out">{markdown(value, prefix, trusted=False)[0]}</div>'
    if mime.startswith("image/"):
        alt = out.metadata.get(mime, {}).get("alt") or out.metadata.get("alt") or ""
        return f'<figure tabindex="0">{figures.Picture(mime, value, alt).to_img()}</figure>'
    return _text(value)


def _text(text: str) -> str:
    text = visible(text)
    cut = f"\n… {len(text) - MAX_TEXT:,} more characters" if len(text) > MAX_TEXT else ""
    rows = sum(1 + len(line) // NARROW for line in text[:MAX_TEXT].split("\n"))
    scrolls = ' tabindex="0"' if rows > TALL else ""  # then a keyboard has to reach it
    return f'<pre class="out"{scrolls}>{html.escape(text[:MAX_TEXT] + cut)}</pre>'


def notebook(nb: NotebookNode, number: str) -> tuple[str, str, str]:
    """The notebook's (title, question, HTML body without its H1). number: its two digits."""
    parts: list[str] = []
    title, question = "", ""
    for place, cell in enumerate(nb.cells):
        tags = cell.metadata.get("tags", ())
        if "remove-cell" in tags or (cell.cell_type == "code" and not cell.outputs and writer.checks(cell.source)):
            continue
        prefix = f"nb{number}-{place}"
        if cell.cell_type == "markdown":
            body, headings = markdown(cell.source, prefix, trusted=True)
            if not title and headings and headings[0][0] == 1:
                title = headings[0][1]
                body = re.sub(r"<h2 .*?</h2>\s*", "", body, count=1, flags=re.S)
                paragraph = re.search(r"<p>(.*?)</p>", body, re.S)
                question = html.unescape(re.sub(r"<[^>]+>", "", paragraph[1])).strip() if paragraph else ""
            parts.append(f'<div class="md">{body}</div>')
        elif cell.cell_type == "code":
            if "hide-input" not in tags:
                parts.append(code(cell.source))
            for i, out in enumerate(cell.outputs):
                parts.append(output(out, f"{prefix}-{i}", f"Output of notebook {number}, cell {place + 1}"))
    return title, question, lazy("\n".join(parts))


def code_css() -> str:
    """Colours for code, for light and dark."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in STYLES)
    strip = r"(?m)^(?:pre|td|span)\S* .*$|background(?:-color)?: [^;}]*;?"
    return f"{re.sub(strip, '', light)}@media screen and (prefers-color-scheme: dark){{{re.sub(strip, '', dark)}}}"
