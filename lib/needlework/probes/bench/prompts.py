"""What a prompt holds and how its text is made, seeded: the specification, the facts that follow from it, the lines,
and how many of them make the wished number of tokens.

A salt line, an instruction, lines of records with the facts between them, one line of padding and the question. Lines
are never cut. Facts, question and answer follow from the specification alone: a recorded run is replayed without a
tokenizer. The number of lines is the largest that fits and the padding makes up the rest, so the text depends on the
specification and the server's tokenizer, not on the path by which it was found.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import islice
from random import Random
from typing import Any

from needlework.serving import Endpoint, TransportError, tokens
from needlework.serving.scrub import private

from . import words
from .journal import Journal

PAD_PLACES = ("start", "before_needle", "after_needle", "before_question")
CONTROLS = ("", "absent", "at_end", "in_question", "short")
STYLES = ("literal", "relation", "chain")
LONGEST = 1 << 24  # tokens: longer than any window, and the text of such a prompt still fits the memory


@dataclass(frozen=True)
class PromptSpec:
    """All that decides a prompt's text, apart from the server's tokenizer.

    target_tokens   wished length of the whole request as the server counts it
    depth           place of the asked needle, 0 (first) to 1 (last before the question), unless from_start or from_end
    from_start      about so many tokens before the needle (4 characters a token), exactly equal for all lengths
    from_end        the same between needle and question
    needle          kind of value, see words.KINDS
    needles         facts in the prompt; the asked one is number `ask`, the others lie evenly spread
    distractors     facts with a similar key, or a value one digit away, that are never asked
    control         "" or one of CONTROLS: what the answer should be is known whatever the deployment does
    style           "literal", or the question asks by a "relation" or through a "chain" given in the prompt
    pad             where the padding line stands, one of PAD_PLACES
    seed            changes haystack, keys and values together
    salt            first line; "" derives it from all the rest, so that no two prompts share their first block
    """

    target_tokens: int
    depth: float = 0.5
    genre: str = "mixed"
    needle: str = "digits5"
    seed: int = 0
    needles: int = 1
    ask: int = 0
    distractors: int = 0
    control: str = ""
    style: str = "literal"
    pad: str = "before_question"
    from_start: int | None = None
    from_end: int | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if self.target_tokens > LONGEST:
            raise ValueError(
                f"a prompt of {self.target_tokens:,} tokens is longer than any window; at most {LONGEST:,}"
            )
        if not 0 <= self.depth <= 1:
            raise ValueError(f"depth {self.depth} is not between 0 and 1")
        if self.genre != "mixed" and self.genre not in words.GENRES:
            raise ValueError(f"unknown haystack {self.genre!r}; choose mixed or one of {', '.join(words.GENRES)}")
        for value, allowed in ((self.pad, PAD_PLACES), (self.control, CONTROLS), (self.style, STYLES)):
            if value not in allowed:
                raise ValueError(f"unknown option {value!r}; choose one of {', '.join(filter(None, allowed))}")
        if self.needle not in words.KINDS:
            raise ValueError(f"unknown kind of needle {self.needle!r}; choose one of {', '.join(words.KINDS)}")
        if not 0 <= self.ask < self.needles:
            raise ValueError(f"there is no needle {self.ask} among {self.needles}")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fact:
    """One statement in a prompt: `key` has `value`; role "needle", "distractor"; `depth` is its share of the lines."""

    key: str
    value: str
    role: str
    depth: float
    sentence: str


def digest(value: Any, length: int = 16) -> str:
    """Short content hash of anything JSON can hold."""
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(raw).hexdigest()[:length]


def question_for(key: str, spec: PromptSpec | None = None, relation: str = "") -> str:
    """The question about a key, with the wish for the value alone and a way out."""
    subject = relation or key
    return (
        f"What is the secret code for {subject}? Answer with the value only, "
        "or say that you have no prior context if it was not given."
    )


def statement(key: str, value: str) -> str:
    """The sentence that states a fact."""
    return f"The secret code for {key} is {value}."


@lru_cache(maxsize=1024)
def facts_of(spec: PromptSpec) -> tuple[tuple[Fact, ...], str, str | None]:
    """(facts, question, expected answer) of a specification; no tokenizer needed."""
    r = Random(f"facts/{spec.seed}/{spec.needle}/{spec.needles}/{spec.distractors}")
    taken: set[str] = set()
    facts: list[Fact] = []
    used: set[str] = set()
    place = 1.0 if spec.control == "at_end" else spec.depth
    for i in range(spec.needles):
        key, value = words.key_phrase(r, taken), words.draw(spec.needle, r)
        while value in used:
            value = words.draw(spec.needle, r)
        used.add(value)
        depth = place if i == spec.ask else (i + 0.5) / spec.needles
        facts.append(Fact(key, value, "needle", depth, statement(key, value)))
    asked = facts[spec.ask]
    for i in range(spec.distractors):
        if i % 2 == 0:  # similar key: same noun and place, another adjective
            _, _, *rest = asked.key.split(" ")
            free = [a for a in words.ADJECTIVES if a not in taken]
            if not free:
                raise ValueError("too many distractors; ask for fewer")
            adjective = r.choice(free)
            taken.add(adjective)
            key, value = " ".join(["the", adjective, *rest]), words.draw(spec.needle, r)
        else:  # near value under a key of its own
            key, value = words.key_phrase(r, taken), words.neighbour(asked.value, r)
        while value in used:
            value = words.draw(spec.needle, r)
        used.add(value)
        facts.append(Fact(key, value, "distractor", r.random(), statement(key, value)))
    question, expected = question_for(asked.key), asked.value
    if spec.style == "relation":
        owner = r.choice(words.PEOPLE)
        facts[spec.ask] = replace(asked, sentence=f"{asked.sentence} Only {owner} looks after {asked.key}.")
        question = question_for(asked.key, relation=f"the thing that only {owner} looks after")
    elif spec.style == "chain":
        other = words.key_phrase(r, taken)
        link = f"Whoever asks for {other} is sent on to {asked.key}."
        facts.append(Fact(other, "", "link", r.random(), link))
        question = question_for(asked.key, relation=f"the place where whoever asks for {other} is sent on to")
    if spec.control == "absent":
        facts = [f for i, f in enumerate(facts) if i != spec.ask]
        return tuple(facts), question, None
    if spec.control == "in_question":
        facts = [f for i, f in enumerate(facts) if i != spec.ask]
        question = f"{asked.sentence} {question}"
    return tuple(facts), question, expected


GENERATOR = 1  # part of every trial's identity: raise it when the text of any prompt changes
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """A finished prompt.

    counted_tokens  of the whole request: the server's tokenizer's count, or an estimate
    counted_by      "tokenize" (the whole request was counted), "lines" (its lines were), or "estimate"
    sent            the interval in which the sent length surely lies; None: nothing is known yet
    """

    messages: Messages
    spec: PromptSpec
    question: str
    expected: str | None  # None: the right answer is that it was not given
    facts: tuple[Fact, ...]
    counted_tokens: int
    counted_by: str
    sent: tuple[int, int] | None
    needle_token: int | None  # tokens of the message's content before the asked value; None when there is none
    sha256: str
    layout: str = ""  # lines of records and words of padding: the same bytes again, without a tokenizer

    @property
    def exact(self) -> bool:
        return self.counted_by != "estimate"

    @property
    def text(self) -> str:
        return self.messages[-1]["content"]


@lru_cache(maxsize=256)  # of the prompts under way, two streams each
def _stream(genre: str, seed: str) -> tuple[Random, list[str]]:
    return Random(seed), []


def lines(genre: str, seed: str, count: int, forbidden: tuple[str, ...] = ()) -> list[str]:
    """The first `count` lines of the seeded stream of a genre, none of them holding a forbidden value."""
    r, known = _stream(genre, seed)
    while len(known) < count:
        known.append(words.unit(genre, r))
    picked = known[:count]
    if forbidden:
        picked = [line for line in picked if not any(f in line for f in forbidden)] or picked[:0]
    return picked


@lru_cache(maxsize=1024)
def _salt(spec: PromptSpec, run_salt: str) -> str:
    salt = spec.salt or digest(spec.as_dict(), 12)
    return digest([run_salt, salt], 12) if run_salt else salt


def assemble(spec: PromptSpec, n_lines: int, pad: int, run_salt: str = "") -> tuple[str, str]:
    """(text of the message, text before the asked value) with `n_lines` record lines and `pad` padding words.

    run_salt    another first line for the same specification, see `Journal.salt`
    """
    facts, question, _ = facts_of(spec)
    salt = _salt(spec, run_salt)
    head = [f"Set {salt[:4]} {salt[4:8]} {salt[8:]}.\n", "Read these notes. A question follows at the end.\n"]
    avoid = tuple(f.value for f in facts if f.value and len(f.value) < 6 and not f.value.isdigit())
    asked = facts[spec.ask] if spec.control not in ("absent", "in_question") else None
    before = _lines_before(spec, n_lines)
    body = lines(spec.genre, f"a/{spec.seed}/{spec.genre}", before, avoid)
    tail = lines(spec.genre, f"b/{spec.seed}/{spec.genre}", n_lines - before, avoid)
    body += tail
    padding = "Blank" + " x" * pad + ".\n"
    # places of the facts, counted in record lines; the asked one keeps its exact place
    places: list[tuple[int, int, str]] = []
    for order, fact in enumerate(facts):
        is_asked = fact is asked
        place = before if is_asked else round(fact.depth * len(body))
        places.append((place, order, fact.sentence + "\n"))
        if is_asked and spec.pad in ("before_needle", "after_needle"):
            places.append((place, order + (0 if spec.pad == "after_needle" else -1), padding))
    out, cut = list(head), None
    if spec.pad == "start":
        out.append(padding)
    inserts = sorted(places, key=lambda p: (p[0], p[1]))
    done = 0
    for place, _, text in inserts:
        out += body[done:place]
        done = max(done, place)
        if asked is not None and text == asked.sentence + "\n":
            cut = "".join(out) + text[: text.index(asked.value)].rstrip()
        out.append(text)
    out += body[done:]
    if spec.pad == "before_question" or (asked is None and spec.pad != "start"):
        out.append(padding)
    out.append("\n" + question)
    return "".join(out), cut if cut is not None else ""


def _lines_before(spec: PromptSpec, n_lines: int) -> int:
    if spec.control == "at_end":
        return n_lines
    if spec.from_start is not None:
        return min(n_lines, _lines_for(spec, "a", spec.from_start))
    if spec.from_end is not None:
        return max(0, n_lines - _lines_for(spec, "b", spec.from_end))
    return round(spec.depth * n_lines)


def _lines_for(spec: PromptSpec, stream: str, tokens: int) -> int:
    characters, count = 0, 0
    while characters < 4 * tokens:
        characters += len(lines(spec.genre, f"{stream}/{spec.seed}/{spec.genre}", count + 1)[count])
        count += 1
    return count


CHARACTERS_A_TOKEN = (0.25, 16.0)  # of any text here: a server that cuts prompts counts as if there were hundreds
CountTokens = Callable[[Messages], Awaitable[int]]


class LengthError(RuntimeError):
    """A prompt of the wished length could not be built; says how far off it came."""


@dataclass
class Ratio:
    """Tokens of a text of one genre on one server, learnt from counts: a template's share and characters a token."""

    characters: float = 4.0
    template: float = 8.0
    points: tuple[tuple[int, int], ...] = ()  # (characters, tokens)

    def learn(self, text: str, tokens: int) -> None:
        """Take a count of `text`; one far outside of what is known was cut or added to, and teaches nothing."""
        known = self.interval(len(text))
        if known is not None and not known[0] <= tokens <= known[1]:
            return
        self.points = (*self.points[-31:], (len(text), tokens))
        (c0, t0), (c1, t1) = min(self.points), max(self.points)
        if c1 >= 2 * c0 and t1 > t0:
            self.characters = self._bounded((c1 - c0) / (t1 - t0))
            self.template = max(0.0, t0 - c0 / self.characters)
        elif tokens > self.template + 10:
            self.characters = self._bounded(len(text) / (tokens - self.template))

    def interval(self, characters: int) -> tuple[int, int] | None:
        """Tokens between which a text of so many characters surely lies; None before two lengths were counted.

        Single lines scatter, so the error grows with the root of the length; 3 % are left for texts unlike the others.
        """
        if len(self.points) < 2:
            return None
        shortest, longest = min(self.points)[0], max(self.points)[0]
        if longest < 2 * shortest and not shortest <= 2 * characters <= 4 * longest:
            return None  # what a template adds is not told apart from the text
        expected = max(1, self.tokens(characters))
        scatter = max(1.5, *(abs(n - self.tokens(c)) / n**0.5 for c, n in self.points if n))
        half = 2 * scatter * expected**0.5 + 0.03 * expected + 8
        return max(0, int(expected - half)), int(expected + half) + 1

    @staticmethod
    def _bounded(characters: float) -> float:
        low, high = CHARACTERS_A_TOKEN
        return min(high, max(low, characters))

    def tokens(self, characters: int) -> int:
        return round(self.template + characters / self.characters)

    def length(self, tokens: int) -> float:
        return (tokens - self.template) * self.characters


async def build(
    spec: PromptSpec, count: CountTokens | None, ratio: Ratio, *, tolerance: int = 0, run_salt: str = "",
    counted_by: str = "tokenize",
) -> Prompt:  # fmt: skip
    """Build the prompt of `spec`, `tolerance` tokens from its target at most, by asking `count`.

    Without `count` the length is an estimate by `ratio`; the server's own usage then tells the realised length. Raises
    LengthError when the length cannot be met, ValueError when it is too short for the question.
    """
    mean, guess = _guess(spec, ratio, run_salt)
    if count is None:
        text, prefix = assemble(spec, guess, 0, run_salt)
        estimate = ratio.tokens(len(text))
        place = round(len(prefix) / ratio.characters) if prefix else None
        return _finish(spec, text, estimate, "estimate", ratio.interval(len(text)), place, f"{guess}+0")

    seen: dict[tuple[int, int], int] = {}

    async def measure(n: int, pad: int) -> int:
        if (n, pad) not in seen:
            text = assemble(spec, n, pad, run_salt)[0]
            seen[n, pad] = await count([{"role": "user", "content": text}])
            if len(ratio.points) < 8:  # the first guess is near enough then
                ratio.learn(text, seen[n, pad])
        return seen[n, pad]

    n = await _most_lines(spec.target_tokens, guess, mean, ratio, measure)
    pad = spec.target_tokens - await measure(n, 0)
    for _ in range(6):
        short = spec.target_tokens - await measure(n, pad)
        if abs(short) <= tolerance:
            text, prefix = assemble(spec, n, pad, run_salt)
            needle = await count([{"role": "user", "content": prefix}]) if prefix else None
            bare = await measure_empty(count) if needle is not None else 0
            place = None if needle is None else max(0, needle - bare)
            sent = seen[n, pad], seen[n, pad]
            return _finish(spec, text, sent[0], counted_by, sent, place, f"{n}+{pad}")
        pad = max(0, pad + short)
    raise LengthError(
        f"a prompt of exactly {spec.target_tokens} tokens could not be built: padding words do not count one token "
        f"each (reached {seen.get((n, pad), 'another length')}); allow a tolerance"
    )


async def measure_empty(count: CountTokens) -> int:
    """Tokens of the chat template around an empty message."""
    return await count([{"role": "user", "content": ""}])


async def _most_lines(
    target: int, guess: int, mean: float, ratio: Ratio, measure: Callable[[int, int], Awaitable[int]]
) -> int:
    """The largest number of lines that does not pass the target: independent of the first guess."""
    low, high = -1, None  # measured: low fits, high does not
    n = guess
    for _ in range(40):
        tokens = await measure(n, 0)
        if tokens <= target:
            low = max(low, n)
        else:
            high = n if high is None else min(high, n)
        if high is not None and high - low == 1:
            break
        step = (target - tokens) / max(1.0, mean / ratio.characters)
        n = n + (max(1, int(step)) if tokens <= target else min(-1, int(step) - 1))
        n = max(low + 1, n) if high is None else min(max(low + 1, n), high - 1)
    if low < 0:
        raise ValueError(f"{target} tokens are too few for the question alone; ask for a longer prompt")
    return low


@cache
def _mean_line(genre: str) -> float:
    return sum(map(len, lines(genre, f"mean/{genre}", 256))) / 256


def _guess(spec: PromptSpec, ratio: Ratio, run_salt: str) -> tuple[float, int]:
    """(characters of a line, lines that should fill the prompt)."""
    mean = _mean_line(spec.genre)
    empty = len(assemble(spec, 0, 0, run_salt)[0])
    return mean, max(0, round((ratio.length(spec.target_tokens) - empty) / mean))


def _finish(
    spec: PromptSpec, text: str, tokens: int, by: str, sent: tuple[int, int] | None, needle: int | None, layout: str
) -> Prompt:
    facts, question, expected = facts_of(spec)
    messages = [{"role": "user", "content": text}]
    place = needle if spec.control not in ("absent", "in_question") else None
    return Prompt(messages, spec, question, expected, facts, tokens, by, sent, place, digest(messages, 32), layout)


def again(spec: PromptSpec, row: dict[str, Any], run_salt: str = "") -> Prompt | None:
    """The prompt of a row once more, byte for byte and without a tokenizer; None where the row does not tell how."""
    n, _, pad = str(row.get("layout") or "").partition("+")
    if not (n.isdigit() and pad.isdigit()):
        return None
    text, _ = assemble(spec, int(n), int(pad), run_salt)
    low, high = row.get("sent_low"), row.get("sent_high")
    sent = (low, high) if low is not None and high is not None else None
    tokens = row.get("counted_tokens") or row.get("prompt_tokens") or spec.target_tokens
    by = str(row.get("counted_by") or "estimate")
    prompt = _finish(spec, text, tokens, by, sent, row.get("needle_token"), str(row["layout"]))
    return prompt if prompt.sha256 == row.get("prompt_sha") else None


SEPARATOR = "%% 7 %%\n"  # between lines that are counted together
BATCH_CHARS = 60_000
_PADDING = re.compile(r"Blank((?: x)*)\.\n")


class LineCounts:
    """Tokens of a prompt as the sum over its lines, many of which are counted in one request.

    Every line ends with a mark and a line break, after which a tokenizer begins anew, so counts add up; whoever uses
    the sums must check some of them against whole counts. A batch has a separator after each line, and the list of
    token ids that comes back is parted by the separator's own ids.

    ids     asks the server for the token ids of a text, None where it gives none
    """

    def __init__(self, ids: Callable[[str], Awaitable[list[int] | None]]):
        self._ids, self._known = ids, dict[str, int]()
        self._mark: list[int] = []
        self._end = 0  # tokens of a full stop and a line break

    async def begin(self) -> bool:
        """Find the separator's ids; False where this server cannot count so."""
        found = [await self._ids(text) for text in ("Here.\n" + SEPARATOR, "Here.\n" + 2 * SEPARATOR, "Here")]
        if None in found:
            return False
        once, twice, bare = (ids or [] for ids in found)
        self._mark = twice[len(once) :]
        self._end = len(once) - len(self._mark) - len(bare)
        return (
            bool(self._mark) and once[-len(self._mark) :] == self._mark and twice[: len(once)] == once and self._end > 0
        )

    def pieces(self, text: str) -> tuple[list[str], int]:
        """(lines as they are counted, tokens to add for padding words and to take off for made-up ends)."""
        body, gap, question = text.rpartition("\n\n")
        found = (body + "\n").splitlines(keepends=True) if gap else text.splitlines(keepends=True)
        more = 0
        if gap:  # the break before the question joins the last line's
            found.append(f"Here.\n\n{question}\n")
        elif found and not found[-1].endswith("\n"):  # a prompt up to its needle
            found[-1] += ".\n"
            more -= self._end
        for i, line in enumerate(found):
            if padding := _PADDING.fullmatch(line):
                more += len(padding[1]) // 2
                found[i] = "Blank.\n"
        return found, more

    async def learn(self, texts: Iterable[str]) -> bool:
        """Count what is not known of these texts, in few requests; False when the counts cannot be told apart."""
        todo = list(dict.fromkeys(p for text in texts for p in self.pieces(text)[0] if p not in self._known))
        while todo:
            batch, size = ["Here.\n"], 0
            while todo and size < BATCH_CHARS:
                batch.append(todo.pop())
                size += len(batch[-1])
            ids = await self._ids("".join(piece + SEPARATOR for piece in batch))
            counts = self._parted(ids or [])
            if len(counts) != len(batch):
                return False
            self._known |= zip(batch, counts, strict=True)
        if len(self._known) > 200_000:
            self._known.clear()
        return True

    async def count(self, text: str) -> int:
        """The sum over the lines, without what a template adds; raises TransportError when they cannot be counted."""
        found, more = self.pieces(text)
        if any(piece not in self._known for piece in found) and not await self.learn([text]):
            raise TransportError("the tokenize route gave no ids that can be told apart")
        return sum(self._known[piece] for piece in found) + more

    def _parted(self, ids: list[int]) -> list[int]:
        counts, since, at, size = [], 0, 0, len(self._mark)
        with contextlib.suppress(ValueError):  # no further one
            while True:
                at = ids.index(self._mark[0], at)
                if ids[at : at + size] == self._mark:
                    counts.append(at - since)
                    since = at + size
                at += size if since == at + size else 1
        return counts


KEPT = 64  # prompts: an A/B sends each of them several times


class Builder:
    """Builds prompts with the counts of `endpoint`, which must have been probed; whole counts are kept in the journal.

    tolerance   tokens by which a prompt may miss its target length
    """

    CHECKED = 2  # prompts whose sum over lines is checked by a whole count; the server's usage checks the others

    def __init__(self, endpoint: Endpoint, journal: Journal, tolerance: int = 0):
        self.endpoint, self.journal, self.tolerance = endpoint, journal, tolerance
        self._ratios: dict[str, Ratio] = {}
        self._built: dict[PromptSpec, Prompt] = {}
        self._overhead: int | None = None  # of the template, where the text form leaves it out
        self._by_lines: LineCounts | None = None
        self._frame = 0  # what the whole request has beside its lines
        self._checks = 0
        self._lock = asyncio.Lock()
        self._rows: dict[Any, dict[str, Any]] = {}  # seed -> the first row with it, of the journal's first `_seen`
        self._seen = 0

    async def build(self, spec: PromptSpec) -> Prompt:
        """The prompt of a specification; raises RuntimeError when the tokenise route fails again and again."""
        if spec not in self._built:
            if len(self._built) > KEPT:
                self._built.pop(next(iter(self._built)))
            try:
                self._built[spec] = await self._build(spec)
            except TransportError as error:
                raise RuntimeError(f"the endpoint's tokenize route fails: {error.reason}") from None
        return self._built[spec]

    async def foresee(self, specs: Iterable[PromptSpec]) -> None:
        """Count the lines of prompts that will be built, all together."""
        wanted = [spec for spec in specs if spec not in self._built]
        if self.endpoint.capabilities.tokenize == "usage" or len(wanted) < 2:
            return
        for spec in wanted[: self.CHECKED - min(self._checks, self.CHECKED)]:
            await self.build(spec)
        if self._by_lines is not None:
            texts = []
            for spec in wanted:
                guess = _guess(spec, self._ratio(spec), self.journal.salt)[1]
                texts.append(assemble(spec, guess + 2 + guess // 20, 0, self.journal.salt)[0])
                texts.append(assemble(spec, 0, 0, self.journal.salt)[1])
            with contextlib.suppress(TransportError):
                await self._by_lines.learn(texts)

    def learn(self, prompt: Prompt, realised: int) -> None:
        """Take the server's own count of a prompt whose length was an estimate."""
        self._ratio(prompt.spec).learn(prompt.text, realised)

    async def confirm(self, prompt: Prompt, realised: int | None) -> Prompt:
        """The prompt with the right count, when the server reports another one than the sum over its lines."""
        if prompt.counted_by != "lines" or realised in (None, prompt.counted_tokens):
            return prompt
        whole = await self._count(prompt.messages)
        if whole != prompt.counted_tokens:
            self._by_lines = None  # lines do not add up on this tokenizer
        return replace(prompt, counted_tokens=whole, counted_by="tokenize", sent=(whole, whole))

    def _ratio(self, spec: PromptSpec) -> Ratio:
        return self._ratios.setdefault(spec.genre, Ratio())

    async def _build(self, spec: PromptSpec) -> Prompt:
        for row in islice(self.journal.rows.values(), self._seen, None):
            self._rows.setdefault(row.get("seed"), row)
        self._seen = len(self.journal.rows)
        if (held := self._rows.get(spec.seed)) and (known := again(spec, held, self.journal.salt)) is not None:
            return known
        options: dict[str, Any] = {"tolerance": self.tolerance, "run_salt": self.journal.salt}
        if self.endpoint.capabilities.tokenize == "usage":
            return await build(spec, None, self._ratio(spec), **options)
        if self._by_lines is not None and self._checks >= self.CHECKED:
            with contextlib.suppress(TransportError):
                return await build(spec, self._sum, self._ratio(spec), counted_by="lines", **options)
        async with self._lock:
            prompt = await build(spec, self._count, self._ratio(spec), **options)
            if self._checks < self.CHECKED:
                await self._check(prompt)
            return prompt

    async def _check(self, prompt: Prompt) -> None:
        """Do its lines add up to a prompt's count? The first tells what the template adds, the next must agree."""
        if self._checks == 0:
            counts = LineCounts(self._ids)
            self._by_lines = counts if await counts.begin() else None
        found = None
        if self._by_lines is not None:
            with contextlib.suppress(TransportError):
                found = prompt.counted_tokens - await self._by_lines.count(prompt.text)
        if found is None or (self._checks > 0 and found != self._frame):
            self._by_lines = None
        else:
            self._frame = found
        self._checks += 1 if self._by_lines is not None else self.CHECKED

    async def _ids(self, text: str) -> list[int] | None:
        return await tokens.ids(self.endpoint, text) or await tokens.ids(self.endpoint, text)  # one failure is none

    async def _sum(self, messages: Messages) -> int:
        assert self._by_lines is not None
        return self._frame + await self._by_lines.count(messages[-1]["content"])

    async def _count(self, messages: Messages) -> int:
        found = self.endpoint.capabilities
        sha = digest([private(found.model), found.tokenize, messages], 32)  # as the manifest has it
        count = self.journal.count(sha)
        if count is None:
            count = await self._asked(messages)
            self.journal.add_count(sha, count)
        if found.tokenize == "text":  # the template's share is not counted by the text form: learn it from usage, once
            if self._overhead is None:
                hello = [{"role": "user", "content": "Hello."}]
                reply = await self.endpoint.chat(hello, max_tokens=1, fields=found.fields())
                bare = await tokens.count_tokens(self.endpoint, hello)
                self._overhead = max(0, (reply.prompt_tokens or bare or 0) - (bare or 0))
            count += self._overhead
        return count

    async def _asked(self, messages: Messages) -> int:
        """A count by the server. A count is no trial: one that fails is asked again, which hides nothing."""
        for wait_s in (0.2, 1.0, None):
            try:
                count = await tokens.count_tokens(self.endpoint, messages)
            except TransportError:
                if wait_s is None:
                    raise
            else:
                if count is not None:
                    return count
                if wait_s is None:
                    break
            await asyncio.sleep(wait_s)
        raise TransportError("the tokenize route gave no count")
