"""The thread that owns an engine. Everybody else speaks to it through `submit`, `abort` and `call`.

The HTTP server's event loop never waits for a forward pass: it hands requests over, and receives events through a
callback.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from needlework_lab.captured_pages import Captures, Span
from needlework_lab.json_bodies import HttpError
from needlework_lab.types import Event, Request

Result = TypeVar("Result")
Emit = Callable[["Event | HttpError"], None]
IDLE_WAIT_S = 0.05


class Worker(threading.Thread):
    """A combined server's engine: requests in, events out. Prefill and decode servers refine it (modules `prefill`,
    `decode`).
    """

    role = "combined"

    def __init__(self, engine: Any):
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.captures = Captures()
        self.failure: str | None = None
        self.beat = time.monotonic()  # the last time this thread was seen between two steps
        self.aborted_total = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._emits: dict[str, Emit] = {}
        self._requests: dict[str, Request] = {}
        self._stopping = False

    # ---- from any thread ----

    def submit(self, request: Request, emit: Emit) -> None:
        """Run a request; `emit` is called in this thread with its events, or once with an HttpError."""
        self.post(lambda: self._submit(request, emit))

    def abort(self, rid: str | None = None, *, everything: bool = False) -> None:
        """Give up one request, or all. Unknown ids are ignored: the request may just have ended."""
        self.post(lambda: self._abort(list(self._requests) if everything else [rid or ""]))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` between two steps and return its future."""
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self.post(run)
        return future

    def post(self, function: Callable[[], None]) -> None:
        self._inbox.put(function)

    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def stop(self) -> None:
        self._stopping = True
        self.post(lambda: None)
        if self.is_alive():
            self.join(5.0)

    # ---- in this thread ----

    def run(self) -> None:
        with torch.inference_mode():  # nothing is trained here, and small tensors cost a fifth less
            self._run()

    def _run(self) -> None:
        while not self._stopping:
            self.beat = time.monotonic()
            try:
                self._drain(wait=self.failure is not None or not self.engine.busy)
                if self.failure is None:
                    if self.engine.busy:
                        for event in self.engine.step():
                            self._event(event)
                    self.after_step()
            except Exception as error:
                self._broken(error)

    def _drain(self, wait: bool) -> None:
        try:
            function = self._inbox.get(timeout=IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                function()
                function = self._inbox.get_nowait()
        except queue.Empty:
            return

    def after_step(self) -> None:
        """Called after every turn of the loop."""

    def _submit(self, request: Request, emit: Emit) -> None:
        problem = None
        if self.failure is not None:
            problem = HttpError(503, f"the engine has failed before and takes no more requests: {self.failure}")
        elif request.rid in self._requests:
            problem = HttpError(400, f"a request with rid {request.rid!r} is running already", "rid")
        else:
            self._emits[request.rid], self._requests[request.rid] = emit, request
            try:
                self.begin(request)
            except ValueError as error:
                problem = HttpError(400, str(error))
                self._emits.pop(request.rid)
                self._requests.pop(request.rid)
        if problem is not None:
            self.refused(request, problem.message)
            emit(problem)

    def begin(self, request: Request) -> None:
        """Start a request that was just accepted; ValueError refuses it."""
        self.engine.add(request)

    def _event(self, event: Event) -> None:
        request = self._requests.get(event.rid)
        if request is None:
            return  # concluded before: the tail of an aborted request
        if event.token is not None and event.completion_tokens == 1:
            self.first_token(request)
        if event.finish_reason is None:
            self._emits[event.rid](event)
        elif event.finish_reason == "error":
            self.conclude(event.rid, HttpError(500, event.error or "the engine gave no reason"))
        else:
            self.conclude(event.rid, event)

    def refused(self, request: Request, reason: str) -> None:
        """Called when a request ends without the engine's doing: it was not accepted, or the engine failed."""

    def first_token(self, request: Request) -> None:
        """A prompt is complete: remember what its pages hold."""
        spans = {group: Span(*pages) for group, pages in self.engine.pages_of(request.rid).items()}
        self.captures.take(self.engine, self.role, request, spans, self.engine.pools().values(), None)

    def conclude(self, rid: str, outcome: Event | HttpError) -> None:
        """Report the end of a request, once."""
        emit = self._emits.pop(rid, None)
        self._requests.pop(rid, None)
        if emit is not None:
            if isinstance(outcome, Event) and outcome.finish_reason == "abort":
                self.aborted_total += 1
            emit(outcome)

    def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            if rid not in self._requests:
                continue
            if self.give_up(rid):
                self.engine.abort(rid)  # its event concludes the request
            else:
                self.conclude(rid, Event(rid, None, finish_reason="abort"))

    def give_up(self, rid: str) -> bool:
        """Called before a request is aborted; says whether the engine knows it."""
        return True

    def _broken(self, error: Exception) -> None:
        traceback.print_exc(file=sys.stderr)
        self.failure = f"{type(error).__name__}: {error}"[:300]
        for rid, request in list(self._requests.items()):
            self.refused(request, f"the engine failed: {self.failure}")
            self.conclude(rid, HttpError(500, f"the engine failed: {self.failure}"))
