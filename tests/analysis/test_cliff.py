import math
import time

import numpy as np
import pytest
from needlework.analysis.cliff import CliffSearch, EdgeWalk, constants_in


def run(search, curve, seed=0, batch=1):
    coin = np.random.default_rng([seed, 9])
    while not search.done:
        lengths = search.propose(batch)
        search.update(lengths, [coin.random() < curve(length) for length in lengths])
    return search.result()


def step(edge, top=0.98, bottom=0.02):
    return lambda length: top if length <= edge else bottom


def test_sharp_cliffs_are_found_with_few_requests():
    rng = np.random.default_rng(3)
    requests, right, covered = [], 0, 0
    for seed in range(16):
        edge = 2 ** rng.uniform(10.5, 16.5)
        result = run(CliffSearch(1_000, 128_000, seed=seed), step(edge), seed)
        requests.append(result.requests)
        right += abs(math.log2(result.threshold / edge)) <= math.log2(1.05)
        covered += edge in result.interval
    assert np.mean(requests) <= 20 and right >= 15 and covered >= 13


def test_soft_and_partial_falls_are_found():
    right = 0
    for seed in range(3):
        edge = 3_000 + 4_000 * seed
        result = run(CliffSearch(1_000, 128_000, seed=seed), step(edge, 0.95, 0.30), seed)
        right += abs(math.log2(result.threshold / edge)) <= math.log2(1.05)
        soft = run(
            CliffSearch(1_000, 128_000, tolerance=0.15, seed=seed),
            lambda x, edge=edge: 0.03 + 0.94 / (1 + (x / edge) ** (2 * math.log(9) / math.log(2))),
            seed,
        )
        right += abs(math.log2(soft.threshold / edge)) <= math.log2(1.15)
        assert soft.width_interval.high >= 0.7
    assert right >= 5


def test_healthy_and_dead_endpoints_have_no_cliff():
    healthy = run(CliffSearch(1_000, 64_000), lambda _: 0.98)
    assert healthy.state == "no cliff" and "no cliff" in str(healthy) and healthy.requests <= 20
    dead = run(CliffSearch(1_000, 64_000), lambda _: 0.02)
    assert dead.state == "below range" and "already low at 1,000" in str(dead)
    flaky = run(CliffSearch(1_000, 64_000, limit=60), lambda _: 0.75, seed=4)
    assert flaky.state in {"no cliff", "unsettled"}


def test_same_seed_and_outcomes_give_the_same_questions():
    first, second = CliffSearch(1_000, 9_000, seed=7), CliffSearch(1_000, 9_000, seed=7)
    for _ in range(6):
        lengths = first.propose(3)
        assert lengths == second.propose(3) and len(lengths) == 3
        hits = [length <= 4_096 for length in lengths]
        first.update(lengths, hits)
        second.update(lengths, hits)
    assert first.result() == second.result()


def test_batches_spread_and_no_measurement_counts_for_nothing():
    search = CliffSearch(1_000, 64_000)
    lengths = search.propose(8)
    assert len(set(lengths)) >= 5 and all(1_000 <= length <= 64_000 for length in lengths)
    search.update(lengths, [float("nan")] * 7 + [None])
    assert search.requests == 0 and search.result().state == "unsettled"
    assert run(CliffSearch(1_000, 64_000), step(4_096), batch=8).state == "cliff"


def test_update_is_fast():
    search = CliffSearch(1_000, 128_000)
    search.propose(1)
    start = time.process_time()
    for _ in range(10):
        lengths = search.propose(1)
        search.update(lengths, [length < 5_000 for length in lengths])
    assert (time.process_time() - start) / 10 < 0.05


def test_walk_finds_the_exact_token():
    rng = np.random.default_rng(0)
    exact, requests = 0, []
    for _ in range(100):
        edge = int(rng.integers(3_900, 4_300))
        walk = EdgeWalk(3_890, 4_310, top=0.97, bottom=0.03)
        while not walk.done:
            lengths = walk.propose()
            walk.update(lengths, [rng.random() < (0.98 if x <= edge else 0.02) for x in lengths])
        exact += walk.edge == edge and walk.state == "edge"
        requests.append(walk.requests)
    assert exact >= 97 and np.mean(requests) < 22


@pytest.mark.parametrize("batch", [2, 4])
def test_walk_settles_in_batches_too(batch):
    rng = np.random.default_rng(batch)
    exact = 0
    for edge in rng.integers(3_900, 4_300, 40):
        walk = EdgeWalk(3_890, 4_310)
        while not walk.done:
            lengths = walk.propose(batch)
            walk.update(lengths, [rng.random() < (0.98 if x <= edge else 0.02) for x in lengths])
        exact += walk.edge == edge and walk.state == "edge" and walk.requests < 60
    assert exact >= 38


def test_walk_says_when_the_edge_is_elsewhere():
    for truth, state in ((10, "below range"), (10_000, "above range")):
        walk = EdgeWalk(100, 200)
        while not walk.done:
            lengths = walk.propose()
            walk.update(lengths, [x <= truth for x in lengths])
        assert walk.state == state
    assert EdgeWalk(100, 200).state == "unsettled"


def test_constants():
    config = {"topk": 512, "ratio": 4, "window": 128, "page": 64, "chunk": 2048, "context_limit": 65536}
    exact = constants_in((2048, 2048), config)
    assert exact[0].value == 2048 and "top-k x ratio" in exact[0].formula
    assert any(c.formula == "1 x chunk = 1 x 2048" for c in exact)
    assert constants_in((32_760, 32_775), config)[0].value in (32_768, 32_770)
    wide = constants_in((2_000, 2_400), config)
    assert all(not c.specific for c in wide if "page" in c.formula) and wide[0].specific
    assert constants_in((5_001, 5_010), config) == []
    assert constants_in((4_096, 4_097))[0].value == 4_096


@pytest.mark.parametrize(
    "call",
    [
        lambda: CliffSearch(10, 10),
        lambda: CliffSearch(1, 10, tolerance=2),
        lambda: CliffSearch(1, 10).update([1], []),
        lambda: CliffSearch(1, 10).propose(0),
        lambda: EdgeWalk(5, 5),
        lambda: EdgeWalk(1, 5, top=0.5, bottom=0.5),
        lambda: constants_in((5, 1)),
    ],
)
def test_bad_input_is_one_sentence(call):
    with pytest.raises(ValueError):
        call()
