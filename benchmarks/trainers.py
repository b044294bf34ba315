"""Several trainers that do one run after another, so that many short runs pay for their processes once.

As a program, this file is one of the trainers; the runs come as JSON in a file that it is told, and the first trainer
prints what it found of each as a line of JSON. Strategies with roles of their own work too, on one host.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fleet
import tomli_w
import torch

from girih.cluster.hosts import HostSpec
from girih.config.file import RunConfig


def train_all(
    asked: Sequence[Mapping[str, Any]], trainers: int, hosts: Mapping[str, HostSpec] | None = None
) -> Iterator[dict[str, Any]]:
    """Trains runs in turn; yields what was found of each as soon as it is there.

    Args:
        asked: of each run ``config`` (content of a config file) and ``strategy``; it is trained and evaluated. One that
            also has ``warmup``, ``steps`` and ``windows``, and maybe ``links``, is measured as by ``fleet.measure``.
        hosts: where trainers live.

    Raises:
        RuntimeError: a trainer failed; what each of them said.
    """
    hosts = hosts or {}
    first = hosts.get("trainer 0", HostSpec())
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "asked.json").write_text(json.dumps(list(asked)))
        started = []
        for rank in range(trainers):
            host_spec = hosts.get(f"trainer {rank}", HostSpec())
            environment = {
                **os.environ,
                **host_spec.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(trainers),
                "MASTER_ADDR": first.host,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            words = [*host_spec.command, sys.executable, __file__, str(folder / "asked.json")]
            errors = stack.enter_context((folder / f"errors-{rank}").open("w"))
            out = subprocess.DEVNULL if rank else subprocess.PIPE
            process = subprocess.Popen(words, env=environment, text=True, stdout=out, stderr=errors)
            stack.callback(process.kill)
            started.append(process)
        num_found = 0
        for line in started[0].stdout or ():
            num_found += 1
            yield json.loads(line)
        if num_found < len(asked):
            told = [(folder / f"errors-{rank}").read_text()[-1500:] for rank in range(trainers)]
            raise RuntimeError(f"run {num_found + 1} of {len(asked)}:\n" + "\n".join(told))
        for process in started:
            process.wait()


def _main() -> None:
    torch.set_num_threads(1)
    talking = fleet.Talking()
    with tempfile.TemporaryDirectory() as directory:
        for number, asked in enumerate(json.loads(Path(sys.argv[1]).read_text())):
            config = {**asked["config"], "strategy": asked["strategy"]}
            if "windows" in asked:
                steps = asked["warmup"] + asked["steps"] * asked["windows"]
                epochs = {"epochs": 10_000, "max_steps": steps, "log_every_steps": asked["steps"]}
                config["train"] = {**config.get("train", {}), **epochs}
            file = Path(directory, f"{number}.toml")
            file.write_text(tomli_w.dumps(config))
            found = _run(RunConfig.load(file), asked, talking)
            if os.environ["RANK"] == "0":
                print(json.dumps(found), flush=True)


def _run(settings: RunConfig, asked: Mapping[str, Any], talking: fleet.Talking) -> dict[str, Any]:
    start, measured = time.perf_counter(), "windows" in asked
    meter = _Meter({}, asked.get("links", ()))
    meter.every, meter.warmup = asked.get("steps", 1), asked.get("warmup", 0)
    with settings.trainer(callbacks=[meter] if measured else []) as trainer:
        meter.phases_s = lambda: {**trainer.spans.totals_s, **talking.seconds}
        trainer.fit(settings.dataset("train"))
        metrics = None if measured else trainer.evaluate(settings.dataset("test"))
        summary = trainer.summary(metrics, duration_s=time.perf_counter() - start)
    if not measured or not meter.notes:
        return summary
    notes = meter.notes
    return {
        "windows": fleet.windows(notes),
        "whole": fleet.windows([notes[0], notes[-1]]),
        "summary": summary,
    }


class _Meter(fleet.Meter):
    """Records of whole windows; the last step's comes twice."""

    every, warmup = 1, 0

    def on_metrics(self, record: Mapping[str, Any]) -> None:
        new = not self.notes or self.notes[-1]["step"] < record["step"]
        if new and record["step"] >= self.warmup and record["step"] % self.every == 0:
            super().on_metrics(record)


if __name__ == "__main__":
    _main()
