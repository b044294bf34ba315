"""Shards spread over the GPUs of several trainers: the conformance suite, and each step beside rows in DRAM."""

import inspect
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import girih
from companions import together
from girih.checkpoint.parts import PartReader
from girih.comm.group import TrainerGroup
from girih.data.batch import Batch, Share
from girih.errors import NonFiniteError
from girih.kernels.gpu import jit
from girih.kernels.gpu.dedup import route, unique
from girih.sparse.halves.collective import CollectiveSparse
from girih.sparse.halves.gpu_collective import GpuCollectiveSparse
from girih.sparse.halves.group_messages import RowCodec, grown, scaled_halves
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.store.gpu import gpu_slots
from girih.store.gpu.gpu_memory import to_device
from girih.store.spec import shard_of
from girih.store.tiers import slot_memory
from girih.tables import MinCount
from girih.telemetry.stats import ASKED_KEYS, PACED_KEYS, SERVED_ROWS, Stats
from gpu_ranks import gpu_of, kind_of
from support import cases
from support.sparse_suite import SparseHalfSuite
from support.store_verbs import by_key
from support.votes import deferred_vote, push

GPU = StoreOptions(tiers=("gpu",))


class TestOfOne(SparseHalfSuite):
    def make(self):
        return GpuCollectiveSparse(cases.spec(store=GPU), TrainerGroup(), micro_batches=3, ahead=True)


class TestOfOneInTiers(SparseHalfSuite):
    def make(self):
        store = StoreOptions(tiers=("gpu", "dram"), hot_rows=6, warm_up_steps=1, flush_every_steps=2)
        return GpuCollectiveSparse(cases.spec(store=store), TrainerGroup(), micro_batches=3, ahead=True)


class OfTwo(SparseHalfSuite):
    """Two real trainers, who do the same."""

    played = (
        "test_a_push_moves_rows_as_the_plain_twin_says",
        "test_a_peek_makes_no_rows",
        "test_rows_and_counters_are_told",
        "test_what_was_saved_is_loaded",
    )

    contributors = 2

    def __init__(self, ranks):
        self.ranks = ranks

    def make(self):
        spec = replace(cases.spec(store=GPU), gpu=gpu_of(self.ranks))
        return GpuCollectiveSparse(spec, self.ranks, ahead=True)

    def saved(self, half, storage):
        own = self.ranks.gather(dict(super().saved(half, storage).parts))
        told = self.ranks.broadcast(own and own[0] | own[1])
        return PartReader(storage, told)


def play_suite(ranks):
    suite = OfTwo(ranks)
    for name in suite.played:
        test = getattr(suite, name)
        if "tmp_path" in inspect.signature(test).parameters:
            with tempfile.TemporaryDirectory() as directory:
                test(Path(ranks.broadcast(directory)))
                ranks.barrier()
        else:
            test()
    return True


def on_gpus(function, size):
    """What each trainer finds, on a GPU of its own where there are as many."""
    return together(function, size, kind=kind_of(size))


def test_two_trainers_pass_the_suite_together():
    assert on_gpus(play_suite, 2) == [True, True]


def spec_of(store=GPU, dtype="float32", admission=None, gpu=None):
    tables = [
        girih.Table(name="user", dim=4, dtype=dtype, admission=admission),
        girih.Table(name="item", dim=4, dtype=dtype),
        girih.Table(name="wide", dim=5, dtype=dtype, optimizer=girih.optim.Adam(lr=0.1)),
    ]
    schema = girih.Schema(
        [
            girih.Categorical(name="user"),
            girih.Categorical(name="item", pooling="mean"),
            girih.Categorical(name="wide", pooling="sqrtn"),
            girih.Sequence(name="history", table="item", pooling="sum"),
        ],
        "click",
        tables=tables,
    )
    needs = {
        "user": frozenset({"embedding"}),
        "item": frozenset({"embedding"}),
        "wide": frozenset({"embedding", "first_order"}),
        "history": frozenset({"embedding", "sequence"}),
    }
    moved_by = girih.optim.Adagrad(lr=0.3)
    return SparseSpec(schema=schema, needs=needs, optimizer=moved_by, store=store, seed=5, gpu=gpu)


def batch_of(rank, step, *, weighted=False):
    """A share; that of rank 2 has no example in step 2, and that of rank 1 no id in step 3."""
    rng = np.random.default_rng(10 * step + rank)
    size = 0 if (rank, step) == (2, 2) else 6 + rank
    lengths = rng.integers(0, 4, (4, size)) * ((rank, step) != (1, 3))
    offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int32)
    ids = rng.integers(-3, 12, offsets[-1])
    return Batch(
        ids=np.where(ids == 11, -(2**63), ids).astype(np.int64),
        offsets=offsets,
        numeric=np.empty((size, 0), np.float32),
        labels=np.zeros((size, 1), np.float32),
        weights=rng.random(len(ids)).astype(np.float32) if weighted else None,
        share=Share(num_examples=20, weight=0.5),
    )


def numbers_of(embeddings):
    blocks = [block.values for block in (*embeddings.blocks, *embeddings.first_order)]
    return blocks + [sequence.values for sequence in embeddings.sequences.values()]


def pushed(pulled, step):
    push(pulled, step, 0.7).wait()


def step_of(half, batch, step, prepared=None, *, bad=False, meanwhile=lambda: None, push=pushed):
    """A step with gradients that depend on rank and step alone; returns what was read."""
    pulled = half.pull(batch, prepared)
    meanwhile()
    found = numbers_of(pulled.wait())
    rng = np.random.default_rng(step)
    total = 0.0
    for leaf in found:
        given = rng.normal(size=leaf.shape).astype(np.float32)
        if bad and given.size:
            given.reshape(-1)[0] = np.nan
        total = total + (leaf * torch.from_numpy(given).to(leaf.device)).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    seen = [leaf.detach().cpu().numpy().copy() for leaf in found]
    push(pulled, step)
    return seen


def rows_of(half):
    return by_key(*(store for _, store in half.stores()))


def assert_near(mine, expected, **tolerance):
    assert mine.keys() == expected.keys()
    for key, columns in expected.items():
        for name, value in columns.items():
            np.testing.assert_allclose(mine[key][name], value, err_msg=f"{key} {name}", **tolerance)


def run(half, ranks, *, steps=2, prefetch=0, weighted=False, push=pushed):
    """Some steps, so many batches prepared ahead of each; returns what was read, and the rows."""
    batches = [batch_of(ranks.rank, step, weighted=weighted) for step in range(1, steps + 1)]
    seen, prepared = [], deque()

    def prepare():
        first = len(seen_steps) + len(prepared)
        prepared.extend(half.prepare(batch) for batch in batches[first : len(seen_steps) + prefetch])

    seen_steps = []
    for step, batch in enumerate(batches, 1):
        own = prepared.popleft() if prepared else None
        seen_steps.append(step)
        seen += step_of(half, batch, step, own, meanwhile=prepare, push=push)
    return seen, rows_of(half)


KINDS = (
    ("float32", None, False, {}),
    ("bfloat16", MinCount(count=2, cells=1000), True, {}),
    ("float32", None, False, {"float16_embeddings": True, "float16_gradients": True}),
)


def equal_to_rows_in_dram(ranks, kinds=KINDS, steps=2):
    """All that is compared on this rank; an error says what differs."""
    for dtype, admission, weighted, wire in kinds:
        stats, there_stats = Stats(), Stats()
        here = CollectiveSparse(
            spec_of(StoreOptions(shards=1), dtype, admission), ranks, stats, ahead=True, **wire
        )
        spec = spec_of(GPU, dtype, admission, gpu_of(ranks))
        there = GpuCollectiveSparse(spec, ranks, there_stats, ahead=True, **wire)
        probe = batch_of(ranks.rank, 1)  # initial values, some of them pooled
        for mine, expected in zip(
            *(numbers_of(half.peek(probe).wait()) for half in (there, here)), strict=True
        ):
            if mine.dim() == 2:
                np.testing.assert_array_equal(mine.cpu(), expected)
            np.testing.assert_allclose(mine.cpu(), expected, rtol=1e-6, atol=1e-7)
        (seen, rows), (expected_seen, expected) = (
            run(half, ranks, steps=steps, weighted=weighted) for half in (there, here)
        )
        loose = dtype == "bfloat16" or bool(wire)
        near = {"rtol": 2e-2, "atol": 2e-2} if loose else {"rtol": 1e-4, "atol": 1e-5}
        for mine, wanted in zip(seen, expected_seen, strict=True):
            np.testing.assert_allclose(mine, wanted, **near)
        assert_near(rows, expected, **near)
        assert dict(there.stats().rows) == dict(here.stats().rows)
        for name in ("hits", "new", "refused", "updates", "dropped", "lookups", "peeks", "absent"):
            assert there.stats().store[name] == here.stats().store[name], name
        for name in (ASKED_KEYS, SERVED_ROWS, PACED_KEYS):
            assert there_stats.counters[name] == stats.counters[name], name
        for kind in ("ids", "embeddings", "gradients"):
            assert there_stats.wire_bytes().get(kind) == stats.wire_bytes().get(kind), kind
        for half in (here, there):
            half.close()
    return True


def ahead_or_not(ranks):
    """Whether prefetching and micro-batches change no bit; and that a step which one trainer refuses moves nothing on any."""
    plain, ahead = (
        GpuCollectiveSparse(spec_of(gpu=gpu_of(ranks)), ranks, **options)
        for options in ({}, {"ahead": True, "micro_batches": 2})
    )
    (seen, rows), (other_seen, other_rows) = (
        run(half, ranks, steps=4, prefetch=count) for half, count in ((plain, 0), (ahead, 2))
    )
    for mine, expected in zip(other_seen, seen, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert rows == other_rows
    refusals = []
    for half in (plain, ahead):
        before = values_of(half)
        try:
            step_of(half, batch_of(ranks.rank, 1), 3, bad=ranks.rank == 0)
        except NonFiniteError as error:
            refusals.append(str(error))
        assert values_of(half) == before
        half.close()
    return refusals


def late_or_not(ranks):
    """Whether what the devices decide moves the same bits and counts the same; what is said of a step that rows on one refuse."""
    told, halves = [], []
    for ahead in (False, True):
        stats = Stats()
        half = GpuCollectiveSparse(spec_of(gpu=gpu_of(ranks)), ranks, stats, ahead=ahead)
        halves.append((half, stats))

    def push_late(pulled, step):
        told.append(deferred_vote(jit.device(), ranks=ranks))
        pulled.push(step, 0.7, told[-1])

    (plain, plain_stats), (late, stats) = halves
    seen, rows = run(plain, ranks, steps=3)
    other_seen, other_rows = run(late, ranks, steps=3, prefetch=2, push=push_late)
    for mine, expected in zip(other_seen, seen, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert rows == other_rows
    assert stats.counters[SERVED_ROWS] == 0  # the host was told of no step yet
    for vote in told:
        assert vote.error_from(vote.reported.tolist()) is None
        counters = vote.counters_from(vote.reported.tolist())
    assert counters == plain.stats().counters == late.stats().counters
    for name in (ASKED_KEYS, SERVED_ROWS, PACED_KEYS):
        assert stats.counters[name] == plain_stats.counters[name], name
    before, updates = values_of(late), late.stats().store["updates"]
    refusals = []

    def push_refused(pulled, step):
        vote = deferred_vote(jit.device(), refuses=step == 4 and ranks.rank == 1, ranks=ranks)
        pulled.push(step, 0.7, vote)
        assert vote.refused.item()
        refusals.append(str(vote.error_from(vote.reported.tolist())))
        vote.rollback()

    for step in (4, 5):  # what the dense half of the other refuses; what rows of this one do
        step_of(late, batch_of(ranks.rank, 1), step, bad=step == 5 and ranks.rank == 0, push=push_refused)
        assert values_of(late) == before
        assert late.last_step == 3
    assert late.stats().store["updates"] == updates
    for half, _ in halves:
        half.close()
    return refusals


def values_of(half):
    """Rows without what a read changes."""
    return {
        key: {
            name: value
            for name, value in columns.items()
            if "." in name or name in ("embedding", "first_order")
        }
        for key, columns in rows_of(half).items()
    }


def any_tiers(ranks):
    """Whether rows and what is read are those of rows that are all in GPU memory, bit for bit, whatever is hot and however many tiers."""
    gpu_slots._FIRST_STAGED, slot_memory._FIRST_STAGED = 4, 8  # so that rows come and go

    def run_in(directory=None, **store):
        spec = spec_of(StoreOptions(**store, ssd_dir=directory), gpu=gpu_of(ranks))
        half = GpuCollectiveSparse(spec, ranks, ahead=True, micro_batches=2)
        assert half.is_on_gpu_of(jit.device()) == (store["tiers"] == ("gpu",))
        half.peek(batch_of(ranks.rank, 1)).wait()  # nobody has rows yet
        found = run(half, ranks, steps=4, prefetch=2)
        counters = half.stats().store
        half.close()
        return found, counters

    (seen, rows), counters = run_in(tiers=("gpu",))
    assert counters["absent"] > 0
    choosing = {"warm_up_steps": 1, "flush_every_steps": 2}
    below = []
    with tempfile.TemporaryDirectory() as directory:
        for store in (
            {"tiers": ("gpu", "dram"), "hot_rows": 0},
            {"tiers": ("gpu", "dram"), "hot_rows": 12},
            {"tiers": ("gpu", "dram"), "hot_rows": 10_000},
            {"tiers": ("gpu", "dram", "ssd"), "hot_rows": (6, 12), "directory": directory},
        ):
            (own_seen, own_rows), own = run_in(**store, **choosing)
            for mine, expected in zip(own_seen, seen, strict=True):
                np.testing.assert_array_equal(mine, expected)
            assert own_rows == rows
            assert {name: own[name] for name in counters} == counters
            below.append(own["dram_reads"] + own.get("ssd_reads", 0))
    return below


def of_three(ranks):
    return equal_to_rows_in_dram(ranks, KINDS[:1], 3)


def test_rows_and_what_is_read_are_those_of_rows_in_dram():
    assert on_gpus(equal_to_rows_in_dram, 2) == [True, True]


def test_three_trainers_of_whom_one_has_no_example_and_one_no_id():
    assert on_gpus(of_three, 3) == [True] * 3


@pytest.mark.smoke
def test_rows_of_one_trainer_are_those_of_rows_in_dram():
    assert equal_to_rows_in_dram(TrainerGroup(), KINDS[:1])


def test_any_tiers_are_one_bit_for_bit():
    """On two trainers; counters are of both together."""
    one, other = on_gpus(any_tiers, 2)
    assert one == other
    cold, some, none, three = one
    assert cold > 0
    assert some > 0
    assert none == 0
    assert three > 0


def test_working_ahead_changes_no_bit_and_what_one_refuses_moves_nothing_anywhere():
    one, other = on_gpus(ahead_or_not, 2)
    assert len(one) == len(other) == 2
    assert all("of feature 'item'" in each for each in one)
    assert all("of table" in each for each in other)


@pytest.mark.smoke
def test_devices_decide_as_hosts_do():
    own, other = on_gpus(late_or_not, 2)
    assert own[0] == other[0] == "None"
    assert "of feature" in own[1]
    assert "of table" in other[1]


@pytest.mark.smoke
def test_keys_of_the_next_batch_travel_with_the_rows_of_this_one():
    """Their owners find them while this one is computed; the place among messages is the same on all trainers."""
    sent, stats = [], Stats()
    stats.sent = lambda kind, num_bytes: sent.append(kind)
    ranks = TrainerGroup()
    half = GpuCollectiveSparse(spec_of(), ranks, stats, ahead=True)
    send_counts = half.messages.send_counts

    def send_counts_unseen(counts, *, train):
        passage, _ = send_counts(counts, train=train), sent.pop()
        return passage

    half.messages.send_counts = send_counts_unseen
    groups = len(half.groups_of_tables)
    run(half, ranks, steps=4, prefetch=2)
    half.close()
    by_step = [sent[first : first + groups] for first in range(0, len(sent), groups)]
    assert all(len(set(each)) == 1 for each in by_step)
    one = ["ids", "embeddings", "gradients"]
    # those of the second batch are asked for behind the rows of the first
    assert [each[0] for each in by_step] == [
        *one,
        "ids",
        "embeddings",
        *["ids", "gradients", "embeddings"] * 2,
        "gradients",
    ]


@pytest.mark.smoke
def test_owners_are_those_of_the_cpu():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 60)
    ids[40:] = ids[:20]
    device = jit.device()
    tables = to_device(np.array([0, 1], np.int32), device)
    for num_ranks in (1, 2, 7):
        found = unique(
            to_device(ids, device), to_device(np.array([0, 30, 0, 0], np.int32), device), tables, 60
        )
        order, ends = route(found, num_ranks, 2)
        size = int(found.num_keys)
        keys, of = found.keys.cpu().numpy()[:size], found.tables.cpu().numpy()[:size]
        owners = shard_of(keys, of, num_ranks)
        expected = np.argsort(owners * 2 + of, kind="stable")
        np.testing.assert_array_equal(order.cpu().numpy()[:size], expected)
        counts = np.bincount(owners * 2 + of, minlength=2 * num_ranks)
        np.testing.assert_array_equal(ends.cpu().numpy(), np.cumsum(counts))


@pytest.mark.smoke
def test_rows_are_rounded_on_the_wire_as_on_the_cpu():
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(50, 5)) * 10.0 ** rng.integers(-20, 20, (50, 1))).astype(np.float32)
    rows[1:5] = [[0] * 5, [np.inf, 1, 2, 3, -np.inf], [np.nan, 0, 0, 1, 0], [1e-44, 0, -0.0, 1, 3e38]]
    codec = RowCodec(True)
    for some in (rows, rows[:1], rows[:0]):
        here, there = torch.from_numpy(some), torch.from_numpy(some).to(jit.device())
        packed = codec.pack(there)
        assert packed.shape == (len(some), codec.width(5))
        with np.errstate(invalid="ignore", over="ignore"):
            expected = codec.unpack(codec.pack(here)).numpy()
        np.testing.assert_array_equal(codec.unpack(packed).cpu().numpy(), expected)
        np.testing.assert_array_equal(grown(*scaled_halves(there)).cpu().numpy(), expected)


@pytest.mark.smoke
def test_a_model_of_numbers_alone_takes_its_steps():
    schema = girih.Schema([girih.Numeric(name="x")], labels="y")
    spec = SparseSpec(schema=schema, needs={}, optimizer=girih.optim.SGD(lr=1.0), store=GPU)
    half = GpuCollectiveSparse(spec, TrainerGroup())
    numbers = np.ones((3, 1), np.float32)
    batch = Batch(ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), numeric=numbers, labels=numbers)
    pulled = half.pull(batch, half.prepare(batch))
    assert len(pulled.wait().blocks) == 0
    push(pulled, 1, 1.0).wait()
    assert half.last_step == 1
    half.close()


@pytest.mark.smoke
@pytest.mark.parametrize("make", [LocalSparse, lambda spec: GpuCollectiveSparse(spec, TrainerGroup())])
def test_rows_lie_on_the_gpu_that_the_specification_names(make):
    number = 3 if jit.INTERPRETED else torch.cuda.device_count() - 1
    half = make(replace(cases.spec(store=GPU), gpu=number))
    assert {store.state.memory.options.device for _, store in half.stores()} == {number}
    if not jit.INTERPRETED:
        assert {store.state.device.index for _, store in half.stores()} == {number}
    half.close()


@pytest.mark.smoke
def test_a_store_elsewhere_is_refused():
    with pytest.raises(girih.errors.ConfigError, match="expected one, in GPU memory"):
        GpuCollectiveSparse(replace(cases.spec(), store=StoreOptions(shards=1)), TrainerGroup())
