"""A trainer and its group servers go on in other processes as if they had not ended: dropout's masks, and what top-k left out."""

import copy
import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from girih.hierarchical.graph.operator_costs import draws
from girih.hierarchical.wire import Wire
from grouped_site import Dropping, InThread, Net, site
from support.dense_suite import case
from support.votes import apply

pytestmark = pytest.mark.slow

EXAMPLES = 32
TOPK = Wire(gradients="topk")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def step(half, number):
    one = case(number, EXAMPLES)
    computed = half.compute(one.batch, one.embeddings())
    outcome = apply(computed)
    return outcome.facts().loss


def group_of(num_servers, wire=TOPK, late=None, **options):
    return site(num_servers, net=partial(Dropping, late), optimizer=adam, wire=wire, seed=7, **options)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_what_is_beside_the_state_makes_a_run_go_on_bit_for_bit(num_servers):
    with group_of(num_servers) as group:
        half = group.trainer()
        for number in range(2):
            step(half, number)
        state, rest = copy.deepcopy(half.state()), copy.deepcopy(half.extra_state())
        expected = [step(half, number) for number in range(2, 5)], copy.deepcopy(half.state()["model"])
    assert {f"{server}/random" for server in range(num_servers)} < rest.keys()
    assert {"trainer/bottom/0", "trainer/wide/0", "0/bottom/0.0"} & rest.keys()
    found = {}
    for name, given in (
        ("all", rest),
        ("no masks", without(rest, "random")),
        ("no gradients", only(rest, "random")),
    ):
        with group_of(num_servers) as group:
            half = group.trainer()
            half.restore(copy.deepcopy(state))
            half.load_extra_state(copy.deepcopy(given))
            losses = [step(half, number) for number in range(2, 5)]
            found[name] = losses, copy.deepcopy(half.state()["model"])
    assert found["all"][0] == expected[0]
    assert same(found["all"][1], expected[1])
    assert not same(found["no masks"][1], expected[1])
    assert not same(found["no gradients"][1], expected[1])


def test_towers_of_one_server_draw_in_the_order_in_which_they_were_asked():
    """They are run side by side, by threads that share a generator."""
    losses = []
    for late in ("bottom", "wide"):
        with group_of(1, Wire(), late) as group:
            half = group.trainer()
            losses.append([step(half, number) for number in range(2)])
    assert losses[0] == losses[1]


def test_gradients_of_several_nets_are_not_kept():
    with site(1, kind=InThread, net=partial(Net, nn.Identity), optimizer=adam, wire=TOPK) as group:
        half, one = group.trainer(), case(0, EXAMPLES)
        for each in [half.compute(one.batch, one.embeddings()) for _ in range(2)]:
            apply(each)
        assert half.extra_state().keys() <= {"0/random"}


class Own(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


def own(x):
    """A function of a user's: nobody knows what it does."""
    return x


SQUARE = 0.5 * torch.ones(4, 4)


def attending(*arguments, **options):
    return lambda x: functional.scaled_dot_product_attention(x, x, x, *arguments, **options)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(4, 4), False),
        (nn.BatchNorm1d(4), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout(0.1), True),
        (nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1)), True),
        (nn.TransformerEncoderLayer(4, 1, 4, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0), False),
        (nn.Sequential(nn.BatchNorm1d(4), nn.RReLU()), True),
        (Own(), True),
        (lambda x: functional.dropout(x, 0.1), True),
        (lambda x: functional.dropout1d(x, 0.1), True),
        (lambda x: functional.alpha_dropout(x, 0.1, training=True), True),
        (lambda x: functional.feature_alpha_dropout(x, 0.1, training=True), True),
        (lambda x: functional.gumbel_softmax(x), True),
        (lambda x: functional.rrelu(-x, training=True), True),
        (attending(), False),
        (attending(None, 0.5), True),
        (attending(dropout_p=0.5), True),
        (attending(dropout_p=0.0), False),
        (torch.poisson, True),
        (torch.bernoulli, True),
        (lambda x: torch.multinomial(x, 1), True),
        (lambda x: torch.normal(x, 1.0), True),
        (lambda x: torch.rand_like(x), True),
        (lambda x: x.bernoulli(0.5), True),
        (lambda x: x.clone().exponential_(), True),
        (lambda x: x.clone().geometric_(0.5), True),
        (lambda x: functional.softmax(functional.normalize(x), 1) + x.relu() * 2, False),
    ],
)
def test_parts_that_draw_are_known(layer, expected):
    """By what they are made of; the generator tells what they do."""
    part = part_of(layer)
    before = torch.get_rng_state()
    part(SQUARE)
    assert torch.equal(before, torch.get_rng_state()) != expected
    assert draws(part) == expected


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, False), (0.1, True)])
def test_attention_draws_where_it_drops_out(dropout, expected):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("layer", (x, x, x)))
    part = torch.fx.GraphModule(_Calls(nn.MultiheadAttention(4, 1, dropout=dropout)), graph)
    before = torch.get_rng_state()
    part(SQUARE)
    assert torch.equal(before, torch.get_rng_state()) != expected
    assert draws(part) == expected


@pytest.mark.parametrize(
    ("function", "more", "expected"),
    [
        (own, (), True),
        (torch.ops.aten.native_dropout.default, (0.5, True), True),
        (torch.ops.aten.relu.default, (), False),
        (operator.neg, (), False),
    ],
)
def test_operators_that_draw_are_known_and_a_users_function_may(function, more, expected):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"), *more)))
    assert draws(torch.fx.GraphModule(nn.Module(), graph)) == expected


def part_of(layer):
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return True

    return torch.fx.GraphModule(_Calls(layer), Leaves().trace(_Calls(layer)))


class _Calls(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def without(rest, name):
    return {path: value for path, value in rest.items() if not path.endswith(name)}


def only(rest, name):
    return {path: value for path, value in rest.items() if path.endswith(name)}
