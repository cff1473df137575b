"""Prompts built for one endpoint: exact by its tokenise route, or estimated and learnt from its usage."""

from __future__ import annotations

from needlework.serving import Endpoint, TransportError, counts
from needlework.serving.scrub import private

from .fitting import Ratio, build
from .journal import Journal
from .prompts import Messages, Prompt
from .specs import PromptSpec, digest

KEPT = 64  # prompts: an A/B sends each of them several times


class Builder:
    """Builds prompts with the counts of `endpoint`, which must have been probed; counts are kept in the journal.

    tolerance   tokens by which a prompt may miss its target length
    """

    def __init__(self, endpoint: Endpoint, journal: Journal, tolerance: int = 0):
        self.endpoint, self.journal, self.tolerance = endpoint, journal, tolerance
        self._ratios: dict[str, Ratio] = {}
        self._built: dict[str, Prompt] = {}
        self._overhead: int | None = None

    async def build(self, spec: PromptSpec) -> Prompt:
        """The prompt of a specification; raises RuntimeError when the tokenise route fails."""
        key = digest(spec.as_dict())
        if key not in self._built:
            ratio = self._ratios.setdefault(spec.genre, Ratio())
            counted = self.endpoint.capabilities.tokenize != "usage"
            if len(self._built) > KEPT:
                self._built.pop(next(iter(self._built)))
            try:
                prompt = await build(
                    spec, self._count if counted else None, ratio,
                    tolerance=self.tolerance, run_salt=self.journal.salt,
                )  # fmt: skip
            except TransportError as error:
                raise RuntimeError(f"the endpoint's tokenize route fails: {error.reason}") from None
            self._built[key] = prompt
        return self._built[key]

    def learn(self, prompt: Prompt, realised: int) -> None:
        """Take the server's own count of a prompt whose length was an estimate."""
        self._ratios.setdefault(prompt.spec.genre, Ratio()).learn(prompt.text, realised)

    async def _count(self, messages: Messages) -> int:
        found = self.endpoint.capabilities
        sha = digest([private(found.model), found.tokenize, messages], 32)  # as the manifest has it
        count = self.journal.count(sha)
        if count is None:
            count = await counts.count_tokens(self.endpoint, messages)
            if count is None:
                raise TransportError("the tokenize route gave no count")
            self.journal.add_count(sha, count)
        if found.tokenize == "text":  # the template's share is not counted by the text form: learn it from usage, once
            if self._overhead is None:
                hello = [{"role": "user", "content": "Hello."}]
                reply = await self.endpoint.chat(hello, max_tokens=1, fields=found.fields())
                bare = await counts.count_tokens(self.endpoint, hello)
                self._overhead = max(0, (reply.prompt_tokens or bare or 0) - (bare or 0))
            count += self._overhead
        return count
