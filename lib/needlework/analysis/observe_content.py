"""Observations on what came back: kinds of wrong answers, counts in the reply, and what was seen from inside."""

from __future__ import annotations

import re

import numpy as np

from needlework.analysis import trials as table
from needlework.analysis.view import Feature, View, best_split

LOOP = re.compile(r"(.{2,40}?)\1{5,}", re.DOTALL)
FLAGS = {
    "graphs": r"(?i)graph|eager",
    "drafts": r"(?i)draft|specul|mtp|eagle",
    "cache": r"(?i)radix|prefix.?cach|flush",
    "chunk": r"(?i)chunk",
    "dtype": r"(?i)dtype|bf16|precision",
    "topk": r"(?i)top.?k",
    "serial": r"(?i)serial|concurren|batch|max.?running",
    "wait": r"(?i)wait|sync|async|overlap",
    "combined": r"(?i)combined|disagg|\bpd\b",
}


def answers(v: View) -> list[Feature]:
    out = []
    missed = v.measured & (v.hit == 0)
    answer, expected, source = v.text("answer"), v.text("expected"), v.text("answered_from")
    n = int(missed.sum())
    foreign = missed & np.char.startswith(source.astype(str), "trial:")
    if not (source != "").any():
        foreign = missed & (v.outcome != "near") & _foreign(answer, expected)
    answered = v.measured.sum()
    if answered >= 12:
        count = int(foreign.sum())
        out.append(
            Feature("foreign", float(np.clip(count / 2, 0, 1)), f"{count} answers hold another prompt's value", n)
        )
    if n >= 3:
        kinds = {k: float((v.outcome[missed] == k).mean()) for k in (*table.OUTCOMES, "miss")}
        told = 1 - kinds["miss"]
        if told > 0.5:
            for name, share, text in (
                ("near_misses", kinds["near"], "near (a digit or a swap away)"),
                ("empty", kinds["empty"], "empty"),
                ("refusals", kinds["refusal"], "refusals"),
                ("wrong_needle", kinds["other_needle"] + kinds["distractor"], "another statement of the same prompt"),
            ):
                out.append(
                    Feature(
                        name,
                        float(np.clip((share - 0.2) / 0.4, 0, 1)) * min(1.0, (n - 2) / 6),
                        f"{100 * share:.0f} % of {n} misses are {text}",
                        n,
                        share,
                    )
                )
            variety = sum(share > 0.1 for share in kinds.values())
            out.append(Feature("many_faces", float(n >= 5 and variety >= 3), f"{variety} kinds of wrong answers", n))
        if (answer[missed] != "").any():
            texts = [a for a in answer[missed] if a]
            mark = np.array(
                [
                    bool(re.fullmatch(r"\s*(\S)\1{3,}\s*", a)) or "\ufffd" in a or a.strip() in ("<s>", "<unk>", "0")
                    for a in texts
                ]
            )
            out.append(
                Feature(
                    "token_zero",
                    float(np.clip((mark.mean() - 0.2) / 0.4, 0, 1)),
                    f"{int(mark.sum())} of {len(texts)} wrong answers are one token over and over",
                    n,
                )
            )
            loop = np.array([bool(LOOP.search(a[:400])) for a in texts])
            out.append(
                Feature(
                    "loops",
                    float(np.clip((loop.mean() - 0.3) / 0.4, 0, 1)),
                    f"{int(loop.sum())} of {len(texts)} wrong answers loop",
                    n,
                )
            )
            known = missed & (expected != "") & (answer != "") & (v.outcome != "near")
            if known.sum() >= 4:
                start = np.array([_starts(a, e) for a, e in zip(answer[known], expected[known], strict=True)])
                text = f"{int(start.sum())} of {int(known.sum())} wrong answers begin right and then fail"
                out.append(
                    Feature("first_right", float(np.clip((start.mean() - 0.25) / 0.35, 0, 1)), text, int(known.sum()))
                )
    judged = (expected != "") & (answer != "") & missed
    if answered >= 8 and ((expected != "") & (answer != "")).any():
        inside = sum(_bare(e) in _bare(a) for a, e in zip(answer[judged], expected[judged], strict=True))
        out.append(
            Feature(
                "judge_wrong",
                float(np.clip(inside / max(2, 0.3 * max(n, 1)), 0, 1)),
                f"{inside} answers graded wrong hold the expected value",
                n,
            )
        )
    whole = v.text("aborted") == ""  # an answer that the client itself cut off says nothing about a budget
    spent = np.isin(v.outcome, ["cut", "reasoning_only"]) | ((v.text("finish_reason") == "length") & (v.hit == 0))
    lost, asked = int((spent & whole).sum()), int(whole.sum())
    if asked >= 8:
        share = lost / asked
        out.append(
            Feature(
                "budget",
                float(np.clip((share - 0.03) / 0.1, 0, 1)),
                f"{lost} of {asked} answers ended at the token budget",
                asked,
            )
        )
    return out


def usage(v: View) -> list[Feature]:
    out = []
    wished, counted, got = v.number("target_tokens"), v.number("counted_tokens"), v.number("prompt_tokens")
    sent = np.where(np.isfinite(counted), counted, wished)
    both = np.isfinite(sent) & np.isfinite(got) & (sent > 0)
    if both.sum() >= 8:
        ratio = got[both] / sent[both]
        tiny = (got[both] <= 4) & (sent[both] >= 64)
        less = (ratio < 0.93) & ~tiny
        top = np.sort(got[both])[-max(2, int(0.1 * both.sum())) :]
        ceiling = less.sum() >= 3 and got[both][less].std() <= 0.02 * got[both][less].mean() + 2
        text = f"{int(less.sum())} of {int(both.sum())} prompts were counted shorter than they were sent"
        text += f", all near {got[both][less].mean():,.0f} tokens" if ceiling else ""
        out.append(Feature("truncated", float(np.clip(less.sum() / 3, 0, 1)), text, int(both.sum()), float(top.mean())))
        out.append(
            Feature(
                "tiny_prompt",
                float(np.clip(tiny.sum() / 2, 0, 1)),
                f"{int(tiny.sum())} prompts were counted as at most 4 tokens",
                int(both.sum()),
            )
        )
        if not np.isfinite(counted).any():
            typical = float(np.median(ratio))
            out.append(
                Feature(
                    "length_estimate",
                    float(np.clip((abs(typical - 1) - 0.1) / 0.08, 0, 1)) * (less.sum() < 3),
                    f"prompts are {typical:.2f} times as long as they were wished",
                    int(both.sum()),
                )
            )
    accept = v.number("accept_length")
    if np.isfinite(accept).sum() >= 10:
        values = accept[np.isfinite(accept)]
        one = float((values <= 1.001).mean())
        groups = [accept[m & np.isfinite(accept)] for m in (v.warm, ~v.warm, v.turn > 1, v.pd_arm, ~v.pd_arm)]
        means = [float(np.median(g)) for g in groups if len(g) >= 4] or [float(np.median(values))]
        high, low = max(means), min(means)
        apart = low < 0.7 * high
        right = float(np.nanmean(v.hit)) if v.measured.any() else 0.0
        strength = max(one, float(apart)) * (1.0 if right > 0.85 else 0.7)
        out.append(
            Feature(
                "draft_accept",
                strength,
                f"draft acceptance runs from {low:.2f} to {high:.2f} ({100 * right:.0f} % of answers right)",
                len(values),
            )
        )
    return out


# page findings by what they speak of; the layout comes first, for its scales and stale entries are only its shadow
FINDINGS = {
    "page_layout": r"layout|interleav|tiled|packed|transposed|row-format|wrong-format",
    "page_nonfinite": r"\bnan\b|\binf\b|non.?finite|uninitiali|absurd",
    "page_scale": r"scale|rounding|power of two",
    "page_stale": r"stale|previous owner|unchanged|not written|never-written|missing|zero page|swapped|foreign",
}
ORDER = r"permuted|out of order"


def inside(v: View) -> list[Feature]:
    out = []
    digests = v.evidence.get("digests") or {}
    if digests:
        differ = [name for name, equal in digests.items() if not equal]
        side = [name for name in digests if re.search(r"(?i)index|scale|draft|window|swa|state|side", name)]
        main = [name for name in differ if name not in side]
        text = f"buffers that differ across the transfer: {', '.join(differ) or 'none'}"
        all_ = len(differ) == len(digests)
        for name, seen in (
            ("side_buffer_differs", bool(differ) and not main),
            ("main_buffer_differs", bool(main) and not all_),
            ("all_buffers_differ", all_),
            ("buffers_equal", not differ),
        ):
            out.append(Feature(name, float(seen), text, len(digests)))
    pages = v.evidence.get("pages")
    if pages is not None:
        words = " ".join(pages).lower()
        layout, stale = (bool(re.search(FINDINGS[name], words)) for name in ("page_layout", "page_stale"))
        # no owner of a page writes a scale that its format can not hold, and what is computed from it differs as well
        scale = "out-of-range" in words
        shadows = {
            "page_scale": layout or (stale and not scale),
            "page_stale": layout or scale,
            "page_nonfinite": layout,
        }
        for name, pattern in FINDINGS.items():
            seen = bool(re.search(pattern, words)) and not shadows.get(name, False)
            what = f"page findings {'' if seen else 'do not '}name {name.removeprefix('page_')}"
            out.append(Feature(name, float(seen), what, len(pages)))
        if re.search(ORDER, words):  # its absence says nothing: pages are compared in order on two sides or not at all
            out.append(Feature("page_order", 1.0, "page findings name whole pages in each other's place", len(pages)))
        out.append(Feature("pages_right", float(not pages), f"{len(pages)} kinds of findings in the pages", len(pages)))
    placed = v.evidence.get("placement") or []
    if len(placed) >= 8:
        where = best_split(*(np.array(c, float) for c in zip(*placed, strict=True)))
        gain = where.gain if where else 0.0
        words = f"above page {where.low:,.0f} to {where.high:,.0f}" if where else "at no page number"
        strength = float(np.clip((gain - 2) / 3, 0, 1))
        out.append(Feature("placement", strength, f"the same content is lost {words}", len(placed)))
    selected, own = v.evidence.get("selected"), int(v.config.get("topk", 0))
    if selected and own:
        fewest = min(selected.values())
        text = f"{fewest:,} entries selected where {own:,} are configured"
        out.append(Feature("other_topk", float(fewest < own), text, len(selected), fewest))
    logs = v.evidence.get("logs")
    if logs:
        for name, pattern in (
            (
                "log_failed_load",
                r"(?i)fail.*(load|store|transfer|retriev)|(load|store|transfer|retriev).*fail|fail.?open",
            ),
            ("log_truncated", r"(?i)truncat|exceed.*context"),
            ("log_nan", r"(?i)\bnan\b|\binf\b|non.?finite"),
        ):
            count = sum(count for rule, count in logs.items() if re.search(pattern, rule))
            out.append(
                Feature(
                    name,
                    float(count > 0),
                    f"{count} log lines match {name.removeprefix('log_').replace('_', ' ')}",
                    count,
                )
            )
    for flag, heals in (v.evidence.get("flags") or {}).items():
        word = next((n for n, pattern in FLAGS.items() if re.search(pattern, flag)), None)
        if word:
            out.append(
                Feature(
                    f"heals_{word}",
                    float(heals),
                    f"switching {flag} {'heals' if heals else 'changes nothing'}",
                    1,
                )
            )
    return out


def _foreign(answer: np.ndarray, expected: np.ndarray) -> np.ndarray:
    values = {e for e in expected if len(e) >= 4}
    out = np.zeros(len(answer), bool)
    for i, (a, e) in enumerate(zip(answer, expected, strict=True)):
        if a and len(a) < 400:
            out[i] = any(word != e and word in values for word in re.findall(r"[\w-]+", a))
    return out


def _starts(answer: str, expected: str) -> bool:
    return len(expected) >= 3 and expected[:2].lower() in answer.lower() and expected.lower() not in answer.lower()


def _bare(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower() or "\0"
