"""Observations on the conditions: cache state, arm, order, load, aborts, tenants, physical place, repetition."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from needlework.analysis.drift import drift
from needlework.analysis.monotone import falling_fit
from needlework.analysis.paired import compare_pairs, pair_up
from needlework.analysis.view import (
    LAPSE,
    Feature,
    View,
    best_split,
    contrast,
    one_sided,
    one_sided_lapses,
    presence_of,
)

RELOAD = re.compile(r"(?i)evict|reload|host|storage|tier|offload|disk")
TENANT = ("tenant", "adapter", "salt", "lora")
MOVED = 1e-6  # nats; serial repeats are identical, as reported
# how often the same prompt changes between hit and miss for no reason: alone, greedy decoding repeats itself
FLIPS = {"flips_serial": 0.02, "flips_loaded": 2 * LAPSE}
PLACE = ("page_id", "first_page", "block_id", "max_page")


def cache(v: View) -> list[Feature]:
    from scipy.stats import binom

    out = []
    asked_warm = (v.wanted == "warm") | np.char.endswith(v.label.astype(str), "/continue")
    if (asked := asked_warm & np.isfinite(v.cached)).sum() >= 4:
        cold = int((v.cached[asked] == 0).sum())
        share = cold / asked.sum()
        text = f"{cold} of {int(asked.sum())} trials meant to be warm had no cached token"
        out.append(Feature("warm_vacuous", float(np.clip((share - 0.3) / 0.4, 0, 1)), text, int(asked.sum())))
    sha = v.text("prompt_sha")
    fresh = (sha != "") & ~pd.Series(sha).duplicated().to_numpy() & ~(v.turn > 1)
    fresh &= ~np.isin(v.probe, ["turns", "abort"])
    fresh &= np.isfinite(v.cached) & (v.length > 0)
    if fresh.sum() >= 12:
        false = int((v.cached[fresh] >= 0.25 * v.length[fresh]).sum())
        text = f"{false} of {int(fresh.sum())} prompts that were never sent before hit the cache"
        out.append(Feature("false_hit", float(np.clip(false / 3, 0, 1)), text, int(fresh.sum())))
    state = np.where(v.warm, "warm", np.where((v.cached == 0) | (v.cache == "cold"), "cold", ""))
    frame = v.frame.assign(_state=state)
    single = ~(v.load > 1)
    pairs = pair_up(frame[single].drop(columns=[c for c in ("cache",) if c in frame]), "_state", "cold", "warm")
    compared = compare_pairs(pairs, "cold", "warm")
    if compared.pairs >= 5:
        one = compared.only_first > compared.only_second
        out.append(
            Feature("warm_loss", one_sided_lapses(v, compared, v.base & ~v.warm) * one, str(compared), compared.pairs)
        )
        out.append(Feature("cold_loss_only", one_sided(compared) * (not one), str(compared), compared.pairs))
        both_ways = 2 * min(compared.only_first, compared.only_second)  # what a cache loses, it loses one way
        p = float(binom.sf(both_ways - 1, compared.pairs, 2 * LAPSE)) if both_ways else 1.0
        out.append(
            Feature(
                "flips_serial",
                presence_of(p),
                f"{both_ways} of {compared.pairs} repeated prompts change between hit and miss, both ways",
                compared.pairs,
            )
        )
    elif min(v.rate(v.warm & single)[1], v.rate(v.base & ~v.warm)[1]) >= 8:
        out.append(contrast(v, "warm_loss", v.warm & single, v.base & ~v.warm, "warm", "cold"))
    words = [f"{a} {b} {c}" for a, b, c in zip(v.arm, v.cache, v.label, strict=True)]
    reload = np.array([bool(RELOAD.search(word)) for word in words], bool)
    reload &= v.warm  # what was never cached again has not come back from anywhere
    if min(v.rate(reload)[1], v.rate(v.warm & ~reload)[1]) >= 5:
        out.append(contrast(v, "reload_loss", reload, v.warm & ~reload, "reloaded", "device hits"))
    if any(f.name == "warm_loss" and (f.presence or 0) > 0.5 for f in out) and v.rate(v.warm & single)[1] >= 12:
        mask = v.warm & single & v.good & v.measured & np.isfinite(v.cached) & np.isfinite(v.length)
        split = best_split(-(v.length - v.cached)[mask], v.hit[mask])  # lost when the suffix is short
        gain = split.gain if split else 0.0
        where = f"about {-split.high:,.0f}" if split else "no"
        text = f"warm requests with a suffix of more than {where} tokens are right"
        out.append(Feature("long_suffix_heals", float(np.clip((gain - 3) / 4, 0, 1)), text, int(mask.sum())))
    kept, sent = (np.char.endswith(v.label.astype(str), "/" + end) for end in ("continue", "resend"))
    if min(v.rate(kept)[1], v.rate(sent)[1]) >= 4:
        out.append(contrast(v, "continue_loss", kept, sent, "continued", "re-sent"))
    elif min(v.rate(v.turn > 1)[1], v.rate(v.base)[1]) >= 6:
        out.append(contrast(v, "continue_loss", v.turn > 1, v.base, "later turns", "first turns"))
    return out


def arms(v: View) -> list[Feature]:
    out = []
    if v.pd_arm.any() and (~v.pd_arm & (v.arm != "")).any():
        frame = v.frame.assign(_side=np.where(v.pd_arm, "PD", "combined"))
        compared = compare_pairs(pair_up(frame, "_side", "combined", "PD"), "combined", "PD")
        if compared.pairs >= 6:
            one = compared.only_first > compared.only_second
            lost = v.pd_arm & (v.hit == 0)
            low, high = (v.length[lost].min(), v.length[lost].max()) if lost.any() else (0, 0)
            like = v.base_of_all & ~v.pd_arm & (v.length >= 0.9 * low) & (v.length <= 1.1 * high)
            unpaired = contrast(v, "pd_loss", v.pd_arm & (v.length >= low), like, "PD", "other arms").presence or 0.0
            # where the place decides, what it loses is compared: the same places in the other arm
            lost_here = contrast(
                v, "pd_loss", v.pd_arm & ~v.good, v.base_of_all & ~v.pd_arm & ~v.good, "PD", "other arms"
            )
            strength = max(one_sided(compared), min(max(unpaired, lost_here.presence or 0.0), 0.9)) * one
            out.append(Feature("pd_loss", strength, str(compared), compared.pairs))
            misses = min(compared.only_second + compared.neither, compared.only_first + compared.neither)
            both = presence_of(max(compared.neither / compared.pairs < 0.06, 1e-4)) * float(misses >= 3)
            both *= float(compared.neither >= 2 * (compared.only_first + compared.only_second))
            out.append(Feature("both_arms_lose", both, str(compared), compared.pairs))
        else:
            out.append(contrast(v, "pd_loss", v.pd_arm, ~v.pd_arm, "PD", "combined"))
    other = v.reference_arm
    if min(v.rate(other)[1], v.rate(~other)[1]) >= 6:
        m, n = v.rate(other)
        mine, k = v.rate(~other)
        same = float(m / n >= 0.6 * mine / k and m >= 3)
        out.append(
            Feature("reference_same", same, f"an independent server misses {m} of {n}, this one {mine} of {k}", n + k)
        )
    return out


def order(v: View) -> list[Feature]:
    order = v.number("ordinal")
    mask = v.measured & np.isfinite(order) & ~(v.load > 1) & ~v.warm & (v.probe != "abort") & v.good
    if mask.sum() < 20:
        return []
    x, y, length = order[mask], v.hit[mask], v.length[mask]
    rank = np.argsort(x, kind="stable")
    y, length, x = y[rank], length[rank], x[rank]
    result = drift(y.tolist())
    # a change of the question over time is no drift: within each half-octave of length the order must matter too
    stratum = np.floor(2 * np.log2(np.maximum(np.nan_to_num(length, nan=1), 1)))
    p = _ordered_p(y, stratum)
    split = best_split(x, y)
    late = float(split is not None and split.gain > 4 and split.top - split.bottom > 0.25)
    text = (
        f"recall falls with the number of requests ({result})"
        if p < 0.05
        else f"no trend with request order (p = {p:.2g})"
    )
    return [Feature("drift", presence_of(p) * late, text, len(y), result.onset)]


def load(v: View) -> list[Feature]:
    out = []
    many, alone = (v.load > 1) & v.good & ~v.warm & (v.probe != "abort"), (v.load <= 1) & ~v.warm & v.good & v.base
    if min(v.rate(many)[1], v.rate(alone)[1]) >= 8:
        out.append(contrast(v, "load_loss", many, alone, "concurrent", "serial"))
        sizes = v.load[many]
        if len(np.unique(sizes)) >= 3:
            captured = np.isin(v.load, [1, 2, 4, 8, 16, 24, 32, 48, 64, 128])
            if min(v.rate(many & captured)[1], v.rate(many & ~captured)[1]) >= 6:
                out.append(
                    contrast(v, "padded_loss", many & ~captured, many & captured, "padded sizes", "captured sizes")
                )
    ask, before = (v.probe == "abort") & v.good, v.base & v.good
    if v.rate(ask)[1] >= 4 and v.rate(before)[1] >= 6:
        # who suffers depends on the mechanism: all that came after, or only the next to be given pages
        near = ask & ~v.warm & np.char.startswith(v.label.astype(str), "after/")
        sides = [contrast(v, "abort_loss", ask & ~v.warm, before, "after aborts", "without aborts")]
        if v.rate(near)[1] >= 4:
            sides.append(contrast(v, "abort_loss", near, before, "next after aborts", "without aborts", tests=2))
        out.append(max(sides, key=lambda f: f.presence or 0.0))
    again, hits = (v.probe == "abort") & v.warm, v.warm & (v.probe != "abort") & ~(v.turn > 1)
    if v.rate(again)[1] >= 4 and v.rate(hits)[1] >= 6:
        what = "hits on an aborted prompt's prefix"
        sides = [contrast(v, "abort_poison", again, hits, what, "other hits")]
        fresh = (v.probe == "abort") & ~v.warm & (v.length >= 0.9 * np.nanmin(v.length[again]))
        if v.rate(fresh)[1] >= 4:  # a prompt of this length must be right when it is fresh
            sides.append(contrast(v, "abort_poison", again, fresh, what, "fresh prompts after aborts"))
        out.append(min(sides, key=lambda f: f.presence or 0.0))
    for name in PLACE:
        if name in v.frame.columns and np.isfinite(v.number(name)).sum() >= 12:
            split = best_split(v.number(name), v.hit)
            gain = split.gain if split else 0.0
            where = f"above page {split.low:,.0f} to {split.high:,.0f}" if split else "with no page number"
            out.append(Feature("placement", float(np.clip((gain - 3) / 4, 0, 1)), f"recall is lost {where}", v.n))
            break
    for name in TENANT:
        column = v.text(name)
        if len(set(column)) >= 2:
            crossed = v.warm & (column != "") & v.good
            if v.rate(crossed)[1] >= 4 and v.rate(v.base & v.good)[1] >= 6:
                out.append(contrast(v, "crossed_identity", crossed, v.base & v.good, f"hits across {name}s", "plain"))
            break
    return out


def repeatability(v: View) -> list[Feature]:
    keys = [k for k in ("prompt_sha", "trial_key") if k in v.frame.columns] or [
        k
        for k in ("target_tokens", "depth", "needle_token", "question", "expected", "seed", "turn")
        if k in v.frame.columns
    ]
    if not keys or not v.measured.any():
        return []
    frame = pd.DataFrame(
        {
            "logprob": v.number("logprob"),
            "hit": v.hit,
            "answer": v.text("answer"),
            "load": np.where(v.load > 1, 1, 0),
            "warm": v.warm,
            "arm": v.arm,
            "label": v.label,
        }
    )
    for key in keys:
        frame[key] = v.frame[key].astype("object").where(v.frame[key].notna(), "")
    from scipy.stats import binom

    out = _repeats_agree(v, frame.assign(length=v.length)[v.measured & ~v.reference_arm & (v.probe != "abort")], keys)
    frame = frame[v.measured]
    out += _batch_numerics(frame, keys)
    for name, part in (("flips_serial", frame[frame["load"] == 0]), ("flips_loaded", frame[frame["load"] == 1])):
        groups = part.groupby([*keys, "arm", "warm", "label"], sort=False)["hit"].agg(["size", "min", "max"])
        groups = groups[groups["size"] >= 2]
        if len(groups) >= 6:
            differ = int((groups["min"] != groups["max"]).sum())
            p = float(binom.sf(differ - 1, len(groups), FLIPS[name])) if differ else 1.0
            out.append(
                Feature(
                    name,
                    presence_of(p),
                    f"{differ} of {len(groups)} repeated prompts change between hit and miss ({name.split('_')[1]})",
                    len(groups),
                )
            )
    return out


def _repeats_agree(v: View, frame: pd.DataFrame, keys: list[str]) -> list[Feature]:
    """Where recall is partial at a length and no prompt changes when it is asked again, content decides and not chance.

    The odds of the two, as a share: under chance a prompt of a length with recall h changes with 2 h (1 - h). Where one
    did change, `flips_serial` speaks.
    """
    part = frame[~frame["warm"] & (frame["load"] == 0) & np.isfinite(frame["length"])]
    groups = part.groupby([*keys, "arm"], sort=False).agg(
        size=("hit", "size"), low=("hit", "min"), high=("hit", "max"), length=("length", "first")
    )
    groups = groups[groups["size"] >= 2]
    base = v.base & np.isfinite(v.length)
    if len(groups) < 6 or base.sum() < 12 or (groups["low"] != groups["high"]).any():
        return []
    h = np.interp(groups["length"], *falling_fit(v.length[base], v.hit[base]))
    chance = 2 * h * (1 - h)
    if chance.sum() < 1:  # all of them are surely right or surely lost: nothing could change
        return []
    text = f"none of {len(groups)} repeated prompts changes, where chance would change {chance.sum():.1f}"
    return [Feature("repeats_agree", float(1 / (1 + np.prod(1 - chance))), text, len(groups))]


def _batch_numerics(frame: pd.DataFrame, keys: list[str]) -> list[Feature]:
    """Right answers alone and in a crowd: do their log-probabilities move, where those of serial repeats do not?"""
    part = frame[(frame["hit"] == 1) & ~frame["warm"] & frame["logprob"].notna()]
    alone, crowd = (
        part[part["load"] == side].groupby([*keys, "arm"], sort=False)["logprob"].agg(["size", "min", "max", "mean"])
        for side in (0, 1)
    )
    again = alone[alone["size"] >= 2]
    both = alone.join(crowd.add_suffix("_crowd"), how="inner")
    away = np.maximum(both["max_crowd"] - both["mean"], both["mean"] - both["min_crowd"])
    moved = {"serial": again["max"] - again["min"] > MOVED, "crowd": away > MOVED}
    if min(map(len, moved.values())) < 3 or len(moved["crowd"]) < 6:
        return []
    share, still = (float(np.mean(moved[side])) for side in ("crowd", "serial"))
    text = f"log-probabilities of right answers move in {100 * share:.0f} % of {len(moved['crowd'])} prompts in a crowd"
    text += f", in {100 * still:.0f} % of {len(moved['serial'])} repeated alone"
    return [Feature("batch_numerics", float(np.clip((share - still - 0.3) / 0.4, 0, 1)), text, len(part))]


def _ordered_p(y: np.ndarray, stratum: np.ndarray, rounds: int = 400) -> float:
    """One-sided permutation p-value: within strata, later trials miss more often than earlier ones."""
    rank = np.arange(len(y), dtype=float)
    _, stratum = np.unique(stratum, return_inverse=True)
    size = np.bincount(stratum)
    centred = rank - (np.bincount(stratum, weights=rank) / size)[stratum]
    seen = float((centred * y).sum())
    rng = np.random.default_rng(0xD41F)
    order = np.argsort(stratum, kind="stable")
    smaller = 0
    for _ in range(rounds):
        shuffled = np.empty(len(y))
        shuffled[order] = y[np.lexsort((rng.random(len(y)), stratum))]
        smaller += float((centred * shuffled).sum()) <= seen + 1e-9
    return (smaller + 1) / (rounds + 1)
