"""Dense optimizers by name: torch's fused kernels where the config leaves the choice."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.torch_version import TorchVersion

from girih.dense.options import FUSED, optimizer_factory

OPTIONS = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adagrad": {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01},
    "adam": {"lr": 1e-2, "weight_decay": 0.01, "amsgrad": True},
    "adamw": {"lr": 1e-2, "betas": [0.8, 0.9]},
}


def parameters():
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in ((17, 5), (5,), ())]


def take(optimizer, steps):
    """Steps on (w − 1)², which moves each parameter by its own gradient."""
    held = optimizer.param_groups[0]["params"]
    for _ in range(steps):
        for parameter in held:
            parameter.grad = 2 * (parameter.detach() - 1)
        optimizer.step()
    return [p.detach().clone() for p in held]


@pytest.mark.parametrize("name", FUSED)
def test_fused_is_the_unfused_optimizer(name):
    fused = optimizer_factory({"name": name, **OPTIONS[name]})(parameters())
    plain = optimizer_factory({"name": name, "fused": False, **OPTIONS[name]})(parameters())
    assert fused.defaults["fused"] is True
    assert not plain.defaults["fused"]
    torch.testing.assert_close(take(fused, 100), take(plain, 100), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_a_restored_state_goes_on_bit_for_bit(name):
    factory = optimizer_factory({"name": name, **OPTIONS[name]})
    whole = factory(parameters())
    halfway = take(whole, 5)
    again = factory([Parameter(p.clone()) for p in halfway])
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for one, other in zip(take(whole, 5), take(again, 5), strict=True):
        assert torch.equal(one, other)


def test_what_the_config_chooses_stays():
    assert not optimizer_factory({"name": "adam", "foreach": True})(parameters()).defaults["fused"]
    assert not optimizer_factory("adam")([Parameter(torch.zeros(2, dtype=torch.double))]).defaults["fused"]
    assert "fused" not in optimizer_factory("rmsprop")(parameters()).defaults


@pytest.mark.parametrize(("version", "has_adagrad"), [("2.11.0+cu130", False), ("2.13.0", True)])
def test_parameters_on_a_gpu_have_the_fused_kernel_that_torch_has(monkeypatch, version, has_adagrad):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with FakeTensorMode():
        there = [Parameter(torch.empty(3, device="cuda"))]
        fused = {name: optimizer_factory(name)(there).defaults["fused"] for name in FUSED}
    assert fused == dict.fromkeys(FUSED, True) | {"adagrad": has_adagrad or None}
