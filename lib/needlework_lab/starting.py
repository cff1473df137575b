"""`start`: a deployment in a box, as a context manager.

    with needlework_lab.start(mode="pd", faults=("F14",)) as deployment:
        print(deployment.base_url)

Combined mode is one server process. PD mode is a prefill process, a decode process and SGLang's own router in front.
All listen on the loopback address only, start in parallel, and end with the `with` block, with an exception, with
Ctrl-C, and with the parent process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from needlework.processes import Child, stop

from needlework_lab.deployment import Deployment, LabError
from needlework_lab.processes import LOOPBACK, free_port, listening_socket
from needlework_lab.servers import call, last_words, wait_until_ready

MODES = ("combined", "pd")
ROUTERS = ("sglang", "mini")
POLL_S = 0.05
NEEDED = ("starlette", "uvicorn", "zmq")  # by its processes, which would only say that they ended


def _role_child(
    role: str, listener: socket.socket, bootstrap: socket.socket | None, settings: Mapping[str, Any]
) -> Child:
    command = [sys.executable, "-m", "needlework_lab.main", "--role", role, "--watch-fd", "{watch}"]
    command += ["--geometry", settings["geometry"], "--seed", str(settings["seed"])]
    command += ["--http-fd", str(listener.fileno()), "--options", json.dumps(settings["options"])]
    command += ["--transfer-timeout-s", str(settings["transfer_timeout_s"])]
    fds = [listener.fileno()]
    if bootstrap is not None and role == "prefill":
        command += ["--bootstrap-fd", str(bootstrap.fileno())]
        fds.append(bootstrap.fileno())
    for fault in settings["faults"]:
        command += ["--fault", fault]
    return Child(role, command, pass_fds=fds)


def _router_child(kind: str, ports: Mapping[str, int], retries: bool) -> Child:
    """SGLang's router behind a guard. `ports` holds router, router-metrics, prefill, bootstrap, decode."""
    command = [sys.executable, "-m", "needlework.processes", "{watch}", "0"]
    command += [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "random"]
    command += ["--prefill", f"http://{LOOPBACK}:{ports['prefill']}", str(ports["bootstrap"])]
    command += ["--decode", f"http://{LOOPBACK}:{ports['decode']}", "--host", LOOPBACK, "--port", str(ports["router"])]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(ports["router-metrics"])]
    command += ["--log-level", "warn", "--disable-circuit-breaker", "--worker-startup-check-interval", "1"]
    if kind == "mini":
        command.append("--mini-lb")
    if not retries:
        command.append("--disable-retries")  # a retry turns a failed transfer into a late answer and hides it
    # an engine's router fetches tokenizers from a hub; this one must not ask anybody
    quiet = {"HF_ENDPOINT": f"http://{LOOPBACK}:9", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}
    return Child("router", command, env=quiet)


def _wait(children: Mapping[str, Child], ports: Mapping[str, int], timeout_s: float) -> None:
    """Wait until every process answers, the router last: it is not ready before the servers are. Raises LabError."""
    wait_until_ready(
        children, timeout_s, lambda role: _ready(role, ports[role]), LabError, poll_s=POLL_S, ended=_epitaph
    )


def _ready(role: str, port: int) -> bool:
    paths = ("/readiness", "/health") if role == "router" else ("/health",)  # the mini load balancer has no /readiness
    for path in paths:
        try:
            status, _, _ = call(port, "GET", path, timeout_s=0.5)
        except OSError:
            return False
        if status != 404:
            return status == 200
    return False


def _epitaph(role: str, child: Child) -> str:
    tail = child.log_tail()
    refused = child.process.returncode == 2 and tail  # one sentence about a setting
    return tail.splitlines()[-1] if refused else last_words(role, child)


@contextlib.contextmanager
def start(
    mode: str = "combined",
    faults: str | Sequence[str] = (),
    geometry: str = "v4",
    seed: int = 0,
    *,
    port: int = 0,
    router: str = "sglang",
    retries: bool = False,
    start_timeout_s: float = 60.0,
    transfer_timeout_s: float = 60.0,
    **options: Any,
) -> Iterator[Deployment]:
    """Start a deployment and yield it; everything ends with the block.

    mode       "combined" (one server) or "pd" (prefill, decode and a router)
    faults     planted faults by name, each with parameters if wanted: ("F14",), ("F14:first_chunks=1",)
    geometry   "v4" or "tiny" (see `lab.types.GEOMETRIES`)
    port       of `base_url`; 0 for any free one
    router     "sglang": SGLang's router as deployed, which drops rid and cache_salt from chat bodies and passes a
               client's disconnection on; "mini": its --mini-lb, which keeps every field but notices neither a closed
               connection of a non-streaming request nor a failed prefill
    retries    let the router send a failed request again (its default, which hides first failures)
    options    keyword arguments of the engine, the same for all processes

    Raises ValueError for a setting that does not exist and LabError (a RuntimeError) when a process does not come up.
    """
    from needlework_lab.types import GEOMETRIES

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise LabError(f"{missing[0]} is not installed here; install it with: pip install 'needlework[lab]'")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {str(mode)[:40]!r}")
    if geometry not in GEOMETRIES:
        raise ValueError(f"geometry must be one of {', '.join(GEOMETRIES)}, not {str(geometry)[:40]!r}")
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, not {str(router)[:40]!r}")
    planted = (faults,) if isinstance(faults, str) else tuple(faults)
    settings = {
        "geometry": geometry,
        "seed": int(seed),
        "faults": planted,
        "options": options,
        "transfer_timeout_s": transfer_timeout_s,
    }
    roles = ("prefill", "decode") if mode == "pd" else ("combined",)
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        listeners = {role: stack.enter_context(listening_socket(port if role == "combined" else 0)) for role in roles}
        ports = {role: listener.getsockname()[1] for role, listener in listeners.items()}
        bootstrap = None
        if mode == "pd":
            if port:
                listening_socket(port).close()  # say now, in one sentence, that it is taken
            bootstrap = stack.enter_context(listening_socket(0))
            ports |= {"bootstrap": bootstrap.getsockname()[1], "router": port or free_port()}
            ports["router-metrics"] = free_port()
        stack.callback(lambda: stop(list(children.values())))
        for role in roles:
            children[role] = _role_child(role, listeners[role], bootstrap, settings)
        if mode == "pd":
            children["router"] = _router_child(router, ports, retries)
        for held in [*listeners.values(), *([bootstrap] if bootstrap else [])]:
            held.close()  # the children hold them now; a dead child's port must refuse, not accept and never answer
        _wait(children, ports, start_timeout_s)
        yield Deployment(mode, ports, children, geometry, planted, int(seed), router if mode == "pd" else None)
