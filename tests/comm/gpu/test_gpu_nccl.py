"""Messages between GPUs over NCCL. With one GPU, a group of one trainer shows that NCCL reaches the registry."""

import gc

import pytest
import torch

from companions import together
from girih.comm.group.process_group import AbortableGroup, RegistryStore
from girih.comm.registry import LocalRegistry


def summed(ranks):
    numbers = torch.full((3,), float(ranks.rank + 1), device=f"cuda:{ranks.rank}")
    ranks.all_reduce(numbers)
    return numbers.tolist()


@pytest.mark.smoke
def test_a_group_keeps_the_store_that_nccl_asks_later():
    group = AbortableGroup(RegistryStore(LocalRegistry(), "one"), 0, 1, host="127.0.0.1", name="one")
    gc.collect()
    assert any(type(each) is RegistryStore for each in gc.get_referents(group.__dict__))
    if torch.cuda.is_available():
        numbers = torch.arange(3.0, device="cuda")
        group.process_group.allreduce([numbers]).wait()
        assert numbers.tolist() == [0, 1, 2]
    group.abort()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each trainer")
def test_two_gpus_sum():
    assert together(summed) == [[3.0] * 3] * 2
