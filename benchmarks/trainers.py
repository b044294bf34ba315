"""Several trainers that do one run after another, so that many short runs pay for their processes once.

As a program, this file is one of the trainers; the runs come as JSON in a file that it is told, and the first trainer
prints what it found of each as a line of JSON. Roles beside the trainers are started anew for each run.
"""

from __future__ import annotations

import dataclasses
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
import phases
import tomli_w
import torch

from girih.app.run_config import RunConfig
from girih.cluster.cluster import Cluster
from girih.cluster.roles import HostSpec, RoleName, host_of


def train_all(
    asked: Sequence[Mapping[str, Any]], trainers: int, hosts: Mapping[str, HostSpec] | None = None
) -> Iterator[dict[str, Any]]:
    """Trains runs in turn; yields what was found of each as soon as it is there.

    Args:
        asked: of each run ``config`` (content of a config file) and ``strategy``; it is trained and evaluated. One that
            also has ``warmup``, ``steps`` and ``windows``, and maybe ``links`` and ``more_steps`` (which come after all
            windows), is measured as by ``fleet.measure``, and tells the ``trails`` of all trainers (see ``phases``).
        hosts: where processes live, all of them or none.

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
        specs = {title: dataclasses.asdict(each) for title, each in hosts.items()}
        (folder / "asked.json").write_text(json.dumps({"runs": list(asked), "hosts": specs}))
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
    recorder = phases.Recorder()
    told = json.loads(Path(sys.argv[1]).read_text())
    hosts = {
        title: HostSpec(**{**spec, "command": tuple(spec["command"])})
        for title, spec in told["hosts"].items()
    }
    own = host_of(hosts, RoleName.TRAINER, int(os.environ["RANK"]))
    with tempfile.TemporaryDirectory() as directory:
        for number, asked in enumerate(told["runs"]):
            config = {**asked["config"], "strategy": asked["strategy"], "cluster": {"bind": own.host}}
            if "windows" in asked:
                steps = asked["warmup"] + asked["steps"] * asked["windows"] + asked.get("more_steps", 0)
                epochs = {"epochs": 10_000, "max_steps": steps, "log_every_steps": asked["steps"]}
                config["train"] = {**config.get("train", {}), **epochs}
            file = Path(directory, f"{number}.toml")
            file.write_text(tomli_w.dumps(config))
            settings = RunConfig.load(file)
            cluster = Cluster.join(settings.strategy.trainers, options=settings.cluster)
            cluster._hosts = hosts  # where this trainer starts roles, if it does
            found = _run(settings, cluster, asked, recorder)
            if cluster.ranks.first:
                print(json.dumps(found), flush=True)


def _run(
    settings: RunConfig, cluster: Cluster, asked: Mapping[str, Any], recorder: phases.Recorder
) -> dict[str, Any]:
    start, measured = time.perf_counter(), "windows" in asked
    every, warmup = asked.get("steps", 1), asked.get("warmup", 0)
    meter = fleet.Meter(cluster, asked.get("links", ()), every=every, warmup=warmup)
    recorder.take(())
    with settings.trainer(callbacks=[meter] if measured else [], cluster=cluster) as trainer:
        trainer.fit(settings.dataset("train"))
        trails = cluster.ranks.gather(recorder.take(trainer.spans.events()))
        metrics = None if measured else trainer.evaluate(settings.dataset("test"))
        summary = trainer.summary(metrics, duration_s=time.perf_counter() - start)
    if not measured or not cluster.ranks.first:
        return summary
    notes = meter.notes[: 1 + asked["windows"]]
    return {
        "windows": fleet.windows(notes),
        "whole": fleet.windows([notes[0], notes[-1]]),
        "moments_s": [note["time_s"] for note in notes],
        "trails": trails,
        "summary": summary,
    }


if __name__ == "__main__":
    _main()
