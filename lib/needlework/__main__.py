"""The `needlework` command: one verb per room; each room parses its own arguments."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from needlework import neighbours

# verb -> (module with main(argv) -> exit status, or None for a package beside this one; what it does)
VERBS = {
    "run": (None, "execute the notebooks and build the report"),
    "report": (None, "build the report from the notebooks as they are"),
    "lab": (None, "start a deployment in a box, healthy or with planted faults"),
    "probe": ("needlework.probes.cli", "measure a live endpoint: recall, cliff, residues, turns, …"),
    "diagnose": (
        "needlework.workbook.diagnosing",
        "name the likely fault of a deployment, or of a table of trials",
    ),
    "pages": ("needlework.pages.cli", "identify, diagnose or compare dumps of KV pages"),
    "check": ("needlework.kernels.cli", "check a kernel against its reference"),
    "collect": ("needlework.evidence.cli", "collect configuration, logs and sources, read-only"),
    "redact": ("needlework.evidence.cli", "redact a file, or check that it holds no secret"),
    "bundle": ("needlework.evidence.cli", "check, seal, pack or unpack an incident bundle"),
    "calibrate": (None, "measure every instrument against every planted fault"),
}
SHARED = {"needlework.evidence.cli"}  # serves several verbs and is told which one


def verbs() -> dict[str, str]:
    """Verb -> what it does; those that packages unknown to this one offer come last."""
    own = {verb: text for verb, (_, text) in VERBS.items()}
    others = neighbours.found(neighbours.COMMANDS).items()
    return own | {name: f"see {point.module}" for name, point in others if name not in own}


def usage() -> str:
    width = max(map(len, offered := verbs()))
    rows = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in offered.items())
    return f"usage: needlework VERB …   (needlework VERB --help for its options)\n\n{rows}\n"


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, leave `with` blocks as Ctrl-C does: what was started ends, temporary files
    go. A signal that somebody else handles or ignores (nohup) stays as it is.
    """
    wanted = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in wanted if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if argv else 2
    verb, *rest = argv
    if verb not in verbs():
        print(f"needlework: unknown verb {verb[:40]!r}; choose one of {', '.join(verbs())}", file=sys.stderr)
        return 2
    name = VERBS.get(verb, (None, ""))[0]
    try:
        command = importlib.import_module(name).main if name else neighbours.load(neighbours.COMMANDS, verb)
        with _ending_in_order():
            return command([verb, *rest] if name in SHARED else rest)
    except BrokenPipeError:  # whoever read the output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            said = f"{error.filename}: {error.strerror}"
        print(f"needlework {verb}: {said}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"needlework {verb}: {error.name} is needed for this and not installed here", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"needlework {verb}: stopped; what was measured so far is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
