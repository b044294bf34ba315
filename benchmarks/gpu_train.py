"""``girih train`` on a GPU, from a file to an AUC, compared with the same run on a CPU.

    girih bench gpu_train               3,000 steps on the GPU; status 1 if the AUC differs from that of docs/results/gpu-train-cpu.json
    girih bench gpu_train --device cpu --json docs/results/gpu-train-cpu.json     makes that file
    girih bench gpu_train --quick       a few steps with interpreted kernels on a CPU: shows that it runs

The log has Criteo's shape, 26 categorical and 13 numeric features, and is made by ``girih.data.click_log``. Both runs see the same
rows in the same order and begin with the same parameters. Their AUCs differ only because a GPU adds floats in another order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pyarrow.parquet as pq
import torch

from girih.data.click_log import click_log, click_log_schema
from girih.schema import Numeric

NUM_NUMERIC, NUM_SCALAR = 13, 25  # and the list of tags
REFERENCE = harness.ROOT / "docs" / "results" / "gpu-train-cpu.json"
TOLERANCE = 0.0005
"""Largest difference of two AUCs. Another seed changes the AUC of a CPU by 0.00003."""
ROWS_PER_FILE = 64_000
SHAPE = ("steps", "batch", "valid_rows", "cardinality")
"""Options that have to be the same in the reference."""


def main() -> None:
    """Trains and compares; status 1 if the AUC is another one, 2 if there is no GPU or no reference."""
    parser = options()
    arguments = parser.parse_args()
    overrides = [f"train.device={arguments.device}"]
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.valid_rows, arguments.cardinality = 4, 32, 64, 100
        if not torch.cuda.is_available():
            arguments.device, overrides = "cpu", ["train.device=cpu", 'store.tiers=["gpu"]']
    elif arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu trains without one")
    is_compared = arguments.device == "cuda" and not arguments.quick
    expected = reference(parser, arguments) if is_compared else None
    report = harness.Report("gpu_train", arguments)
    table = report.table(
        "girih train, a click log in Criteo's shape",
        {"device": "{}", "steps": "{:,}", "batch": "{:,}", "AUC": "{:.5f}", "log loss": "{:.5f}"}
        | {"samples/s": "{:,.0f}", "seconds": "{:.1f}", "AUC on a CPU": "{:.5f}", "difference": "{:+.5f}"},
    )
    row = {"device": arguments.device, "steps": arguments.steps, "batch": arguments.batch}
    with tempfile.TemporaryDirectory() as folder:
        row |= train(Path(folder), arguments, overrides)
    if expected is not None:
        row |= {"AUC on a CPU": expected, "difference": row["AUC"] - expected}
    table.row(row)
    report.finish()
    if expected is not None and abs(row["difference"]) > TOLERANCE:
        sys.exit(
            f"girih: bench gpu_train: the AUC differs by {row['difference']:+.5f}; expected at most {TOLERANCE}"
        )


def options() -> argparse.ArgumentParser:
    """The parser of this benchmark."""
    parser = harness.parser("gpu_train", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--valid-rows", type=int, default=200_000)
    parser.add_argument("--cardinality", type=int, default=100_000, help="largest number of ids of a feature")
    parser.add_argument("--quick", action="store_true", help="a few steps, not compared")
    return parser


def reference(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> float:
    """AUC of the run on a CPU."""
    try:
        found = json.loads(REFERENCE.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{REFERENCE}: {error}; --device cpu --json {REFERENCE} makes it")
    for name in SHAPE:
        if found["options"][name] != getattr(arguments, name):
            parser.error(
                f"{REFERENCE} has {name} = {found['options'][name]}, this run {getattr(arguments, name)}"
            )
    return float(found["tables"][0]["rows"][0]["AUC"])


def train(folder: Path, arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Makes the log, trains in a process of its own, and returns what its summary says."""
    start = time.perf_counter()
    num_rows = arguments.steps * arguments.batch
    write_log(folder, num_rows, arguments.valid_rows, arguments.cardinality)
    print(f"{num_rows:,} rows made in {time.perf_counter() - start:.1f} s", flush=True)
    (folder / "config.toml").write_text(config(arguments.batch))
    words = [sys.executable, "-m", "girih", "train", "config.toml", "--run", "run"]
    words += [word for override in overrides for word in ("--set", override)]
    start = time.perf_counter()
    status = subprocess.run(words, cwd=folder).returncode
    if status != 0:
        sys.exit(f"girih: bench gpu_train: girih train ended with status {status}, see its output above")
    seconds = time.perf_counter() - start
    summary = json.loads((folder / "run" / "summary.json").read_text())
    if summary["steps"] != arguments.steps:
        raise ValueError(f"girih train took {summary['steps']} steps; expected {arguments.steps}")
    names = {"AUC": "auc", "log loss": "logloss", "samples/s": "samples_per_s"}
    return {column: summary[name] for column, name in names.items()} | {"seconds": seconds}


def write_log(folder: Path, num_train: int, num_valid: int, cardinality: int) -> None:
    """Files of ROWS_PER_FILE rows for training, made by all cores, and one for validation."""
    pieces = [
        (folder / f"train-{start // ROWS_PER_FILE:04}.parquet", start, min(ROWS_PER_FILE, num_train - start))
        for start in range(0, num_train, ROWS_PER_FILE)
    ]
    pieces.append((folder / "valid.parquet", num_train, num_valid))
    num_processes = min(len(pieces), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(partial(write_piece, cardinality), pieces, chunksize=1)


def write_piece(cardinality: int, piece: tuple[Path, int, int]) -> None:
    """Writes some rows of the log."""
    file, start, num_rows = piece
    table, _ = click_log(
        num_rows, start=start, num_features=NUM_SCALAR, num_numeric=NUM_NUMERIC, cardinality=cardinality
    )
    pq.write_table(table, file, compression="none", use_dictionary=False)


def config(batch: int) -> str:
    """The config file: a DeepFM on all features of the log."""
    lines = ["[data]", 'train = "train-*.parquet"', 'valid = "valid.parquet"', f"batch_size = {batch}"]
    for feature in click_log_schema(num_features=NUM_SCALAR, num_numeric=NUM_NUMERIC).features:
        lines += ["[[features]]", f'name = "{feature.name}"']
        if isinstance(feature, Numeric):
            lines += ['kind = "numeric"', f"transform = {json.dumps(feature.transform)}"]
        else:
            lines += ['kind = "categorical"', "dim = 16"]
    lines += ["[labels]", 'names = ["click"]', "[model]", 'name = "deepfm"', "hidden = [128, 64]"]
    lines += ["[sparse_optimizer]", 'name = "adagrad"', "lr = 0.05"]
    lines += ["[dense_optimizer]", 'name = "adam"', "lr = 1e-3", "[train]", "epochs = 1", "seed = 7"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
