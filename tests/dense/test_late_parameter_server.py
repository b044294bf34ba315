"""A copy of the parameters that a dense server moves, or does not, as the device decides: alone, and over two real processes."""

import numpy as np
import pytest
import torch
from test_parameter_server import SECRET, STALENESS, STEPS, Alone, Net, adamw, batch_of, flat_of, sgd

from companions import together
from girih.dense.half import DenseSpec
from girih.dense.halves.parameter_server import ParameterServerReplica
from girih.dense.halves.replica import Replica
from girih.models.embeddings import Block, Embeddings
from girih.telemetry.stats import Stats
from support.votes import apply


def made(ranks, optimizer=adamw, address="shm://", **options):
    spec = DenseSpec(module=Net(), optimizer=optimizer, deferred=True, **options)
    return ParameterServerReplica(spec, ranks, staleness=STALENESS, address=address, secret=SECRET)


def computed(half, number, scale=1.0):
    batch = batch_of(number)
    values = torch.zeros(batch.num_examples, 1, 2, requires_grad=True)
    half.module.scale = scale
    return half.compute(batch, Embeddings((Block(("user",), values),)))


def launched(half, number, scale=1.0):
    """A step, whose outcome is on its way."""
    return apply(computed(half, number, scale))


def test_a_trainer_alone_moves_as_a_replica_and_not_at_all_where_a_step_is_refused():
    late = made(Alone(), clip_norm=0.4)
    plain = Replica(DenseSpec(module=Net(), optimizer=adamw, clip_norm=0.4))
    for number in range(6):
        if number == 3:
            before = flat_of(late.module)
            refused = launched(late, 20, scale=float("nan"))
            behind = launched(late, 21)
            assert "NaN or infinite" in str(refused.facts().refused)
            assert "a step before it was refused" in str(behind.facts().refused)
            np.testing.assert_array_equal(flat_of(late.module), before)
        outcome, waited = launched(late, number).facts(), apply(computed(plain, number)).facts()
        assert outcome == waited
        assert outcome.refused is None
        np.testing.assert_array_equal(flat_of(late.module), flat_of(plain.module))
    late.close()


def two(ranks):
    """Both go as fast as they can, and the second has a step refused that it does not wait for; then they meet."""
    stats = Stats()
    half = made(ranks, sgd, "tcp://127.0.0.1:*", stats=stats)
    start = flat_of(half.module)
    ranks.barrier()
    most = 0
    for number in range(STEPS):
        launched(half, 2 * number + ranks.rank)
        most = max(most, len(half._under_way))
    refused = None
    if not ranks.first:
        first, behind = launched(half, 0, scale=float("nan")), launched(half, 0)
        refused = [str(first.facts().refused), str(behind.facts().refused)]
    half.sync()
    moved = start - flat_of(half.module)
    ranks.barrier()
    half.close()
    return moved.tolist(), most, refused, stats.wire_bytes()["dense"], half._version


def test_every_step_of_both_is_taken_once_and_a_refused_one_is_not_sent():
    (moved, _, _, _, version), (others, most, refused, sent, others_version) = together(two)
    total = sum(batch_of(number).numeric.mean(axis=0) for number in range(2 * STEPS))
    np.testing.assert_allclose(moved[2:5], total / 64, rtol=1e-3, atol=1e-5)
    assert moved[5] == pytest.approx(2 * STEPS / 64, rel=1e-4)
    assert moved == others
    assert version == others_version == 2 * STEPS
    assert 0 < most <= STALENESS
    assert "NaN or infinite" in refused[0]
    assert "a step before it was refused" in refused[1]
    assert sent == STEPS * 6 * 4
