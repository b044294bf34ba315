"""Losses over a batch against plain loops, and the streaming estimate against counts."""

import math

import pytest
import torch

from girih.models import retrieval
from girih.models.loss import Targets
from girih.models.retrieval import StreamingFrequencies

IDS = [3, 7, 3, 9, 7, 1]


def case(num_own=6, first=0):
    torch.manual_seed(2)
    scores = (2 * torch.randn(num_own, 6)).double().requires_grad_()
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.0])[first : first + num_own]
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 1.0])[first : first + num_own]
    return scores, Targets(labels[:, None], weights, first=first)


def naive(scores, rewards, each, first=0):
    total = 0.0
    for i, row in enumerate(scores.tolist()):
        others = [j for j in range(6) if IDS[j] != IDS[first + i]]
        total += rewards[i] * each(row, first + i, others)
    return total


def rewards_of(batch):
    return (batch.labels[:, 0] * batch.example_weights).tolist()


@pytest.mark.parametrize("corrects", [False, True])
def test_the_softmax_is_that_of_the_formula(corrects):
    scores, batch = case()
    log_q = torch.tensor([0.3, -1.0, 0.3, -2.0, -1.0, -0.5]) if corrects else None

    def each(row, own, others):
        s = [score - (log_q[j].item() if corrects else 0.0) for j, score in enumerate(row)]
        return math.log(math.exp(s[own]) + sum(math.exp(s[j]) for j in others)) - s[own]

    rewards = rewards_of(batch)
    loss = retrieval.softmax(scores, torch.tensor(IDS), batch, log_q)
    assert loss.item() == pytest.approx(naive(scores, rewards, each) / sum(rewards), rel=1e-6)
    loss.backward()
    assert scores.grad[1].abs().max() == 0  # a negative is nobody's positive
    assert scores.grad[0, 2] == 0  # the same item is no negative


def test_bpr_is_that_of_the_formula():
    scores, batch = case()

    def each(row, own, others):
        return sum(math.log(1 + math.exp(row[j] - row[own])) for j in others) / len(others)

    rewards = rewards_of(batch)
    loss = retrieval.pairwise(scores, torch.tensor(IDS), batch)
    assert loss.item() == pytest.approx(naive(scores, rewards, each) / sum(rewards), rel=1e-6)


def test_a_batch_without_positives_or_with_one_item_alone_gives_no_nan():
    scores, batch = case()
    none = batch._replace(labels=torch.zeros(6, 1))
    for loss in (
        retrieval.softmax(scores, torch.tensor(IDS), none, None),
        retrieval.pairwise(scores, torch.tensor(IDS), none),
    ):
        assert loss == 0
        loss.backward()
        assert torch.isfinite(scores.grad).all()
    same = torch.full((6,), 4)
    assert retrieval.softmax(scores, same, batch, None) == 0
    assert retrieval.pairwise(scores, same, batch) == 0


@pytest.mark.slow
def test_the_estimate_follows_how_often_items_are_in_batches():
    generator = torch.Generator().manual_seed(3)
    frequencies = StreamingFrequencies(0.01)
    weights = torch.tensor([1.0 / (rank + 1) for rank in range(200)])
    ids = torch.arange(200) * 7919 - 300
    for _ in range(3000):
        drawn = torch.multinomial(weights, 64, replacement=True, generator=generator)
        log_q = frequencies.seen(ids[drawn])
    expected = (64 * weights / weights.sum()).log()
    often = {int(d): float(q) for d, q in zip(drawn, log_q, strict=True) if d < 50}
    assert len(often) > 15
    assert max(abs(q - float(expected[d])) for d, q in often.items()) < 0.5
    mean = sum(q - float(expected[d]) for d, q in often.items()) / len(often)
    assert abs(mean) < 0.15
    for _ in range(600):  # the rarest of all becomes the only one
        log_q = frequencies.seen(ids[-1:].repeat(64))
    assert float(log_q[0]) == pytest.approx(math.log(64), abs=0.3)
