"""Broken kernels that are right on short rows and small batches: only rows past 32,768 or batches past 16 show them.

Sixteen-bit positions and counters, tables and grids of a fixed size, a second launch for many rows: each is a fault
that a check of a few thousand keys passes.
"""

from __future__ import annotations

import torch
from mutants import Mutant
from needlework.kernels import reference as ref

LONG, MANY = 32_768, 16
LONG_MUTANTS: list[Mutant] = []


def add(operation: str, **functions) -> None:
    LONG_MUTANTS.extend(Mutant(operation, fault.replace("_", " "), function) for fault, function in functions.items())


def folded(rows: torch.Tensor) -> torch.Tensor:
    """Rows past the sixteenth are taken from the first sixteen."""
    return rows[torch.arange(len(rows)) % MANY]


def many(function, change):
    """`function`, but what it gives for more than 16 rows goes through change(result)."""
    return lambda *args, **more: (lambda out: out if len(rows_of(out)) <= MANY else change(out))(
        function(*args, **more)
    )


def rows_of(out):
    return out[0] if isinstance(out, tuple) else out


def of_first(change):
    """Apply to the first of a tuple of results."""
    return lambda out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def last_tile_unwritten(out: torch.Tensor) -> torch.Tensor:
    left = torch.empty_like(out)
    whole = len(out) // MANY * MANY
    left[:whole] = out[:whole]
    return left


# ---- indexer_logits --------------------------------------------------------------------------------------------------
def scores(change):
    """Right logits, then change(out [B, L]) where a row passes 32,768 keys."""

    def run(q, weights, pool, page_table, lengths, **more):
        out = ref.indexer_logits(q, weights, pool, page_table, lengths, **more)
        return change(out) if int(lengths.max()) > LONG else out

    return run


def given(**changes):
    """Logits from arguments that a fault altered: changes[name](value)."""

    def run(q, weights, pool, page_table, lengths, **more):
        args = {"q": q, "weights": weights, "pool": pool, "page_table": page_table, "lengths": lengths}
        return ref.indexer_logits(**{n: changes[n](v) if n in changes else v for n, v in args.items()}, **more)

    return run


def wrapped_columns(bits: int):
    size = 2**bits // 64
    return lambda table: table[:, torch.arange(table.shape[1]) % size]


def zero_from(out: torch.Tensor, start: int) -> torch.Tensor:
    out[..., start:] = torch.where(torch.isneginf(out[..., start:]), out[..., start:], 0.0)
    return out


add(
    "indexer_logits",
    stops_at_32768_keys=scores(lambda out: zero_from(out, LONG)),
    page_table_of_512_columns=given(page_table=wrapped_columns(15)),
    page_column_in_10_bits=given(page_table=wrapped_columns(16)),
    signed_16_bit_column_leaves_the_rest_unwritten=scores(
        lambda out: torch.cat((out[..., :LONG], torch.empty_like(out[..., LONG:])), -1)
    ),
    second_grid_starts_over=scores(lambda out: torch.cat((out[..., :LONG], out[..., : out.shape[-1] - LONG]), -1)),
    key_65536_counted_as_key_0=scores(
        lambda out: torch.cat((out[..., : 2 * LONG], out[..., : max(0, out.shape[-1] - 2 * LONG)]), -1)
    ),
    long_rows_kept_in_e5m2=scores(lambda out: out.to(torch.float8_e5m2).float()),
    rows_past_16_read_the_first_tables=given(page_table=folded),
    rows_past_16_use_the_first_weights=given(weights=folded),
    rows_past_16_use_the_first_lengths=given(lengths=folded),
    last_tile_of_16_rows_unwritten=many(ref.indexer_logits, last_tile_unwritten),
)


# ---- select_topk -----------------------------------------------------------------------------------------------------
def picks(change):
    """The right positions, then change(positions, row length) in rows past 32,768."""

    def run(logits, lengths, k, page_table=None, *, page_tokens=64):
        out = ref.select_topk(logits, lengths, k)
        for b in torch.nonzero(lengths > LONG).flatten().tolist():
            out[b] = change(out[b], logits[b, : int(lengths[b])], k)
        return out if page_table is None else ref.slots_of(out, page_table, page_tokens)

    return run


def of_chunks(row: torch.Tensor, k: int, chunks: int) -> torch.Tensor:
    return torch.topk(row[: chunks * 16_384], k).indices.to(torch.int32)


def many_rows(change):
    """Selection whose lengths a second launch takes wrongly when there are more than 16 rows."""

    def run(logits, lengths, k, page_table=None, **more):
        return ref.select_topk(logits, change(lengths) if len(lengths) > MANY else lengths, k, page_table, **more)

    return run


def narrow_table(logits, lengths, k, page_table=None, *, page_tokens=64):
    table = None if page_table is None else wrapped_columns(15)(page_table)
    return ref.select_topk(logits, lengths, k, table, page_tokens=page_tokens)


add(
    "select_topk",
    only_two_chunks_are_merged=picks(lambda p, row, k: of_chunks(row, k, 2)),
    only_four_chunks_are_merged=picks(lambda p, row, k: of_chunks(row, k, 4)),
    fifteen_bits_of_a_position=picks(lambda p, row, k: p & 0x7FFF),
    sixteen_bits_of_a_position=picks(lambda p, row, k: p & 0xFFFF),
    long_rows_in_bf16=picks(lambda p, row, k: torch.topk(row.bfloat16(), k).indices.to(torch.int32)),
    page_table_of_512_columns=narrow_table,
    every_second_key_of_a_long_row=picks(lambda p, row, k: 2 * torch.topk(row[::2], k).indices.to(torch.int32)),
    rows_past_16_use_the_first_lengths=many_rows(folded),
    last_tile_of_16_rows_unwritten=many(ref.select_topk, last_tile_unwritten),
    rows_past_16_repeat_the_first=many(ref.select_topk, folded),
)


# ---- attention, merging and what comes before ------------------------------------------------------------------------
def decode_given(**changes):
    def run(q, pool, indices, **more):
        args = {"q": q, "indices": indices, **more}
        if len(q) > MANY:
            args |= {name: change(args[name]) for name, change in changes.items() if args.get(name) is not None}
        return ref.sparse_mla_decode(pool=pool, **args)

    return run


def store_from(start: int, change):
    """Keys from `start` on are written wrongly: change(slots, keys)."""

    def run(pool, slots, keys, page_tokens=64):
        ref.store_index_keys(pool, slots[:start], keys[:start], page_tokens)
        if len(keys) > start:
            ref.store_index_keys(pool, *change(slots[start:], keys[start:]), page_tokens)

    return run


def turns_round(compress):
    """A token's place in its group from a signed 16-bit position: negative past 32,767, so that the bias is read
    backwards."""

    def run(kv, scores, ape, state=None):
        near = max(0, LONG - (0 if state is None else state.position))
        entries, after = compress(kv[:near], scores[:near], ape, state)
        if len(kv) > near:
            more, after = compress(kv[near:], scores[near:], ape.flip(0), after)
            entries = torch.cat((entries, more))
        return entries, after

    return run


add(
    "sparse_mla_decode",
    rows_past_16_ask_the_first_questions=decode_given(q=folded),
    rows_past_16_read_the_first_lists=decode_given(indices=folded),
    rows_past_16_lose_their_last_entry=decode_given(indices=lambda i: torch.cat((i[:, :-1], i[:, :1] * 0 - 1), 1)),
    rows_past_16_ignore_their_limits=decode_given(topk_length=lambda n: n.clamp_min(1 << 20)),
    last_tile_of_16_rows_unwritten=many(ref.sparse_mla_decode, of_first(last_tile_unwritten)),
)
add(
    "merge_partials",
    rows_past_16_repeat_the_first=many(ref.merge_partials, of_first(folded)),
    last_tile_of_16_rows_unwritten=many(ref.merge_partials, of_first(last_tile_unwritten)),
)
add(
    "store_index_keys",
    keys_past_32768_are_not_written=store_from(LONG, lambda s, k: (s[:0], k[:0])),
    keys_past_32768_start_over=store_from(LONG, lambda s, k: (s, k * 0 + 1.0)),
)
add("compress_c4", signed_16_bit_position=turns_round(ref.compress_c4))
add("compress_c128", signed_16_bit_position=turns_round(ref.compress_c128))
add(
    "finish_index_keys",
    position_in_15_bits=lambda pooled, weight, positions, frequencies: ref.finish_index_keys(
        pooled, weight, positions & 0x7FFF, frequencies
    ),
)
add("mhc_weights", tokens_past_16_repeat_the_first=many(ref.mhc_weights, of_first(folded)))
add("router_topk", tokens_past_16_repeat_the_first=many(ref.router_topk, of_first(folded)))
