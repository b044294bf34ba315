"""Measures a machine: links of trainers, codecs, the work of steps, and short runs of strategies on generated data.

A point is the first decile of the times of its rounds. It is close to the time without interference. A median grows
tenfold if other processes need the cores. Links are timed by wall clock, and averaged over trainers. All trainers begin
a round together. There are several passes over all points, so a disturbance affects only a few rounds of many points.
Calls send equal arrays there and back, and write them before they send them. A point is half of this time. Work is
timed by processor time.

The processor time of a link is the time of all rounds, minus the time of the same number of empty rounds. Both ends of
a call do the same work, so girih doubles the time of one end. For a short run, the kernel counts the processor time of
all its processes.

Shapes: S bytes of a message, B examples, F features, D numbers of a row, W width of a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from girih import optim
from girih.cluster.cluster import Cluster
from girih.comm.codecs.tensors import ACTIVATIONS, GRADIENTS, Codec, ErrorFeedback, TopK
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.comm.registry import find
from girih.comm.rpc import Client, Request
from girih.comm.service import connect, listen
from girih.config.train import TrainOptions
from girih.data import read_parquet
from girih.data.batch import Batch
from girih.dense.accel.process_settings import keep_freed_memory
from girih.kernels.cpu import ahead
from girih.lifecycle.dense_cost import measure_dense_cost
from girih.models.dnn import DNN
from girih.models.fm import LR
from girih.models.needs import EMBEDDING, of_all
from girih.planner.calibration import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Calibration,
    CodecSpeed,
    Links,
    Point,
    Rate,
    StepWork,
)
from girih.planner.costs import fit, with_cpu
from girih.planner.steps.basis import Observed
from girih.processes.segments import temporary_directory
from girih.runs.callbacks import Callback
from girih.schema import Categorical, Numeric, Schema
from girih.sparse.halves.local import LocalSparse
from girih.sparse.spec import SparseSpec
from girih.strategies import BY_NAME, Strategy
from girih.telemetry.stats import Stats
from girih.trainer import Trainer
from girih.training.specs import dense_spec, sparse_spec

SIZES = tuple(128 << 2 * power for power in range(9))
"""Sizes of messages, from 128 B to 8 MiB."""
POINT_S = 0.2
"""Seconds to measure a point of a link. It takes longer if these give too few rounds."""
_PASSES, _WARM_UP, _FEWEST, _MOST = 4, 2, 2, 100  # the last three are rounds per pass
Work = Callable[[], object]
LinkSize = tuple[str, int]


def measure_links(
    ranks: TrainerGroup, *, host: str, secret: bytes, sizes: Sequence[int] = SIZES, point_s: float = POINT_S
) -> Links | None:
    """Measures and fits all links. Returns them on rank 0. All trainers call it, and there must be at least two.

    Args:
        host: the host on which this trainer listens.
        secret: the secret of the run.
        sizes: sizes S of messages. For collectives, they are rounded up to 4 bytes per trainer.
    """
    keep_freed_memory()  # the same as trainers; otherwise large messages cause page faults
    points, cpu_s = _measure(
        dict(each for size in sizes for each in _collectives(ranks, size)), ranks, point_s
    )
    for name, address in (("tcp", f"tcp://{host}:*"), ("shared", "shm://")):
        with _to_rank_1(ranks, address, secret) as client:
            if client is not None:
                calls: dict[LinkSize, Work] = {(name, size): partial(_call, client, size) for size in sizes}
                there_and_back, own_s = _measure(calls, TrainerGroup(), point_s)
                points[name] = [(size, seconds / 2) for size, seconds in there_and_back[name]]
                cpu_s[name] = own_s[name]  # two messages at one end equal one message at both ends
    if not ranks.first:
        return None
    return {
        name: with_cpu(name, fit(name, measured, ranks.size), cpu_s[name], ranks.size)
        for name, measured in points.items()
    }


def _collectives(ranks: TrainerGroup, size: int) -> Iterator[tuple[LinkSize, Work]]:
    """Yields collectives, called in the same way as in the halves."""
    counts = [-(-size // (4 * ranks.size))] * ranks.size
    flat = torch.zeros(sum(counts))
    part = flat[: counts[0]].clone()
    exchange = partial(ranks.exchange, flat, counts, counts)
    yield (ALL_REDUCE, flat.nbytes), lambda: ranks.all_reduce(flat)
    yield (REDUCE_SCATTER, flat.nbytes), lambda: exchange().view(ranks.size, -1).sum(0)
    yield (ALL_GATHER, flat.nbytes), lambda: ranks.exchange(part.repeat(ranks.size), counts, counts)
    yield (ALL_TO_ALL, flat.nbytes), exchange


@contextmanager
def _to_rank_1(ranks: TrainerGroup, address: str, secret: bytes) -> Iterator[Client | None]:
    """Yields, on rank 0, a client of an echo server on rank 1. The other ranks wait."""
    with ExitStack() as stack:
        served = ""
        if ranks.rank == 1:
            served = stack.enter_context(listen(_answer, address=address, secret=secret)).address
        addresses = ranks.gather(served)
        yield None if addresses is None else stack.enter_context(connect(addresses[1], secret=secret))
        ranks.barrier()


def _answer(request: Request) -> None:
    array = request.buffer(np.uint8, request.frame.arrays[0].size)
    array.fill(0)
    request.reply((), (array,))


def _call(client: Client, size: int) -> None:
    array = client.buffer(np.uint8, size)
    array.fill(0)
    client.call(1, (), (array,)).wait()


def _measure(
    works: Mapping[LinkSize, Work], ranks: TrainerGroup, point_s: float
) -> tuple[dict[str, list[Point]], dict[str, list[Point]]]:
    """Returns link → its points, and the core-seconds of all ranks by size.

    All ranks make the same number of rounds.
    """
    took: dict[LinkSize, list[float]] = {each: [] for each in works}
    busy_s: dict[LinkSize, float] = dict.fromkeys(works, 0.0)
    for _ in range(_PASSES):
        for each, work in works.items():
            start = time.perf_counter()
            _rounds_s(work, _WARM_UP, ranks)
            round_s = ranks.largest([time.perf_counter() - start])[0] / _WARM_UP
            num_rounds = max(_FEWEST, min(_MOST, int(point_s / _PASSES / round_s)))
            before = time.process_time()
            took[each] += _rounds_s(work, num_rounds, ranks)
            busy_s[each] += time.process_time() - before
    started = time.process_time()
    _rounds_s(int, _MOST, ranks)  # an empty round, which takes almost no time
    idle_s = (time.process_time() - started) / _MOST
    points: dict[str, list[Point]] = {name: [] for name, _ in works}
    cpu_s: dict[str, list[Point]] = {name: [] for name, _ in works}
    for (name, size), seconds in took.items():
        round_cpu_s, round_s = ranks.sum([busy_s[name, size] / len(seconds) - idle_s, _fast_s(seconds)])
        cpu_s[name].append((size, max(0.0, round_cpu_s)))
        points[name].append((size, round_s / ranks.size))
    return points, cpu_s


def _fast_s(seconds: Sequence[float]) -> float:
    """Returns the first decile of times."""
    return sorted(seconds)[len(seconds) // 10]


def _rounds_s(work: Work, num_rounds: int, ranks: TrainerGroup | None = None) -> list[float]:
    """Returns the wall-clock seconds of each round, which all ranks begin together.

    Without ``ranks``, returns core-seconds.
    """
    clock, took = time.process_time if ranks is None else time.perf_counter, []
    for _ in range(num_rounds):
        if ranks is not None:
            ranks.barrier()
        start = clock()
        work()
        took.append(clock() - start)
    return took


SHAPE = (256, 1024)
"""The shape of a message of 1 MiB of float32, the outputs of a layer of 1,024 for 256 examples.

Like most messages, it exceeds the cache of a core.
"""


def measure_codecs(ranks: TrainerGroup) -> Mapping[str, CodecSpeed]:
    """Measures all codecs of activations and gradients, by name. Trainers measure together, as in training.

    Returns the mean over trainers.
    """
    ahead.make_ready(ahead.packing_tensors())
    speeds = {}
    for name, codec in {**ACTIVATIONS, **GRADIENTS}.items():
        speed = measure_codec(codec)
        sums = ranks.sum([speed.pack_s_per_byte, speed.unpack_s_per_byte])
        speeds[name] = CodecSpeed(*(each / ranks.size for each in sums))
    return speeds


def measure_codec(codec: Codec, rounds: int = 30) -> CodecSpeed:
    """Measures one codec in this thread. Top-k has error feedback. The times are first deciles of rounds."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    stream = ErrorFeedback(codec) if isinstance(codec, TopK) else codec

    def pack() -> object:
        packed = stream.pack(values)
        if isinstance(stream, ErrorFeedback):
            stream.apply()
        return packed

    alone, unpack = TrainerGroup(), partial(codec.unpack, codec.pack(values), SHAPE)
    pack(), unpack()
    return CodecSpeed(*(_fast_s(_rounds_s(work, rounds, alone)) / values.nbytes for work in (pack, unpack)))


FEATURES, BATCHES = 8, 4
ROW_IDS = 20_000
"""Number of ids of each feature, drawn uniformly."""
POINTS = ((64, 8), (2048, 8), (2048, 64))
"""Pairs of examples and D. A rate has three numbers, so it is fitted through three points."""
OPTIMIZERS: tuple[optim.SparseOptimizer, ...] = tuple(cls() for cls in optim.BY_NAME.values())
WIDTHS, EXAMPLES, ROUNDS = (64, 256, 1024), 512, 12
READ_ROWS, STEP_EXAMPLES, STEPS = 16_384, 8, 300


def measure_work(ranks: TrainerGroup) -> StepWork:
    """Measures the work of steps on this machine. All trainers measure together, the same as in training."""
    ranks.barrier()
    lookup, updates = measure_rows()
    products = measure_products()
    example_s, value_s = measure_reading()
    step_s = measure_step(lookup, updates["adagrad"]) if ranks.first else 0.0
    ranks.barrier()
    return StepWork(
        lookup=lookup,
        updates=updates,
        example_s=example_s,
        value_s=value_s,
        step_s=step_s,
        products=products,
    )


def measure_rows(
    optimizers: tuple[optim.SparseOptimizer, ...] = OPTIMIZERS, rounds: int = ROUNDS
) -> tuple[Rate, dict[str, Rate]]:
    """Measures the rates of lookups and updates.

    Returns the median rate of lookups over optimizers, and updates by optimizer.
    """
    ahead.make_ready(ahead.training([[each] for each in optimizers], []))
    measured = {each.name: [_rows_s(each, *point, rounds) for point in POINTS] for each in optimizers}
    lookups = np.median([[lookup for lookup, _ in points] for points in measured.values()], axis=0)
    updates = {name: fit_rate([update for _, update in points]) for name, points in measured.items()}
    return fit_rate(lookups.tolist()), updates


def fit_rate(seconds: list[float]) -> Rate:
    """Fits a rate to the seconds of :data:`POINTS`: call_s + ids · id_s + ids · D · number_s, each at least 0."""
    (few, small), (many, _), (_, large) = ((FEATURES * examples, dim) for examples, dim in POINTS)
    number_s = max(0.0, seconds[2] - seconds[1]) / (many * (large - small))
    each_s = max(0.0, seconds[1] - seconds[0]) / (many - few)  # an id with its D numbers
    id_s = max(0.0, each_s - small * number_s)
    return Rate(max(0.0, seconds[0] - few * (id_s + small * number_s)), id_s, number_s)


def measure_products(rounds: int = ROUNDS) -> tuple[tuple[int, float], ...]:
    """Returns W → operations per second of a layer with W inputs and outputs, on one core.

    The operations are those of the forward and the backward pass.
    """
    threads, points = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for width in WIDTHS:
            layer, inputs = torch.nn.Linear(width, width), torch.randn(EXAMPLES, width, requires_grad=True)
            work = partial(_pass, layer, inputs)
            work()
            points.append((width, 3 * 2 * EXAMPLES * width * width / _fast_s(_rounds_s(work, rounds))))
    finally:
        torch.set_num_threads(threads)
    return tuple(points)


def _pass(layer: torch.nn.Linear, inputs: torch.Tensor) -> None:
    layer(inputs).sum().backward()


def measure_reading(rounds: int = 4) -> tuple[float, float]:
    """Returns the core-seconds to read an example from Parquet, and to read one of its ids or numbers.

    They are a line through the times for two schemas.
    """
    few, many = (_reading_s(count, rounds) for count in (2, 32))
    value_s = max(0.0, many - few) / 30
    return max(0.0, few - 2 * value_s), value_s


def _rows_s(optimizer: optim.SparseOptimizer, examples: int, dim: int, rounds: int) -> tuple[float, float]:
    """Returns core-seconds of a lookup and of an update."""
    schema = _categories(dim)
    spec = SparseSpec(schema=schema, needs=of_all(schema, EMBEDDING), optimizer=optimizer, threads=1)
    half, random = LocalSparse(spec), np.random.default_rng(0)
    count = FEATURES * examples
    batches = [
        Batch(
            ids=random.integers(0, ROW_IDS, count),
            offsets=np.arange(count + 1, dtype=np.int32),
            numeric=np.zeros((examples, 0), np.float32),
            labels=np.zeros((examples, 1), np.float32),
        )
        for _ in range(BATCHES)
    ]
    lookups, updates = [], []
    try:
        for number in range(BATCHES + rounds):  # the first round of each batch creates its rows
            started = time.process_time()
            pulled = half.pull(batches[number % BATCHES])
            embeddings = pulled.wait()
            looked_up = time.process_time()
            for block in embeddings.blocks:
                block.values.sum().backward()  # type: ignore[no-untyped-call]
            computed = time.process_time()
            pulled.push(number + 1, 1.0, Vote()).wait()
            if number >= BATCHES:
                lookups.append(looked_up - started)
                updates.append(time.process_time() - computed)
    finally:
        half.close()
    return _fast_s(lookups), _fast_s(updates)


def _categories(dim: int) -> Schema:
    return Schema([Categorical(name=f"f{number}", dim=dim) for number in range(FEATURES)], labels="click")


def _reading_s(values: int, rounds: int) -> float:
    """Returns the core-seconds to read an example with ``values`` numbers and half as many ids."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {
        f"c{number}": random.integers(0, ROW_IDS, READ_ROWS) for number in range(values // 2)
    }
    features: list[Categorical | Numeric] = [Categorical(name=name, dim=4) for name in columns]
    for number in range(values // 2):
        columns[f"x{number}"] = random.normal(size=READ_ROWS).astype(np.float32)
        features.append(Numeric(name=f"x{number}"))
    with temporary_directory("calibrate") as directory:
        file = Path(directory, "train.parquet")
        pq.write_table(pa.table({**columns, "click": np.zeros(READ_ROWS, np.int8)}), file)
        data = read_parquet(file, Schema(features, labels="click"), batch_size=2048)

        def work() -> None:
            for _ in data.batches(0):
                pass

        work()
        return _fast_s(_rounds_s(work, rounds)) / READ_ROWS


def measure_step(lookup: Rate, update: Rate) -> float:
    """Returns core-seconds of a step of ``local`` on eight examples, minus lookup, the model's pass and row updates.

    Args:
        lookup, update: the rates of rows with Adagrad.
    """
    schema = Schema([Categorical(name="user", dim=4)], labels="click")
    model, options = LR(schema), TrainOptions(log_every_steps=STEPS)
    with temporary_directory("calibrate") as directory:
        file, numbers = Path(directory, "train.parquet"), np.arange(STEP_EXAMPLES * STEPS)
        pq.write_table(pa.table({"user": numbers % 100, "click": (numbers % 2).astype(np.int8)}), file)
        data = read_parquet(file, schema, batch_size=STEP_EXAMPLES)
        sparse = sparse_spec(model, schema, options, None, None, None)
        cost = measure_dense_cost(
            data, sparse, dense_spec(model, schema, options, None, Stats()), TrainerGroup()
        )
        with Trainer(model, options=options) as trainer:
            trainer.fit(data, epochs=1)  # opens the session and creates rows
            started, before = time.process_time(), trainer.state.step
            trainer.fit(data, epochs=1)
            step_s = (time.process_time() - started) / (trainer.state.step - before)
    pass_s = 0.0 if cost is None else cost.seconds(STEP_EXAMPLES)
    return max(0.0, step_s - pass_s - lookup.seconds(STEP_EXAMPLES, 1) - update.seconds(STEP_EXAMPLES, 1))


RUN_IDS, DIM, HIDDEN = 4000, 16, (64, 32)
LOGGED = 6
"""Steps per record in a short run."""
WINDOW = {64: 4 * LOGGED, 4096: LOGGED}
"""Examples of a trainer's share, in the two observations of each strategy → steps per window.

Small steps take milliseconds, so their windows have more steps. The two numbers of examples differ a lot, so that the
cost per id is precise.
"""
WINDOWS, EPOCHS = 5, 4
"""Windows per epoch, and epochs. The first epoch creates rows, and girih measures the others."""


def ways(trainers: int) -> Mapping[str, Strategy]:
    """Returns calibration key → the strategy that girih measures for this key, without pipelining."""
    variants = (variant for kind in BY_NAME.values() for variant in kind.with_trainers(trainers))
    return {variant.calibration_key: variant.without_pipelining() for variant in variants}


def write_data(folder: Path, trainers: int) -> None:
    """Writes Parquet files with uniform ids for both runs, with one epoch each."""
    random = np.random.default_rng(0)
    for examples, window in WINDOW.items():
        rows = examples * trainers * window * WINDOWS
        columns = {f"f{number}": random.integers(0, RUN_IDS, rows) for number in range(FEATURES)}
        labels = {"click": (random.random(rows) < 0.5).astype(np.int8)}
        pq.write_table(pa.table({**columns, **labels}), folder / f"{examples}.parquet")


def observe(
    strategy: Strategy, calibration: Calibration, folder: Path, cluster: Cluster
) -> tuple[Observed, Observed] | None:
    """Trains with small steps, then with larger ones. All trainers call it. Returns the observations on rank 0.

    girih later subtracts the predicted times of a step's parts. The rest is the strategy's overhead.
    """
    schema = _categories(DIM)
    meter = _Meter(cluster, {"trainer": strategy.trainers, **strategy.roles})
    options, observations = TrainOptions(log_every_steps=LOGGED), []
    with Trainer(
        DNN(schema, hidden=HIDDEN), strategy=strategy, options=options, callbacks=[meter], cluster=cluster
    ) as trainer:
        for examples, window in WINDOW.items():
            file = folder / f"{examples}.parquet"
            data = read_parquet(file, schema, batch_size=examples * strategy.trainers)
            meter.begin(trainer.state.step, window)
            trainer.fit(data, epochs=EPOCHS)
            run = trainer._run
            cost = run.planning.step_fold(run.opened()[0], run.strategy, data, calibration)
            if cost is not None:
                cpu_s, step_s = meter.quartiles()
                observations.append(
                    Observed(
                        ids=float(FEATURES * examples),
                        trainers=strategy.trainers,
                        cpu_s=cpu_s,
                        step_s=step_s,
                        work_s=sum(cost.work_s.values()),
                        path_s=sum(cost.path_s.values()),
                    )
                )
    return (observations[0], observations[1]) if len(observations) == 2 else None


@dataclass
class _Meter(Callback):
    """Receives the records of a run, and notes the wall-clock time and the processor time at each record."""

    cluster: Cluster
    counts: Mapping[str, int]
    first_step: int = 0
    window: int = 1
    notes: list[tuple[int, float, float]] = field(default_factory=list)

    def begin(self, step: int, window: int) -> None:
        """Drops earlier measurements, and measures from this step on, in windows of ``window`` steps."""
        self.first_step, self.window = step, window
        self.notes.clear()

    def on_metrics(self, record: Mapping[str, Any]) -> None:
        """Notes the end of a window after the first epoch, while all processes run."""
        windows, within = divmod(record["step"] - self.first_step, self.window)
        if within == 0 and WINDOWS <= windows < EPOCHS * WINDOWS:
            entries = [
                find(self.cluster.registry, role, index)
                for role, count in self.counts.items()
                for index in range(count)
            ]
            pids = [entry.pid for entry in entries if entry is not None] or [0]
            self.notes.append((record["step"], time.perf_counter(), sum(map(_cpu_s, pids))))

    def quartiles(self) -> tuple[float, float]:
        """Returns the first quartiles, over windows, of core-seconds and seconds of a step.

        Interference adds time to most windows, and the minimum varies.
        """
        windows = [
            ((by_then_s - busy_s) / (after - before), (until_s - since_s) / (after - before))
            for (before, since_s, busy_s), (after, until_s, by_then_s) in pairwise(self.notes)
        ]
        cpu_s, step_s = (sorted(each)[len(windows) // 4] for each in zip(*windows, strict=True))
        return cpu_s, step_s


def _cpu_s(pid: int) -> float:
    """Returns the processor time of a process so far, over all its threads; 0 is this process.

    The clock id of another process is that of Linux's ``clock_getcpuclockid``: the complement of the pid, with three bits of kind.
    """
    return time.process_time() if pid == 0 else time.clock_gettime(~pid << 3 | 2)
