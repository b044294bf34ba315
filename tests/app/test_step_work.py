"""The work of steps, measured on small generated data, and the lines through it."""

import pytest

from girih.app.machine import FEATURES, POINTS, fit_rate, measure_products, measure_reading, measure_rows
from girih.optim import Adagrad
from girih.planner.calibration import Rate


def test_a_rate_goes_through_its_points():
    true = Rate(3e-4, 2e-7, 5e-9)
    found = fit_rate([true.seconds(FEATURES * examples, dim) for examples, dim in POINTS])
    assert (found.call_s, found.id_s, found.number_s) == pytest.approx((3e-4, 2e-7, 5e-9))


def test_a_rate_is_one_whatever_was_measured():
    for seconds in ([1e-3, 1e-3, 1e-3], [3e-3, 2e-3, 1e-3], [1e-6, 1e-3, 1e-1]):
        found = fit_rate(seconds)
        assert min(found.call_s, found.id_s, found.number_s) >= 0


def test_rows_take_longer_the_more_there_are():
    lookup, updates = measure_rows((Adagrad(),), rounds=3)
    assert set(updates) == {"adagrad"}
    for rate in (lookup, updates["adagrad"]):
        assert 1e-6 < rate.seconds(512, 8) < rate.seconds(16_384, 64) < 1


def test_reading_and_products_take_time():
    example_s, value_s = measure_reading(rounds=2)
    assert 0 < example_s + 30 * value_s < 1e-3
    assert all(1e8 < speed < 1e13 for _, speed in measure_products(rounds=2))
