from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from girih.errors import ConfigError
from girih.models import MMoE
from girih.models.can import CoActionUnit
from girih.models.dcn import MatrixCross
from girih.models.dlrm import PairwiseDots
from girih.models.embeddings import Jagged
from girih.models.layers.attention import Attention
from girih.models.layers.mlp import MLP, StackedMLP, linear_layers
from girih.models.multitask import logit_of_product
from girih.schema import Categorical, Schema


def test_mlp_lays_its_blocks_in_order():
    kinds = [type(layer).__bases__[0] if "Batch" in type(layer).__name__ else type(layer) for layer in
             MLP(3, (5, 4), 2, dropout=0.1, batch_norm=True)]  # fmt: skip
    block = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout]
    assert kinds == [*block, *block, nn.Linear]
    assert [type(layer) for layer in MLP(3, (5,))] == [nn.Linear, nn.ReLU]
    assert MLP(3, (5, 4)).width == 4
    assert MLP(3, (), 2).width == 2


def test_mlp_normalises_over_the_batch():
    torch.manual_seed(0)
    net = MLP(3, (4,), batch_norm=True).double()
    x = torch.randn(7, 3, dtype=torch.double)
    linear = x @ net[0].weight.T + net[0].bias
    deviation = ((linear - linear.mean(0)) ** 2).mean(0)
    expected = ((linear - linear.mean(0)) / (deviation + 1e-5).sqrt()).clamp(min=0)
    torch.testing.assert_close(net(x), expected)


def test_one_example_takes_the_running_moments():
    torch.manual_seed(0)
    net = MLP(3, (4,), batch_norm=True)
    for _ in range(3):
        net(torch.randn(16, 3) + 5)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(1, 3)
    trained = net.train()(x)
    torch.testing.assert_close(trained, net.eval()(x))
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan"), "0.1", True])
def test_dropout_out_of_range_is_refused(rate):
    with pytest.raises(ConfigError, match="dropout = "):
        MLP(3, (4,), 1, dropout=rate)


def test_pairs_come_once_each():
    fields = torch.tensor([[[1.0, 0.0], [2.0, 3.0], [5.0, 7.0]]])
    assert PairwiseDots(3)(fields).tolist() == [[2.0, 5.0, 31.0]]
    assert PairwiseDots(1)(fields[:, :1]).shape == (1, 0)
    assert PairwiseDots(27).width == 351


def test_cross_layers_all_see_the_first_input():
    torch.manual_seed(0)
    x0, x = torch.randn(4, 3), torch.randn(4, 3)
    for layer in (MatrixCross(3), MatrixCross(3)):
        expected = x0 * (x @ layer.linear.weight.T + layer.linear.bias) + x
        x = layer(x0, x)
        torch.testing.assert_close(x, expected)


def test_low_rank_cross_has_fewer_parameters():
    assert sum(p.numel() for p in MatrixCross(100, rank=3).parameters()) == 700
    assert sum(p.numel() for p in MatrixCross(100).parameters()) == 10_100


def test_attention_equals_the_padded_form():
    torch.manual_seed(0)
    for softmax in (False, True):
        layer = Attention(3, (5,), softmax=softmax)
        history = Jagged(torch.randn(6, 3), torch.tensor([0, 2, 2, 6]))
        target = torch.randn(3, 3)
        padded, mask = history.padded()
        wide = target[:, None].expand_as(padded)
        scores = layer.unit(torch.cat([wide, padded, wide - padded, wide * padded], dim=2))[..., 0]
        if softmax:
            weights = scores.masked_fill(~mask, -1e30).softmax(dim=1) * mask
        else:
            weights = scores * mask
        torch.testing.assert_close(layer(target, history), (weights[..., None] * padded).sum(1))


def test_softmax_survives_large_scores():
    layer = Attention(1, (), softmax=True)
    nn.init.constant_(layer.unit[0].weight, 300.0)
    history = Jagged(torch.tensor([[9.0], [1.0]]), torch.tensor([0, 2]))
    assert layer(torch.tensor([[1.0]]), history).item() == pytest.approx(9.0)


@pytest.mark.parametrize("independent", [False, True])
def test_a_co_action_unit_gives_each_feed_what_it_gives_it_alone(independent):
    torch.manual_seed(0)
    unit = CoActionUnit(3, (4, 2), 2, independent_orders=independent)
    parameters = torch.randn(2, unit.num_parameters)
    feeds = [
        Jagged(torch.randn(lengths.sum(), 3), F.pad(lengths.cumsum(0), (1, 0)))
        for lengths in torch.tensor([[5, 0], [1, 1], [0, 0], [7, 8], [1, 0]])
    ]  # two of about one length between others, in batches of their own
    alone = torch.cat([unit(parameters, [feed]) for feed in feeds], dim=1)
    torch.testing.assert_close(unit(parameters, feeds), alone)
    assert not alone.view(2, 5, unit.width)[:, 2].any()


def test_a_co_action_unit_takes_a_batch_of_nothing():
    unit = CoActionUnit(3, (4, 2), 2)
    nothing = [Jagged(torch.zeros(0, 3, requires_grad=True), torch.zeros(size + 1).long()) for size in (0, 2)]
    for size, feed in zip((0, 2), nothing, strict=True):
        parameters = torch.randn(size, unit.num_parameters, requires_grad=True)
        out = unit(parameters, [feed, feed])
        assert out.shape == (size, 2 * unit.width)
        assert not out.any()
        out.sum().backward()
        assert not parameters.grad.any()


def test_experts_start_as_separate_layers_do():
    schema = Schema([Categorical(name="item", dim=3)], ["click", "buy"])
    torch.manual_seed(3)
    model = MMoE(schema, num_experts=2, expert_hidden=(5, 4))
    torch.manual_seed(3)
    experts, gates = [MLP(3, (5, 4)) for _ in range(2)], nn.Linear(3, 4, bias=False)
    assert model.first.weight.equal(torch.cat([experts[0][0].weight, experts[1][0].weight, gates.weight]))
    assert model.experts.weights[0].equal(torch.stack([expert[2].weight for expert in experts]))
    assert model.first.bias.equal(torch.cat([expert[0].bias for expert in experts]))
    assert model.experts.biases[0].equal(torch.cat([expert[2].bias for expert in experts]))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_stacked_experts_are_separate_ones(batch_norm):
    torch.manual_seed(1)
    experts = [MLP(6, (5, 4, 3), batch_norm=batch_norm) for _ in range(2)]
    stacked = StackedMLP(experts, dropout=0.0, first=False)
    firsts = [linear_layers(expert)[0] for expert in experts]
    for training, size in [(True, 6), (True, 2), (False, 6), (True, 1), (False, 1), (True, 0), (False, 0)]:
        for module in (stacked, *experts):
            module.train(training)
        x, given = torch.randn(size, 6), torch.randn(size, 2, 3)
        found = stacked(torch.cat([first(x) for first in firsts], dim=1))
        expected = torch.stack([expert(x) for expert in experts], dim=1)
        torch.testing.assert_close(found, expected)
        for output in (found, expected):
            output.backward(given)
        ours, theirs = (
            stacked.weights[0].grad,
            torch.stack([linear_layers(e)[1].weight.grad for e in experts]),
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("hidden", [(), (5,), (5, 4)])
def test_stacked_towers_are_separate_ones(batch_norm, hidden):
    """Each has an input of its own, and a plain last layer."""
    torch.manual_seed(1)
    towers = [MLP(6, hidden, 2, batch_norm=batch_norm) for _ in range(3)]
    stacked = StackedMLP(towers, dropout=0.0, first=True)
    for training, size in [(True, 6), (False, 6), (True, 1), (True, 0), (False, 1)]:
        for module in (stacked, *towers):
            module.train(training)
            module.zero_grad()
        x, given = torch.randn(size, 3, 6), torch.randn(size, 3, 2)
        found = stacked(x)
        expected = torch.stack([tower(each) for tower, each in zip(towers, x.unbind(1), strict=True)], dim=1)
        torch.testing.assert_close(found, expected)
        for output in (found, expected):
            output.backward(given)
        for ours, theirs in zip(stacked.weights, zip(*map(linear_layers, towers), strict=True), strict=True):
            torch.testing.assert_close(ours.grad, torch.stack([each.weight.grad for each in theirs]))


def test_stacked_experts_drop_their_share():
    torch.manual_seed(1)
    stacked = StackedMLP([MLP(2, (50, 50)) for _ in range(2)], dropout=0.4, first=False)
    nn.init.constant_(stacked.biases[0], 100.0)
    found = stacked(torch.randn(200, 100))
    assert (found == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    assert (stacked.eval()(torch.randn(200, 100)) > 0).all()


def test_the_logit_of_a_product_of_probabilities_is_exact_and_finite():
    a, b = torch.meshgrid(torch.linspace(-12, 12, 49), torch.linspace(-12, 12, 49), indexing="ij")
    product = a.double().sigmoid() * b.double().sigmoid()
    torch.testing.assert_close(logit_of_product(a, b).double(), torch.logit(product), rtol=1e-6, atol=1e-6)
    far = torch.tensor([-1e4, 0.0, 1e4, 1e4, -1e4], requires_grad=True)
    logit = logit_of_product(far, far.flip(0))
    logit.sum().backward()
    assert torch.isfinite(logit).all()
    assert torch.isfinite(far.grad).all()
