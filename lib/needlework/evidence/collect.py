"""One read-only call instead of three shells: ask every host and role at once, keep what came, say what did not."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework.evidence.hosts import Answer, Folder, Shell, unpacked
from needlework.evidence.plan import Host, Plan, Role
from needlework.evidence.redaction import Redactor

HTTP_ROUTES = ("server_info", "model_info", "v1/models", "metrics")
JOURNAL_FIELDS = ("__REALTIME_TIMESTAMP", "_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER", "PRIORITY", "_PID", "MESSAGE")
MAX_MESSAGE_CHARS = 4000
WRAPPER = re.compile(r"\.(?:sh|bash)$")
LOG_FILE = re.compile(
    r"(?i)(?:\.(?:log|out|err)(?:[.-]\d+)*|/logs?/[^/]+?|/(?:stdout|stderr|output)(?:\.txt)?)(?:\.(?:gz|xz|bz2))?$"
)
# An engine's own file of options, where a command or a script names it.
OPTIONS_FILE = re.compile(
    r"(?:--(?:config|config[_-]file|extra[_-]llm[_-]api[_-]options|extra[_-]engine[_-]args|lmcache[_-]config)[ =]"
    r"|\bLMCACHE_CONFIG_FILE=)[\"']?(/[^\s\"']+)"
)
MAX_FILES = 100


@dataclass(frozen=True)
class Collection:
    """What a collection gave: `items`, one row per thing asked for; `texts`, redacted, by (host, role, item)."""

    plan_name: str
    items: list[dict[str, Any]]
    texts: dict[tuple[str, str, str], str]
    replaced: dict[str, dict[str, int]]

    def text(self, host: str, role: str, item: str) -> str:
        return self.texts.get((host, role, item), "")

    def write(self, folder: str | Path) -> Path:
        """Write as `<folder>/<host>/<role>/<item>` with `collection.json`; refuses a folder that already holds one."""
        folder = Path(folder)
        if (folder / "collection.json").exists():
            raise ValueError(f"{folder} already holds a collection; choose another folder, nothing was overwritten")
        for (host, role, item), text in self.texts.items():
            path = folder / host / role / item_file(item)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        record = {"schema": 1, "plan": self.plan_name, "items": self.items, "replaced": self.replaced}
        (folder / "collection.json").write_text(
            json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return folder

    @classmethod
    def read(cls, folder: str | Path) -> Collection:
        """Read what `write` wrote. Raises ValueError with one sentence when the folder is not a collection."""
        folder = Path(folder)
        try:
            record = json.loads((folder / "collection.json").read_text(encoding="utf-8"))
            items = record["items"]
            texts = {}
            for row in items:
                path = folder / row["host"] / row["role"] / item_file(row["item"])
                if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                    texts[row["host"], row["role"], row["item"]] = path.read_text(encoding="utf-8")
            return cls(record["plan"], items, texts, record["replaced"])
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no collection (no collection.json)") from None
        except (json.JSONDecodeError, RecursionError, KeyError, TypeError, UnicodeDecodeError):
            raise ValueError(
                f"{folder}/collection.json is damaged; collect again or restore it from the bundle"
            ) from None


def item_file(item: str) -> str:
    """An item's name as one safe file name: a path on the host becomes its redacted last part and a digest."""
    if re.fullmatch(r"[a-z0-9_.-]{1,60}", item) and not item.startswith("."):
        return item
    base = re.sub(r"[^A-Za-z0-9_.-]", "_", item.rsplit("/", 1)[-1])[-60:]
    return f"{hashlib.sha256(item.encode()).hexdigest()[:8]}-{base}"


def collect(plan: Plan, progress: Callable[[str], None] | None = None) -> Collection:
    """Run the plan: all hosts at once, each within its own time; a dead host costs its own rows only.

    Only the commands of `hosts.COMMANDS` are run, all of them readers. Everything is redacted, in a fixed order and
    with one set of placeholders, before it is returned; nothing is written here.
    """
    raw: dict[str, list[tuple[Role | None, str, Answer]]] = {}
    if progress:
        longest = max(host.timeout_s for host in plan.hosts)
        progress(f"asking {len(plan.hosts)} hosts side by side, at most {longest:g} s each")
    with ThreadPoolExecutor(max_workers=min(32, len(plan.hosts))) as pool:
        futures = {pool.submit(_ask_host, host, plan): host for host in plan.hosts}
        for done, future in enumerate(as_completed(futures), 1):
            host = futures[future]
            raw[host.name] = future.result()
            if progress:
                came = sum(answer.state == "ok" for _, _, answer in raw[host.name])
                progress(f"{done}/{len(plan.hosts)} {host.name}: {came} of {len(raw[host.name])} items")
    return _redacted(plan, raw)


def _ask_host(host: Host, plan: Plan) -> list[tuple[Role | None, str, Answer]]:
    rows: list[tuple[Role | None, str, Answer]] = []
    try:
        shell: Shell | Folder = Folder(host) if host.via == "folder" else Shell(host)
    except OSError as error:
        return [(None, "connect", Answer(error=str(error)))]
    with shell.connected(), ThreadPoolExecutor(max_workers=len(host.roles)) as pool:
        if isinstance(shell, Shell) and host.via in ("docker", "kubectl"):
            for part in pool.map(lambda role: _ask_role(shell.inside(role), role, plan, host), host.roles):
                rows += part
            return rows
        kernel = shell.run("kernel")
        if kernel.error and host.via == "ssh":  # nothing else can come from a host that cannot be reached
            return [(None, "connect", kernel)]
        rows += [(None, "kernel", kernel), (None, "gpu", shell.run("gpu"))]
        for part in pool.map(lambda role: _ask_role(shell, role, plan, host), host.roles):
            rows += part
    return rows


def _ask_role(shell: Shell | Folder, role: Role, plan: Plan, host: Host) -> list[tuple[Role | None, str, Answer]]:
    rows: list[tuple[Role | None, str, Answer]] = []

    def ask(item: str, command: str, **slots: str) -> Answer:
        answer = shell.run(command, **slots)
        rows.append((role, item, answer))
        return answer

    files, lines = [*role.files, *role.logs], str(plan.log_lines)
    since = {"since": plan.since} if plan.since else {}
    suffix = "-since" if plan.since else ""
    if host.via in ("docker", "kubectl"):
        kind = "container" if host.via == "docker" else "pod"
        ask(kind, kind)
        ask(f"log:{kind}", f"{kind}-log{suffix}", lines=lines, **since)
        ask("environ", "environ", pid="1")
        files += _named(ask("cmdline", "cmdline", pid="1").data.replace(b"\0", b" "))
    if role.unit:
        show = ask("unit-show", "unit-show", unit=role.unit)
        unit = ask("unit-cat", "unit-cat", unit=role.unit)
        pid = _property(show, "MainPID")
        process = role.unit if host.via == "folder" else pid
        if process and process != "0":
            ask("environ", "environ", pid=process)
            files += _named(ask("cmdline", "cmdline", pid=process).data.replace(b"\0", b" "))
        text = unit.data.decode("utf-8", "replace")
        arguments = exec_start(text)
        files += [part for part in arguments if part.startswith("/") and WRAPPER.search(part)]
        files += re.findall(r"(?m)^\s*EnvironmentFile\s*=\s*-?(/\S+)", text) + _named(unit.data)
        python = next((part for part in arguments if re.search(r"/python[\d.]*$", part)), None)
        if python or host.via == "folder":
            ask("packages", "packages", python=python or "python3")
        ask("journal", f"journal{suffix}", unit=role.unit, lines=lines, **since)
    done: set[str] = set()
    while (path := next((p for p in files if p not in done), None)) and len(done) < MAX_FILES:
        done.add(path)
        stat = ask(f"stat:{path}", "stat", path=path)
        if stat.error:
            continue
        if path in role.logs or LOG_FILE.search(path):
            packed = path.endswith((".gz", ".xz", ".bz2"))
            answer = shell.run("packed" if packed else "log", path=path, **({} if packed else {"lines": lines}))
            rows.append((role, f"log:{path}", unpacked(answer, plan.log_lines) if packed else answer))
            continue
        content = ask(f"file:{path}", "file", path=path)
        files += _named(content.data) if WRAPPER.search(path) else []
        digest = shell.run("sha256", path=path)
        value = digest.data.split()[:1] if not digest.error else [hashlib.sha256(content.data).hexdigest().encode()]
        rows.append((role, f"sha256:{path}", Answer(value[0] if value else b"")))
    for route in HTTP_ROUTES if role.endpoint or host.via == "folder" else ():
        ask(
            f"http:{route}",
            "http",
            url=f"http/{role.role}/{route}" if host.via == "folder" else f"{role.endpoint}/{route}",
        )
    return rows


def _named(text: bytes) -> list[str]:
    """The files of options that a command, unit or script names."""
    found = OPTIONS_FILE.findall(re.sub(r"\\\n\s*", " ", text.decode("utf-8", "replace")))
    return [path for path in found if ".." not in path.split("/") and not path.startswith("/dev/")]


def _property(show: Answer, name: str) -> str | None:
    match = re.search(rf"(?m)^{name}=(.*)$", show.data.decode("utf-8", "replace"))
    return match[1].strip() if match else None


def exec_start(unit_text: str) -> list[str]:
    """The words of the last ExecStart= of a unit file (drop-ins included), continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", unit_text)
    starts = re.findall(r"(?m)^\s*ExecStart\s*=\s*(.+)$", joined)
    if not starts:
        return []
    try:
        return shlex.split(starts[-1].lstrip("-@:+!"))
    except ValueError:
        return starts[-1].split()


def _journal_rows(data: bytes) -> tuple[list[dict[str, str]], int]:
    """Journal entries reduced to the fields we use, and how many lines were not JSON."""
    rows, bad = [], 0
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError, UnicodeDecodeError):
            bad += 1
            continue
        if not isinstance(entry, dict):
            bad += 1
            continue
        message = entry.get("MESSAGE")
        if isinstance(message, list):  # journald gives bytes that are not UTF-8 as a list of numbers
            message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
        kept = {key: str(entry[key])[:200] for key in JOURNAL_FIELDS if key in entry and key != "MESSAGE"}
        rows.append(
            {**kept, "MESSAGE": str(message or "")[:MAX_MESSAGE_CHARS], "_host": str(entry.get("_HOSTNAME", ""))[:200]}
        )
    return rows, bad


def _exported(data: bytes) -> Iterator[dict[str, str]]:
    """The entries of journalctl's export form (systemd.io/JOURNAL_EXPORT_FORMATS): text fields, and binary ones with
    their length."""
    row: dict[str, str] = {}
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        name, equals, value = data[at:end].partition(b"=")
        at = end + 1
        if not name:
            if row:
                yield row
            row = {}
        elif not equals:
            size = min(int.from_bytes(data[at : at + 8], "little"), len(data))
            value = data[at + 8 : at + 8 + size]
            at += 9 + size
        if name:
            row[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    if row:
        yield row


def _redacted(plan: Plan, raw: dict[str, list[tuple[Role | None, str, Answer]]]) -> Collection:
    redactor = Redactor(hosts=[host.target.rsplit("@", 1)[-1] for host in plan.hosts if host.target])
    journals: dict[tuple[str, str], list[dict[str, str]]] = {}
    for host in plan.hosts:  # names first, so that every text is redacted with all of them known
        for role, item, answer in raw[host.name]:
            text = answer.data.decode("utf-8", "replace")
            if role and item == "journal":
                journals[host.name, role.role], _ = _journal_rows(answer.data)
                redactor.learn(hosts={row["_host"] for row in journals[host.name, role.role]})
            if item in ("environ", "unit-show", "unit-cat"):
                redactor.learn(
                    hosts=re.findall(r"(?:^|[\0\n \"])HOSTNAME=([^\0\s\"]+)", text),
                    users=re.findall(r"(?:^|[\0\n])(?:USER|LOGNAME|User)=([^\0\s]+)", text)
                    + re.findall(r"/home/([^/\0\s\"']+)", text),
                )
    items: list[dict[str, Any]] = []
    texts: dict[tuple[str, str, str], str] = {}
    for host in plan.hosts:
        for role, item, answer in raw[host.name]:
            label = role.role if role else "host"
            kind, _, path = item.partition(":")
            name = (
                f"{kind}:{redactor.text(path)}"
                if path and kind != "http"
                else item.replace("http:", "http-").replace("/", "-")
            )
            row: dict[str, Any] = {
                "host": host.name,
                "role": label,
                "unit": redactor.text(role.unit) if role and role.unit else None,
                "item": name,
                "bytes": len(answer.data),
            }
            row["state"] = answer.state
            row |= {"reason": redactor.text(answer.error) if answer.error else None}
            items.append(row)
            if answer.data:
                texts[host.name, label, name] = redactor.text(_readable(item, answer.data))
    # what the last text told may stand in the first one
    for row in items:
        row |= {key: redactor.again(row[key]) for key in ("unit", "reason") if row[key]}
    texts = {key: redactor.again(text) for key, text in texts.items()}
    return Collection(plan.name, items, texts, redactor.report())


def _readable(item: str, data: bytes) -> str:
    if item == "journal":
        rows, bad = _journal_rows(data)
        lines = [
            json.dumps({key: value for key, value in row.items() if key != "_host"}, ensure_ascii=False) for row in rows
        ]
        if bad:
            lines.append(
                json.dumps(
                    {
                        "MESSAGE": f"[{bad} lines of the journal's output were not JSON and were left out]",
                        "SYSLOG_IDENTIFIER": "needlework",
                    }
                )
            )
        return "\n".join(lines) + "\n"
    if data.startswith((b"__CURSOR=", b"__REALTIME_TIMESTAMP=")):
        rows = list(_exported(data))
        return "".join(
            json.dumps({k: row[k][:MAX_MESSAGE_CHARS] for k in JOURNAL_FIELDS if k in row}, ensure_ascii=False) + "\n"
            for row in rows
        )
    text = data.decode("utf-8", "replace")
    return text.replace("\0", "\n") if item in ("environ", "cmdline") else text
