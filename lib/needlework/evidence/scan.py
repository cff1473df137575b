"""Read collected logs: categories with counts and times, joins to requests and probes, and absence as a finding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from needlework.evidence.collect import Collection
from needlework.evidence.effective import UNIT_FILTER, unit_environment

if TYPE_CHECKING:
    import pandas as pd  # half a second, which redacting does without

# Whole words, so that "inf" is not found in "info" nor "nan" in "nanoseconds".
CATEGORIES: dict[str, re.Pattern[str]] = {
    "nan": re.compile(r"(?i)\bnans?\b"),
    "inf": re.compile(r"(?i)(?<![\w.])[-+]?inf(?:inity)?\b"),
    "assert": re.compile(r"(?i)\bassert(?:ion)?(?:error)?\b|\bassertion failed"),
    "abort": re.compile(r"(?i)\babort(?:ed|ing|s)?\b|abort_request"),
    "cancel": re.compile(r"(?i)\bcancell?(?:ed|ing|ation)?\b"),
    "corrupt": re.compile(r"(?i)\bcorrupt(?:ed|ion)?\b|checksum"),
    "mismatch": re.compile(r"(?i)\bmis-?match(?:ed)?\b|does not match"),
    "evict": re.compile(r"(?i)\bevict(?:ed|ion|ing)?\b|\bretract(?:ed|ion|ing)?\b"),
    "out of memory": re.compile(r"(?i)out of memory|\boom\b|no memory|OutOfMemory"),
    "traceback": re.compile(r"Traceback \(most recent call last\)|^\s+File \"[^\"]+\", line \d+"),
    "exception": re.compile(r"(?i)\bexception\b|\b\w+Error\b"),
    "overflow": re.compile(r"(?i)\boverflow(?:ed)?\b|index out of (?:range|bounds)"),
    "invalid": re.compile(r"(?i)\binvalid\b|illegal memory access"),
    "transfer": re.compile(
        r"(?i)transfer (?:failed|timed? ?out)|bootstrap (?:failed|timed? ?out)|KVTransferError|lost connection"
    ),
    "timeout": re.compile(r"(?i)\btimed? ?out\b|\btimeout\b"),
    "warning": re.compile(r"(?i)\bwarn(?:ing)?\b"),
    "error": re.compile(r"(?i)\berror\b|\bfatal\b|\bcritical\b"),
    "chunk": re.compile(r"(?i)\bchunk(?:s|ed)?\b"),
    "radix": re.compile(r"(?i)\bradix\b"),
    "prefix": re.compile(r"(?i)\bprefix(?:es)?\b"),
}
TOPICS = ("warning", "chunk", "radix", "prefix")  # healthy engines speak of these too
REQUEST_ID = re.compile(r"(?i)\b(?:rid|request[_ -]?id|req[_ -]?id)\b[=: '\"]+([A-Za-z0-9][\w.-]{5,80})")
ENGINE_LOG = re.compile(
    r"(?i)sglang|vllm|uvicorn|HTTP/1\.[01]\"|prefill batch|decode batch|launch_server|needlework|cuda|torch"
)
MAX_EXAMPLE_CHARS = 200


def read_log(collection: Collection, host: str, role: str) -> pd.DataFrame:
    """A role's log: columns time (UTC, pandas Timestamp or NaT), unit, identifier, priority, message."""
    import pandas as pd

    rows = []
    for line in collection.text(host, role, "journal").splitlines():
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if not isinstance(entry, dict):
            continue
        stamp = str(entry.get("__REALTIME_TIMESTAMP", ""))
        time = pd.Timestamp(int(stamp), unit="us", tz="UTC") if stamp.isdigit() and len(stamp) <= 17 else pd.NaT
        rows.append(
            (
                time,
                entry.get("_SYSTEMD_UNIT"),
                entry.get("SYSLOG_IDENTIFIER"),
                entry.get("PRIORITY"),
                str(entry.get("MESSAGE", "")),
            )
        )
    return pd.DataFrame(rows, columns=["time", "unit", "identifier", "priority", "message"])


def scan(log: pd.DataFrame) -> pd.DataFrame:
    """Lines by category: category, count, first, last, requests (distinct ids named in those lines), example.

    A line may fall in several categories. Every category has a row, also when its count is 0: absence is a finding.
    """
    import pandas as pd

    rows = []
    for category, pattern in CATEGORIES.items():
        hit = log[log["message"].map(lambda text, p=pattern: bool(p.search(text)))]
        ids = {match[1] for text in hit["message"] for match in REQUEST_ID.finditer(text)}
        example = hit["message"].iloc[0][:MAX_EXAMPLE_CHARS] if len(hit) else ""
        first, last = (hit["time"].min(), hit["time"].max()) if len(hit) else (pd.NaT, pd.NaT)
        rows.append((category, len(hit), first, last, len(ids), example))
    return pd.DataFrame(rows, columns=["category", "count", "first", "last", "requests", "example"])


def join_trials(log: pd.DataFrame, trials: pd.DataFrame, slack_s: float = 1.0) -> pd.DataFrame:
    """Log lines that belong to a trial: by request id when the line names one, else by time.

    A line falls to a trial when its time lies within [time, time + latency_s], widened by `slack_s` on both sides.
    Columns: trial_id, outcome, by ("id" or "time"), time, message.
    """
    import pandas as pd

    outcomes = trials["outcome"] if "outcome" in trials else pd.Series([None] * len(trials), index=trials.index)
    ids = dict(zip(trials["trial_id"].map(str), outcomes, strict=True))
    rows, named = [], set()
    for number, (time, message) in enumerate(zip(log["time"], log["message"], strict=True)):
        for match in REQUEST_ID.finditer(message):
            if match[1] in ids:
                named.add(number)
                rows.append((match[1], ids[match[1]], "id", time, message[:MAX_EXAMPLE_CHARS]))
    if "time" not in trials or log.empty:
        return pd.DataFrame(rows, columns=["trial_id", "outcome", "by", "time", "message"])
    order = log["time"].argsort(kind="stable").to_numpy()
    stamps = log["time"].iloc[order].to_numpy("datetime64[ns]")
    start = pd.to_datetime(trials["time"], utc=True, errors="coerce")
    seconds = trials["latency_s"] if "latency_s" in trials else pd.Series(0.0, index=trials.index)
    end = start + pd.to_timedelta(pd.to_numeric(seconds, errors="coerce").fillna(0), unit="s")
    slack = np.timedelta64(int(slack_s * 1e9), "ns")
    first = np.searchsorted(stamps, start.to_numpy("datetime64[ns]") - slack, "left")
    last = np.searchsorted(stamps, end.to_numpy("datetime64[ns]") + slack, "right")
    for trial, low, high, known in zip(trials["trial_id"].map(str), first, last, start.notna(), strict=True):
        for number in order[low:high] if known else ():
            if number not in named:
                row = log.iloc[number]
                rows.append((trial, ids[trial], "time", row["time"], row["message"][:MAX_EXAMPLE_CHARS]))
    return pd.DataFrame(rows, columns=["trial_id", "outcome", "by", "time", "message"])


def absences(collection: Collection) -> pd.DataFrame:
    """What is not there and should make a reader stop: host, role, item, finding (one sentence each)."""
    import pandas as pd

    rows: list[tuple[str, str, str, str]] = []
    for item in collection.items:
        where = (item["host"], item["role"], item["item"])
        if item["state"] == "missing" and item["item"].startswith("stat:"):
            rows.append(
                (
                    *where,
                    "the named file does not exist at this path: it was moved, renamed, or is not what runs",
                )
            )
        elif item["item"] == "connect":
            rows.append((*where, f"nothing came from this host: {item['reason']}"))
        elif item["state"] in ("failed", "missing", "empty") and item["item"] in (
            "unit-cat",
            "journal",
            "http-server_info",
        ):
            rows.append((*where, f"{item['item']} gave nothing ({item['reason'] or 'empty answer'})"))
        if item["item"] == "unit-show":
            active = re.search(r"(?m)^ActiveState=(.*)$", collection.text(*where))
            if active and active[1] != "active":
                rows.append(
                    (*where, f"the unit exists but is {active[1]}: its configuration is not what serves requests")
                )
        if item["item"] == "unit-cat" and item["state"] == "ok":
            text = collection.text(*where)
            if not any(UNIT_FILTER.search(name) for name in unit_environment(text)):
                rows.append(
                    (
                        *where,
                        "no Environment= of the unit names a kernel or engine switch: set elsewhere, or not at all",
                    )
                )
        if item["item"] == "journal" and item["state"] == "ok":
            rows += [
                (*where, sentence)
                for sentence in _foreign(read_log(collection, item["host"], item["role"]), item["unit"])
            ]
    return pd.DataFrame(rows, columns=["host", "role", "item", "finding"])


def _foreign(log: pd.DataFrame, unit: str | None) -> Iterable[str]:
    others = log[log["unit"].notna() & (log["unit"] != unit)] if unit else log.iloc[:0]
    if len(others):
        names = ", ".join(sorted(set(others["unit"]))[:3])
        yield f"{len(others)} of {len(log)} lines carry the unit of another service ({names})"
    engine = log["message"].map(lambda text: bool(ENGINE_LOG.search(text)))
    if len(log) >= 5 and not engine.any():
        yield f"none of {len(log)} lines reads like an engine's log: it belongs to another service"
    named = scan(log).set_index("category")["count"]
    if len(log) >= 20 and named.drop(list(TOPICS)).sum() == 0:
        yield f"no line of {len(log)} names an error, abort, eviction or mismatch: the failure leaves no trace here"
