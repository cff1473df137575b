"""Is this page fit to be published: one file that runs and fetches nothing, every picture with its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser

from needlework.workbook import figures

MAX_BYTES = 5_000_000


class _Reader(HTMLParser):
    FORBIDDEN = frozenset(
        re.findall(
            r"\w+",
            "script iframe frame frameset object embed base applet form audio video source track portal template "
            "textarea plaintext xmp noscript noembed noframes",
        )
    )
    FETCHING = frozenset(
        re.findall(r"\S+", "src srcset poster data background action formaction xlink:href manifest ping imagesrcset")
    )
    VOID = frozenset(re.findall(r"\w+", "area br col hr img input link meta wbr"))  # they have no end tag

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.headings: list[str] = []
        self.landmarks: list[str] = []
        self.open: list[str] = []
        self._within: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        if tag not in self.VOID:
            self.open.append(tag)
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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_comment(self, data: str) -> None:
        self.found.append("a comment, which may hide what follows it")

    def unknown_decl(self, data: str) -> None:
        self.handle_comment(data)

    handle_pi = unknown_decl

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.found.append(f"an end </{tag[:20]}> of something else: what follows would stand elsewhere")
        if tag == self._within:
            self._within = None

    def handle_data(self, data: str) -> None:
        if self._within == "style":
            self._css(data)
        elif self._within == "h2":
            self.headings[-1] += data

    def _css(self, text: str) -> None:
        # an escape may stand for a letter of a name, never for the bracket that makes it a function
        read = re.sub(
            r"\\([0-9a-fA-F]{1,6})\s?", lambda m: c if (c := chr(int(m[1], 16) % 0x10FFFF)).isalpha() else "", text
        )
        plain = re.sub(r"/\*.*?\*/|\s|\\", "", read, flags=re.S).lower()
        if re.search(r"@import|url\((?![\"']?(?:data:|#))|expression\(|image-set\(", plain):
            self.found.append("a style that fetches something")

    def _alt(self, alt: str | None) -> None:
        try:
            figures.check_alt(alt or "")
        except ValueError as error:
            self.found.append(f"a picture without useful alt text ({error})")


def _letter(escape: re.Match[str]) -> str:
    meant = chr(int(escape[1], 16) % 0x10FFFF)
    return meant if meant.isalpha() else ""


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
