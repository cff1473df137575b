"""One or two printed pages for somebody who was not there: what is lost, one wrong answer beside the right one, a
picture, how sure, what is not excluded, what next. Beside it the text for maintainers, and a script in plain Python.

A `Brief` is texts and numbers alone: it travels in a notebook's output as JSON, and whoever draws it escapes it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework import analysis
from needlework.serving.scrub import scrub
from needlework.workbook.tables import escape, plain

if TYPE_CHECKING:
    import pandas as pd

    from needlework.analysis import Diagnosis

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NAMES = ("summary.html", "issue.md", "repro.py")


@dataclass(frozen=True)
class Brief:
    """title: what was examined and what came out, without our codes; facts: (name, text); question: {asked, expected,
    length, place, answers: [{arm, answer, found}]} or {}; grids: {arm: {lengths, places, cells: [[[found, asked]]]}}.
    """

    title: str
    verdict: str
    law: str
    foretold: str
    facts: tuple[tuple[str, str], ...]
    question: dict[str, Any]
    grids: dict[str, Any]
    open: tuple[str, ...]
    next_step: str
    issue: str
    repro: str

    def as_json(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(asdict(self))))


def brief(
    diagnosis: Diagnosis,
    trials: pd.DataFrame,
    *,
    what: str,
    facts: Mapping[str, Any] | None = None,
    command: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Brief:
    """The page of one diagnosis. what: the deployment in few words; facts: version, servers; config: its constants."""
    lead = str(diagnosis).split("\n", 1)[0]
    lost = bool(diagnosis.laws) and diagnosis.verdict != "healthy" and diagnosis.hits < diagnosis.measured
    law = str(diagnosis.laws[0]) if lost else ""
    certain = lost and diagnosis.laws[0].share > 0.5
    title = f"{what} loses: {law.split(':', 1)[0]}" if certain else f"{what}: {_plain_verdict(diagnosis, lead)}"
    judged = f"{diagnosis.predictions}" if diagnosis.predictions else "No law was held against fresh prompts."
    widest = sorted((e for e in diagnosis.excluded if e.measured and not e.lost), key=lambda e: -e.bound)[:4]
    spots = [f"Not looked at: {', '.join(diagnosis.missing)}" if diagnosis.missing else ""]
    spots += [f"{e.condition}: 0 of {e.measured} lost, up to {100 * e.bound:.0f} % not excluded" for e in widest]
    told = {
        "Asked": f"{diagnosis.trials:,} questions, {diagnosis.measured:,} measured, {diagnosis.hits:,} answered right",
        "When": _days(trials), **{k: str(v) for k, v in (facts or {}).items() if v},
    }  # fmt: skip
    shown = tuple((name, scrub(plain(text, 300), limit=300)) for name, text in told.items() if text)
    repro = _repro(trials)
    question = _question(trials)
    verdict = _sentences(lead)
    made = Brief(
        title, verdict, law, judged, shown, question, _grids(trials), tuple(s for s in spots if s),
        _sentences(str(diagnosis.next_tests[0]), verdict) if diagnosis.next_tests else "none is left to run", "", repro,
    )  # fmt: skip
    return Brief(**{**asdict(made), "issue": _issue(made, diagnosis, dict(config or {}), list(command))})


def from_mapping(values: object) -> Brief | None:
    """A Brief from a notebook's JSON; None where it is none: anybody may have sent it."""
    if not isinstance(values, Mapping) or set(values) != set(Brief.__dataclass_fields__):
        return None
    texts = ("title", "verdict", "law", "foretold", "next_step", "issue", "repro")
    if not all(isinstance(values[name], str) for name in texts):
        return None
    made = Brief(**values)
    try:
        page(made)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return made


def write(folder: str | Path, found: Brief, *, whole: str = "") -> Path:
    """Write summary.html, issue.md and repro.py; returns the first. whole: address of the longer report beside it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(NAMES, (page(found, whole=whole), found.issue, found.repro), strict=True):
        beside = folder / f"{name}.part"
        beside.write_text(text, "utf-8")
        beside.replace(folder / name)
    return folder / NAMES[0]


def page(found: Brief, *, whole: str = "") -> str:
    """The page as text: no script, nothing fetched."""
    facts = " · ".join(f"<b>{escape(name, 40)}</b> {escape(text, 300)}" for name, text in found.facts)
    parts = [f"<p><strong>{escape(found.verdict, 600)}</strong></p>"]
    if found.question:
        parts.append(_asked_html(found.question))
    if found.grids:
        tables = "".join(_grid_html(arm, grid) for arm, grid in list(found.grids.items())[:4])
        parts.append(
            "<section><h2>Found, by length of the prompt and place of the value</h2>"
            '<p class="soft">Each cell: found of asked. Columns: prompt of at most so many tokens; rows: the value '
            "stands at most so many tokens from the start. "
            f'Blue: all found; yellow: some; brown: none.</p><div class="grids">{tables}</div></section>'
        )
    if found.law:
        parts.append(
            "<section><h2>What is lost, with its 95 % interval</h2>"
            f"<p>{escape(_first_up(found.law), 500)}</p></section>"
        )
    parts.append(f"<section><h2>Predictions made and kept</h2><p>{escape(found.foretold, 400)}</p></section>")
    spots = "".join(f"<li>{escape(_first_up(spot), 400)}</li>" for spot in found.open[:8])
    parts.append(
        f"<section><h2>What is not excluded</h2><ul>{spots or '<li>Nothing that was looked for.</li>'}</ul></section>"
    )
    beside = f' The whole: <a href="{escape(whole, 60)}">{escape(whole, 60)}</a>.' if whole else ""
    parts.append(
        f'<section><h2>Next step</h2><p>{escape(_first_up(found.next_step), 600)}</p><p class="soft">For maintainers: '
        f'<a href="issue.md">issue.md</a>; to see it yourself: <a href="repro.py">repro.py</a>.{beside}</p></section>'
    )
    title = escape(found.title, 200)
    css = resources.files("needlework.workbook").joinpath("onepage.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{css}</style></head><body><main><h1>{title}</h1>'
        f'<p class="facts">{facts}</p>{"".join(parts)}</main></body></html>\n'
    )


def _asked_html(q: Mapping[str, Any]) -> str:
    cards = "".join(
        f'<div class="{"found" if a["found"] else "lost"}"><b>{escape(a["arm"], 40)}</b>: '
        f"{'right' if a['found'] else 'wrong'}"
        f"<blockquote>{escape(a['answer'], 300) or '(an empty answer)'}</blockquote></div>"
        for a in q["answers"][:4]
    )
    alone = "" if len(q["answers"]) > 1 else '<p class="soft">No other arm was asked this question.</p>'
    return (
        f"<section><h2>One question that fails</h2><p>In a prompt of {int(q['length']):,} tokens, with the value "
        f"{int(q['place']):,} tokens from the start: <q>{escape(q['asked'], 300)}</q> "
        f'Expected: <b>{escape(q["expected"], 60)}</b></p><div class="answers">{cards}</div>{alone}</section>'
    )


def _grid_html(arm: str, grid: Mapping[str, Any]) -> str:
    head = "".join(f'<th scope="col">{int(n):,}</th>' for n in grid["lengths"])
    rows = ""
    for place, cells in zip(grid["places"], grid["cells"], strict=True):
        row = ""
        for hits, asked in cells:
            word = "all" if hits == asked else "some" if hits else "none"
            row += f'<td class="{word}">{int(hits)}/{int(asked)}</td>' if asked else "<td></td>"
        rows += f'<tr><th scope="row">{int(place):,}</th>{row}</tr>'
    return (
        f'<div class="scroll"><table><caption>{escape(arm, 40)}</caption><thead><tr><th>tokens</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def graded(trials: pd.DataFrame) -> pd.DataFrame:
    """Measured questions about a value in the prompt, without controls, with `hit`."""
    rows = trials.assign(hit=analysis.hits(trials)).dropna(subset=["hit"])
    if "control" in rows:
        rows = rows[rows["control"].fillna("").astype(str).eq("")]
    return rows[rows["probe"].ne("calibration")] if "probe" in rows else rows


def _question(trials: pd.DataFrame) -> dict[str, Any]:
    """A wrong answer, if possible one whose question another arm was asked and answered right."""
    rows = graded(trials)
    need = ["arm", "question", "expected", "answer", "prompt_tokens", "needle_token"]
    if not set(need) <= set(rows) or rows.empty:
        return {}
    rows = rows.dropna(subset=[name for name in need if name != "answer"])
    same = [name for name in ("question", "expected", "target_tokens", "depth", "repeat") if name in rows]
    best, score = None, (-1, -1, 0.0)
    for _, together in rows.groupby(same, dropna=False, sort=True):
        misses = together[together["hit"] == 0]
        if misses.empty:
            continue
        right = together[(together["hit"] == 1) & ~together["arm"].isin(misses["arm"])]
        told = misses.assign(told=misses["answer"].fillna("").astype(str).str.strip().ne(""))
        miss = told.sort_values("told", ascending=False, kind="stable").iloc[0]
        rank = (int(len(right) > 0), int(miss["told"]), -float(miss["prompt_tokens"]))
        if rank > score:
            best, score = [miss, *(group.iloc[0] for _, group in right.groupby("arm"))], rank
    if best is None:
        return {}
    answers = [
        {"arm": plain(r["arm"], 40), "answer": scrub(plain(r["answer"] or "", 300), limit=300), "found": bool(r["hit"])}
        for r in best
    ]
    first = best[0]
    return {
        "asked": plain(first["question"], 300), "expected": plain(first["expected"], 60), "answers": answers,
        "length": int(first["prompt_tokens"]), "place": int(first["needle_token"]),
    }  # fmt: skip


def _grids(trials: pd.DataFrame) -> dict[str, Any]:
    """Found of asked for each arm, in octaves of prompt length and of place."""
    rows = graded(trials)
    if not {"prompt_tokens", "needle_token"} <= set(rows):
        return {}
    rows = rows.dropna(subset=["prompt_tokens", "needle_token"])
    rows = rows[(rows["prompt_tokens"] > 0) & (rows["needle_token"] >= 0)]
    if rows.empty:
        return {}
    rows = rows.assign(
        column=_octave(rows["prompt_tokens"]), row=_octave(rows["needle_token"]), arm=rows.get("arm", "all")
    )
    lengths, places = sorted(rows["column"].unique()), sorted(rows["row"].unique())
    made = {}
    for arm, of_arm in rows.fillna({"arm": "all"}).groupby("arm"):
        counted = of_arm.groupby(["row", "column"])["hit"].agg(["sum", "count"])
        cells = [[[int(v) for v in counted.loc[key]] if (key := (p, n)) in counted.index else [0, 0] for n in lengths]
                 for p in places]  # fmt: skip
        made[plain(arm, 40)] = {
            "lengths": [int(n) for n in lengths],
            "places": [int(p) for p in places],
            "cells": cells,
        }
    return made


def _octave(values: pd.Series) -> pd.Series:
    """The next power of two, at least 256."""
    return 2 ** np.ceil(np.log2(values.clip(lower=256)))


def _repro(trials: pd.DataFrame) -> str:
    """The script, with lengths and depth at which this deployment loses; the ordinary ladder where it loses nothing."""
    rows = graded(trials)
    if not {"prompt_tokens", "depth"} <= set(rows) or not (rows["hit"] == 0).any():
        return analysis.Ledger("").reproduction()
    missed = rows[rows["hit"] == 0].dropna(subset=["prompt_tokens", "depth"])
    if missed.empty:
        return analysis.Ledger("").reproduction()
    low, high = missed["prompt_tokens"].quantile([0.05, 0.95])
    ladder = np.unique((np.geomspace(max(256, low / 3), max(high, 512), 7) // 16 * 16).astype(int))
    return analysis.Ledger("").reproduction(lengths=ladder.tolist(), depth=round(float(missed["depth"].median()), 2))


def _issue(found: Brief, diagnosis: Diagnosis, config: dict[str, Any], command: list[str]) -> str:
    """Markdown for maintainers: plain title, what was seen first, then what is asked for."""
    facts = dict(found.facts)
    lines = [f"# {found.title}", "", f"{found.verdict}", ""]
    if q := found.question:
        lines += ["## One question that fails", "",
                  f"Prompt of {q['length']:,} tokens, value {q['place']:,} tokens from the start.",
                  f"Asked: {q['asked']}", f"Expected: `{q['expected']}`", ""]  # fmt: skip
        lines += [f"- {a['arm']}: {'right' if a['found'] else 'wrong'}: {a['answer']!r}" for a in q["answers"]] + [""]
    lines += [
        "## What is lost",
        "",
        found.law or "Nothing beyond stray misses.",
        "",
        f"Predictions: {found.foretold}",
        "",
    ]
    lines += ["## What was seen inside and around", "", *(f"- {line}" for line in diagnosis.seen or ("nothing",)), ""]
    lines += ["## What was asked", "", *(f"- {name}: {text}" for name, text in facts.items()), ""]
    lines += ["## Exact command", "", "```", "\n".join(map(str, command)) or "not recorded", "```", ""]
    lines += ["## Configuration", "", *(f"- {plain(k, 60)}: {plain(v, 120)}" for k, v in config.items()), ""]
    lines += ["## Not excluded", "", *(f"- {spot}" for spot in found.open), "", "## Next test", "", found.next_step, ""]
    lines += ["## Script", "", "`python repro.py URL MODEL` asks for one fact at several lengths, with plain Python."]
    return (
        "\n".join(scrub(line, limit=600) if line.strip() else "" for text in lines for line in text.split("\n")) + "\n"
    )


def _sentences(text: str, said: str = "") -> str:
    """The text, and what each of its codes stands for, unless the text or what was `said` before tells that."""
    codes = [c for c in dict.fromkeys(re.findall(r"\b[FN]\d{1,2}\b", text)) if c in analysis.MECHANISMS]
    titles = {code: analysis.MECHANISMS[code].title for code in codes}
    told = [f"{code}: {title}" for code, title in titles.items() if title not in text + said]
    return text + (f" ({'; '.join(told)})" if told else "")


def _plain_verdict(diagnosis: Diagnosis, lead: str) -> str:
    """The verdict without codes, which mean nothing to a maintainer."""
    titles = [analysis.MECHANISMS[code].title for code in diagnosis.causes if code in analysis.MECHANISMS]
    return " or ".join(titles[:2]) or lead.split(". ")[0].rstrip(".").lower()


def _days(trials: pd.DataFrame) -> str:
    if "time" not in trials:
        return ""
    days = sorted(set(trials["time"].dropna().astype(str).str[:10]))
    return " to ".join(day for day, _ in itertools.groupby((days[0], days[-1]))) if days else ""


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
