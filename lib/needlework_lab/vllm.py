"""A real engine on this machine: vLLM for CPU with a small model, one server or a NIXL prefill/decode pair.

    with vllm.start("pd") as engine:
        print(engine.base_url)

The engine has an environment of its own (`make engine`), because its pins contradict this library's. PD mode is a
prefill server, a decode server and vllm-router in front; the key/value blocks travel through NIXL over UCX in host
memory. All listen on the loopback address only, and end with the `with` block and with the parent process. One core and
up to 3.5 GB a server. Sources: vllm 0.32.0 `vllm/entrypoints/openai/`, `distributed/kv_transfer/kv_connector/v1/nixl`;
vllm-router 0.1.17 `launch_router`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework.processes import Child, stop

from needlework_lab.processes import LOOPBACK, free_port
from needlework_lab.servers import Servers, call, wait_until_ready

MODES = ("combined", "pd")
MODEL_NAME = "smollm2-135m-instruct"
CONTEXT_TOKENS = 8192
BLOCK_TOKENS = 128  # of the CPU backend's prefix cache
POLL_S = 0.25
GRACE_S = 8
_COUNTER = re.compile(r"(?m)^vllm:(nixl_[a-z_]+?)(?:_total)?(?:\{[^}]*\})? ([-+.\deE]+)$")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": f"http://{LOOPBACK}:9",  # a router fetches tokenizers from a hub; this one must ask nobody
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
    "no_proxy": "*",
    "NO_COLOR": "1",
}
SERVER = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; 8,192 tokens of this model take 0.2
    "VLLM_SERVER_DEV_MODE": "1",  # /server_info and /reset_prefix_cache
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait for each other by spinning take a busy machine's cores
    "UCX_TLS": "all",
    "UCX_LOG_LEVEL": "error",
}


class EngineError(RuntimeError):
    """The engine is not set up or did not start; one sentence, with the last log lines where they help."""


@dataclass(frozen=True)
class Engine(Servers):
    """A running engine; see `Servers` for its addresses. The decode server, asked directly, computes the prompt
    itself, as a combined server does.
    """

    engine: str = "vLLM"

    def __str__(self) -> str:
        shape = "prefill/decode pair behind vllm-router" if self.mode == "pd" else "one server"
        return f"{self.engine} on this machine's CPU, {MODEL_NAME}, {shape}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(str(self))}</p>"

    @property
    def arm(self) -> str:
        """This engine as an arm of a live target: its address and, of a pair, who counts tokens and who computes."""
        helpers = f"+tokenizer={self.prefill_url}+cache={self.prefill_url}+metrics={self.metrics_url}"
        return self.base_url + (helpers if self.mode == "pd" else "")

    def get(self, role: str, path: str, timeout_s: float = 30.0) -> str:
        """The text of one GET; raises EngineError when the server does not answer with status 200."""
        status, text = _get(self.ports[role], path, timeout_s)
        if status != 200:
            raise EngineError(f"the {role} server answers {path} with {status or 'nothing'}")
        return text

    def server_info(self) -> dict[str, Any]:
        """/server_info of each server, by role: the configuration in force."""
        return {role: json.loads(self.get(role, "/server_info?config_format=json")) for role in self.roles}

    def transfer_counts(self) -> dict[str, float]:
        """NIXL's counters and histogram sums on the decode side, by name without `vllm:`; empty in combined mode.

        `nixl_bytes_transferred_sum` (bytes), `nixl_bytes_transferred_count` (transfers),
        `nixl_num_failed_transfers`, `nixl_num_failed_notifications`, `nixl_num_kv_expired_reqs`.
        """
        if self.mode != "pd":
            return {}
        found: dict[str, float] = {}
        for name, value in _COUNTER.findall(self.get("decode", "/metrics")):
            if not name.endswith(("_created", "_bucket")):
                found[name] = found.get(name, 0.0) + float(value)
        return found


def home() -> Path:
    """The checkout whose `make engine` sets the engine up: NEEDLEWORK_ROOT, else the one this library lies in."""
    return Path(os.environ.get("NEEDLEWORK_ROOT") or Path(__file__).resolve().parents[2])


def python() -> Path:
    """The interpreter of the engine's own environment."""
    return home() / ".venv-vllm" / "bin" / "python"


def model() -> Path:
    """The folder of the converted model."""
    return home() / "build" / "models" / "smollm2"


def missing() -> str | None:
    """Why the engine cannot start here, as one sentence; None when it is set up."""
    if not python().exists() or not (model() / "config.json").exists():
        return "the vLLM engine is not set up here; run `make engine` first (3.2 GB, about five minutes)"
    return None


@contextlib.contextmanager
def start(
    mode: str = "combined",
    *,
    port: int = 0,
    start_timeout_s: float = 420.0,
    max_model_len: int = CONTEXT_TOKENS,
    arguments: tuple[str, ...] = (),
) -> Iterator[Engine]:
    """Start the engine and yield it; everything ends with the block.

    mode           "combined" (one server) or "pd" (prefill, decode and vllm-router)
    port           of `base_url`; 0 for any free one
    max_model_len  tokens of prompt and answer together, at most 8,192 for this model
    arguments      more arguments of vLLM's server, the same for all servers

    Raises ValueError for a mode that does not exist and EngineError (a RuntimeError) when the engine is not set up or a
    process does not come up.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {str(mode)[:40]!r}")
    if (why := missing()) is not None:
        raise EngineError(why)
    roles = ("prefill", "decode") if mode == "pd" else ("combined",)
    ports = {role: free_port() for role in roles}
    if mode == "pd":
        ports |= {"router": free_port(), "router-metrics": free_port()}
    ports["router" if mode == "pd" else "combined"] = port or ports["router" if mode == "pd" else "combined"]
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nwvllm", ignore_cleanup_errors=True)))
        stack.callback(lambda: stop(list(children.values()), GRACE_S + 3))
        for n, role in enumerate(roles):
            children[role] = _server(role, ports[role], n, scratch, max_model_len, arguments)
        wait_until_healthy(children, ports, start_timeout_s)
        for n, role in enumerate(roles):
            _bind(children[role].pid, _core(n))
        if mode == "pd":
            children["router"] = _router(ports, scratch)
            wait_until_healthy(children, ports, 60)
        yield Engine(mode, ports, children)


def _server(role: str, port: int, number: int, scratch: Path, max_model_len: int, more: tuple[str, ...]) -> Child:
    environment = QUIET | SERVER | _folders(scratch / role) | {"VLLM_CPU_OMP_THREADS_BIND": str(_core(number))}
    # what is compiled, and what an import of the model's code in a process of its own tells: a quarter of each start
    environment |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"), str(home() / "build" / "engine-cache"))
    command = ["vllm.entrypoints.openai.api_server", "--model", str(model()), "--served-model-name", MODEL_NAME]
    command += ["--host", LOOPBACK, "--port", str(port), "--max-model-len", str(max_model_len), "--enforce-eager"]
    command += ["--dtype", "float32"]  # a core without instructions for bfloat16 takes five times as long with it
    command += ["--enable-prompt-tokens-details", *more]
    if role != "combined":
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LOOPBACK
    # a server has memory to give back
    return child(role, [str(python()), "-m", *command], environment, grace_s=GRACE_S)


def _core(number: int) -> int:
    """The core of the server with this number."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[number % len(allowed)]


def _bind(pid: int, core: int) -> None:
    """Give back the core that a server was told to compute on: the NIXL connector moves each server's worker to the
    last core of the machine (vllm 0.32.0 `v1/nixl/base_worker.py`), so a pair computes, and waits, on one and the same.
    """
    import psutil

    allowed = os.sched_getaffinity(0)
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            if set(process.cpu_affinity()) != allowed:
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {core})


def _router(ports: Mapping[str, int], scratch: Path) -> Child:
    command = ["vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += [
        "--prefill",
        f"http://{LOOPBACK}:{ports['prefill']}",
        "--decode",
        f"http://{LOOPBACK}:{ports['decode']}",
    ]
    command += ["--host", LOOPBACK, "--port", str(ports["router"]), "--prometheus-host", LOOPBACK]
    command += ["--prometheus-port", str(ports["router-metrics"]), "--log-level", "warning"]
    command.append("--disable-retries")  # a retry turns a failed transfer into a late answer and hides it
    return child("router", [str(python()), "-m", *command], QUIET | _folders(scratch / "router"), grace_s=0)


def child(role: str, command: list[str], environment: dict[str, str], *, grace_s: int) -> Child:
    """Start a program of the engines that ends with this process, and has `grace_s` seconds to tidy up before."""
    guard = [sys.executable, "-m", "needlework.processes", "{watch}", str(grace_s)]
    return Child(role, [*guard, *command], env=environment)


def _folders(scratch: Path) -> dict[str, str]:
    """Sockets, caches and settings in a folder that goes with the engine."""
    scratch.mkdir()
    names = ("TMPDIR", "VLLM_RPC_BASE_PATH", "VLLM_CONFIG_ROOT", "XDG_CACHE_HOME", "HF_HOME")
    return dict.fromkeys(names, str(scratch))


def wait_until_healthy(children: Mapping[str, Child], ports: Mapping[str, int], timeout_s: float) -> None:
    """Wait until every process answers; raises EngineError."""
    wait_until_ready(
        children, timeout_s, lambda role: _get(ports[role], "/health", 2.0)[0] == 200, EngineError, poll_s=POLL_S
    )


def _get(port: int, path: str, timeout_s: float) -> tuple[int, str]:
    """(status, text) of one GET; status 0 when nobody answers."""
    try:
        status, _, raw = call(port, "GET", path, timeout_s=timeout_s)
    except OSError:
        return 0, ""
    return status, raw.decode("utf-8", "replace") if status == 200 else ""
