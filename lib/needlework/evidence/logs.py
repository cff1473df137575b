"""Read collected logs: what their errors and warnings say, by category; joins to requests; what is not in them.

The words are data (`logs.toml`); a category that an engine would not write is never called absent of its log.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.evidence.collect import Collection

if TYPE_CHECKING:
    import pandas as pd  # half a second, which redacting does without

COLUMNS = ("time", "unit", "identifier", "level", "message", "source")
MAX_EXAMPLE_CHARS = 200
REQUEST_ID = re.compile(
    r"(?i)\b(?:rid|request[_ -]?id|req[_ -]?id|bootstrap_room)\b[=: '\"]+([A-Za-z0-9][\w.-]{5,80})"
    r"|\brequest:? ((?:chatcmpl|cmpl)-[\w-]{6,80}|\d{1,20}\b)|\|\s*task (\d+)\s*\|"
)
# What engines print of their arguments, and prompts that they were told to print, tell nothing of what happened.
NO_EVENT = re.compile(
    r"non-default args|server_args=|args: Namespace|engine \(v\S+\) with config|LLM Args|server config\"? env"
    r"|starting runner"
    r"|Received request|\bprompt: ['\"]|\"messages\":|'messages':"
)
NEGATED = re.compile(
    r"(?i)\b(?:no|zero|without|0)\s+(?:\w+\s){0,2}(?:nans?|infs?|errors?|failures?|evict\w+|mismatch\w*|retr\w+|preempt\w+|"
    r"abort\w*|timeouts?|overflows?|corruption)\b|\b(?:retr(?:y\w*|ie[sd]|act\w*)|preempt\w+|evict\w*|abort\w*|fail\w*|errors?|timeouts?|"
    r"cancel\w*|truncat\w+)[ _-]?\w{0,12}\W{0,3}[:=] ?(?:0\b|false|none|off)"
)
_LEVELS = {"error": "error|err|fatal|critical|crit|alert|emerg|severe|panic", "warning": "warning|warn"}
LEVEL = re.compile(
    r"(?P<glog>^[EFW])\d{4,8} |level[\"']?[=:] ?\"?(?P<field>[A-Za-z]+)"
    r"|\[?\b(?P<word>CRITICAL|FATAL|ERROR|WARNING|WARN)\b"
    r"|(?:^|[\d\]] )(?P<llama>[EW]) (?:slot|srv|que|res|init|main|llama|common|load|print|sched|ggml)"
    r"|^\[?rank\d+\]?:\[(?P<torch>[EW])|(?P<python>\b[A-Z]\w+(?:Error|Exception)\b[:(]|Traceback \(most recent)"
)
_NUMBER, _ID = re.compile(r"\d+"), re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f-]{12,}\b")
REQUEST_LINE = re.compile(
    r"/v1/(?:chat/)?completions|/generate\b|/api/(?:chat|generate)|Prefill batch|prompt eval|"
    r"(?:Added|Finished|Received) request|chatcmpl-|prompt tokens|processing task"
)


@dataclass(frozen=True)
class Category:
    """A kind of log line: what it means, the classes of fault it bears on, who writes it, and what decides about it."""

    name: str
    words: re.Pattern[str]
    means: str = ""
    classes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    decides: dict[str, str] = field(default_factory=dict)
    limit: re.Pattern[str] | None = None
    topic: bool = False

    def written_by(self, engines: Iterable[str]) -> bool:
        return "*" in self.engines or not set(self.engines).isdisjoint(engines)


@functools.cache
def _words() -> tuple[dict[str, Category], dict[str, re.Pattern[str]]]:
    table = tomllib.loads(resources.files(__package__).joinpath("logs.toml").read_text("utf-8"))
    categories = {}
    for row in table["category"]:
        row.pop("source", None)
        words, limit = re.compile("|".join(row.pop("words")), re.IGNORECASE), row.pop("limit", None)
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        categories[row["name"]] = Category(**fields, words=words, limit=re.compile(limit) if limit else None)
    return categories, {name: re.compile(sign, re.IGNORECASE) for name, sign in table["engine"].items()}


def categories() -> dict[str, Category]:
    """Every kind of line that is looked for, in the order of what can lose context."""
    return _words()[0]


def _shape(text: str) -> str:
    """A line without its numbers and ids, but for what is zero: a log has few shapes, and each is looked at once."""
    return _NUMBER.sub(lambda match: "0" if match[0].strip("0") == "" else "7", _ID.sub("7", text))


@functools.lru_cache(1 << 16)
def _signed(shape: str) -> tuple[str, ...]:
    return tuple(name for name, sign in _words()[1].items() if sign.search(shape))


@functools.lru_cache(1 << 16)
def _named(shape: str) -> tuple[str, ...]:
    """The categories of a line of this shape."""
    if NO_EVENT.search(shape):
        return ()
    shape = NEGATED.sub("", shape)
    return tuple(name for name, category in categories().items() if category.words.search(shape))


def engines_of(messages: Iterable[str]) -> tuple[str, ...]:
    """The engines whose signs stand in log lines, the most frequent first."""
    seen = Counter(name for text in messages for name in _signed(_shape(text)))
    return tuple(sorted(seen, key=lambda name: (name == "server", -seen[name])))  # what any engine writes comes last


# --- lines ---------------------------------------------------------------------------------------------------------

_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_CRI = re.compile(rf"({_ISO}) (?:stdout|stderr) ([FP]) (.*)", re.DOTALL)
_STAMPED = re.compile(rf"(?:\[pod/\S+\] |[\w.-]+ +\| )?({_ISO}) (.*)", re.DOTALL)
_PREFIX = re.compile(r"(?:\[pod/\S+\] |[\w.-]{1,60} +\| )(.*)", re.DOTALL)
_SHORT = re.compile(r"([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?) (\S+) ([^\s\[:]+)(?:\[\d+\])?: (.*)", re.DOTALL)
_SHORT_ISO = re.compile(rf"({_ISO}) (\S+) ([^\s\[:]+)\[\d+\]: (.*)", re.DOTALL)
_INSIDE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?Z?")


def lines_of(text: str) -> Iterator[dict[str, Any]]:
    """The entries of a log as a dict each: message, and where the form tells it time, unit, identifier and level.

    Read are journalctl's json and short forms, docker's and Kubernetes' container logs with or without times, logs of
    one JSON object a line, and plain text.
    """
    part = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        entry = _of_json(line) if line.lstrip().startswith("{") else None
        if entry is None and (match := _CRI.fullmatch(line)):
            if match[2] == "P":  # a long line in several pieces
                part += match[3]
                continue
            entry, part = {"time": match[1], "message": part + match[3]}, ""
        if entry is None and (match := _SHORT.fullmatch(line) or _SHORT_ISO.fullmatch(line)):
            entry = {"time": match[1] if match[1][0].isdigit() else None, "identifier": match[3], "message": match[4]}
        if entry is None and (match := _STAMPED.fullmatch(line)):
            entry = {"time": match[1], "message": match[2]}
        if entry is None:
            match = _PREFIX.fullmatch(line)
            entry = {"message": match[1] if match else line}
        if not entry.get("time") and (match := _INSIDE.search(entry["message"][:120])):
            entry["time"] = match[0]
        yield entry


def _of_json(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if "MESSAGE" in row:
        told = {"time": "__REALTIME_TIMESTAMP", "unit": "_SYSTEMD_UNIT", "identifier": "SYSLOG_IDENTIFIER"}
        found = {name: row.get(key) for name, key in told.items()}
        return {**found, "message": str(row["MESSAGE"]), "priority": str(row.get("PRIORITY", ""))}
    if isinstance(row.get("log"), str) and ("stream" in row or "time" in row):  # docker's json-file
        inner = next(lines_of(row["log"]), {"message": row["log"].rstrip("\n")})
        return {**inner, "time": row.get("time") or inner.get("time")}
    fields = row.get("fields")
    flat = {**(fields if isinstance(fields, dict) else {}), **row}
    message = next(
        (flat[key] for key in ("msg", "message", "event", "text", "log") if isinstance(flat.get(key), str)), ""
    )
    rest = " ".join(f"{key}={flat[key]}" for key in ("error", "err", "exception", "target") if flat.get(key))
    time = next((flat[key] for key in ("time", "ts", "timestamp", "@timestamp") if flat.get(key)), None)
    level = next((flat[key] for key in ("level", "severity", "lvl", "levelname") if flat.get(key)), "")
    return {"time": time, "message": f"{message} {rest}".strip(), "level": str(level)} if message or rest else None


def level_of(message: str, stated: str = "", priority: str = "") -> str:
    """ "error", "warning" or "": as the line says it, else as its form states it."""
    match = LEVEL.search(message[:400])
    kind = next((k for k in match.groupdict() if match[k]), "") if match else ""
    word = match[kind].lower() if match and kind else stated.lower()
    if kind in ("glog", "llama", "torch"):
        return "warning" if word == "w" else "error"
    if kind == "python" or any(word == w for w in _LEVELS["error"].split("|")):
        return "error"
    if any(word == w for w in _LEVELS["warning"].split("|")):
        return "warning"
    return "error" if priority in ("0", "1", "2", "3") else "warning" if priority == "4" else ""


def is_log(item: str) -> bool:
    return item == "journal" or item.startswith("log:")


def read_log(collection: Collection, host: str, role: str) -> pd.DataFrame:
    """A role's logs: columns time (UTC, pandas Timestamp or NaT), unit, identifier, level ("error", "warning" or ""),
    message, source (the item it was read from). A file whose lines stand in the journal as well is left out."""
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    known: set[str] = set()
    items = [item for h, r, item in collection.texts if (h, r) == (host, role) and is_log(item)]
    for item in sorted(items, key=lambda name: name != "journal"):
        entries = list(lines_of(collection.text(host, role, item)))
        told = [entry["message"].strip() for entry in entries]
        if known and told and sum(text in known for text in told) > 0.9 * len(told):
            continue
        known.update(told)
        rows += [
            (entry.get("time"), entry.get("unit"), entry.get("identifier"), _level(entry), entry["message"], item)
            for entry in entries
        ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    digits = table["time"].map(lambda t: isinstance(t, str) and t.isdigit() and len(t) <= 17)
    micro = pd.to_datetime(
        pd.to_numeric(table["time"].where(digits), errors="coerce"), unit="us", utc=True, errors="coerce"
    )
    stamps = table["time"].where(~digits).map(lambda t: t.replace(",", ".") if isinstance(t, str) else None)
    table["time"] = micro.fillna(pd.to_datetime(stamps, utc=True, errors="coerce", format="ISO8601"))
    return table


def _level(entry: dict[str, Any]) -> str:
    return level_of(entry["message"], entry.get("level") or "", entry.get("priority") or "")


def scan(log: pd.DataFrame) -> pd.DataFrame:
    """Lines by category: category, count, errors, warnings, first, last, requests (distinct ids in them), example.

    A line may fall in several categories; errors and warnings that fall in none are the rows "other error" and "other
    warning". Every category has a row, also when its count is 0.
    """
    import pandas as pd

    messages = log["message"].tolist()
    hits: dict[str, list[int]] = {name: [] for name in [*categories(), "other error", "other warning"]}
    for number, (text, level) in enumerate(zip(messages, log["level"], strict=True)):
        named = _named(_shape(text))
        for name in named:
            hits[name].append(number)
        if level and not any(not categories()[name].topic for name in named):
            hits[f"other {level}"].append(number)
    rows = []
    for name, numbers in hits.items():
        part = log.iloc[numbers]
        levels = part["level"].value_counts()
        first, last = (part["time"].min(), part["time"].max()) if numbers else (pd.NaT, pd.NaT)
        example = messages[numbers[0]][:MAX_EXAMPLE_CHARS] if numbers else ""
        rows.append((name, len(numbers), int(levels.get("error", 0)), int(levels.get("warning", 0)), first, last,
                     _requests(messages[n] for n in numbers), example))  # fmt: skip
    columns = ["category", "count", "errors", "warnings", "first", "last", "requests", "example"]
    return pd.DataFrame(rows, columns=columns)


def _requests(messages: Iterable[str]) -> int:
    """How many requests lines name: SGLang's have an id and a room each, which are not two."""
    found = [match for text in messages for match in REQUEST_ID.finditer(text)]
    rooms = {match[1] for match in found if "bootstrap_room" in match[0].lower()}
    return max(len(rooms), len({match[1] or match[2] or match[3] for match in found} - rooms))


def ids_in(text: str) -> Iterator[str]:
    """The ids by which a line names requests."""
    return (match[1] or match[2] or match[3] for match in REQUEST_ID.finditer(text))


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
        for found in ids_in(message):
            if found in ids:
                named.add(number)
                rows.append((found, ids[found], "id", time, message[:MAX_EXAMPLE_CHARS]))
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
