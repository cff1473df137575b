"""What the packages beside this one add to it, by the entry points that they declare: targets and commands.

`needlework` itself imports none of them. A target is a function `open(stack, spec, incident) -> Target`, a command one
of its arguments that returns an exit status.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

TARGETS, COMMANDS = "needlework.targets", "needlework.commands"
# ours -> the extra of this distribution that brings what it needs
EXTRAS = {
    TARGETS: {"lab": "lab", "vllm": "lab"},
    COMMANDS: {"lab": "lab", "calibrate": "lab", "run": "press", "report": "press"},
}


class NotInstalled(RuntimeError):
    """A target or command whose package, or something that it needs, is not here; the message says how to get it."""


def found(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name; of several of one name, the first that Python's path offers."""
    return {point.name: point for point in reversed(tuple(entry_points(group=group)))}


def load(group: str, name: str) -> Any:
    """What the entry point `name` stands for. Raises NotInstalled, in one sentence."""
    what = f"the {'target' if group == TARGETS else 'command'} {name}"
    extra = EXTRAS[group].get(name)
    remedy = f"; install it with: pip install 'needlework[{extra}]'" if extra else ""
    point = found(group).get(name)
    if point is None:
        raise NotInstalled(f"{what} is not installed here{remedy}")
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise NotInstalled(f"{what} needs {error.name}, which is not installed here{remedy}") from None
