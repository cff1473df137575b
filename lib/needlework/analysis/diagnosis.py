"""From a table of trials to a ranked list of causes, in words, with what speaks against each and what to test next.

The score of a class is a likelihood: for each feature that the table could show, how often the class
brings it.
A second cause is looked for in what the first leaves unexplained (second_cause.py).
A posterior is only as good as the list of classes; so the verdict also asks for enough trials and for two independent
lines of evidence before it calls anything shown, and it never says "proven" by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from needlework.analysis.features import Feature, extract
from needlework.analysis.intervals import sentence, wilson
from needlework.analysis.next_tests import NextTest, missing, next_tests
from needlework.analysis.odds import BACKGROUND, ELSEWHERE, Signature
from needlework.analysis.second_cause import BRINGS, clear_signs, rest_of
from needlework.analysis.signatures import BY_CODE, LOOKALIKES, SIGNATURES
from needlework.analysis.trials import hits, texts
from needlework.analysis.view import plain_cells

FEW_MISSES = 4  # fewer can lie on one side of anything by chance: weak, unless something else is decisive
FEW = 24  # below this many measured trials nothing is named with more than weak confidence
UNSEEN = 0.2  # prior of a class whose conditions nobody tried
STRONG, WEAK = 2.5, 0.7  # log likelihood ratios against the background: one line of evidence; worth mentioning
FALLS = ("edge", "position_ceiling", "far_from_end", "last_chunk_only")  # what recall follows: one of them, as a rule
# Features that say the same thing in other words count as one line of evidence.
LINES = {
    **dict.fromkeys(("edge", "sharp", "soft_fall", "past_budget", "far_lost", "worse_than_blind"), "length"),
    **dict.fromkeys(("edge_at_topk", "edge_at_other_k", "edge_at_chunk", "below_budget"), "constant"),
    **dict.fromkeys(("edge_at_window", "edge_at_limit", "edge_at_stash"), "constant"),
    **dict.fromkeys(("loss", "plain_loss", "rare_loss", "both_arms_lose"), ""),
}


@dataclass(frozen=True)
class Evidence:
    """One feature as it bears on one class: `weight` is the log likelihood ratio against the background."""

    feature: str
    text: str
    weight: float


@dataclass(frozen=True)
class Ranked:
    """A class with its share of the posterior and what speaks for and against it."""

    code: str
    title: str
    posterior: float
    score: float
    supporting: tuple[Evidence, ...]
    opposing: tuple[Evidence, ...]

    def __str__(self) -> str:
        return f"{self.code} {self.title} ({100 * self.posterior:.0f} %)"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """verdict: "healthy", "named", "two causes" or "not proven"; confidence: "weak", "moderate" or "strong"."""

    verdict: str
    confidence: str
    ranked: tuple[Ranked, ...]
    causes: tuple[str, ...]
    next_tests: tuple[NextTest, ...]
    missing: tuple[str, ...]
    features: dict[str, Feature]
    trials: int
    measured: int
    hits: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = sentence(self.hits, self.measured, what="answers right")
        unmeasured = self.trials - self.measured
        counts += f" ({unmeasured} of {self.trials} trials measured nothing)" if unmeasured else ""
        lines = [f"{self._headline()} Over all trials {counts}."]
        named = [r for r in self.ranked if r.code in self.causes] or list(
            self.ranked[: 1 if self.verdict == "healthy" else 2]
        )
        for ranked in named:
            if ranked.code == "healthy":
                continue
            lines.append(f"{ranked}")
            lines += [f"  for: {text}" for text in _texts(ranked.supporting)[:4]]
            lines += [f"  against: {text}" for text in _texts(ranked.opposing)[:3]]
        if self.missing:
            lines.append("Not measured, so not excluded: " + "; ".join(self.missing[:6]) + ".")
        if self.next_tests:
            lines.append(f"Next: {self.next_tests[0]}.")
        lines += [f"Note: {note}." for note in self.notes[:5]]
        return "\n".join(lines)

    __repr__ = __str__  # what a plain notebook output shows

    def table(self) -> pd.DataFrame:
        """The ranking: code, title, posterior, for, against."""
        rows = [
            {
                "code": r.code,
                "title": r.title,
                "posterior": r.posterior,
                "for": "; ".join(_texts(r.supporting)[:3]),
                "against": "; ".join(_texts(r.opposing)[:3]),
            }
            for r in self.ranked
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        body = "".join(f"<p>{escape(line)}</p>" for line in str(self).split("\n"))
        rows = "".join(
            f"<tr><td>{escape(r.code)}</td><td>{escape(r.title)}</td><td>{100 * r.posterior:.0f} %</td></tr>"
            for r in self.ranked[:5]
        )
        head = "<tr><th scope='col'>class</th><th scope='col'>cause</th><th scope='col'>share</th></tr>"
        return f"{body}<table><thead>{head}</thead><tbody>{rows}</tbody></table>"

    def _headline(self) -> str:
        if self.verdict == "healthy":
            return "Healthy as far as this table reaches."
        if self.verdict == "two causes":
            return f"Two causes, {' and '.join(self.causes)} ({self.confidence} evidence)."
        if self.verdict == "named":
            kind = "Not corruption but a lookalike" if self.causes[0] in LOOKALIKES else "Most likely"
            return f"{kind}: {self.causes[0]}, {BY_CODE[self.causes[0]].title} ({self.confidence} evidence)."
        return "Not proven."


def diagnose(trials: pd.DataFrame, evidence: Any = None) -> Diagnosis:
    """Ranks the fault classes F01–F20, the lookalikes N1–N5 and "healthy" for a table of trials.

    `evidence` (optional): mapping or dataclass with `config`, `digests`, `pages`, `placement`, `logs`, `flags`,
    `selected` (`view.settings` says what each is). Any subset of the trial columns will do; what the table can not show
    is listed in `.missing`, never guessed. Raises ValueError only when `trials` is not a table or the evidence is
    malformed.
    """
    if not isinstance(trials, pd.DataFrame):
        raise ValueError("diagnose takes a table of trials (a DataFrame); read one with load_trials")
    trials = plain_cells(trials)
    features = extract(trials, evidence)
    seen = {name: f for name, f in features.items() if f.presence is not None}
    hit = hits(trials)[_asked(trials)]
    measured = int(hit.notna().sum())
    single = {s.code: _score(s, seen) + _prior(s, seen) for s in SIGNATURES}
    share = _normalised(single)
    order = sorted(SIGNATURES, key=lambda s: -single[s.code])
    ranked = tuple(_ranked(s, share[s.code], single[s.code], seen) for s in order)
    # a budget that cuts every answer leaves nothing measured, and is seen in just that
    told = len(hit) if ranked[0].code == "N3" else measured
    missed = measured - int(hit.sum())
    verdict, causes, confidence = _verdict(ranked, seen, told, missed)
    if (second := _second(trials, evidence, ranked[0], seen)) is not None and measured >= 2 * FEW:
        verdict, causes = "two causes", (ranked[0].code, second.code)
        ranked = (ranked[0], second, *[r for r in ranked[1:] if r.code != second.code])
    return Diagnosis(
        verdict,
        confidence,
        ranked,
        causes,
        tuple(next_tests(ranked, seen, _rows_by_probe(trials))),
        tuple(missing(seen)),
        features,
        len(hit),
        measured,
        int(hit.sum()) if measured else 0,
        tuple(_notes(trials, len(hit), measured)),
    )


def _asked(trials: pd.DataFrame) -> pd.Series:
    """Rows that ask for recall; controls (a fact that is not given, a fact in the question) are judged apart."""
    control = texts(trials, "control")
    return (control == "") & (texts(trials, "probe") != "control")


def _rows_by_probe(trials: pd.DataFrame) -> dict[str, int]:
    return {str(name): int(n) for name, n in texts(trials, "probe").value_counts().items()}


def _texts(evidence: tuple[Evidence, ...]) -> list[str]:
    return list(dict.fromkeys(e.text for e in evidence))


def _prior(s: Signature, seen: dict[str, Feature]) -> float:
    blind = bool(s.needs) and not any(name in seen for name in s.needs)
    return math.log(s.prior * (UNSEEN if blind else 1.0))


def _likelihood(odds: float, presence: float) -> float:
    return math.log(odds * presence + (1 - odds) * (1 - presence))


def _by_face(signature: Signature, seen: dict[str, Feature]) -> list[tuple[float, Signature]]:
    """Log of share times likelihood of each face of a class, the likeliest first."""
    # gradual is what is not sharp: counted once
    once = {name: f for name, f in seen.items() if name != "soft_fall" or "sharp" not in seen}
    scored = [
        (math.log(share) + sum(_likelihood(face.odds(name), f.presence or 0.0) for name, f in once.items()), face)
        for share, face in signature.faces
    ]
    return sorted(scored, key=lambda item: -item[0])


def _score(signature: Signature, seen: dict[str, Feature]) -> float:
    scores = [score for score, _ in _by_face(signature, seen)]
    return scores[0] + math.log(sum(math.exp(score - scores[0]) for score in scores))


def _face(signature: Signature, seen: dict[str, Feature]) -> Signature:
    """The face that the class most likely shows here."""
    return _by_face(signature, seen)[0][1]


def _background(name: str, presence: float) -> float:
    return _likelihood(BACKGROUND.get(name, ELSEWHERE), presence)


def _ranked(signature: Signature, posterior: float, score: float, seen: dict[str, Feature]) -> Ranked:
    s = _face(signature, seen)
    items = [
        Evidence(name, f.text, _likelihood(s.odds(name), f.presence or 0.0) - _background(name, f.presence or 0.0))
        for name, f in seen.items()
        if name in s.expects
    ]
    supporting = sorted((e for e in items if e.weight > WEAK / 2), key=lambda e: -e.weight)
    # a class that may bring one fall or another is not spoken against by the other one's absence
    placed = any((seen[n].presence or 0.0) >= 0.5 and s.expects.get(n, 0.0) >= BRINGS for n in FALLS if n in seen)
    excused = {n for n in (*FALLS, "sharp", "soft_fall") if placed and n in seen and (seen[n].presence or 0.0) < 0.5}
    opposing = sorted((e for e in items if e.weight < -WEAK / 2 and e.feature not in excused), key=lambda e: e.weight)
    return Ranked(s.code, s.title, posterior, score, tuple(supporting), tuple(opposing))


def _normalised(score: dict[str, float]) -> dict[str, float]:
    top = max(score.values())
    weight = {code: math.exp(value - top) for code, value in score.items()}
    total = sum(weight.values())
    return {code: value / total for code, value in weight.items()}


def _second(trials: pd.DataFrame, evidence: Any, first: Ranked, seen: dict[str, Feature]) -> Ranked | None:
    """The cause of what `first` leaves unexplained, if that is clear, with the evidence of the rest of the table."""
    face = _face(BY_CODE[first.code], seen)
    if first.code == "healthy" or not (rest := rest_of(trials, evidence, face, seen)):
        return None
    signs = clear_signs(rest, BY_CODE[first.code])
    left = {name: f for name, f in rest.features.items() if f.presence is not None}
    score = {s.code: _score(s, left) + _prior(s, left) for s in SIGNATURES if s.code != first.code}
    best = BY_CODE[max(score, key=lambda code: score[code])]
    brought = _face(best, left).expects
    if best.code == "healthy" or not any(brought.get(name, 0.0) >= BRINGS for name in signs):
        return None
    share = _normalised(score)
    return _ranked(best, min(first.posterior, share[best.code]), score[best.code], left)


def _verdict(
    ranked: tuple[Ranked, ...], seen: dict[str, Feature], measured: int, missed: int
) -> tuple[str, tuple[str, ...], str]:
    top = ranked[0]
    alarms = [n for n, f in seen.items() if (f.presence or 0) >= 0.5 and not _harmless(n)]
    if measured < 6 or not seen:
        return "not proven", (), "weak"
    if top.code == "healthy":
        loss = seen.get("loss")
        calm = (loss is None or (loss.presence or 0) < 0.5) and not alarms
        if measured >= FEW and calm:
            clear = measured >= 100 and wilson(measured - missed, measured)[0] >= 0.95
            return "healthy", (), "strong" if clear else "moderate"
        return "not proven", (), "weak"
    lines = {LINES.get(e.feature, e.feature) for e in top.supporting if e.weight >= WEAK} - {""}
    if measured < FEW or top.posterior < 0.5 or not lines:
        return "not proven", (), "weak"
    decided = any(e.weight >= STRONG for e in top.supporting)
    if top.posterior >= 0.9 and measured >= 60 and len(lines) >= 2 and decided:
        return "named", (top.code,), "strong"
    enough = decided or missed >= FEW_MISSES
    return "named", (top.code,), "moderate" if top.posterior >= 0.7 and enough else "weak"


# Shapes and kinds of loss: no alarm on their own.
_HARMLESS = frozenset(
    [
        "loss",
        "plain_loss",
        "rare_loss",
        "both_arms_lose",
        "sharp",
        "soft_fall",
        "refusals",
        "empty",
        "near_misses",
        "wrong_needle",
        "many_faces",
        "buffers_equal",
        "pages_right",
        "flips_loaded",
        "repeats_agree",
        "cold_loss_only",
    ]
)


def _harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith("edge_at")


def _notes(trials: pd.DataFrame, asked: int, measured: int) -> list[str]:
    notes = [str(note)[:200] for note in trials.attrs.get("notes", [])]
    if measured < FEW:
        notes.insert(0, f"{measured} measured trials are too few to name a cause")
    if asked - measured > 0.3 * max(asked, 1):
        notes.insert(
            0,
            f"{asked - measured} of {asked} trials measured nothing (cut, reasoning only, transport)",
        )
    return notes
