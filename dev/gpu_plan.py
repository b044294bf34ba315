"""The stages of ``make gpu``, the most valuable first, and their time limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

TOTAL_S = 570


@dataclass(frozen=True)
class Stage:
    """One group of checks.

    Attributes:
        shows: what a pass is evidence for.
        commands: arguments of GPU_PYTHON, run in turn. ``{out}`` is the output folder and ``{code}`` the code's hash.
        interpreted: the same without a GPU, under GPU_INTERPRET; None if they need no change.
        tests: whether the commands are pytest's.
    """

    name: str
    limit_s: int
    shows: str
    commands: Sequence[Sequence[str]]
    interpreted: Sequence[Sequence[str]] | None = None
    needs_gpu: bool = True
    tests: bool = False


def pytest_stage(name: str, limit_s: int, shows: str, *options: str, needs_gpu: bool = True) -> Stage:
    """A stage that runs tests. Warnings are no errors, because another version of torch warns differently."""
    num_processes = min(8, len(os.sched_getaffinity(0)))
    marks = "gpu and not heavy" if needs_gpu else "not gpu and not slow and not heavy"
    plugins = ("-p", "gpu_results", "-p", "no:cacheprovider", "-W", "default")
    command = ("-m", "pytest", "-n", str(num_processes), "-m", marks, *plugins, *options)
    return Stage(name, limit_s, shows, [command], needs_gpu=needs_gpu, tests=True)


def bench_stage(name: str, limit_s: int, shows: str, *parts: str) -> Stage:
    """A stage that measures some parts of ``girih bench gpu``."""
    results = ("--json", "{out}/gpu.json", "--resume", "{code}")
    command = ("-m", "girih", "bench", "gpu", *results, "--parts", ",".join(parts))
    return Stage(name, limit_s, shows, [command], interpreted=[(*command, "--quick")])


TRAIN = ("-m", "girih", "bench", "gpu_train", "--json", "{out}/gpu-train.json")
DETERMINISM = ("tests/sparse/gpu/test_gpu_repeatable.py", "tests/sparse/gpu/test_gpu_streams.py")
STAGES = (
    Stage("software", 35, "the versions and the GPU, and CPU kernels that compile with them",
          [("-m", "girih", "info"), ("-m", "girih", "compile", "--all")], needs_gpu=False),
    pytest_stage("cpu", 20, "CPU kernels, which GPU tests compare with, are right with these versions",
          *(f"tests/kernels/test_{name}.py" for name in ("hashing", "initial", "rounding")),
          needs_gpu=False),
    pytest_stage("kernels", 30, "compiled kernels equal the interpreted ones", "tests/kernels/gpu"),
    pytest_stage("determinism", 30, "no races, and no stream reads memory too early or too late",
          *DETERMINISM),
    bench_stage("sparse", 55, "step time and its kernels, share of the copy rate, deduplication, lookup", "sparse", "kernels", "keys"),
    pytest_stage("rows", 80, "streams, saves, tiers, groups, autograd", *(word for file in DETERMINISM for word in ("--ignore", file)),
          "tests/store/gpu", "tests/sparse/gpu", "tests/nn/gpu"),
    pytest_stage("late", 50, "no step waits for the GPU, counted in a trace",
          "tests/strategies/gpu/test_gpu_training.py", "tests/strategies/gpu/test_gpu_late.py"),
    bench_stage("models", 50, "samples/s of whole models compared with their dense halves", "models"),
    bench_stage("tiers", 60, "step time with a tenth of the rows in GPU memory", "tiers"),
    Stage("train", 70, "girih train on cuda reaches the AUC of a CPU", [TRAIN], interpreted=[(*TRAIN, "--quick")]),
    bench_stage("peers", 45, "step time of other tables with the same ids", "peers"),
    pytest_stage("others", 45, "all other GPU tests", "tests/comm/gpu", "tests/dense/gpu", "tests/training/gpu", "tests/strategies/gpu",
          "--ignore", "tests/strategies/gpu/test_gpu_training.py", "--ignore", "tests/strategies/gpu/test_gpu_late.py"),
)  # fmt: skip
