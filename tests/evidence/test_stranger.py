"""Sixteen public deployments and logs, marked by somebody who had not seen the code (docs/sets.md): all is found, and
nothing is said that is not so."""

import json
import re
from pathlib import Path

import pytest
from needlework.evidence import collect, effective, load_plan
from needlework.evidence.findings import findings
from needlework.names import setting

SET = Path(__file__).parents[1] / "data" / "stranger"
# The kinds as their reader called them, and our categories.
KINDS = {
    "evict": "eviction retraction preemption memory allocation expired",
    "over limit": "length rejected",
    "other error": "error",
    "other warning": "warning",
    "cache load": "cache load",
}


def marks(kinds: str) -> set[str]:
    words = set(kinds.split("|"))
    return words | {name for name, called in KINDS.items() if words & {called, *called.split()}}


def agree(expected: object, value: str) -> bool:
    return any(value.lower() in (word, f"{word}.0") for word in str(expected).lower().split("|"))


@pytest.mark.parametrize("case", sorted(p.name for p in SET.iterdir()))
def test_what_an_engineer_would_mark_is_marked_and_nothing_else(case):
    expected = json.loads((SET / case / "expected.json").read_text())
    collection = collect(load_plan(SET / case / "incident.toml"))
    told, table = findings(collection).rows, effective(collection)
    missed, false = [], []
    for role, wanted in expected["settings"].items():
        own = table[table["role"] == role].set_index("setting")["value"].to_dict()
        for names, value in wanted.items():
            known = {setting(name) for name in names.split("|")} | set(names.split("|"))
            said = [v for k, v in own.items() if known & {k, k.rsplit(".", 1)[-1], k.split(".")[0]}]
            if not any(agree(value, v) for v in said) and not (value == "ngram" and "ngram" in own.values()):
                missed.append((role, names, value, said))
    for role, wanted in expected["logs"].items():
        lines = [row for row in told if row.kind == "log" and row.role == role]
        kinds = set()
        for one in wanted:
            kinds |= marks(one["kind"])
            fitting = [row for row in lines if row.name in marks(one["kind"])]
            counts = {row.count for row in fitting} | {sum(row.count for row in fitting)}
            counts |= {sum(row.count for row in fitting if row.classes)}
            if not counts & {one["lines"], one.get("lines_alt")}:
                missed.append((role, one, [(row.name, row.count) for row in lines]))
            false += [row for row in fitting if row.requests and row.requests != one.get("requests", row.requests)]
        false += [row for row in lines if row.classes and row.name not in kinds]
    differing = {row.name for row in told if row.kind == "setting"}
    missed += [name for name in expected["differences"] if not differing & {setting(part) for part in name.split("|")}]
    false += [name for name in differing if f"{name} differs" in expected["must_not"]]
    files = "\n".join(text for where, text in collection.texts.items() if not where[2].startswith("stat:"))
    for row in told:
        if match := re.match(r"(\w+) is set nowhere", row.step):
            false += [row] if match[1] in files else []
        false += [row] if re.search(r"no error and no warning|reads like the log of|another service", row.text) else []
        false += [row] if row.name == "context shift" and "2,047" in row.text else []
    assert (missed, false) == ([], [])
