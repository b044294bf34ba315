"""Measures the work of training steps that is the same for all models: rows, products, reading; core-seconds on one core.

Times are of the processor, not of the clock, so that whoever else wants the core does not count; a point is the least but a tenth of
some rounds. Rows are those of a generated group: eight features with a table of 20,000 ids each, ids drawn evenly.

B examples, F features, D numbers of a row, W width of a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import read_parquet
from girih.data.batch import Batch
from girih.kernels.cpu import ahead
from girih.lifecycle.dense_cost import measure_dense_cost
from girih.models.embeddings import Embeddings
from girih.models.fm import LR
from girih.models.needs import EMBEDDING, of_all
from girih.optim import FTRL, SGD, Adagrad, Adam, RowwiseAdagrad, SparseOptimizer
from girih.planner.calibration import Rate, StepWork
from girih.processes.segments import temporary_directory
from girih.schema import Categorical, Numeric, Schema
from girih.sparse.halves.local import LocalSparse
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Stats
from girih.trainer import Trainer
from girih.training.specs import dense_spec, sparse_spec

FEATURES, IDS, BATCHES = 8, 20_000, 4
POINTS = ((64, 8), (2048, 8), (2048, 64))
"""Examples and D: a rate's three numbers go through three points."""
OPTIMIZERS: tuple[SparseOptimizer, ...] = (SGD(), Adagrad(), RowwiseAdagrad(), Adam(), FTRL())
WIDTHS, EXAMPLES = (64, 256, 1024), 512
ROWS = 16_384
_ROUNDS = 12

Seconds = tuple[float, float]
"""Seconds of a lookup and of an update."""


def measure_rows(
    optimizers: tuple[SparseOptimizer, ...] = OPTIMIZERS, rounds: int = _ROUNDS
) -> tuple[Rate, dict[str, Rate]]:
    """The rate of lookups, and that of updates by name of optimizer; lookups' is the median over optimizers."""
    ahead.make_ready(ahead.training([[each] for each in optimizers], []))
    measured = {each.name: [_rows_s(each, *point, rounds) for point in POINTS] for each in optimizers}
    lookups = np.median([[lookup for lookup, _ in points] for points in measured.values()], axis=0)
    updates = {name: fit_rate([update for _, update in points]) for name, points in measured.items()}
    return fit_rate(lookups.tolist()), updates


def fit_rate(seconds: list[float]) -> Rate:
    """The rate through the seconds of :data:`POINTS`: call_s + ids · id_s + ids · D · number_s, none of them below 0."""
    (few, small), (many, _), (_, large) = ((FEATURES * examples, dim) for examples, dim in POINTS)
    number_s = max(0.0, seconds[2] - seconds[1]) / (many * (large - small))
    each_s = max(0.0, seconds[1] - seconds[0]) / (many - few)  # an id with its D numbers
    id_s = max(0.0, each_s - small * number_s)
    return Rate(max(0.0, seconds[0] - few * (id_s + small * number_s)), id_s, number_s)


def measure_products(rounds: int = _ROUNDS) -> tuple[tuple[int, float], ...]:
    """W → multiplications and additions per second of a layer of W inputs and outputs, forward and backward, on one core."""
    threads, points = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for width in WIDTHS:
            layer, inputs = torch.nn.Linear(width, width), torch.randn(EXAMPLES, width, requires_grad=True)

            def work(layer: torch.nn.Linear = layer, inputs: torch.Tensor = inputs) -> None:
                layer(inputs).sum().backward()

            points.append((width, 3 * 2 * EXAMPLES * width * width / _fast_s(work, rounds)))
    finally:
        torch.set_num_threads(threads)
    return tuple(points)


def measure_reading(rounds: int = 4) -> tuple[float, float]:
    """Core-seconds of an example read from Parquet, and of each of its ids and numbers: a line through two schemas."""
    few, many = (_reading_s(count, rounds) for count in (2, 32))
    value_s = max(0.0, many - few) / 30
    return max(0.0, few - 2 * value_s), value_s


def _rows_s(optimizer: SparseOptimizer, examples: int, dim: int, rounds: int) -> Seconds:
    schema = Schema([Categorical(name=f"f{number}", dim=dim) for number in range(FEATURES)], labels="click")
    spec = SparseSpec(schema=schema, needs=of_all(schema, EMBEDDING), optimizer=optimizer, threads=1)
    half, random = LocalSparse(spec), np.random.default_rng(0)
    batches = [_batch(random, examples) for _ in range(BATCHES)]
    lookups, updates = [], []
    try:
        for number in range(BATCHES + rounds):  # the first of each batch makes its rows
            started = time.process_time()
            pulled = half.pull(batches[number % BATCHES])
            embeddings = pulled.wait()
            looked_up = time.process_time()
            _give_gradients(embeddings)
            computed = time.process_time()
            pulled.push(number + 1, 1.0).wait()
            if number >= BATCHES:
                lookups.append(looked_up - started)
                updates.append(time.process_time() - computed)
    finally:
        half.close()
    return _fast(lookups), _fast(updates)


def _batch(random: np.random.Generator, examples: int) -> Batch:
    count = FEATURES * examples
    return Batch(
        ids=random.integers(0, IDS, count),
        offsets=np.arange(count + 1, dtype=np.int32),
        numeric=np.zeros((examples, 0), np.float32),
        labels=np.zeros((examples, 1), np.float32),
    )


def _give_gradients(embeddings: Embeddings) -> None:
    for block in embeddings.blocks:
        block.values.sum().backward()  # type: ignore[no-untyped-call]


def _reading_s(values: int, rounds: int) -> float:
    """Core-seconds of an example with half as many ids, and as many numbers."""
    random = np.random.default_rng(0)
    columns: Mapping[str, object] = {
        **{f"c{number}": random.integers(0, IDS, ROWS) for number in range(values // 2)},
        **{f"x{number}": random.normal(size=ROWS).astype(np.float32) for number in range(values // 2)},
        "click": np.zeros(ROWS, np.int8),
    }
    categorical = [
        Categorical(name=name, dim=4) for name in columns if name.startswith("c") and name != "click"
    ]
    numeric = [Numeric(name=name) for name in columns if name.startswith("x")]
    with temporary_directory("calibrate") as directory:
        file = Path(directory, "train.parquet")
        pq.write_table(pa.table(columns), file)
        data = read_parquet(file, Schema([*categorical, *numeric], labels="click"), batch_size=2048)

        def work() -> None:
            for _ in data.batches(0):
                pass

        return _fast_s(work, rounds) / ROWS


def _fast_s(work: Callable[[], object], rounds: int) -> float:
    work()
    took = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return _fast(took)


def _fast(seconds: list[float]) -> float:
    """The first decile."""
    return sorted(seconds)[len(seconds) // 10]


BATCH, STEPS = 8, 300


def measure_work(ranks: TrainerGroup) -> StepWork:
    """The work of steps on this machine; called by all trainers, who measure at once, as they train."""
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


def measure_step(lookup: Rate, update: Rate) -> float:
    """Core-seconds of a step of ``local`` on eight examples, less its lookup, its pass of the model and its update of rows.

    Args:
        lookup, update: those of rows that Adagrad moves.
    """
    schema = Schema([Categorical(name="user", dim=4)], labels="click")
    model, options = LR(schema), TrainOptions(log_every_steps=STEPS)
    with temporary_directory("calibrate") as directory:
        file = Path(directory, "train.parquet")
        rows = BATCH * STEPS
        pq.write_table(
            pa.table({"user": np.arange(rows) % 100, "click": np.arange(rows, dtype=np.int8) % 2}), file
        )
        data = read_parquet(file, schema, batch_size=BATCH)
        sparse = sparse_spec(model, schema, options, None, None, None)
        dense = dense_spec(model, schema, options, None, Stats())
        cost = measure_dense_cost(data, sparse, dense, TrainerGroup())
        with Trainer(model, options=options) as trainer:
            trainer.fit(data, epochs=1)  # which opens the session and makes rows
            started, before = time.process_time(), trainer.state.step
            trainer.fit(data, epochs=1)
            step_s = (time.process_time() - started) / (trainer.state.step - before)
    pass_s = 0.0 if cost is None else cost.seconds(BATCH)
    return max(0.0, step_s - pass_s - lookup.seconds(BATCH, 1) - update.seconds(BATCH, 1))
