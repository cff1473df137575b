"""What a collection says about a lost context: lines of the logs, settings that differ, things that are not there.

Each finding names the file, unit or flag to look at, and the classes of fault that it bears on; `as_evidence` hands the
same to `analysis.diagnose`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from needlework.evidence.collect import Collection
from needlework.evidence.logs import REQUEST_LINE, Category, categories, engines_of, is_log, read_log, scan
from needlework.evidence.settings import (
    DECISIVE,
    KERNEL_SWITCH,
    UNIT_FILTER,
    compare_roles,
    effective,
    unit_environment,
)
from needlework.names import SETTINGS, SIZES, ours, setting

if TYPE_CHECKING:
    import pandas as pd

FEW_LINES = 20  # of fewer lines nothing is said that is not in them


@dataclass(frozen=True)
class Finding:
    """One thing that was found. `where` is the file, unit or log it stands in; `step` what to look at or set next."""

    kind: str  # "log", "setting" or "absence"
    host: str
    role: str
    name: str
    text: str
    where: str = ""
    step: str = ""
    classes: tuple[str, ...] = ()
    count: int = 0
    requests: int = 0
    example: str = ""

    def __str__(self) -> str:
        classes = f" ({', '.join(self.classes)})" if self.classes else ""
        step = f"\n    next: {self.step}" if self.step else ""
        example = f"\n    e.g. {self.example}" if self.example else ""
        return f"{self.host}/{self.role}: {self.text}{classes}{example}{step}"


@dataclass(frozen=True, repr=False)
class Findings:
    """All of a collection, what can lose context first: errors and warnings, differing settings, absences."""

    rows: tuple[Finding, ...]

    def table(self) -> pd.DataFrame:
        """One row per finding: kind, host, role, name, count, requests, classes, text, where, step, example."""
        import pandas as pd

        names = ["kind", "host", "role", "name", "count", "requests", "classes", "text", "where", "step", "example"]
        rows = [[", ".join(v) if isinstance(v := getattr(row, n), tuple) else v for n in names] for row in self.rows]
        return pd.DataFrame(rows, columns=names)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "nothing was found in what came"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(str(row))}</li>" for row in self.rows) + "</ul>"


def findings(collection: Collection) -> Findings:
    """Everything that the logs, the settings and the gaps of a collection say, the most telling first."""
    table = effective(collection)
    rows: list[Finding] = []
    for host, role in _roles(collection):
        rows += _of_log(collection, host, role, table)
    order = list(categories())
    rows.sort(key=lambda row: order.index(row.name) if row.name in order else len(order))
    rows += _of_settings(table)
    for gap in absences(collection).to_dict("records"):
        where = gap["item"]
        rows.append(Finding("absence", gap["host"], gap["role"], where, f"{where}: {gap['finding']}", where))
    return Findings(tuple(rows))


def _roles(collection: Collection) -> list[tuple[str, str]]:
    return list(dict.fromkeys((i["host"], i["role"]) for i in collection.items if i["role"] != "host"))


def _of_log(collection: Collection, host: str, role: str, table: pd.DataFrame) -> Iterator[Finding]:
    log = read_log(collection, host, role)
    if log.empty:
        return
    engines, sources = engines_of(log["message"]), ", ".join(dict.fromkeys(log["source"]))
    own = table[(table["host"] == host) & (table["role"] == role)]
    read = [text for where, text in collection.texts.items() if where[:2] == (host, role)]
    for row in scan(log).to_dict("records"):
        name, count, category = row["category"], row["count"], categories().get(row["category"])
        if not count or (category and category.topic):
            continue
        levels = [f"{row[word]} {word}" for word in ("errors", "warnings") if row[word]]
        many = f"{count:,} line{'s' if count > 1 else ''} of {len(log):,}"
        many += f" ({', '.join(levels)})" if levels else ""
        many += f" in {row['requests']:,} requests" if row["requests"] else ""
        means = category.means + _limits(category, log) if category else f"{name}s that fall in no category here"
        step, classes = (_step(category, engines, own, read), category.classes) if category else ("", ())
        text = f"{name}: {many}: {means}"
        yield Finding("log", host, role, name, text, sources, step, classes, count, row["requests"], row["example"])


def _limits(category: Category, log: pd.DataFrame) -> str:
    """ ", at 2,048 tokens" where the lines say the size at which it happens."""
    if category.limit is None:
        return ""
    said = [m for text in log["message"] if category.words.search(text) and (m := category.limit.search(text))]
    sizes = sorted({int(next(filter(None, match.groups()))) for match in said})
    if not sizes or sizes[-1] > 1 << 40:
        return ""
    return f", at {sizes[0]:,} tokens" if len(sizes) == 1 else f", at {sizes[0]:,} to {sizes[-1]:,} tokens"


def _step(category: Category, engines: tuple[str, ...], table: pd.DataFrame, read: list[str]) -> str:
    """The setting that decides, with its value and file, or that nothing that was read sets it: where a text names it
    that no setting was read from, nothing is said."""
    for engine in engines:
        if name := category.decides.get(engine):
            known = table[table["setting"] == setting(name)]
            if known.empty:
                names = "|".join(name for name in (name, *SETTINGS.get(setting(name), ())) if len(name) > 3)
                if any(re.search(names.replace("_", "[-_]"), text, re.IGNORECASE) for text in read):
                    return ""
                return f"{name} is set nowhere that was read ({engine}'s own default holds)"
            row = known.iloc[0]
            return f"{name} = {row['value']} ({row['source']}{' ' + row['file'] if row['file'] else ''})"
    return ""


def _of_settings(table: pd.DataFrame) -> Iterator[Finding]:
    differing = compare_roles(table)
    for row in differing[differing["weight"] == "decisive"].to_dict("records"):
        name, roles = row["setting"], [role for role in ("prefill", "decode", "combined") if role in row]
        sides = " against ".join(f"{row[role] or 'not set'} ({role})" for role in roles)
        places = table[(table["setting"] == name) & table["role"].isin(roles)].itertuples()
        where = "; ".join(f"{place.role}: {place.source} {place.file}".strip() for place in places)
        step = f"set {name} alike on both sides, or show that they may differ ({where})"
        yield Finding(
            "setting",
            "pair",
            "/".join(roles),
            name,
            f"{name} differs: {sides}",
            where,
            step,
            tuple(DECISIVE.get(name, ())),
        )


def as_evidence(collection: Collection) -> dict[str, Any]:
    """The collection as `analysis.diagnose(trials, evidence=…)` takes it.

    `config`: sizes that the roles state alike; `logs`: category and meaning -> lines, a zero only where an engine of
    these logs would write such lines; `findings`: class of fault -> sentences that name file, unit or flag.
    """
    table = effective(collection)
    config: dict[str, int] = {}
    for size in SIZES:
        told = set(table.loc[table["setting"].map(lambda key, size=size: ours(key) == size), "value"])
        if len(told) == 1 and (value := told.pop()).isdigit():
            config[size] = int(value)
    logs: dict[str, int] = {}
    for host, role in _roles(collection):
        log = read_log(collection, host, role)
        engines = engines_of(log["message"])
        counts = scan(log).set_index("category")["count"].to_dict()
        for category in categories().values():
            count = int(counts[category.name])
            if engines and not category.topic and (count or category.written_by(engines)):
                key = f"{category.name}: {category.means}"
                logs[key] = logs.get(key, 0) + count
    by_class: dict[str, list[str]] = {}
    for row in findings(collection).rows:
        for code in row.classes:
            by_class.setdefault(code, []).append(
                f"{row.host}/{row.role}: {row.text}" + (f"; {row.step}" if row.step else "")
            )
    return {"config": config, "logs": logs, "findings": by_class}


def absences(collection: Collection) -> pd.DataFrame:
    """What is not there and should make a reader stop: host, role, item, finding (one sentence each)."""
    import pandas as pd

    rows: list[tuple[str, str, str, str]] = []
    for item in collection.items:
        where = (item["host"], item["role"], item["item"])
        said = item["reason"] or "empty answer"
        if item["state"] == "missing" and item["item"].startswith("stat:"):
            rows.append(
                (*where, "the named file does not exist at this path: it was moved, renamed, or is not what runs")
            )
        elif item["item"] == "connect":
            rows.append((*where, f"nothing came from this host: {said}"))
        elif item["state"] != "ok" and (
            is_log(item["item"])
            or item["item"] in ("unit-cat", "pod", "container")
            or (item["item"] == "http-server_info" and item["state"] != "missing")
        ):
            rows.append((*where, f"{item['item']} gave nothing ({said})"))
        if item["item"] == "unit-show":
            active = re.search(r"(?m)^ActiveState=(.*)$", collection.text(*where))
            if active and active[1] != "active":
                rows.append(
                    (*where, f"the unit exists but is {active[1]}: its configuration is not what serves requests")
                )
        named = unit_environment(collection.text(*where)) if item["item"] == "unit-cat" else {}
        switches = any(UNIT_FILTER.search(name) or KERNEL_SWITCH.search(name) for name in named)
        if item["item"] == "unit-cat" and item["state"] == "ok" and not switches:
            rows.append(
                (
                    *where,
                    "no Environment= of the unit names a kernel or engine switch: set elsewhere, or not at all",
                )
            )
    units = {(i["host"], i["role"]): i["unit"] for i in collection.items}
    for host, role in _roles(collection):
        log = read_log(collection, host, role)
        rows += [
            (host, role, "journal" if "journal" in set(log["source"]) else "logs", said)
            for said in _foreign(log, units[host, role])
        ]
    return pd.DataFrame(rows, columns=["host", "role", "item", "finding"])


def _foreign(log: pd.DataFrame, unit: str | None) -> Iterator[str]:
    others = log[log["unit"].notna() & (log["unit"] != unit)] if unit else log.iloc[:0]
    if len(others):
        names = ", ".join(sorted(set(others["unit"]))[:3])
        yield f"{len(others)} of {len(log)} lines carry the unit of another service ({names})"
    engines = engines_of(log["message"])
    asked = log["message"].str.contains(REQUEST_LINE).sum() if len(log) else 0
    if len(log) >= 5 and not engines and not asked:
        unknown = f"none of {len(log)} lines reads like the log of an engine that is known here"
        yield f"{unknown}: it may belong to another service"
        return
    if len(log) < FEW_LINES or not engines:
        return
    counts = scan(log).set_index("category")["count"]
    written = [
        c.name for c in categories().values() if not c.topic and c.classes and not set(c.engines).isdisjoint(engines)
    ]
    loud = counts[[name for name in counts.index if name not in categories() or not categories()[name].topic]]
    if not loud.sum() and written:
        # nothing is said of what this engine would not write, nor of a window without requests
        reach = f"{asked:,} of them about requests" if asked else "none of them about a request: they clear nothing"
        quiet = f"no error and no warning in the {len(log):,} lines read ({reach})"
        yield f"{quiet}, nothing of {', '.join(written)}, which {engines[0]} would write"
