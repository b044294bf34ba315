"""Measures the work of steps: that of :mod:`girih.runs.work`, and what a step takes however little it is of."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from girih.cluster.segments import temporary_directory
from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import read_parquet
from girih.models.lr import LR
from girih.planner.calibration import Rate, StepWork
from girih.runs.stats import Stats
from girih.runs.work import measure_products, measure_reading, measure_rows
from girih.schema import Categorical, Schema
from girih.trainer import Trainer
from girih.training.dense_cost import measure_dense_cost
from girih.training.specs import dense_spec, sparse_spec

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
