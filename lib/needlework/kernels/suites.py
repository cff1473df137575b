"""The cases of each operation: a small suite that Triton's interpreter finishes in seconds, and a full one for a
GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from needlework.kernels.cases import Case, DecodeCase, LogitsCase, MergeCase, PlainCase, StoreCase, TopkCase
from needlework.kernels.reference import rope_frequencies

SIZES = ("small", "full")
STRIDED = "inputs that are slices of wider buffers"
OTHER_LAYOUT = "another page layout"
SINK = "a sink"
_TOPICS = {
    "tied": "ties",
    "equal": "ties",
    "one bin": "one coarse bin",
    "rising": "monotone",
    "falling": "monotone",
    "mostly zero": "zeros",
    "negative": "sign",
}
HIGH = "page ids whose byte offset passes 2^31"


def suite(operation: str, size: str = "small", seed: int = 0) -> tuple[Case, ...]:
    """The cases of an operation; other seeds give other numbers at the same edges. Raises ValueError for an unknown
    name."""
    if operation not in _SUITES:
        raise ValueError(f"unknown operation {str(operation)[:60]!r}; known: {', '.join(_SUITES)}")
    if size not in SIZES:
        raise ValueError(f"size must be small or full, got {size!r}")
    return tuple(_SUITES[operation](size == "full", seed * 1000))


def _store(full: bool, s: int) -> Iterator[Case]:
    yield StoreCase("random keys", s + 1)
    yield StoreCase("one key", s + 2, count=1, covers=("one",))
    yield StoreCase("each key its own magnitude", s + 3, data="spread", covers=("scale",))
    yield StoreCase("padded with -1", s + 4, padded=True, covers=("holes",))
    yield StoreCase("keys below the floor", s + 5, data="tiny", covers=("scale",))
    yield StoreCase("zero keys", s + 6, data="zero", covers=("zeros",))
    yield StoreCase("one large channel", s + 7, data="outlier", covers=("scale",))
    yield StoreCase("bf16 keys, 129 of them", s + 8, count=129, bf16=True, covers=("odd size",))
    yield StoreCase("slice of a wider buffer", s + 9, strided=True, covers=("non-contiguous",), optional=STRIDED)
    yield StoreCase("page ids around 2^31 bytes", s + 10, pages="high", covers=("high pages",), optional=HIGH)
    if full:
        yield StoreCase("many keys", s + 11, count=8191, data="spread", covers=("odd size",))


def _logits(full: bool, s: int) -> Iterator[Case]:
    edges = (1, 3, 4, 63, 64, 65, 127, 128, 129)
    yield LogitsCase("page edges", s + 1, lengths=edges, heads=64, covers=("lengths", "batch"))
    yield LogitsCase("one key more than the budget", s + 2, lengths=(511, 512, 513), covers=("lengths",))
    yield LogitsCase("one empty row", s + 3, lengths=(0, 70), covers=("empty row",))
    yield LogitsCase("past 4,096 keys", s + 4, lengths=(4161,), heads=32, covers=("long",))
    yield LogitsCase("planted needle", s + 5, lengths=(700, 61), data="needle", covers=("needle",))
    yield LogitsCase("concentrated keys", s + 6, lengths=(300,), data="concentrated", covers=("concentrated",))
    yield LogitsCase("negative weights", s + 7, lengths=(130,), data="negative", covers=("sign",))
    yield LogitsCase("each key its own scale", s + 8, lengths=(200, 333), data="spread", covers=("scale",))
    yield LogitsCase("nine keys in ten zero", s + 9, lengths=(257,), data="zeros", covers=("zeros",))
    yield LogitsCase("holes behind the last page", s + 10, lengths=(65, 10), table="holes", covers=("holes",))
    yield LogitsCase("a table without a spare column", s + 20, lengths=(200, 256), table="full", covers=("full table",))
    yield LogitsCase("two query rows per request", s + 11, lengths=((99, 100), (64, 65)), covers=("2-D lengths",))
    yield LogitsCase("eight heads", s + 12, lengths=(100,), heads=8, covers=("heads",), optional="fewer than 32 heads")
    yield LogitsCase("slices of wider buffers", s + 13, lengths=(90, 200), strided=True, covers=("non-contiguous",),
                     optional=STRIDED)  # fmt: skip
    yield LogitsCase("page ids around 2^31 bytes", s + 14, lengths=(500,), pages="high", covers=("high pages",),
                     optional=HIGH)  # fmt: skip
    yield LogitsCase(
        "fp4 keys", s + 15, lengths=(100,), layout="dsa-index-fp4", covers=("layouts",), optional=OTHER_LAYOUT
    )
    if full:
        yield LogitsCase("many rows", s + 16, lengths=tuple(range(1, 2049, 37)), covers=("batch", "lengths"))
        yield LogitsCase("2^14 and its neighbours", s + 17, lengths=(16383, 16384, 16385), covers=("lengths", "long"))
        yield LogitsCase("65,537 keys", s + 18, lengths=(65537,), data="spread", covers=("long",))


def _topk(full: bool, s: int) -> Iterator[Case]:
    yield TopkCase(
        "budget and its neighbours", s + 1, lengths=(0, 1, 511, 512, 513, 700), covers=("lengths", "empty row")
    )
    yield TopkCase("odd lengths in one batch", s + 2, lengths=(100, 5000, 2047, 4097), covers=("batch", "long"))
    yield TopkCase("planted needle", s + 3, lengths=(600, 2000), data="needle", covers=("needle",))
    for offset, data in enumerate(("tied", "equal", "one bin", "concentrated", "rising", "falling", "mostly zero",
                                   "negative", "tiny", "huge", "captured")):  # fmt: skip
        topic = _TOPICS.get(data, data)
        yield TopkCase(f"{data} scores", s + 10 + offset, lengths=(4500, 513), data=data, covers=(topic,))
    yield TopkCase(
        "16,384 and one more in one bin",
        s + 30,
        lengths=(16385, 17001),
        data="one bin",
        covers=("one coarse bin", "long"),
    )
    yield TopkCase("16,385 rising scores", s + 31, lengths=(16385,), data="rising", covers=("monotone", "long"))
    yield TopkCase("k = 16", s + 32, lengths=(15, 16, 17, 300), k=16, covers=("k",), optional="another k than 512")
    yield TopkCase("k = 1,024", s + 33, lengths=(1023, 1024, 1025, 3000), k=1024, data="tied", covers=("k",),
                   optional="another k than 512")  # fmt: skip
    yield TopkCase("k = 2,048", s + 34, lengths=(2047, 2048, 2049, 5000), k=2048, covers=("k",),
                   optional="another k than 512")  # fmt: skip
    yield TopkCase("positions, not slots", s + 35, lengths=(900, 40), translate=False, covers=("no table",),
                   optional="no page table")  # fmt: skip
    yield TopkCase("slice of a wider buffer", s + 36, lengths=(900, 700), strided=True, covers=("non-contiguous",),
                   optional=STRIDED)  # fmt: skip
    if full:
        for offset, data in enumerate(("random", "one bin", "concentrated", "captured")):
            yield TopkCase(
                f"{data} scores, long", s + 40 + offset, lengths=(65537, 131071), data=data, covers=("long",)
            )
        yield TopkCase("many rows", s + 50, lengths=tuple(range(500, 6000, 97)), covers=("batch",))


def _decode(full: bool, s: int) -> Iterator[Case]:
    yield DecodeCase("random entries", s + 1, covers=("batch",))
    yield DecodeCase("one entry", s + 2, keys=1, batch=1, covers=("one", "lengths"))
    yield DecodeCase("65 entries", s + 3, keys=65, covers=("lengths",))
    yield DecodeCase("512 entries", s + 4, keys=512, batch=1, covers=("lengths",))
    yield DecodeCase("holes anywhere", s + 5, holes=0.4, covers=("holes",))
    yield DecodeCase("nothing but holes", s + 6, holes=1.1, keys=64, covers=("empty row",))
    yield DecodeCase("one entry takes all", s + 7, data="peaked", covers=("peaked",))
    yield DecodeCase("equal entries", s + 8, data="equal", covers=("ties",))
    yield DecodeCase("scores past exp's range", s + 9, data="large", covers=("overflow",))
    yield DecodeCase("each tile its own magnitude", s + 10, data="outlier", covers=("scale",))
    yield DecodeCase("sink", s + 11, sink="random", covers=("sink",), optional=SINK)
    yield DecodeCase("sink of -inf", s + 12, sink="-inf", covers=("sink",), optional=SINK)
    yield DecodeCase("sink of +inf", s + 13, sink="+inf", covers=("sink",), optional=SINK)
    yield DecodeCase("sink and holes only", s + 14, sink="random", holes=1.1, keys=64, covers=("sink", "empty row"),
                     optional=SINK)  # fmt: skip
    yield DecodeCase("window and compressed cache", s + 15, extra_keys=192, sink="random", covers=("two caches",),
                     optional="a second cache")  # fmt: skip
    yield DecodeCase("two caches with other page sizes", s + 16, page_tokens=256, extra_keys=64, extra_page_tokens=2,
                     holes=0.2, covers=("two caches", "page size"), optional="pages of 256 and of 2")  # fmt: skip
    yield DecodeCase("second cache of holes only", s + 17, keys=64, extra_keys=64, holes=1.1,
                     covers=("two caches", "empty row"), optional="a second cache")  # fmt: skip
    yield DecodeCase("limited index list", s + 18, limited=True, batch=4, covers=("limits",), optional="topk_length")
    yield DecodeCase("slices of wider buffers", s + 19, strided=True, covers=("non-contiguous",), optional=STRIDED)
    yield DecodeCase("page ids around 2^31 bytes", s + 20, pages="high", covers=("high pages",), optional=HIGH)
    yield DecodeCase("16 heads", s + 21, heads=16, covers=("heads",), optional="fewer than 64 heads")
    yield DecodeCase("V3.2 rows", s + 22, layout="v32-mla-fp8", holes=0.2, covers=("layouts",), optional=OTHER_LAYOUT)
    yield DecodeCase("V4.1 rows", s + 23, layout="v41-mla-fp8", covers=("layouts",), optional=OTHER_LAYOUT)
    if full:
        yield DecodeCase("many rows", s + 24, batch=64, keys=512, holes=0.1, sink="random", covers=("batch",),
                         optional=SINK)  # fmt: skip
        yield DecodeCase("2,048 entries", s + 25, batch=3, keys=2048, covers=("lengths",))
        # A kernel is tuned for few rows and for many, and 132 multiprocessors part them here at 16 and 17
        yield DecodeCase("16 rows", s + 26, batch=16, keys=512, holes=0.1, covers=("batch",))
        yield DecodeCase("17 rows", s + 27, batch=17, keys=512, holes=0.1, covers=("batch", "many rows"))
        yield DecodeCase("33 rows, limited index list", s + 28, batch=33, keys=448, limited=True,
                         covers=("limits", "batch"), optional="topk_length")  # fmt: skip
        yield DecodeCase("20 rows, two caches", s + 29, batch=20, extra_keys=192, sink="random",
                         covers=("two caches", "batch"), optional="a second cache")  # fmt: skip
        yield DecodeCase("V3.2, 4 rows of 2,048", s + 30, layout="v32-mla-fp8", batch=4, keys=2048, holes=0.1,
                         covers=("layouts", "batch"), optional=OTHER_LAYOUT)  # fmt: skip
        yield DecodeCase("V3.2, 64 rows of 2,048", s + 31, layout="v32-mla-fp8", batch=64, keys=2048, holes=0.1,
                         covers=("layouts", "many rows"), optional=OTHER_LAYOUT)  # fmt: skip


def _merge(full: bool, s: int) -> Iterator[Case]:
    for offset, parts in enumerate((1, 2, 3, 8, 33)):
        yield MergeCase(f"{parts} parts", s + 1 + offset, parts=parts, covers=("splits",))
    yield MergeCase("parts without a key", s + 10, empty="+inf", covers=("empty row",))
    yield MergeCase("parts without a key, -inf", s + 11, empty="-inf", covers=("empty row",))
    yield MergeCase("log-sum-exps far apart", s + 12, spread=60.0, covers=("overflow",))
    yield MergeCase("sink", s + 13, sink=True, covers=("sink",))
    yield MergeCase("sink and empty parts", s + 14, sink=True, empty="+inf", covers=("sink", "empty row"))
    yield MergeCase(
        "odd width", s + 15, dim=100, heads=3, batch=5, covers=("odd size",), optional="another width than 512"
    )
    if full:
        yield MergeCase("160 parts of 64 rows", s + 16, parts=160, batch=64, heads=64, covers=("splits", "batch"))


def _compress(ratio: int):
    def make(count: int, cuts: tuple[int, ...], d: int, large: float = 1.0):
        def inputs(g: torch.Generator) -> dict[str, Any]:
            width = 2 * d if ratio == 4 else d
            kv = torch.randn(count, width, generator=g)
            scores = torch.randn(count, width, generator=g) * large
            return {"kv": kv, "scores": scores, "ape": torch.randn(ratio, width, generator=g), "cuts": cuts}

        return inputs

    def cases(full: bool, s: int) -> Iterator[Case]:
        r = ratio
        lengths = (1, r - 1, r, r + 1, 2 * r - 1, 2 * r, 4 * r + r // 2)
        for offset, count in enumerate(lengths):
            yield PlainCase(f"{count} tokens", s + 1 + offset, covers=("lengths",), make=make(count, (), 32))
        yield PlainCase(
            "token by token", s + 20, covers=("steps",), make=make(3 * r + 1, tuple(range(1, 3 * r + 1)), 32)
        )
        yield PlainCase(
            "cuts inside groups", s + 21, covers=("chunks",), make=make(5 * r, (r // 2 + 1, r + 1, 3 * r - 1), 32)
        )
        yield PlainCase("cuts between groups", s + 22, covers=("chunks",), make=make(5 * r, (r, 2 * r, 4 * r), 32))
        yield PlainCase("large scores", s + 23, covers=("overflow",), make=make(4 * r, (), 32, large=60.0))
        if full:
            yield PlainCase("width 512", s + 24, covers=("odd size",), make=make(64 * r + 3, (7 * r + 2,), 512))

    return cases


def _finish(full: bool, s: int) -> Iterator[Case]:
    def make(positions: tuple[int, ...], yarn: float, large: float = 1.0):
        def inputs(g: torch.Generator) -> dict[str, Any]:
            return {
                "pooled": torch.randn(len(positions), 128, generator=g) * large,
                "weight": 1 + 0.3 * torch.randn(128, generator=g),
                "positions": torch.tensor(positions),
                "frequencies": rope_frequencies(64, 160_000.0, factor=yarn),
            }

        return inputs

    yield PlainCase("first groups", s + 1, make=make((0, 4, 8), 16.0), covers=("lengths",))
    yield PlainCase("later groups", s + 2, make=make((1000, 4092, 4096), 16.0), covers=("long",))
    yield PlainCase("plain rotary base", s + 3, make=make((64, 128), 1.0), covers=("base",))
    yield PlainCase("small keys", s + 4, make=make((4, 400), 16.0, 1e-3), covers=("scale",))
    if full:
        yield PlainCase("far positions", s + 5, make=make((65_532, 1_000_000), 16.0), covers=("long",))


def _mhc(full: bool, s: int) -> Iterator[Case]:
    def make(tokens: int, hidden: int, size: float = 0.05):
        def inputs(g: torch.Generator) -> dict[str, Any]:
            return {
                "residual": torch.randn(tokens, 4, hidden, generator=g).to(torch.bfloat16),
                "weight": torch.randn(24, 4 * hidden, generator=g) * size,
                "scale": torch.tensor([1.0, 0.7, 1.5]),
                "bias": torch.randn(24, generator=g),
            }

        return inputs

    yield PlainCase("one token", s + 1, make=make(1, 256), covers=("one",))
    yield PlainCase("odd sizes", s + 2, make=make(13, 250), covers=("odd size",))
    yield PlainCase("large logits", s + 3, make=make(8, 256, 0.3), covers=("overflow",))
    yield PlainCase("hidden 4,096", s + 4, make=make(4, 4096, 0.02), covers=("model size",))
    if full:
        yield PlainCase("137 tokens, hidden 7,168", s + 5, make=make(137, 7168, 0.01), covers=("model size",))


def _router(full: bool, s: int) -> Iterator[Case]:
    def make(tokens: int, experts: int, size: float, scaling: float = 1.5):
        def inputs(g: torch.Generator) -> dict[str, Any]:
            bias = torch.randn(experts, generator=g) * 0.3
            return {
                "logits": torch.randn(tokens, experts, generator=g) * size,
                "bias": bias,
                "k": 6,
                "scaling": scaling,
            }

        return inputs

    yield PlainCase("V4-Flash", s + 1, make=make(9, 256, 1.0), covers=("model size",))
    yield PlainCase("V4-Pro", s + 2, make=make(9, 384, 1.0, 2.5), covers=("model size",))
    yield PlainCase("large logits", s + 3, make=make(5, 256, 40.0), covers=("overflow",))
    yield PlainCase("small logits", s + 4, make=make(5, 256, 1e-2), covers=("ties",))
    if full:
        yield PlainCase("many tokens", s + 5, make=make(4097, 256, 2.0), covers=("batch",))


_SUITES = {
    "store_index_keys": _store,
    "indexer_logits": _logits,
    "select_topk": _topk,
    "sparse_mla_decode": _decode,
    "merge_partials": _merge,
    "compress_c4": _compress(4),
    "compress_c128": _compress(128),
    "finish_index_keys": _finish,
    "mhc_weights": _mhc,
    "router_topk": _router,
}
