"""The cases of each operation, as tables: a small suite that Triton's interpreter finishes in seconds, and more of them
for a GPU, up to a million tokens and the batches of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from needlework.kernels.check.cases import Case, DecodeCase, LogitsCase, MergeCase, PlainCase, StoreCase, TopkCase
from needlework.kernels.reference import rope_frequencies

Inputs = Callable[[torch.Generator], dict[str, Any]]
SIZES = ("small", "full")
STRIDED = "inputs that are slices of wider buffers"
OTHER_LAYOUT = "another page layout"
OTHER_K = "another k than 512"
SINK = "a sink"
TWO = "a second cache"
HIGH = "page ids whose byte offset passes 2^31"
V32 = "v32-mla-fp8"


def suite(operation: str, size: str = "small", seed: int = 0) -> tuple[Case, ...]:
    """The cases of an operation; other seeds give other numbers at the same edges. Raises ValueError for an unknown
    name."""
    if operation not in SMALL:
        raise ValueError(f"unknown operation {str(operation)[:60]!r}; known: {', '.join(SMALL)}")
    if size not in SIZES:
        raise ValueError(f"size must be small or full, got {size!r}")
    kind, rows = SMALL[operation]
    rows = [*rows, *FULL[operation]] if size == "full" else rows
    return tuple(
        kind(name, seed * 1000 + 1 + i, tuple(filter(None, covers.split(","))), optional, **options)
        for i, (name, covers, optional, options) in enumerate(rows)
    )


def _(kind: str, covers: str = "", optional: str = "", **options: Any) -> tuple[str, str, str, dict[str, Any]]:
    """One row of a table: what is awkward, the topics it counts for, why a kernel may refuse it, and the case's
    fields."""
    return kind, covers, optional, options


def _compress(ratio: int, count: int, cuts: tuple[int, ...] = (), d: int = 32, large: float = 1.0) -> Inputs:
    def inputs(g: torch.Generator) -> dict[str, Any]:
        width = 2 * d if ratio == 4 else d
        kv, scores = torch.randn(count, width, generator=g), torch.randn(count, width, generator=g) * large
        return {"kv": kv, "scores": scores, "ape": torch.randn(ratio, width, generator=g), "cuts": cuts}

    return inputs


def _finish(positions: tuple[int, ...], yarn: float, large: float = 1.0) -> Inputs:
    return lambda g: {
        "pooled": torch.randn(len(positions), 128, generator=g) * large,
        "weight": 1 + 0.3 * torch.randn(128, generator=g),
        "positions": torch.tensor(positions),
        "frequencies": rope_frequencies(64, 160_000.0, factor=yarn),
    }


def _mhc(tokens: int, hidden: int, size: float = 0.05) -> Inputs:
    return lambda g: {
        "residual": torch.randn(tokens, 4, hidden, generator=g).to(torch.bfloat16),
        "weight": torch.randn(24, 4 * hidden, generator=g) * size,
        "scale": torch.tensor([1.0, 0.7, 1.5]),
        "bias": torch.randn(24, generator=g),
    }


def _router(tokens: int, experts: int, size: float, scaling: float = 1.5) -> Inputs:
    return lambda g: {
        "logits": torch.randn(tokens, experts, generator=g) * size,
        "bias": torch.randn(experts, generator=g) * 0.3,
        "k": 6,
        "scaling": scaling,
    }


def _compressor(r: int) -> list[Any]:
    lengths = (1, r - 1, r, r + 1, 2 * r - 1, 2 * r, 4 * r + r // 2)
    return [
        *(_(f"{n} tokens", "lengths", make=_compress(r, n)) for n in lengths),
        _("token by token", "steps", make=_compress(r, 3 * r + 1, tuple(range(1, 3 * r + 1)))),
        _("cuts inside groups", "chunks", make=_compress(r, 5 * r, (r // 2 + 1, r + 1, 3 * r - 1))),
        _("cuts between groups", "chunks", make=_compress(r, 5 * r, (r, 2 * r, 4 * r))),
        _("large scores", "overflow", make=_compress(r, 4 * r, large=60.0)),
        _("past 32,768 tokens", "long", make=_compress(r, 32_768 + r, (16_384,), 4)),
    ]


# fmt: off
SMALL: dict[str, tuple[type[Case], list[Any]]] = {
    "store_index_keys": (StoreCase, [
        _("random keys"),
        _("one key", "one", count=1),
        _("each key its own magnitude", "scale", data="spread"),
        _("padded with -1", "holes", padded=True),
        _("keys below the floor", "scale", data="tiny"),
        _("zero keys", "zeros", data="zero"),
        _("one large channel", "scale", data="outlier"),
        _("bf16 keys, 129 of them", "odd size", count=129, bf16=True),
        _("slice of a wider buffer", "non-contiguous", STRIDED, strided=True),
        _("page ids around 2^31 bytes", "high pages", HIGH, pages="high"),
        _("32,769 keys", "long", count=32_769),
    ]),
    "indexer_logits": (LogitsCase, [
        _("page edges", "lengths,batch", lengths=(1, 3, 4, 63, 64, 65, 127, 128, 129)),
        _("one key more than the budget", "lengths", lengths=(511, 512, 513)),
        _("one empty row", "empty row", lengths=(0, 70)),
        _("past 4,096 keys", "long", lengths=(4161,), heads=32),
        _("planted needle", "needle", lengths=(700, 61), data="needle"),
        _("concentrated keys", "concentrated", lengths=(300,), data="concentrated"),
        _("negative weights", "sign", lengths=(130,), data="negative"),
        _("each key its own scale", "scale", lengths=(200, 333), data="spread"),
        _("nine keys in ten zero", "zeros", lengths=(257,), data="zeros"),
        _("holes behind the last page", "holes", lengths=(65, 10), table="holes"),
        _("a table without a spare column", "full table", lengths=(200, 256), table="full"),
        _("two query rows per request", "2-D lengths", lengths=((99, 100), (64, 65))),
        _("eight heads", "heads", "fewer than 32 heads", lengths=(100,), heads=8),
        _("slices of wider buffers", "non-contiguous", STRIDED, lengths=(90, 200), strided=True),
        _("page ids around 2^31 bytes", "high pages", HIGH, lengths=(500,), pages="high"),
        _("fp4 keys", "layouts", OTHER_LAYOUT, lengths=(100,), layout="dsa-index-fp4"),
        _("33 rows", "batch", lengths=tuple(range(1, 130, 4)), heads=32),
        _("32,769 keys", "long", lengths=(32_769,), heads=32),
        _("65,537 keys", "long", lengths=(65_537,), heads=32, data="spread"),
    ]),
    "select_topk": (TopkCase, [
        _("budget and its neighbours", "lengths,empty row", lengths=(0, 1, 511, 512, 513, 700)),
        _("odd lengths in one batch", "batch,long", lengths=(100, 5000, 2047, 4097)),
        _("planted needle", "needle", lengths=(600, 2000), data="needle"),
        *(_(f"{data} scores", topic, lengths=(4500, 513), data=data) for data, topic in (
            ("tied", "ties"), ("equal", "ties"), ("one bin", "one coarse bin"), ("concentrated", "concentrated"),
            ("rising", "monotone"), ("falling", "monotone"), ("mostly zero", "zeros"), ("negative", "sign"),
            ("tiny", "tiny"), ("huge", "huge"), ("captured", "captured"))),
        _("16,384 and one more in one bin", "one coarse bin,long", lengths=(16_385, 17_001), data="one bin"),
        _("16,385 rising scores", "monotone,long", lengths=(16_385,), data="rising"),
        _("k = 16", "k", OTHER_K, lengths=(15, 16, 17, 300), k=16),
        _("k = 1,024", "k", OTHER_K, lengths=(1023, 1024, 1025, 3000), k=1024, data="tied"),
        _("k = 2,048", "k", OTHER_K, lengths=(2047, 2048, 2049, 5000), k=2048),
        _("positions, not slots", "no table", "no page table", lengths=(900, 40), translate=False),
        _("slice of a wider buffer", "non-contiguous", STRIDED, lengths=(900, 700), strided=True),
        _("33 rows", "batch", lengths=tuple(range(500, 830, 10))),
        _("32,769 rising scores", "monotone,long", lengths=(32_769,), data="rising"),
        _("65,537 captured scores", "captured,long", lengths=(65_537, 700), data="captured"),
        _("65,537 rising scores", "monotone,long", lengths=(65_537,), data="rising"),
        _("needle behind 65,536 scores", "needle,long", lengths=(65_537,), data="needle"),
    ]),
    "sparse_mla_decode": (DecodeCase, [
        _("random entries", "batch"),
        _("one entry", "one,lengths", keys=1, batch=1),
        _("65 entries", "lengths", keys=65),
        _("512 entries", "lengths", keys=512, batch=1),
        _("holes anywhere", "holes", holes=0.4),
        _("nothing but holes", "empty row", holes=1.1, keys=64),
        _("one entry takes all", "peaked", data="peaked"),
        _("equal entries", "ties", data="equal"),
        _("scores past exp's range", "overflow", data="large"),
        _("each tile its own magnitude", "scale", data="outlier"),
        _("sink", "sink", SINK, sink="random"),
        _("sink of -inf", "sink", SINK, sink="-inf"),
        _("sink of +inf", "sink", SINK, sink="+inf"),
        _("sink and holes only", "sink,empty row", SINK, sink="random", holes=1.1, keys=64),
        _("window and compressed cache", "two caches", TWO, extra_keys=192, sink="random"),
        _("two caches with other page sizes", "two caches,page size", "pages of 256 and of 2", page_tokens=256,
          extra_keys=64, extra_page_tokens=2, holes=0.2),
        _("second cache of holes only", "two caches,empty row", TWO, keys=64, extra_keys=64, holes=1.1),
        _("limited index list", "limits", "topk_length", limited=True, batch=4),
        _("slices of wider buffers", "non-contiguous", STRIDED, strided=True),
        _("page ids around 2^31 bytes", "high pages", HIGH, pages="high"),
        _("16 heads", "heads", "fewer than 64 heads", heads=16),
        _("V3.2 rows", "layouts", OTHER_LAYOUT, layout=V32, holes=0.2),
        _("V4.1 rows", "layouts", OTHER_LAYOUT, layout="v41-mla-fp8"),
        _("17 rows of 65 entries", "batch", batch=17, keys=65),
        _("17 rows, limited index list", "batch,limits", "topk_length", batch=17, keys=64, limited=True),
    ]),
    "merge_partials": (MergeCase, [
        *(_(f"{parts} parts", "splits", parts=parts) for parts in (1, 2, 3, 8, 33)),
        _("parts without a key", "empty row", empty="+inf"),
        _("parts without a key, -inf", "empty row", empty="-inf"),
        _("log-sum-exps far apart", "overflow", spread=60.0),
        _("sink", "sink", sink=True),
        _("sink and empty parts", "sink,empty row", sink=True, empty="+inf"),
        _("odd width", "odd size", "another width than 512", dim=100, heads=3, batch=5),
        _("33 rows", "batch", batch=33, sink=True),
    ]),
    "compress_c4": (PlainCase, _compressor(4)),
    "compress_c128": (PlainCase, _compressor(128)),
    "finish_index_keys": (PlainCase, [
        _("first groups", "lengths", make=_finish((0, 4, 8), 16.0)),
        _("later groups", "long", make=_finish((1000, 4092, 4096), 16.0)),
        _("plain rotary base", "base", make=_finish((64, 128), 1.0)),
        _("small keys", "scale", make=_finish((4, 400), 16.0, 1e-3)),
        _("the far end of a million tokens", "long", make=_finish((32_768, 65_536, 262_140, 1_048_572), 16.0)),
    ]),
    "mhc_weights": (PlainCase, [
        _("one token", "one", make=_mhc(1, 256)),
        _("odd sizes", "odd size", make=_mhc(13, 250)),
        _("large logits", "overflow", make=_mhc(8, 256, 0.3)),
        _("hidden 4,096", "model size", make=_mhc(4, 4096, 0.02)),
        _("33 tokens", "batch", make=_mhc(33, 256)),
    ]),
    "router_topk": (PlainCase, [
        _("V4-Flash", "model size", make=_router(9, 256, 1.0)),
        _("V4-Pro", "model size", make=_router(9, 384, 1.0, 2.5)),
        _("large logits", "overflow", make=_router(5, 256, 40.0)),
        _("small logits", "ties", make=_router(5, 256, 1e-2)),
        _("33 tokens", "batch", make=_router(33, 256, 1.0)),
    ]),
}
FULL: dict[str, list[Any]] = {
    "store_index_keys": [
        _("many keys", "odd size", count=8191, data="spread"),
        _("a prefill of a million tokens", "long", count=262_144, data="spread"),
    ],
    "indexer_logits": [
        _("many rows", "batch,lengths", lengths=tuple(range(1, 2049, 37))),
        _("2^14 and its neighbours", "lengths,long", lengths=(16_383, 16_384, 16_385)),
        _("a million tokens", "long", lengths=(262_144, 262_143, 131_073), data="spread"),
        _("256 rows in wide tables", "batch,full table", lengths=tuple(range(1, 2562, 10))[:256], columns=1024),
        _("one short row in a table for a million tokens", "full table", lengths=(100,), columns=4096),
        _("a million tokens, page ids around 2^31 bytes", "long,high pages", HIGH, lengths=(262_144,), pages="high"),
    ],
    "select_topk": [
        *(_(f"{data} scores, long", "long", lengths=(65_537, 131_071), data=data)
          for data in ("random", "one bin", "concentrated", "captured")),
        _("many rows", "batch", lengths=tuple(range(500, 6000, 97))),
        *(_(f"{data} scores, a million tokens", "long", lengths=(262_144, 262_143, 513), data=data)
          for data in ("random", "one bin", "rising", "captured", "needle")),
        _("256 rows", "batch", lengths=tuple(range(1, 2562, 10))[:256], data="captured"),
    ],
    "sparse_mla_decode": [
        _("many rows", "batch", SINK, batch=64, keys=512, holes=0.1, sink="random"),
        _("2,048 entries", "lengths", batch=3, keys=2048),
        # A kernel is tuned for few rows and for many, and 132 multiprocessors part them here at 16 and 17
        _("16 rows", "batch", batch=16, keys=512, holes=0.1),
        _("17 rows", "batch,many rows", batch=17, keys=512, holes=0.1),
        _("33 rows of 448, limited index list", "limits,batch", "topk_length", batch=33, keys=448, limited=True),
        _("20 rows, two caches", "two caches,batch", TWO, batch=20, extra_keys=192, sink="random"),
        _("V3.2, 4 rows of 2,048", "layouts,batch", OTHER_LAYOUT, layout=V32, batch=4, keys=2048, holes=0.1),
        _("V3.2, 64 rows of 2,048", "layouts,many rows", OTHER_LAYOUT, layout=V32, batch=64, keys=2048, holes=0.1),
        _("256 rows", "batch", SINK, batch=256, keys=512, holes=0.1, sink="random"),
    ],
    "merge_partials": [_("160 parts of 64 rows", "splits,batch", parts=160, batch=64, heads=64)],
    "compress_c4": [_("width 512", "odd size", make=_compress(4, 259, (30,), 512))],
    "compress_c128": [_("width 512", "odd size", make=_compress(128, 8195, (898,), 512))],
    "finish_index_keys": [_("far positions", "long", make=_finish((65_532, 1_000_000), 16.0))],
    "mhc_weights": [_("137 tokens, hidden 7,168", "model size", make=_mhc(137, 7168, 0.01))],
    "router_topk": [_("many tokens", "batch", make=_router(4097, 256, 2.0))],
}
# fmt: on
