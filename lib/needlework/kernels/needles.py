"""A lookup whose answer is known by construction: what an error in a kernel costs in needle rank and in answers.

A haystack holds one token whose key points the way of the question; all other keys are random. Four tokens share an
index key (c4: their keys summed), so the needle competes with sums of random keys, and its rank among them can be
predicted: 1 + (keys - 1) * P(a random sum scores higher). The answer is read back through real pages: select k
entries by index score, attend to them, and name the token whose code the output resembles most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import erfc, sqrt
from statistics import NormalDist
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from needlework.kernels import reference
from needlework.pages import layout_of

GROUP, KEY, CODE, SLOT = 4, 64, 48, 112  # an entry of 448 numbers is four slots of 64 key + 48 code numbers
SHARPNESS = 40.0
Function = Callable[..., Any]


@dataclass(frozen=True)
class Haystack:
    """keys [T, 64] of the tokens (unit length), tokens [T] in a vocabulary, codes [V, 48]; question [64]; needle: its
    token's place."""

    keys: Tensor
    tokens: Tensor
    codes: Tensor
    question: Tensor
    needle: int

    @property
    def entry(self) -> int:
        """The compressed entry that holds the needle."""
        return self.needle // GROUP

    @property
    def entries(self) -> int:
        return len(self.keys) // GROUP

    def index_keys(self) -> Tensor:
        """[T / 4, 128]: the summed keys of each group under a fixed isometry."""
        return self.keys.unflatten(0, (-1, GROUP)).sum(1) @ _isometry().T

    def latents(self) -> Tensor:
        """[T / 4, 512]: the four slots of each entry, and 64 rotary numbers that are zero."""
        slots = torch.cat((self.keys, self.codes[self.tokens]), 1).reshape(-1, GROUP * SLOT)
        return torch.cat((slots, torch.zeros(len(slots), KEY)), 1)


@dataclass(frozen=True)
class Found:
    """rank of the needle's entry among the index scores (1 = best), kept: whether it was selected, right: the
    answer."""

    rank: int
    kept: bool
    right: bool
    margin: float


def _isometry() -> Tensor:
    g = torch.Generator().manual_seed(20)
    return torch.linalg.qr(torch.randn(128, KEY, generator=g)).Q


def plant(tokens: int, *, strength: float = 0.8, depth: float = 0.5, seed: int = 0, vocabulary: int = 1000) -> Haystack:
    """A haystack of `tokens` (rounded down to a multiple of 4), its needle at `depth` (0 to 1).

    strength: cosine between the question and the needle's key, 0 to 1. Raises ValueError outside these ranges.
    """
    tokens -= tokens % GROUP
    if tokens < GROUP or not 0 <= strength <= 1 or not 0 <= depth <= 1:
        raise ValueError("a haystack needs at least four tokens, and strength and depth between 0 and 1")
    g = torch.Generator().manual_seed(seed)
    keys = torch.nn.functional.normalize(torch.randn(tokens, KEY, generator=g), dim=1)
    question = torch.nn.functional.normalize(torch.randn(KEY, generator=g), dim=0)
    needle = min(int(depth * tokens), tokens - 1)
    across = keys[needle] - (keys[needle] @ question) * question
    keys[needle] = strength * question + sqrt(1 - strength**2) * torch.nn.functional.normalize(across, dim=0)
    codes = (torch.randint(0, 2, (vocabulary, CODE), generator=g) * 2.0 - 1.0) / CODE**0.5
    return Haystack(keys, torch.randint(0, vocabulary, (tokens,), generator=g), codes, question, needle)


def predicted_rank(entries: int, strength: float) -> float:
    """The expected rank of a needle: random sums of four unit keys in 64 dimensions score like N(0, 4/64), the
    needle's own three neighbours like N(0, 3/64) around its strength."""
    spread = sqrt(2 * GROUP - 1) / 8  # of the difference between a random sum and the needle's
    return 1 + (entries - 1) * 0.5 * erfc(strength / spread / sqrt(2))


def predicted_recall(entries: int, strength: float, k: int) -> float:
    """The share of needles that rank at most k, by the same reckoning: 1 where every entry fits in the budget."""
    if entries <= k:
        return 1.0
    edge = 0.25 * NormalDist().inv_cdf(1 - (k - 1) / (entries - 1))  # the score that k of the random sums exceed
    return NormalDist().cdf((strength - edge) / (sqrt(GROUP - 1) / 8))


def question_heads(hay: Haystack, heads: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The question as the indexer asks it: q [1, H, 128] in fp8 numbers (float32) and weights [1, H] with q's scale
    inside."""
    g = torch.Generator().manual_seed(seed + 7)
    q = (_isometry() @ hay.question)[None] + 0.02 * torch.randn(heads, 128, generator=g)
    scale = q.abs().amax(1, keepdim=True) / 448
    return (q / scale).to(torch.float8_e4m3fn).float()[None], scale.T / heads


def exact_rank(hay: Haystack) -> int:
    """The needle's rank among unrounded index keys, in float64."""
    q, weights = question_heads(hay)
    scores = (weights.double() @ torch.relu(q[0].double() @ hay.index_keys().double().T))[0]
    return 1 + int((scores > scores[hay.entry]).sum())


@dataclass(frozen=True)
class Laid:
    """A haystack in its pages: pools, page table [1, pages], slots of the entries, and the question as each kernel
    takes it."""

    hay: Haystack
    index_pool: Tensor
    latent_pool: Tensor
    table: Tensor
    slots: Tensor
    q: Tensor
    weights: Tensor
    length: Tensor
    ask: Tensor
    index_layout: str
    latent_layout: str

    def scores(self, logits: Function = reference.indexer_logits) -> Tensor:
        """Index scores float32 [1, width]."""
        more = {} if self.index_layout == "dsa-index-fp8" else {"layout": self.index_layout}
        return logits(self.q, self.weights, self.index_pool, self.table, self.length, page_tokens=64, **more)

    def attend(self, picked: Tensor, decode: Function = reference.sparse_mla_decode) -> tuple[Tensor, Tensor]:
        """Attention of the four slots' heads to the entries at slots [1, k]: out [1, 4, 512], lse [1, 4]."""
        layout = self.latent_layout
        return decode(self.ask, self.latent_pool, picked, layout=layout, page_tokens=64, softmax_scale=SHARPNESS)


def lay_out(
    hay: Haystack, *, index_layout: str = "dsa-index-fp8", latent_layout: str = "v4-mla-fp8", keys: Tensor | None = None
) -> Laid:
    """Write a haystack into permuted pages; `keys` [T / 4, 128] replaces its index keys."""
    index, latent = layout_of(index_layout), layout_of(latent_layout)
    pages = -(-hay.entries // 64)
    table = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).to(torch.int32)[None]
    slots = (table[0].long()[:, None] * 64 + torch.arange(64)).flatten()[: hay.entries]
    index_pool = torch.zeros((pages + 1, index.page_bytes(64)), dtype=torch.uint8)
    latent_pool = torch.zeros((pages + 1, latent.page_bytes(64)), dtype=torch.uint8)
    index.scatter(index_pool, slots, hay.index_keys() if keys is None else keys)
    latent.scatter(latent_pool, slots, hay.latents())
    q, weights = question_heads(hay)
    ask = torch.zeros(1, GROUP, latent.dim)
    for slot in range(GROUP):
        ask[0, slot, slot * SLOT : slot * SLOT + KEY] = hay.question
    length = torch.tensor([hay.entries], dtype=torch.int32)
    return Laid(hay, index_pool, latent_pool, table, slots, q, weights, length, ask, index_layout, latent_layout)


def look_up(
    hay: Haystack,
    k: int = 512,
    *,
    logits: Function = reference.indexer_logits,
    select: Function = reference.select_topk,
    decode: Function = reference.sparse_mla_decode,
    **layouts: Any,
) -> Found:
    """Ask a haystack its question through real pages: store, score, select k, attend, read.

    The three functions may be any kernel with the reference's signature; `layouts` goes to `lay_out`.
    """
    laid = lay_out(hay, **layouts)
    scores = laid.scores(logits)
    picked = select(scores, laid.length, k, laid.table, page_tokens=64)
    out, lse = laid.attend(picked, decode)
    best = int(lse[0].argmax())  # the slot whose head found the sharpest match
    said = hay.codes @ out[0, best, best * SLOT + KEY : (best + 1) * SLOT].float()
    top = said.topk(2).values
    row = scores[0, : hay.entries]
    rank = 1 + int((row > row[hay.entry]).sum())
    right = int(said.argmax()) == int(hay.tokens[hay.needle])
    return Found(rank, bool((picked == laid.slots[hay.entry]).any()), right, float(top[0] - top[1]))


def budget_in_use(hay: Haystack, k: int, *, select: Function = reference.select_topk,
                  decode: Function = reference.sparse_mla_decode) -> dict[str, int]:  # fmt: skip
    """The budget at each consumer, measured and not read from a configuration.

    "asked": k; "written": width of the index list; "selected": distinct valid indices in it; "attended": how far down
    the ranking an entry's bytes still reach the output. The last is found from outside: every entry ranked worse than
    r is filled with NaN, and the smallest r that leaves the output finite is the budget.
    """
    laid = lay_out(hay)
    scores = laid.scores()
    picked = select(scores, laid.length, k, laid.table, page_tokens=64)
    order = laid.slots[torch.argsort(scores[0, : hay.entries], descending=True, stable=True)]
    low, high = 0, hay.entries
    while low < high:
        middle = (low + high) // 2
        pool = laid.latent_pool.clone()
        layout = layout_of(laid.latent_layout)
        beyond = order[middle:]
        pool[(beyond // 64)[:, None], layout["codes"].address(64)[beyond % 64]] = 0xFF
        out, _ = replace(laid, latent_pool=pool).attend(picked, decode)
        low, high = (low, middle) if bool(torch.isfinite(out).all()) else (middle + 1, high)
    valid = picked[picked >= 0]
    return {"asked": k, "written": picked.shape[1], "selected": len(valid.unique()), "attended": low}


def sweep(
    lengths: Iterable[int], *, strengths: Iterable[float], repeats: int = 5, k: int = 512, **ways: Any
) -> pd.DataFrame:
    """`look_up` over lengths (tokens) and strengths, `repeats` haystacks each at depths spread over the text.

    -> one row a question: tokens, entries, strength, depth, seed, rank, kept, right, predicted (rank).
    """
    rows = []
    for tokens in lengths:
        for strength in strengths:
            for repeat in range(repeats):
                depth = (repeat + 0.5) / repeats
                hay = plant(tokens, strength=strength, depth=depth, seed=1000 * repeat + tokens)
                found = look_up(hay, k, **ways)
                rows.append(
                    {"tokens": tokens, "entries": hay.entries, "strength": strength, "depth": depth, "seed": repeat,
                     "rank": found.rank, "kept": found.kept, "right": found.right,
                     "predicted": predicted_rank(hay.entries, strength)}
                )  # fmt: skip
    return pd.DataFrame(rows)


def errors_by_length(kernels: dict[str, Function], lengths: Iterable[int]) -> pd.DataFrame:
    """One needle in rows of growing length, scored by each kernel and held against the reference in float64.

    -> kernel, keys, norm_error, rank (of the needle), problem: a kernel that raises has no error and says why.
    """
    rows: list[tuple[str, int, float, int, str]] = []
    for tokens in lengths:
        laid = lay_out(plant(tokens, strength=0.9))
        n = laid.hay.entries
        exact = laid.scores(lambda *a, **m: reference.indexer_logits(*a, **m, dtype=torch.float64))[0, :n]
        for name, kernel in kernels.items():
            try:
                got = laid.scores(kernel)[0, :n].double()
                rank = 1 + int((got > got[laid.hay.entry]).sum())
                rows.append((name, n, float((got - exact).norm() / exact.norm()), rank, ""))
            except Exception as error:  # whatever a kernel under test raises is a finding
                rows.append((name, n, float("nan"), 0, f"{type(error).__name__}: {str(error)[:120]}"))
    return pd.DataFrame(rows, columns=["kernel", "keys", "norm_error", "rank", "problem"])
