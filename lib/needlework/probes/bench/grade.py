"""What became of an answer: not hit or miss, but which of ten things happened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from needlework.serving import Reply

from .prompts import Fact

REFUSAL = re.compile(
    r"no prior context|no previous context|no (?:such )?(?:context|record|information|mention)"
    r"|not (?:been )?(?:given|provided|mentioned|stated|specified|found|available|listed)"
    r"|(?:do not|don.t|does not|doesn.t|cannot|can.t|could not|couldn.t|unable to) "
    r"(?:have|see|find|know|contain|mention|locate|provide|determine|answer)"
    r"|unknown|i.m sorry|as an ai|not sure",
    re.IGNORECASE,
)
MAX_ANSWER_CHARS = 1 << 20  # what is read of an answer; any that is asked for has some hundred
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[ ,.\u00a0\u202f_](?=\d)")


@dataclass(frozen=True)
class Grade:
    """`outcome` is one of analysis.trials.OUTCOMES; `score` is 1 for exact (or the value's probability where
    log-probabilities came), below 0.5 otherwise; `answered_from` names the fact whose value was given instead."""

    outcome: str
    score: float | None
    answer: str
    answered_from: str | None = None
    logprob: float | None = None
    distance: int | None = None


def edit_distance(a: str, b: str, limit: int = 64) -> int:
    """Damerau distance (a swap of neighbours counts one) of two short strings, cut to `limit` characters."""
    a, b = a[:limit], b[:limit]
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def holds(answer: str, value: str) -> bool:
    """Does the answer hold the value with boundaries on both sides? Case and digit grouping do not matter."""
    text, wanted = answer.casefold(), value.casefold()
    pattern = re.compile(rf"(?<![\w-]){re.escape(wanted)}(?![\w]|-\w)")
    if pattern.search(text):
        return True
    return value.isdigit() and bool(pattern.search(_BETWEEN_DIGITS.sub("", text)))


def value_logprob(reply: Reply, value: str) -> float | None:
    """Sum of the log-probabilities of the tokens that spell `value` in the answer; None where not offered."""
    if not reply.token_logprobs:
        return None
    text, ends = "", []
    for token, _ in reply.token_logprobs:
        text += token
        ends.append(len(text))
    at = text.casefold().find(value.casefold())
    if at < 0:
        return None
    start = 0
    total = 0.0
    for (_, logprob), end in zip(reply.token_logprobs, ends, strict=True):
        if end > at and start < at + len(value):
            total += logprob
        start = end
    return total


def grade(
    reply: Reply, expected: str | None, facts: Iterable[Fact] = (), elsewhere: Mapping[str, str] | None = None
) -> Grade:
    """Grade one reply.

    `expected` None means that the right answer is a refusal. `facts` are the statements of the prompt, `elsewhere`
    maps values of *other* prompts of the run to their trial: a value from there is foreign content, the worst finding.
    """
    visible = _without_thoughts(reply.text[:MAX_ANSWER_CHARS])
    thinking = bool(reply.reasoning) or len(visible) < min(len(reply.text), MAX_ANSWER_CHARS)
    if "<think>" in visible:  # cut inside a thought
        visible, thinking = visible.split("<think>", 1)[0], True
    elif "</think>" in visible:  # the opening mark stood in the template
        visible, thinking = visible.split("</think>", 1)[1], True
    answer = visible.strip()
    short = answer[:500]
    if not answer:
        if thinking:
            return Grade("reasoning_only", None, "")
        return Grade("cut" if reply.finish_reason in ("length", "abort") else "empty", None, "")
    others = [f for f in facts if f.value and f.value != expected and holds(answer, f.value)]
    if expected is not None and holds(answer, expected) and not others:
        logprob = value_logprob(reply, expected)
        return Grade("exact", 1.0 if logprob is None else math.exp(min(0.0, logprob)), short, None, logprob, 0)
    distance, similarity = _closest(answer, expected)
    score = 0.49 * similarity
    if others:
        first = min(others, key=lambda f: answer.casefold().find(f.value.casefold()))
        outcome = "distractor" if first.role == "distractor" else "other_needle"
        return Grade(outcome, score, short, f"{first.role}@{first.depth:.2f}", None, distance)
    for value, trial in (elsewhere or {}).items():
        if value in answer and value != expected and holds(answer, value):
            return Grade("other_needle", score, short, f"trial:{trial}", None, distance)
    if expected is not None and distance is not None and distance <= max(1, len(expected) // 5):
        return Grade("near", score, short, None, None, distance)
    if REFUSAL.search(answer):
        return Grade("refusal", score, short, None, None, distance)
    if reply.finish_reason in ("length", "abort") and not _degenerate(answer):
        return Grade("cut", None, short, None, None, distance)
    return Grade("garbage", score, short, None, None, distance)


def _without_thoughts(text: str) -> str:
    """The text without what stands between <think> and </think>; what is opened and never closed stays."""
    kept, at = "", 0
    while (start := text.find("<think>", at)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept, at = kept + text[at:start], end + len("</think>")
    return kept + text[at:]


def _closest(answer: str, expected: str | None) -> tuple[int | None, float]:
    """(edit distance, similarity 0..1) of the word or words of the answer closest to the expected value."""
    if not expected:
        return None, 0.0
    tokens = _BETWEEN_DIGITS.sub("", answer) if expected.isdigit() else answer
    parts = re.findall(r"[\w-]+", tokens.casefold())[:60]
    size = len(expected.split())
    candidates = [" ".join(parts[i : i + size]) for i in range(max(1, len(parts) - size + 1))]
    distance = min((edit_distance(c, expected.casefold()) for c in candidates), default=len(expected))
    return distance, max(0.0, 1 - distance / len(expected))


def _degenerate(answer: str) -> bool:
    """A loop of a few characters or words, as non-finite numbers in a cache produce."""
    if len(answer) < 24:
        return len(set(answer)) <= 2 and len(answer) >= 8
    words = answer.split()
    few = len(set(answer)) <= 6 or (len(words) >= 12 and len(set(words)) <= max(2, len(words) // 6))
    return few or _ends_in_a_loop(answer)


def _ends_in_a_loop(answer: str) -> bool:
    """The answer ends with a line or sentence that it has said twice before (now cut, perhaps): a small model that has
    lost the thread goes on like that for ever, so a longer answer would not hold the value either."""
    said = [part.strip() for part in re.split(r"[\n.!?]+", answer) if part.strip()]
    return len(said) >= 3 and len(said[-1].split()) >= 2 and sum(part.startswith(said[-1]) for part in said) >= 3
