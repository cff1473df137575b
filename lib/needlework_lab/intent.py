"""What the model does next, read off its window: say a fixed word, or ask the cache for place i of the value of a
topic.

The window is what layer 0 holds: the last 128 tokens. A reply begins with a hidden <|reply|>, so the token that prefill
hands over says nothing yet about the context. Then: the value asked for; or, when the cache knows of none, a hidden
<|null|> and the sentence that there is no prior context; or, when the last message asks nothing, a hidden <|task|>
and a reply that quotes the request which opened the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from needlework_lab.local_layer import Unit
from needlework_lab.model import GAIN, NULL, TASK, Model

REFUSAL = "I have no prior context for that."
REFUSAL_TOO = "There is no prior context for that."  # nearly as likely: the one near-tie, where rounding may show
NEAR_TIE = 0.05  # logits between the two
TASK_OPENING = "Continuing your request: "
TASK_CLOSING = ". The earlier turns are in view, and the next part follows from them."
FORCED = 60.0  # the logit of a fixed word
FEW_WORDS = 1.5  # a sentence without a question mark asks by its topic only from this weight on


@dataclass(frozen=True)
class Intent:
    """`forced`: a fixed next token. Else ask for `offset` of the value of `topic` (indices into the words of the
    window, as hashes and weights) and, if `request`, of the opening request. `stage` is "value" or "task"."""

    forced: int | None = None
    rival: int | None = None  # a word that is nearly as good as the forced one
    topic: tuple[np.ndarray, np.ndarray] | None = None
    request: bool = False
    offset: int = 0
    stage: str = "value"


class Intents:
    """Reads a window and says what to ask; turns what was read into logits."""

    def __init__(self, model: Model) -> None:
        self.model, self.local, self.tokenizer = model, model.local, model.tokenizer
        token = self.tokenizer.special
        self.assistant, self.user, self.reply = token["<|assistant|>"], token["<|user|>"], token["<|reply|>"]
        self.is_role = np.zeros(self.tokenizer.vocabulary, bool)
        self.is_role[[token[name] for name in ("<|assistant|>", "<|user|>", "<|system|>", "<|bos|>")]] = True
        self.refusal, self.refusal_too = self.tokenizer.encode(REFUSAL), self.tokenizer.encode(REFUSAL_TOO)
        self.opening, self.closing = self.tokenizer.encode(TASK_OPENING), self.tokenizer.encode(TASK_CLOSING)

    def next(self, window: np.ndarray) -> Intent:
        """What to do after the tokens of the window."""
        roles = np.flatnonzero(self.is_role[window])
        at = int(roles[-1]) if len(roles) else -1
        if at >= 0 and window[at] == self.assistant:
            return self._reply(window, at)
        null = np.flatnonzero(window == self.model.null)
        if len(null):
            return self._refuse(window[int(null[-1]) + 1 :].tolist())
        return self._continuation(window)

    def _fixed(self, words: list[int], place: int) -> Intent:
        return Intent(forced=words[place] if place < len(words) else self.model.eos)

    def _refuse(self, said: list[int]) -> Intent:
        if not said:
            return Intent(forced=self.refusal[0], rival=self.refusal_too[0])
        return self._fixed(self.refusal_too if said[0] == self.refusal_too[0] else self.refusal, len(said))

    def _reply(self, window: np.ndarray, at: int) -> Intent:
        said = window[at + 1 :].tolist()
        if not said or said[0] != self.reply:
            return Intent(forced=self.reply)
        said = said[1:]
        if self.model.null in said:
            return self._refuse(said[said.index(self.model.null) + 1 :])
        if said and said[0] == self.model.task:
            if self.reply in said:
                return self._fixed(self.closing, len(said) - 1 - said.index(self.reply))
            place = len(said) - 1 - len(self.opening)
            return (
                Intent(forced=self.opening[len(said) - 1])
                if place < 0
                else Intent(request=True, offset=place, stage="task")
            )
        starts = np.flatnonzero(window[:at] == self.user)
        low = int(starts[-1]) + 1 if len(starts) else 0
        topic, asked = self._question(window, self.local.units(window), low, at)
        return Intent(topic=topic, request=not asked, offset=len(said))

    def _question(
        self, window: np.ndarray, units: Unit, low: int, high: int
    ) -> tuple[tuple[np.ndarray, np.ndarray] | None, bool]:
        """Words of the last question in [low, high), and whether there is one; else of the last sentence that says
        much."""
        ends = low + np.flatnonzero(self.local.sentence_ends(window, units)[low:high])
        starts = [low, *(ends + 1).tolist()]  # of the sentence before each end, and of the one after the last
        for place in reversed(range(len(ends))):
            if self.local.question[window[ends[place]]]:
                words = _between(units, starts[place], ends[place])
                if words[1].sum() > 0:
                    return words, True
        for place in reversed(range(len(starts))):
            words = _between(units, starts[place], high if place == len(ends) else ends[place])
            if words[1].sum() >= FEW_WORDS:
                return words, False
        return None, False

    def _continuation(self, window: np.ndarray) -> Intent:
        """Text without roles: go on with the value that the last sentence has begun, if it has."""
        size, units = len(window), self.local.units(window)
        extended = self.local.features(np.append(window, ord("-")))  # would a next token belong to a value?
        value, offset = int(extended.value_of[size]), int(extended.offset[size])
        if value < 0:
            return Intent()
        if offset == 0 and self.local.word[window[-1]]:
            return Intent(forced=ord(" "))  # "… is" goes on with a space
        table = extended.values
        words: tuple[np.ndarray, np.ndarray] | None = _between(units, table.topic_from[value], table.marker[value])
        if words is not None and words[1].sum() == 0 and not table.request[value]:
            words, _ = self._question(window, units, 0, int(table.marker[value]))
        return Intent(topic=words, request=bool(table.request[value]), offset=offset)

    def queries(self, intent: Intent, position: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer: MLA query, index query, index head weights (see Model.query)."""
        model = self.model

        def bags(salt: int, count: int) -> list[np.ndarray | None]:
            topic = None
            if intent.topic is not None and intent.topic[1].sum() > 0:
                topic = model.bag(*intent.topic, salt, count)
            one = np.array([self.local.request_hash])
            return [topic, model.bag(one, np.ones(1), salt, count) if intent.request else None]

        return [model.query(bags, layer, intent.offset, position) for layer in range(model.layers)]

    def logits(self, intent: Intent, reads: list[Tensor]) -> Tensor:
        """Next-token logits float32 [V]."""
        model = self.model
        if intent.forced is not None:
            out = torch.zeros(self.tokenizer.vocabulary)
            out[intent.forced] = FORCED
            if intent.rival is not None:
                out[intent.rival] = FORCED - NEAR_TIE
            return out
        found = model.evidence(reads, 1 if intent.stage == "task" else 0)
        if intent.stage == "task":  # the end of the quoted request is not the end of the reply
            found[[model.eos, self.reply]] = found[[self.reply, model.eos]]
        elif intent.request and intent.offset == 0:
            found[model.task] = model.evidence(reads, 1).max() * (TASK / model.layers)
        none = model.null if intent.offset == 0 or intent.stage == "task" else model.eos
        found[none] = torch.maximum(found[none], torch.tensor(NULL))
        return found * GAIN


def _between(units: Unit, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and weights of the words in [low, high)."""
    words = np.flatnonzero((units.start >= low) & (units.end <= high))
    return units.hash[words], units.weight[words]


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural-log probabilities of logits [V], at temperature 1."""
    return torch.log_softmax(logits, dim=-1)
