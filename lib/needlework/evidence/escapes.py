"""Read text as the program behind it will: escapes of JSON, URLs and HTML undone, each character still tied to what
stood in the original, so that a secret found in the decoded form is replaced in the written one.
"""

from __future__ import annotations

import html
import re

ESCAPE = re.compile(
    r"%(?:25)*[0-7][0-9A-Fa-f]|(?<!\\)\\++(?:u00[0-7][0-9A-Fa-f]|x[0-7][0-9A-Fa-f]|[\"'/nrt])|"
    r"&(?:amp;)*(?:#\d{2,3}|#x[0-9A-Fa-f]{2}|quot|amp|lt|gt|apos|colon|equals|sol|commat|num|lowbar|period);"
)
# What makes a line worth decoding: quotes alone are escaped in every line of a journal, and the rules know them.
HIDES = re.compile(
    r"%(?:25)*[0-7][0-9A-Fa-f]|(?<!\\)\\++(?:u00[0-7]|x[0-7]|[/nrt])|&(?:amp;)*(?:#x?[0-9A-Fa-f]{2,3}|[a-z]{2,6});"
)
_CODE = re.compile(r"(?:%(?:25)*|\\+u00|\\+x)([0-9A-Fa-f]{2})$")
_LETTER = {"n": "\n", "r": " ", "t": "\t"}


def _meaning(written: str) -> str:
    if match := _CODE.match(written):
        return chr(int(match[1], 16))
    if written[0] == "&":
        return html.unescape(written.replace("amp;", "") if written != "&amp;" else written)[:1]
    return _LETTER.get(written[-1], written[-1])


class Written:
    """A text that can be edited in its decoded form: `text` is what it says, `written()` how it stands in the file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[str] | None = None  # what each character of `text` was written as; None: as itself

    @classmethod
    def decoded(cls, text: str) -> Written:
        """The text with its escapes undone, in one go however often they were escaped."""
        self = cls(text)
        pieces: list[str] = []
        characters: list[str] = []
        end = 0
        for match in ESCAPE.finditer(text):
            pieces += text[end : match.start()]
            characters.append(text[end : match.start()])
            meaning = _meaning(match[0])
            if meaning.isprintable() or meaning in "\n\t":
                pieces.append(match[0])
                characters.append(meaning)
            else:
                pieces += match[0]
                characters.append(match[0])
            end = match.end()
        pieces += text[end:]
        characters.append(text[end:])
        self.text, self._pieces = "".join(characters), pieces
        return self

    def replace(self, edits: list[tuple[int, int, str]]) -> None:
        """Put each (start, end, new text) in place; the edits are in order and do not overlap."""
        if not edits:
            return
        words, pieces, at = [], [], 0
        for start, end, new in edits:
            words += [self.text[at:start], new]
            if self._pieces is not None:
                pieces += self._pieces[at:start]
                pieces += new
            at = end
        words.append(self.text[at:])
        if self._pieces is not None:
            self._pieces = pieces + self._pieces[at:]
        self.text = "".join(words)

    def written(self) -> str:
        return self.text if self._pieces is None else "".join(self._pieces)
