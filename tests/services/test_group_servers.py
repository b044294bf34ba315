"""Group servers as processes, and the dense halves that call them."""

import os
import signal
import threading
import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.dense.options import Lamb
from girih.errors import ConfigError, RemoteError, WireTimeout
from girih.hierarchical.grouped import GroupedReplica, recipe_of
from girih.hierarchical.live_parts import CutParameters, LiveParts
from girih.hierarchical.optimizer_recipe import OptimizerRecipe
from girih.hierarchical.wire import GroupVerb
from grouped_site import Cut, InThread, Net, Site, Spoiled, site
from support.dense_suite import DIM, NAMES, NUMERIC, DenseHalfSuite, case
from support.votes import apply, drop

STEPS = 60
LAYERS = ("bottom", "wide", "deep")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def two_groups(parameters):
    """Matrices learn otherwise than vectors."""
    given = list(parameters)
    groups = [[p for p in given if (p.dim() > 1) is many] for many in (True, False)]
    return torch.optim.Adam([{"params": groups[0], "lr": 0.02}, {"params": groups[1], "betas": (0.8, 0.9)}])


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes of roles."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(half, one):
    """One batch; returns its loss and what the embeddings collected."""
    embeddings = one.embeddings()
    computed = half.compute(one.batch, embeddings)
    assert not computed.vote.refused
    outcome = apply(computed)
    return outcome.facts().loss, [
        block.values.grad.clone() for block in (*embeddings.blocks, *embeddings.first_order)
    ]


def assert_same(one, two):
    assert one["optimizer_name"] == two["optimizer_name"]
    assert one["optimizer"]["param_groups"] == two["optimizer"]["param_groups"]
    for name, value in two["model"].items():
        torch.testing.assert_close(one["model"][name], value, rtol=0, atol=0)
    assert one["optimizer"]["state"].keys() == two["optimizer"]["state"].keys()
    for number, state in two["optimizer"]["state"].items():
        found = one["optimizer"]["state"][number]
        assert found.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


class TestEquality:
    @pytest.mark.parametrize(
        ("optimizer", "num_servers"),
        [
            (adam, 1),
            (adam, 2),
            *(
                pytest.param(*each, marks=pytest.mark.slow)
                for each in ((adam, 3), (adagrad, 2), (sgd, 3), (two_groups, 2))
            ),
        ],
    )
    def test_one_net_is_a_replica_to_the_last_bit(self, optimizer, num_servers):
        with site(num_servers, optimizer=optimizer) as group:
            half, plain = group.trainer(), Replica(group.spec())
            for each in (half, plain):  # a schedule moves the rate here, the servers follow
                each.scheduler = torch.optim.lr_scheduler.StepLR(each.optimizer, 10, 0.8)
            for number in range(STEPS):
                one = case(number)
                (loss, given), (expected, wanted) = step(half, one), step(plain, one)
                assert loss == expected
                assert all(torch.equal(*pair) for pair in zip(given, wanted, strict=True))
                half.scheduler.step()
                plain.scheduler.step()
            assert_same(half.state(), plain.state())
            one = case(STEPS)
            both = [each.predict(one.batch, one.embeddings()) for each in (half, plain)]
            assert torch.equal(*both)
            half.sync()
            assert torch.equal(half.module.deep[0].weight, plain.module.deep[0].weight)
            assert half.stats()["staleness_max"] == 0

    @pytest.mark.parametrize("num_servers", [1, 3])
    def test_gradients_are_clipped_as_in_a_replica(self, num_servers):
        clipped = {"clip_norm": 0.05}
        with site(num_servers, optimizer=sgd) as group:
            half, free = group.trainer(**clipped), Replica(group.spec())
            plain = Replica(group.spec(**clipped))
            for number in range(5):
                one = case(number)
                assert step(half, one)[0] == step(plain, one)[0]
                step(free, one)
            assert_same(half.state(), plain.state())
            assert not torch.equal(free.module.deep[0].weight, plain.module.deep[0].weight)

    def test_a_norm_within_the_bound_changes_nothing(self):
        with site(2, optimizer=sgd) as group:
            half, plain = group.trainer(clip_norm=1e3), Replica(group.spec())
            for each in (half, plain):
                step(each, case(0))
            assert_same(half.state(), plain.state())

    def test_micro_batches_add_up_as_in_a_replica(self):
        with site(2, optimizer=adam) as group:
            half, plain, one = group.trainer(), Replica(group.spec()), case(0)
            for each in (half, plain):
                first, second = slice(0, 4), slice(4, 6)
                computed = each.compute(one.part(first), one.embeddings(first), last=False)
                apply(computed.add(one.part(second), one.embeddings(second), last=True))
            assert_same(half.state(), plain.state())

    def test_what_a_replica_saved_goes_on_here_and_back(self):
        with site(3, optimizer=adam) as group:
            plain, half, other = Replica(group.spec()), group.trainer(), Replica(group.spec())
            for number in range(5):
                step(plain, case(number))
            half.restore(plain.state())
            other.restore(half.state())
            for each in (plain, half, other):
                step(each, case(9))
            assert_same(half.state(), plain.state())
            assert_same(half.state(), other.state())

    def test_another_optimizers_state_is_refused(self):
        state = Replica(DenseSpec(module=Net(), optimizer=sgd)).state()
        with site(optimizer=adam, kind=InThread) as group:
            half = group.trainer()
            with pytest.raises(ValueError, match="its dense optimizer is SGD, the configuration's is Adam"):
                half.restore(state)


class TestTheSuite(DenseHalfSuite):
    """The servers are threads here, so that a gradient can be spoiled."""

    @pytest.fixture(autouse=True)
    def servers(self):
        with ExitStack() as self.stack:
            yield
        Spoiled.scale = 1.0

    def make(self):
        return Site(self.stack, 2, kind=InThread, net=partial(Net, nn.Identity)).trainer()

    def spoil(self, half):
        Spoiled.scale = float("inf")
        return "bottom"


def test_a_refused_batch_puts_running_means_back():
    with site(2, kind=InThread) as group:
        half, one = group.trainer(), case(0)
        step(half, one)
        before = {name: value.clone() for name, value in half.state()["model"].items()}
        drop(half.compute(one.batch, one.embeddings()))
        after = half.state()["model"]
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.slow
class TestSeveralNets:
    def test_no_write_is_lost_and_none_is_counted_twice(self):
        """Servers count every write; the optimizer's own count, which nets move lock-free, may miss some."""
        num_trainers, num_nets, num_steps = 2, 3, 20
        with site(2, optimizer=adam, num_nets=num_trainers * num_nets) as group:
            halves = [group.trainer() for _ in range(num_trainers)]
            failed = []

            def train(half, seed):
                try:
                    for number in range(num_steps):
                        step(half, case(seed + number))
                except Exception as error:
                    failed.append(error)

            threads = [
                threading.Thread(target=train, args=(half, 1000 * net))
                for half in halves
                for net in range(num_nets)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not failed
            every = num_trainers * num_nets * num_steps
            for snapshot in halves[0].processes().values():
                found = {
                    int(value): times for value, times in snapshot["histograms"]["dense staleness"].items()
                }
                assert sum(found.values()) == every
                assert snapshot["gauges"]["batches"] == 0
            assert 0 < halves[0].stats()["staleness_max"] < every
            for state in halves[0].state()["optimizer"]["state"].values():
                assert 0.8 * every < state["step"] <= every  # lock-free: two at once may count as one

    def test_servers_compute_different_batches_at_once(self):
        """Pipeline parallelism (HT §3.1.2), counted as overlap of the servers' spans."""
        with site(2, kind=InThread) as group:
            half = group.trainer()
            threads = [
                threading.Thread(target=lambda net=net: [step(half, case(net, 512)) for _ in range(20)])
                for net in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            one, two = (snapshot["spans"] for snapshot in half.processes(spans=True).values())
            assert {name for name, *_ in one} == {"part forward", "part backward", "part apply"}
            assert any(a < d and c < b for _, a, b in ends(one) for _, c, d in ends(two))

    def test_staleness_of_nets_that_take_turns_is_counted_as_by_hand(self):
        rng, read_at, writes, expected = np.random.default_rng(0), {}, 0, []
        with site(1) as group:
            halves = [group.trainer() for _ in range(2)]
            under_way = {}
            for number in range(80):
                net = int(rng.integers(5))
                if net in under_way:
                    apply(under_way.pop(net))
                    expected.append(writes - read_at.pop(net))
                    writes += 1
                else:
                    one = case(number)
                    under_way[net] = halves[net % 2].compute(one.batch, one.embeddings())
                    read_at[net] = writes
            (snapshot,) = halves[0].processes().values()
            found = snapshot["histograms"]["dense staleness"]
            assert {int(value): times for value, times in found.items()} == {
                value: expected.count(value) for value in expected
            }
            assert halves[1].stats() == {"staleness_max": max(expected)}

    def test_a_write_that_is_under_way_when_a_net_reads_counts(self, monkeypatch):
        writing, go_on, move = threading.Event(), threading.Event(), LiveParts.move

        def slow(self, *arguments):
            writing.set()
            assert go_on.wait(20)
            move(self, *arguments)

        with site(1, kind=InThread) as group:
            half, one = group.trainer(), case(0)
            first = half.compute(one.batch, one.embeddings())
            monkeypatch.setattr(LiveParts, "move", slow)
            thread = threading.Thread(target=apply, args=(first,))
            thread.start()
            assert writing.wait(20)
            beside = half.compute(one.batch, one.embeddings())
            go_on.set()
            thread.join(20)
            apply(beside)
            assert half.stats() == {"staleness_max": 1}

    def test_nets_in_turn_stay_within_trainers_times_nets(self):
        """HT §3.1.1: at most t × r, here 2 × 3, less one: a net's own write is none of another's."""
        with site(1) as group:
            halves, one = [group.trainer() for _ in range(2)], case(0)
            for _ in range(5):
                computed = [half.compute(one.batch, one.embeddings()) for half in halves for _ in range(3)]
                for each in computed:
                    apply(each)
            assert halves[0].stats()["staleness_max"] == 2 * 3 - 1


@pytest.mark.slow
class TestFaults:
    def test_a_killed_server_is_named(self):
        with site(2) as group:
            half = group.trainer()
            step(half, case(0))
            os.kill(group.servers[1].companion.process.pid, signal.SIGKILL)
            with pytest.raises(WireTimeout, match=r"group-server 1: .*no process listens"):
                step(half, case(1))

    def test_a_client_that_leaves_leaves_nothing(self):
        with site(2, patience_s=0.3) as group:
            watching, leaving, vanishing = (group.trainer() for _ in range(3))
            for half in (leaving, vanishing):
                half.compute(case(0).batch, case(0).embeddings())
            assert batches(watching) == [2, 2]
            leaving.close()
            wait_until(lambda: batches(watching) == [1, 1])
            vanish(vanishing)
            wait_until(lambda: batches(watching) == [0, 0])

    def test_a_batch_that_fails_on_one_server_leaves_nothing_on_the_others(self):
        with site(2) as group:
            half, one = group.trainer(), case(0)
            broken = one.embeddings()
            broken.blocks[0].values.data = torch.zeros(6, 3, 3)
            with pytest.raises(
                RemoteError, match=r"group-server 1: RuntimeError: part 'wide', given torch.float32\[6, 9\]: "
            ):
                half.compute(one.batch, broken)
            assert batches(half) == [0, 0]
            step(half, one)


class Gate(nn.Module):
    """Hands on what it is given; the next time that it is at work it waits until it may, and then fails if it is to."""

    __module__ = "girih.models"  # a user's might draw random numbers, so that its net's parts would be run one after the other
    shut: ClassVar[dict[str, SimpleNamespace]] = {}

    def __init__(self, name):
        super().__init__()
        self.name = name

    @staticmethod
    def shut_at(name, *, fails=False):
        """Shuts the gate for one pass: ``inside`` is set once that is there, ``go_on`` lets it go on."""
        Gate.shut[name] = SimpleNamespace(inside=threading.Event(), go_on=threading.Event(), fails=fails)
        return Gate.shut[name]

    def forward(self, x):
        shut = Gate.shut.pop(self.name, None)
        if shut is not None:
            shut.inside.set()
            assert shut.go_on.wait(20)
            if shut.fails:
                raise ArithmeticError("of the test")
        return x


class Gated(Net):
    """Has a gate in each of its first two towers."""

    def __init__(self):
        super().__init__(nn.Identity)
        for name in ("bottom", "wide"):
            setattr(self, name, nn.Sequential(*getattr(self, name), Gate(name)))


class TestSiblings:
    """Of two parts of a batch one fails, which came first, while the other computes."""

    @pytest.fixture(autouse=True)
    def open_gates(self):
        yield
        Gate.shut.clear()

    def fail_beside(self, group):
        """Has a batch fail: the trainer's half, the gate of the part that computes on, and what waits for that."""
        half = group.trainer()
        wide, bottom = Gate.shut_at("wide", fails=True), Gate.shut_at("bottom")
        failing = half._group.forward(
            (9, 0, 0), "wide", [torch.zeros(6, len(NAMES) * DIM)], [True], train=True
        )
        assert wide.inside.wait(20)
        sibling = half._group.forward(
            (9, 0, 1), "bottom", [torch.zeros(6, len(NUMERIC))], [False], train=True
        )
        assert bottom.inside.wait(20)
        wide.go_on.set()
        with pytest.raises(RemoteError, match=r"part 'wide', given .* ArithmeticError: of the test"):
            failing()
        return half, bottom, sibling

    def test_a_net_is_no_other_batchs_while_a_part_computes_with_it(self, monkeypatch):
        borrowed, borrow = [], LiveParts.borrow
        monkeypatch.setattr(LiveParts, "borrow", lambda live: borrowed.append(borrow(live)) or borrowed[-1])
        with site(1, kind=InThread, net=Gated) as group:
            half, bottom, sibling = self.fail_beside(group)
            step(half, case(0))
            assert len(borrowed) == 2
            assert borrowed[0] is not borrowed[1]
            assert batches(half) == [1]
            bottom.go_on.set()
            sibling()
            half._group.ask(GroupVerb.DISCARD, (9, 0), servers=[0])
            assert batches(half) == [0]
            step(half, case(1))
            assert borrowed[2] is borrowed[0]  # given back once both parts are over

    def test_nothing_is_left_of_it_once_its_trainer_is_gone(self):
        with site(1, kind=InThread, net=Gated, patience_s=0.3) as group:
            half, bottom, sibling = self.fail_beside(group)
            watching = group.trainer()
            bottom.go_on.set()
            sibling()
            assert batches(watching) == [1]
            vanish(half)
            wait_until(lambda: batches(watching) == [0])


def test_dropout_on_a_server_follows_its_seed():
    losses = []
    for seed in (7, 7, 8):
        with site(1, net=partial(Net, lambda _: nn.Dropout(0.5)), seed=seed) as group:
            losses.append(step(group.trainer(), case(0, 64))[0])
    assert losses[0] == losses[1] != losses[2]


def test_a_net_on_the_trainer_is_named_as_the_model():
    with site(1, kind=InThread) as group:
        half, one = group.trainer(), case(0)
        half._free[0].module.forward = lambda numeric, embeddings: numeric.view(-1, 7)
        with pytest.raises(ConfigError, match=r"^Net\.forward failed: .*view|^Net\.forward failed: .*shape"):
            half.compute(one.batch, one.embeddings())


def test_a_model_without_dense_parameters_is_restored():
    with site(1, kind=InThread) as group:
        half = group.trainer()
        half._partitioned.parts = []
        half.restore(half.state())


class TestRefusals:
    def test_other_optimizers_are_refused_by_name(self):
        class Mine(torch.optim.SGD):
            pass

        def mine(parameters):
            return Mine(parameters, lr=0.1)

        cut = Cut(Net(), 1)
        for factory in (mine, torch.optim.LBFGS):
            with pytest.raises(ConfigError, match=r"made a .*(Mine|LBFGS).*servers_per_group = 0"):
                recipe_of(Replica(DenseSpec(module=Net(), optimizer=factory)), cut)
        assert recipe_of(Replica(DenseSpec(module=Net(), optimizer=Lamb)), cut).kind is Lamb

    def test_an_operator_that_stays_with_its_parameters_is_named(self):
        class Kept(Cut):
            def trainer(self, exchange):
                partition = super().trainer(exchange)
                partition.gate = nn.Bilinear(2, 2, 1)
                return partition

        with site(1, kind=InThread) as group:
            spec, group.kept = group.spec(), group.trainer()
            with pytest.raises(ConfigError, match=r"operator 'gate' has a parameter, 'gate\.weight'"):
                GroupedReplica(Replica(spec), spec, Kept(Net(), 1), group.kept._group, None)


def test_options_that_a_schedule_adds_do_not_travel():
    net = Net()
    optimizer = adam(net.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    recipe = OptimizerRecipe.of(optimizer, net)
    assert "initial_lr" not in recipe.groups[0]
    assert recipe.made({"deep.0.weight": net.deep[0].weight}).param_groups[0]["betas"] == (0.9, 0.999)
    assert recipe.made({}) is None


def test_what_is_cut_is_joined_again():
    class Cut:
        parameter, dim, parts, sizes = "deep.weight", 1, ("deep.left", "deep.right"), (2, 3)

    splits = CutParameters([Cut])
    whole = [
        ("deep.weight", None, torch.arange(10.0).view(2, 5)),
        ("deep.bias", None, torch.ones(2)),
        ("deep.weight", "exp_avg", torch.arange(10.0).view(2, 5) + 1),
        ("deep.weight", "step", torch.tensor(7.0)),
    ]
    held = splits.cut(whole)
    found = {(name, key): value for name, key, value in held}
    assert len(held) == 7
    assert found["deep.right", None].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert found["deep.left", "step"] == found["deep.right", "step"] == 7
    again = {(name, key): value for name, key, value in splits.joined(held)}
    assert len(again) == 4
    assert all(torch.equal(again[name, key], value) for name, key, value in whole)


def batches(half):
    """Batches that each server holds."""
    return [snapshot["gauges"]["batches"] for snapshot in half.processes().values()]


def vanish(half):
    """Has its connections end as those of a process that is killed."""
    for client in half._group._clients:
        client._closing = True
        client._session.connection.stream.close()


def ends(spans):
    return [(name, start, start + seconds) for name, start, seconds in spans]


def wait_until(holds, within_s=10):
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)
