"""How often a record is written."""

import pytest

from girih.training.log import is_logged


@pytest.mark.parametrize(
    ("steps", "least", "most"), [(10, 10, 10), (30, 14, 20), (100, 18, 24), (250, 20, 30)]
)
def test_a_short_run_has_about_twenty_records(steps, least, most):
    assert least <= sum(is_logged(step, None) for step in range(1, steps + 1)) <= most


def test_a_long_run_has_a_record_every_fifty_steps():
    assert [step for step in range(251, 500) if is_logged(step, None)] == [300, 350, 400, 450]
    assert is_logged(250, None)


def test_a_number_of_the_user_holds_from_the_first_step():
    assert [step for step in range(1, 10) if is_logged(step, 3)] == [3, 6, 9]
