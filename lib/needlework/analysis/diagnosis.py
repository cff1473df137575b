"""From a table of trials to a verdict of three layers: what is lost, which mechanisms lose so, what was foretold.

A name is given only where few classes lose by the law that holds, and "strong" only where that law has foretold fresh
prompts. What never reached the model has a law of its own, which leads where it concentrates.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis import inside, laws, predictions
from needlework.analysis.conditions import UNMEASURED, conditions
from needlework.analysis.intervals import sentence
from needlework.analysis.laws import Fit, Law
from needlework.analysis.mechanisms import MECHANISMS, named
from needlework.analysis.predictions import Judged

FEW = 24  # measured trials below which nothing is named, and predictions below which nothing is strong
MOST = 4  # classes that may share a verdict; more are no name
CLEAR, LIKELY = 0.9, 0.8
TOLD = 0.05  # a class below is not worth a word
ENOUGH = 8  # losses inside a law before it is more than weak evidence
SEVERAL, SHARE = 3, 0.1  # answers or failures that make a finding, and their share of what is asked
WHOLE = 0.05  # a loss rate that no "healthy" shows over all, and no strong one leaves open anywhere


@dataclass(frozen=True)
class Ranked:
    """A class with its share of the posterior and the laws through which it is likely."""

    code: str
    title: str
    posterior: float
    laws: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code} {self.title} ({100 * self.posterior:.0f} %)"


@dataclass(frozen=True)
class Excluded:
    """A condition: trials asked, measured and lost there, and the upper 95 % limit of its loss rate (1 if none)."""

    condition: str
    asked: int
    measured: int
    lost: int
    bound: float

    def __str__(self) -> str:
        if not self.asked:
            return f"{self.condition}: not looked at"
        if not self.measured:
            return f"{self.condition}: {self.asked} asked, none measured"
        return f"{self.condition}: {self.lost} of {self.measured} lost, at most {100 * self.bound:.0f} %"


@dataclass(frozen=True)
class NextTest:
    """A test to run, with what each class lets one expect of it."""

    title: str
    how: str
    outcomes: dict[str, str]

    def __str__(self) -> str:
        expected = "; ".join(f"{code}: {text}" for code, text in self.outcomes.items())
        return f"{self.title}: {self.how}" + (f". Expected: {expected}" if expected else "")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """verdict: "healthy", "named", "two causes" or "not proven"; confidence: "weak", "moderate" or "strong".

    causes holds all classes of a group that are not told apart; `groups` has one group for each cause. `laws` say what
    is lost, likeliest first, `failures` what never reached the model; `excluded` is what a healthy verdict rests on.
    """

    verdict: str
    confidence: str
    ranked: tuple[Ranked, ...]
    causes: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    laws: tuple[Law, ...]
    failures: Law | None
    excluded: tuple[Excluded, ...]
    predictions: Judged | None
    seen: tuple[str, ...]
    next_tests: tuple[NextTest, ...]
    trials: int
    measured: int
    hits: int
    words: str = ""  # of the server, about what it did not answer
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Conditions that nobody looked at."""
        return tuple(e.condition for e in self.excluded if not e.measured)

    def __str__(self) -> str:
        counts = sentence(self.hits, self.measured, what="answers right")
        unmeasured = self.trials - self.measured
        counts += f" ({unmeasured} of {self.trials} trials never reached the model)" if unmeasured else ""
        lines = [f"{self._headline()} Over all trials {counts}."]
        if self.failures is not None:
            lines.append(f"Not answered: {self.failures.sentence.replace('found', 'answered')}. {self.words}".rstrip())
        if self.verdict != "healthy" and self.laws and self.hits < self.measured:
            lines += [f"Lost: {law.sentence} ({100 * law.share:.0f} %)" for law in self.laws[:3] if law.share > 0.05]
        for group in self.groups or (
            [r.code for r in self.ranked[:4] if r.code in MECHANISMS and r.posterior >= TOLD],
        ):
            if group and self.verdict != "healthy":
                share = {r.code: r.posterior for r in self.ranked}
                of = ", ".join(f"{code} {100 * share.get(code, 0):.0f} %" for code in group)
                alike = f"; {named(group)} are alike from here, {_deciding(group)} would tell" if len(group) > 1 else ""
                lines.append(f"Mechanism: {of}{alike}.")
        lines += [f"Inside: {text}." for text in self.seen]
        if self.predictions is not None:
            lines.append(f"Foretold: {self.predictions}")
        if self.verdict == "healthy":
            looked = sorted((e for e in self.excluded if e.measured), key=lambda e: -e.bound)
            if looked:
                lines.append(f"Still possible: a loss of up to {100 * looked[0].bound:.0f} % ({looked[0]}).")
        if self.missing:
            lines.append(f"Not looked at: {', '.join(self.missing)}.")
        lines += [f"Next: {test}." for test in self.next_tests[:1]]
        lines += [f"Note: {note}." for note in self.notes[:5]]
        return "\n".join(lines)

    __repr__ = __str__  # what a plain notebook output shows

    def table(self) -> pd.DataFrame:
        """The ranking: code, title, posterior, laws."""
        rows = [
            {"code": r.code, "title": r.title, "posterior": r.posterior, "laws": "; ".join(r.laws)} for r in self.ranked
        ]
        return pd.DataFrame(rows)

    def bounds(self) -> pd.DataFrame:
        """What was looked at: condition, asked, measured, lost, upper 95 % bound of the loss rate."""
        return pd.DataFrame([vars(e) for e in self.excluded])

    def _repr_html_(self) -> str:
        body = "".join(f"<p>{escape(line)}</p>" for line in str(self).split("\n"))
        rows = "".join(
            f"<tr><td>{escape(r.code)}</td><td>{escape(r.title)}</td><td>{100 * r.posterior:.0f} %</td></tr>"
            for r in self.ranked[:5]
        )
        head = "<tr><th scope='col'>class</th><th scope='col'>cause</th><th scope='col'>share</th></tr>"
        looked = "".join(f"<li>{escape(str(e))}</li>" for e in self.excluded)
        return f"{body}<table><thead>{head}</thead><tbody>{rows}</tbody></table><ul>{looked}</ul>"

    def _headline(self) -> str:
        if self.verdict == "healthy":
            return f"Healthy as far as this table reaches ({self.confidence} evidence)."
        if self.verdict == "two causes":
            return f"Two causes, {' and '.join(named(g) for g in self.groups)} ({self.confidence} evidence)."
        if self.verdict == "named":
            kind = "Not corruption but a lookalike" if all(c.startswith("N") for c in self.causes) else "Most likely"
            title = f", {MECHANISMS[self.causes[0]].title}" if len(self.causes) == 1 else ""
            return f"{kind}: {named(self.causes)}{title} ({self.confidence} evidence)."
        if self.failures is not None:
            return f"Not proven: {self.failures.sentence.replace('found', 'answered')}."
        return "Not proven."


def diagnose(
    trials: pd.DataFrame, evidence: Any = None, *, predictions: Iterable[Mapping[str, Any]] | None = None
) -> Diagnosis:
    """What a table of trials says: the law of the loss, the classes F01–F20 and N1–N5 that lose so, what is excluded.

    evidence     mapping or dataclass with `config`, `digests`, `pages`, `placement`, `logs`, `flags`, `selected`
                 (`inside.settings` says what each is)
    predictions  records that a journal holds of what a law expected of prompts before they were sent
    Any subset of the trial columns will do; what the table cannot show is listed, never guessed. Raises ValueError when
    `trials` is not a table, or evidence or predictions are malformed.
    """
    if not isinstance(trials, pd.DataFrame):
        raise ValueError("diagnose takes a table of trials (a DataFrame); read one with load_trials")
    told = inside.settings(evidence)
    c = conditions(trials)
    seen = inside.observed(told) + inside.counted(trials, c)
    config = laws.sizes(told.get("config"))
    found = laws.fit(c, stated=config, inside=inside.likelihoods(seen))
    kept = _judged(predictions, trials)
    failed, words = _failures(c, config)
    excluded = _excluded(c, config)
    ranked = tuple(
        Ranked(
            code, MECHANISMS[code].title if code in MECHANISMS else _OTHERS[code], share, found.through.get(code, ())
        )
        for code, share in sorted(found.classes.items(), key=lambda item: -item[1])
    )
    measured = int((c["kind"] >= 0).sum())
    base = Diagnosis(
        "not proven", "weak", ranked, (), (), found.laws, failed, excluded, kept, tuple(one.text for one in seen), (),
        len(c), measured, measured - int(c["lost"].sum()), words, tuple(_notes(trials, c)),
    )  # fmt: skip
    judged = _verdict(base, found, c, any(one.alarm for one in seen))
    return replace(judged, next_tests=tuple(_next(judged, told)))


_OTHERS = {"healthy": "no loss beyond stray misses", "open": "none of the classes that are known"}


def _verdict(d: Diagnosis, found: Fit, c: pd.DataFrame, alarm: bool) -> Diagnosis:
    misjudged = int(c["misjudged"].sum())
    graded_lost = int(c["lost"].sum()) + misjudged
    if misjudged >= SEVERAL and misjudged >= 0.2 * graded_lost:
        note = f"{misjudged} answers graded wrong hold the value"
        d = replace(d, notes=(note, *d.notes), seen=(note, *d.seen))
        return replace(d, verdict="named", confidence="moderate" if misjudged >= 6 else "weak", causes=("N3",),
                       groups=(("N3",),), ranked=_first(d.ranked, "N3"))  # fmt: skip
    if (refused := _swallowed(c)) >= SEVERAL:
        note = f"{refused} prompts are refused by one arm and answered with an empty success by another"
        d = replace(d, notes=(note, *d.notes), seen=(note, *d.seen))
        return replace(d, verdict="named", confidence="moderate", causes=("F16",), groups=(("F16",),),
                       ranked=_first(d.ranked, "F16"))  # fmt: skip
    healthy, refuted = found.shares["healthy"], d.predictions is not None and d.predictions.passed is False
    unanswered = any(e.asked and not e.measured for e in d.excluded)
    if d.measured < 6 or refuted or d.failures is not None:
        return d
    if healthy >= LIKELY:
        if d.measured < FEW or alarm or unanswered or d.hits < (1 - WHOLE) * d.measured:
            return d
        foretold = _foretold(d.predictions)
        open_ = [e for e in d.excluded if e.bound > WHOLE]
        overall = d.excluded[0].bound if d.excluded else 1.0
        confidence = "strong" if foretold and not open_ else "moderate" if overall <= 2 * WHOLE else "weak"
        return replace(d, verdict="healthy", confidence=confidence)
    classes = {code: share / max(1 - found.classes["healthy"], 1e-9) for code, share in found.classes.items()}
    law = d.laws[0] if d.laws else None
    if d.measured < FEW or law is None or healthy > 1 - LIKELY or law.name in ("unexplained", "arms"):
        return d
    enough = law.share >= CLEAR and law.inside[0] >= ENOUGH
    wide, narrow = _group(classes, CLEAR), _group(classes, LIKELY)
    group = wide if enough and wide else narrow
    if group is None:
        return d
    mixed = len({code[0] for code in group}) > 1  # a fault or a lookalike: nobody is accused on that
    confidence = (
        "weak"
        if group is not wide or not enough or mixed
        else "strong"
        if alarm and _foretold(d.predictions)  # a law that came true is not yet a mechanism that was seen
        else "moderate"
    )
    if " + " in law.name and (second := _group(found.second, LIKELY)) and not set(group) & set(second):
        return replace(d, verdict="two causes", causes=(*group, *second), groups=(group, second), confidence=confidence)
    return replace(d, verdict="named", causes=group, groups=(group,), confidence=confidence)


def _group(classes: Mapping[str, float], share: float) -> tuple[str, ...] | None:
    """The fewest classes that hold `share`, likeliest first; None where they are too many or hold an unknown one."""
    order = sorted((code for code in classes if code != "healthy"), key=lambda code: -classes[code])
    held = np.cumsum([classes[code] for code in order])
    group = tuple(order[: int(np.searchsorted(held, share)) + 1])
    return group if group and len(group) <= MOST and "open" not in group else None


def _foretold(judged: Judged | None) -> bool:
    return judged is not None and judged.passed is True and judged.answered >= FEW


def _first(ranked: tuple[Ranked, ...], code: str) -> tuple[Ranked, ...]:
    """The ranking with a class first whose sign is decisive by itself."""
    left = [replace(r, posterior=r.posterior * 0.05) for r in ranked if r.code != code]
    total = sum(r.posterior for r in left)
    return (Ranked(code, MECHANISMS[code].title, 1 - total), *left)


def _judged(records: Iterable[Mapping[str, Any]] | None, trials: pd.DataFrame) -> Judged | None:
    made = predictions.last(records or ())
    return predictions.judge(made, trials) if made is not None and "trial_id" in trials else None


def _failures(c: pd.DataFrame, config: Mapping[str, Any]) -> tuple[Law | None, str]:
    """The law of what never reached the model, where there is one, and the server's commonest words."""
    gone = (c["kind"] == UNMEASURED).to_numpy()
    if not gone.any():
        return None, ""
    as_lost = c.assign(lost=gone, kind=np.where(gone, 1, 0).astype(np.int8))
    fit = laws.fit(as_lost, stated=config)
    said = c["error"][gone & (c["error"] != "")]
    words = f"“{_plain(said.value_counts().index[0])}”" if len(said) else ""
    found = gone.sum() >= SEVERAL and (gone.mean() > SHARE or fit.shares["healthy"] < 1 - LIKELY)
    return (fit.laws[0] if found and fit.laws else None), words


def _plain(text: str) -> str:
    """Words of a server: one line, without control characters, bounded."""
    return re.sub(r"[^\S ]+|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+", " ", text).strip()[
        :160
    ]


def _swallowed(c: pd.DataFrame) -> int:
    """Prompts that one arm refuses with an error while another answers them with nothing and calls that a success."""
    status = c["failure"].astype(str)
    refused = (c["kind"] == UNMEASURED) & status.str.match(r"http_[45]|server_error|refused")
    refused |= (c["kind"] == UNMEASURED) & (status == "") & c["error"].str.contains(r"\b[45]\d\d\b")
    nothing = status.isin(["empty_body", "no_choice", "no_finish"]) | c["error"].str.contains(
        r"(?:body|stream) is empty|no choices|without a finish reason"
    )
    empty = ((c["kind"] == 4) | ((c["kind"] == UNMEASURED) & nothing & ~refused)).to_numpy()
    by = c[refused].groupby("prompt")["arm"].first()
    other = c[empty & c["prompt"].isin(by.index).to_numpy()]
    return int(other.loc[other["arm"].to_numpy() != other["prompt"].map(by).to_numpy(), "prompt"].nunique())


def _excluded(c: pd.DataFrame, config: Mapping[str, Any]) -> tuple[Excluded, ...]:
    """All conditions that an endpoint may offer: how much was asked, and which loss rate is not excluded there."""
    from scipy.stats import beta

    every = np.ones(len(c), bool)
    groups: list[tuple[str, np.ndarray]] = [("all requests", every)]
    arms = list(dict.fromkeys(c["arm"]))
    groups += [(f"on {a or 'an unnamed arm'}", (c["arm"] == a).to_numpy()) for a in arms if 1 < len(arms) <= 30]
    replicas = [r for r in dict.fromkeys(c["replica"]) if r]
    groups += [(f"by {r}", (c["replica"] == r).to_numpy()) for r in replicas]
    edges = [0.0, 2048.0, 8192.0, 32768.0, 131072.0, np.inf]
    window = (config.get("context_limit") or [0.0])[0]
    longest = c["length"].max() if len(c) else 0.0
    for low, high in itertools.pairwise(edges):
        if low < max(longest, window):
            to = f"{low:,.0f} to {high:,.0f} tokens" if high < np.inf else f"above {low:,.0f} tokens"
            groups.append((f"prompts of {to}", ((c["length"] > low) & (c["length"] <= high)).to_numpy()))
    groups += [
        ("values in the first third", (c["depth"] < 1 / 3).to_numpy()),
        ("values in the middle third", ((c["depth"] >= 1 / 3) & (c["depth"] <= 2 / 3)).to_numpy()),
        ("values in the last third", (c["depth"] > 2 / 3).to_numpy()),
        ("with a cached prefix", c["warm"].to_numpy()),
        ("two to four in flight", ((c["load"] > 1) & (c["load"] <= 4)).to_numpy()),
        ("more than four in flight", (c["load"] > 4).to_numpy()),
        ("follow-up turns", (c["turn"] > 1).to_numpy()),
        ("after a dropped request", (c["since_abort"] <= 2).to_numpy()),
    ]
    out = []
    for name, rows in groups:
        measured, lost = rows & (c["kind"] >= 0).to_numpy(), rows & c["lost"].to_numpy()
        n, x = int(measured.sum()), int(lost.sum())
        bound = 1.0 if n == x else float(beta.ppf(0.95, x + 1, n - x))
        out.append(Excluded(name, int(rows.sum()), n, x, bound))
    return tuple(out)


def _deciding(group: Iterable[str]) -> str:
    """What tells these classes apart: the look inside that differs, else the first one's own test."""
    group = list(group)
    words = {"digests": "digests of the buffers on both sides", "pages": "a page dump", "heals": "one switch at a time",
             "placement": "the same content in other pages", "selected": "the number of selected entries",
             "logs": "the logs"}  # fmt: skip
    for part, text in words.items():
        if len({str(MECHANISMS[code].inside.get(part)) for code in group}) > 1:
            return text
    return "repeated prompts" if len({MECHANISMS[code].rate for code in group}) > 1 else MECHANISMS[group[0]].test


def _next(d: Diagnosis, told: Mapping[str, Any]) -> list[NextTest]:
    """The tests that tell most: of what is not looked at, between what is alike, and the first class's own."""
    out = []
    codes = [r.code for r in d.ranked if r.code in MECHANISMS][:4]
    if d.failures is not None:
        out.append(NextTest("the server's words", "read its log at the first refused request, and compare the length "
                            "of that prompt with the window it was started with", {}))  # fmt: skip
    if d.verdict == "healthy" or d.hits == d.measured:
        untried = [e.condition for e in d.excluded if not e.measured]
        widest = max((e for e in d.excluded), key=lambda e: e.bound, default=None)
        where = untried[0] if untried else widest.condition if widest else "all conditions"
        out.append(NextTest("more of what is not excluded", f"ask {where}", {}))
        return out
    group = list(d.groups[0]) if d.groups else codes
    if "N1" in group:
        out.append(NextTest("the window stated by the servers", "compare the edge with the window that each server of "
                            "the chain was started with", {"N1": "they agree", "any other class": "not"}))  # fmt: skip
    inside_done = {part for part in ("digests", "pages", "placement", "selected") if told.get(part)}
    if len(group) > 1 and (how := _deciding(group)):
        outcomes = {code: _expects(code) for code in group[:4]}
        out.append(NextTest("between what is alike", how, outcomes))
    if inside_done and d.causes:
        out.append(NextTest(f"the cure of {group[0]}", "mend what the inside shows, then send the same prompts again",
                            {group[0]: "nothing lost", "any other class": "as before"}))  # fmt: skip
    out += [
        NextTest(
            f"the decisive test of {code}", MECHANISMS[code].test, {code: "as it predicts", "any other class": "not"}
        )
        for code in group[:3]
    ]
    return out


def _expects(code: str) -> str:
    parts = MECHANISMS[code].inside
    words = [f"{part} {' or '.join(v)}" if v is not True else f"{part} decides" for part, v in parts.items()]
    return ", ".join(words[:2])


def _notes(trials: pd.DataFrame, c: pd.DataFrame) -> list[str]:
    notes = [str(note)[:200] for note in trials.attrs.get("notes", [])]
    measured = int((c["kind"] >= 0).sum())
    if measured < FEW:
        notes.insert(0, f"{measured} measured trials are too few to name a cause")
    if 0 < (m := int(c["misjudged"].sum())) < SEVERAL:
        notes.append(f"{m} answers graded wrong hold the value")
    if left := c.attrs["repeated"]:
        notes.append(f"{left} rows repeat another word for word and count once")
    wanted = trials["wanted_cache"] if "wanted_cache" in trials else pd.Series(dtype=object)
    cached = pd.to_numeric(trials["cached_tokens"], errors="coerce") if "cached_tokens" in trials else None
    if (wanted == "warm").sum() >= 6 and cached is not None and not (cached > 0).any():
        notes.append("no warm trial is proved by cached tokens (N4 where a hit was to be tested): the prefix cache "
                     "is off or not told")  # fmt: skip
    return notes
