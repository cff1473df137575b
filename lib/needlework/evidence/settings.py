"""What is really in force on each role, and where each value came from.

A value may be set in a file of the engine, the unit, a drop-in, an environment file, the wrapper script that ExecStart
names, a manifest, the running process, or be told by the server itself. The later in `SOURCES`, the closer to what the
process really uses.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from needlework.evidence.collect import Collection, exec_start
from needlework.evidence.logs import NO_EVENT, is_log, lines_of
from needlework.names import SETTINGS, setting

if TYPE_CHECKING:
    import pandas as pd  # half a second, which redacting does without

SOURCES = ("config file", "unit", "drop-in", "environment file", "wrapper script", "manifest", "process environment",
           "command line", "log", "server_info")  # fmt: skip
_TABLE = tomllib.loads(resources.files(__package__).joinpath("settings.toml").read_text("utf-8"))
# Differences between the sides of a pair that can lose context, the most telling first, and the classes of fault they
# bear on.
DECISIVE: dict[str, list[str]] = _TABLE["decisive"]
_RANK = {name: rank for rank, name in enumerate(DECISIVE)}
SHELL_WORDS, COMMANDS, VARIABLES = (frozenset(_TABLE["words"][k].split()) for k in ("shell", "command", "variables"))
DECISIVE_VARIABLE = re.compile(r"LAYOUT|KV_CACHE|CONTEXT_LENGTH|BLOCK_SIZE|PAGE_SIZE|ATTENTION_BACKEND|CHUNK_SIZE")
# Settings that differ between the roles on purpose, or say nothing about the model.
BY_ROLE = re.compile(
    r"(?i)^(?:disaggregation_mode|disaggregation_bootstrap_port|.*(?:host|port|_addr|_ip|_rank)|dist_init_addr|base_gpu_id|"
    r"mem_fraction_static|gpu_memory_utilization|cuda_visible_devices|served_model_name|log_level.*|invocation_id|"
    r"journal_stream|pid|systemd_exec_pid|memory_pressure.*|watchdog.*|kv_role|random_seed|seed|path|home|shell|user|"
    r"logname|lang|pwd|is_prefill_worker|is_decode_worker)$"
)
KERNEL_SWITCH = re.compile(
    r"^(?:SGLANG|SGL|VLLM|DG|FLASHMLA|FLASHINFER|TRITON|NCCL|UCX|MOONCAKE|NIXL|LMCACHE|OLLAMA|MC)_|MMA|INDEXER"
)
# The words the incident's engineer filtered units and command lines for.
UNIT_FILTER = re.compile(
    r"(?i)SGLANG_|MMA|TRITON|INDEXER|THINK|REASON|context-length|chunked|radix|page-size|disaggreg|mem-frac|cuda-graph|"
    r"served-model|enable-metrics|\btp\b|moe-runner"
)
ENGINE = re.compile(
    r"(?i)vllm|sglang|llama[-_.]?(?:server|cpp)|ollama|trtllm|tensorrt|ktransformers|dynamo|lmdeploy|text-generation"
)
# tables of options by themselves: of Ray's LLM configs, Helm charts, and Dynamo's services
OPTIONS = re.compile(
    r"(?i)(?:engine_?(?:kwargs|args|config)|common[-_]configs?|vllm_?config|model_?spec|parallelism|/?[a-z]*(?:worker|processor|frontend))$"
)
NO_OPTION = ("resources", "ServiceArgs", "metadata", "extraPodSpec", "envFromSecret", "replicas", "livenessProbe",
             "componentType", "subComponentType", "dynamoNamespace")  # fmt: skip
MAX_NODES, MAX_VALUE_CHARS = 20_000, 300
_VALUE = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\}|\[[^\]]*\]|<\w+[^>]*>|[A-Z]\w+\([^()]*\)|[^,\s()]+"


@dataclass(frozen=True)
class Setting:
    """One value of one setting, where it was read, in which file."""

    host: str
    role: str
    key: str
    value: str
    source: str
    file: str = ""


def _pairs(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """A setting, and what stands in it where it is JSON or a table: `{"kv_connector": …}` is `kv_connector`."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            yield setting(key), value[:MAX_VALUE_CHARS]
            return
    if isinstance(value, str) and (match := re.fullmatch(r"[A-Z]\w+\((.*)\)", value)):  # KVTransferConfig(…) of a log
        value = {name: part.strip("'\"") for name, part in re.findall(rf"(\w+)=({_VALUE})", match[1])} or value
    if isinstance(value, dict):
        for inner, part in list(value.items())[:200]:
            yield from _pairs(f"{key}.{inner}" if setting(str(inner)) not in SETTINGS else str(inner), part)
    elif isinstance(value, list) and not any(isinstance(part, (dict, list)) for part in value):
        yield setting(key), " ".join(map(str, value))[:MAX_VALUE_CHARS]
    elif not isinstance(value, list):
        said = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        yield setting(key), said[:MAX_VALUE_CHARS]


def flags(words: list[str]) -> dict[str, str]:
    """`--name value`, `--name=value`, `-tp 8` and bare `--name` of a command line; JSON in a value is read as well."""
    found: dict[str, str] = {}
    if len(words) > 2 and re.search(r"(?:^|/)(?:ba|da|z)?sh$", words[0]) and "c" in words[1].lstrip("-"):
        return script_settings(words[2] if len(words) == 3 else shlex.join(words[2:]))
    if scripts := [word for word in words if "\n" in word.strip() and not word.lstrip().startswith(("{", "["))]:
        return flags([word for word in words if word not in scripts]) | script_settings("\n".join(scripts))
    for position, word in enumerate(words):
        if not re.match(r"--?[A-Za-z]", word) or (
            word in ("-m", "-u", "-c") and "python" in words[max(0, position - 1)]
        ):
            if word == "serve" and position + 1 < len(words) and not words[position + 1].startswith("-"):
                found.setdefault("model_path", words[position + 1])
            continue
        name, equals, value = word.partition("=")
        follower = words[position + 1] if position + 1 < len(words) else ""
        if not equals:
            value = follower if follower and not re.match(r"--?[A-Za-z]", follower) else "true"
        found.update(_pairs(name.lstrip("-"), value))
    return found


def parse_unit(text: str) -> list[tuple[str, str, str]]:
    """(file, key, value) of every directive of `systemctl cat` output, continuation lines joined, comments left out."""
    rows, file = [], ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if re.match(r"# /\S+$", line):
            file = line[2:]
        elif line.strip() and line.lstrip()[0] not in "#;[" and "=" in line:
            key, _, value = line.partition("=")
            rows.append((file, key.strip(), value.strip()))
    return rows


def unit_environment(text: str) -> dict[str, tuple[str, str]]:
    """Variables set by `Environment=`: name -> (value, file). A later line wins; an empty one resets, as in systemd."""
    found: dict[str, tuple[str, str]] = {}
    for file, key, value in parse_unit(text):
        if key == "Environment":
            found = found if value else {}
            found |= {name: (said, file) for name, said in assignments(_words(value)).items()}
    return found


def assignments(words: Iterable[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line of a script, apart at pipes, `&&` and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        words = line.split()
    part: list[str] = []
    for word in [*words, ";"]:
        if re.fullmatch(r"[|&;<>]+", word):
            yield part
            part = []
        else:
            part.append(word)


def script_settings(text: str, role: str = "") -> dict[str, str]:
    """Exported variables and the options of every command in a script that is not the shell's own (read, never run).
    Of a script that starts both sides of a pair, what says that it is the other side than `role` is left out."""
    found: dict[str, str] = {}
    known: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", " ", text)
    for name, more, inner in re.findall(r"(?ms)^\s*(?:local |declare -a )?(\w+)(\+?)=\(\s*(.*?)\s*\)\s*$", text):
        known[name] = (known.get(name, []) if more else []) + _words(inner)
    text = re.sub(r"(?ms)^\s*(?:local |declare -a )?\w+\+?=\(.*?\)\s*$", "", text)
    for line in text.splitlines():
        for command in _commands(line):
            words = list(_expanded(command, known))
            given = assignments(words)
            if words[:1] == ["export"] or (words and len(given) == len(words)):
                known |= {name: _words(value) for name, value in given.items()}
                found |= {name: value for name, value in given.items() if name.isupper()}
            elif words and words[0].rsplit("/", 1)[-1] not in SHELL_WORDS:
                options = flags(words)
                if {role, options.get("disaggregation_mode", role)} != {"prefill", "decode"}:
                    found |= {name: value for name, value in given.items() if name.isupper()} | options
    return found


def _expanded(words: list[str], known: dict[str, list[str]]) -> Iterator[str]:
    reference = r"\$\{(\w+)(?:\[@\])?(?::?[-=]([^}]*))?\}|\$(\w+)"
    for word in words:
        if (match := re.fullmatch(reference, word)) and (match[1] or match[3]) in known:
            yield from known[match[1] or match[3]]
        else:
            yield re.sub(reference, lambda m: " ".join(known.get(m[1] or m[3], [m[2] or m[0]])), word)


def documents(text: str) -> list[Any]:
    """The documents of a YAML (or JSON) text; of a Helm template what stands between its marks is left open."""
    for source in (text, re.sub(r"(?m)^\s*\{\{-?.*?\}\}\s*$", "", text)):
        try:
            return list(
                yaml.safe_load_all(re.sub(r"\{\{.*?\}\}", "templated", source) if source is not text else source)
            )
        except (yaml.YAMLError, RecursionError, ValueError):
            continue
    return []


@dataclass(frozen=True)
class Component:
    """A container, service or worker of a manifest: where it stands, which side it is, and what it is given."""

    path: str
    side: str | None
    engine: bool
    settings: dict[str, str]


def components(text: str) -> list[Component]:
    """What manifests of Kubernetes, Helm, KServe, docker compose, Ray and Dynamo give to each thing that they start."""
    found: list[Component] = []
    budget = MAX_NODES
    stack: list[tuple[str, Any]] = [("", doc) for doc in reversed(documents(text))]
    while stack and (budget := budget - 1) > 0:
        path, node = stack.pop()
        if isinstance(node, str) and "\n" in node and re.search(r"(?i)\.ya?ml$|config|values", path):
            stack += [(path, doc) for doc in documents(node) if isinstance(doc, (dict, list))]
        if isinstance(node, dict):
            if component := _component(path, node):
                found.append(component)
            name = (node.get("metadata") or {}).get("name", "") if isinstance(node.get("metadata"), dict) else ""
            # beside `prefill`, what KServe's service starts is decode's
            beside = ("template", "worker", "parallelism") if {"prefill", "template"} <= node.keys() else ()
            here = f"{path}/{name or node.get('name') or node.get('deployment_name') or ''}".rstrip("/")
            stack += [(f"{here}/{'decode/' if k in beside else ''}{k}", value) for k, value in reversed(node.items())]
        elif isinstance(node, list):
            stack += [(path, value) for value in reversed(node[:500])]
    return found


def _component(path: str, node: dict[Any, Any]) -> Component | None:
    plain = {re.sub("[-_]", "", str(key)).lower(): value for key, value in node.items()}
    given_first = sorted((key for key in plain if key in COMMANDS), key=lambda key: "arg" in key)
    words = [word for key in given_first for word in _as_words(plain[key])]
    given: dict[str, str] = {}
    for value in (plain[key] for key in plain if key in VARIABLES):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and "name" in item:
                source = " ".join(re.findall(r"[\w.-]+", str(item.get("valueFrom", ""))))
                if "value" in item or source.startswith("fieldRef"):  # such as the pod's own address
                    given[str(item["name"])] = str(item.get("value", f"from {source}"))
            elif isinstance(item, dict):
                given |= {str(k): str(v) for k, v in item.items() if not isinstance(v, (dict, list))}
            elif isinstance(item, str):
                given |= assignments([item])
    for value in [value for key, value in given.items() if key.endswith("ARGS") and value.startswith("-")]:
        given |= flags(_words(value))
    if OPTIONS.search(path):
        under = "parallelism." if path.endswith("parallelism") else ""  # KServe's tensor, data, pipeline
        given |= {
            k: v for key, value in node.items() if key not in NO_OPTION for k, v in _pairs(f"{under}{key}", value)
        }
    else:  # a size in the middle of a values file
        sizes = {setting(str(key)): value for key, value in node.items() if isinstance(value, (int, str, float))}
        given |= {key: str(value) for key, value in sizes.items() if key in SETTINGS and key != "model_path"}
    given |= flags(words)
    if not given:
        return None
    name = f"{path}/{node.get('name', '')}"
    told = (
        f"{name} {' '.join(words)} {' '.join(str(node.get(key, '')) for key in ('image', 'subComponentType', 'role'))}"
    )
    if isinstance(node.get("image"), str) and words:
        given.setdefault("image", node["image"])
    started = " ".join([str(node.get("image", "")), *(word for word in words[:6] if not word.startswith("-"))])
    # a table of options alone belongs to the engine that reads it
    engine = bool(ENGINE.search(started) or OPTIONS.search(path)) or not (words or "image" in node)
    engine = engine and not re.search(r"(?i)\bfrontend\b", name)
    signs = {"prefill": r"(?i)prefill|\bctx\b", "decode": r"(?i)decode|\bgen\b"}
    sides = [side for side, sign in signs.items() if re.search(sign, told)]
    return Component(name.strip("/"), sides[0] if len(sides) == 1 else None, engine, given)


def _as_words(value: Any) -> list[str]:
    if isinstance(value, str):
        return _words(value.replace("\\\n", " "))
    parts = [str(part) for part in value if not isinstance(part, (dict, list))] if isinstance(value, list) else []
    alone = len(parts) == 1 and "\n" not in parts[0].strip()
    return flat if alone and len(flat := _words(parts[0])) > 1 else parts


def manifest_settings(text: str, role: str) -> dict[str, str]:
    """What a manifest gives to one role. Where it holds both sides of a pair, the other's is left out; what is given to
    a sidecar beside an engine is told with the sidecar's name."""
    parts = [part for part in components(text) if role not in ("prefill", "decode") or part.side in (None, role)]
    parts.sort(key=lambda part: part.side is None)  # a side's own before what both share
    engines = any(part.engine for part in parts)
    found: dict[str, str] = {}
    for part in parts:
        own = part.path.removesuffix("/extraPodSpec/mainContainer").rsplit("/", 1)[-1]
        mark = "" if part.engine or not engines else f"{own}/"
        found |= {mark + key: value for key, value in part.settings.items() if mark or key not in found}
    return found


def config_settings(text: str) -> dict[str, str]:
    """Every setting of an engine's own file: YAML or JSON with options, or lines of KEY=value."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and all(re.match(r"\s*(?:export\s+)?[A-Za-z_]\w*=", line) for line in lines):
        return {key: value for line in lines for key, value in assignments(_words(line)).items()}
    return {
        k: v
        for doc in documents(text)
        if isinstance(doc, dict)
        for key, value in doc.items()
        for k, v in _pairs(str(key), value)
    }


def startup_settings(message: str) -> dict[str, str]:
    """What an engine prints of its own arguments when it starts; {} for any other line."""
    if match := re.search(r"(?:llama_\w+|print_info|main|srv +\w+): +(n_\w+|type_[kv]|flash_attn) += +(\S+)", message):
        return dict(_pairs(match[1], match[2].rstrip(",")))
    if match := re.search(r"non-default args: (\{.*\})", message):
        try:
            return {k: v for key, value in ast.literal_eval(match[1]).items() for k, v in _pairs(str(key), value)}
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return {
                k: v
                for key, value in re.findall(rf"'(\w+)': ({_VALUE})", match[1])
                for k, v in _pairs(key, value.strip("'\""))
            }
    if match := re.search(r"server config\"? env=\"?map\[(.*)\]", message):
        return {key: value for key, value in re.findall(r"(\w+):(.*?)(?= [A-Z_]+:|$)", match[1]) if value}
    if match := re.search(r"(?:starting runner|starting llama server|starting ollama engine)\"? cmd=\"?(.*)", message):
        return flags(_words(match[1].replace('\\"', '"').rstrip('"')))
    if match := re.search(
        r"(?:ServerArgs|Namespace|EngineArgs|LlmArgs|LMCache\w*Config)\((.*)|with config: (.*)|LLM Args: ?(.*)", message
    ):
        told = next(filter(None, match.groups()), "")
        return {
            k: v for key, value in re.findall(rf"(\w+)=({_VALUE})", told) for k, v in _pairs(key, value.strip("'\""))
        }
    return {}


def server_settings(text: str) -> dict[str, str]:
    """Scalars of a `/server_info` answer, `server_args` included. Anything that is not a JSON object gives nothing."""
    try:
        answer = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return {}
    if not isinstance(answer, dict):
        return {}
    nested = answer.get("server_args")
    merged: dict[str, Any] = answer | (nested if isinstance(nested, dict) else {})
    told = {setting(str(k)): str(v)[:200] for k, v in merged.items() if isinstance(v, (str, int, float)) or v is None}
    return told


def _of_file(path: str, text: str, role: str) -> tuple[str, dict[str, str]]:
    """Which kind of source a file is, and what it sets."""
    name = path.rsplit("/", 1)[-1]
    if re.search(r"\.(?:sh|bash)$", name) or text.startswith("#!"):
        return "wrapper script", {setting(k): v for k, v in script_settings(text, role).items()}
    if re.search(r"\.(?:ya?ml|json)$", name):
        started = manifest_settings(text, role)
        return (
            ("manifest", started)
            if started and re.search(r"(?m)^\s*-?\s*(?:kind|services|applications|image|command|args|replicas)\b", text)
            else ("config file", started | config_settings(text))
        )
    if re.search(r"\.(?:env|conf|cfg|default|service\.d)$|^\.?env|/default/|/sysconfig/", path) or name.isidentifier():
        return "environment file", config_settings(text)
    return "", {}


def settings(collection: Collection) -> list[Setting]:
    """Every setting found anywhere, in the order of `SOURCES` for each role."""
    rows: list[Setting] = []

    def add(where: tuple[str, str], source: str, file: str, found: dict[str, str]) -> None:
        rows.extend(Setting(*where, key, value, source, file) for key, value in found.items())

    for where in dict.fromkeys((item["host"], item["role"]) for item in collection.items if item["role"] != "host"):
        unit = collection.text(*where, "unit-cat")
        first = next((file for file, _, _ in parse_unit(unit)), "")
        for name, (value, file) in unit_environment(unit).items():
            add(where, "unit" if file == first else "drop-in", file, {name: value})
        texts = {item: text for (*place, item), text in collection.texts.items() if tuple(place) == where}
        files = {i: _of_file(i[5:], text, where[1]) for i, text in texts.items() if i.startswith("file:")}
        known = {name: value for name, (value, _) in unit_environment(unit).items()}
        known |= {k: v for source, told in files.values() if source == "environment file" for k, v in told.items()}
        start = _expanded(exec_start(unit), {name: _words(value) for name, value in known.items()})
        add(where, "unit", first, flags(list(start)))
        for item, text in texts.items():
            if item in files:
                add(where, files[item][0], item[5:], files[item][1])
            elif item in ("pod", "container"):
                add(where, "manifest", item, manifest_settings(text, where[1]))
            elif is_log(item):
                for entry in lines_of(text) if NO_EVENT.search(text) or "n_ctx" in text else ():
                    add(where, "log", item, startup_settings(entry["message"]))
        add(where, "process environment", "", assignments(collection.text(*where, "environ").splitlines()))
        add(where, "command line", "", flags(collection.text(*where, "cmdline").splitlines()))
        add(where, "server_info", "", server_settings(collection.text(*where, "http-server_info")))
    return rows


def effective(collection: Collection) -> pd.DataFrame:
    """One row per role and setting: the value in force, its source, and the values it overrides ("value (source)")."""
    import pandas as pd

    by_key: dict[tuple[str, str, str], list[Setting]] = {}
    for one in settings(collection):
        by_key.setdefault((one.role, one.host, one.key), []).append(one)
    rows = []
    for (role, host, key), found in by_key.items():
        found = sorted(found, key=lambda s: SOURCES.index(s.source))
        last = found[-1]
        shadowed = [f"{s.value} ({s.source})" for s in found[:-1] if s.value != last.value]
        rows.append((role, host, key, last.value, last.source, last.file, "; ".join(dict.fromkeys(shadowed))))
    return pd.DataFrame(rows, columns=["role", "host", "setting", "value", "source", "file", "overrides"])


def compare_roles(table: pd.DataFrame) -> pd.DataFrame:
    """Settings whose value differs between roles, those that can lose context first.

    Columns: setting, one per role (empty = not set anywhere we looked; where hosts of a role differ, their values with
    "|" between; a combined server is held against the pair in what it states), weight ("decisive", "kernel switch",
    "other", "by role" for what differs on purpose).
    """
    import pandas as pd

    roles = [role for role in ("prefill", "decode", "combined") if role in set(table["role"])]
    if len(roles) < 2:
        return pd.DataFrame(columns=["setting", *roles, "weight"])
    said = (
        table[table["role"].isin(roles)]
        .groupby(["setting", "role"])["value"]
        .agg(lambda v: " | ".join(dict.fromkeys(v)))
    )
    wide = said.unstack("role").reindex(columns=roles).fillna("")
    pair = wide[[role for role in roles if role != "combined"]]
    alone = wide["combined"] if "combined" in wide else pair.iloc[:, 0]
    unlike = (alone != "") & (pair != "").any(axis=1) & pair.ne(alone, axis=0).any(axis=1)  # it may state little
    differing = wide[(pair.nunique(axis=1) > 1) | unlike].reset_index()

    one_sided = {row.setting for row in differing.itertuples(index=False) if "" in row}

    def weigh(key: str) -> tuple[int, int]:  # an address differs on purpose, unless one side has none
        on_purpose = BY_ROLE.match(key) and key not in one_sided
        if (key in DECISIVE or DECISIVE_VARIABLE.search(key)) and not on_purpose:
            return 0, _RANK.get(key, len(_RANK))
        return (3 if BY_ROLE.match(key) else 1 if KERNEL_SWITCH.search(key) else 2), 0

    order = sorted(differing.index, key=lambda n: (weigh(differing["setting"][n]), differing["setting"][n]))
    differing = differing.loc[order].reset_index(drop=True).rename_axis(None, axis=1)
    words = ("decisive", "kernel switch", "other", "by role")
    return differing.assign(weight=[words[weigh(key)[0]] for key in differing["setting"]])


def units(collection: Collection) -> pd.DataFrame:
    """One row per role with a unit: host, role, unit, state (systemd's), starts (the words of ExecStart)."""
    import pandas as pd

    rows = []
    for item in collection.items:
        if item["item"] == "unit-show":
            where = (item["host"], item["role"])
            state = re.search(r"(?m)^ActiveState=(\S+)", collection.text(*where, "unit-show"))
            starts = " ".join(exec_start(collection.text(*where, "unit-cat")))[:200]
            rows.append((*where, item["unit"], state[1] if state else "unknown", starts))
    return pd.DataFrame(rows, columns=["host", "role", "unit", "state", "starts"])


def searched(collection: Collection, words: re.Pattern[str] = UNIT_FILTER) -> pd.DataFrame:
    """What a search for `words` finds in each place that can set something, a row also where it finds nothing.

    Columns: host, role, place ("unit and drop-ins", "wrapper script", "process environment", "command line", "what the
    server says"), lines (that were searched), hits, found (the words, once each, at most 12).
    """
    import pandas as pd

    places = {
        "unit-cat": "unit and drop-ins",
        "environ": "process environment",
        "cmdline": "command line",
        "http-server_info": "what the server says",
    }
    rows = []
    for item in collection.items:
        name = item["item"]
        place = places.get(name) or ("wrapper script" if name.startswith("file:") and name.endswith(".sh") else None)
        if place is None:
            continue
        lines = collection.text(item["host"], item["role"], name).splitlines()
        hits = [line for line in lines if words.search(line)]
        found = dict.fromkeys(match[0] for line in hits for match in words.finditer(line))
        rows.append((item["host"], item["role"], place, len(lines), len(hits), ", ".join(list(found)[:12])))
    return pd.DataFrame(rows, columns=["host", "role", "place", "lines", "hits", "found"])
