from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from girih.errors import ConfigError
from girih.models import bce_with_logits
from girih.models.loss import Targets, label_losses


def loss_of(logits, labels, weights=None):
    """The loss, and its gradient in the logits."""
    leaf = logits.detach().clone().requires_grad_()
    loss = bce_with_logits(leaf, labels, weights)
    loss.backward()
    return loss.detach(), leaf.grad


def case(num_labels=3, num_examples=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num_examples, num_labels, generator=generator)
    labels = torch.rand(num_examples, num_labels, generator=generator)
    labels[::2] = labels[::2].round()
    return logits, labels, torch.rand(num_examples, generator=generator)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_are_those_of_torch(num_labels, weighted):
    logits, labels, weights = case(num_labels)
    loss, gradient = loss_of(logits, labels, weights if weighted else None)
    leaf = logits.double().requires_grad_()
    each = F.binary_cross_entropy_with_logits(leaf, labels.double(), reduction="none")
    w = weights.double() if weighted else torch.ones(len(labels), dtype=torch.double)
    expected = (each * w[:, None]).sum() / (w.sum() * num_labels)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-5, atol=1e-9)
    assert loss.shape == ()
    assert not gradient.requires_grad
    scaled = logits.clone().requires_grad_()
    bce_with_logits(scaled, labels, weights if weighted else None).backward(torch.tensor(0.25))
    torch.testing.assert_close(scaled.grad, gradient / 4, rtol=1e-6, atol=0)  # a share of a step's mean loss


def test_without_weights_it_is_the_plain_mean():
    logits, labels, _ = case()
    loss, _ = loss_of(logits, labels)
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, labels))
    ones, _ = loss_of(logits, labels, torch.full((50,), 2.5))
    torch.testing.assert_close(loss, ones)


def test_an_example_of_weight_two_counts_twice():
    logits, labels, _ = case(2, 3)
    loss, gradient = loss_of(logits, labels, torch.tensor([2.0, 1.0, 0.0]))
    rows = [0, 0, 1]
    twice, twice_gradient = loss_of(logits[rows], labels[rows])
    torch.testing.assert_close(loss, twice)
    torch.testing.assert_close(gradient[0], twice_gradient[0] + twice_gradient[1])
    assert gradient[2].tolist() == [0.0, 0.0]


def test_no_weight_at_all_is_no_loss():
    logits, labels, _ = case()
    loss, gradient = loss_of(logits, labels, torch.zeros(50))
    assert loss.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("weights", [None, torch.zeros(0)])
def test_an_empty_batch_is_no_loss(weights):
    loss, gradient = loss_of(torch.zeros(0, 2), torch.zeros(0, 2), weights)
    assert loss.item() == 0
    assert gradient.shape == (0, 2)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4], [-1e4], [1e4], [-1e4]])
    labels = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    loss, gradient = loss_of(logits, labels)
    assert loss.item() == pytest.approx(5e3)
    assert gradient.flatten().tolist() == [0.0, 0.0, 0.25, -0.25]


def test_non_finite_logits_show():
    loss, gradient = loss_of(torch.tensor([[float("nan")], [0.0]]), torch.zeros(2, 1))
    assert loss.isnan()
    assert gradient[0].isnan()
    assert not gradient[1].isnan()


def test_half_precision_logits_get_a_gradient_of_their_kind():
    logits, labels, _ = case()
    loss, gradient = loss_of(logits.bfloat16(), labels)
    assert gradient.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    expected, _ = loss_of(logits.bfloat16().float(), labels)
    assert loss == expected


@pytest.mark.parametrize("shape", [(50,), (50, 1), (49, 3)])
def test_shapes_must_agree(shape):
    _, labels, _ = case()
    with pytest.raises(ConfigError, match=r"expected \[50, 3\]"):
        bce_with_logits(torch.zeros(shape), labels)


@pytest.mark.parametrize("weighted", [False, True])
def test_each_label_has_its_loss_over_the_examples_that_count_for_it(weighted):
    torch.manual_seed(1)
    outputs, numbers = 3 * torch.randn(40, 4), 5 * torch.randn(40, 4)
    labels = torch.cat([numbers[:, :2].sigmoid().round(), numbers[:, 2:]], dim=1)
    counts = (torch.rand(40, 4) < 0.4) * torch.rand(40, 4)
    counts[:, 1] = 0  # one label counts nowhere
    weights = torch.rand(40) if weighted else torch.ones(40)
    total = weights @ counts
    scale = torch.where(total > 0, weights.sum() / total, 0.0)
    leaf = outputs.clone().requires_grad_()
    targets = Targets(
        labels, weights if weighted else None, counts, scale.double(), ("bce", "bce", "mse", "huber"), 1.5
    )
    loss = label_losses(leaf, targets)
    loss.backward()
    plain = outputs.double().requires_grad_()
    kinds = [F.binary_cross_entropy_with_logits] * 2 + [F.mse_loss, F.huber_loss]
    expected = torch.zeros((), dtype=torch.double)
    for t, kind in enumerate(kinds):
        more = {"delta": 1.5} if t == 3 else {}
        each = kind(plain[:, t], labels[:, t].double(), reduction="none", **more)
        share = (weights * counts[:, t]).double()
        if share.sum() > 0:
            expected = expected + (each * share).sum() / share.sum() / 4
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.double(), plain.grad, rtol=1e-4, atol=1e-8)
    assert not leaf.grad[:, 1].any()
    torch.testing.assert_close(
        targets.mean((outputs - labels) ** 2)[None],
        sum(
            ((outputs - labels) ** 2 * counts * weights[:, None])[:, t].sum() / total[t] / 4
            for t in (0, 2, 3)
        )[None],
        rtol=1e-5,
        atol=0,
    )
