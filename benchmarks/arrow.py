"""Training on a table in memory, beside the same rows in a Parquet file.

    girih bench arrow [--rows 262144] [--repeats 5] [--precision bfloat16]

The file is that of ``girih bench data --only training``: 26 int64 ids, 13 float32 and a label; it lies in the page cache. The
table is what ``pyarrow.parquet.read_table`` makes of it. Readings alone, in order and shuffled, and epochs of a logistic
regression and a DeepFM take turns in one run; medians. ``of Parquet`` is the median over rounds of a round's own ratio of rates.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import pyarrow.parquet as pq
import reading

import data as files
import girih

PARQUET, TABLE = "Parquet", "a table in memory"


def main() -> None:
    parser = harness.parser("arrow", __doc__)
    parser.add_argument("--rows", type=int, default=1 << 18)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--precision", default="float32", help="of the dense half; others are slow on most processors"
    )
    arguments = parser.parse_args()
    report = harness.Report("arrow", arguments)
    report.not_identical(
        "Parquet is decoded in every epoch, by pyarrow's pool; a table takes its whole size in memory"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "training")
        files.write("training", arguments.rows, path)
        table = pq.read_table(path)
        table_of_rates = report.table(
            f"{arguments.rows:,} rows, batches of {files.BATCH:,}",
            {"work": "{}", "data": "{}", "rows/s": "{:,.0f}", "of Parquet": "{:.3f}×", "waits": "{:.2%}"},
        )
        for shuffle in (False, True):
            parquet = files.dataset("training", path, shuffle=shuffle)
            in_memory = girih.read_arrow(table, parquet.schema, batch_size=files.BATCH, shuffle=shuffle)
            pair = {PARQUET: parquet, TABLE: in_memory}
            order = "shuffled" if shuffle else "in order"
            contestants = {name: reading.alone(each) for name, each in pair.items()}
            add(table_of_rates, f"read {order}", arguments, contestants)
        for model, (options, _) in reading.MODELS.items():
            with girih.Trainer(
                girih.models.create(model, parquet.schema, options),
                sparse_optimizer=girih.optim.RowwiseAdagrad(lr=0.05),
                options=girih.TrainOptions(precision=arguments.precision),
            ) as trainer:
                contestants = {name: reading.epoch(trainer, each) for name, each in pair.items()}
                add(table_of_rates, f"train {model}, shuffled", arguments, contestants)
    report.finish()


def add(table: harness.ResultTable, work: str, arguments: Any, pair: dict[str, harness.Contestant]) -> None:
    """Has the two take turns, and adds a row for each."""
    measured = harness.alternate(pair, rounds=arguments.repeats, warmup=1)
    walls = {name: [(round_[0],) for round_ in rounds] for name, rounds in measured.items()}
    for name, rounds in measured.items():
        waited = harness.median_part(rounds, 1) / harness.median(walls[name]) if len(rounds[0]) > 1 else None
        table.row({
            "work": work, "data": name, "rows/s": arguments.rows / harness.median(walls[name]), "waits": waited,
            "of Parquet": harness.ratio(walls[name], walls[PARQUET]),
        })  # fmt: skip


if __name__ == "__main__":
    main()
