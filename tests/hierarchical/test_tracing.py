"""Models as graphs: they compute the same, and their operators are what they are said to be."""

import copy

import pytest
import torch
from torch import nn

from girih.errors import ConfigError
from girih.hierarchical.graph import trace
from girih.models import BY_NAME, Block, Embeddings
from girih.models.layers.mlp import MLP
from graph_cases import OPTIONS, equal, step, traced

OPAQUE = {
    "dlrm": {"dots": "changes whether gradients"},
    "dien": {"units.0": "works in place"},
    "dsin": {"units.0": "looks into data"},
    "atbrg": {"heads": "looks into data"},
    "can": {"units.0": "looks into data"},
    "star": {"domains": "looks into data", "norm": "looks into data"},
}
"""Modules of the zoo that are one operator each, and why."""
NUMERIC = torch.randn(6, 4)
NOTHING = Embeddings()


class Network(nn.Module):
    """A user's model of numeric features."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 1)

    def forward(self, numeric, embeddings):
        return self.last(self.middle(self.first(numeric)))


class IfPositive(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class IfAnyIsLarge(nn.Module):
    def forward(self, x):
        large = (x > 1e9).nonzero()
        return x * 0 if len(large) else x


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[:, 0] = 0
        return y


class WithoutGradients(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().mean()
        return x / scale


class IfThereIsOne(nn.Module):
    def forward(self, x):
        return x if x.shape[0] == 1 else x - x.mean(0)


class BySizeInPython(nn.Module):
    """What it does follows from the number of examples in no way that a graph has."""

    def forward(self, x):
        return x * (len(x) ** 2)


class Sized(nn.Module):
    """What it does follows from the number of examples in ways that a graph has."""

    def forward(self, x):
        places = torch.arange(2 * len(x) + 1)[1::2].to(x.dtype)
        return (x.reshape(x.shape[0] * 2, 2) + 1).view(len(x), -1) + places[:, None] / len(x)


class Walking(nn.Module):
    """A call for each example."""

    def forward(self, x):
        return torch.stack([row * 2 for row in x])


def operators_of(net):
    return {operator.name: operator for operator in net.graph.operators}


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in BY_NAME), *OPTIONS])
def test_nets_compute_what_their_models_do(name, options):
    case = traced(name, **options)
    parameters = list(case.model.parameters())
    for training, num_examples in ((True, 9), (True, 1), (False, 4)):
        case.model.train(training)
        batch, before = case.batch(num_examples), copy.deepcopy(case.model.state_dict())
        expected = step(case.model, batch, parameters)
        moved = copy.deepcopy(case.model.state_dict())
        case.model.load_state_dict(before)
        assert equal(step(case.net.net.train(training), batch, parameters), expected)
        assert all(torch.equal(value, moved[key]) for key, value in case.model.state_dict().items())


@pytest.mark.parametrize("name", BY_NAME)
def test_all_parameters_of_the_zoo_are_of_operators_that_can_move(name):
    case = traced(name)
    operators = case.net.graph.operators
    movable = sum(operator.parameter_bytes for operator in operators if operator.movable)
    assert movable == sum(operator.parameter_bytes for operator in operators)
    assert movable == sum(parameter.nbytes for parameter in case.model.parameters())
    assert {*dict(case.net.net.named_parameters())} == {*dict(case.model.named_parameters())}
    expected = OPAQUE.get(name, {})
    assert case.net.opaque.keys() == expected.keys()
    assert all(reason in case.net.opaque[path] for path, reason in expected.items())


@pytest.mark.parametrize(
    "middle", [IfPositive, IfAnyIsLarge, InPlace, WithoutGradients, BySizeInPython, IfThereIsOne]
)
def test_a_module_that_cannot_be_recorded_is_one_operator(middle):
    model = Network(middle())
    net = trace(model, NUMERIC, NOTHING)
    assert net.opaque.keys() == {"middle"}
    assert [*operators_of(net)] == ["numeric", "first", "middle", "last", "logits"]
    for numeric in (torch.ones(3, 4), -torch.ones(2, 4), torch.ones(1, 4)):
        assert torch.equal(net.net(numeric, NOTHING), model(numeric, NOTHING))


def test_loops_over_examples_are_one_operator():
    net = trace(Network(Walking()), NUMERIC, NOTHING)
    assert [*operators_of(net)] == ["numeric", "first", "middle", "last", "logits"]


def test_a_model_with_an_if_on_data_is_one_operator():
    class Deciding(Network):
        def forward(self, numeric, embeddings):
            x = super().forward(numeric, embeddings)
            return x if numeric.mean() > 0 else -x

    model = Deciding(nn.ReLU())
    net = trace(model, NUMERIC, NOTHING)
    assert "looks into data" in net.opaque[""]
    (operator,) = [each for each in net.graph.operators if each.kind not in ("input", "output")]
    assert (operator.name, operator.kind, operator.movable) == ("Deciding", "Deciding", False)
    assert operator.parameter_bytes == sum(each.nbytes for each in model.parameters())
    for numeric in (torch.ones(3, 4), -torch.ones(2, 4)):
        assert torch.equal(net.net(numeric, NOTHING), model(numeric, NOTHING))


def test_numbers_that_follow_from_sizes_are_computed():
    model = Network(Sized())
    net = trace(model, NUMERIC, NOTHING)
    assert not net.opaque
    for num_examples in (1, 2, 23):
        numeric = torch.randn(num_examples, 4)
        assert torch.equal(net.net(numeric, NOTHING), model(numeric, NOTHING))


def test_a_model_is_left_as_it_was():
    model = Network(nn.BatchNorm1d(4)).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    net = trace(model, NUMERIC, NOTHING)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(each.training for each in (model, model.middle, net.net, net.net.middle))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert net.net.first is model.first


def test_flops_of_an_mlp_are_its_products():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MLP(8, (16, 4), 1)

        def forward(self, numeric, embeddings):
            return self.mlp(embeddings.concatenated())

    embeddings = Embeddings((Block(("a", "b"), torch.randn(6, 2, 4)),))
    operators = operators_of(trace(Deep(), torch.empty(6, 0), embeddings))
    linear = {name: each for name, each in operators.items() if each.kind == "Linear"}
    assert {name: each.flops_per_example for name, each in linear.items()} == {
        "mlp.0": 3 * 2 * 8 * 16,
        "mlp.2": 3 * 2 * 16 * 4,
        "mlp.4": 3 * 2 * 4 * 1,
    }
    assert [each.parameter_bytes for each in linear.values()] == [4 * (8 * 16 + 16), 4 * (16 * 4 + 4), 4 * 5]
    assert [each.output_bytes_per_example for each in linear.values()] == [4 * 16, 4 * 4, 4 * 1]


def test_edges_are_what_travels():
    graph = trace(Network(nn.ReLU()), NUMERIC, NOTHING).graph
    edges = [(each.producer, each.consumer, each.bytes_per_example) for each in graph.edges]
    assert edges == [
        ("numeric", "first", 16),
        ("first", "middle", 16),
        ("middle", "last", 16),
        ("last", "logits", 4),
    ]


def test_rows_of_an_edge_are_vectors_along_the_last_dimension():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.last = nn.Linear(2, 3), nn.Linear(6, 1)

        def forward(self, numeric, embeddings):
            return self.last(self.each(numeric.view(-1, 2, 2)).flatten(1)).squeeze(1).sigmoid().unsqueeze(1)

    edges = {each.producer: each for each in trace(Rows(), NUMERIC, NOTHING).graph.edges}
    rows = {name: each.rows_per_example for name, each in edges.items()}
    assert rows == {
        "numeric": 1, "view": 2, "each": 2, "flatten": 1, "last": 1, "squeeze": 0, "sigmoid": 0, "unsqueeze": 1,
    }  # fmt: skip
    assert {each.number_bytes for each in edges.values()} == {4}


def test_operators_that_share_a_parameter_are_of_one_module():
    model = Network(nn.Linear(4, 4))
    model.middle.weight = model.first.weight
    operators = operators_of(trace(model, NUMERIC, NOTHING))
    assert operators["first"].module == operators["middle"].module
    assert operators["last"].module == "last"
    assert operators["middle"].parameter_bytes == 4 * 4  # the weight is counted once


def test_nets_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        model = Network(nn.ReLU())
        net = trace(model, NUMERIC, NOTHING)
        assert net.net(NUMERIC, NOTHING).dtype == torch.bfloat16
        assert torch.equal(net.net(NUMERIC, NOTHING), model(NUMERIC, NOTHING))


def test_modules_may_be_called_as_nets_call_their_own():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.numeric, self.logits = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, numeric, embeddings):
            return self.logits(self.numeric(numeric))

    net = trace(Named(), NUMERIC, NOTHING)
    assert [*operators_of(net)] == ["numeric", "numeric_1", "logits_1", "logits"]


def test_an_empty_batch_is_refused():
    with pytest.raises(ConfigError, match="expected an example batch with at least one example"):
        trace(Network(nn.ReLU()), NUMERIC[:0], NOTHING)
