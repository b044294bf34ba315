"""The first run: a generated click log, a DeepFM, and its AUC beside the best that any model can reach.

    python examples/demo/demo.py [--examples 1000000] [--out demo-run]

The log's click probabilities are known by construction, so the AUC of those probabilities on the test
clicks is the ceiling: no model can do better but by luck.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from girih import cli
from girih.metrics import Scores
from girih.testing.click_log import click_log

PART = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1_000_000, help="of the training data")
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="replaced, if this demo made it")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        if not (out / "config.toml").is_file() or not (out / "data").is_dir():
            print(f"{out}: exists and is not this demo's; name another --out", file=sys.stderr)
            return 2
        shutil.rmtree(out)
    (out / "data").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("config.toml"), out / "config.toml")
    console = Console(stderr=True)
    console.print(f"making a click log of {arguments.examples:,} examples …")
    ceiling = make_log(out / "data", arguments.examples)
    start = time.perf_counter()
    status = cli.run(["train", str(out / "config.toml"), "--run", str(out / "run")])
    if status != 0:
        return status
    seconds = time.perf_counter() - start
    cli.run(["report", str(out / "run")])
    show(out, ceiling, seconds)
    return 0


def make_log(directory: Path, num_examples: int) -> dict[str, float]:
    """Writes train, valid and test; returns the best possible AUC and logloss on test."""
    num_other = max(1, num_examples // 10)
    start = 0
    for part in range(0, num_examples, PART):
        rows = min(PART, num_examples - part)
        table, _ = click_log(rows, start=start, cardinality=20_000)
        pq.write_table(table, directory / f"train-{part // PART:03d}.parquet")
        start += rows
    for name in ("valid", "test"):
        table, probabilities = click_log(num_other, start=start, cardinality=20_000)
        pq.write_table(table, directory / f"{name}.parquet")
        start += num_other
    scores = Scores()
    logits = np.log(probabilities) - np.log1p(-probabilities)
    scores.add(logits[:, None].astype(np.float32), table["click"].to_numpy()[:, None].astype(np.float32))
    best = scores.result(["click"])
    return {"auc": best.auc or 0.0, "logloss": best.logloss or 0.0}


def show(out: Path, ceiling: dict[str, float], seconds: float) -> None:
    """Prints the model's test metrics beside the ceiling, and where everything lies."""
    summary = json.loads((out / "run" / "summary.json").read_text())
    table = Table(title="test data the model never saw", title_justify="left")
    for column in ("", "AUC", "logloss"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("DeepFM, one epoch", f"{summary['auc']:.4f}", f"{summary['logloss']:.4f}")
    table.add_row("best possible (true probabilities)", f"{ceiling['auc']:.4f}", f"{ceiling['logloss']:.4f}")
    console = Console()
    console.print(table)
    seconds -= summary["compile_s"]  # of the first run on this machine
    console.print(f"{summary['num_rows']:,} rows appeared as their ids were seen; trained in {seconds:.0f} s")
    for name, what in (
        ("config.toml", "what was trained: change it, and run girih train yourself"),
        ("run/report.html", "curves, calibration, timeline: open it in a browser"),
        ("run/summary.json", "every number"),
        ("run/checkpoints", "the model"),
    ):
        console.print(f"  {out / name}  {what}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
