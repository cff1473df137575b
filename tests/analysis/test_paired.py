import numpy as np
import pandas as pd
import pytest
from needlework.analysis import cusum, holm
from needlework.analysis.drift import drift
from needlework.analysis.paired import (
    compare,
    e_value,
    mcnemar,
    newcombe,
    odds,
    pair_up,
    permutation_test,
)
from statsmodels.stats.contingency_tables import mcnemar as reference


def test_mcnemar_is_the_exact_test():
    assert mcnemar(0, 0) == 1.0
    for a, b in ((1, 0), (7, 1), (3, 3), (12, 2)):
        assert mcnemar(a, b) == pytest.approx(reference([[9, a], [b, 9]], exact=True).pvalue)
    with pytest.raises(ValueError):
        mcnemar(-1, 0)


def test_e_value_is_always_valid_and_decides():
    assert e_value(0, 0) == 1 and e_value(8, 0) > 20 and e_value(5, 5) < 1
    rng = np.random.default_rng(0)

    def highest(share):
        one = np.cumsum(rng.random(300) < share)
        return max(e_value(int(x), i + 1 - int(x)) for i, x in enumerate(one))

    false = sum(highest(0.5) >= 20 for _ in range(100))
    found = sum(highest(0.75) >= 20 for _ in range(40))
    assert false <= 7 and found == 40


def test_odds_are_written_as_people_write_them():
    assert [odds(e) for e in (0.4242, 179.6, 1274.3, 98_765.0, 2e9)] == [
        "0.424",
        "180",
        "1,270",
        "98,800",
        "over 1,000,000",
    ]


def test_permutation_of_graded_scores():
    rng = np.random.default_rng(1)
    base = rng.normal(size=30)
    assert permutation_test(base, base) == 1.0 and permutation_test([], []) == 1.0
    assert permutation_test(base + 0.5, base + rng.normal(0, 0.2, 30)) < 0.01
    assert permutation_test([1.0] * 6, [0.0] * 6) == pytest.approx(2 / 64)
    assert (
        np.mean([permutation_test(rng.normal(size=20), rng.normal(size=20), rounds=300) < 0.05 for _ in range(60)])
        < 0.15
    )


def test_newcombe_covers():
    # published example of the method: 36, 12, 2, 0 in 50 gives 0.20 with (0.0569, 0.3404) and correction
    assert newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=2e-3)
    low, high = newcombe(20, 0, 0, 0)
    assert low < 0 < high and newcombe(0, 0, 0, 0) == (-1, 1)


def test_compare_pairs_identical_prompts_only():
    rows = [
        {"arm": arm, "target_tokens": length, "depth": 0.5, "seed": seed, "outcome": outcome}
        for length in (1_000, 5_000)
        for seed in range(8)
        for arm, outcome in (("combined", "exact"), ("pd", "exact" if length == 1_000 else "garbage"))
    ]
    rows += [{"arm": "pd", "target_tokens": 9_000, "depth": 0.5, "seed": 0, "outcome": "exact"}]
    frame = pd.DataFrame(rows)
    result = compare(frame, "arm", "combined", "pd")
    assert (result.pairs, result.only_first, result.only_second) == (16, 8, 0)
    assert result.p_value < 0.01 and result.e_value > 20 and result.interval.low > 0.2
    assert "16 identical prompts" in str(result)
    assert len(pair_up(frame, "worker", 1, 2)) == 0
    with pytest.raises(ValueError, match="needs two"):
        compare(frame, "cache")


def test_drift_finds_the_fall_and_is_silent_otherwise():
    rng = np.random.default_rng(2)
    hits = np.concatenate([rng.random(100) < 0.98, rng.random(40) < 0.3]).astype(float)
    result = drift(hits)
    assert result.alarm is not None and 95 <= result.onset <= 106 and "fell after about" in str(result)
    assert drift([1, 1, None, 1]).alarm is None
    assert sum(drift((rng.random(200) < 0.97).tolist()).alarm is not None for _ in range(50)) <= 6
    assert cusum([1, 0, 0]).tolist()[0] == 0


def test_holm_is_the_published_step_down():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]).size == 0
    with pytest.raises(ValueError):
        holm([1.5])
