"""LAMB against Algorithm 2 in plain numpy, in float64."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from girih.dense.options import Lamb, optimizer_factory
from girih.errors import ConfigError
from girih.training.learning_rate import LearningRate

STEPS = 50
OPTIONS = (
    {},
    {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1},
    {"lr": 0.01, "weight_decay": 0.0},
)


def beginnings():
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=shape).astype(np.float32) for shape in ((17, 5), (5,), ())]
    return [*drawn, np.zeros(3, np.float32)]


def gradients(step):
    rng = np.random.default_rng(step + 1)
    return [rng.normal(size=x.shape).astype(np.float32) for x in beginnings()]


def naive(lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
    """The parameters after all steps."""
    found = []
    for number, x in enumerate(beginnings()):
        x, m, v = x.astype(np.float64), 0.0, 0.0
        for t in range(1, STEPS + 1):
            g = gradients(t)[number].astype(np.float64)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            r = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            u = r + weight_decay * x
            lengths = np.sqrt((x**2).sum()), np.sqrt((u**2).sum())
            x = x - lr * (lengths[0] / lengths[1] if all(lengths) else 1.0) * u
        found.append(x)
    return found


def take(optimizer, steps):
    held = optimizer.param_groups[0]["params"]
    for t in steps:
        for parameter, gradient in zip(held, gradients(t), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return [parameter.detach().clone() for parameter in held]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_algorithm_2(options):
    optimizer = optimizer_factory({"name": "lamb", **options})(
        [Parameter(torch.tensor(x)) for x in beginnings()]
    )
    for ours, theirs in zip(take(optimizer, range(1, STEPS + 1)), naive(**options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_restored_state_goes_on_bit_for_bit():
    whole = Lamb([Parameter(torch.tensor(x)) for x in beginnings()])
    again = Lamb([Parameter(x) for x in take(whole, range(5))])
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for one, other in zip(take(whole, range(5, 10)), take(again, range(5, 10)), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_without_a_gradient_stays():
    moved, still = (Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Lamb([moved, still])

    def closure():
        loss = moved.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert (moved < 1).all()
    assert (still == 1).all()
    assert still not in optimizer.state


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"lr": -1},
            r"\[dense_optimizer\]: Lamb refuses these options: lr = -1.0: expected a number ≥ 0",
        ),
        ({"eps": -1e-9}, "eps = -1e-09: expected a number ≥ 0"),
        ({"weight_decay": float("nan")}, "weight_decay = nan: expected a finite number"),
        ({"betas": [0.9, 1.0]}, r"betas = \(0.9, 1.0\): expected two numbers ≥ 0 and < 1"),
        ({"betas": [0.9]}, "expected a list of 2"),
        ({"momentum": 0.9}, "unknown option 'momentum'; valid: betas, eps, lr, weight_decay"),
        ({"name": "lamp"}, "unknown name 'lamp'; did you mean 'lamb'?"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        optimizer_factory({"name": "lamb", **options})


def test_a_schedule_is_tried_out_before_it_is_needed():
    with pytest.raises(ConfigError, match="the learning rate becomes"):
        LearningRate(Lamb([Parameter(torch.ones(1))]), {"name": "ExponentialLR", "gamma": -1.0})
