"""What reading costs training: through ``Trainer`` on files, beside the same batches given, and beside reading alone.

The loop waits for a batch in its span ``read``; a thread reads ahead of it. What that thread takes from the network is
not waiting: it shows against the same batches lying in memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import pyarrow as pa

import girih
from girih.data import Batch, Dataset, Position

TITLE = "Reading, one thread, and training"
GIVEN, ORDERED, SHUFFLED = "batches given", "files, in order", "files, shuffled"
MODELS: dict[str, tuple[dict[str, Any], girih.TrainOptions]] = {
    "lr": ({}, girih.TrainOptions()),
    "deepfm": ({"hidden": (400, 400, 400)}, girih.TrainOptions(precision="bfloat16")),
}


@dataclass(frozen=True, kw_only=True)
class Given(Dataset):
    """The batches of one epoch, all in memory, for every epoch."""

    held: Sequence[Batch]

    def batches(self, epoch: int = 0, position: Position | None = None) -> Iterator[tuple[Batch, Position]]:
        for number, batch in enumerate(self.held, 1):
            last = number == len(self.held)
            yield batch, Position(epoch=epoch + 1) if last else Position(epoch=epoch, row=number)


def in_training(report: harness.Report, ordered: Dataset, shuffled: Dataset, repeats: int) -> None:
    """Adds the tables of reading alone, and of training with it."""
    num_rows = ordered.num_examples
    given = Given(
        **{one.name: getattr(ordered, one.name) for one in dataclasses.fields(ordered) if one.init},
        held=list(ordered),
    )
    files = {ORDERED: ordered, SHUFFLED: shuffled}
    with _pool_of(1):
        times_alone = harness.alternate(
            {name: alone(dataset) for name, dataset in files.items()}, rounds=repeats, warmup=1
        )
    title = f"{TITLE}: {num_rows:,} rows of {len(ordered.schema.sparse)} ids"
    table = report.table(
        f"{title}, batches of {ordered.batch_size:,}; an epoch whose rows are known",
        {
            "what": "{}", "samples/s": "{:,.0f}", "waits": "{:.2%}", "first batch ms": "{:.0f}",
            "waits after it": "{:.2%}", "longest ms": "{:.1f}", "of batches given, after it": "{:.2f}",
            "reading is x as fast": "{:.1f}",
        },
    )  # fmt: skip
    rates = {name: num_rows / harness.median(times) for name, times in times_alone.items()}
    for name, rate in rates.items():
        table.row({"what": f"{name}, read alone", "samples/s": rate})
    for model, (options, training) in MODELS.items():
        with girih.Trainer(
            girih.models.create(model, ordered.schema, options),
            sparse_optimizer=girih.optim.RowwiseAdagrad(lr=0.05),
            options=training,
        ) as trainer:
            measured = harness.alternate(
                {name: epoch(trainer, data) for name, data in ({GIVEN: given} | files).items()}, repeats, 1
            )
        later = {
            name: [(whole - first,) for whole, _, first, _ in epochs] for name, epochs in measured.items()
        }
        for name, epochs in measured.items():
            whole, waited, first, longest = (harness.median_part(epochs, part) for part in range(4))
            row = {"what": f"{name}, {model}", "samples/s": num_rows / whole, "waits": waited / whole}
            row |= {"first batch ms": 1e3 * first, "longest ms": 1e3 * longest}
            row["waits after it"] = statistics.median((w - f) / (s - f) for s, w, f, _ in epochs)
            row["of batches given, after it"] = harness.ratio(later[name], later[GIVEN])
            row["reading is x as fast"] = rates[name] * whole / num_rows if name in rates else None
            table.row(row)


def alone(dataset: Dataset) -> harness.Contestant:
    return lambda number: (harness.seconds(lambda: sum(1 for _ in dataset.batches(number))),)


def epoch(trainer: girih.Trainer, data: Dataset) -> harness.Contestant:
    """Seconds of one epoch's steps, of all waits in them, of that for the first batch, of the longest of the others."""

    def train(_: int) -> tuple[float, ...]:
        before = trainer.state.train_s
        trainer.fit(data, epochs=1)
        waits = _waits(trainer)
        return trainer.state.train_s - before, sum(waits), waits[0], max(waits[1:])

    return train


def _waits(trainer: girih.Trainer) -> list[float]:
    """Seconds of each wait for a batch of the last fit, all of which must have been kept."""
    waits = [seconds for name, _, seconds in trainer.spans.events() if name == "read"]
    whole = trainer.spans.totals_s["read"]
    if abs(sum(waits) - whole) > 1e-3 + 0.01 * whole:
        raise RuntimeError(
            f"the timeline holds {sum(waits):.3f} s of waits of {whole:.3f} s; take fewer --rows"
        )
    return waits


class _pool_of:
    """Has pyarrow decode with so many threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def __enter__(self) -> None:
        self.before = pa.cpu_count()
        pa.set_cpu_count(self.num_threads)

    def __exit__(self, *error: object) -> None:
        pa.set_cpu_count(self.before)
