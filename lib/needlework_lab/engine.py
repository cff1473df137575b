"""The engine: the scheduler around the forward pass. `lab.types` says how a server drives it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from needlework_lab import faults as planted
from needlework_lab.admission import Admission
from needlework_lab.forward import Forward
from needlework_lab.output import draw
from needlework_lab.paging import Running
from needlework_lab.pools import OutOfPages
from needlework_lab.types import GEOMETRIES, MAX_DRAFTS, Event, Geometry

ROLES = ("combined", "prefill", "decode")


class Engine(Admission):
    """A continuous-batching engine over paged pools. `role` is "combined", "prefill" or "decode".

    options: `prefix_cache` (default True; False in decode unless asked for), `chunk_tokens`, `max_batch`, `page_seed`
    (order of physical pages, default: seed), `threads` of torch in this process (1: its tensors are small, and
    threads that wait for one another on a busy machine made a step ten times slower), and any field of Geometry:
    a small `pages` makes the prefix cache give up pages early, `host_pages` adds a host tier behind it, `draft_tokens`
    turns speculative decoding on. Raises ValueError for anything unknown.
    """

    def __init__(
        self,
        geometry: str | Geometry = "v4",
        *,
        role: str = "combined",
        seed: int = 0,
        faults: Iterable[str] = (),
        prefix_cache: bool | None = None,
        chunk_tokens: int | None = None,
        max_batch: int = 32,
        page_seed: int | None = None,
        threads: int = 1,
        **overrides: Any,
    ) -> None:
        if isinstance(geometry, str):
            if geometry not in GEOMETRIES:
                raise ValueError(f"unknown geometry {geometry[:40]!r}; choose one of {', '.join(GEOMETRIES)}")
            geometry = GEOMETRIES[geometry]
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; choose one of {', '.join(ROLES)}")
        if chunk_tokens is not None:
            overrides["chunk_tokens"] = chunk_tokens
        specs = tuple(map(str, faults))
        try:
            g = replace(geometry, **(planted.needs(specs) | overrides))
        except TypeError:
            raise ValueError(f"unknown engine option among {', '.join(sorted(overrides))}") from None
        if g.chunk_tokens < 1 or max_batch < 1:
            raise ValueError("chunk_tokens and max_batch must be at least 1")
        if not 0 <= g.draft_tokens <= MAX_DRAFTS or g.host_pages < 0:
            raise ValueError(f"draft_tokens must be from 0 to {MAX_DRAFTS} and host_pages at least 0")
        torch.set_num_threads(threads)
        order, cached = (
            seed if page_seed is None else page_seed,
            role != "decode" if prefix_cache is None else prefix_cache,
        )
        super().__init__(g, role, seed, order=order, prefix_cache=cached, max_batch=max_batch)
        self.forward = Forward(self.model, self.memory, g, self.hooks)
        self.faults = planted.install(self, specs)

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """One forward pass: prompt chunks within the budget, then one token for every sequence whose prompt is done."""
        self._retire()
        self.hooks.apply("step_begins", None)
        events, self._aborted = self._aborted, []
        started = [seq for seq in self.running if seq.handoff is not None]
        for seq in started:  # decode role: the token that prefill has sampled is the first of the answer
            handoff, seq.handoff = seq.handoff, None
            assert handoff is not None
            seq.tokens.append(handoff.token)
            events.append(self._emit(seq, handoff.token, handoff.logprob, handoff.top_logprobs))
        decoding = [seq for seq in self.running if seq.prompt_done and seq not in started]
        for seq in decoding:
            if seq in self.running:  # not retracted meanwhile to make room
                self._propose(seq)
                self._grow(seq, len(seq.tokens))
        ready = [seq for seq in decoding if seq in self.running and seq.computed == len(seq.tokens)]
        ready += self._prefill()
        ready = self.hooks.apply("batch", ready)
        if ready:
            self.counters["forward_passes"] += 1
            views = [view for seq in ready for view in seq.views()]
            rows = iter(self.forward.logits(views))
            for seq in ready:
                events += self._answer(seq, [next(rows) for _ in range(1 + len(seq.drafts))])
        return events

    # ---- drafts ------------------------------------------------------------------------------------------------------
    def _propose(self, seq: Running) -> None:
        """Append drafts to a sequence whose last token is not computed yet, where there is room for them."""
        assert seq.output is not None
        most = min(self.geometry.draft_tokens, seq.output.left - 1)
        end = len(seq.tokens) + most
        if most > 0 and end <= len(seq.full) * self.geometry.page_tokens + self.full.free * self.geometry.page_tokens:
            seq.drafts = self.forward.drafts(seq, most)
            seq.kept_state = self.forward.keep_state(seq) if seq.drafts else []
            seq.tokens += seq.drafts

    def _answer(self, seq: Running, rows: list[torch.Tensor]) -> list[Event]:
        """Draw from the logits after the last sampled token and after each draft, as far as the drafts agree."""
        assert seq.output is not None
        drafts, known = seq.drafts, len(seq.tokens) - len(seq.drafts)
        said: list[tuple[int, float, tuple[tuple[int, float], ...]]] = []
        for row, logits in enumerate(rows):
            logits = self.hooks.apply("logits", logits, seq=seq)
            said.append(draw(logits, seq.request, known + row))
            if row == len(drafts) or said[-1][0] != drafts[row]:
                break
        if seq.request.bootstrap is not None and self.role == "prefill":
            self._hand_over(seq, *said[0])
            return []
        if self.geometry.draft_tokens and known > seq.prompt_tokens:  # the prompt's own pass verifies nothing
            seq.output.verified += 1
            self.counters["spec_verify_ct"] += 1
            self.counters["spec_proposed_tokens"] += len(drafts)
            self.counters["spec_accepted_tokens"] += len(said) - 1
        if drafts:
            kept = self.hooks.apply("accepted", len(said) - 1, seq=seq, drafts=drafts)
            self.forward.roll_back(seq, known + kept, seq.kept_state)
            seq.tokens[known:], seq.drafts, seq.kept_state = drafts[:kept], [], []
            self._publish(seq)
            self._slide(seq)
        seq.tokens.append(said[-1][0])
        events = []
        for token, logprob, top in said:
            events.append(self._emit(seq, token, logprob, top))
            if events[-1].finish_reason is not None:
                break
        return events

    def _grow(self, seq: Running, end: int) -> bool:
        """Give a sequence pages up to token `end` and compute them; retract the youngest other when the pool is
        full."""
        while True:
            try:
                self._take_pages(seq, end)
            except OutOfPages:
                others = [other for other in self.running if other is not seq and other.handoff is None]
                if not others or self.role == "decode":
                    self._forget(seq)
                    self._free(seq, finished=False)
                    assert seq.output is not None
                    self._aborted.append(seq.output.failed("the cache has no page left for this request"))
                    return False
                self._retract(others[-1])
                continue
            self._compute(seq, end)
            return True

    def _retract(self, seq: Running) -> None:
        """Take a sequence's pages away and queue it again; what it has said so far stays said."""
        self._free(seq, finished=False)
        self.running.remove(seq)
        del seq.tokens[len(seq.tokens) - len(seq.drafts) :]  # drafts that no pass has verified
        seq.drafts = []
        fresh = replace(seq, full=[], swa={}, computed=0, nodes=[], swa_held=set(), prompt_tokens=len(seq.tokens))
        self.waiting.appendleft(fresh)
        self.counters["num_retracted_reqs"] += 1

    def _compute(self, seq: Running, end: int) -> None:
        self._loaded(seq)
        place = {"seq": seq, "start": seq.computed, "end": end}
        last = end >= seq.prompt_tokens
        exports = seq.request.bootstrap is not None and self.role == "prefill"
        if exports and not seq.chunks:  # what the prefix cache has goes first, in pieces of the size of a pass
            step = max(1, self.geometry.chunk_tokens // self.geometry.page_tokens) * self.geometry.page_tokens
            for cached in [*range(step, seq.computed, step), seq.computed] if seq.computed else []:
                self._announce(seq, cached)
        early = exports and not last and self.hooks.apply("announce_early", False, last=last, **place)
        if early:
            self._announce(seq, end)
        self.hooks.apply("pass_begins", None, **place)
        self.forward.extend(seq, end)
        if exports and not last and not early:
            self._announce(seq, end)
        if not seq.drafts:
            self._publish(seq)
            self._slide(seq)

    def _prefill(self) -> list[Running]:
        """Compute prompt chunks of waiting and half-done sequences; those whose prompt is complete now."""
        budget = self.geometry.chunk_tokens
        done: list[Running] = []
        for seq in [s for s in self.running if not s.prompt_done]:
            budget = self._prefill_one(seq, budget, done)
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if not self._fits(seq):
                if not self.running and not self.held:
                    self.waiting.popleft()
                    assert seq.output is not None
                    self._aborted.append(seq.output.failed("the cache has no room for this prompt"))
                    continue
                break
            self.waiting.popleft()
            self._admit(seq)
            budget = self._prefill_one(seq, budget, done)
        return done

    def _prefill_one(self, seq: Running, budget: int, done: list[Running]) -> int:
        left = seq.prompt_tokens - seq.computed
        size = min(left, budget)
        if size < left:  # a chunk that is not the last ends on a page
            size = (seq.computed + size) // self.geometry.page_tokens * self.geometry.page_tokens - seq.computed
            if size <= 0:
                size = min(left, budget) if budget == self.geometry.chunk_tokens else 0
        if size > 0 and self._grow(seq, seq.computed + size) and seq.prompt_done:
            done.append(seq)
        return budget - size

    def _admit(self, seq: Running) -> None:
        """Start a sequence, taking over what the prefix cache has of it; at least one token is always computed."""
        restored = self._take_over(seq)
        if seq.output is not None and not seq.output.tokens:
            seq.cached, seq.cached_host = seq.computed, restored * self.geometry.page_tokens
            self.counters["num_requests"] += 1
            self.counters["prompt_tokens"] += seq.prompt_tokens
            self.counters["cached_tokens"] += seq.cached
            self.counters["cached_host_tokens"] += seq.cached_host
        self.running.append(seq)
        if seq.nodes:
            self.hooks.apply("restored", None, seq=seq)

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _emit(self, seq: Running, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Event:
        assert seq.output is not None
        self.counters["generation_tokens"] += 1
        event = seq.output.push(token, logprob, top, seq.cached, seq.cached_host)
        if event.finish_reason is not None:
            self.running.remove(seq)
            self._retired.append(seq)
        return event

    # ---- figures -----------------------------------------------------------------------------------------------------
    def info(self) -> dict[str, Any]:
        """What the deployment says about itself: sizes in effect, not wishes."""
        g = self.geometry
        return {
            "role": self.role,
            "geometry": g.name,
            "page_size": g.page_tokens,
            "chunked_prefill_size": g.chunk_tokens,
            "context_length": g.max_context,
            "index_topk": g.top_k,
            "sliding_window": g.window,
            "compress_ratio": g.ratio,
            "layers": g.layers + 1,
            "max_running_requests": self.max_batch,
            "max_total_num_tokens": (g.pages - 1) * g.page_tokens,
            "disable_radix_cache": not self.cache.enabled,
            "kv_cache_dtype": "fp8_e4m3",
            "enable_hierarchical_cache": self.host is not None,
            "speculative_algorithm": "NGRAM" if g.draft_tokens else None,
            "speculative_num_draft_tokens": g.draft_tokens or None,
            "vocab_size": self.tokenizer.vocabulary,
            "random_seed": self.seed,
        }

    def metrics(self) -> dict[str, float]:
        """Gauges, and counters ending in _total, by SGLang's names without the prefix."""
        c = self.counters
        out = {
            "num_running_reqs": float(len(self.running)),
            "num_queue_reqs": float(len(self.waiting)),
            "cache_hit_rate": c["cached_tokens"] / max(1, c["prompt_tokens"]),
            **self.occupancy(),
            **{f"{name}_total": float(value) for name, value in c.items()},
        }
        if self.geometry.draft_tokens:
            verified = max(1, c["spec_verify_ct"])
            out["spec_accept_length"] = (verified + c["spec_accepted_tokens"]) / verified
            out["spec_accept_rate"] = c["spec_accepted_tokens"] / max(1, c["spec_proposed_tokens"])
        return out
