"""Codecs between trainers and group servers: what arrives, how many bytes are sent, and what a refused step leaves."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from girih.comm.codecs.tensors import ACTIVATIONS, GRADIENTS, TopK
from girih.config.sections import hints_of
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.hierarchical.graph import partition, trace
from girih.hierarchical.wire import NUMBERS, GradientStreams, Wire, num_bytes, pack, unpack
from girih.models import Embeddings
from girih.planner.operators import TRAINER
from girih.planner.tagging.group import Device, HierarchicalGroup, WireCost
from girih.planner.tagging.tag import tag
from girih.planner.tagging.wires import CODECS
from girih.strategies import grouping
from girih.strategies.hierarchical import Hierarchical
from girih.telemetry.stats import wire_bytes
from grouped_site import Cut, InThread, Net, site
from support.dense_suite import DIM, NAMES, NUMERIC, case
from support.votes import apply, drop

EXAMPLES = 32
SHAPES = {
    "inputs": [(EXAMPLES, len(NUMERIC)), (EXAMPLES, len(NAMES) * DIM), (EXAMPLES, 8), (EXAMPLES, 8)],
    "outputs": [(EXAMPLES, 8), (EXAMPLES, 8), (EXAMPLES, 1)],
}
BOTH = [("bfloat16", "bfloat16"), ("int8", "topk")]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_list_of_codecs_has_every_codec():
    options = hints_of(Hierarchical)
    assert set(NUMBERS) == set(CODECS) == {*ACTIVATIONS, *GRADIENTS}
    assert tuple(ACTIVATIONS) == grouping.ACTIVATIONS
    assert tuple(GRADIENTS) == grouping.GRADIENTS
    assert get_args(options["wire_activations"]) == (*ACTIVATIONS, "auto")
    assert get_args(options["wire_dense_gradients"]) == (*GRADIENTS, "auto")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def plain_net():
    return Net(nn.Identity)


def group_of(**options):
    return site(2, kind=InThread, net=plain_net, optimizer=adam, **options)


def take(dtype, size):
    return np.empty(size, dtype)


class Written(torch.autograd.Function):
    """A tensor as it arrives, and its gradient as that does; top-k has nothing left from before."""

    @staticmethod
    def forward(ctx, tensor, wire):
        ctx.wire = wire
        return written(tensor, ACTIVATIONS[wire.activations])

    @staticmethod
    def backward(ctx, gradient):
        return written(gradient, GRADIENTS[ctx.wire.gradients]), None


def written(tensor, codec):
    shape = tuple(tensor.shape)
    if codec.packed_bytes(shape) >= tensor.nbytes:
        return tensor.clone()
    return torch.from_numpy(codec.unpack(codec.pack(tensor.numpy()), shape))


def in_process(wire):
    """The net with parts in this process, between which numbers are rounded."""
    net = plain_net()
    parts = {part.name: part.module for part in Cut(net, 2).parts}

    def exchange(stage):
        if not net.training:
            return [parts[name](*inputs) for name, inputs in stage]
        outputs = [parts[name](*(Written.apply(each, wire) for each in inputs)) for name, inputs in stage]
        return [[Written.apply(each, wire) for each in found] for found in outputs]

    net.forward = Cut(net, 2).trainer(exchange).forward
    return net


@pytest.mark.parametrize(("activations", "gradients"), BOTH)
def test_what_arrives_is_what_the_codecs_make_of_it_and_evaluation_is_exact(activations, gradients):
    wire, one = Wire(activations=activations, gradients=gradients), case(0, EXAMPLES)
    expected = Replica(DenseSpec(module=in_process(wire), optimizer=adam))
    with group_of(wire=wire) as group:
        half, given = group.trainer(), []
        for each in (half, expected):
            embeddings = one.embeddings()
            apply(each.compute(one.batch, embeddings))
            given.append([block.values.grad for block in embeddings.blocks])
        assert all(torch.equal(*pair) for pair in zip(*given, strict=True))
        found, wanted = half.state()["model"], expected.state()["model"]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        plain = Replica(DenseSpec(module=plain_net(), optimizer=adam))
        plain.module.load_state_dict(found)
        predicted = [each.predict(one.batch, one.embeddings()) for each in (half, plain)]
        assert torch.equal(*predicted)


@pytest.mark.parametrize(("activations", "gradients"), BOTH)
def test_bytes_that_are_sent_are_those_of_the_codecs(activations, gradients):
    sent = []
    for wire in (Wire(), Wire(activations=activations, gradients=gradients)):
        with group_of(wire=wire) as group:
            half, one = group.trainer(), case(0, EXAMPLES)
            apply(half.compute(one.batch, one.embeddings()))
            counted = [half.whole.stats_of_process.counters]
            counted += [each["counters"] for each in half.processes().values()]
            found = [wire_bytes(each) for each in counted]
            sent.append([sum(each[kind] for each in found) for kind in ("activations", "dense")])
    forward = SHAPES["inputs"] + SHAPES["outputs"]
    backward = SHAPES["inputs"][1:] + SHAPES["outputs"]  # numeric inputs want no gradient
    plain, packed = sent
    assert plain[0] - packed[0] == saved(forward, ACTIVATIONS[activations]) > 0
    assert plain[1] - packed[1] == saved(backward, GRADIENTS[gradients]) > 0


class Fields(nn.Module):
    """One layer for each of four fields of 16 numbers, and one for all."""

    def __init__(self):
        super().__init__()
        self.each, self.last = nn.Linear(16, 8), nn.Linear(32, 1)

    def forward(self, numeric, embeddings):
        return self.last(self.each(numeric.view(-1, 4, 16)).flatten(1))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_a_plan_counts_the_bytes_that_are_packed(activations, gradients):
    """Gradients have the shapes of what they are of; the logits, one number of an example, go as they are but by topk."""
    numeric, nothing = torch.randn(EXAMPLES, 64), Embeddings()
    net = trace(Fields(), numeric, nothing)
    on_servers = {"each": "server 0", "last": "server 1"}
    tagging = {operator.name: on_servers.get(operator.name, TRAINER) for operator in net.graph.operators}
    found, wire = partition(net, tagging), Wire(activations=activations, gradients=gradients)
    parts, sent = {part.name: part.module for part in found.parts}, {"to": [0, 0], "from": [0, 0]}

    def exchange(stage):
        outputs = [list(parts[name](*inputs)) for name, inputs in stage]
        for (name, inputs), given in zip(stage, outputs, strict=True):
            for way, tensors in (("to", inputs), ("from", given)):
                for pass_, coders in enumerate((wire.forward(train=True), wire.backward().of(name))):
                    sent[way][pass_] += num_bytes(pack(tensors, take, coders)[1:])
        return outputs

    found.trainer(exchange)(numeric, nothing)
    device = Device(flops_per_s=1e9)
    group = HierarchicalGroup(
        trainers=1,
        batch_size=EXAMPLES,
        trainer=device,
        servers=(device, device),
        wire=WireCost(activations=CODECS[activations], gradients=CODECS[gradients]),
    )
    planned = tag(net.graph, group, tagging=tagging).loads[TRAINER]
    assert planned.sent_bytes * EXAMPLES == pytest.approx(sent["to"][0] + sent["from"][1])
    assert planned.received_bytes * EXAMPLES == pytest.approx(sent["from"][0] + sent["to"][1])
    if activations == "int8":  # 4 rows of 16 numbers and one of 32; 4 of 8 and a float32
        assert (sent["to"][0], sent["from"][0]) == (EXAMPLES * (4 * 24 + 40), EXAMPLES * (4 * 16 + 4))


def saved(shapes, codec):
    return sum(max(0, 4 * math.prod(shape) - codec.packed_bytes(shape)) for shape in shapes)


def test_a_refused_step_leaves_what_earlier_ones_left_out_and_nothing_of_its_own():
    states = []
    for refused in (True, False):
        with group_of(wire=Wire(gradients="topk")) as group:
            half = group.trainer()
            for number in range(4):
                one = case(number, EXAMPLES)
                if number == 2 and refused:
                    drop(half.compute(case(9, EXAMPLES).batch, case(9, EXAMPLES).embeddings()))
                apply(half.compute(one.batch, one.embeddings()))
            states.append(half.state()["model"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_top_k_leaves_out_comes_with_later_steps_of_the_same_tensor():
    sent, number, steps = GradientStreams(GRADIENTS["topk"]), torch.randn(40), 200
    arrived = torch.zeros(40)
    for _ in range(steps):
        (found,) = unpack(pack([number], take, sent.of("part")))
        pack([torch.randn(40)], take, sent.of("another"))
        sent.apply()
        arrived += found
    left = sent.of("part")(0).left
    torch.testing.assert_close(arrived + torch.from_numpy(left), steps * number, rtol=1e-3, atol=1e-3)
    assert arrived.count_nonzero() == 40
    sent.forget()
    assert not len(sent.of("part")(0).left)


def test_only_floats_that_become_smaller_are_coded():
    tensors = [
        torch.arange(40.0).view(2, 20).to(torch.bfloat16),
        torch.arange(3),
        torch.randn(5, 1),
        None,
        torch.tensor([True]),
    ]
    codec = ACTIVATIONS["int8"]
    arrays = pack(tensors, take, lambda number: codec)
    found = unpack(arrays)
    assert [each.dtype for each in arrays[1:]] == [np.uint8, np.float32, np.int64, np.float32, np.uint8]
    assert num_bytes(arrays[1:]) == codec.packed_bytes((2, 20)) + 24 + 20 + 1
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], tensors[0], atol=0.06, rtol=0.01)
    assert found[3] is None
    assert all(torch.equal(found[number], tensors[number]) for number in (1, 2, 4))
    assert TopK().packed_bytes((1,)) > 4  # so a single number goes as it is


@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"forward": "int8"}])
def test_servers_compute_by_the_arithmetic_of_a_replica(options):
    with group_of(**options) as group:
        half = group.trainer(**options)
        plain = Replica(DenseSpec(module=plain_net(), optimizer=adam, **options))
        exact = Replica(DenseSpec(module=plain_net(), optimizer=adam))
        for number in range(3):
            one = case(number, EXAMPLES)
            losses = [each.compute(one.batch, one.embeddings()) for each in (half, plain, exact)]
            for each in losses:
                apply(each)
            assert losses[0].vote.loss == losses[1].vote.loss != losses[2].vote.loss
        found, wanted = half.state()["model"], plain.state()["model"]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        one = case(9, EXAMPLES)
        predicted = [each.predict(one.batch, one.embeddings()) for each in (half, plain)]
        assert torch.equal(*predicted)
