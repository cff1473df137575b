"""The `needlework` command: one verb per room; each room parses its own arguments."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

# verb -> (module with main(argv) -> exit status, what it does)
VERBS = {
    "run": ("needlework.workbook.cli", "execute the notebooks and build the report"),
    "report": ("needlework.workbook.cli", "build the report from the notebooks as they are"),
    "lab": ("needlework.lab.cli", "start a deployment in a box, healthy or with planted faults"),
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
    "calibrate": ("needlework.calibrate.cli", "measure every instrument against every planted fault"),
}
SHARED = {"needlework.workbook.cli", "needlework.evidence.cli"}  # these serve two verbs and are told which one


def usage() -> str:
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
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
    if verb not in VERBS:
        print(f"needlework: unknown verb {verb[:40]!r}; choose one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    name = VERBS[verb][0]
    module = importlib.import_module(name)
    try:
        with _ending_in_order():
            return module.main([verb, *rest] if name in SHARED else rest)
    except BrokenPipeError:  # whoever read the output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            said = f"{error.filename}: {error.strerror}"
        print(f"needlework {verb}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"needlework {verb}: stopped; what was measured so far is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
