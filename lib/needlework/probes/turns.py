"""Follow-up turns: is what was said earlier still there? Continued in the session, and re-sent as one cold request.

Shapes, after the incident that started this workbook:
* `tell_ask`    notes with a fact, an acknowledgement, then the question
* `tell_talk_ask` the same with an unrelated exchange in between
* `interrupted` a long piece of work is asked for and cut off while it is written; then "To a file." and the question
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from needlework.serving import Endpoint, TransportError

from .bench.bench import Bench, Common, Options, instrument
from .bench.budget import check_trials
from .bench.prompts import Messages, Prompt
from .bench.result import Result, least_cached, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

SHAPES = ("tell_ask", "tell_talk_ask", "interrupted")
MODES = ("continue", "resend")
KEPT_REPLY = 2000  # characters of a generated turn that are kept for a resume
LONG_REPLY = 256  # tokens of an answer that is cut off while it is written
REPLY_TOKENS = LONG_REPLY + 96  # what the earlier turns add to the last prompt, at most
TALK_TOKENS = 64  # what an earlier turn adds to the notes


@instrument()
def turns(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    shapes: Sequence[str] = SHAPES,
    length: int = 2048,
    depth: float = 0.3,
    repeats: int = 2,
    **options: Unpack[Options],
) -> Result:
    """Tell a fact in the first turn and ask for it later, in each shape, continued and re-sent; grades the last answer.

    `length` is the size of the first turn in tokens and `depth` the fact's place in it. Continued means that each turn
    is sent when the one before was answered, so the server may use its prefix cache; re-sent means the same messages
    once more under a salt (where none is honoured, with a new first line). `.table` has one row a shape and mode.
    """
    common = Common(**options)
    for shape in shapes:
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}")
    check_trials(2 * len(shapes) * repeats)
    pairs = [
        tuple(
            Ask(
                "turns",
                with_seed(common.spec(length, depth), SHAPES.index(shape), r),
                arm=common.arm,
                repeat=r,
                cache="warm" if mode == "continue" else "cold",
                send=MODES.index(mode),
                turn=3 if shape == "tell_talk_ask" else 2,
                label=f"{shape}/{mode}",
            )
            for mode in MODES
        )
        for shape in shapes
        for r in range(repeats)
    ]
    rows: list[Row] = []
    asks = [a for pair in pairs for a in pair]
    with common.bench("turns", endpoint, run) as bench:
        earlier = sum(first.turn - 1 for first, _ in pairs if not bench.holds(first))  # turns before the question
        tokens = earlier * (length + TALK_TOKENS) + len(asks) * REPLY_TOKENS
        common.begin(bench, common.spec(length), asks, spare=earlier, tokens=tokens)
        for pair in pairs:
            rows += told_and_resent(bench, *pair)
    return bench.result(rows, _describe(rows), _table(rows))


def told_and_resent(bench: Bench, first: Ask, second: Ask) -> list[Row]:
    """A conversation that is continued, then the same messages as one cold request."""
    (told,) = bench.ask([first], prepare=functools.partial(continued, bench.count))
    return [told, *bench.ask([second], prepare=resent(json.loads(told.get("history") or "[]")))]


async def continued(
    count: Callable[[int], None], ask: Ask, prompt: Prompt, endpoint: Endpoint
) -> tuple[Messages, dict[str, Any]]:
    """Play the earlier turns live; the generated replies stay in the history as the server will read them again.
    count: enters each of them into the budget before it is sent.
    """
    tokens = prompt.counted_tokens + TALK_TOKENS
    count(tokens)
    body, _, question = prompt.text.rpartition("\n\n")
    shape = ask.label.split("/")[0]
    replies: list[str] = []
    if shape == "interrupted":
        messages: Messages = [{"role": "user", "content": f"{body}\n{_WORK}"}]
        replies.append(await _cut_off(endpoint, messages))
    else:
        messages = [{"role": "user", "content": f"{body}\n{_KEEP}"}]
        replies.append((await endpoint.chat(messages, max_tokens=16)).text)
    messages.append(_assistant(replies[0]))
    if shape == "tell_talk_ask":
        messages.append({"role": "user", "content": _TALK})
        count(tokens)
        replies.append((await endpoint.chat(messages, max_tokens=16)).text)
        messages.append(_assistant(replies[1]))
    messages.append({"role": "user", "content": _last(shape, question)})
    return messages, {"history": json.dumps([r[:KEPT_REPLY] for r in replies])}


def resent(replies: list[str]) -> Any:
    async def prepare(ask: Ask, prompt: Prompt, endpoint: Endpoint) -> tuple[Messages, dict[str, Any]]:
        body, _, question = prompt.text.rpartition("\n\n")
        shape = ask.label.split("/")[0]
        if endpoint.capabilities is None or endpoint.capabilities.salt is None:
            body = f"Copy {ask.trial_id[:4]}.\n{body}"
        messages: Messages = [{"role": "user", "content": f"{body}\n{_WORK if shape == 'interrupted' else _KEEP}"}]
        for i, reply in enumerate(replies):
            messages.append(_assistant(reply))
            if i == 0 and shape == "tell_talk_ask":
                messages.append({"role": "user", "content": _TALK})
        messages.append({"role": "user", "content": _last(shape, question)})
        return messages, {}

    return prepare


_KEEP = "Keep these notes in mind and answer OK."
_WORK = "Now write a tic-tac-toe page in HTML, with two players and a reset button."
_TALK = "Name a colour of the rainbow."


def _last(shape: str, question: str) -> str:
    return f"To a file. But first: {question}" if shape == "interrupted" else question


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text[:KEPT_REPLY] or "OK."}


async def _cut_off(endpoint: Endpoint, messages: Messages) -> str:
    """Start a long answer and hang up as soon as it is being written, as a user does who presses stop."""
    first = asyncio.Event()
    writing = asyncio.create_task(endpoint.chat(messages, max_tokens=LONG_REPLY, on_first_token=first))
    waiting = asyncio.create_task(first.wait())
    await asyncio.wait({writing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if writing.done():
        return writing.result().text  # raises TransportError for the caller to record
    writing.cancel()
    with contextlib.suppress(asyncio.CancelledError, TransportError):
        await writing
    return "<!DOCTYPE html>"


def _table(rows: list[Row]) -> pd.DataFrame:
    names = {"shape": lambda row: row["label"].split("/")[0], "mode": lambda row: row["label"].split("/")[1]}
    return tally(rows, names, {"cached_tokens": least_cached}, ordered=False)


def _describe(rows: list[Row]) -> tuple[str, str]:
    kept, sent = ([r for r in rows if r["label"].endswith("/" + mode)] for mode in MODES)
    if not outcomes(kept)[1]:
        return "Nothing was measured.", "not proven"
    text = f"Follow-up turns remember the first turn in {share(kept)}; the same messages re-sent cold in {share(sent)}."
    bad = surprising(*outcomes(kept), tests=2), surprising(*outcomes(sent), tests=2)
    if bad[0] and not bad[1]:
        text += " The text is readable, the continued session loses it: look at the prefix cache and its side state."
    elif bad[0] and bad[1]:
        text += " Both forms lose it: the turn boundary is not the cause; look at length and place."
    elif bad[1]:
        text += " Only the cold request loses it."
    return text, "finding" if any(bad) else "healthy"
