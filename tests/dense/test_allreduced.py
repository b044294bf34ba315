"""The dense half of a trainer among others: two real processes, against one that has all examples."""

import numpy as np
import pytest
import torch
from torch import nn

from companions import together
from girih.data import Batch
from girih.data.batch import share_of
from girih.dense.half import DenseSpec
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.replica import Replica
from girih.models.embeddings import Block, Embeddings
from girih.telemetry.stats import Stats
from support.votes import apply

SIZES = (6, 5, 1, 2)  # examples of each step: a share of the third is empty


class Net(nn.Module):
    """Parts that all examples use, that only some use, and that none does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.Linear(3, 1)
        self.none = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.spoil = lambda mean: mean

    def forward(self, numeric, embeddings):
        return self.all(numeric) + self.frozen(numeric) + embeddings.blocks[0].values.sum(dim=(1, 2))[:, None]

    def loss(self, outputs, batch):
        """The mean of the logits."""
        return self.spoil(outputs.mean())


class Spoiled(torch.autograd.Function):
    """A number whose gradient is NaN."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)  # moves what has a gradient of 0, too


def batch_of(size, step):
    rng = np.random.default_rng(step)
    return Batch(
        ids=np.arange(size),
        offsets=np.arange(size + 1, dtype=np.int32),
        numeric=rng.normal(size=(size, 3)).astype(np.float32),
        labels=np.zeros((size, 1), np.float32),
    )


def embeddings_of(batch):
    values = torch.tensor(batch.ids, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 2) / 8
    return Embeddings((Block(("user",), values.clone().requires_grad_()),))


def step(replica, batch):
    """The mean over the whole batch as loss; returns what was computed, and the embeddings' gradient."""
    embeddings = embeddings_of(batch)
    computed = replica.compute(batch, embeddings)
    given = embeddings.blocks[0].values.grad
    return computed, [] if given is None else given[:, 0, 0].tolist()


def parameters_of(replica):
    return {name: p.detach().reshape(-1).tolist() for name, p in replica.module.named_parameters()}


def train(ranks):
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += ranks.rank  # they start as rank 0's
    stats = Stats()
    spec = DenseSpec(module=net, optimizer=optimizer, clip_norm=0.3, stats=stats)
    replica = AllReducedReplica(spec, ranks)
    told = {"start": parameters_of(replica), "steps": []}
    for number, size in enumerate(SIZES):
        share = share_of(batch_of(size, number), ranks.rank, ranks.size)
        computed, given = step(replica, share)
        outcome = apply(computed)
        told["steps"].append([outcome.facts().loss, given, parameters_of(replica)])
    told["sent"], told["refused"] = stats.wire_bytes()["dense"], refused(replica, ranks)
    told["end"] = parameters_of(replica)
    return told


def refused(replica, ranks):
    """What each is told where rank 1's gradient is NaN, and where its loss is."""
    share, told = share_of(batch_of(4, 9), ranks.rank, ranks.size), []
    for spoiled in (Spoiled.apply, lambda mean: mean * float("nan")):
        if ranks.rank:
            replica.module.spoil = spoiled
        computed, _ = step(replica, share)
        told.append(str(apply(computed).facts().refused))
    return told


@pytest.fixture(scope="module")
def told():
    return together(train)


@pytest.fixture(scope="module")
def whole():
    """One process with all examples."""
    replica = Replica(DenseSpec(module=Net(), optimizer=optimizer, clip_norm=0.3))
    told = {"start": parameters_of(replica), "steps": []}
    for number, size in enumerate(SIZES):
        computed, given = step(replica, batch_of(size, number))
        outcome = apply(computed)
        told["steps"].append([outcome.facts().loss, given, parameters_of(replica)])
    return told


def test_trainers_move_as_one_that_has_all_examples(told, whole):
    assert told[0]["start"] == told[1]["start"] == whole["start"]
    for one, two, alone in zip(told[0]["steps"], told[1]["steps"], whole["steps"], strict=True):
        assert one[0] == two[0] == pytest.approx(alone[0], rel=1e-5)
        assert one[1] + two[1] == pytest.approx(alone[1])  # of the mean over the whole batch
        assert one[2] == two[2]
        for name, values in alone[2].items():
            assert one[2][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def test_a_parameter_without_a_gradient_stays_under_weight_decay_too(told):
    for each in told:
        for name in ("none.weight", "none.bias", "frozen.weight"):
            assert each["end"][name] == told[0]["start"][name]
        assert each["end"]["all.weight"] != told[0]["start"]["all.weight"]


def test_an_empty_share_takes_part_with_nothing(told):
    (_, none, _), (_, given, _) = (each["steps"][2] for each in told)
    assert none == []
    assert given == [1.0]


def test_a_gradient_that_one_refuses_moves_none(told):
    summed = "the gradient of dense parameter 'all.weight' is NaN or infinite"
    assert told[0]["refused"] == [summed, "the loss of trainer 1 is nan"]
    assert told[1]["refused"] == [summed, "the loss is nan"]
    assert told[0]["end"] == told[1]["end"] == told[0]["steps"][-1][2]


def test_bytes_are_those_of_a_ring(told):
    num_numbers = sum(len(v) for n, v in told[0]["start"].items() if not n.startswith("frozen"))
    assert told[0]["sent"] == told[1]["sent"] == len(SIZES) * num_numbers * 4  # 2 · (2 − 1) / 2 of the tensor
