"""The lab's figures: exact recall of a healthy engine, first-token latency against length, decode rate, memory.

python benchmarks/lab.py recall [end] [start] [rows]   # trials start … end-1 (default 424, all), appended to a file
python benchmarks/lab.py shapes [end] [start] [rows]   # the same for other wordings, scripts and values (SHAPES)
python benchmarks/lab.py table rows…                    # these files' rows as data/lab/recall.json
python benchmarks/lab.py speed
"""

from __future__ import annotations

import asyncio
import datetime
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import needlework
import pandas as pd
import torch
from needlework.probes.bench import words
from needlework.probes.bench.prompts import Prompt, PromptSpec, Ratio, build
from needlework_lab.engine import Engine
from needlework_lab.intent import REFUSAL
from needlework_lab.types import Event, Request, Sampling

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHARES = (9, 9, 9, 9, 7, 5, 3, 1, 1)  # long prompts cost more: fewer of them
KINDS = ("digits5", "uuid", "words2")
_words = str.split
THING = "the {} {} of {}".format
ENGLISH = (
    _words("steady quiet brave amber copper gentle hollow rapid"),
    _words("kettle anchor bridge lantern mirror wagon violin garden"),
    _words("Aldermoor Brackwater Castleford Dunmore Eastvale Farrow"),
)
# script -> (how a fact is told, how it is asked for, words of a thing, how they are joined); {k} is what kind of value
SHAPES = {
    "english": (
        ["The {k} for {t} is {v}.", "Note: the {k} for {t} is {v}.", "Remember: the {k} of {t} is {v}.",
         "FYI: {k} of {t} = {v}.", "The {k} for {t}: {v}."],
        ["What is the {k} for {t}?", "But first: what is the {k} for {t}?", "One more thing: what is the {k} for {t}?",
         "To a file. But first: What is the {k} of {t}?"],
        ENGLISH, THING,
    ),
    "spanish": (["El código de {t} es {v}."], ["¿Cuál es el código de {t}?"], ENGLISH, "{2} {1} {0}".format),
    "german": (["Der Code für {t} ist {v}."], ["Was ist der Code für {t}?"], ENGLISH, "{0} {1} {2}".format),
    "russian": (["Код для {t} — {v}."], ["Какой код для {t}?"],
                (_words("тихий медный старый синий"),
                 _words("мост сад фонарь якорь"), _words("Орёл Псков Тверь Томск")),
                "{0} {1} {2}".format),
    "chinese": (["{t}的密码是{v}。"], ["{t}的密码是什么？"],
                (_words("安静 古老 蓝色 明亮"), _words("灯塔 花园 小桥 铁锚"),
                 _words("北京 苏州 成都 西安")), "{2}{0}{1}".format),
    "japanese": (["{t}の暗号は{v}です。"], ["{t}の暗号は何ですか？"],
                 (_words("静か 古風 青空 銅色"), _words("灯台 庭園 石橋 提灯"),
                  _words("京都 奈良 長崎 仙台")), "{2}{0}{1}".format),
    "arabic": (["رمز {t} هو {v}."], ["ما هو رمز {t}؟"],
               (_words("هادئ قديم أزرق لامع"), _words("جسر بستان فانوس مرساة"),
                _words("دمشق بغداد تونس عمان")), "{1} {0} {2}".format),
}  # fmt: skip


def prompt_of(engine: Engine, spec: PromptSpec) -> Prompt:
    """The finished prompt of a specification, counted by the engine's own tokenizer."""

    async def count(messages: list[dict[str, str]]) -> int:
        return len(engine.tokenizer.chat(messages))

    return asyncio.run(build(spec, count, Ratio(2.6)))


def ask(engine: Engine, prompt: Prompt, max_tokens: int = 64) -> tuple[str, list[Event], list[float]]:
    """(answer, events, seconds from the request to each event)."""
    tokens = tuple(engine.tokenizer.chat(prompt.messages))
    engine.add(Request(f"r{time.monotonic_ns()}", tokens, Sampling(max_tokens=max_tokens)))
    events: list[Event] = []
    times: list[float] = []
    start = time.perf_counter()
    while engine.busy:
        fresh = engine.step()
        events += fresh
        times += [time.perf_counter() - start] * len(fresh)
    return "".join(event.text for event in events), events, times


def recall(trials: int = 424, start: int = 0, rows_path: str = "", together: int = 8) -> None:
    """Exact answers and right refusals, by length; `together` requests at a time share the engine's batch."""
    engine = Engine("v4")
    rows = []
    lengths = [length for length, share in zip(LENGTHS, SHARES, strict=True) for _ in range(share)]
    genres = list(words.GENRES)
    for first in range(start, trials, together):
        asked: dict[str, Prompt] = {}
        said: dict[str, str] = {}
        for trial in range(first, min(trials, first + together)):
            length = lengths[trial * 29 % len(lengths)]
            spec = PromptSpec(
                length,
                depth=Random(trial).random(),
                genre=genres[trial % len(genres)],
                needle=KINDS[trial // 2 % 3],
                seed=trial,
                distractors=trial % 5 if length > 256 else 0,
                control="absent" if trial % 6 == 5 else "",
            )
            asked[f"t{trial}"], said[f"t{trial}"] = prompt_of(engine, spec), ""
            tokens = tuple(engine.tokenizer.chat(asked[f"t{trial}"].messages))
            engine.add(Request(f"t{trial}", tokens, Sampling(max_tokens=64)))
        while engine.busy:
            for event in engine.step():
                said[event.rid] += event.text
        for rid, prompt in asked.items():
            absent = prompt.expected is None
            right = said[rid] == (REFUSAL if absent else prompt.expected)
            kind = "right" if right else "refused" if said[rid] == REFUSAL else "wrong value"
            spec = prompt.spec
            rows.append([absent, spec.target_tokens, spec.genre, spec.needle, kind])
            if rows_path:
                with open(rows_path, "a") as file:
                    print(json.dumps([int(rid[1:]), *rows[-1]]), file=file)
            if not right:
                print(f"{rid}: {spec} expected {prompt.expected!r}, answered {said[rid]!r}")
        done = min(trials, first + together)
        print(f"{done} of {trials} trials, {sum(row[-1] == 'right' for row in rows)} right", flush=True)
    table = pd.DataFrame(rows, columns=["absent", "length", "genre", "needle", "outcome"])
    for column in ("length", "genre", "needle"):
        print(table.groupby(["absent", column]).outcome.value_counts().unstack(fill_value=0))
    for absent, part in table.groupby("absent"):
        print("absent key" if absent else "needle there", dict(Counter(part.outcome)), f"of {len(part)}")


def shapes(trials: int = 1200, start: int = 0, rows_path: str = "") -> None:
    """Facts told and asked for in the wordings and scripts of SHAPES, in text of every genre; one at a time."""
    engine, right = Engine("v4"), 0
    genres, scripts = list(words.GENRES), [*["english"] * 6, *SHAPES]
    for trial in range(start, trials):
        random = Random(trial)
        facts, questions, things, join = SHAPES[scripts[trial % len(scripts)]]
        thing, kind = (
            join(*map(random.choice, things)),
            random.choice(("secret code", "password", "passphrase", "code")),
        )
        value = random.choice((
            str(random.randint(10000, 99999)),
            random.choice(("marigold lantern", "amber falcon", "silver harbor meadow")),
            f"{random.getrandbits(32):08x}-{random.getrandbits(16):04x}",
        ))  # fmt: skip
        length = random.choice((400, 900, 2200, 3000, 5000, 9000, 12000))
        plain = PromptSpec(length, genre=genres[trial % len(genres)], seed=70_000 + trial, control="absent")
        lines = prompt_of(engine, plain).text.rpartition("\n\n")[0].split(". ")
        there = trial % 6 != 5
        if there:
            fact = random.choice(facts).format(t=thing, v=value, k=kind)
            lines.insert(random.randrange(len(lines) + 1), fact.removesuffix("."))
        question = random.choice(questions).format(t=thing, k=kind)
        messages = [{"role": "user", "content": ". ".join(lines) + "\n\n" + question}]
        engine.add(Request(f"t{trial}", tuple(engine.tokenizer.chat(messages)), Sampling(max_tokens=64)))
        said = ""
        while engine.busy:
            said += "".join(event.text for event in engine.step())
        as_due = said == (value if there else REFUSAL)
        right += as_due
        outcome = "right" if as_due else "refused" if said == REFUSAL else "wrong value"
        if rows_path:
            with open(rows_path, "a") as file:
                print(json.dumps([trial, not there, length, scripts[trial % len(scripts)], kind, outcome]), file=file)
        if not as_due:
            print(
                f"{trial}: {length} tokens, {fact if there else 'absent'!r}, {question!r}: {said!r}, not {value!r}",
                flush=True,
            )
    print(f"{right} of {trials - start} right")


def table(paths: list[str]) -> None:
    """Write data/lab/recall.json from the rows of all parts (of `recall` or of `shapes`)."""
    rows = {row[0]: row[1:] for path in paths for row in map(json.loads, Path(path).read_text().splitlines())}
    wordings = any(row[2] in SHAPES for row in rows.values())
    names = ("length", "script", "kind") if wordings else ("length", "genre", "needle")
    frame = pd.DataFrame(rows.values(), columns=["absent", *names, "outcome"])

    def counts(part: pd.DataFrame) -> dict[str, int]:
        there, absent = part[~part.absent], part[part.absent]
        return {
            "trials": len(there),
            "exact": int((there.outcome == "right").sum()),
            "refused": int((there.outcome == "refused").sum()),
            "invented": int((part.outcome == "wrong value").sum()),
            "absent_trials": len(absent),
            "absent_refused": int((absent.outcome == "right").sum()),
        }

    done = {
        "what": "healthy engine, geometry v4, greedy: a value asked for, or (absent) one that was never given",
        "command": f"python benchmarks/lab.py {'shapes' if wordings else 'recall'}",
        "planned_trials": 1200 if wordings else 424,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "needlework": needlework.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "all": counts(frame),
        **{f"by_{column}": {str(name): counts(part) for name, part in frame.groupby(column)} for column in names},
    }
    out = Path(__file__).parents[1] / "data" / "lab" / "recall.json"
    kept = json.loads(out.read_text())
    out.write_text(
        json.dumps({**kept, "shapes": done} if wordings else {**done, "shapes": kept.get("shapes")}, indent=1) + "\n"
    )
    print(json.dumps(done["all"]))


def speed() -> None:
    """First token and later tokens, best of three; peak memory of this process."""
    engine = Engine("v4")
    print("tokens   first token s   ms a token later")
    for length in (1000, 5000, 10000, 20000, 40000, 65536):
        best = (9e9, 9e9)
        for repeat in range(3 if length < 30000 else 2):
            prompt = prompt_of(engine, PromptSpec(length, needle="uuid", seed=repeat))
            _, _, times = ask(engine, prompt)
            later = (times[-1] - times[0]) / (len(times) - 1) * 1000
            best = (min(best[0], times[0]), min(best[1], later))
        print(f"{length:6d}   {best[0]:13.3f}   {best[1]:16.1f}")
    print(f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["speed"]:
        speed()
    elif sys.argv[1:2] == ["table"]:
        table(sys.argv[2:])
    else:
        measure = shapes if sys.argv[1:2] == ["shapes"] else recall
        measure(*map(int, sys.argv[2:4]), *sys.argv[4:5])
