import pytest
from needlework.analysis.intervals import sentence, wilson


def test_published_values():
    assert wilson(1, 1).low == pytest.approx(0.207, abs=5e-4)
    assert wilson(9, 10) == pytest.approx((0.596, 0.982), abs=5e-4)
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
