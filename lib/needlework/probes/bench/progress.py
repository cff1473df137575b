"""What an instrument shows while it works: text in a terminal, and whatever else is registered (a plot in a notebook).

A watch is asked to draw from the thread that called the instrument, between requests and at most twice a second, so it
may use any library. It must leave nothing behind: what a run found is in its result.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Status:
    """An instrument at work: `done` of about `planned` trials (more may be asked), and the rows so far; `sent` of them
    in the `elapsed_s` since it began, the others were in the journal.
    """

    probe: str
    arm: str
    done: int
    planned: int
    rows: Sequence[dict[str, Any]]
    elapsed_s: float = 0.0
    sent: int = 0

    def by_length(self) -> dict[int, tuple[int, int]]:
        """Wished length -> (hits, measured), without the controls."""
        from needlework.analysis.trials import NO_MEASUREMENT

        found: dict[int, tuple[int, int]] = {}
        for row in self.rows:
            if row.get("control") or row.get("outcome") in (None, *NO_MEASUREMENT):
                continue
            hits, measured = found.get(row["target_tokens"], (0, 0))
            found[row["target_tokens"]] = (hits + (row["outcome"] == "exact"), measured + 1)
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        """ "recall pd: 12 of 19 trials; 512: 3/3, 1,024: 2/3" (the longest lengths when there are many)."""
        name = f"{self.probe} {self.arm}".strip()
        cells = [f"{n:,}: {hits}/{measured}" for n, (hits, measured) in self.by_length().items()]
        more = "…, " if len(cells) > 6 else ""
        return f"{name}: {self.done} of {self.planned} trials" + ("; " + more + ", ".join(cells[-6:]) if cells else "")


class Watch(Protocol):
    """Draws the state of one instrument; `close` takes the drawing away."""

    def update(self, status: Status) -> None: ...

    def close(self) -> None: ...


class TextWatch:
    """One line on stderr, gone at the end: instrument, done, expected, seconds, hits by length. Where stderr is no
    terminal, a line of its own every fifteen seconds.
    """

    EVERY_S = 15.0

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = self.EVERY_S

    def update(self, status: Status) -> None:
        head, _, cells = str(status).partition("; ")
        line = f"{head}, {status.elapsed_s:.0f} s"
        if status.sent and status.done:
            left_s = status.elapsed_s / max(1, min(status.sent, status.done)) * (status.planned - status.done)
            line += f", about {left_s:.0f} s left" if left_s >= 1 else ""
        else:
            line += ", waiting for the first answer"
        line += f"; {cells}" if cells else ""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        elif status.elapsed_s >= self._next:
            self._next = status.elapsed_s + self.EVERY_S
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


# What `progress=None` shows: nothing, until a surface that can draw (a live notebook) registers its own.
_default: Callable[[], Watch] | None = None


def set_default(factory: Callable[[], Watch] | None) -> None:
    """Make `factory` the watch of every instrument that is not told otherwise; None: show nothing."""
    global _default
    _default = factory


def open_watch(progress: bool | Callable[[], Watch] | None) -> Watch | None:
    """The watch that is meant: None the default one, True text where there is no default, False none."""
    if callable(progress):
        return progress()
    if progress is False:
        return None
    if _default is not None:
        return _default()
    return TextWatch() if progress else None
