"""What an instrument shows while it works: text in a terminal, and whatever else is registered (a plot in a notebook).

A watch is asked to draw from the thread that called the instrument, between requests and at most twice a second, so it
may use any library. It must leave nothing behind: what a run found is in its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Status:
    """An instrument at work: `done` of about `planned` trials (more may be asked), and the rows so far."""

    probe: str
    arm: str
    done: int
    planned: int
    rows: Sequence[dict[str, Any]]

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
    """One line on stderr with a bar, the time left and hits by length, gone at the end."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=0, unit="trial", leave=False, dynamic_ncols=True)

    def update(self, status: Status) -> None:
        head, _, cells = str(status).partition("; ")
        self._bar.total, self._bar.n = status.planned, status.done
        self._bar.set_description_str(head.split(":")[0], refresh=False)
        self._bar.set_postfix_str(cells, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


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
