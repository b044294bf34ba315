"""Facts about a model for the planner."""

import pytest
import torch
from torch import nn

from girih.lifecycle.planning import model_facts
from girih.schema import Categorical, Schema

SCHEMA = Schema([Categorical(name="a", dim=4)], labels="click")
MIB = 1 << 18  # numbers of a bucket


@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        ([MIB // 4] * 3, 3 * MIB // 4),  # all in one
        ([3 * MIB, 10, 20], 3 * MIB + 30),  # filled from the end, where the small ones wait for the large one
        ([3 * MIB, MIB, 20], 3 * MIB),
        ([10, 2 * MIB], 10),
        ([MIB // 2, MIB // 2, MIB // 2], MIB // 2),
    ],
)
def test_the_last_bucket_has_what_is_declared_first(sizes, last):
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size)))
    found = model_facts(module, torch.optim.SGD, SCHEMA)
    assert found.last_bucket == last
    assert found.num_parameters == sum(sizes)
