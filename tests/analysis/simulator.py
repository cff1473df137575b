"""Tables of trials as each class would write them, after public descriptions; knows nothing of the rules.

A deployment is a function from one request (a dict) to what happened to it. `battery` sends the same questions to any.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

TOPK, RATIO, WINDOW, PAGE, CHUNK, LIMIT = 512, 4, 128, 64, 4096, 32768
CONFIG = {"topk": TOPK, "ratio": RATIO, "window": WINDOW, "page": PAGE, "chunk": CHUNK, "context_limit": LIMIT}
CLASSES = [f"F{i:02}" for i in range(1, 21)] + [f"N{i}" for i in range(1, 6)]
KINDS = ["garbage", "refusal", "other_needle", "empty"]


def battery(seed: int, *, arms: bool = True) -> list[dict]:
    """Requests in the order they are sent; each carries what the server would know about it."""
    rng = np.random.default_rng([seed, 11])
    asks: list[dict] = []

    def add(probe, length, depth=0.5, **more):
        asks.append({"probe": probe, "length": int(length), "depth": depth, "seed": int(rng.integers(1 << 30)), **more})

    grid = [
        (n, d) for n in (384, 700, 900, 1400, 1900, 2200, 2800, 3600, 4600, 6000, 9000, 14000) for d in (0.1, 0.5, 0.9)
    ]
    for i in rng.permutation(len(grid)):
        add("recall", grid[i][0] + int(rng.integers(-40, 40)), grid[i][1])
    for length in np.sort(2 ** rng.uniform(9, 13.5, 24)).astype(int):
        add("cliff", length, float(rng.uniform(0.05, 0.95)))
    for start in (600, 900):
        for offset in range(64):
            add("residues", start + offset, 0.4)
    for length in (500, 800, 1200, 2500, 3500, 5000, 7000, 9000):
        for _ in range(2):
            add("warm_cold", length, 0.3)
            again = asks[-1]
            asks.append({**again, "warm": True, "suffix": 1})
    for _ in range(6):
        add("turns", 1500, 0.3, turn=2, label="tell_ask/continue", warm=True, suffix=40)
        asks.append({**asks[-1], "warm": False, "suffix": None, "label": "tell_ask/resend"})
    for load in (3, 5, 8, 16):
        for _ in range(24):
            add("echo", rng.integers(400, 1900), 0.5, load=load)
    for i in range(16):
        add("abort", 900, 0.3, after_abort=True, warm=bool(i % 2), suffix=20)
    for i in range(10):
        add("aa", 600 + 500 * i, 0.5)
        asks.append({**asks[-1]})
    for i in range(12):
        add("tenants", 700, 0.3, tenant="ab"[i % 2], warm=i % 2 == 1, crossed=i % 2 == 1, suffix=20)
    for _ in range(60):
        add("drift", 1000, 0.5)
    if arms:
        for n, d in [(n, d) for n in (600, 1500, 3000, 4800, 6500, 10000) for d in (0.1, 0.5, 0.95)]:
            add("arms", n, d, arm="combined")
            asks.append({**asks[-1], "arm": "pd"})
    return asks


def simulate(code: str, seed: int, *, asks: list[dict] | None = None, second: str | None = None) -> pd.DataFrame:
    """Rows of one deployment with the class `code` (and perhaps another one) at work; "healthy" is allowed."""
    rng = np.random.default_rng([seed, 12])
    private = {name: _parameters(name, rng) for name in (code, second) if name}
    rows = []
    values: list[str] = []
    for ordinal, ask in enumerate(battery(seed) if asks is None else asks):
        state = {
            "ordinal": ordinal,
            "pd": ask.get("arm") == "pd",
            "needle": int(ask["length"] * ask["depth"]),
            "load": ask.get("load", 1),
        }
        expected = str(np.random.default_rng([ask["seed"], 5]).integers(10000, 99999))
        row = {
            "probe": ask["probe"],
            "arm": ask.get("arm", "single"),
            "target_tokens": ask["length"],
            "counted_tokens": ask["length"],
            "prompt_tokens": ask["length"],
            "depth": ask["depth"],
            "needle_token": state["needle"],
            "question": "what is the code?",
            "expected": expected,
            "outcome": "exact",
            "answer": expected,
            "finish_reason": "stop",
            "completion_tokens": 6,
            "turn": ask.get("turn", 1),
            "concurrency": state["load"],
            "ordinal": ordinal,
            "seed": ask["seed"],
            "label": ask.get("label", ""),
            "cached_tokens": (ask["length"] - ask.get("suffix", 1)) // PAGE * PAGE if ask.get("warm") else 0,
            "wanted_cache": "warm" if ask.get("warm") else "cold",
            "accept_length": round(2.6 + rng.normal(0, 0.1), 2),
            "tenant": ask.get("tenant", ""),
        }
        row["cache"] = "warm" if row["cached_tokens"] else "cold"
        if rng.random() < 0.01:
            _wrong(row, "near", rng, values)
        for name in private:
            if row["outcome"] == "exact" and name != "healthy":
                FAULTS[name](row, {**ask, **state}, private[name], rng, values)
        values.append(expected)
        rows.append(row)
    if code == "N5" or second == "N5":
        rows += [{**r, "arm": "reference"} for r in rows if r["probe"] in ("recall", "cliff")]
    return pd.DataFrame(rows)


def _parameters(name, rng):
    return {
        "ceiling": int(rng.choice([1024, 2048, 3072])),
        "pages": int(rng.integers(120, 260)),
        "stash": 4096,
        "k": int(rng.choice([128, 256])),
        "period": int(rng.choice([4, 16, 64])),
        "residue": int(rng.integers(4)),
        "limit": int(rng.choice([2048, 4096])),
        "way": int(rng.integers(2)),
        "kind": str(rng.choice(["garbage", "refusal"])),
        "rate": float(rng.uniform(0.2, 0.35)),
    }


def _wrong(row, outcome, rng, values):
    value = row["expected"]
    texts = {
        "near": value[:-1] + str((int(value[-1]) + 3) % 10),
        "refusal": "I have no prior context.",
        "empty": "",
        "garbage": " ".join(map(str, rng.integers(0, 9, 6))) + " the of",
        "other_needle": str(rng.integers(10000, 99999)),
        "distractor": str(rng.integers(10000, 99999)),
    }
    row["outcome"], row["answer"] = outcome, texts[outcome]


def _foreign(row, rng, values):
    if values:
        row["outcome"], row["answer"], row["answered_from"] = "other_needle", str(rng.choice(values)), "trial:abc"


def f01(row, ask, p, rng, values):
    if ask["length"] > TOPK * RATIO:
        _wrong(row, p["kind"], rng, values)


def f02(row, ask, p, rng, values):
    if ask["needle"] >= p["ceiling"]:
        _wrong(row, rng.choice(["refusal", "other_needle"]), rng, values)


def f03(row, ask, p, rng, values):
    first = int(rng.integers(0, min(60 + ask["ordinal"], 400)))
    if p["way"]:
        row["first_page"] = first
    if first > p["pages"]:
        _wrong(row, "garbage", rng, values)
        row["answer"] = "!!!!!!" if rng.random() < 0.4 else row["answer"]


def f04(row, ask, p, rng, values):
    if rng.random() < 0.9 / (1 + (p["stash"] / ask["length"]) ** 2.2):
        _wrong(row, rng.choice(["other_needle", "refusal", "garbage"]), rng, values)


def f05(row, ask, p, rng, values):
    if ask["length"] > p["k"] * RATIO:
        _wrong(row, rng.choice(["other_needle", "refusal"]), rng, values)


def f06(row, ask, p, rng, values):
    far = ask["length"] - ask["needle"]
    fixed = np.random.default_rng([ask["seed"], 6]).random()
    if fixed < 0.95 / (1 + (2200 / max(far, 1)) ** 3):
        _wrong(row, "other_needle" if fixed < 0.5 else "refusal", rng, values)


def f07(row, ask, p, rng, values):
    if ask["length"] % p["period"] == p["residue"]:
        _wrong(row, "near" if p["way"] else "garbage", rng, values)


def f08(row, ask, p, rng, values):
    if ask["needle"] // CHUNK != (ask["length"] - 1) // CHUNK:
        _wrong(row, p["kind"], rng, values)


def f09(row, ask, p, rng, values):
    if row["cached_tokens"] and (ask.get("suffix") or 0) < WINDOW and ask["probe"] not in ("abort", "tenants"):
        _wrong(row, rng.choice(["refusal", "empty"]), rng, values)


def f10(row, ask, p, rng, values):
    if ask.get("after_abort") and rng.random() < (0.9 if ask.get("warm") else 0.3):
        _wrong(row, rng.choice(["garbage", "refusal"]), rng, values)


def f11(row, ask, p, rng, values):
    if ask.get("crossed"):
        _foreign(row, rng, values)


def f12(row, ask, p, rng, values):
    if (ask.get("after_abort") and rng.random() < 0.5) or (ask["load"] > 1 and rng.random() < 0.2):
        _foreign(row, rng, values) if rng.random() < 0.6 else _wrong(row, "garbage", rng, values)


def f13(row, ask, p, rng, values):
    if ask["pd"] and ask["needle"] // CHUNK != (ask["length"] - 1) // CHUNK:
        _wrong(row, "garbage", rng, values)
        row["answer"] = row["expected"][:2] + " qq zz"


def f14(row, ask, p, rng, values):
    later = ask["needle"] >= CHUNK and not row["cached_tokens"] if p["way"] else ask["length"] > TOPK * RATIO
    if ask["pd"] and later:
        _wrong(row, p["kind"], rng, values)


def f15(row, ask, p, rng, values):
    if (ask["load"] > 1 and rng.random() < 0.15) or (row["cached_tokens"] and rng.random() < 0.06):
        _foreign(row, rng, values) if rng.random() < 0.4 else _wrong(row, rng.choice(KINDS), rng, values)


def f16(row, ask, p, rng, values):
    if rng.random() < 0.06:
        _wrong(row, "garbage", rng, values)
        row["prompt_tokens"] = 1


def f17(row, ask, p, rng, values):
    if ask["load"] in (3, 5) and rng.random() < 0.5:
        _wrong(row, rng.choice(["garbage", "refusal"]), rng, values)


def f18(row, ask, p, rng, values):
    if rng.random() < min(0.8, 0.002 * ask["ordinal"]):
        _wrong(row, "empty" if rng.random() < 0.3 else "garbage", rng, values)
        row["answer"] = row["answer"] and "!!!!!!!!"


def f19(row, ask, p, rng, values):
    if p["way"]:
        row["accept_length"] = 1.0
    elif row["cached_tokens"]:
        row["accept_length"] = 1.2


def f20(row, ask, p, rng, values):
    if np.random.default_rng([ask["seed"], 20]).random() < p["rate"]:
        _wrong(row, "near" if rng.random() < 0.9 else "other_needle", rng, values)


def n1(row, ask, p, rng, values):
    row["prompt_tokens"] = min(row["prompt_tokens"], p["limit"])
    if ask["length"] > p["limit"] and ask["needle"] < ask["length"] - p["limit"]:
        _wrong(row, "refusal", rng, values)


def n2(row, ask, p, rng, values):
    if ask["load"] > 1 and rng.random() < 0.12:
        _wrong(row, "near", rng, values)


def n3(row, ask, p, rng, values):
    if rng.random() < p["rate"]:
        if p["way"]:
            row["outcome"], row["answer"], row["finish_reason"] = rng.choice(["cut", "reasoning_only"]), "", "length"
        else:
            row["outcome"], row["answer"] = "garbage", f"The code is **{row['expected']}**, as stated."


def n4(row, ask, p, rng, values):
    row["cached_tokens"], row["cache"] = 0, "cold"


def n5(row, ask, p, rng, values):
    if np.random.default_rng([ask["seed"], 25]).random() < p["rate"]:
        _wrong(row, "garbage", rng, values)
        row["answer"] = "and then " * 20


FAULTS = {name: globals()[name.lower()] for name in CLASSES}
