"""Partitions of a net, run in one process or in several, compute what the net does."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

from girih.errors import ConfigError
from girih.hierarchical.graph import partition, trace
from girih.hierarchical.graph.operator_costs import free_nodes, name_of
from girih.hierarchical.graph.partitioning import placed
from girih.models import BY_NAME, Block, Embeddings
from girih.planner.tagging.components import components
from girih.planner.tagging.index import Index
from graph_cases import (
    OPTIONS,
    assert_close,
    at_random,
    equal,
    partitioned,
    step,
    tagging_of,
    traced,
)
from hierarchical.test_tracing import NOTHING, NUMERIC, Network
from part_server import run, serve


def all_on_one_server(operator):
    return "server 0"


def parameters_on_servers(operator):
    return f"server {len(operator.module) % 2}" if operator.module else "trainer"


@pytest.mark.parametrize("name", BY_NAME)
def test_partitions_compute_what_the_model_does(name):
    case = traced(name)
    parameters = list(case.model.parameters())
    ways = all_on_one_server, parameters_on_servers, at_random(1), at_random(2, servers=2, on_trainer=0)
    for number, device_of in enumerate(ways):
        found, trainer = partitioned(case.net, tagging_of(case.net, device_of))
        modules = trainer, *(part.module for part in found.parts)
        for training, num_examples in ((True, 9), (False, 4)):
            for module in (case.model, *modules):
                module.train(training)
            batch = case.batch(num_examples, seed=number)
            expected, computed = step(case.model, batch, parameters), step(trainer, batch, parameters)
            assert torch.equal(computed[0], expected[0])
            assert_close(
                computed, expected
            )  # what three parts read has its gradients summed in another order
        names = [name for module in modules for name, _ in module.named_parameters()]
        assert set(names) == {name for name, _ in case.model.named_parameters()}
        servers = {name: part.server for part in found.parts for name, _ in part.module.named_parameters()}
        for part in found.parts:  # one copy of every parameter in a group
            assert all(servers[name] == part.server for name, _ in part.module.named_parameters())
        if number < 2:
            assert not [name for name, _ in trainer.named_parameters()]


@pytest.mark.parametrize("name", ["dnn", "dlrm", "deepfm", "mmoe", "dsin", "two_tower"])
def test_partitions_are_the_model_bit_for_bit(name):
    case = traced(name)
    parameters = list(case.model.parameters())
    for device_of in (all_on_one_server, parameters_on_servers):
        _, trainer = partitioned(case.net, tagging_of(case.net, device_of))
        batch = case.batch(9)
        assert equal(step(trainer, batch, parameters), step(case.model, batch, parameters))


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_partitions_follow_the_mode(name, options):
    case = traced(name, **options)
    found, trainer = partitioned(case.net, tagging_of(case.net, parameters_on_servers))
    modules = trainer, *(part.module for part in found.parts)
    batch, parameters = case.batch(9), list(case.model.parameters())
    for module in (case.model, *modules):
        module.eval()
    evaluated = step(case.model, batch, parameters)
    assert torch.equal(step(trainer, batch, parameters)[0], evaluated[0])
    for module in modules:
        module.train()
    assert not torch.equal(step(trainer, batch, parameters)[0], evaluated[0])


def test_towers_run_side_by_side():
    case = traced("two_tower")
    tagging = tagging_of(
        case.net,
        lambda each: (
            "server 0"
            if each.name.startswith("user")
            else "server 1"
            if each.name.startswith("item")
            else "trainer"
        ),
    )
    found = partition(case.net, tagging)
    assert [sorted(part.server for part in found.parts if part.name in stage) for stage in found.stages] == [
        [0, 1]
    ]


def test_what_several_operators_of_a_server_read_travels_once():
    """Each server gets the vector of its experts once, and answers with one gradient of it."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(NUMERIC.shape[1], 4)
            self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

        def forward(self, numeric, embeddings):
            x = self.first(numeric)
            return torch.cat([expert(x) for expert in self.experts], dim=1).sum(dim=1, keepdim=True)

    model = Experts()
    net = trace(model, NUMERIC, NOTHING)
    tagging = tagging_of(
        net, lambda each: f"server {int(each.name[8]) % 2}" if "experts" in each.name else "trainer"
    )
    found, trainer = partitioned(net, tagging)
    assert [(part.server, part.inputs, part.outputs) for part in found.parts] == [(0, 1, 2), (1, 1, 2)]
    gradients = []
    for module in (model, trainer):
        logits = module(NUMERIC, NOTHING)
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", BY_NAME)
def test_stages_are_those_that_the_planner_counts(name):
    net = traced(name).net
    free = {name_of(node) for node in free_nodes(net.net.graph)}
    for seed in range(5):
        tagging = tagging_of(net, at_random(seed, servers=2))
        expected, runs = {}, {}
        for each in components(net.graph, tagging):
            expected.setdefault((each.server, each.stage), set()).update(set(each.operators) - free)
        for node, where in placed(net.net, tagging, net.graph).items():
            if where.server is not None and "operator" in node.meta:
                runs.setdefault((where.server, where.level // 2), set()).add(name_of(node))
        assert runs == {place: names for place, names in expected.items() if names}
        found = partition(net, tagging)
        servers = {part.name: part.server for part in found.parts}
        assert [{servers[part] for part in stage} for stage in found.stages] == [
            {server for server, stage in runs if stage == number}
            for number in sorted({number for _, number in runs})
        ]


def test_what_waits_for_another_server_is_one_part_with_what_need_not():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            width = NUMERIC.shape[1]
            self.b, self.c, self.d = nn.Linear(width, 2), nn.Linear(width, 2), nn.Linear(4, 1)

        def forward(self, numeric, embeddings):
            return self.d(torch.cat([self.b(numeric), self.c(numeric)], dim=1))

    model = Towers()
    net = trace(model, NUMERIC, NOTHING)
    tagging = tagging_of(net, lambda each: "server 1" if each.name == "c" else "server 0")
    found, trainer = partitioned(net, tagging)
    assert [part.server for part in found.parts] == [1, 0]
    assert torch.equal(trainer(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


@pytest.mark.parametrize("name", BY_NAME)
def test_bytes_of_modules_are_those_of_the_model(name):
    case = traced(name)
    bundles = Index(case.net.graph).bundles
    assert sum(each.parameter_bytes for each in bundles) == sum(
        each.nbytes for each in case.model.parameters()
    )


def test_what_a_server_reads_is_not_changed():
    # a ReLU in place on a server, of what the trainer reads as well
    class Residual(Network):
        def forward(self, numeric, embeddings):
            x = self.first(numeric)
            return self.last(torch.cat([x, self.middle(x + 0)], dim=1)[:, :4])

    model = Residual(nn.ReLU(inplace=True))
    net = trace(model, NUMERIC, NOTHING)
    tagging = tagging_of(net, lambda each: "server 0" if each.kind == "ReLU" else "trainer")
    found, trainer = partitioned(net, tagging)
    assert not found.parts[0].module.get_submodule("middle").inplace
    assert model.middle.inplace
    assert torch.equal(trainer(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


def test_a_module_called_at_two_stages_keeps_its_parameters_once():
    class Twice(Network):
        def forward(self, numeric, embeddings):
            return self.last(self.first(self.middle(self.first(numeric))))

    model = Twice(nn.Tanh())
    net = trace(model, NUMERIC, NOTHING)
    found, trainer = partitioned(
        net, tagging_of(net, lambda each: "server 0" if each.module == "first" else "trainer")
    )
    one, other = pickle.loads(pickle.dumps([part.module for part in found.parts]))
    assert one.first.weight is other.first.weight
    assert torch.equal(trainer(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


def test_copies_have_parameters_of_their_own_and_the_same_exchange():
    case = traced("dien")
    _, trainer = partitioned(
        case.net, tagging_of(case.net, lambda each: "trainer" if each.name == "deep.0" else "server 0")
    )
    other = copy.deepcopy(trainer)
    assert other.get_submodule("_stages.0").exchange is trainer.get_submodule("_stages.0").exchange
    assert [name for name, _ in other.named_parameters()] == ["deep.0.weight", "deep.0.bias"]
    parameters, batch = list(case.model.parameters()), case.batch(5)
    expected = step(case.model, batch, parameters)
    assert torch.equal(step(other, batch, parameters)[0], expected[0])
    assert_close(step(trainer, batch, parameters), expected)


def test_embeddings_packed_otherwise_are_refused():
    class Reading(nn.Module):
        def forward(self, numeric, embeddings):
            return embeddings.stacked(("a", "b")).sum(2)

    def packed(*features):
        return Embeddings((Block(features, torch.randn(3, 2, 4)),))

    net = trace(Reading(), torch.empty(3, 0), packed("a", "b"))
    _, trainer = partitioned(net, tagging_of(net, all_on_one_server))
    trainer(torch.empty(3, 0), packed("a", "b"))
    with pytest.raises(ValueError, match="trace the net again"):
        trainer(torch.empty(3, 0), packed("b", "a"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"midle": "trainer"}, "'midle' is not an operator of the model; did you mean 'middle'"),
        ({"middle": None}, "'middle' on 'no device'; expected 'trainer'"),
        ({"middle": "server x"}, "'middle' on 'server x'; expected 'trainer' or 'server 0' and so on"),
        ({"middle": "server 01"}, "'middle' on 'server 01'; expected"),
        ({"numeric": "server 0"}, "'numeric' on 'server 0'; it must stay on the trainer"),
        ({"first": "server 0"}, "'first' on 'server 0' and 'last' on 'trainer'; expected operators of one"),
    ],
)
def test_taggings_that_do_not_fit_are_refused(changed, message):
    model = Network(nn.ReLU())
    model.last.bias = model.first.bias = nn.Parameter(torch.zeros(1))
    net = trace(model, NUMERIC, NOTHING)
    tagging = tagging_of(net, lambda _: "trainer") | changed
    with pytest.raises(ConfigError, match=message):
        partition(net, {name: device for name, device in tagging.items() if device is not None})


@pytest.mark.slow
def test_parts_travel_to_other_processes():
    case = traced("deepfm")
    found = partition(case.net, tagging_of(case.net, all_on_one_server))
    modules = {part.name: part.module for part in found.parts}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()

    def exchange(stage):
        outputs = []
        for name, inputs in stage:
            own = run(modules[name], inputs)
            here.send((name, [each.detach() for each in inputs]))
            for one, other in zip(here.recv(), own, strict=True):
                assert one is other is None or torch.equal(one, other)
            outputs.append(own[: len(modules[name](*inputs))])
        return outputs

    try:
        here.send_bytes(pickle.dumps(modules))
        batch = case.batch(7)
        logits = found.trainer(exchange)(batch.numeric, batch.embeddings)
        assert torch.equal(logits, case.model(batch.numeric, batch.embeddings))
        here.send(None)
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
