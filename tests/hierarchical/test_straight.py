"""The evaluation of models as straight-line code: to the last bit what the modules compute, or none."""

import copy

import pytest
import torch
from torch import nn

from girih.dense.accel.arithmetic import arithmetic
from girih.dense.half import DenseSpec
from girih.hierarchical.graph.straight import flatten_module
from girih.models import BY_NAME
from graph_cases import _traced

AS_THEY_ARE = {"dlrm", "dien", "dsin", "atbrg", "can", "star"}
"""Models with a module that is one operator: see ``test_tracing.OPAQUE``."""


def case_of(name):
    case = _traced(name)
    model = copy.deepcopy(case.model).float()

    def batch(num_examples, seed=1):
        found = case.batch(num_examples, seed)
        embeddings = found.embeddings.mapped(
            lambda values: values.detach().float(),
            lambda each: each._replace(values=each.values.detach().float()),
        )
        return found.numeric.float(), embeddings

    return model, batch


def computed(module, batch):
    module.eval()
    with torch.no_grad(), arithmetic(torch.device("cpu"), precision="float32", forward="float32"):
        return module(*batch)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_zoo_is_straight_or_stays_as_it_is(name):
    model, batch = case_of(name)
    model.train()
    found = flatten_module(DenseSpec(module=model, optimizer=torch.optim.SGD), *batch(6))
    assert model.training
    assert (found is None) == (name in AS_THEY_ARE)
    if found is None:
        return
    other = copy.deepcopy(model)  # the code is for any module like this one
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for size in (1, 7, 600, 4000):
        for module in (model, other):
            expected = computed(module, batch(size, seed=size))
            with torch.inference_mode():
                assert torch.equal(found(module, *batch(size, seed=size)), expected)


@pytest.mark.parametrize("more", [{"precision": "bfloat16"}, {"forward": "int8"}])
def test_other_arithmetic_stays_as_it_is(more):
    model, batch = case_of("deepfm")
    assert flatten_module(DenseSpec(module=model, optimizer=torch.optim.SGD, **more), *batch(6)) is None


class Refuses(nn.Module):
    def forward(self, numeric, embeddings):
        raise ValueError("these values cannot be taken")


class Attends(nn.Module):
    """A module of torch that calls linear layers itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, numeric, embeddings):
        vectors = numeric[:, :4, None] * numeric.new_ones(4)
        return self.inner(vectors, vectors, vectors)[0].sum((1, 2))[:, None]


@pytest.mark.parametrize("kind", [Refuses, Attends])
def test_what_cannot_be_straight_stays_as_it_is(kind):
    _, batch = case_of("dnn")
    _, embeddings = batch(6)
    assert (
        flatten_module(DenseSpec(module=kind(), optimizer=torch.optim.SGD), torch.randn(6, 4), embeddings)
        is None
    )
