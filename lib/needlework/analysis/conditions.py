"""What laws of loss read off a table of trials: one row a request, in the order of sending."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from needlework.analysis import trials as table

# kinds of answers: only the first is a hit
KINDS = ("right", "near", "other", "foreign", "empty", "cut", "refusal", "garbled", "unknown")
_KIND = {
    "exact": 0, "near": 1, "other_needle": 2, "distractor": 2, "empty": 4, "cut": 5, "reasoning_only": 5, "refusal": 6,
    "garbage": 7, "miss": 8,
}  # fmt: skip
UNMEASURED = -1
CUT = 3  # prompts that end before their value does: they are cut
_VOLATILE = ("trial_id", "run", "time", "ordinal", "ttft_s", "latency_s", "source", "probe")
_WORDS = re.compile(r"[\w-]+")
_LOOP = re.compile(r"(.{1,40}?)\1{5,}", re.DOTALL)


def conditions(trials: pd.DataFrame) -> pd.DataFrame:
    """One row for each request that bears on recall, in the order of sending; float64 unless said.

    length, place, left (tokens from the value to the end), depth (0..1), cached (tokens), suffix (tokens beyond them),
    load (requests in flight), turn, order (0, 1, …; null where no time is told), since_abort (requests since a dropped
    one, 0 beside it), page (physical, where told), sent_low and sent_high (tokens sent; an interval where not counted
    them), evaluated; arm and replica (text); prompt (int: equal for equal prompts); warm, cut (evaluated shorter than
    sent), misjudged (graded wrong, holds the value), thought (the value stands in the reasoning alone) and lost
    (bool); made (completion tokens); finish (reason, text); kind (int8, index of KINDS, -1: never reached the
    model); error and failure (text, of those). `attrs["rows"]`: the label in `trials` of each. Controls, calibration,
    dropped requests and rows that say the same twice are left out. Raises ValueError for what is no DataFrame.
    """
    if not isinstance(trials, pd.DataFrame):
        raise ValueError("a table of trials is a DataFrame; read one with load_trials")
    t = trials.reset_index(drop=True)
    probe, control, label = (table.texts(t, c) for c in ("probe", "control", "label"))
    aside = (control != "") | probe.isin(["control", "calibration", "coherence"])
    outcome = table.texts(t, "outcome")
    if (outcome == "").all() and "score" in t:
        hit = table.hits(t)
        outcome = hit.map({1.0: "exact", 0.0: "miss"}).fillna("").astype(str)
    order = pd.Series(np.arange(len(t)), index=t.index)
    if "time" in t and t["time"].notna().any():
        order = t["time"].map(str).rank(method="first")
    elif "ordinal" in t and t["ordinal"].notna().all() and t["ordinal"].is_unique:
        order = t["ordinal"].rank(method="first")
    timed = not (order.to_numpy() == np.arange(len(t))).all() or "time" in t
    aborted = table.texts(t, "aborted")
    dropped = (aborted.str.startswith("by") | label.str.startswith("victim")) & ~aside
    aside |= (aborted != "") & (table.texts(t, "answer") == "") & ~dropped  # dropped too late: its answer was not read
    arm = table.texts(t, "arm")
    since = _since(order, dropped, arm, label)
    repeated = _repeated(t) & ~aside
    keep = ~aside & ~dropped & (outcome != "") & ~repeated
    t, order, since = t[keep], order[keep], since[keep]
    sequence = np.argsort(order.to_numpy(), kind="stable")
    t = t.iloc[sequence]

    def number(name: str) -> np.ndarray:
        values = pd.to_numeric(table.column(t, name), errors="coerce").to_numpy(float)
        return np.where(np.isfinite(values), values, np.nan)

    kept = outcome[keep].iloc[sequence].to_numpy()
    counted, evaluated, wished = number("counted_tokens"), number("prompt_tokens"), number("target_tokens")
    low, high = (np.where(np.isfinite(x), x, counted) for x in (number("sent_low"), number("sent_high")))
    cached, cache, place = number("cached_tokens"), table.texts(t, "cache").to_numpy(), number("needle_token")
    beyond = place > evaluated + np.maximum(np.nan_to_num(cached), np.maximum(16, 0.02 * evaluated))
    if beyond.sum() >= CUT and np.isfinite(wished).any():  # then targets tell what was sent
        sent = wished * np.nanquantile(np.where(beyond, np.nan, evaluated / wished), 0.75)
        low = np.where(np.isfinite(low), low, np.where(beyond, np.maximum(place, 0.8 * sent), 0.8 * sent))
        high = np.where(np.isfinite(high), high, np.maximum(low, 1.2 * sent))
    cut = np.isfinite(low) & np.isfinite(evaluated) & (evaluated < low - np.maximum(16, 0.02 * low))
    length = np.where(cut, (low + high) / 2, evaluated)  # a count far below what was sent is no place on the curve
    for other in (counted, (low + high) / 2, wished):
        length = np.where(np.isfinite(length), length, other)
    length = np.where(length > 0, length, np.nan)
    place = np.where(np.isfinite(place), place, number("depth") * length)
    warm = (cached > 0) & (cache != "cold") | ((cache == "warm") & ~np.isfinite(cached))
    cached = np.where(warm, np.where(np.isfinite(cached), cached, length), 0.0)
    answer, expected = table.texts(t, "answer").to_numpy(), table.texts(t, "expected").to_numpy()
    kind = np.array([_KIND.get(one, UNMEASURED) for one in kept], np.int8)
    misjudged = np.zeros(len(t), bool)
    for i in np.flatnonzero(kind > 0):
        misjudged[i] = bool(expected[i]) and kind[i] != 5 and _holds(answer[i], expected[i])
    kind[misjudged] = 0
    kind[(kind == 5) & (answer == "") & (kept != "reasoning_only")] = 4  # nothing, up to the limit
    kind[(kind == 5) & np.array([bool(_LOOP.search(a[:400])) for a in answer], bool)] = 7  # nonsense up to the limit
    source = table.texts(t, "answered_from").to_numpy()
    kind[(kind > 0) & np.char.startswith(source.astype(str), "trial:")] = 3
    if not (source != "").any():
        kind[_foreign(kind, answer, expected)] = 3
    out = pd.DataFrame(
        {
            "length": length,
            "place": np.clip(place, 0, length),
            "left": length - np.clip(place, 0, length),
            "depth": np.clip(place, 0, length) / length,
            "cached": cached,
            "suffix": length - cached,
            "load": np.where(np.isfinite(load := number("concurrency")), load, 1.0),
            "turn": np.where(np.isfinite(turn := number("turn")), turn, 1.0),
            "order": np.arange(len(t), dtype=float) if timed else np.full(len(t), np.nan),
            "since_abort": since.iloc[sequence].to_numpy(float),
            "page": number("page"),
            "sent_low": low,
            "sent_high": high,
            "evaluated": evaluated,
            "arm": table.texts(t, "arm").to_numpy(),
            "replica": _replica(t),
            "prompt": _prompts(t),
            "warm": warm,
            "cut": cut,
            "made": number("completion_tokens"),
            "finish": table.texts(t, "finish_reason").to_numpy(),
            "thought": (kept == "reasoning_only")
            & table.texts(t, "in_reasoning").isin(["True", "1", "1.0"]).to_numpy(),
            "misjudged": misjudged,
            "lost": kind > 0,
            "kind": kind,
            "failure": table.texts(t, "failure").to_numpy(),
            "error": np.where(kind == UNMEASURED, table.texts(t, "error").str.slice(0, 400).to_numpy(), ""),
        }
    )
    out.attrs = {"rows": trials.index.to_numpy()[t.index], "repeated": int(repeated.sum())}
    return out


def _since(order: pd.Series, dropped: pd.Series, arm: pd.Series, label: pd.Series) -> pd.Series:
    """Requests since the last dropped one on the same arm; infinite where there was none before."""
    since = pd.Series(np.inf, index=order.index)
    for _, rows in order.groupby(arm.to_numpy(), sort=False):
        rows = rows.sort_values()
        gone = dropped[rows.index].to_numpy()
        place = np.arange(len(rows))
        last = np.maximum.accumulate(np.where(gone, place, -1))
        since[rows.index] = np.where(last >= 0, place - last, np.inf)
    since = since.mask(label.str.match("after/|followup/") & (since > 1), 1.0)
    return since.mask(label.str.startswith("bystander/"), 0.0)


def _repeated(t: pd.DataFrame) -> pd.Series:
    """Rows that repeat another word for word where answers are told; else further copies of a whole table."""
    told = [str(c) for c in t if c not in _VOLATILE]
    if not told or not len(t):
        return pd.Series(False, index=t.index)
    if "trial_id" in t and t["trial_id"].notna().all() and t["trial_id"].is_unique:
        return pd.Series(False, index=t.index)
    if any(c in t and t[c].notna().all() and t[c].nunique() > len(t) / 2 for c in ("time", "latency_s", "ttft_s")):
        told = [str(c) for c in t]
    text = _joined(t, told)
    rank = text.groupby(text.to_numpy(), sort=False).cumcount()
    if len(told) == len(t.columns) or (
        "answer" in t and t["answer"].notna().all() and _joined(t, ["answer"]).nunique() > 3
    ):
        return rank > 0
    copies = math.gcd(*map(int, text.value_counts()))  # a table pasted n times holds every row a multiple of n times
    return rank >= text.map(text.value_counts()) // copies


def _prompts(t: pd.DataFrame) -> np.ndarray:
    """A number for each prompt: by its digest, else by what it asks and holds; rows that tell neither stand alone."""
    if "prompt_sha" in t and t["prompt_sha"].notna().all():
        return pd.factorize(t["prompt_sha"])[0]
    if "expected" not in t or t["expected"].isna().any() or t["expected"].nunique() < len(t) / 20:
        return np.arange(len(t))
    names = [c for c in ("expected", "question", "target_tokens", "depth", "needle_token", "turn", "seed") if c in t]
    return pd.factorize(_joined(t, names))[0]


def _joined(t: pd.DataFrame, names: list[str]) -> pd.Series:
    """Each row as one text, whatever its cells are."""
    return pd.Series(["\x1f".join(map(str, row)) for row in zip(*(t[c].tolist() for c in names), strict=True)], t.index)


def _replica(t: pd.DataFrame) -> np.ndarray:
    """Worker or fingerprint that a reply names, where there are two to thirty of them."""
    for name in ("worker", "fingerprint"):
        found = table.texts(t, name).to_numpy()
        if 2 <= len(set(found) - {""}) <= 30:
            return found
    return np.full(len(t), "", object)


def _holds(answer: str, expected: str) -> bool:
    """Does the value stand in the answer as a word of its own, whatever separates its parts? "I41020" is no 41020."""
    parts = [re.escape(part) for part in re.split(r"[\W_]+", expected) if part]
    if sum(map(len, parts)) < 3 or len(set(_WORDS.findall(answer))) >= 400:
        return False
    return bool(re.search(r"(?i)(?<![^\W_])" + r"[\W_]*".join(parts) + r"(?![^\W_])", answer))


def _foreign(kind: np.ndarray, answer: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Wrong answers that hold another prompt's value."""
    values = {e for e in expected if len(e) >= 4}
    out = np.zeros(len(kind), bool)
    for i in np.flatnonzero((kind > 1) & (kind != 5)):
        if len(answer[i]) < 400:
            out[i] = any(word != expected[i] and word in values for word in _WORDS.findall(answer[i]))
    return out
