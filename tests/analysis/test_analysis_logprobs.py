"""Distances between answers' log-probabilities."""

import pandas as pd
import pytest
from needlework import analysis


def row(sha, answer, tops):
    return {"prompt_sha": sha, "answer": answer, "tops": tops}


def test_equal_steps_have_no_distance_and_one_changed_value_is_found():
    assert analysis.step_distance({"1": -0.5, "2": -1.0}, {"1": -0.5, "2": -1.0}) == 0
    assert analysis.step_distance({"1": -0.5, "2": -1.0}, {"1": -0.5, "2": -1.25}) == pytest.approx(0.25)


def test_a_token_listed_on_one_side_counts_with_the_least_it_can_differ_by():
    assert analysis.step_distance({"1": -0.5, "3": -4.0}, {"2": -0.5, "4": -3.0}) == pytest.approx(3.5)
    # what is less likely than all the other side lists may be the same there
    assert analysis.step_distance({"1": -0.5, "3": -4.0}, {"1": -0.5, "4": -3.9}) == pytest.approx(0.1)


def test_steps_after_the_first_different_token_are_not_compared():
    one = pd.DataFrame([row("a", "7 8 9", [{"7": -0.1}, {"8": -0.2}, {"9": -0.3}])])
    two = pd.DataFrame([row("a", "7 5 9", [{"7": -0.1}, {"8": -0.6, "5": -0.5}, {"9": -9.0}])])
    found = analysis.distances(two, one).iloc[0]
    assert found["common_tokens"] == 1
    assert found["first_step"] == 0
    assert found["worst_step"] == pytest.approx(0.4)


def test_what_cannot_be_compared_is_refused_or_left_out():
    one = pd.DataFrame([row("a", "7", [{"7": -0.1}])])
    assert len(analysis.distances(pd.DataFrame([row("b", "7", [{"7": -0.1}])]), one)) == 0
    with pytest.raises(ValueError, match="twice"):
        analysis.distances(one, pd.concat([one, one]))
    with pytest.raises(ValueError, match="without log-probabilities"):
        analysis.step_distance({}, {"1": -1.0})
