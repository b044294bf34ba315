"""Live parameters of a group server: one copy of each, by its name in the whole model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from grouped_site import InThread, Net, site
from torch import fx, nn

from girih.dense.graph import Part
from girih.dense.halves.grouped import recipe_of
from girih.dense.halves.replica import Replica
from girih.dense.service.live_parts import LiveParts
from girih.dense.service.recipe import OptimizerRecipe
from girih.dense.spec import DenseSpec
from girih.errors import ConfigError
from girih.testing.dense_suite import case


class Tied(nn.Module):
    """Two layers of one weight, of which the second is called first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.one(self.two(x))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def called(model, *paths):
    """A part that calls modules of a model one after the other."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for path in paths:
        value = graph.call_module(path, (value,))
    graph.output((value,))
    return Part(paths[0], 0, fx.GraphModule(model, graph), 1, 1)


@pytest.mark.parametrize("stages", [[("two", "one")], [("two",), ("one",)]])
def test_a_parameter_that_operators_share_learns_once_by_its_first_name(stages):
    model = Tied()
    reference = copy.deepcopy(model)
    recipe = OptimizerRecipe.of(adam(model.parameters()), model)
    live = LiveParts([called(model, *paths) for paths in stages], recipe)
    optimizer, x = adam(reference.parameters()), torch.randn(3, 4)
    for _ in range(3):
        net, value = live.borrow(), x
        for module in net.modules:
            (value,) = module(value)
        value.square().sum().backward()
        live.move(net, recipe.groups)
        live.give_back(net)
        optimizer.zero_grad()
        reference(x).square().sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert len(live.moving()) == 3  # one weight, two biases
    entries = live.entries(with_optimizer=True)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, key, _ in entries if key is None} == names
    assert {name for name, key, _ in entries if key == "exp_avg"} == names
    live.put([(name, key, value * 0) for name, key, value in entries])
    assert not model.two.weight.any()


def test_a_part_with_a_parameter_that_the_model_has_not_is_refused():
    other = called(nn.ModuleDict({"other": nn.Linear(4, 4)}), "other")
    cut = SimpleNamespace(traced=SimpleNamespace(splits=()), parts=[other])
    whole = Replica(DenseSpec(module=Tied(), optimizer=adam))
    with pytest.raises(ConfigError, match=r"part 'other' has a parameter 'other\.weight'"):
        recipe_of(whole, cut)


class Punished(Net):
    """Its loss reads a parameter."""

    def loss(self, outputs, batch):
        return outputs.square().mean() + self.scale.square().sum()

    def __init__(self):
        super().__init__(nn.Identity)
        self.scale = nn.Parameter(torch.ones(1))


def test_a_parameter_that_only_the_loss_reads_is_refused_by_name():
    with site(1, kind=InThread, net=Punished) as group:
        half, one = group.trainer(), case(0)
        half._free[0]._loss = half.module.loss  # as the partition of a traced net has it
        with pytest.raises(ConfigError, match=r"loss reads parameter 'scale'.* servers_per_group = 0"):
            half.compute(one.batch, one.embeddings())
        (told,) = half.processes().values()
        assert told["gauges"]["batches"] == 0
