"""Observations on the prompt's length and the needle's place: edges, ceilings, chunks, constants, residues."""

from __future__ import annotations

import math

import numpy as np

from needlework.analysis import trials as table
from needlework.analysis.cliff import constants_in
from needlework.analysis.comb import comb_test
from needlework.analysis.monotone import falling_fit
from needlework.analysis.view import LAPSE, Feature, Split, View, best_split, log_binomial, presence_of


def loss(v: View) -> list[Feature]:
    from scipy.stats import binom

    strata: dict[tuple, np.ndarray] = {}
    for key in set(zip(v.probe, v.arm, v.warm, v.load > 1, v.turn > 1, strict=True)) if v.n else ():
        mask = (v.probe == key[0]) & (v.arm == key[1]) & (v.warm == key[2])
        strata[key] = mask & ((v.load > 1) == key[3]) & ((v.turn > 1) == key[4])
    misses, n = v.rate(np.ones(v.n, bool))
    counts = [(misses, n), *(v.rate(mask) for mask in strata.values())]
    tails = [float(binom.sf(m - 1, k, LAPSE)) for m, k in counts if m]
    p = min(1.0, min(tails, default=1.0) * (1 if len(counts) <= 2 else len(counts)))
    base_misses, base_n = v.rate(v.base)
    out = [Feature("loss", presence_of(p) if n >= 6 else None, f"{misses} of {n} measured trials miss", n, misses)]
    if base_n >= 12:
        share = base_misses / base_n
        rest = float(binom.sf(base_misses - 1, base_n, LAPSE)) if base_misses else 1.0
        out.append(
            Feature("plain_loss", presence_of(rest), f"{base_misses} of {base_n} plain cold trials miss", base_n, share)
        )
        rare = presence_of(p) * float(misses / max(n, 1) < 0.15)
        out.append(Feature("rare_loss", rare, f"misses are rare: {misses} of {n}", n))
    if len(v.controls) >= 3:
        hit = table.hits(v.controls)[table.column(v.controls, "control", "") != "absent"]
        bad, all_ = int((hit == 0).sum()), int(hit.notna().sum())
        if all_ >= 3:
            out.append(Feature("controls_fail", float(bad > 0.34 * all_), f"{bad} of {all_} controls fail", all_))
    return out


def length(v: View) -> list[Feature]:
    x, y, needle = v.length[v.base], v.hit[v.base], v.needle[v.base]
    out: list[Feature] = []
    if len(y) < 12 or len(np.unique(x)) < 3:
        return out
    whole = best_split(x, y)
    rivals = {
        "edge": whole,
        "position_ceiling": best_split(needle, y),
        "far_from_end": best_split(x - needle, y),
    }
    chunk, last = _last_chunk(v, x, y, needle)
    gains = {name: split.gain * _clear(name, split) if split else 0.0 for name, split in rivals.items()}
    gains["last_chunk_only"] = last
    by_time = best_split(v.number("ordinal")[v.base], y)
    best = max(*gains.values(), by_time.gain if by_time else 0.0)
    varied = np.isfinite(needle).sum() >= 12 and len(np.unique(np.round(needle / x, 1))) >= 3
    for name, gain in gains.items():
        if name != "edge" and not varied:
            continue
        strength = float(np.clip((gain - 3) / 4, 0, 1)) * float(np.exp(min(0.0, gain - best + 0.5) / 2.0))
        split = rivals.get(name)
        if name in ("position_ceiling", "far_from_end"):  # both grow with the length: it has to be beaten
            strength *= float(np.clip(gain - gains["edge"], 0, 1))
        if name == "last_chunk_only":
            text = f"hits need the needle in the last {chunk} tokens' chunk or a single pass"
            out.append(Feature(name, strength, text, len(y), chunk))
            continue
        value = (split.low, split.high) if split else None
        out.append(Feature(name, strength, _fall(name, split, strength, gains, best), len(y), value))
    if max(gains.values()) >= best - 0.5:
        _predict(v, gains, rivals, chunk)
    if whole is not None and gains["edge"] > max(5, best - 0.5):
        v.edge = whole
    if whole is not None and gains["edge"] > max(5, best - 6):
        below, above = y[x <= whole.low], y[x >= whole.high]
        clean = min(below.mean() if len(below) else 0.5, 1 - above.mean() if len(above) else 0.5)
        narrow = math.log2(max(whole.high, 1) / max(whole.low, 1))
        sharp = float(np.clip((clean - 0.75) / 0.15, 0, 1))
        out.append(
            Feature("sharp", sharp, f"the fall is {'a step' if sharp > 0.5 else 'gradual or partial'}", len(y), narrow)
        )
        out.append(
            Feature("soft_fall", 1 - sharp, f"{100 * clean:.0f} % of trials lie on the right side of the edge", len(y))
        )
        out += _constants(v, whole, narrow, sharp)
    elif v.rate(v.base)[0] > 0:
        other = best > 5 and max(gains, key=lambda name: gains[name]) != "edge"
        text = "the fall follows the needle's place rather than the length" if other else "no fall with length"
        out += [Feature("sharp", 0.0, text, len(y)), Feature("soft_fall", 0.0, text, len(y))]
    return out


_WHAT = {
    "edge": "the length",
    "position_ceiling": "the needle's position",
    "far_from_end": "the distance from the end",
    "last_chunk_only": "the chunk that the needle lies in",
}


def _fall(name: str, split: Split | None, strength: float, gains: dict[str, float], best: float) -> str:
    """The fall in words; where it is absent, what recall follows instead: the line then stands as an objection."""
    if split is None or strength < 0.5:
        leader = max(gains, key=lambda other: gains[other])
        if leader != name and gains[leader] >= max(5, best - 0.5):
            return f"recall follows {_WHAT[leader]} rather than {_WHAT[name]}"
        return f"no clear fall with {_WHAT[name]}"
    rates = f"{100 * split.top:.0f} % below, {100 * split.bottom:.0f} % above"
    return f"recall falls with {_WHAT[name]} between {split.low:,.0f} and {split.high:,.0f} tokens ({rates})"


def _clear(name: str, split: Split) -> float:
    """How far a fall is one at all, 0 to 1; a table that ends reaches nothing beyond its end, and all before it."""
    rest = 1.0
    if name == "position_ceiling":
        rest = float(np.clip((0.5 - split.bottom) / 0.2, 0, 1) * np.clip((split.top - 0.75) / 0.15, 0, 1))
    return rest * float(split.top - split.bottom >= 0.25)


def short(v: View) -> list[Feature]:
    """Do even prompts miss that are too short for any budget, chunk or edge to matter, one that was found included?"""
    own = int(v.config.get("topk", 0)) * int(np.max(v.config.get("ratio", 1)))
    x = v.length[v.base]
    if len(x) < 12 or len(np.unique(x)) < 3:
        return []
    limit = min(own or np.inf, float(np.quantile(x, 0.35)), v.edge.low if v.edge is not None else np.inf)
    misses, n = v.rate(v.base & (v.length <= limit))
    if n < 5:
        return []
    from scipy.stats import binom

    p = float(binom.sf(misses - 1, n, LAPSE)) if misses else 1.0
    return [Feature("short_loss", presence_of(p), f"{misses} of {n} prompts of at most {limit:,.0f} tokens miss", n)]


def budget(v: View) -> list[Feature]:
    """Where misses lie beside top-k x ratio, up to which a selection has nothing to choose.

    An index that says nothing (F01) or a list that is cut (F05) loses as soon as there is a choice, more than a blind
    choice would, and far beyond it everything; a list of candidates that overflows (F04) is some times as long as the
    selection; scores that still say something (F06) keep a share. Below the budget only a smaller budget loses.
    """
    from scipy.stats import binom, norm

    own = int(v.config.get("topk", 0)) * int(np.max(v.config.get("ratio", 1)))
    if not own or len(np.unique(v.length[v.base])) < 3:
        return []
    out = []
    misses, n = v.rate(v.base & (v.length > own) & (v.length <= 2 * own))
    if n >= 5:
        p = float(binom.sf(misses - 1, n, LAPSE)) if misses else 1.0
        text = f"{misses} of {n} prompts of one to two times top-k x ratio miss"
        out.append(Feature("past_budget", presence_of(p), text, n))
    misses, n = v.rate(v.base & (v.length >= 4 * own))
    if n >= 5:
        text = f"{misses} of {n} prompts of more than four times top-k x ratio miss"
        out.append(Feature("far_lost", float(np.clip((misses / n - 0.7) / 0.2, 0, 1)), text, n))
    choice = v.base & (v.length > own)
    if (n := int(choice.sum())) >= 12:
        # whichever k of n entries a blind choice takes, the needle's is among them with chance k / n
        kept = own / v.length[choice]
        found, mean, spread = int(v.hit[choice].sum()), float(kept.sum()), float(np.sqrt((kept * (1 - kept)).sum()))
        text = f"{found} of {n} prompts above top-k x ratio hit, where a blind choice would keep {mean:.0f}"
        p = float(norm.cdf((found + 0.5 - mean) / max(spread, 1e-9)))
        out.append(Feature("worse_than_blind", presence_of(p), text, n))
    if v.rate(v.base & (v.length <= own))[1] >= 5:
        below = v.edge is not None and v.edge.high <= own
        text = "the fall lies below top-k x ratio" if below else "no fall below top-k x ratio"
        out.append(Feature("below_budget", float(below), text, n))
    return out


def _predict(v: View, gains: dict[str, float], rivals: dict[str, Split | None], chunk: int) -> None:
    """Marks the rows that length and needle position alone would let hit, so that other effects are sought there."""
    best = max(gains, key=lambda name: gains[name])
    if gains[best] < 5:
        return
    if best == "last_chunk_only":
        # requests in flight together share a pass, which ends anywhere in a prompt: no such row is sure to hit
        v.good = (v.needle // chunk == (v.length - 1) // chunk) & ~(v.load > 1)
        return
    x = {"edge": v.length, "position_ceiling": v.needle, "far_from_end": v.length - v.needle}[best]
    at, fit = falling_fit(x[v.base], v.hit[v.base])
    held = at[fit >= 0.85]
    v.good = x <= (held.max() if len(held) else at.min())


def _constants(v: View, edge: Split, narrow: float, sharp: float) -> list[Feature]:
    if narrow > 1.2:
        return []
    out = []
    found = constants_in((edge.low, edge.high), v.config)
    # a constant is read off a step; what falls gradually passes every constant on its way
    weight = float(np.clip(1.25 - narrow / 1.2, 0.15, 1)) * (0.35 + 0.65 * sharp)
    # a budget above the configured one loses nothing; a list of candidates is some times as long as the selection
    own = int(v.config.get("topk", 0)) * int(np.max(v.config.get("ratio", 1)))
    kinds = {
        "edge_at_topk": lambda c: c.formula.startswith("top-k") and "stash" not in c.formula,
        "edge_at_other_k": lambda c: c.formula.startswith("another") and (not own or c.value < own),
        "edge_at_window": lambda c: c.formula.startswith("window"),
        "edge_at_chunk": lambda c: "chunk" in c.formula and c.specific,
        "edge_at_limit": lambda c: "context limit" in c.formula,
        "edge_at_stash": lambda c: "stash" in c.formula and (narrow <= 0.2 or "usual" not in c.formula),
    }
    for name, test in kinds.items():
        if name == "edge_at_topk" and "topk" not in v.config:
            continue
        if name in ("edge_at_window", "edge_at_chunk", "edge_at_limit") and _CONFIG[name] not in v.config:
            continue
        match = [c for c in found if test(c)]
        text = (
            f"the edge fits {match[0].formula}"
            if match
            else f"the edge fits no {name.removeprefix('edge_at_')} constant"
        )
        out.append(Feature(name, weight if match else 0.0, text, 0, match[0].value if match else None))
    return out


_CONFIG = {"edge_at_window": "window", "edge_at_chunk": "chunk", "edge_at_limit": "context_limit"}


def _last_chunk(v: View, x: np.ndarray, y: np.ndarray, needle: np.ndarray) -> tuple[int, float]:
    sizes = [int(v.config["chunk"])] if v.config.get("chunk") else [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    best = (sizes[0], 0.0)
    keep = np.isfinite(needle) & np.isfinite(x)
    if keep.sum() < 12:
        return best
    x, y, needle = x[keep], y[keep], needle[keep]
    for size in sizes:
        inside = needle // size == (x - 1) // size
        n, k = inside.sum(), y[inside].sum()
        if not 0 < n < len(y) or k / n <= (y.sum() - k) / (len(y) - n):
            continue
        gain = float(log_binomial(k, n) + log_binomial(y.sum() - k, len(y) - n) - log_binomial(y.sum(), len(y)))
        gain -= 0.0 if v.config.get("chunk") else math.log(len(sizes))
        if gain > best[1]:
            best = (size, gain)
    return best


def residues(v: View) -> list[Feature]:
    out = []
    cold = v.base if len(np.unique(v.length[v.base])) >= 12 else v.base_of_all  # the scan may be another arm's
    warm = v.measured & v.warm & (v.turn <= 1 if np.isfinite(v.turn).any() else True)
    found = {}
    scan = v.probe == "residues"  # a length is judged against its neighbours, where those were asked
    for name, mask in (("comb", cold), ("comb_warm", warm)):
        x, y = v.length[mask], v.hit[mask]
        if len(np.unique(x)) < 12:
            continue
        result = comb_test(x, y, permutations=200 if len(y) <= 1500 else 0)
        if result.p_value < 0.01 and len(y) <= 1500:
            result = comb_test(x, y, permutations=1000)
        inside = np.isin(np.round(x) % (result.period or 1), result.residues)
        dead = 1 - y[inside].mean() if result.state == "comb" and inside.any() else 0.0
        strength = presence_of(result.p_value) * float(dead >= 0.6 and dead - result.misses_elsewhere >= 0.4)
        near = mask & scan
        if len(np.unique(v.length[near])) >= 12 and result.period:
            hit, there = v.hit[near], np.isin(np.round(v.length[near]) % result.period, result.residues)
            strength *= float(there.any() and (~there).any() and hit[~there].mean() - hit[there].mean() >= 0.4)
        found[name] = strength
        out.append(Feature(name, strength, str(result), len(y), (result.period, result.residues)))
    return out
