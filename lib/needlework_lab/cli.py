"""`needlework lab`: a deployment in a box in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Any

from needlework_lab.deployment import Deployment, LabError
from needlework_lab.starting import MODES, ROUTERS, start
from needlework_lab.types import GEOMETRIES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="needlework lab", description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="combined")
    parser.add_argument("--fault", action="append", default=[], help="plant a fault, e.g. F14 or F14:first_chunks=1")
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="v4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="port of the address to talk to (default: any free one)")
    parser.add_argument("--router", choices=ROUTERS, default="sglang")
    parser.add_argument("--retries", action="store_true", help="let the router retry failed requests")
    parser.add_argument("--seconds", type=float, help="stop by itself after so many seconds")
    return parser


def summary(deployment: Deployment) -> str:
    """What runs where, for a terminal."""
    lines = [f"{deployment}, seed {deployment.seed}", f"  talk to     {deployment.base_url}/v1"]
    if deployment.mode == "pd":
        lines += [f"  prefill     {deployment.prefill_url}", f"  decode      {deployment.decode_url}"]
        lines += [f"  router      {deployment.router}, metrics at {deployment.metrics_url}/metrics"]
    lines += [f"  tokenizer   {deployment.tokenizer_url}/tokenize", "stop it with Ctrl-C"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("mode", "geometry", "seed", "port", "router")
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the block below in order
    began = time.monotonic()
    what = (
        "one server" if arguments.mode == "combined" else f"a prefill and a decode server, {arguments.router}'s router"
    )
    faults = f" with {', '.join(arguments.fault)}" if arguments.fault else ", healthy"
    print(f"starting {what}{faults}; this takes some 5 to 15 s …", file=sys.stderr, flush=True)
    try:
        with start(faults=tuple(arguments.fault), retries=arguments.retries, **options) as deployment:
            print(summary(deployment), f"(ready after {time.monotonic() - began:.1f} s)", sep="\n", flush=True)
            _stand(deployment, arguments.seconds)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _stand(deployment: Deployment, seconds: float | None) -> None:
    """Return after `seconds`; LabError when a process ends by itself."""
    until = None if seconds is None else time.monotonic() + seconds
    while until is None or time.monotonic() < until:
        for role, child in deployment.children.items():
            if not child.alive:
                raise LabError(f"the {role} process ended; it last wrote:\n{child.log_tail()}")
        time.sleep(0.2)
