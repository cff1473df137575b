"""What is really in force on each role, and where each value came from.

A value may be set in the unit file, a drop-in, an environment file, the wrapper script that ExecStart names, the
running process, or be the server's own default. The later in `SOURCES`, the closer to what the process really uses.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from needlework.evidence.collect import Collection, exec_start

if TYPE_CHECKING:
    import pandas as pd  # half a second, which redacting does without

SOURCES = ("unit", "drop-in", "wrapper script", "process environment", "command line", "server_info")
# Differences between prefill and decode that can lose context come first, in this order (layout, page size, dtype and
# top-k must match between peers: sglang 0.5.23 srt/disaggregation).
DECISIVE = (
    *("page_size", "kv_cache_dtype", "index_topk", "dtype", "quantization", "attention_backend"),
    *("prefill_attention_backend", "decode_attention_backend", "disable_radix_cache", "chunked_prefill_size"),
    *("context_length", "swa_window", "tp_size", "pp_size", "disaggregation_transfer_backend", "cuda_graph_max_bs"),
    *("disable_cuda_graph", "speculative_algorithm", "hicache_ratio", "version"),
)
# Settings that differ between the roles on purpose, or say nothing about the model.
BY_ROLE = re.compile(
    r"(?i)^(?:disaggregation_mode|disaggregation_bootstrap_port|host|port|nccl_port|dist_init_addr|base_gpu_id|"
    r"mem_fraction_static|cuda_visible_devices|served_model_name|log_level.*|invocation_id|journal_stream|pid|"
    r"systemd_exec_pid|memory_pressure.*|watchdog.*|kv_role|random_seed|path|home|shell|user|logname|lang|pwd)$"
)
KERNEL_SWITCH = re.compile(r"^(?:SGLANG|SGL|VLLM|DG|FLASHMLA|FLASHINFER|TRITON|NCCL|UCX|MOONCAKE|NIXL)_|MMA|INDEXER")
# The words the incident's engineer filtered units and command lines for.
UNIT_FILTER = re.compile(
    r"(?i)SGLANG_|MMA|TRITON|INDEXER|THINK|REASON|context-length|chunked|radix|page-size|disaggreg|mem-frac|cuda-graph|"
    r"served-model|enable-metrics|\btp\b|moe-runner"
)
ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "max_model_len": "context_length",
    "model": "model_path",
    "block_size": "page_size",
}


@dataclass(frozen=True)
class Setting:
    """One value of one setting, where it was read, in which file."""

    host: str
    role: str
    key: str
    value: str
    source: str
    file: str = ""


def normalise(key: str) -> str:
    """`--page-size`, `page_size` and vLLM's `--block-size` are one setting; environment variables keep their case."""
    if key.isupper() or KERNEL_SWITCH.match(key):
        return key
    key = key.lstrip("-").replace("-", "_").lower()
    return ALIASES.get(key, key)


def flags(words: list[str]) -> dict[str, str]:
    """`--name value`, `--name=value` and bare `--name` of a command line. A bare flag has the value `true`."""
    found: dict[str, str] = {}
    for position, word in enumerate(words):
        if not re.match(r"--[A-Za-z]", word):
            continue
        name, equals, value = word.partition("=")
        follower = words[position + 1] if position + 1 < len(words) else ""
        if not equals:
            value = follower if follower and not follower.startswith("--") else "true"
        found[normalise(name)] = value
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
        if key != "Environment":
            continue
        if not value:
            found.clear()
        for word in _words(value):
            name, equals, setting = word.partition("=")
            if equals:
                found[name] = (setting, file)
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def script_settings(text: str) -> dict[str, str]:
    """Exported variables and the flags of the server's command in a wrapper script (read, never run)."""
    found: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = _words(line)
        assignments = [word for word in words if re.match(r"^[A-Za-z_]\w*=", word)]
        if words[:1] == ["export"] or (words and len(assignments) == len(words)):
            found |= dict(word.split("=", 1) for word in assignments)
        elif re.search(r"launch_server|vllm(?:\.entrypoints| serve)|launch_router|llama-server|trtllm-serve", line):
            found |= dict(word.split("=", 1) for word in words if re.match(r"^[A-Z_][A-Z0-9_]*=", word)) | flags(words)
    return found


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
    return {
        normalise(str(k)): str(v)[:200]
        for k, v in merged.items()
        if isinstance(v, (str, int, float, bool)) or v is None
    }


def settings(collection: Collection) -> list[Setting]:
    """Every setting found anywhere, in the order of `SOURCES` for each role."""
    rows: list[Setting] = []
    for host, role in dict.fromkeys(
        (item["host"], item["role"]) for item in collection.items if item["role"] != "host"
    ):
        unit = collection.text(host, role, "unit-cat")
        first = next((file for file, _, _ in parse_unit(unit)), "")
        for name, (value, file) in unit_environment(unit).items():
            rows.append(Setting(host, role, name, value, "unit" if file == first else "drop-in", file))
        for key, value in flags(exec_start(unit)).items():
            rows.append(Setting(host, role, key, value, "unit", first))
        for (h, r, item), text in collection.texts.items():
            if (h, r) == (host, role) and item.startswith("file:") and item.endswith(".sh"):
                rows += [
                    Setting(host, role, normalise(k), v, "wrapper script", item[5:])
                    for k, v in script_settings(text).items()
                ]
        environment = dict(
            line.split("=", 1) for line in collection.text(host, role, "environ").splitlines() if "=" in line
        )
        rows += [Setting(host, role, k, v[:200], "process environment") for k, v in environment.items()]
        command_line = flags(collection.text(host, role, "cmdline").splitlines())
        rows += [Setting(host, role, k, v, "command line") for k, v in command_line.items()]
        info = server_settings(collection.text(host, role, "http-server_info"))
        rows += [Setting(host, role, k, v, "server_info") for k, v in info.items()]
    return rows


def effective(collection: Collection) -> pd.DataFrame:
    """One row per role and setting: the value in force, its source, and the values it overrides ("value (source)")."""
    import pandas as pd

    by_key: dict[tuple[str, str, str], list[Setting]] = {}
    for setting in settings(collection):
        by_key.setdefault((setting.role, setting.host, setting.key), []).append(setting)
    rows = []
    for (role, host, key), found in by_key.items():
        found = sorted(found, key=lambda s: SOURCES.index(s.source))
        last = found[-1]
        shadowed = [f"{s.value} ({s.source})" for s in found[:-1] if s.value != last.value]
        rows.append((role, host, key, last.value, last.source, last.file, "; ".join(shadowed)))
    return pd.DataFrame(rows, columns=["role", "host", "setting", "value", "source", "file", "overrides"])


def compare_roles(table: pd.DataFrame) -> pd.DataFrame:
    """Settings whose value differs between roles, those that can lose context first.

    Columns: setting, one per role (empty = not set anywhere we looked), weight ("decisive", "kernel switch", "other",
    "by role" for what differs on purpose).
    """
    import pandas as pd

    wide = table.drop_duplicates(["setting", "role"]).pivot(index="setting", columns="role", values="value")
    wide = wide[
        [role for role in ("prefill", "decode", "combined", "router") if role in wide.columns and role != "router"]
    ]
    if wide.shape[1] < 2:
        return pd.DataFrame(columns=["setting", *wide.columns, "weight"])
    differing = wide[wide.fillna("").nunique(axis=1) > 1].fillna("").reset_index()

    def weigh(key: str) -> str:
        if key in DECISIVE:
            return "decisive"
        return "by role" if BY_ROLE.match(key) else "kernel switch" if KERNEL_SWITCH.search(key) else "other"

    differing["weight"] = differing["setting"].map(weigh)
    order = {"decisive": 0, "kernel switch": 1, "other": 2, "by role": 3}
    rank = differing["setting"].map(lambda key: DECISIVE.index(key) if key in DECISIVE else 99)
    return (
        differing.assign(_w=differing["weight"].map(order), _r=rank)
        .sort_values(["_w", "_r", "setting"])
        .drop(columns=["_w", "_r"])
        .reset_index(drop=True)
    )


def units(collection: Collection) -> pd.DataFrame:
    """One row per role with a unit: host, role, unit, state (systemd's), starts (the words of ExecStart)."""
    import pandas as pd

    rows = []
    for item in collection.items:
        if item["item"] != "unit-show":
            continue
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
