"""Random state by rank, for trainers that draw alike and for those that do not."""

import pytest
import torch

from girih.lifecycle.run_state import restore_random


def state_of(seed):
    torch.manual_seed(seed)
    return {"cpu": torch.get_rng_state()}


SAVED = [state_of(10), state_of(11)]
OWN = 99


@pytest.mark.parametrize(
    ("rank", "alike", "were_alike", "expected"),
    [
        (0, False, False, 10),
        (1, False, False, 11),
        (2, False, False, OWN),  # was not there
        (1, True, True, 10),
        (1, True, False, 10),  # a checkpoint of another strategy: all must draw the same masks
        (2, True, True, 10),
        (0, False, True, 10),
        (1, False, True, OWN),  # drew as rank 0 did, and must not any more
    ],
)
def test_a_trainer_takes_the_state_that_its_masks_need(rank, alike, were_alike, expected):
    torch.manual_seed(OWN)
    restore_random(SAVED, rank, alike=alike, were_alike=were_alike)
    drawn = torch.rand(3)
    torch.manual_seed(expected)
    assert torch.equal(drawn, torch.rand(3))
