"""What became of an answer: not hit or miss, but which of ten things happened, in any script.

A value counts as found when it stands whole in the answer: in text without blanks (Chinese, Japanese, Korean, Thai),
with full-width or grouped digits, digits of other scripts, Unicode hyphens and blanks, marks of markdown around it. A
list of guesses is none. What stands between the marks of a thought is not the answer.
"""

from __future__ import annotations

import functools
import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from needlework.serving import Reply
from needlework.serving.replies import TOKEN_BUDGET

from . import words
from .prompts import Fact

REFUSAL = re.compile(
    r"no prior context|no previous context|no (?:such )?(?:context|record|information|mention)"
    r"|not (?:been )?(?:given|provided|mentioned|stated|specified|found|available|listed)"
    r"|(?:do not|don.t|does not|doesn.t|cannot|can.t|could not|couldn.t|unable to) "
    r"(?:have|see|find|know|contain|mention|locate|provide|determine|answer)"
    r"|unknown|i.m sorry|as an ai|not sure"
    r"|没有|未(?:提供|提及|给出|找到)|不知道|不清楚|无法|抱歉|沒有|無法"
    r"|わかりません|分かりません|ありません|見つかり|申し訳|不明|없습니다|모르|알 수 없|죄송"
    r"|не (?:указан|найден|знаю|могу|упомин|вижу|был)|нет (?:информаци|данных|контекст)|неизвест|извините"
    r"|nicht (?:angegeben|bekannt|gefunden|erwähnt|enthalten|genannt)|weiß (?:ich )?nicht|unbekannt"
    r"|kein\w* (?:info|kontext|angabe)"
    r"|ne (?:sais|vois|trouve|peux)|pas (?:mentionn|fourni|trouv|donn|précis|indiqu)|inconnu|désol|aucun"
    r"|no (?:se (?:men|prop|enc|dio)|lo sé|sé|tengo|encuentro|puedo|hay)|desconoc|lo siento"
    r"|não (?:sei|há|foi|tenho|encontr)"
    r"|non (?:lo so|so|trovo|è stato|ho)|sconosciut|bilmiyorum|bulamad|không (?:biết|có|tìm)|ไม่(?:ทราบ|มี|พบ|ได้|รู้)"
    r"|لا (?:أعرف|يوجد|توجد|أملك|أعلم)|لم (?:يتم|أجد|يرد)|غير (?:معروف|مذكور)|नहीं"
    r"|לא (?:ידוע|נמצא|יודע|צוין)|δεν (?:γνωρίζω|υπάρχει|έχω)",
    re.IGNORECASE,
)  # fmt: skip
MOST_CHARS = 1 << 16  # of an answer's beginning, and of its end; any that is asked for has some hundred

# ---- thoughts ----

_WORD = r"[\w:-]{0,20}?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratchpad|analysis|monologue)"
# opening | closing mark of every family: tags in <>, [] and ◁▷, the own ones of Open-R1, Cohere, Apertus, and Gemma's
_THOUGHTS = tuple(
    re.compile(f"(?P<opens>{opens})|(?:{closes})", re.IGNORECASE)
    for opens, closes in (
        (rf"<{_WORD}>", rf"</{_WORD}>"),
        (rf"\[{_WORD}\]", rf"\[/{_WORD}\]"),
        (rf"◁{_WORD}▷", rf"◁/{_WORD}▷"),
        (r"<\|begin_of_thought\|>|<\|START_THINKING\|>|<\|inner_prefix\|>|<\|thinking\|>",
         r"<\|end_of_thought\|>|<\|END_THINKING\|>|<\|inner_suffix\|>|<\|/thinking\|>"),
        (r"<unused94>|<\|channel>thought\b", r"<unused95>|<channel\|>"),
    )
)  # fmt: skip
_HARMONY = re.compile(r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>")  # gpt-oss: analysis and commentary are no answer
_MARKS = re.compile(r"<\|(?:start|end|return|call|channel|message|START_RESPONSE|END_RESPONSE)\|>(?:assistant\b)?")


def answer_and_thoughts(text: str) -> tuple[str, str]:
    """(what a reader is shown, what stands in thoughts); a thought that is never closed ends with the text, one that
    was opened in the template begins with it.
    """
    thoughts: list[str] = []
    if parts := list(_HARMONY.finditer(text)):
        ends = [*(p.start() for p in parts[1:]), len(text)]
        said = [(p[1], _MARKS.sub("", text[p.end() : end])) for p, end in zip(parts, ends, strict=True)]
        thoughts = [t for channel, t in said if channel != "final"]
        text = text[: parts[0].start()] + "".join(t for channel, t in said if channel == "final")
    if not any(mark in text for mark in "<[◁"):
        return text, "\n".join(thoughts)
    for marks in _THOUGHTS:
        kept: list[str] = []
        at, inside = 0, False
        for mark in marks.finditer(text):
            if mark["opens"]:
                if not inside:
                    kept.append(text[at : mark.start()])
                    at, inside = mark.end(), True
                continue
            if not inside:  # it was opened before the text began
                thoughts += kept
                kept.clear()
            thoughts.append(text[at : mark.start()])
            at, inside = mark.end(), False
        (thoughts if inside else kept).append(text[at:])
        text = "".join(kept)
    return _MARKS.sub("", text), "\n".join(thoughts)


# ---- values in text of any script ----

_HYPHENS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2043\u2212\ufe58\ufe63\uff0d"), "-")
_APART = dict.fromkeys(map(ord, "\u2014\u2015\u2e3a\u2e3b\uff5e№"), " ")  # dashes that part sentences
_HAN_DIGITS = str.maketrans("〇零一二三四五六七八九", "00123456789")
_EMPHASIS = re.compile(r"(?<!\d)[*`~]+|[*`~]+(?!\d)")
_WITHOUT_BLANKS = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "BOPOMOFO")
_OR = re.compile(
    "(|or|and|oder|und|ou|et|o|u|y|e|и|или|veya|ve|atau|hoặc|或|或者|或是|还是|和|と|または|か|또는|혹은"
    "|และ|หรือ|ຫຼື|ឬ|သို့မဟုတ်|أو|و|या|বা|அல்லது|ή|או|ან|կամ)"
)
_NUMBER = r"\d(?:[\d ,.'_\u00b7\u2019\u066c-]*\d)?"


@functools.lru_cache(maxsize=256)
def _plain(text: str) -> str:
    """Text in one spelling: compatibility forms, ASCII digits, one kind of hyphen and of blank, no invisible marks."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_HYPHENS | _APART)).translate(_HYPHENS)
        text = "".join(
            str(digit) if (digit := unicodedata.decimal(c, -1)) >= 0 else c
            for c in text if unicodedata.category(c) != "Cf"
        )  # fmt: skip
    if "&" in text:
        text = html.unescape(text)
    return " ".join(text.replace("{,}", ",").replace("\\,", " ").split()).casefold()


@functools.lru_cache(maxsize=4096)
def _script(character: str) -> str:
    """ "digit", the script of a letter that is parted by blanks in running text, or "" for anything else."""
    if character.isdigit():
        return "digit"
    if not (character.isalpha() or unicodedata.category(character) in ("Mn", "Mc")):
        return ""
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return "" if name in _WITHOUT_BLANKS else name


def _parted(edge: str, text: str, at: int, step: int) -> bool:
    """Does a value whose outer character is `edge` end where text[at] stands beside it (step: towards the outside)?"""
    if not 0 <= at < len(text):
        return True
    beside = text[at]
    if beside == "_":
        while 0 <= at < len(text) and text[at] == "_":
            at += step
        return _parted(edge, text, at, step)  # emphasis, or part of a name
    if beside == "-":  # part of a compound or a sign, unless it parts words of scripts without blanks
        outside = text[at + step] if 0 <= at + step < len(text) else ""
        return bool(step > 0 and not (outside and _script(outside)))
    own, other = _script(edge), _script(beside)
    if own == "digit" and beside in ",.'" and 0 <= at + step < len(text) and text[at + step].isdigit():
        return False  # a longer number
    return not own or not other or (own != other and {own, other} != {"digit", "LATIN"})


def _stands(text: str, value: str) -> list[tuple[int, int]]:
    """Where `value` stands whole in a plain text."""
    found, at = [], text.find(value)
    while at >= 0:
        end = at + len(value)
        if _parted(value[0], text, at - 1, -1) and _parted(value[-1], text, end, 1):
            found.append((at, end))
        at = text.find(value, at + 1)
    return found


def _numbers(text: str) -> Iterable[tuple[str, int, int]]:
    """(digits, start, end) of the numbers of a plain text that are written in groups, parted by one sign throughout."""
    for match in re.finditer(_NUMBER, text):
        written = match[0]
        signs = {c for c in written if not c.isdigit()}
        groups = re.split(r"\D", written)
        even = all(len(g) == 1 for g in groups) or all(len(g) > 1 for g in groups[1:])
        if len(signs) == 1 and "" not in groups and even and (signs != {"-"} or len(groups) == len("".join(groups))):
            whole = _parted("0", text, match.start() - 1, -1) and _parted("0", text, match.end(), 1)
            if whole:
                yield "".join(groups), match.start(), match.end()


def _places(answer: str, value: str) -> tuple[str, list[tuple[int, int]]]:
    """(plain text, places of the value in it), in the first of some readings of the answer that holds it."""
    wanted = _plain(value)
    if not wanted:
        return "", []
    text = _plain(answer)
    readings = [text]
    if any(c in text for c in "*`~"):
        readings += [_EMPHASIS.sub(" ", text), _EMPHASIS.sub("", text)]
    if "-" in wanted:
        readings.append(_plain(re.sub(r"-\s+|\s*\n\s*", lambda m: "-" if "-" in m[0] else "", answer)))
    if wanted.isdigit() and re.search(r"[〇零一二三四五六七八九]{3}", text):
        readings.append(text.translate(_HAN_DIGITS))
    for reading in dict.fromkeys(readings):
        if places := _stands(" ".join(reading.split()), wanted):
            return " ".join(reading.split()), places
    if wanted.isdigit():
        return text, [(start, end) for digits, start, end in _numbers(text) if digits == wanted]
    return text, []


def stands(answer: str, value: str) -> bool:
    """Does the value stand whole in the answer, alone or among others?"""
    return bool(value) and (answer == value or bool(_places(answer, value)[1]))


def holds(answer: str, value: str) -> bool:
    """Does the answer hold the value whole? Neither case, digit grouping nor script matter; a list of guesses does."""
    if answer == value:
        return bool(value)
    text, places = _places(answer, value)
    return bool(places) and not _is_a_guess(text, places, _plain(value))


def _is_a_guess(text: str, places: list[tuple[int, int]], value: str) -> bool:
    """Several values of the same shape: three or more, or two side by side."""
    others = [m for m in _alike(text, value) if not any(m[0] < end and start < m[1] for start, end in places)]
    others = [m for m in others if re.sub(r"\D" if value.isdigit() else r"\s", "", text[slice(*m)]) != value]
    if len({text[slice(*m)] for m in others}) > 1:
        return True
    for start, end in others:
        for left, right in places:
            between = text[end:left] if end <= left else text[right:start]
            if _OR.fullmatch(between.strip(" ,;:/|·-_()[]{}'\"、，。；")):
                return True
    return False


def _alike(text: str, value: str) -> list[tuple[int, int]]:
    if value.isdigit():
        return [m.span() for m in re.finditer(rf"(?<![\d.,]\d)(?<!\d)\d{{{len(value)}}}(?!\d)", text)]
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        return [m.span() for m in re.finditer(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text)]
    if re.fullmatch(r"[^\W\d_]+-\d+", value):
        return [m.span() for m in re.finditer(rf"[^\W\d_]+-\d{{{len(value.partition('-')[2])}}}(?!\d)", text)]
    pair = value.split(" ")
    if len(pair) == 2 and pair[0] in words.ADJECTIVES and pair[1] in words.NOUNS:
        found = re.finditer(r"(?=\b([a-z]+) ([a-z]+)\b(?! of ))", text)
        return [(m.start(), m.end(2)) for m in found if m[1] in words.ADJECTIVES and m[2] in words.NOUNS]
    return []


# ---- grades ----


@dataclass(frozen=True)
class Grade:
    """`outcome` is one of analysis.trials.OUTCOMES; `score` is 1 for exact (or the value's probability where
    log-probabilities came), below 0.5 otherwise; `answered_from` names the fact whose value was given instead;
    `in_reasoning` says whether the value stands in the thoughts (None: there were none)."""

    outcome: str
    score: float | None
    answer: str
    answered_from: str | None = None
    logprob: float | None = None
    distance: int | None = None
    in_reasoning: bool | None = None


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
    visible, thoughts = answer_and_thoughts(_ends(reply.text))
    thoughts = "\n".join(filter(None, (_ends(reply.reasoning), thoughts)))
    thought = holds(thoughts, expected) if thoughts.strip() and expected else (False if thoughts.strip() else None)
    answer = visible.strip()
    short = answer[:500]
    spent = reply.finish_reason in TOKEN_BUDGET
    if not answer:
        if thoughts:
            return Grade("reasoning_only", None, "", in_reasoning=thought)
        return Grade("cut" if spent else "empty", None, "")
    others = [f for f in facts if f.value and f.value != expected and stands(answer, f.value)]
    if expected is not None and not others and holds(answer, expected):
        logprob = value_logprob(reply, expected)
        score = 1.0 if logprob is None else math.exp(min(0.0, logprob))
        return Grade("exact", score, short, None, logprob, 0, thought)
    distance, similarity = _closest(answer, expected)
    score = 0.49 * similarity
    if others:
        plain = _plain(answer)
        first = min(others, key=lambda f: plain.find(_plain(f.value)))
        outcome = "distractor" if first.role == "distractor" else "other_needle"
        return Grade(outcome, score, short, f"{first.role}@{first.depth:.2f}", None, distance, thought)
    for value, trial in (elsewhere or {}).items():
        if value in answer and value != expected and stands(answer, value):
            return Grade("other_needle", score, short, f"trial:{trial}", None, distance, thought)
    if expected is not None and distance and distance <= max(1, len(expected) // 5):
        return Grade("near", score, short, None, None, distance, thought)
    if REFUSAL.search(answer):
        return Grade("refusal", score, short, None, None, distance, thought)
    if spent and not _degenerate(answer):
        return Grade("cut", None, short, None, None, distance, thought)
    return Grade("garbage", score, short, None, None, distance, thought)


def _ends(text: str) -> str:
    return text if len(text) <= 2 * MOST_CHARS else f"{text[:MOST_CHARS]}\n{text[-MOST_CHARS:]}"


def _closest(answer: str, expected: str | None) -> tuple[int | None, float]:
    """(edit distance, similarity 0..1) of the word or words of the answer closest to the expected value."""
    if not expected:
        return None, 0.0
    text = _plain(answer)
    if expected.isdigit():
        parts = [*re.findall(r"\d+", text), *(digits for digits, _, _ in _numbers(text))]
    else:
        parts = re.findall(r"[\w-]+", text)[:60]
    size = len(expected.split())
    candidates = [" ".join(parts[i : i + size]) for i in range(max(1, len(parts) - size + 1))]
    distance = min((edit_distance(c, expected.casefold()) for c in candidates[:60]), default=len(expected))
    return distance, max(0.0, 1 - distance / len(expected))


def _degenerate(answer: str) -> bool:
    """A loop of a few characters or words, as non-finite numbers in a cache produce."""
    if len(answer) < 24:
        return len(set(answer)) <= 2 and len(answer) >= 8
    said = answer.split()
    few = len(set(answer)) <= 6 or (len(said) >= 12 and len(set(said)) <= max(2, len(said) // 6))
    return few or _ends_in_a_loop(answer)


def _ends_in_a_loop(answer: str) -> bool:
    """The answer ends with a line or sentence that it has said twice before (now cut, perhaps): a small model that has
    lost the thread goes on like that for ever, so a longer answer would not hold the value either."""
    said = [part.strip() for part in re.split(r"[\n.!?]+", answer) if part.strip()]
    return len(said) >= 3 and len(said[-1].split()) >= 2 and sum(part.startswith(said[-1]) for part in said) >= 3
