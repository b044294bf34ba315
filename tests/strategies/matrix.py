"""The matrix of strategies: each variant of a strategy trains each of its workloads once, and many tests look at that run.

A file of ``variants/`` lists the variants of one strategy. Without the file the strategy has no rows in the matrix.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

import pytest
from scenes import play, play_all

from girih.strategies import BY_NAME
from runs import difference, latest

ROWS, DENSE = 2e-5, 3e-5
"""The same gradients are summed in another order (over a key's examples by trainers first, over a step's examples by AllReduce), so
float32 numbers differ in their last bits, and optimizers carry that along. Up to 6e-6 of a column's largest number in a table, and
2.4e-5 of a dense tensor's, were seen."""
MARKS = {"fast": (), "slow": (pytest.mark.slow,), "heavy": (pytest.mark.heavy,)}


@dataclass(frozen=True)
class Variant:
    """A strategy with options, and what its runs promise.

    Attributes:
        trainers: number of processes that train.
        equals: name of the variant with the same rows and parameters.
        exact: they are equal bit for bit, and not only up to the order of sums.
        unequal: why no other run has the same rows and parameters; "" if ``equals`` has.
        staleness: largest possible staleness of a batch.
        continued_by: a variant that goes on from this one's checkpoints with the same results.
        phases: process → spans of it that the timeline has.
        uncounted_bytes: bytes per step of all processes, at most, that the kernel sends and girih does not count: headers, votes, sizes.
        fast, slow, heavy: names of workloads, by the target of the Makefile that trains them first.
    """

    name: str
    strategy: str
    options: tuple[str, ...] = ()
    trainers: int = 2
    equals: str = "local"
    exact: bool = False
    unequal: str = ""
    staleness: int = 0
    continued_by: str = ""
    phases: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    uncounted_bytes: int = 0
    fast: str = ""
    slow: str = ""
    heavy: str = ""

    def __str__(self):
        return self.name

    @property
    def can_interleave(self):
        """Whether trainers exchange rows group by group."""
        return BY_NAME[self.strategy].capabilities.interleaving

    @property
    def reads_ahead(self):
        """Whether loaders and embedding workers read ids ahead of the trainers, which makes rows."""
        return "loader" in BY_NAME[self.strategy].capabilities.scalable_roles


@dataclass(frozen=True)
class Workload:
    """What is trained: a configuration and data, how it is cut short or disturbed.

    Attributes:
        config: name of a file of :func:`scenes.write`.
        overrides: options of the config.
        scene: further keys of a scene.
        trainers: number of processes that train, for variants with several.
        resumes: another workload, whose checkpoint is loaded: the last one, or that of ``from_step``.
        resumes_of: the variant that trained it; "" is the same variant.
        like: the workload of the reference; "" is the same workload.
        tolerance: of rows and of dense parameters.
    """

    config: str = "deepfm"
    overrides: tuple[str, ...] = ()
    scene: Mapping[str, object] = field(default_factory=dict)
    trainers: int | None = None
    resumes: str = ""
    resumes_of: str = ""
    from_step: int | None = None
    like: str = ""
    tolerance: tuple[float, float] = (ROWS, DENSE)


@dataclass(frozen=True)
class Run:
    """A run that was trained.

    Attributes:
        summary: its summary, with all metrics.
        path: its directory.
    """

    summary: Mapping[str, object]
    path: Path

    @cached_property
    def records(self):
        """The lines of ``metrics.jsonl``."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    @property
    def last_step(self):
        """The step of the latest checkpoint."""
        return int(latest(self.path).name.removeprefix("step-"))


def load_variants():
    """Name → variant, of all files of ``variants/``."""
    files = sorted((Path(__file__).parent / "variants").glob("*.py"))
    modules = [import_module(f"variants.{file.stem}") for file in files]
    return {variant.name: variant for module in modules for variant in module.VARIANTS}


VARIANTS = load_variants()


ASKED = set()
"""Workloads that tests ask for."""


def cells(workloads, fits=lambda variant: True):
    """Parameters (variant, workload) of a test, for the names in ``workloads`` and the variants that fit."""
    listed = workloads.split() if isinstance(workloads, str) else list(workloads)
    ASKED.update(listed)
    return [
        pytest.param(variant, workload, marks=marks, id=f"{variant}-{workload}")
        for variant in VARIANTS.values()
        if fits(variant)
        for speed, marks in MARKS.items()
        for workload in getattr(variant, speed).split()
        if workload in listed
    ]


class Runs:
    """Runs over the data of one directory. Each is trained when a test asks for it first.

    Args:
        workloads: name → workload.
    """

    def __init__(self, directory, workloads):
        self.directory, self.workloads, self._runs = directory, workloads, {}

    def of(self, variant, workload):
        """The run of a variant."""
        name = f"{variant}-{workload}"
        if name not in self._runs:
            self._runs[name] = self._train(name, variant, self.workloads[workload])
        return self._runs[name]

    def reference(self, variant, workload):
        """The run that this one equals, and whether it does bit for bit. Without its reference a variant equals ``local``."""
        equal = VARIANTS.get(variant.equals, VARIANTS["local"])
        like = self.workloads[workload].like
        is_exact = variant.exact and equal.name == variant.equals and not like
        return self.of(equal, like or workload), is_exact

    def difference(self, variant, workload):
        """The largest difference of rows and of parameters from the reference, and the largest that is allowed."""
        reference, exact = self.reference(variant, workload)
        run, tolerance = self.of(variant, workload), self.workloads[workload].tolerance
        return difference(reference.path, run.path), (0, 0) if exact else tolerance

    def scene(self, name, variant, workload):
        """What :func:`scenes.play` trains."""
        scene = {
            "name": name,
            "config": workload.config,
            "strategy": variant.strategy,
            "options": variant.options,
            "overrides": workload.overrides,
            **workload.scene,
        }
        if workload.resumes:
            trained_by = VARIANTS[workload.resumes_of] if workload.resumes_of else variant
            before = self.of(trained_by, workload.resumes).path
            step = workload.from_step
            scene["load"] = before if step is None else before / "checkpoints" / f"step-{step:08d}"
        return scene

    def _train(self, name, variant, workload):
        count = variant.trainers if variant.trainers == 1 else workload.trainers or variant.trainers
        return self.train(self.scene(name, variant, workload), count)

    def train(self, scene, num_trainers=1):
        """Trains a scene."""
        name = scene["name"]
        summary = (
            play(self.directory, scene)
            if num_trainers == 1
            else play_all(self.directory, [scene], num_trainers)[name]
        )
        return Run(summary, self.directory / name)
