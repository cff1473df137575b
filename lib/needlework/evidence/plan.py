"""The collection plan: which hosts, which roles, which files, which window of the log. A TOML file, read strictly."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROLES = ("prefill", "decode", "router", "combined")
VIA = ("local", "ssh", "folder", "docker", "kubectl")
MAX_LOG_LINES = 200_000
# What may stand in a command: it is quoted as well, but a strange name is more likely a mistake than a wish.
UNIT_NAME = re.compile(r"(?!-)[A-Za-z0-9:_.@\\-]{1,255}")
SSH_TARGET = re.compile(r"(?!-)(?:[A-Za-z0-9._-]{1,64}@)?(?!-)[A-Za-z0-9._-]{1,255}")
OBJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
PLACE = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,255}")
SINCE = re.compile(r"(?!-)[\w :.,+-]{1,60}")
PLAN_NAME = re.compile(r"[\w .,()+-]{1,100}")
# A plan is written by hand: more than these is a mistake, and would hold a reader up for hours.
MAX_HOSTS, MAX_ROLES, MAX_FILES, MAX_PATH_CHARS, MAX_PLAN_BYTES = 500, 16, 200, 1024, 1 << 20


@dataclass(frozen=True)
class Role:
    """One service on one host. `endpoint` is its base URL as seen from that host; `files` and `logs` are absolute paths
    there. A container runs under docker, or in a pod of Kubernetes."""

    role: str
    unit: str | None = None
    endpoint: str | None = None
    files: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    container: str | None = None
    pod: str | None = None


@dataclass(frozen=True)
class Host:
    """One machine: this one, one reached by the system's ssh, a folder saved earlier (a tree of its files), or the
    containers and pods that docker (`target`: its host) and kubectl (`target`: a context) reach from here."""

    name: str
    via: str
    target: str | None = None
    folder: Path | None = None
    timeout_s: float = 60.0
    roles: tuple[Role, ...] = ()
    namespace: str | None = None


@dataclass(frozen=True)
class Plan:
    """A whole collection. `log_lines` is per unit; `since` goes to journalctl as it is ("2 hours ago", a date)."""

    name: str
    hosts: tuple[Host, ...]
    log_lines: int = 4000
    since: str | None = None
    release: dict[str, str] = field(default_factory=dict)  # file name -> path of the public release's copy


def _take(table: dict, allowed: dict[str, type | tuple[type, ...]], where: str) -> dict:
    for key, value in table.items():
        if key not in allowed:
            raise ValueError(f"{where}: unknown key {key[:40]!r}; known are {', '.join(sorted(allowed))}")
        if not isinstance(value, allowed[key]) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} has the wrong type ({type(value).__name__})")
    return table


def load_plan(path: str | Path) -> Plan:
    """Read `incident.toml`. Raises ValueError with one sentence that names the place of a mistake."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise ValueError(f"{path.name} is larger than {MAX_PLAN_BYTES >> 20} MiB: that is no collection plan")
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no collection plan at {path}; give its path, or write one like data/incidents/context-loss/incident.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path.name} is not valid TOML: it is nested too deeply") from None
    except OSError as error:
        raise ValueError(f"the collection plan {path.name} cannot be read: {error.strerror}") from None
    tables = ("window", "release", "incident", "lab", "workbook")
    _take(raw, {"name": str, "hosts": list, **dict.fromkeys(tables, dict)}, path.name)
    window = _take(raw.get("window", {}), {"lines": int, "since": str}, f"{path.name} [window]")
    lines = window.get("lines", 4000)
    if not 1 <= lines <= MAX_LOG_LINES:
        raise ValueError(f"{path.name} [window]: lines must be 1 to {MAX_LOG_LINES:,}, not {lines:,}")
    since = window.get("since")
    if since is not None and not SINCE.fullmatch(since):
        raise ValueError(f"{path.name} [window]: since is not a time that journalctl reads, such as '2 hours ago'")
    name = raw.get("name", path.parent.name)
    if not PLAN_NAME.fullmatch(name):
        raise ValueError(f"{path.name}: name may hold up to 100 letters, digits, blanks and '.,()+-_' only")
    if len(raw.get("hosts", [])) > MAX_HOSTS:
        raise ValueError(f"{path.name} names {len(raw['hosts']):,} hosts; at most {MAX_HOSTS} are asked at once")
    hosts = tuple(_host(entry, number, path) for number, entry in enumerate(raw.get("hosts", []), 1))
    if not hosts:
        raise ValueError(f"{path.name} names no [[hosts]]; at least one is needed")
    names = [host.name.lower() for host in hosts]  # each becomes a folder, and some disks know no case
    if len(set(names)) != len(names):
        raise ValueError(f"{path.name}: two hosts share a name; names must differ")
    release = raw.get("release", {})
    if not all(isinstance(value, str) for value in release.values()):
        raise ValueError(f"{path.name} [release]: each file name needs the path of its public copy as a text")
    return Plan(name, hosts, lines, since, dict(release))


def _host(entry: dict, number: int, path: Path) -> Host:
    where = f"{path.name} [[hosts]] {number}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a table")
    _take(
        entry,
        {
            "name": str,
            "via": str,
            "target": str,
            "folder": str,
            "namespace": str,
            "timeout_s": (int, float),
            "roles": list,
        },
        where,
    )
    name, via = entry.get("name", f"host-{number}"), entry.get("via", "local")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or name.startswith("."):
        raise ValueError(f"{where}: name may hold letters, digits, '.', '_' and '-' only")
    if via not in VIA:
        raise ValueError(f"{where}: via must be one of {', '.join(VIA)}, not {via[:40]!r}")
    target, folder = entry.get("target"), entry.get("folder")
    if via == "ssh" and not SSH_TARGET.fullmatch(target or ""):
        raise ValueError(f"{where}: via = 'ssh' needs target, a host or alias of your ssh configuration")
    if via in ("docker", "kubectl") and target is not None and not PLACE.fullmatch(target):
        raise ValueError(f"{where}: target is not {'a docker host' if via == 'docker' else 'a context of kubectl'}")
    namespace = entry.get("namespace")
    if namespace is not None and not (via == "kubectl" and OBJECT_NAME.fullmatch(namespace)):
        raise ValueError(f"{where}: namespace must be a Kubernetes namespace, with via = 'kubectl'")
    if via == "folder" and not folder:
        raise ValueError(f"{where}: via = 'folder' needs folder, a tree of files saved from that host")
    if folder and ("\0" in folder or len(folder) > MAX_PATH_CHARS):
        raise ValueError(f"{where}: folder is not a path")
    timeout_s = float(entry.get("timeout_s", 60.0))
    if not 0 < timeout_s <= 3600:
        raise ValueError(f"{where}: timeout_s must be above 0 and at most 3600")
    if len(entry.get("roles", [])) > MAX_ROLES:
        raise ValueError(f"{where}: has {len(entry['roles']):,} roles; at most {MAX_ROLES} are asked on one host")
    roles = tuple(_role(role, f"{where} role {n}") for n, role in enumerate(entry.get("roles", []), 1))
    need = {"docker": "container", "kubectl": "pod"}.get(via)
    if need and not all(getattr(role, need) for role in roles):
        raise ValueError(f"{where}: via = {via!r} needs a {need} in each role")
    if via not in ("docker", "kubectl") and any(role.container or role.pod for role in roles):
        raise ValueError(f"{where}: a container or pod needs via = 'docker' or 'kubectl'")
    if len({role.role for role in roles}) != len(roles):
        raise ValueError(f"{where}: a role is named twice; name the host twice, with one of the two in each")
    if not roles:
        raise ValueError(f"{where}: names no roles; add [[hosts.roles]] with role = one of {', '.join(ROLES)}")
    return Host(name, via, target, (path.parent / folder) if folder else None, timeout_s, roles, namespace)


def _role(entry: dict, where: str) -> Role:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a table")
    texts = ("role", "unit", "endpoint", "container", "pod")
    _take(entry, {**dict.fromkeys(texts, str), "files": list, "logs": list}, where)
    role, unit, endpoint, container, pod = map(entry.get, texts)
    if role not in ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}")
    if unit is not None and not UNIT_NAME.fullmatch(unit):
        raise ValueError(f"{where}: unit is not a systemd unit name")
    if endpoint is not None and not re.fullmatch(r"https?://[^\s'\"\\\x00-\x1f]{1,500}", endpoint):
        raise ValueError(f"{where}: endpoint must be an http:// or https:// URL")
    for key, value in (("container", container), ("pod", pod)):
        if value is not None and not OBJECT_NAME.fullmatch(value):
            raise ValueError(f"{where}: {key} is not the name of one")
    files = [*entry.get("files", []), *entry.get("logs", [])]
    if len(files) > MAX_FILES:
        raise ValueError(f"{where}: names {len(files):,} files; at most {MAX_FILES} are read")
    for file in files:
        if not isinstance(file, str) or not file.startswith("/") or len(file) > MAX_PATH_CHARS:
            raise ValueError(f"{where}: files must be absolute paths")
        if re.search(r"[\x00-\x1f]", file) or ".." in file.split("/") or file.startswith("/dev/"):
            raise ValueError(f"{where}: files must be plain paths without '..', control characters or devices")
    named = tuple(entry.get("files", [])), tuple(entry.get("logs", []))
    return Role(role, unit, endpoint.rstrip("/") if endpoint else None, *named, container, pod)
