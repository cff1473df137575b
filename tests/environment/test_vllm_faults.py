"""Each fault of the engine bench changes what it says, on caches and metadata of the engine's shapes."""

import random
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace as Plain

import numpy as np
import pytest
import torch
import vllm_faults as faults

BLOCKS = 256
torch.set_num_threads(1)


class Always(random.Random):
    """Dice by which whatever may happen does."""

    def random(self) -> float:
        return 0.0


@dataclass
class Meta:
    block_table: torch.Tensor


def site() -> faults.Site:
    g = torch.Generator().manual_seed(0)
    pools = {}
    for layer in (0, 2):
        for pool, width in (("index", faults.INDEX_BYTES), ("mla", faults.MLA_BYTES)):
            pools[pool, layer] = torch.randint(0, 200, (BLOCKS, 64 * width), dtype=torch.uint8, generator=g)
    context = torch.tensor([0] * 40 + [2048] * 600, dtype=torch.int32)
    tokens = {"context": context, "query": torch.full((640,), 600), "offset": torch.arange(640)}
    config = Plain(scheduler_config=Plain(max_num_batched_tokens=1024))
    requests = {f"r{i}": list(range(1 + 20 * i, 21 + 20 * i)) for i in range(4)}
    manager = Plain(get_block_ids=lambda name: (requests[name],))
    scheduler = Plain(kv_cache_manager=manager, running=[Plain(request_id=name) for name in requests])
    base = {"e": {0: [raw.data_ptr() for raw in pools.values()]}}
    nixl = Plain(engine_id="e", tp_rank=0, kv_caches_base_addr=base, _recving_transfers={"x": 1})
    return faults.Site(Plain(_tokens=tokens, vllm_config=config), pools, scheduler, nixl, Always(0))


def rows(decode: bool, layer: int = 2, count: int = 7) -> faults.Rows:
    lengths = torch.tensor([9001, 64 * 70, 64 * 80 + 1, 12000, 15000, 5000, 20000], dtype=torch.int32)[:count]
    indices = torch.stack([torch.randperm(int(n))[:2048] for n in lengths]).to(torch.int32)
    starts = torch.tensor([0, 0, 9000, 9000, 9000, 9000, 9000], dtype=torch.int32)[:count]
    return faults.Rows(layer, decode, indices, lengths, (lengths // 2).to(torch.int32), starts)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    def store(k, cache, slots, size, form):
        raw = faults.pages_of(cache)
        raw[:, : 64 * 128] = 7

    def schedule(lens, page, processors):
        return torch.zeros(4, 2, dtype=torch.int32)

    ops = types.ModuleType("vllm._custom_ops")
    ops.indexer_k_quant_and_cache = store
    vllm = types.ModuleType("vllm")
    vllm._custom_ops = ops
    gemm = types.ModuleType("vllm.utils.deep_gemm")
    gemm.get_paged_mqa_logits_metadata = schedule
    for name, module in (("vllm", vllm), ("vllm._custom_ops", ops), ("vllm.utils.deep_gemm", gemm)):
        monkeypatch.setitem(sys.modules, name, module)


def drive(made: faults.Hooks, here: faults.Site) -> bool:
    """Call every hook as an engine does; True when anything differs from what a healthy engine would hold."""
    before = {key: raw.clone() for key, raw in here.pools.items()}
    changed = False
    for decode in (False, True):
        for count in (1, 7):
            table = torch.arange(BLOCKS).repeat(count, 1).to(torch.int32)
            lens = torch.tensor([[9000], [64 * 300], [640], [64 * 90 + 3], [70], [64], [129]], dtype=torch.int32)[
                :count
            ]
            step = Plain(seq_lens=lens, block_table=table, schedule_metadata=torch.ones(4, 2, dtype=torch.int32))
            ends = torch.tensor([2050, 129, 4000], dtype=torch.int32)
            chunk = Plain(cu_seqlen_ke=ends.clone(), cu_seqlen_ks=torch.zeros(3, dtype=torch.int32))
            meta = Plain(decode=step if decode else None, prefill=None if decode else Plain(chunks=[chunk]))
            if "built" in made:
                made["built"](meta, None, Plain(num_sms=132))
                changed |= not torch.equal(chunk.cu_seqlen_ke, ends)
                changed |= not torch.equal(step.seq_lens, lens) or not torch.equal(step.block_table, table)
            if "selected" in made:
                for layer in (0, 2):
                    given = rows(decode, layer, count)
                    kept = given.indices.clone()
                    made["selected"](given)
                    assert given.indices.shape == kept.shape and int(given.indices.max()) <= 20000
                    changed |= not torch.equal(given.indices, kept)
    slots = torch.arange(64, 64 + 640)
    for tokens in (640, 4):
        if "index_write" in made:
            k = torch.randn(tokens, 128)
            got = made["index_write"](k, here.pools["index", 2].view(BLOCKS, 64, -1), slots[:tokens])
            changed |= got is None or not torch.equal(got[0], k) or not torch.equal(got[1], slots[:tokens])
        if "latent_write" in made:
            latent = torch.randn(tokens, 512)
            got = made["latent_write"](latent, torch.zeros(tokens, 1, 64), slots[:tokens])
            changed |= not torch.equal(got[0], latent) or not torch.equal(got[2], slots[:tokens])
    if "rotated" in made:
        changed |= not torch.equal(made["rotated"](torch.arange(640)), torch.arange(640))
    if "gathered" in made:
        scales = torch.ones(20000, 4)
        made["gathered"](torch.ones(20000, 128), scales)
        changed |= not bool(scales.all())
    if "attend" in made:
        table = torch.arange(BLOCKS)[None]
        changed |= not torch.equal(made["attend"](Meta(table)).block_table, table)
    if "topk" in made:
        changed |= made["topk"]() != 2048
    for name in ("hit", "allocated"):
        if name in made:
            made[name](list(range(10, 90)))
    if "aborted" in made:
        made["aborted"]("r0", here.blocks_of("r0"))
        if "scheduled" in made:
            here.fill(here.blocks_of("r0"), 5)  # the next owner's
            before = {key: raw.clone() for key, raw in here.pools.items()}
    for _ in range(2):
        if "arrived" in made:
            made["arrived"]("r1", list(range(30, 100)))
            made["arrived"]("r2", list(range(110, 230)))
    if "evicted" in made:
        changed |= not made["evicted"](3)
    if "hashed" in made:
        changed |= len(made["hashed"](bytes(range(32)))) != 32
    if "trimmed" in made:
        changed |= made["trimmed"]([[1, 2]], [[7, 8, 9]]) == [[7, 8]]
    for blocks in (64, 70):
        whole = np.arange(4 * blocks).reshape(4, blocks)
        if "sent" in made:
            there, own = made["sent"](whole, True), made["sent"](whole, False)
            assert len(there) == len(own) > 0
            changed |= len(there) < whole.size or not np.array_equal(there, own)
    changed |= any(not torch.equal(raw, before[key]) for key, raw in here.pools.items())
    if "scheduled" in made:
        for _ in range(8):
            made["scheduled"](here.scheduler)
        changed |= any(not torch.equal(raw, before[key]) for key, raw in here.pools.items())
    return changed


@pytest.mark.parametrize("name", faults.CATALOG)
def test_a_fault_changes_something_at_each_strength(name):
    chosen = faults.CATALOG[name]
    assert chosen.what.endswith(".") and chosen.arms and "#" in chosen.source
    for strength, parameters in chosen.strengths.items():
        here = site()
        assert drive(chosen.make(here, **parameters), here), strength


def test_nothing_planted_changes_nothing():
    assert not drive({}, site())
