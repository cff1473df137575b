"""The ledger of an investigation: hypotheses, tests, what each run exonerates, blind spots, and what to hand on.

`Ledger.save` writes ledger.json; `issue_text` and `reproduction` write what a maintainer asks for first: version, exact
command, effective configuration, a table of one-flag changes, and a small script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

STRENGTHS = ("none", "weak", "moderate", "strong")
# Addresses, host names with a domain, and long tokens do not belong into a text for strangers.
_SECRET = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\b(?:sk|hf|ghp|gho|nvapi|Bearer)[-_ ][A-Za-z0-9_\-.]{8,}|https?://[^\s/\"']+"
)


@dataclass(frozen=True)
class Hypothesis:
    """A cause under test. status: "open", "supported", "exonerated"; strength of what speaks for or against it."""

    code: str
    title: str
    prior: float
    posterior: float | None = None
    status: str = "open"
    strength: str = "none"

    def __post_init__(self) -> None:
        if self.status not in ("open", "supported", "exonerated") or self.strength not in STRENGTHS:
            raise ValueError(f"{self.code}: unknown status {self.status!r} or strength {self.strength!r}")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"{self.code}: a prior lies between 0 and 1, not {self.prior}")


@dataclass(frozen=True)
class Entry:
    """One test: which run, what was found (a sentence with numbers), whom it supports or clears, how strongly."""

    run: str
    test: str
    result: str
    supports: tuple[str, ...] = ()
    exonerates: tuple[str, ...] = ()
    strength: str = "moderate"


@dataclass(frozen=True, repr=False)
class Ledger:
    """An investigation so far. All methods return a new ledger or text; nothing is changed in place."""

    incident: str
    symptom: str = ""
    hypotheses: tuple[Hypothesis, ...] = ()
    entries: tuple[Entry, ...] = ()
    blind_spots: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    verdict: str = ""
    confidence: str = ""
    deployment: dict[str, Any] = field(default_factory=dict)  # version, command, config, flags (flag -> what changed)

    def suspect(self, code: str, title: str, prior: float) -> Ledger:
        """Adds a hypothesis (or replaces the one with this code)."""
        others = tuple(h for h in self.hypotheses if h.code != code)
        return replace(self, hypotheses=(*others, Hypothesis(code, title, prior)))

    def record(
        self,
        run: str,
        test: str,
        result: str,
        *,
        supports: Iterable[str] = (),
        exonerates: Iterable[str] = (),
        strength: str = "moderate",
    ) -> Ledger:
        """Enters a test; the named hypotheses change their status. Raises ValueError for a code nobody suspects."""
        if strength not in STRENGTHS:
            raise ValueError(f"strength is one of {', '.join(STRENGTHS)}, not {strength!r}")
        backed, cleared = tuple(supports), tuple(exonerates)
        known = {h.code for h in self.hypotheses}
        unknown = [code for code in (*backed, *cleared) if code not in known]
        if unknown:
            raise ValueError(f"{unknown[0]} is not among the hypotheses; suspect it first")
        changed = []
        for h in self.hypotheses:
            if h.code in cleared:
                h = replace(h, status="exonerated", strength=_stronger(strength, h, "exonerated"))
            elif h.code in supports and h.status != "exonerated":  # an exoneration outweighs support
                h = replace(h, status="supported", strength=_stronger(strength, h, "supported"))
            changed.append(h)
        entry = Entry(run, test, result, backed, cleared, strength)
        return replace(self, hypotheses=tuple(changed), entries=(*self.entries, entry))

    def conclude(self, diagnosis: Any, *, run: str = "") -> Ledger:
        """Takes the result of `diagnose` over: posteriors, verdict, confidence, blind spots, next steps."""
        ledger = self
        for ranked in diagnosis.ranked:
            old = next((h for h in ledger.hypotheses if h.code == ranked.code), None)
            is_cause = ranked.code in diagnosis.causes
            if old is None and (is_cause or ranked.posterior >= 0.05) and ranked.code != "healthy":
                ledger = ledger.suspect(ranked.code, ranked.title, round(1 / 26, 3))
        hypotheses = []
        share = {r.code: r.posterior for r in diagnosis.ranked}
        for h in ledger.hypotheses:
            status, strength = h.status, h.strength
            if h.code in diagnosis.causes and status != "exonerated":
                status, strength = "supported", diagnosis.confidence
            hypotheses.append(replace(h, posterior=share.get(h.code), status=status, strength=strength))
        named = tuple(code for code in diagnosis.causes if any(h.code == code for h in ledger.hypotheses))
        first = str(diagnosis).split("\n", 1)[0]
        entry = Entry(run or "all runs", "diagnosis", first, named, (), diagnosis.confidence)
        return replace(
            ledger,
            hypotheses=tuple(hypotheses),
            entries=(*ledger.entries, entry),
            verdict=first,
            confidence=diagnosis.confidence,
            blind_spots=tuple(dict.fromkeys([*ledger.blind_spots, *diagnosis.missing])),
            next_steps=tuple(str(test) for test in diagnosis.next_tests[:3]),
        )

    def table(self) -> pd.DataFrame:
        """Hypotheses: code, title, prior, posterior, status, strength, and the runs that speak to them."""
        rows = [{**asdict(h), "runs": self._runs(h.code)} for h in self.hypotheses]
        return pd.DataFrame(rows, columns=["code", "title", "prior", "posterior", "status", "strength", "runs"])

    def exonerated(self) -> pd.DataFrame:
        """What is exonerated, by which run and which result."""
        rows = [
            {"code": code, "run": e.run, "test": e.test, "result": e.result, "strength": e.strength}
            for e in self.entries
            for code in e.exonerates
        ]
        return pd.DataFrame(rows, columns=["code", "run", "test", "result", "strength"])

    def save(self, path: str | Path) -> None:
        """Writes ledger.json (UTF-8, sorted keys, no time stamps: the same ledger gives the same bytes)."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1, sort_keys=True)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """Reads ledger.json; raises ValueError when it is not one."""
        path = Path(path)
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            hypotheses = tuple(Hypothesis(**h) for h in data.pop("hypotheses", ()))
            entries = tuple(Entry(**_tuples(e)) for e in data.pop("entries", ()))
            return cls(hypotheses=hypotheses, entries=entries, **_tuples(data))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path.name} is not a ledger: {str(error)[:160]}") from None

    def issue_text(self) -> str:
        """A report for maintainers in Markdown; addresses and keys are replaced, fences in quoted text are defused."""
        d = self.deployment
        parts = [
            f"# {self.verdict or self.symptom or self.incident}",
            "",
            f"**Symptom.** {self.symptom or 'not recorded'}",
            "",
        ]
        parts += ["**Version.** " + str(d.get("version") or "not recorded"), ""]
        parts += ["**Exact command.**", "", *_fenced(d.get("command") or "not recorded"), ""]
        parts += [
            "**Effective configuration.**",
            "",
            *_rows(("setting", "value"), dict(d.get("config") or {}).items()),
            "",
        ]
        parts += ["**One flag at a time.**", "", *_rows(("change", "result"), dict(d.get("flags") or {}).items()), ""]
        parts += ["**What was measured.**", ""]
        parts += [f"- {e.run}: {e.test}: {e.result}" for e in self.entries] or ["- nothing yet"]
        parts += ["", "**Ruled out.**", ""]
        parts += [f"- {r.code} by {r.run}: {r.result}" for r in self.exonerated().itertuples()] or ["- nothing yet"]
        parts += ["", "**Not measured.**", "", *([f"- {spot}" for spot in self.blind_spots] or ["- nothing known"])]
        parts += ["", "**Script.**", "", *_fenced(self.reproduction(), "python"), ""]
        return _clean("\n".join(parts))

    def reproduction(self, *, lengths: Iterable[int] = (512, 1024, 2048, 3072, 4096, 8192), depth: float = 0.5) -> str:
        """A short script that needs only Python: asks for one fact at each length and prints what came back."""
        ladder = ", ".join(str(int(n)) for n in lengths)
        return _SCRIPT.replace("@LENGTHS@", ladder).replace("@DEPTH@", repr(float(depth)))

    def _runs(self, code: str) -> str:
        return ", ".join(dict.fromkeys(e.run for e in self.entries if code in (*e.supports, *e.exonerates)))

    def __str__(self) -> str:
        lines = [f"{self.incident}: {self.verdict or 'no verdict yet'}"]
        for h in self.hypotheses:
            share = "" if h.posterior is None else f", {100 * h.posterior:.0f} %"
            lines.append(f"  {h.code} {h.title}: {h.status} ({h.strength}{share})")
        if self.next_steps:
            lines.append(f"Next: {self.next_steps[0]}")
        return "\n".join(lines)

    __repr__ = __str__  # what a plain notebook output shows

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th scope='col'>{name}</th>" for name in ("cause", "status", "strength", "prior", "posterior", "runs")
        )
        body = ""
        for h in self.hypotheses:
            posterior = "" if h.posterior is None else f"{100 * h.posterior:.0f} %"
            cells = (
                f"{h.code} {h.title}",
                h.status,
                h.strength,
                f"{100 * h.prior:.0f} %",
                posterior,
                self._runs(h.code),
            )
            body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        spots = "".join(f"<li>{escape(spot)}</li>" for spot in self.blind_spots)
        return (
            f"<p><strong>{escape(self.verdict or 'No verdict yet')}</strong></p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>" + (f"<p>Not measured:</p><ul>{spots}</ul>" if spots else "")
        )


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def _stronger(new: str, h: Hypothesis, status: str) -> str:
    return max(new, h.strength, key=STRENGTHS.index) if h.status == status else new


def _fenced(text: Any, language: str = "") -> list[str]:
    lines = [str(line) for line in (text if isinstance(text, (list, tuple)) else [text])]
    return [f"```{language}", "\n".join(lines).replace("```", "'''"), "```"]


def _rows(names: tuple[str, str], items: Iterable[tuple[Any, Any]]) -> list[str]:
    rows = [f"| {_cell(a)} | {_cell(b)} |" for a, b in items]
    return [f"| {names[0]} | {names[1]} |", "| --- | --- |", *(rows or ["| not recorded | |"])]


def _cell(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (Mapping, list, tuple)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")[:300]


def _clean(text: str) -> str:
    return _SECRET.sub(lambda m: "http://HOST" if m.group().startswith("http") else "[removed]", text)


_SCRIPT = '''"""One fact at each length: is it found? Usage: python repro.py URL MODEL  (key: variable API_KEY)"""
import json, os, random, sys, urllib.request

if len(sys.argv) != 3:
    sys.exit(__doc__)
url, model = sys.argv[1].rstrip("/").removesuffix("/v1"), sys.argv[2]
for words in (@LENGTHS@):
    draw = random.Random(words)
    value = str(draw.randrange(10000, 99999))
    lines = [f"Item {i}: shelf {draw.randrange(999)}, count {draw.randrange(99)}." for i in range(words // 14)]
    lines.insert(int(@DEPTH@ * len(lines)), f"The access code is {value}.")
    question = " ".join(lines) + " What is the access code? Answer with the number only."
    body = {"model": model, "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        reply = json.load(urllib.request.urlopen(request, timeout=600))
    except (OSError, ValueError) as error:
        sys.exit(f"no answer at about {words} tokens: {error}")
    answer = reply["choices"][0]["message"]["content"] or ""
    print(reply["usage"]["prompt_tokens"], "found" if value in answer else f"lost: {answer[:60]!r}", flush=True)
'''
