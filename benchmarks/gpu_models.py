"""Whole models on a GPU, for gpu.py: samples/s of a step with rows in GPU memory, and of its dense half alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gpu_timing import wait_for_device

import girih
from girih.data import Batch
from girih.data.batch import single_bags
from girih.kernels.gpu import jit
from girih.sparse.options import StoreOptions
from girih.telemetry.stats import Spans
from girih.training.schedules import JoinedHalves, in_step

CATEGORICAL, NUMERIC, DIM = 26, 13, 16
MODELS = {
    "DeepFM": lambda schema: girih.models.DeepFM(schema, hidden=(400, 400, 400)),
    "DLRM": lambda schema: girih.models.DLRM(schema, bottom_hidden=(512, 256), hidden=(1024, 1024, 512, 256)),
}


def schema() -> girih.Schema:
    """Criteo's shape."""
    return girih.Schema(
        [
            *(girih.Categorical(name=f"c{number}", dim=DIM) for number in range(CATEGORICAL)),
            *(girih.Numeric(name=f"n{number}") for number in range(NUMERIC)),
        ],
        labels="click",
    )


def batches(examples: int, count: int, ids_of: object) -> list[Batch]:
    """Batches of ids that ``ids_of(size)`` draws."""
    rng = np.random.default_rng(0)
    return [
        Batch(
            ids=ids_of(CATEGORICAL * examples),  # type: ignore[operator]
            offsets=single_bags(CATEGORICAL * examples),
            numeric=rng.random((examples, NUMERIC), np.float32),
            labels=(rng.random((examples, 1)) < 0.2).astype(np.float32),
        )
        for _ in range(count)
    ]


def samples_per_s(
    name: str, given: Sequence[Batch], steps: int, *, compile: bool = False
) -> tuple[float, float]:
    """Samples/s of whole steps, ids of the next batch prepared beside; and of the dense half, embeddings given.

    Args:
        compile: whether torch compiles the dense half of both, in steps that are not timed.
    """
    description = schema()
    device = "cpu" if jit.INTERPRETED else "cuda"
    options = girih.TrainOptions(device=device, on_nonfinite="stop", compile=compile)
    columns = {feature.name: [0] for feature in description.features} | {"click": [1.0]}
    with tempfile.TemporaryDirectory() as folder, girih.Trainer(
        MODELS[name](description), options=options, store=StoreOptions(tiers=("gpu",)),
        schedule=girih.ScheduleOptions(prefetch=True),
    ) as trainer:  # fmt: skip
        pq.write_table(pa.table(columns), f"{folder}/one.parquet")
        trainer.fit(girih.read_parquet(f"{folder}/one.parquet", description, batch_size=1), epochs=0)
        sparse, dense = trainer.sparse, trainer.dense

        def whole(count: int) -> None:
            source = ((given[number % len(given)], number) for number in range(count))
            schedule = in_step(prefetch=True)
            before = None
            for step in schedule(source, JoinedHalves(sparse, dense, 0, lambda: 1.0, Spans())):
                if before is not None and before.refused is not None:
                    raise before.refused
                before = step

        read = sparse.peek(given[0]).wait()

        def alone(count: int) -> None:
            for number in range(count):
                embeddings = read.mapped(lambda bags: bags.detach().requires_grad_(), lambda each: each)
                computed = dense.compute(given[number % len(given)], embeddings)
                computed.vote.cast(computed.vote.refused)
                computed.apply(computed.vote)

        found = []
        for work in (whole, alone):
            work(2 * len(given))
            wait_for_device()
            start = time.perf_counter()
            work(steps)
            wait_for_device()
            found.append(steps * given[0].num_examples / (time.perf_counter() - start))
        return found[0], found[1]
