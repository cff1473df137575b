"""A notebook whose question has no answer for this target says so in one sentence and ends there; the run goes on."""

from __future__ import annotations


class CannotAnswer(RuntimeError):
    """The message is the sentence: why not, and what target would do. It is no failure."""

    def _render_traceback_(self) -> list[str]:
        """One line where IPython would show the way to the error."""
        return [f"Not for this target: {self}"]


def need(condition: object, sentence: str) -> None:
    """End the notebook with this sentence unless the condition holds."""
    if not condition:
        raise CannotAnswer(sentence)
