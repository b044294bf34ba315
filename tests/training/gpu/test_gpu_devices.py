"""Each trainer of a host has a GPU of its own; torch is told how many there are."""

from types import SimpleNamespace

import pytest
import torch

from girih.dense.halves import allreduced
from girih.errors import ConfigError
from girih.training import specs

pytestmark = pytest.mark.smoke


class Ranks:
    def gather(self, value):
        return [value, "GPU-b", value]

    def broadcast(self, value):
        return value


def test_trainers_take_gpus_in_turn(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [specs._device("cuda", rank).index for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert specs.gpu_of(torch.device("cuda:2"), 0) == 2
    assert specs.gpu_of(torch.device("cpu"), 5) == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert specs.gpu_of(torch.device("cpu"), 5) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert specs.gpu_of(torch.device("cpu"), 5) is None
    assert specs.gpu_of(torch.device("cuda"), 5) is None


def test_two_trainers_on_one_gpu_are_refused(monkeypatch):
    own = SimpleNamespace(uuid="GPU-a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: own)
    with pytest.raises(ConfigError, match=r"trainers 0 and 2 would share a GPU.*strategy\.trainers = 2"):
        allreduced._refuse_shared_gpus(Ranks(), torch.device("cuda:0"))
