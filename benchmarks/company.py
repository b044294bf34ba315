"""Several trainers that train one run after another, so that many short runs pay for their processes once.

As a program, this file is one of the trainers; the runs come as JSON on its standard input, and the first trainer
prints what it found of each as a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch._C._distributed_c10d import TCPStore

from girih.runconfig import RunConfig

HOST = "127.0.0.1"


def train_all(asked: Sequence[Mapping[str, Any]], trainers: int) -> Iterator[dict[str, Any]]:
    """Trains runs in turn; yields each one's summary as soon as it is there.

    Args:
        asked: of each run ``config`` (content of a config file) and ``strategy``.

    Raises:
        RuntimeError: a trainer failed; what the first one said.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    told = json.dumps(list(asked))
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        started = []
        for rank in range(trainers):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(trainers),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.DEVNULL if rank else errors,
            )  # fmt: skip
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdin is not None
            process.stdin.write(told)
            process.stdin.close()
        assert started[0].stdout is not None
        num_found = 0
        for line in started[0].stdout:
            num_found += 1
            yield json.loads(line)
        if num_found < len(asked):
            errors.seek(0)
            raise RuntimeError(f"run {num_found + 1} of {len(asked)}: {errors.read()[-2000:]}")
        for process in started:
            process.wait()


def _main() -> None:
    first = os.environ["RANK"] == "0"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for number, asked in enumerate(json.load(sys.stdin)):
            start = time.perf_counter()
            file = Path(directory, f"{number}.toml")
            file.write_text(tomli_w.dumps({**asked["config"], "strategy": asked["strategy"]}))
            settings = RunConfig.load(file)
            with settings.trainer() as trainer:
                trainer.fit(settings.dataset("train"))
                metrics = trainer.evaluate(settings.dataset("test"))
                found = trainer.summary(metrics, duration_s=time.perf_counter() - start)
            if first:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main()
