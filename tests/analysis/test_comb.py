import numpy as np
import pytest
from needlework.analysis.comb import ResidueScan


def scan(period, dead, start=1_001, miss=0.0, seed=0):
    rng = np.random.default_rng([seed, 3])
    planner = ResidueScan(start, period)
    while not planner.done:
        lengths = np.array(planner.propose(16))
        chance = np.full(len(lengths), 1 - miss)
        if dead:
            chance[lengths % dead[0] == dead[1]] = 0.0
        planner.update(lengths, rng.random(len(lengths)) < chance)
    return planner.result()


@pytest.mark.parametrize(
    ("period", "scanned", "requests"), [(4, 4, 7), (16, 16, 20), (64, 64, 71), (128, 128, 139), (4, 128, 139)]
)
def test_clean_combs_cost_what_is_published_or_less(period, scanned, requests):
    result = scan(scanned, (period, 3))
    assert (result.state, result.period, result.residues) == ("comb", period, (3,))
    assert result.requests <= requests and result.p_value < 0.001 and f"modulo {period}" in str(result)


def test_random_misses_are_not_combs_and_do_not_hide_one():
    right = sum(scan(64, (16, seed % 16), miss=0.05, seed=seed).residues == (seed % 16,) for seed in range(60))
    false = sum(scan(64, None, miss=0.05, seed=seed).state == "comb" for seed in range(60))
    assert right >= 58 and false <= 1


def test_two_dead_classes_are_both_named():
    planner = ResidueScan(2_000, 16)
    while not planner.done:
        lengths = planner.propose(4)
        planner.update(lengths, [x % 16 not in (2, 9) for x in lengths])
    assert planner.result().residues == (2, 9) and planner.result().period == 16


def test_no_measurement_is_asked_again_and_a_dead_range_is_told():
    planner, first = ResidueScan(1_000, 4), True
    while not planner.done:
        lengths = planner.propose(4)
        planner.update(lengths, [float("nan") if first else x % 4 != 1 for x in lengths])
        first = False
    assert planner.result().residues == (1,)
    dead = ResidueScan(9_000, 64)
    while not dead.done:
        lengths = dead.propose(64)
        dead.update(lengths, [0] * len(lengths))
    assert dead.result().state == "too many misses" and dead.result().requests == 64


def test_bad_input():
    with pytest.raises(ValueError, match="period"):
        ResidueScan(10, 1)
    with pytest.raises(ValueError, match="not asked"):
        ResidueScan(10, 4).update([99], [1])
