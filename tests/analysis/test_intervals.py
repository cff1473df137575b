import numpy as np
import pytest
from needlework.analysis.intervals import clustered, jeffreys, sentence, wilson


def test_published_values():
    assert wilson(1, 1).low == pytest.approx(0.207, abs=5e-4)
    assert wilson(9, 10) == pytest.approx((0.596, 0.982), abs=5e-4)
    assert jeffreys(9, 10) == pytest.approx((0.619, 0.989), abs=5e-4)
    assert wilson(48, 50) == pytest.approx((0.865, 0.989), abs=5e-4)
    assert wilson(0, 0) == (0, 1) and 0.5 in wilson(5, 10)


def test_sentence():
    assert sentence(6, 6) == "6 of 6: above 61 %"
    assert sentence(0, 6) == "0 of 6: below 39 %"
    assert sentence(9, 10, what="hits") == "9 of 10 hits: between 60 % and 98 %"
    assert "nothing" in sentence(0, 0)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="3 hits in 2"):
        wilson(3, 2)


def test_clustered_covers_where_wilson_does_not():
    rng = np.random.default_rng(0)
    covered = {"clustered": 0, "naive": 0}
    for _ in range(300):
        names = np.repeat(np.arange(20), 8)
        good = np.where(rng.random(20) < 0.5, 0.95, 0.35)  # haystacks differ; the mean is 0.65
        hit = (rng.random(160) < good[names]).astype(float)
        covered["clustered"] += 0.65 in clustered(hit, names)
        covered["naive"] += 0.65 in wilson(hit.sum(), 160)
    assert covered["clustered"] >= 270 > covered["naive"]
    assert clustered([1, 1, 1], ["a", "a", "a"]) == wilson(1, 1)
    assert clustered([np.nan], ["a"]) == (0, 1)
