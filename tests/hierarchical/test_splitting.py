"""Fully connected layers in parts: the same logits and gradients, to the order of summation."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from girih.errors import ConfigError
from girih.hierarchical.graph import fc_layers, partition, split_as, split_fc, trace
from girih.hierarchical.live_parts import CutParameters
from girih.models import BY_NAME
from graph_cases import assert_close, partitioned, step, tagging_of, traced
from hierarchical.test_tracing import NOTHING, NUMERIC


class Layers(nn.Module):
    def __init__(self, *widths, between=nn.ReLU):
        super().__init__()
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        self.layers = nn.Sequential(*[each for layer in layers for each in (layer, between())][:-1]).double()

    def forward(self, numeric, embeddings):
        return self.layers(numeric.double())


def joined(split, tensors):
    """Tensors of a split net's parameters as the model's."""
    return {
        name: each
        for name, _, each in CutParameters(split.splits).joined(
            (name, None, t) for name, t in tensors.items()
        )
    }


def split_step(split, batch):
    """A step of a split net, with the gradients of the model's parameters."""
    own = dict(split.net.named_parameters())
    logits, gradients = step(split.net, batch, own.values())
    whole = joined(split, dict(zip(own, gradients, strict=False)))
    return logits, [*(whole[name] for name, _ in split.model.named_parameters()), *gradients[len(own) :]]


@pytest.mark.parametrize("name", BY_NAME)
def test_split_nets_compute_what_their_models_do(name):
    case, batch = traced(name), None
    for servers in (2, 3):
        split, batch = split_fc(case.net, servers), case.batch(9)
        assert_close(split_step(split, batch), step(case.model, batch, list(case.model.parameters())))


@pytest.mark.parametrize(
    ("widths", "servers", "operators"),
    [
        ((4, 8), 2, ["part_0", "part_1", "cat"]),  # rows
        ((4, 2), 2, ["narrow_0", "part_0", "narrow_1", "part_1", "add_1"]),  # columns
        (
            (4, 3),
            9,
            [f"{each}_{n}" for n in range(4) for each in ("narrow", "part")] + ["add_1", "add_2", "add_3"],
        ),
    ],
)
def test_layers_are_cut_where_they_are_longer(widths, servers, operators):
    net = trace(Layers(*widths), NUMERIC, NOTHING)
    split = split_fc(net, servers)
    assert [
        each.name.removeprefix("layers.0.")
        for each in split.graph.operators
        if each.name.startswith("layers")
    ] == operators
    torch.testing.assert_close(split.net(NUMERIC, NOTHING), net.net(NUMERIC, NOTHING))
    assert [each.name for each in net.graph.operators if each.name.startswith("layers")] == ["layers.0"]


def test_what_lies_between_two_layers_stays_on_its_server():
    model = Layers(4, 9, 2)
    net = trace(model, NUMERIC, NOTHING)
    split = split_fc(net, 2)
    names = {each.name for each in split.graph.operators}
    assert {"layers.0.part_1", "layers.1.part_1", "layers.2.part_1"} < names
    assert not any("cat" in name or "narrow" in name for name in names)

    def device_of(operator):
        return f"server {operator.name[-1]}" if "part" in operator.name else "trainer"

    found, trainer = partitioned(split, tagging_of(split, device_of))
    assert [(part.server, part.inputs, part.outputs) for part in found.parts] == [(0, 1, 1), (1, 1, 1)]
    assert len(found.stages) == 1
    torch.testing.assert_close(trainer(NUMERIC, NOTHING), model(NUMERIC, NOTHING))
    # a part has its rows of the first layer and the same columns of the second one
    assert [
        part.module.get_submodule(f"layers.0.part_{part.server}").weight.shape for part in found.parts
    ] == [(5, 4), (4, 4)]
    assert [
        part.module.get_submodule(f"layers.2.part_{part.server}").weight.shape for part in found.parts
    ] == [(2, 5), (2, 4)]


def test_layers_without_an_activation_between_them():
    model = Layers(4, 6, 6, 3, between=nn.Identity)
    model.layers = nn.Sequential(*[each for each in model.layers if isinstance(each, nn.Linear)])
    net = trace(model, NUMERIC, NOTHING)
    split = split_fc(net, 2, ["layers.0", "layers.1", "layers.2"])
    torch.testing.assert_close(split.net(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


def test_parameters_come_and_go():
    case = traced("dnn")
    split = split_fc(case.net, 3)
    own, whole = dict(split.net.named_parameters()), dict(case.model.named_parameters())
    found = joined(split, {name: each.detach() for name, each in own.items()})
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    cut = CutParameters(split.splits).cut((name, None, each) for name, each in found.items())
    assert len(cut) == len(own)
    assert all(torch.equal(each, own[name]) for name, _, each in cut)
    pointers = {each.data_ptr() for name, each in own.items() if "part" in name}
    assert not pointers & {each.data_ptr() for each in whole.values()}  # copies


def test_small_layers_stay_whole():
    net = trace(Layers(4, 64, 64, 2), NUMERIC, NOTHING)
    assert {split.parameter for split in split_fc(net, 2).splits} == {"layers.2.weight", "layers.2.bias"}
    assert split_fc(net, 1) is net


def test_a_batch_norm_between_two_layers_keeps_them_apart():
    model = Layers(4, 9, 2, between=lambda: nn.BatchNorm1d(9))
    split = split_fc(trace(model, NUMERIC, NOTHING), 2, ["layers.0", "layers.2"])
    assert {"layers.0.cat", "layers.1", "layers.2.narrow_0"} < {each.name for each in split.graph.operators}
    torch.testing.assert_close(split.net(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


def test_what_cannot_be_split_is_refused():
    net = trace(Layers(4, 8, 2), NUMERIC, NOTHING)
    with pytest.raises(ConfigError, match=r"'layers\.1' is no fully connected layer; did you mean"):
        split_fc(net, 2, ["layers.1"])
    with pytest.raises(ConfigError, match="num_servers = 0: expected at least 1"):
        split_fc(net, 0)


def test_layers_that_share_a_weight_stay_whole():
    model = Layers(4, 4, 4, 1)
    layers = [each for each in model.layers if isinstance(each, nn.Linear)]
    layers[1].weight = layers[0].weight
    net = trace(model, NUMERIC, NOTHING)
    assert fc_layers(net) == ["layers.4"]
    assert {split.parameter for split in split_fc(net, 2, fc_layers(net)).splits} == {
        "layers.4.weight",
        "layers.4.bias",
    }


@pytest.mark.parametrize(
    ("asked", "optimizer", "cut"),
    [
        ("auto", "Adam", {"layers.2"}),
        ("auto", "Lamb", set()),
        (True, "Lamb", {"layers.0", "layers.2", "layers.4"}),
        (False, "Adam", set()),
    ],
)
def test_layers_are_split_as_a_run_asks(asked, optimizer, cut):
    split = split_as(asked, trace(Layers(4, 64, 64, 2), NUMERIC, NOTHING), 2, optimizer)
    assert {each.parameter.rpartition(".")[0] for each in split.splits} == cut


def test_split_layers_of_a_partition_have_optimizers_parameters():
    split = split_fc(trace(Layers(4, 8), NUMERIC, NOTHING), 2)
    tagging = tagging_of(split, lambda each: f"server {each.name[-1]}" if "part" in each.name else "trainer")
    for part in partition(split, tagging).parts:
        assert [each.requires_grad and each.is_leaf for each in part.module.parameters()] == [True, True]
