"""Kernel calls of a step (K-packing, PICASSO §III-B): as many for a group as for a table, of the same kernels."""

import importlib
from collections import Counter

import numpy as np
import pytest

import girih
from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.kernels.cpu import ahead, update
from girih.kernels.cpu.jit import JIT_DISABLED, KERNELS
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.shards import UniqueRows
from girih.sparse.halves.collective import CollectiveSparse
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.routing.key_router import KeyRouter
from girih.sparse.routing.shard_reader import ShardReader
from girih.sparse.spec import SparseSpec
from support.votes import push

NUM_TABLES, SIZE, SHARDS = 5, 40, 2
KINDS = {"f0": {"embedding", "first_order", "sequence"}} | {
    f"f{n}": {"embedding", "first_order"} for n in range(1, NUM_TABLES)
}


@pytest.fixture(autouse=True)
def _compiled():
    if JIT_DISABLED:
        pytest.skip("kernels are plain functions")
    adagrad = girih.optim.Adagrad()
    ahead.make_ready(ahead.training([[adagrad], [adagrad, adagrad]]))


def spec_of(*, packing, kinds=KINDS):
    features = [girih.Sequence(name="f0", table="t0", dim=4)]
    features += [girih.Categorical(name=f"f{n}", table=f"t{n}", dim=4) for n in range(1, NUM_TABLES)]
    names = [[f"t{n}"] for n in range(NUM_TABLES)] if not packing else [[f"t{n}" for n in range(NUM_TABLES)]]
    return SparseSpec(
        schema=girih.Schema(features, "click"),
        needs={name: frozenset(kind) for name, kind in kinds.items()},
        optimizer=girih.optim.Adagrad(lr=0.5),
        store=StoreOptions(shards=SHARDS),
        partition={f"group-{number}": tables for number, tables in enumerate(names)},
    )


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(0, 4, SIZE), *([1] * SIZE * (NUM_TABLES - 1))]
    return Batch(
        ids=rng.integers(0, 60, sum(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        numeric=np.empty((SIZE, 0), np.float32),
        labels=np.zeros((SIZE, 1), np.float32),
    )


@pytest.fixture
def called(monkeypatch):
    """Kernels that Python calls from now on: name → how often."""
    calls = Counter()

    def counting():
        calls.clear()
        dispatchers = {id(kernel.dispatcher): name for name, kernel in KERNELS.items()}

        def counted(kernel, name):
            def call(*arguments):
                calls[name] += 1
                return kernel(*arguments)

            return call

        modules = {f"girih.kernels.cpu.{name.partition('.')[0]}" for name in KERNELS}
        for module in map(importlib.import_module, modules):
            for attribute, value in list(vars(module).items()):
                if id(value) in dispatchers:
                    monkeypatch.setattr(module, attribute, counted(value, dispatchers[id(value)]))
        for key, kernel in update._APPLY.items():
            monkeypatch.setitem(update._APPLY, key, counted(kernel, "update.apply"))
        return calls

    return counting


def stepped(half, batch):
    """Forward, and back with the same gradients whatever the packing; the numbers of all rows then."""
    pulled = half.pull(batch)
    embeddings = pulled.wait()
    names = list(KINDS)
    total = sum((embeddings[name] * (n + 1)).sum() for n, name in enumerate(names))
    total = total + sum((block.values * 0.5).sum() for block in embeddings.first_order)
    (total + embeddings.sequences["f0"].values.sum()).backward()
    push(pulled, half.last_step + 1, 1.0).wait()
    found = half.peek(batch).wait()
    return np.concatenate([found[name].detach().numpy() for name in names], axis=1)


@pytest.mark.parametrize("packing", [True, False])
def test_a_group_takes_one_call_there_whatever_its_tables(called, packing):
    half, batch = LocalSparse(spec_of(packing=packing)), batch_of()
    stepped(half, batch)
    calls = called()
    half.pull(batch).wait()
    groups = 1 if packing else NUM_TABLES
    shard_calls = groups * SHARDS  # each shard's thread makes its own
    assert calls == {
        "dedup.dedup": shard_calls,  # Unique & Partition: each finds the keys that are its own
        "lookup.read_known": shard_calls,  # the store's own: keys that have rows, and those that do not
        "lookup.read_new": shard_calls,
        "pool.stitch": groups,  # Shuffle & Stitch: bags, first-order weights and the sequence alike
    }
    half.close()


@pytest.mark.parametrize("packing", [True, False])
def test_a_group_takes_one_call_of_each_kernel_between_trainers(called, packing):
    half, batch = CollectiveSparse(spec_of(packing=packing), TrainerGroup()), batch_of()
    stepped(half, batch)
    calls = called()
    half.pull(batch).wait()
    groups = 1 if packing else NUM_TABLES
    assert calls == {
        "routing.unique_and_partition": groups,
        "dedup.dedup": groups * SHARDS,  # at the owner: a key that several ask for is read once
        "lookup.read_known": groups * SHARDS,
        "lookup.read_new": groups * SHARDS,
        "pool.spread": groups,  # into the message to the one trainer that there is
        "pool.stitch": groups,
    }
    half.close()


@pytest.mark.parametrize("packing", [True, False])
def test_a_group_takes_one_call_of_each_kernel_with_embedding_servers(called, packing):
    spec, batch, num_servers = spec_of(packing=packing), batch_of(), 2
    routers = [KeyRouter(group, num_servers, SHARDS) for group in spec.groups()]
    held = [
        LocalShards(spec.groups(), spec.store, place=p, num_places=num_servers) for p in range(num_servers)
    ]
    readers = [[ShardReader(stores, None) for stores in shards.stores] for shards in held]

    def read():
        for group, router in enumerate(routers):
            asked, values = router.ask(batch), []
            for server in range(num_servers):
                lengths, keys, counts = asked.of_place(server)
                values.append(readers[server][group].read(keys, counts, lengths[None, :], 1, train=True)[1])
            rows = UniqueRows.received(values, [len(each) for each in values], router.group.spec.dim)
            router.bags.pool(rows, asked.keys, batch)

    read()
    calls = called()
    read()
    groups = 1 if packing else NUM_TABLES
    assert calls["routing.unique_and_partition"] == calls["pool.stitch"] == groups
    assert calls["dedup.dedup"] == calls["lookup.read_known"] == groups * num_servers * SHARDS
    assert calls["pool.spread"] == groups * num_servers
    for shards in held:
        shards.close()


@pytest.mark.parametrize("make", [LocalSparse, lambda spec: CollectiveSparse(spec, TrainerGroup())])
def test_without_packing_the_same_kernels_are_called_once_for_each_table_and_give_the_same_bits(called, make):
    # the sequence's table has an output more, so that it is left out: then all tables are alike
    kinds = {name: {"embedding", "first_order"} for name in KINDS}
    packed = make(spec_of(packing=True, kinds=kinds))
    unpacked = make(spec_of(packing=False, kinds=kinds))
    with_sequence = [make(spec_of(packing=packing)) for packing in (True, False)]
    batches = [batch_of(seed) for seed in range(3)]
    for batch in batches:
        one, other = (stepped(half, batch) for half in with_sequence)
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    for half in (packed, unpacked):
        pushed(half, batches[0])
    calls = called()
    pushed(packed, batches[0])
    of_group = dict(calls)
    calls.clear()
    pushed(unpacked, batches[0])
    assert calls == {name: NUM_TABLES * count for name, count in of_group.items()}
    for half in (packed, unpacked, *with_sequence):
        half.close()


def pushed(half, batch):
    """A step of which the kernels are counted."""
    pulled = half.pull(batch)
    embeddings = pulled.wait()
    total = sum(block.values.sum() for block in (*embeddings.blocks, *embeddings.first_order))
    total.backward()
    push(pulled, half.last_step + 1, 1.0).wait()
