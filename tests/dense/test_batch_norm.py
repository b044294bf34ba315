"""Batch norm over the examples of all trainers: three real processes, against one that has all examples."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import girih
from companions import together
from girih.data import Batch
from girih.data.batch import share_of
from girih.dense.batch_norm import GlobalBatchNorm
from girih.dense.half import DenseSpec
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.replica import Replica
from girih.dense.halves.substituted import SubstitutedReplica
from girih.errors import ConfigError
from girih.models import STAR, DeepFM
from girih.models.embeddings import Block, Embeddings
from girih.models.layers.mlp import BatchNorm
from girih.planner.facts import Facts, ModelFacts
from girih.planner.placement import modulo
from girih.telemetry.stats import Stats
from support.dense_suite import case, dense_schema, dense_spec
from support.votes import apply, drop

RANKS = 3
SIZES = (8, 7, 2, 1, 6)  # examples of each step: one share of the third is empty, two of the fourth are
CHANNELS = (2, 3, 4)
ROWS, COLUMNS, LENGTH = 10, 4, 5


class Net(nn.Module):
    """Batch norm of embeddings, of numbers, which learn nothing, and of a layer before a ReLU in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vectors = BatchNorm(CHANNELS[0], affine=False)
        self.numbers = BatchNorm(CHANNELS[1])
        self.first = nn.Linear(5, 4)
        self.layer = BatchNorm(CHANNELS[2])
        self.last = nn.Linear(4, 1)

    def forward(self, numeric, embeddings):
        vectors = self.vectors(embeddings.blocks[0].values[:, 0])
        x = torch.cat([vectors, self.numbers(numeric)], dim=1)
        return self.last(torch.relu_(self.layer(self.first(x))))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def batch_of(size, step):
    rng = np.random.default_rng(step)
    return Batch(
        ids=rng.integers(0, 100, size),
        offsets=np.arange(size + 1, dtype=np.int32),
        numeric=rng.normal(3, 2, size=(size, 3)).astype(np.float32),
        labels=rng.integers(0, 2, (size, 1)).astype(np.float32),
    )


def step(replica, batch):
    """Returns the loss, and the embeddings' gradient."""
    values = torch.tensor(batch.ids, dtype=torch.float32).view(-1, 1, 1) / torch.tensor([8.0, -3.0])
    embeddings = Embeddings((Block(("user",), values.sin_().requires_grad_()),))
    computed = replica.compute(batch, embeddings)
    given = embeddings.blocks[0].values.grad
    return computed, [] if given is None else given.reshape(-1).tolist()


def numbers_of(replica):
    state = replica.module.state_dict().items()
    return {name: value.reshape(-1).tolist() for name, value in state if value.is_floating_point()}


def train(replica, part):
    told = []
    for number, size in enumerate(SIZES):
        computed, given = step(replica, part(batch_of(size, number)))
        outcome = apply(computed)
        told.append([outcome.facts().loss, given, numbers_of(replica)])
    return told


def of_trainers(ranks):
    stats = Stats()
    spec = DenseSpec(module=Net(), optimizer=sgd, global_batch_norm=True, stats=stats)
    replica = AllReducedReplica(spec, ranks)
    told = {"steps": train(replica, lambda batch: share_of(batch, ranks.rank, ranks.size))}
    sent = stats.wire_bytes()["dense"]
    spoiled = batch_of(6, 9)
    spoiled.numeric[0, 0] = math.nan  # of the first trainer
    computed, _ = step(replica, share_of(spoiled, ranks.rank, ranks.size))
    told["sent"] = stats.wire_bytes()["dense"] - sent
    told["refused"] = bool(computed.vote.refused)
    drop(computed)
    told["end"] = numbers_of(replica)
    told["domains"] = of_domains(lambda spec: AllReducedReplica(spec, ranks), global_batch_norm=True)
    return told | directly(ranks) | {"split": split(ranks)}


def deepfm(**more):
    """Specification of a DeepFM with batch norm."""
    torch.manual_seed(0)
    model = DeepFM(dense_schema(), hidden=(8,), batch_norm=True)
    return replace(dense_spec(), module=model, **more)


def moved(half, own):
    """Losses of some steps, and all numbers after them."""
    losses = []
    for number, size in enumerate(SIZES):
        one = own(case(number, size))
        computed = half.compute(one.batch, one.embeddings())
        outcome = apply(computed)
        losses.append(outcome.facts().loss)
    state = half.state()["model"].items()
    return [losses, {name: value.reshape(-1).tolist() for name, value in state if value.is_floating_point()}]


def split(ranks):
    """Each trainer has some features of all examples, and computes the upper network of its share."""
    schema = dense_schema()
    placement = modulo(schema, ranks.size)
    spec = deepfm(global_batch_norm=True)
    half = SubstitutedReplica(spec, ranks, schema=schema, placement=placement, split=True)
    return moved(half, lambda one: one.of_features(placement.features_of(ranks.rank)))


DOMAINS = [0, 0, 0, 1, 1, 1, 0, 1, 2]  # a trainer lacks one, one is a single example, and one is absent


def of_domains(part, **more):
    """A step of STAR: its moments by domain, and the embeddings' gradient."""
    torch.manual_seed(0)
    schema = girih.Schema(
        [girih.Categorical(name="user", dim=2), girih.Numeric(name="domain")], labels="click"
    )
    model = STAR(schema, domain="domain", num_domains=4, auxiliary_hidden=(), hidden=(4,))
    batch = replace(batch_of(len(DOMAINS), 3), numeric=np.array(DOMAINS, np.float32)[:, None])
    replica = part(DenseSpec(module=model, optimizer=sgd, **more))
    computed, given = step(replica, batch if not more else share_of(batch, replica.ranks.rank, RANKS))
    apply(computed)
    return [given, numbers_of(replica)]


def values():
    """Far from 0, with weights of the outputs for a loss."""
    random = torch.Generator().manual_seed(5)
    drawn = (torch.randn(ROWS, COLUMNS, LENGTH, generator=random) for _ in range(2))
    return 1e3 + next(drawn), next(drawn)


def normalised(x, counts, dtype):
    """Output, gradients of the input, and running moments after one step."""
    x = x.clone().requires_grad_()
    weight, bias = (torch.linspace(start, 2, COLUMNS, dtype=dtype) for start in (-1, 0))
    running = torch.zeros(COLUMNS, dtype=dtype), torch.ones(COLUMNS, dtype=dtype)
    output = F.batch_norm(x, *running, weight, bias, True, 0.1, 1e-5)
    (output * counts).sum().backward()
    return [output.tolist(), x.grad.tolist(), *(each.tolist() for each in running)]


def directly(ranks):
    """Without a model: three dimensions, unequal parts; and what comes of bfloat16."""
    part = slice(ranks.rank * ROWS // ranks.size, (ranks.rank + 1) * ROWS // ranks.size)
    x, counts = (each[part] for each in values())
    with GlobalBatchNorm(ranks, Stats()):
        found = normalised(x, counts, torch.float32)
        half = F.batch_norm((x - 1e3).bfloat16(), None, None, training=True)
    return {"directly": found, "half": [str(half.dtype), half.float().tolist()]}


@pytest.fixture(scope="module")
def told():
    return together(of_trainers, RANKS)


def test_trainers_move_as_one_that_has_all_examples(told):
    alone = train(Replica(DenseSpec(module=Net(), optimizer=sgd)), lambda batch: batch)
    for number, (loss, given, numbers) in enumerate(alone):
        each = [told[rank]["steps"][number] for rank in range(RANKS)]
        for own in each:
            assert own[0] == pytest.approx(loss, rel=1e-5)
            assert own[2] == each[0][2]  # running moments too, bit for bit
        assert list(chain.from_iterable(own[1] for own in each)) == pytest.approx(given, rel=1e-4, abs=1e-6)
        for name, expected in numbers.items():
            assert each[0][2][name] == pytest.approx(expected, rel=1e-4, abs=1e-5), (number, name)


def test_trainers_of_a_split_network_move_as_one_process(told):
    losses, numbers = moved(Replica(deepfm()), lambda one: one)
    for each in told:
        assert each["split"][0] == pytest.approx(losses, rel=1e-5)
        assert each["split"][1] == told[0]["split"][1]
    for name, expected in numbers.items():
        assert told[0]["split"][1][name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_trainers_that_have_few_examples_of_a_domain_move_as_one_that_has_all(told):
    given, numbers = of_domains(Replica)
    found = chain.from_iterable(each["domains"][0] for each in told)
    assert list(found) == pytest.approx(given, rel=1e-4, abs=1e-6)
    for name, expected in numbers.items():
        assert told[0]["domains"][1][name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_a_step_that_one_trainer_spoils_moves_no_running_moment(told):
    for each in told:
        assert each["refused"]
        assert each["end"] == each["steps"][-1][2]


def test_bytes_sent_are_counted(told):
    others = RANKS - 1
    num_parameters = 2 * 3 + (5 * 4 + 4) + 2 * 4 + 5
    expected = 2 * others * 4 * num_parameters // RANKS
    for channels in CHANNELS:
        expected += others * 4 * (1 + 2 * channels) + 2 * others * 4 * 2 * channels // RANKS
    assert [each["sent"] for each in told] == [expected] * RANKS


def test_moments_are_exact_where_the_mean_is_far_from_zero(told):
    """A variance as the difference of means of squares would be wrong by 0.06 here."""
    x, counts = (each.double() for each in values())
    output, gradient, *running = normalised(x, counts, torch.float64)
    for place, expected in enumerate((output, gradient)):
        found = list(chain.from_iterable(each["directly"][place] for each in told))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=3e-4)
    for each in told:
        for ours, theirs in zip(each["directly"][2:], running, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_bfloat16_comes_back_as_bfloat16(told):
    expected = F.batch_norm((values()[0] - 1e3).bfloat16(), None, None, training=True)
    assert {each["half"][0] for each in told} == {"torch.bfloat16"}
    found = list(chain.from_iterable(each["half"][1] for each in told))
    np.testing.assert_allclose(found, expected.float(), rtol=1e-2, atol=1e-2)


def test_trainers_that_share_no_step_refuse_it_by_name():
    schema = girih.Schema([girih.Categorical(name="user", dim=2)], labels="click")
    facts = Facts(
        schema=schema,
        model=ModelFacts(name="Net", num_parameters=6),
        groups=(),
        num_trainers=2,
        seed=0,
        global_batch_norm=True,
    )
    with pytest.raises(ConfigError, match="'asynchronous': trainers share no step"):
        girih.Asynchronous().plan(facts)
