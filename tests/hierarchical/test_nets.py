"""Concurrent nets on one set of dense parameters."""

import copy
import threading

import numpy as np
import pytest
import torch

from girih.comm.group import TrainerGroup
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.hierarchical.hogwild import HogwildReplica
from girih.telemetry.stats import DENSE_STALENESS, Stats
from support.dense_suite import CountingDeepFM, case, dense_spec
from support.votes import apply, drop

NETS = 3


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def spec_of(optimizer=adam, **options):
    return DenseSpec(module=CountingDeepFM(), optimizer=optimizer, stats=Stats(), **options)


def compute(half, seed):
    one = case(seed)
    return half.compute(one.batch, one.embeddings())


def numbers(half):
    return np.concatenate([p.detach().reshape(-1).numpy() for p in half.first.parameters])


def histogram(spec):
    return dict(spec.stats.histograms[DENSE_STALENESS])


def test_one_net_moves_as_a_replica_bit_for_bit():
    nets, plain = HogwildReplica(spec_of(), TrainerGroup(), nets=1), Replica(spec_of())
    for seed in range(5):
        computed, expected = compute(nets, seed), compute(plain, seed)
        assert computed.vote.loss == expected.vote.loss
        apply(computed)
        apply(expected)
    for one, two in zip(nets.first.parameters, plain.parameters, strict=True):
        assert torch.equal(one, two)


def test_a_net_that_waited_while_others_moved_its_parameters_goes_on():
    """One module's Parameters in several graphs would be refused by autograd: they are modified in place in between."""
    nets = HogwildReplica(spec_of(), TrainerGroup(), nets=NETS)
    handles = [compute(nets, seed) for seed in range(NETS)]
    assert len({id(handle.half.parameters[0]) for handle in handles}) == NETS
    assert len({handle.half.parameters[0].data_ptr() for handle in handles}) == 1
    one = case(9)
    held = one.embeddings()
    before, net = numbers(nets), handles[0].half
    outputs = net._outputs(one.batch, held, train=True)
    for handle in handles[1:]:
        apply(handle)
    assert (numbers(nets) != before).any()
    outputs.sum().backward()


def test_nets_that_take_turns_see_at_most_as_many_writes_as_there_are_others():
    spec = spec_of()
    nets = HogwildReplica(spec, TrainerGroup(), nets=NETS)
    under_way = [compute(nets, seed) for seed in range(NETS)]
    for seed in range(20):
        apply(under_way.pop(0))
        under_way.append(compute(nets, seed))
    assert histogram(spec) == {0: 1, 1: 1, NETS - 1: 18}
    assert nets.stats()["staleness_max"] == NETS - 1 < NETS


def test_nets_that_do_not_take_turns_have_no_bound():
    spec = spec_of()
    nets = HogwildReplica(spec, TrainerGroup(), nets=NETS)
    slow = compute(nets, 0)
    for seed in range(10):
        apply(compute(nets, seed))
    apply(slow)
    assert histogram(spec) == {0: 10, 10: 1}


def test_a_write_that_is_under_way_counts_for_who_reads_or_writes_beside_it():
    writing, go_on = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            if threading.current_thread() is not threading.main_thread():
                writing.set()
                assert go_on.wait(20)
            super().step(closure)

    spec = spec_of(lambda parameters: Slow(parameters, lr=0.01))
    nets = HogwildReplica(spec, TrainerGroup(), nets=3)
    apply(compute(nets, 0))  # which makes the optimizer's state
    before, slow = compute(nets, 1), compute(nets, 2)
    thread = threading.Thread(target=apply, args=(slow,))
    thread.start()
    assert writing.wait(20)
    beside = compute(nets, 3)
    apply(before)
    assert histogram(spec) == {0: 2, 1: 1}
    go_on.set()
    thread.join(20)
    apply(beside)
    assert histogram(spec) == {0: 2, 1: 1, 2: 1}


@pytest.mark.parametrize(
    "optimizer",
    [
        adam,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    ],
)
def test_the_state_of_the_optimizer_is_that_of_all_nets_and_is_restored_for_all(optimizer):
    """Steps that are computed and applied one after the other, each by another net, are those of one."""
    nets, plain = HogwildReplica(spec_of(optimizer), TrainerGroup(), nets=NETS), Replica(spec_of(optimizer))

    def train(seeds):
        for seed in seeds:
            computed = compute(nets, seed)
            used.add(id(computed.half))
            apply(computed)
            apply(compute(plain, seed))

    used = set()
    train(range(7))
    assert len(used) == NETS
    state = copy.deepcopy(nets.first.state())
    at_state = numbers(nets)
    train(range(7, 10))
    plain.restore(copy.deepcopy(state))
    nets.restore(state)
    np.testing.assert_array_equal(numbers(nets), at_state)
    train(range(20, 26))
    for one, two in zip(nets.first.parameters, plain.parameters, strict=True):
        assert torch.equal(one, two)


def test_nets_follow_the_learning_rate_of_the_first():
    spec = spec_of(lambda p: torch.optim.SGD(p, lr=0.1))
    nets = HogwildReplica(spec, TrainerGroup(), nets=NETS)
    handles = [compute(nets, seed) for seed in range(NETS)]
    nets.first.optimizer.param_groups[0]["lr"] = 0.0
    before = numbers(nets)
    for handle in handles:
        apply(handle)
    np.testing.assert_array_equal(numbers(nets), before)


def test_each_net_clips_its_own_gradients():
    spec = spec_of(lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=1e-3)
    nets = HogwildReplica(spec, TrainerGroup(), nets=NETS)
    before = numbers(nets)
    for handle in [compute(nets, seed) for seed in range(NETS)]:
        apply(handle)
    assert 1e-4 < np.linalg.norm(numbers(nets) - before) <= NETS * 1.01e-3


def test_a_refused_batch_moves_nothing_and_its_net_goes_on():
    nets = HogwildReplica(dense_spec(), TrainerGroup(), nets=NETS)
    apply(compute(nets, 0))
    before, one = numbers(nets), case(0)
    one.vectors[2] = np.nan
    for _ in range(NETS + 1):
        refused = nets.compute(one.batch, one.embeddings())
        assert refused.vote.refused
        drop(refused)
    np.testing.assert_array_equal(numbers(nets), before)
    assert len(nets._all) == NETS
    apply(compute(nets, 1))
    assert (numbers(nets) != before).any()


def test_nets_train_side_by_side_in_threads():
    """Every step is counted once, the loss falls, and no thread fails: the first step of each parameter's state included."""
    spec = spec_of()
    nets, failures, losses = HogwildReplica(spec, TrainerGroup(), nets=NETS), [], []

    def work(number):
        try:
            for _ in range(40):
                computed = compute(nets, 0)
                losses.append(apply(computed).facts().loss)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NETS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(histogram(spec).values()) == 40 * NETS
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_a_module_that_predicted_last_is_copied_to_train():
    nets, one = HogwildReplica(spec_of(), TrainerGroup(), nets=NETS), case(0)
    nets.first.predict(one.batch, one.embeddings())
    handles = [compute(nets, seed) for seed in range(NETS)]
    assert all(handle.half.module.training for handle in handles)
    assert nets.first.module.num_batches == NETS  # a buffer of all
