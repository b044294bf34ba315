"""Answers of group servers and dense servers that do not fit."""

import numpy as np
import pytest
import torch

from girih.dense.options import spread_over
from girih.errors import WireError
from girih.hierarchical.wire import pack_entries, unpack_entries


def test_entries_arrive_as_they_were_sent():
    entries = [("a", None, torch.arange(3)), ("b", "step", 4)]
    count, arrays = pack_entries(entries, lambda dtype, *shape: np.empty(shape, dtype))
    received = unpack_entries(arrays)
    assert count == 2
    assert torch.equal(received[0][2], torch.arange(3))
    assert received[1] == ("b", "step", 4)


@pytest.mark.parametrize("numbers", [4, 6])
def test_a_vector_of_another_length_is_refused_before_the_first_tensor(numbers):
    tensors = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(WireError, match=f"{numbers} numbers came; expected 5"):
        next(spread_over(tensors, torch.ones(numbers)))
