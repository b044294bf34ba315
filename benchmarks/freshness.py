"""How old answers are: from an update in training to its effect in an answer, and what publishing costs training.

A trainer of recipes/kuairand publishes to a directory, a server follows, a client asks it all the time; the trainer writes down when each step was done. An answer says of
which step its version is: the age of a step is the time from when it was done to the first answer by a version that has it. What publishing costs is measured
apart, without a server: the same steps with and without it, in turns.

GIRIH_DATA has the raw data (see recipes/kuairand/prepare.py); KUAIRAND the prepared ones, made in a temporary directory where it is not set.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "recipes" / "kuairand" / "kuairand.toml"
ASK_EVERY_S = 0.02
WARM_UP_STEPS = 20
TRAIN = "train={epochs=1000,seed=7}"
"""The recipe's, without evaluations, in which nothing is trained, and so without early stopping."""


def train(directory: Path, options: list[str], to: str | None) -> None:
    """The trainer's process: trains, and writes when each step was done, and what publishing counted."""
    import girih
    from girih.runs.callbacks import Callback

    done: list[tuple[int, float]] = []

    class Clock(Callback):
        def on_metrics(self, record: Any) -> None:
            done.append((record["step"], time.time()))

    overrides = [TRAIN, *options, "train.log_every_steps=1", *([] if to is None else [f"publish.to={to}"])]
    with girih.Trainer.from_config(CONFIG, overrides, callbacks=[Clock()], progress=False) as trainer:
        trainer.data = {"train": trainer.data["train"]}
        trainer.fit()
        summary, spans = trainer.summary(None, duration_s=1.0), trainer.spans.events()
    paused = [seconds for name, _, seconds in spans if name == "publish"]
    told = {
        "done": done,
        "published": summary.get("published"),
        "paused": paused,
        "rows": summary["num_rows"],
    }
    (directory / "trainer.json").write_text(json.dumps(told))


def trained(directory: Path, options: list[str], to: str | None, *, wait: bool = True) -> Any:
    """Starts a trainer; returns what it wrote once it is through, or its process."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--trainer", str(directory), "--options", json.dumps([options, to])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment)
    if not wait:
        return process
    if process.wait() != 0:
        sys.exit(1)
    return json.loads((directory / "trainer.json").read_text())


class Client(threading.Thread):
    """Asks a server again and again; notes when which step answered first, and how long each answer took."""

    def __init__(self, port: int, name: str, body: bytes) -> None:
        super().__init__(daemon=True)
        self._port, self._path, self._body = port, f"/v2/models/{name}/infer", body
        self.first: list[tuple[int, float]] = []
        self.took: list[float] = []
        self.error: str | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        """Asks until it is stopped."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while not self.stopped.wait(ASK_EVERY_S):
            start = time.perf_counter()
            connection.request("POST", self._path, self._body)
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200:
                self.error = content["error"]
                return
            now = time.time()
            self.took.append(time.perf_counter() - start)
            step = int(content["model_version"].partition(".")[0])
            if not self.first or step > self.first[-1][0]:
                self.first.append((step, now))


def request_of(data: Path, candidates: int) -> bytes:
    """A request of some examples of the test data."""
    from girih.app.run_config import RunConfig
    from girih.data.from_memory import columns_of

    schema = RunConfig.load(CONFIG).schema
    table = pq.read_table(data / "test.parquet", columns=sorted(columns_of(schema))).slice(0, candidates)
    inputs = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = column.to_pylist()
        if isinstance(values[0], list):
            lengths = [len(each) for each in values]
            inputs.append(
                {"name": f"{name}.lengths", "datatype": "INT32", "shape": [len(lengths)], "data": lengths}
            )
            values = [value for each in values for value in each]
        kinds = {float: "FP32", str: "BYTES"}
        kind = next((kinds[type(value)] for value in values if type(value) in kinds), "INT64")
        inputs.append({"name": name, "datatype": kind, "shape": [len(values)], "data": values})
    return json.dumps({"inputs": inputs}).encode()


def ages(done: list[tuple[int, float]], first: list[tuple[int, float]]) -> list[float]:
    """Seconds from when each step was done to the first answer that has it; steps before the first answer are left out."""
    steps, found = [step for step, _ in first], []
    for step, at in done:
        place = bisect.bisect_left(steps, step)
        if place < len(first) and at > first[0][1]:
            found.append(first[place][1] - at)
    return found


def quantile(values: list[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def follow(report: harness.Report, options: argparse.Namespace, data: Path, directory: Path) -> None:
    """Adds the table of ages."""
    table = report.table(
        "from an update to its effect in an answer, KuaiRand",
        {"every s": "{:g}", "steps": "{}", "steps/s": "{:.1f}", "segments": "{}", "skipped": "{}", "p50 s": "{:.2f}", "p99 s": "{:.2f}",
         "longest s": "{:.2f}", "pause ms p50": "{:.1f}", "pause ms max": "{:.1f}", "answer ms p50": "{:.1f}", "answer ms p99": "{:.1f}"},
    )  # fmt: skip
    body = request_of(data, options.candidates)
    for every_s in options.every_s:
        place = directory / f"every-{every_s:g}"
        log = place / "log"
        steps = [f"train.max_steps={options.steps}", f"publish.every_s={every_s}"]
        trainer = trained(place, steps, str(log), wait=False)
        while not (log / "head.json").exists():
            if trainer.poll() is not None:
                sys.exit(1)
            time.sleep(0.1)
        server = subprocess.Popen(
            [sys.executable, "-m", "girih", "serve", str(log), "--follow", "--port", "0", "--name", "kuairand"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        with contextlib.ExitStack() as closing:
            closing.callback(server.wait)
            closing.callback(server.terminate)
            closing.callback(trainer.kill)
            line = server.stdout.readline()  # type: ignore[union-attr]
            client = Client(int(line.split()[3].strip(",").rpartition(":")[2]), "kuairand", body)
            client.start()
            if trainer.wait() != 0:
                sys.exit(1)
            time.sleep(3.0)
            client.stopped.set()
            client.join()
        if client.error is not None:
            sys.exit(client.error)
        told = json.loads((place / "trainer.json").read_text())
        found, done = ages(told["done"], client.first), told["done"]
        table.row({
            "every s": every_s, "steps": len(found),
            "steps/s": (len(done) - 1) / (done[-1][1] - done[0][1]),
            "segments": told["published"]["segments"], "skipped": told["published"]["skipped"],
            "p50 s": quantile(found, 0.5), "p99 s": quantile(found, 0.99), "longest s": max(found),
            "pause ms p50": 1e3 * quantile(told["paused"], 0.5), "pause ms max": 1e3 * max(told["paused"]),
            "answer ms p50": 1e3 * quantile(client.took, 0.5), "answer ms p99": 1e3 * quantile(client.took, 0.99),
        })  # fmt: skip


def cost(report: harness.Report, options: argparse.Namespace, directory: Path) -> None:
    """Adds the table of what publishing costs."""
    table = report.table(
        f"training with and without publishing, {options.rounds} rounds in turns of {options.cost_steps} steps",
        {
            "every s": "{:g}",
            "steps/s without": "{:.2f}",
            "steps/s with": "{:.2f}",
            "of without": "{:.3f}×",
            "least": "{:.3f}×",
            "most": "{:.3f}×",
        },
    )

    def speed(place: Path, more: list[str], to: str | None) -> float:
        told = trained(place, [f"train.max_steps={options.cost_steps}", *more], to)["done"][WARM_UP_STEPS:]
        return (len(told) - 1) / (told[-1][1] - told[0][1])

    for every_s in options.every_s:
        pairs = []
        for number in range(options.rounds):
            place = directory / f"cost-{every_s:g}-{number}"
            sides = [
                ("with", [f"publish.every_s={every_s}"], str(place / "log")),
                ("without", [], None),
            ]
            found = {
                name: speed(place / name, more, to) for name, more, to in sides[:: -1 if number % 2 else 1]
            }
            pairs.append((found["without"], found["with"]))
        ratios = [b / a for a, b in pairs]
        table.row({
            "every s": every_s, "steps/s without": statistics.median(a for a, _ in pairs), "steps/s with": statistics.median(b for _, b in pairs),
            "of without": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        })  # fmt: skip


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = harness.parser("freshness", __doc__)
    parser.add_argument("--every-s", type=float, nargs="+", default=[0.5])
    parser.add_argument("--steps", type=int, default=300, help="of training, while the server follows")
    parser.add_argument("--cost-steps", type=int, default=100, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="0 leaves out what publishing costs")
    parser.add_argument("--candidates", type=int, default=20, help="examples of a request")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer is not None:
        train(options.trainer, *json.loads(options.options))
        return
    report = harness.Report("freshness", options)
    with tempfile.TemporaryDirectory(prefix="girih-freshness-") as temporary:
        directory = Path(temporary)
        if "KUAIRAND" not in os.environ:
            os.environ["KUAIRAND"] = str(directory / "kuairand")
            prepare = ROOT / "recipes" / "kuairand" / "prepare.py"
            subprocess.run([sys.executable, str(prepare), os.environ["KUAIRAND"]], check=True)
        follow(report, options, Path(os.environ["KUAIRAND"]), directory)
        if options.rounds:
            cost(report, options, directory)
    report.finish()


if __name__ == "__main__":
    main()
