"""DES's Table 3: AUC over a stream of days, each day predicted before it is trained on, on KuaiRand-Pure.

    GIRIH_DATA=... girih bench stream [--models lr ...] [--arms "one process" ...] [--from files] [--quick] [--results FOLDER] [--docs FOLDER]

A run is what an engineer does every night: ``girih train --resume`` with the day's log, tested on the next day's. So each
day but the first is predicted once, by weights that have not seen it. Arms and rules are those of ``strategy_quality``: all
make equally many updates of equally many examples, "one process" makes them without any distribution, and learning rates
(sparse and dense by one factor) are chosen for each arm by itself (``substitution`` takes those of one process), by the mean
AUC of the days up to the third with seed 1; seeds 2 to 4 are reported, by the mean over the days after it.

``--from kafka`` trains on a topic instead, to which each day is written when the day before is trained on (librdkafka's own broker, in this process).
A topic is not shuffled: what it is to equal is ``--from ordered``, files read in their order.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from experiments import (
    Results,
    Run,
    add_options,
    find_data,
    gap,
    girih_train,
    pictures,
    results,
    show,
    spread,
    tuned,
)
from pictures import Chart, write_picture
from strategy_quality import CASES, MOST_FACTORS, REPORTED, TUNED

MODELS = ("lr", "wide_deep", "deepfm")
NUM_DAYS, TUNED_DAYS = 14, 3
DAY_MS, BEIJING_MS = 86_400_000, 8 * 3_600_000
SOURCES = FILES, ORDERED, KAFKA = "files", "ordered", "kafka"
MESSAGE_ROWS = 512


def main() -> None:
    parser = harness.parser("stream", __doc__)
    add_options(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--from", nargs="+", default=[FILES], choices=SOURCES, dest="sources", help="where days are read"
    )
    parser.add_argument("--arms", nargs="+", help="by name; default: all of a model; its reference always is")
    arguments = parser.parse_args()
    known = {arm for model in arguments.models for arm in CASES[f"kuairand/{model}"].arms}
    if unknown := set(arguments.arms or ()) - known:
        parser.error(f"--arms {', '.join(sorted(unknown))}: expected some of {', '.join(sorted(known))}")
    find_data(parser)
    report = harness.Report("stream", arguments)
    _split_days()
    kept = results(arguments, "stream")
    rows, charts = [], []
    for model in arguments.models:
        for source in arguments.sources:
            runs, factors = _streamed(model, kept, source, arguments.arms, quick=arguments.quick)
            rows += _rows(model, source, runs, factors)
            lines = {arm: _line(of) for arm, of in runs.items()}
            if source == FILES:
                charts.append(Chart(f"kuairand/{model}", "day", "AUC before training on it", lines))
    show(report, "AUC of each day by weights that have not seen it, mean over days", HEADER, rows)
    print(kept.told())
    if charts:
        write_picture(pictures(arguments) / "stream.svg", charts)
    report.finish()


HEADER = [
    "model", "from", "strategy", "rates ×", "updates", "days", "AUC", "less one process", "logloss", "less one process's",
    "staleness: mean, most",
]  # fmt: skip


def _split_days() -> None:
    """Writes a file per day, once."""
    prepared = Path(os.environ["KUAIRAND"])
    folder = Path("runs", "kuairand-days").resolve()
    os.environ["KUAIRAND_DAYS"] = str(folder)
    if (folder / f"{NUM_DAYS:02}.parquet").exists():
        return
    log = pa.concat_tables(
        [pq.read_table(prepared / f"{part}.parquet") for part in ("train", "valid", "test")]
    )
    days = (log["time_ms"].to_numpy() + BEIJING_MS) // DAY_MS
    days = np.maximum(
        days - days.max() + NUM_DAYS, 1
    )  # minutes before the first midnight are the first day's
    folder.mkdir(parents=True, exist_ok=True)
    for day in range(1, NUM_DAYS + 1):
        pq.write_table(log.filter(pa.array(days == day)), folder / f"{day:02}.parquet")


def _streamed(
    model: str, kept: Results, source: str, arms: Sequence[str] | None, *, quick: bool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Arm → runs of the reported seeds; arm → its factor."""
    case = CASES[f"kuairand/{model}"]

    def run(arm: str, factor: float, seed: int, days: tuple[int, int]) -> Run:
        return Run(
            f"{model}{'' if source == FILES else '-' + source}/{arm}/x{factor:g}/{seed}",
            _config(model, source, arm, factor, seed),
            case.arms[arm].strategy,
            {"mean_of_days": list(days)},
        )

    def score(arm: str, factor: float) -> float:
        return float(kept.train([run(arm, factor, TUNED, (2, TUNED_DAYS))], _stream)[0]["auc"])

    reported = (2, 3) if quick else (TUNED_DAYS + 1, NUM_DAYS)
    factors: dict[str, float] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    reference = next(iter(case.arms))
    for arm in case.arms:
        if arms is not None and arm not in (reference, *arms):
            continue
        like = case.same.get(arm)
        if like in factors:
            factors[arm] = factors[like]
        elif quick:
            factors[arm] = 1.0
        else:
            factors[arm] = tuned(lambda factor, arm=arm: score(arm, factor), case.factors, MOST_FACTORS)
        seeds = REPORTED[: 1 if quick else None]
        runs[arm] = kept.train([run(arm, factors[arm], seed, reported) for seed in seeds], _stream)
    return runs, factors


def _config(model: str, source: str, arm: str, factor: float, seed: int) -> dict[str, Any]:
    """The config of the first day; later ones replace the files."""
    case = CASES[f"kuairand/{model}"]
    made = case.config(case.arms[arm], factor, seed, quick=False)
    made["data"] = {
        "format": "parquet",
        "train": "${KUAIRAND_DAYS}/01.parquet",
        "test": "${KUAIRAND_DAYS}/02.parquet",
        "batch_size": made["data"]["batch_size"],
    }
    if source == ORDERED:
        made["data"]["shuffle"] = False
    elif source == KAFKA:
        made["data"] |= {"format": KAFKA, "train": "${KUAIRAND_TOPIC}", "messages": "arrow", "stop_at": "end"}
    made["train"] = {"epochs": 1, "seed": seed}
    return made


class Topics:
    """Topics on a broker of this process, one a run, to which days are written."""

    def __init__(self) -> None:
        import confluent_kafka

        options = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0}
        self._producer = confluent_kafka.Producer(options)
        self._numbers = count()

    def begin(self) -> str:
        """The name of a topic without a record, whose address is told by ``KUAIRAND_TOPIC``."""
        name = f"days-{next(self._numbers)}"
        (broker,) = self._producer.list_topics(name, timeout=10).brokers.values()
        os.environ["KUAIRAND_TOPIC"] = f"kafka://{broker.host}:{broker.port}/{name}"
        return name

    def write(self, topic: str, day: int) -> None:
        """Writes the records of a day, in order, to one partition.

        Raises:
            RuntimeError: the broker did not take them.
        """
        log = pq.read_table(Path(os.environ["KUAIRAND_DAYS"], f"{day:02}.parquet"))
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        for begin in range(0, log.num_rows, MESSAGE_ROWS):
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, log.schema, options=options) as writer:
                writer.write_table(log.slice(begin, MESSAGE_ROWS))
            self._producer.produce(topic, out.getvalue().to_pybytes(), partition=0)
            self._producer.poll(0)
        if left := self._producer.flush(60):
            raise RuntimeError(f"day {day}: the broker took all but {left} messages")


@cache
def _topics() -> Topics:
    return Topics()


def _stream(run: Run) -> dict[str, Any]:
    """Trains day after day; what was found of each, and the means over some of them."""
    first, last = run.conditions["mean_of_days"]
    days = []
    topic = _topics().begin() if run.config["data"]["format"] == KAFKA else None
    with tempfile.TemporaryDirectory(prefix="girih-stream-") as directory:
        config, path = Path(directory, "config.toml"), Path(directory, "run")
        config.write_text(tomli_w.dumps(run.settings))
        for trained in range(1, last):
            files = {"train": trained, "test": trained + 1}
            if topic is not None:
                _topics().write(topic, files.pop("train"))
            words = [f"data.{split}=${{KUAIRAND_DAYS}}/{day:02}.parquet" for split, day in files.items()]
            words = [part for word in (*words, f"train.epochs={trained}") for part in ("--set", word)]
            girih_train(run, config, path, *words, *(["--resume"] if trained > 1 else []))
            summary = json.loads((path / "summary.json").read_text())
            kinds = ("auc", "logloss", "steps", "num_examples", "staleness_mean", "staleness_max")
            days.append({"day": trained + 1, **{kind: summary[kind] for kind in kinds}})
    counted = [day for day in days if first <= day["day"] <= last]
    return {
        "auc": mean(day["auc"] for day in counted),
        "logloss": mean(day["logloss"] for day in counted),
        **{kind: days[-1][kind] for kind in ("steps", "num_examples", "staleness_mean", "staleness_max")},
        "days": days,
    }


def _rows(
    model: str, source: str, runs: dict[str, list[dict[str, Any]]], factors: dict[str, float]
) -> list[list[str]]:
    case, reference = CASES[f"kuairand/{model}"], next(iter(runs.values()))
    rows = []
    for arm, of in runs.items():
        cells = []
        for key in ("auc", "logloss"):
            values = [run[key] for run in of]
            cells += [spread(values), "" if of is reference else gap(values, [run[key] for run in reference])]
        first, last = of[0]["asked"]["conditions"]["mean_of_days"]
        updates = of[0]["steps"] * case.arms[arm].per_step
        stale = f"{mean(run['staleness_mean'] for run in of):.1f}, {max(run['staleness_max'] for run in of)}"
        rows.append(
            [model, source, arm, f"{factors[arm]:g}", f"{updates:,}", f"{first} to {last}", *cells, stale]
        )
    return rows


def _line(runs: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(day, mean AUC over seeds)."""
    columns = zip(*(run["days"] for run in runs), strict=True)
    return [(days[0]["day"], mean(day["auc"] for day in days)) for days in columns]


if __name__ == "__main__":
    main()
