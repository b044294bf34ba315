"""The price of metrics: samples/s of whole runs without [metrics] port, with it, and where all processes are asked every second.

    girih bench scraped [--strategy hybrid] [--rounds 8] [--examples 1000000]

DeepFM (256-128, D = 16, three features) on a generated click log in batches of 2,048, with two trainers where the strategy has several.
The three take turns, and each ratio is of runs that follow each other. Who asks is on the same cores: what that takes is in the ratio.
``answers`` counts what it got in a run, and ``ms`` is how long one took.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import harness
import pyarrow.parquet as pq
from two_versions import CONFIG, STRATEGIES

from girih.data.click_log import click_log
from girih.telemetry.status_file import TARGETS

EVERY_S = 1.0
WITHOUT, QUIET, ASKED = "no port", "port, nobody asks", "port, asked every second"


def main() -> None:
    """Prints a row for each of the three."""
    parser = harness.parser("scraped", __doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="hybrid")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--examples", type=int, default=1_000_000)
    options = parser.parse_args()
    report = harness.Report("scraped", options)
    asked: dict[str, list[dict[str, Any]]] = {ASKED: []}
    with tempfile.TemporaryDirectory(prefix="girih-scraped-") as folder:
        place = Path(folder)
        log, _ = click_log(options.examples, start=0, cardinality=200_000)
        pq.write_table(log, place / "train.parquet", row_group_size=100_000)
        (place / "config.toml").write_text(CONFIG)
        contestants = {
            name: partial(run, options.strategy, place, name, asked) for name in (WITHOUT, QUIET, ASKED)
        }
        times = harness.alternate(contestants, options.rounds, warmup=1)
    table = report.table(
        f"{options.strategy}: {options.rounds} runs each, in turns",
        {"metrics": "{}", "samples/s": "{:,.0f}", "of no port": "{:.4f}", "from": "{:.4f}", "to": "{:.4f}", "answers": "{:.0f}", "ms": "{:.1f}"},
    )  # fmt: skip
    for name, mine in times.items():
        ratios = sorted(before[0] / after[0] for before, after in zip(times[WITHOUT], mine, strict=True))
        told = asked.get(name) or [{}]
        table.row(
            {
                "metrics": name, "samples/s": 1 / harness.median(mine), "of no port": statistics.median(ratios),
                "from": ratios[0], "to": ratios[-1],
                "answers": statistics.median(each["answers"] for each in told) if told[0] else None,
                "ms": statistics.median(each["ms"] for each in told) if told[0] else None,
            }
        )  # fmt: skip
    report.finish()


def run(
    strategy: str, place: Path, name: str, asked: dict[str, list[dict[str, Any]]], number: int
) -> Sequence[float]:
    """Trains once; returns seconds per sample of training steps.

    Raises:
        RuntimeError: the run failed, or nobody answered.
    """
    directory = place / f"run-{time.monotonic_ns()}"
    words = [sys.executable, "-m", "girih", "train", str(place / "config.toml"), "--strategy", strategy]
    sets = [] if strategy == "local" else ["strategy.trainers=2"]
    sets += [] if name == WITHOUT else ["metrics.port=0"]
    words += [*(word for each in sets for word in ("--set", each)), "--run", str(directory)]
    asker = Asker(directory)
    if name == ASKED:
        asker.start()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    asker.over.set()
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    if name == ASKED:
        asker.join()
        if not asker.answers_s:
            raise RuntimeError(f"nobody answered of {directory}")
        asked[name].append({"answers": len(asker.answers_s), "ms": 1e3 * statistics.median(asker.answers_s)})
    return (1 / json.loads((directory / "summary.json").read_text())["samples_per_s"],)


class Asker(threading.Thread):
    """Asks all processes of a run for their metrics every second, until :attr:`over` is set.

    Attributes:
        answers_s: how long each took.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.over, self.answers_s = threading.Event(), list[float]()
        self._targets = directory / TARGETS

    def run(self) -> None:
        """Asks."""
        while not self.over.wait(EVERY_S):
            for file in sorted(self._targets.glob("*.json")):
                start = time.perf_counter()
                try:
                    (group,) = json.loads(file.read_text())
                    urlopen(f"http://{group['targets'][0]}/metrics", timeout=EVERY_S).read()
                except OSError:  # it has just ended
                    continue
                self.answers_s.append(time.perf_counter() - start)


if __name__ == "__main__":
    main()
