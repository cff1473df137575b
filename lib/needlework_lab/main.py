"""The main program of one lab process: `python -m needlework_lab.main --role prefill --http-fd 5 …`, started by
`lab.start`.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from typing import Any

from needlework_lab.processes import die_with_parent


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="needlework_lab.main")
    parser.add_argument("--role", choices=("combined", "prefill", "decode"), required=True)
    parser.add_argument("--geometry", default="v4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--options", type=json.loads, default={}, help="keyword arguments of the engine, as JSON")
    parser.add_argument("--http-fd", type=int, required=True, help="listening socket of the HTTP server")
    parser.add_argument("--bootstrap-fd", type=int, help="listening socket of the bootstrap port (prefill)")
    parser.add_argument("--watch-fd", type=int, required=True, help="pipe that ends when the parent does")
    parser.add_argument("--transfer-timeout-s", type=float, default=60.0)
    return parser.parse_args(argv)


def build_worker(arguments: argparse.Namespace) -> Any:
    """The engine and its thread for a role; raises ValueError for a fault, geometry or option that does not exist."""
    from needlework_lab.decode import DecodeWorker
    from needlework_lab.engine import Engine
    from needlework_lab.prefill import PrefillWorker
    from needlework_lab.worker import Worker

    engine = Engine(
        arguments.geometry,
        role=arguments.role,
        seed=arguments.seed,
        faults=tuple(arguments.fault),
        **arguments.options,
    )
    if arguments.role == "prefill":
        listener = None if arguments.bootstrap_fd is None else socket.socket(fileno=arguments.bootstrap_fd)
        return PrefillWorker(engine, listener=listener, timeout_s=arguments.transfer_timeout_s)
    if arguments.role == "decode":
        return DecodeWorker(engine, timeout_s=arguments.transfer_timeout_s)
    return Worker(engine)


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    die_with_parent(arguments.watch_fd)
    try:
        worker = build_worker(arguments)
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    import uvicorn

    from needlework_lab.server import build

    sys.setswitchinterval(0.001)  # the event loop gets its turn quickly while the engine's thread computes
    app = build(worker, {"started": int(time.time()), "faults": tuple(arguments.fault)})
    config = uvicorn.Config(app, log_level="info", lifespan="on", timeout_graceful_shutdown=1, server_header=False)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=arguments.http_fd)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
