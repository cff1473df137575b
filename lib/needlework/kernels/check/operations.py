"""What can be checked: each operation with its reference, how it is called, and how its outputs are held against the
reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from needlework.kernels import reference
from needlework.kernels.check.compare import LIMITS, Comparison, compare_exact, compare_topk, compare_values
from needlework.pages import formats, layout_of

Inputs = dict[str, Any]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """name; summary; reference; invoke(function, inputs) -> outputs; compare(inputs, got, want) -> comparisons.

    unit: what a row is counted in; repeatable: two runs must give equal bits (a selection may order its result anew
    each time); double: the reference can run in float64.
    """

    name: str
    summary: str
    reference: Callable[..., Any]
    invoke: Callable[[Callable[..., Any], Inputs], Outputs]
    compare: Callable[[Inputs, Outputs, Outputs], list[Comparison]]
    unit: str = "keys"
    repeatable: bool = True
    double: bool = False

    def want(self, inputs: Inputs, dtype: torch.dtype | None = None) -> Outputs:
        """What the reference gives, in one piece even where the case cuts its tokens into chunks."""
        whole = {**inputs, "cuts": ()} if "cuts" in inputs else inputs
        return self.invoke(self.reference, whole | ({} if dtype is None else {"dtype": dtype}))


def extent(inputs: Inputs) -> dict[str, int]:
    """How large a case is: its longest row (keys, entries, parts or tokens), its batch, and its highest page id."""
    tokens, row, batch, page = inputs.get("page_tokens", 64), 0, 0, 0
    if "lengths" in inputs:
        row, batch = int(inputs["lengths"].max()), len(inputs["lengths"])
        page = int(inputs["page_table"].max()) if "page_table" in inputs else 0
    elif "indices" in inputs:
        extra = inputs.get("extra_indices")
        row, batch = inputs["indices"].shape[1] + (0 if extra is None else extra.shape[1]), len(inputs["indices"])
        page = max(0, int(inputs["indices"].max())) // tokens
    elif "slots" in inputs:
        row, page = len(inputs["slots"]), max(0, int(inputs["slots"].max())) // tokens
    elif "outs" in inputs:
        row, batch = inputs["outs"].shape[:2]
    elif "positions" in inputs:
        row = int(inputs["positions"].max()) + 1
    else:
        row = len(next(iter(inputs.values())))
    return {"row": row, "batch": batch, "page": page}


def _plain(function: Callable[..., Any], inputs: Inputs) -> Outputs:
    out = function(**inputs)
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _looked_at(inputs: Inputs) -> Tensor:
    """Pages whose bytes are compared after a write: all of a small pool, else those written, their neighbours and
    page 0."""
    pages = len(inputs["pool"])
    if inputs["pool"].numel() <= 64 << 20:
        return torch.arange(pages, device=inputs["pool"].device)
    slots = inputs["slots"]
    own = slots[slots >= 0] // inputs["page_tokens"]
    return torch.cat([own - 1, own, own + 1, own.new_zeros(1)]).clamp(0, pages - 1).unique().long()


def _in_place(function: Callable[..., Any], inputs: Inputs) -> Outputs:
    """The pages after the write; the pool is then put back, so that a pool past 2^31 bytes need not be copied."""
    pages = _looked_at(inputs)
    before = inputs["pool"][pages]
    function(**inputs)
    after = inputs["pool"][pages]
    inputs["pool"][pages] = before
    return (after,)


def _chunked(function: Callable[..., Any], inputs: Inputs) -> Outputs:
    """Entries over all chunks of the tokens; the function keeps its state in whatever form it likes."""
    state, parts, start = None, [], 0
    for end in (*inputs["cuts"], len(inputs["kv"])):
        entries, state = function(inputs["kv"][start:end], inputs["scores"][start:end], inputs["ape"], state)
        parts.append(entries)
        start = end
    return (torch.cat(parts),)


def _compare_store(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    layout, tokens = layout_of("dsa-index-fp8"), inputs["page_tokens"]
    slots, pages = inputs["slots"].cpu().long(), _looked_at(inputs).cpu()
    slots = slots[slots >= 0]
    slots = torch.searchsorted(pages, slots // tokens) * tokens + slots % tokens  # as places among the pages looked at
    ours, theirs = (pool[0].cpu() for pool in (got, want))
    if ours.shape != theirs.shape:
        return [compare_exact("pool", ours, theirs)]
    written = torch.zeros(ours.shape, dtype=torch.bool)
    for field in layout.fields:
        address = field.address(tokens)
        written[(slots // tokens)[:, None], address[slots % tokens]] = True

    def at(index: Sequence[int]) -> str:
        return f"page {int(pages[index[0]])}, byte {index[1]}"

    def entry(index: Sequence[int]) -> str:
        slot = int(slots[index[0]])
        return f"page {int(pages[slot // tokens])}, slot {slot % tokens}"

    untouched = compare_exact(
        "bytes that are not its own", ours.masked_fill(written, 0), theirs.masked_fill(written, 0), locate=at
    )
    fields = {}
    for name in ("codes", "scales"):
        view = [layout[name].view(pool, tokens)[slots // tokens, slots % tokens].flatten(1) for pool in (ours, theirs)]
        fields[name] = view
    codes = [formats.decode(c, "e4m3fn") for c in fields["codes"]]
    scales = [s.view(torch.float32) for s in fields["scales"]]
    return [
        untouched,
        compare_values("scales", scales[0], scales[1], LIMITS["float32"], locate=entry),
        compare_values("codes", codes[0], codes[1], LIMITS["codes"], locate=entry),
    ]


def _compare_logits(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    """Only columns below a row's length count: behind it public kernels leave -inf, zeros or garbage."""
    lengths, tokens, table = inputs["lengths"].cpu(), inputs["page_tokens"], inputs["page_table"].cpu()
    width = want[0].shape[-1]
    valid = torch.arange(width) < lengths[..., None]

    def place(index: Sequence[int]) -> str:
        page = int(table[index[0], index[-1] // tokens])
        return f"request {index[0]}, key {index[-1]} (page {page}, slot {index[-1] % tokens})"

    return [compare_values("logits", got[0], want[0], LIMITS["logits"], valid=valid, locate=place)]


def _compare_selection(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    table, tokens = inputs.get("page_table"), inputs.get("page_tokens", 64)
    return [compare_topk(got[0], inputs["logits"], inputs["lengths"], inputs["k"], table, tokens)]


def _head(index: Sequence[int]) -> str:
    names = ("request", "head", "channel")
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=False))


def _compare_attention(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    suffix = "-v32" if str(inputs.get("layout", "")).startswith("v32") else ""
    out = compare_values("output", got[0], want[0], LIMITS["attention" + suffix], locate=_head)
    if len(got) < 2:
        return [out]
    # an empty row's log-sum-exp is a convention (+inf in FlashMLA, -inf in sm120 kernels): it must be infinite
    ours, theirs = got[1], want[1]
    if ours.shape == theirs.shape:
        ours = torch.where(torch.isneginf(ours) & torch.isposinf(theirs.to(ours)), theirs.to(ours), ours)
    return [out, compare_values("log-sum-exp", ours, theirs, LIMITS["lse" + suffix], locate=_head)]


def _compare_merge(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    names = ("output", "log-sum-exp")
    return [compare_values(n, g, w, LIMITS["float32"], locate=_head) for n, g, w in zip(names, got, want, strict=True)]


def _named(*names: str) -> Callable[[Inputs, Outputs, Outputs], list[Comparison]]:
    def compare(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
        return [compare_values(n, g, w, LIMITS["float32"]) for n, g, w in zip(names, got, want, strict=True)]

    return compare


def _compare_router(inputs: Inputs, got: Outputs, want: Outputs) -> list[Comparison]:
    """Weights laid out over all experts, so that the order of the chosen ones does not count."""
    if tuple(got[0].shape) != tuple(want[0].shape):
        return [compare_exact("expert ids", got[0], want[0])]
    experts = inputs["logits"].shape[1]
    dense = [
        torch.zeros(len(w), experts, dtype=torch.float64).scatter_(1, ids.cpu().long(), w.cpu().double())
        for ids, w in (got[:2], want[:2])
    ]
    return [
        compare_values(
            "expert weights", dense[0], dense[1], LIMITS["float32"], locate=lambda i: "token {}, expert {}".format(*i)
        )
    ]


def _operation(name: str, summary: str, invoke=_plain, compare=_compare_attention, **more: Any) -> Operation:
    return Operation(name, summary, getattr(reference, name), invoke, compare, **more)


OPERATIONS = {
    operation.name: operation
    for operation in (
        _operation("store_index_keys", "index keys to fp8, into their pages", _in_place, _compare_store),
        _operation("indexer_logits", "score every index key", _plain, _compare_logits, double=True),
        _operation("select_topk", "the k best keys, as slots", _plain, _compare_selection, repeatable=False),
        _operation("sparse_mla_decode", "attend to the selected entries", unit="entries", double=True),
        _operation("merge_partials", "one softmax from split parts", _plain, _compare_merge, unit="parts"),
        _operation("compress_c4", "pool tokens in overlapping groups of 4", _chunked, _named("entries"), unit="tokens"),
        _operation("compress_c128", "pool tokens in groups of 128", _chunked, _named("entries"), unit="tokens"),
        _operation("finish_index_keys", "norm, rotate and transform index keys", _plain, _named("keys"), unit="tokens"),
        _operation("mhc_weights", "how residual streams mix", _plain, _named("pre", "post", "comb"), unit="tokens"),
        _operation("router_topk", "choose and weigh experts", _plain, _compare_router, unit="tokens"),
    )
}


def operation_of(name: str) -> Operation:
    """An operation by name. Raises ValueError that lists the known names."""
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {str(name)[:60]!r}; known: {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
