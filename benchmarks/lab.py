"""The lab's figures: exact recall of a healthy engine, first-token latency against length, decode rate, memory.

python benchmarks/lab.py recall [end] [start] [rows]   # trials start … end-1 (default 424, all), appended to a file
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
from needlework_lab.asking import REFUSAL
from needlework_lab.engine import Engine
from needlework_lab.types import Event, Request, Sampling

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHARES = (9, 9, 9, 9, 7, 5, 3, 1, 1)  # long prompts cost more: fewer of them
KINDS = ("digits5", "uuid", "words2")


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


def table(paths: list[str]) -> None:
    """Write data/lab/recall.json from the rows of all parts: trials, exact, refused, invented."""
    rows = {row[0]: row[1:] for path in paths for row in map(json.loads, Path(path).read_text().splitlines())}
    frame = pd.DataFrame(rows.values(), columns=["absent", "length", "genre", "needle", "outcome"])

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
        "command": "python benchmarks/lab.py recall",
        "planned_trials": 424,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "needlework": needlework.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "all": counts(frame),
        **{
            f"by_{column}": {str(name): counts(part) for name, part in frame.groupby(column)}
            for column in ("length", "genre", "needle")
        },
    }
    out = Path(__file__).parents[1] / "data" / "lab" / "recall.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(done, indent=1) + "\n")
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
        recall(*map(int, sys.argv[2:4]), *sys.argv[4:5])
