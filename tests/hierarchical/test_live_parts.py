"""Live parameters of a group server: one copy of each, by its name in the whole model."""

import copy
import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import fx, nn

from companions import ALL_S, Companion
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.errors import ConfigError
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.grouped import recipe_of
from girih.hierarchical.live_parts import LiveParts
from girih.hierarchical.optimizer_recipe import OptimizerRecipe
from girih.hierarchical.shadow import Shadow
from girih.planner.tagging.group import held_copies
from girih.telemetry.stats import Stats
from grouped_site import InThread, Net, site
from support.dense_suite import case


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
    return ServerPart(paths[0], 0, fx.GraphModule(model, graph), 1, 1)


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


M_MMAP_THRESHOLD = -3  # of mallopt
NETS, SIZE = 6, 4 * 2 * 2000 * 1000
"""Nets that hold gradients, and bytes of parameters."""


@pytest.mark.parametrize("averaged", [False, True])
def test_nets_take_the_memory_that_the_planner_accounts(averaged):
    """16 MB of parameters with Adam's state, and gradients of six nets; where there are other groups, a round beside them."""
    companion = Companion(tell_taken, averaged)
    try:
        assert companion.pipe.poll(ALL_S), companion.printed()
        taken = companion.pipe.recv()
    finally:
        companion.close()
    assert taken == pytest.approx(held_copies(1 + 1 + 2, NETS, averaged=averaged) * SIZE, rel=0.1)


def tell_taken(pipe, averaged):
    """Tells what nets take of the memory of this process, which has done nothing before but the same with few numbers."""
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 1 << 16
    )  # else freed tensors may stay with malloc, which learns their size
    small = nets_at_work(2, averaged)
    round_of(small[0])
    before = resident("VmRSS")
    live, nets = nets_at_work(1000, averaged)
    gc.collect()  # the optimizer that the recipe was read from is in a cycle, and holds parameters
    taken = resident("VmRSS") - before
    if averaged:
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        round_of(live)
        taken = resident("VmHWM") - before
    assert len({id(each) for each in nets}) == NETS
    pipe.send(taken)


def nets_at_work(width, averaged):
    """Live parts that have made a step, and nets of batches that wait to be applied."""
    model = nn.Sequential(nn.Linear(2 * width, width, bias=False), nn.Linear(width, 2 * width, bias=False))
    recipe = OptimizerRecipe.of(adam(model.parameters()), model)
    live = LiveParts([called(model, "0", "1")], recipe, averaged=averaged)
    net = computed(live, width)
    live.move(net, recipe.groups)  # which makes the state
    live.give_back(net)
    return live, [computed(live, width) for _ in range(NETS)]


def computed(live, width):
    """A net of a batch that waits to be applied."""
    net = live.borrow()
    net.modules[0](torch.ones(1, 2 * width))[0].sum().backward()
    return net


def round_of(live):
    """A round of averaging, whose servers answer as many numbers as they get."""

    class Server:
        def call(self, verb, fields, arrays):
            frame = SimpleNamespace(arrays=[np.array(each) for each in arrays])
            return SimpleNamespace(wait=lambda: frame)

        def close(self):
            pass

    shadow = Shadow(live.moving(), [Server(), Server()], 0, 1, Stats())
    shadow._average()
    shadow.close()


def resident(name):
    """Bytes of this process in memory: now (VmRSS), or at most (VmHWM)."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name)]
    return 1024 * int(line.split()[1])
