"""Means, spreads and intervals against values worked out elsewhere."""

import math

import pytest

from gva.study.statistics import Estimate, paired, student_quantile


@pytest.mark.parametrize(
    ("degrees", "tabulated"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_the_quantile_is_that_of_the_tables(degrees, tabulated):
    assert student_quantile(0.975, degrees) == pytest.approx(tabulated, abs=5e-5)


def test_an_interval_comes_with_three_seeds():
    one, two, three = Estimate({0: 1.0}), Estimate({0: 1.0, 1: 2.0}), Estimate({0: 1.0, 1: 2.0, 2: 3.0})
    assert (one.mean, one.spread, one.interval, one.told_apart) == (1.0, None, None, None)
    assert two.spread == pytest.approx(math.sqrt(0.5))
    assert two.interval is None
    assert three.spread == pytest.approx(1.0)
    assert three.interval == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-5)
    assert three.told_apart is False


def test_pairing_removes_what_a_seed_does_to_both():
    """Seeds that differ by 1.0 hide a difference of 0.1 from the means, not from the pairs."""
    ours = {0: 1.10, 1: 2.11, 2: 3.09, 7: 9.0}
    theirs = {0: 1.00, 1: 2.00, 2: 3.00, 8: 0.0}
    difference = paired(ours, theirs)
    assert difference.values == pytest.approx({0: 0.10, 1: 0.11, 2: 0.09})
    assert difference.told_apart is True
    assert difference.interval[0] > 0.05
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_seeds_that_agree_exactly_give_no_interval():
    """Accuracies on few items come in steps; an interval of no width would tell any two rows apart."""
    same = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    steps = paired({0: 0.26, 1: 0.20, 2: 0.34}, {0: 0.24, 1: 0.18, 2: 0.32})
    assert steps.mean == pytest.approx(0.02)
    for found in (same, steps):
        assert (found.interval, found.told_apart) == (None, None)


def test_rows_within_the_noise_are_not_told_apart():
    assert paired({0: 1.01, 1: 1.99, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0}).told_apart is False
