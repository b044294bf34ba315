"""Updates for benchmarks of servers: a log as training on one core writes it, recorded once and written again at that speed.

So what a server takes in while it is measured is what training makes in that time, without training beside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import girih
from girih.checkpoint import Storage
from girih.publishing.log import SEGMENTS, SNAPSHOTS, Log, name_of
from girih.publishing.manifest import NAME, Pointer
from girih.runs.callbacks import Callback

MOST_EXAMPLES = 1 << 20


def schema_of(options: Any) -> girih.Schema:
    """The schema of a benchmark's model: ``features`` ids of ``dim``, and ``numbers`` to be standardized."""
    features: list[Any] = [girih.Categorical(name=f"c{n}", dim=options.dim) for n in range(options.features)]
    features += [girih.Numeric(name=f"x{n}", transform="standardize") for n in range(options.numbers)]
    return girih.Schema(features, "click")


def record(log: Path, options: Any, seconds: float, every_s: float, core: int) -> None:
    """Trains on one core for so long after all rows are there, and publishes every ``every_s`` seconds."""
    process = multiprocessing.get_context("spawn").Process(
        target=_train, args=(str(log), options, seconds, every_s, core)
    )
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the trainer ended with status {process.exitcode}")


def _train(log: str, options: Any, seconds: float, every_s: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    schema, filling = schema_of(options), -(-options.rows // options.batch_size)

    class Until(Callback):
        """Ends training so long after all rows are there."""

        begin: float | None = None

        def on_metrics(self, record: Any) -> None:
            if self.begin is None and record["step"] >= filling:
                self.begin = time.monotonic()
            if self.begin is not None and time.monotonic() > self.begin + seconds:
                trainer.request_stop()

    data = girih.read_arrow(_examples(options), schema, batch_size=options.batch_size)
    with girih.Trainer(
        girih.models.DeepFM(schema, hidden=tuple(options.hidden)),
        options=girih.TrainOptions(log_every_steps=1),
        publish=girih.PublishOptions(to=log, every_s=every_s, snapshot_every=1 << 20),
        callbacks=[Until()],
    ) as trainer:
        trainer.fit(data, epochs=1)


def _examples(options: Any) -> pa.Table:
    """Examples that have each id once, and then ids drawn by Zipf's law."""
    rng = np.random.default_rng(2)
    size = options.rows + MOST_EXAMPLES
    columns: dict[str, Any] = {}
    for n in range(options.features):
        drawn = (rng.zipf(1.2, MOST_EXAMPLES) % options.rows).astype(np.int64)
        columns[f"c{n}"] = np.concatenate([rng.permutation(options.rows), drawn])
    columns |= {f"x{n}": rng.random(size, np.float32) for n in range(options.numbers)}
    return pa.table(columns | {"click": rng.integers(0, 2, size)})


class Replay:
    """A recorded log that comes into another place at the speed at which it was recorded.

    Args:
        source: the recorded log. target: a directory that is not there yet. filled: steps after which all rows are there: versions up to there are
            there at once.
    """

    def __init__(self, source: Path, target: Path, filled: int) -> None:
        self._old, self._new = Log(Storage.at(source)), Log(Storage.at(target))
        self._source, self._target = source, target
        self._numbers = self._old.versions()
        self._times = [self._manifest(number).time for number in self._numbers]
        steps = [self._manifest(number).step for number in self._numbers]
        self._first = next((n for n, step in enumerate(steps) if step >= filled), len(steps) - 1)
        self.rows = [
            sum(sum(part["tables"].values()) for part in self._manifest(number).shards.values())
            for number in self._numbers[self._first + 1 :]
        ]
        for number in self._numbers[: self._first + 1]:
            self._bring(number)

    @property
    def seconds(self) -> float:
        """How long what comes takes to come."""
        return self._times[-1] - self._times[self._first]

    @contextlib.contextmanager
    def running(self, core: int) -> Iterator[None]:
        """While entered, a process on a core of its own brings what comes."""
        process = multiprocessing.get_context("fork").Process(target=self._run, args=(core,))
        process.start()
        try:
            yield
        finally:
            process.kill()
            process.join()

    def _run(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        begin = time.time() - self._times[self._first]
        for number, at in zip(self._numbers[self._first + 1 :], self._times[self._first + 1 :], strict=True):
            time.sleep(max(0.0, begin + at - time.time()))
            self._bring(number)

    def _bring(self, number: int) -> None:
        for kind in (SNAPSHOTS, SEGMENTS):
            if (self._source / kind / name_of(number)).exists():
                source, target = (place / kind / name_of(number) for place in (self._source, self._target))
                shutil.copytree(
                    source, target, copy_function=os.link
                )  # which takes the client's core no time
        head, whole = self._old.head(), self._old.numbers(whole=True)
        if head is None:
            raise SystemExit(f"{self._source}: nothing was published there")
        snapshot = max(n for n in whole if n <= number)
        newest, snapshots = self._pointer(number), self._pointer(snapshot, whole=True)
        self._new.write_head(replace(head, newest=newest, snapshot=snapshots))

    def _manifest(self, number: int) -> Any:
        return self._old.read(number, whole=not (self._source / SEGMENTS / name_of(number)).exists())

    def _pointer(self, number: int, *, whole: bool = False) -> Pointer:
        whole = whole or not (self._source / SEGMENTS / name_of(number)).exists()
        manifest = self._old.read(number, whole=whole)
        crc = zlib.crc32(self._old.place(number, whole=whole).read(NAME))
        return Pointer(number=number, step=manifest.step, time=manifest.time, manifest_crc32=crc)
