"""diagnose, identify and compare: every fault planted at 20 random places, and silence on healthy pools."""

from __future__ import annotations

import pytest
import torch
from needlework.pages import LAYOUTS, compare, compare_dumps, diagnose, identify, page_digests
from needlework.pages.dumps import Dump
from needlework.pages.findings import MEANINGS, NONE, as_rows

from . import journeys, planting

PLACES = 20
NAMES = list(LAYOUTS)


@pytest.mark.parametrize("part", range(4))
def test_healthy_dumps_give_no_finding(part):
    for seed in range(part, 200, 4):
        layout = LAYOUTS[NAMES[seed // len(planting.KINDS) % len(NAMES)]]
        dump = planting.healthy(layout, seed)
        table = diagnose(dump.raw, layout, live=dump.live)
        assert table.empty, (layout.name, seed, table["sentence"].tolist()[:2])


@pytest.mark.parametrize("fault", planting.FAULTS)
def test_planted_faults_are_found_and_named(fault):
    right = planting.FAULTS[fault][2]
    found = named = 0
    for seed in range(PLACES):
        dump = planting.planted(fault, seed)
        table = diagnose(dump.raw, dump.layout, live=dump.live, **dump.extra)
        # of two equal pages nobody can say which is the copy
        places = [dump.page, (dump.page + 1) % 4] if fault == "repeated page" else [dump.page]
        here = table[table["page"].isin(places)]
        found += not here.empty
        named += not here.empty and set(here["name"]) <= set(right)
        assert set(table["severity"]) <= {"error", "warning"} and set(table["name"]) <= MEANINGS.keys()
    assert found == PLACES and named >= 0.95 * PLACES, (found, named)


def test_a_finding_names_its_place():
    layout = LAYOUTS["dsa-index-fp8"]
    dump = planting.healthy(layout, 0)
    dump.raw[2, 8192 + 9 * 4 : 8192 + 9 * 4 + 4] = 0
    table = diagnose(dump.raw, layout, live=dump.live)
    assert table[["name", "page", "slot", "slot_last", "field"]].values.tolist() == [["zero-scale", 2, 9, 9, "scales"]]
    assert table["sentence"][0].startswith("page 2, slot 9: the scale is zero")


def test_entries_that_are_not_live_may_hold_anything():
    layout = LAYOUTS["v4-mla-fp8"]
    dump = planting.healthy(layout, 3)
    dead = ~dump.live
    page, slot = dead.nonzero()[-1].tolist()
    layout["codes"].view(dump.raw, 64)[page, slot, 0, 0] = 0x7F
    assert diagnose(dump.raw, layout, live=dump.live).empty
    assert not diagnose(dump.raw, layout).empty


def test_diagnose_refuses_what_does_not_match():
    layout = LAYOUTS["dsa-index-fp8"]
    raw = torch.zeros(2, 8448, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"live is bool \[2, 64\]"):
        diagnose(raw, layout, live=torch.ones(3, 64, dtype=torch.bool))
    with pytest.raises(ValueError, match="before has the pool's shape"):
        diagnose(raw, layout, before=raw[:1])
    with pytest.raises(ValueError, match="one for each of 2 pages, found 1"):
        diagnose(raw, layout, digests=["x"])


# ---- identify --------------------------------------------------------------------------------------------------------
def test_identify_names_every_layout_from_one_full_page():
    wrong = []
    for number, name in enumerate(NAMES):
        for seed in range(8):
            generator = torch.Generator().manual_seed(100 * number + seed)
            kind = ("normalised", "correlated", "outlier channels", "mixed sizes", "repetitive text")[seed % 5]
            x = planting.keys(kind, 64, LAYOUTS[name].dim, generator)
            if name.endswith("fnuz"):
                x[11] = 0.0  # without a zero entry FNUZ and FN are the same bytes
            best = identify(LAYOUTS[name].encode({"values": x.view(1, 64, -1)})).iloc[0]
            if (best["layout"], best["page_tokens"]) != (name, 64):
                wrong.append((name, seed, best["layout"]))
    assert len(wrong) <= 0.01 * 8 * len(NAMES), wrong


def test_identify_says_none_on_random_and_constant_bytes():
    for size in sorted({LAYOUTS[name].page_bytes(64) for name in NAMES}):
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            table = identify(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
            assert table["layout"][0] == NONE, (size, seed)
        for byte in (0, 0x7E, 0xFF):
            assert identify(torch.full((size,), byte, dtype=torch.uint8))["layout"][0] == NONE
    assert identify(torch.zeros(101, dtype=torch.uint8))["sentence"][0].endswith("no layout has pages that divide it)")
    with pytest.raises(ValueError, match="at least one page"):
        identify(torch.zeros(0, dtype=torch.uint8))


def test_identify_knows_footers_that_were_written_as_rows():
    for name in ("dsa-index-fp8", "v4-mla-fp8", "dsa-index-fp4"):
        raw = planting.healthy(LAYOUTS[name], 1).raw
        fields = LAYOUTS[name].decode(raw)
        rows = as_rows(LAYOUTS[name]).encode({key: data for key, data in fields.items() if key != "padding"})
        best = identify(rows).iloc[0]
        assert best["layout"] == f"{name} as rows" and "which no reader" in best["sentence"]


@pytest.mark.parametrize("name", ["dsa-index-fp8", "v4-mla-fp8", "v32-mla-fp8"])
def test_identify_finds_pages_that_lie_apart(name):
    raw = planting.healthy(LAYOUTS[name], 1).raw
    for gap in (64, 192, 2048):
        best = identify(torch.nn.functional.pad(raw, (0, gap))).iloc[0]
        assert (best["layout"], best["page_bytes"], best["pages"]) == (name, raw.shape[1] + gap, len(raw))
    random = torch.randint(0, 256, (4, 8640), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert identify(random)["layout"][0] == NONE


@pytest.mark.parametrize("tokens", [2, 16, 256])
def test_identify_finds_the_page_size(tokens):
    layout = LAYOUTS["v4-mla-fp8"]
    raw = layout.encode({"values": torch.randn(512 // tokens, tokens, 512)}, tokens)
    best = identify(raw).iloc[0]
    assert (best["layout"], best["page_tokens"]) == ("v4-mla-fp8", tokens)


# ---- compare ---------------------------------------------------------------------------------------------------------
JOURNEY_LAYOUTS = (
    "dsa-index-fp8",
    "v4-mla-fp8",
    "v32-mla-fp8",
    "dsa-index-fp4",
    "v41-mla-fp8",
    "v41-mla-fp4-interleaved",
)


def test_healthy_transfers_give_no_finding():
    for seed in range(56):
        layout = LAYOUTS[NAMES[seed % len(NAMES)]]
        assert journeys.healthy(layout, seed).findings(compare).empty, (layout.name, seed)


@pytest.mark.parametrize("loss", journeys.LOSSES)
def test_planted_losses_are_found_and_named(loss):
    right = journeys.LOSSES[loss][1]
    found = named = 0
    for seed in range(PLACES):
        layout = LAYOUTS[JOURNEY_LAYOUTS[seed % len(JOURNEY_LAYOUTS)]]
        t = journeys.planted(loss, layout, seed)
        table = t.findings(compare, **({"before": t.before} if seed % 2 else {}))
        here = table[table["page"] == t.page]
        found += not here.empty
        named += not here.empty and set(here["name"]) <= set(right)
    assert found == PLACES and named >= 0.95 * PLACES, (found, named)


def test_compare_names_the_token_positions():
    layout = LAYOUTS["dsa-index-fp8"]
    t = journeys.healthy(layout, 0)
    t.arrived(1).zero_()
    table = t.findings(compare, tokens_per_entry=4, pool="c4-index", layer=3)
    row = table.iloc[0]
    assert (row["name"], row["pool"], row["layer"]) == ("missing", "c4-index", 3)
    assert (row["token_first"], row["token_last"], row["entries"]) == (256, 511, 64)


def test_moving_132_contiguous_bytes_is_caught():
    """Codes and scale of an entry lie apart in a footer page: 132 bytes in a row take the next entry's codes along."""
    layout = LAYOUTS["dsa-index-fp8"]
    t = journeys.healthy(layout, 0)
    place = int(t.received_table[2])
    good = t.received[place].clone()
    t.received[place, : 64 * 128].zero_()
    t.received[place, 8192:].zero_()
    for slot in range(62):
        t.received[place, slot * 132 : slot * 132 + 132] = good[slot * 128 : slot * 128 + 132]
    assert set(t.findings(compare)["page"]) == {2}


def test_compare_accepts_a_tolerance_and_refuses_bad_tables():
    layout = LAYOUTS["v4-mla-fp8"]
    sent = layout.encode({"values": torch.randn(2, 64, 512)})
    received = sent.clone()
    received[1, 70] ^= 1  # one code step
    assert len(compare(sent, received, layout)) == 1
    assert compare(sent, received, layout, tolerance=0.1).empty
    with pytest.raises(ValueError, match="names page 7; the pool has pages 0 to 1"):
        compare(sent, received, layout, sent_table=[0, 7])
    with pytest.raises(ValueError, match="table is empty"):
        compare(sent, received, layout, received_table=[])
    with pytest.raises(ValueError, match="999 entries do not fit"):
        compare(sent, received, layout, entries=999)


def test_compare_dumps_pairs_pools_and_refuses_unlike_peers():
    layout = LAYOUTS["dsa-index-fp8"]
    raw = layout.encode({"values": torch.randn(2, 64, 128)})
    sent = [Dump(raw, layout.name, pool="c4-index", layer=n, tokens_per_entry=4) for n in (2, 4)]
    assert compare_dumps(sent, sent).empty
    lost = compare_dumps(sent, sent[:1])
    assert (
        lost["name"].tolist() == ["missing"] and lost["layer"].tolist() == [4] and lost["token_last"].tolist() == [511]
    )
    other = Dump(raw, "dsa-index-fp8-ue8m0", pool="c4-index", layer=2)
    with pytest.raises(ValueError, match="must not be paired"):
        compare_dumps(sent[:1], [other])


def test_digests_ignore_padding_and_see_every_entry():
    layout = LAYOUTS["v4-mla-fp8"]
    raw = layout.encode({"values": torch.randn(2, 64, 512)})
    touched = raw.clone()
    touched[:, -1] = 5
    assert page_digests(raw, layout) == page_digests(touched, layout)
    touched[1, 0] ^= 1
    assert [a == b for a, b in zip(page_digests(raw, layout), page_digests(touched, layout), strict=True)] == [
        True,
        False,
    ]


def test_a_flipped_bit_is_told_from_foreign_content():
    """With digests of entries the slot is named; with those of pages alone the sentence leaves both readings open."""
    layout = LAYOUTS["dsa-index-fp8"]
    generator = torch.Generator().manual_seed(4)
    raw, other = (layout.encode({"values": torch.randn(3, 64, 128, generator=generator)}) for _ in range(2))
    exact, coarse = page_digests(raw, layout, entries=True), page_digests(raw, layout)
    assert [digest[:16] for digest in exact] == coarse
    flipped = raw.clone()
    flipped[1, 20 * 128 + 7] ^= 1
    found = diagnose(flipped, layout, digests=exact)
    assert found[["name", "page", "slot", "slot_last"]].values.tolist() == [["changed", 1, 20, 20]]
    found = diagnose(flipped, layout, digests=coarse)
    assert found["name"].tolist() == ["stale"] and "or changed in place" in found["sentence"][0]
    foreign = raw.clone()
    foreign[2] = other[2]
    found = diagnose(foreign, layout, digests=exact)
    assert found["name"].tolist() == ["stale"] and "64 of 64 entries" in found["sentence"][0]
    assert diagnose(raw, layout, digests=exact).empty
