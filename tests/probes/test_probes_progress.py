"""What is shown while an instrument runs: text, or a partial plot, from the caller's thread, and gone at the end."""

from __future__ import annotations

import io
import re
import sys
import threading

import IPython.display
import pytest
from mock_endpoint import mock_endpoint
from needlework import probes
from needlework.probes.bench import progress
from needlework.probes.bench.progress import Status
from needlework.workbook import live

GRID = {"lengths": (300, 500), "depths": (0.2, 0.8), "controls": False}


class Recorder:
    """A watch that keeps what it was told, and by which thread."""

    def __init__(self) -> None:
        self.seen: list[Status] = []
        self.threads: set[str] = set()
        self.closed = 0

    def update(self, status: Status) -> None:
        self.seen.append(status)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed += 1


def test_states_come_while_requests_are_under_way_and_end_with_the_whole():
    watch = Recorder()
    with mock_endpoint(delay_s=0.5) as mock:
        probes.recall(mock.base_url, **GRID, progress=lambda: watch)
    counts = [s.done for s in watch.seen]
    assert counts == sorted(counts) and counts[-1] == watch.seen[-1].planned == 4
    assert any(0 < n < 4 for n in counts), "nothing was shown before the end"
    assert watch.closed == 1 and watch.threads == {threading.current_thread().name}
    assert watch.seen[-1].by_length() == {300: (2, 2), 500: (2, 2)}
    assert str(watch.seen[-1]) == "recall: 4 of 4 trials; 300: 2/2, 500: 2/2"


def test_both_arms_of_a_comparison_are_one_progress():
    watch = Recorder()
    with mock_endpoint() as one, mock_endpoint() as two:
        arms = {"a": one.base_url, "b": two.base_url}
        probes.compare_arms(arms, lengths=(300,), depths=(0.5,), repeats=2, aa_pairs=0, progress=lambda: watch)
    assert watch.seen[-1].done == watch.seen[-1].planned == 4 + 8 and watch.closed == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_text_goes_to_stderr_and_leaves_no_line(monkeypatch, terminal):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(progress.TextWatch, "EVERY_S", 0.4)
    monkeypatch.setattr(sys, "stderr", screen)
    with mock_endpoint(delay_s=0.6) as mock:
        probes.recall(mock.base_url, **GRID, progress=True)
    text = screen.getvalue()
    assert "recall: 0 of 4 trials" in text and "waiting for the first answer" in text
    assert re.search(r"recall: 3 of 4 trials, \d+ s, about \d+ s left; 300: ", text)
    assert text.endswith("\r") if terminal else "\r" not in text


def test_a_live_notebook_gets_a_partial_plot_that_is_taken_away(monkeypatch):
    shown: list[str] = []

    class Handle:
        def update(self, drawing: live.Drawing) -> None:
            shown.append(drawing._repr_html_())

    def display(drawing: live.Drawing, display_id: bool) -> Handle:
        Handle().update(drawing)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(live, "EVERY_S", 0.0)
    progress.set_default(live.PlotWatch)
    try:
        with mock_endpoint(delay_s=0.4) as mock:
            probes.recall(mock.base_url, **GRID)
    finally:
        progress.set_default(None)
    assert shown[-1] == "" and "data:image/svg+xml" in shown[-2] and "4 of 4 trials" in shown[-2]
    assert any("of 4 trials" in html and "4 of 4" not in html for html in shown)


def test_one_length_is_drawn_as_a_share_and_hostile_text_is_escaped():
    rows = [{"target_tokens": 300, "prompt_tokens": 300, "outcome": o, "arm": "x"} for o in ("exact", "near", "cut")]
    drawing = live.Drawing(Status("drift", "<script>", 3, 8, rows))
    assert "data:image/svg+xml" in drawing._repr_html_() and "<script>" not in drawing._repr_html_()
    axes = live.partial(drawing.status).axes[0]
    assert list(axes.lines[0].get_ydata()) == [1.0, 0.5], "a trial that measured nothing is no miss"


@pytest.mark.parametrize("runner", [True, False])
def test_nothing_is_registered_where_nobody_looks_on(monkeypatch, runner):
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": object() if runner else None})())
    monkeypatch.setenv("NEEDLEWORK_NOTEBOOK", "03_recall_vs_length" if runner else "")
    assert live.enable() is False and progress.open_watch(None) is None
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setenv("NEEDLEWORK_NOTEBOOK", "")
    try:
        assert live.enable() is True and isinstance(progress.open_watch(None), live.PlotWatch)
    finally:
        progress.set_default(None)
