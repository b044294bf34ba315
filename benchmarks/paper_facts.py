"""Facts of a run that nobody has the data or the machines for: ids by their law, passes by their operations.

Nothing is timed and nothing is drawn, so equal tasks have equal facts on every machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih import strategies
from girih.app.run_config import RunConfig
from girih.config.sections import write_toml
from girih.dense.half import DenseSpec
from girih.lifecycle.planning import facts_of
from girih.planner.calibration import Calibration, Link
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.operators import OperatorGraph
from girih.planner.traffic import FLOAT_BYTES, FLOPS_PER_WEIGHT, NOMINAL
from girih.sparse.spec import SparseSpec
from girih.strategies import Strategy

NCCL_LATENCY_S = 10e-6
"""Seconds of a message of NCCL between two GPUs. Nominal."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
COPIES = 3.0
"""Memory of parameters, a gradient and the state of Adagrad, divided by that of the parameters."""


@dataclass(frozen=True)
class Law:
    """The frequencies of a feature's ids: a Zipf law over ``ids``, and a part that is new each time. Exponent 0: all equally often."""

    ids: float
    exponent: float = 0.0
    new: float = 0.0

    def unique(self, draws: float) -> float:
        """The expected number of different ids: Σ 1 − (1 − p)ⁿ."""
        old = draws * (1 - self.new)
        if not self.exponent:
            known = -self.ids * np.expm1(-old / self.ids)
        else:
            known = -np.expm1(old * np.log1p(-_shares(int(self.ids), self.exponent))).sum()
        return float(self.new * draws + known)


@cache
def _shares(ids: int, exponent: float) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.arange(1, ids + 1.0) ** -exponent
    return weights / weights.sum()


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        config: the sections of a config, without ``[data]``.
        law: of the ids of each feature. ids_each: feature → its ids in an example, if there is not one.
    """

    config: Mapping[str, Any]
    law: Law
    ids_each: Mapping[str, float]
    _traced: dict[int, OperatorGraph] = field(default_factory=dict, repr=False)

    @cached_property
    def halves(self) -> tuple[SparseSpec, DenseSpec]:
        """The halves of one trainer."""
        return self._settings.halves()

    @cached_property
    def _settings(self) -> RunConfig:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "config.toml"
            write_toml(file, {"data": {"train": "none.parquet", "batch_size": 1}, **self.config})
            return RunConfig.load(file)

    def facts(
        self, strategy: Strategy, trainers: int, share: int, calibration: Calibration, threads: int,
        cost: DenseCost | None = None, **others: Any,
    ) -> Facts:  # fmt: skip
        """The facts of a run.

        Args:
            share: examples of a trainer in a step. threads: of a trainer.
            cost: of a pass; None takes the operations of all weights at the calibrated speed.
        """
        sparse, dense = self.halves
        facts = facts_of(sparse, dense, trainers, self._settings.schedule)
        made = replace(
            facts, batch_size=share * trainers, profile=self._profile(trainers, share), calibration=calibration,
            links=calibration.links, threads=threads, **others,
        )  # fmt: skip
        made = replace(made, dense_cost=cost or cpu_cost(made))
        return replace(made, graph=self._operators(strategy)) if strategy.places_operators else made

    @property
    def buckets(self) -> int:
        """Number of buckets of gradients, from the last parameter on. Each begins with a tensor and ends once it has 1 MB."""
        sizes = [each.nbytes for each in self.halves[1].module.parameters() if each.requires_grad]
        buckets, size = 1, 0
        for each in reversed(sizes):
            if size >= BUCKET_BYTES:
                buckets, size = buckets + 1, 0
            size += each
        return buckets

    def _operators(self, strategy: Strategy) -> OperatorGraph:
        servers = dict(asdict(strategy))["servers_per_group"]  # layers are cut for them
        if servers not in self._traced:
            self._traced[servers] = strategy.operator_graph(*self.halves)
        return self._traced[servers]

    def _profile(self, trainers: int, share: int) -> AccessProfile:
        sparse, _ = self.halves
        widths = {table.name: group.spec.dim for group in sparse.groups() for table in group.spec.tables}
        each: dict[str, float] = dict.fromkeys(widths, 0.0)
        for feature in sparse.schema.sparse:
            each[feature.table_name] += self.ids_each.get(feature.name, 1.0)
        known = {
            count: (self.law.unique(count * share * trainers), self.law.unique(count * share))
            for count in {*each.values()}
        }
        ids = {name: count * share * trainers for name, count in each.items()}
        return AccessProfile(
            rows={name: known[count][0] for name, count in each.items()},
            rows_of_share={name: known[count][1] for name, count in each.items()},
            widths=widths,
            ids=sum(ids.values()),
            ids_of_tables=ids,
        )


def create(options: Mapping[str, Any]) -> Strategy:
    """A strategy by its options."""
    return strategies.create(dict(options), "[strategy]")


def cpu_cost(facts: Facts) -> DenseCost:
    """A pass with all threads at the calibrated speed of products, and an update at the nominal speed of memory."""
    if facts.calibration is None or facts.calibration.work is None:
        raise ValueError("a calibration with the work of steps is needed")
    weights, speed = facts.model.num_parameters, facts.calibration.work.flops_per_s
    moved_s = 2 * COPIES * FLOAT_BYTES * weights / NOMINAL.memory_bytes_per_s
    return DenseCost(
        bytes_per_example=0.0, memory_bytes=1e15, pass_s=NOMINAL.pass_s,
        example_s=FLOPS_PER_WEIGHT * weights / speed / facts.threads, update_s=moved_s / facts.threads, parameter_copies=COPIES,
    )  # fmt: skip


GPU_COST = DenseCost(bytes_per_example=0.0, memory_bytes=1e15, pass_s=NOMINAL.pass_s)
"""Stands for a pass that moves to a GPU. The update is in the time of the pass."""


def nccl(calibration: Calibration, gbit: float) -> Calibration:
    """The calibration with collectives of GPUs: no cores, the rate of the link, and a nominal latency."""
    link = Link(latency_s=NCCL_LATENCY_S, bytes_per_s=gbit * 1e9 / 8)
    return replace(calibration, links={**calibration.links, **dict.fromkeys(COLLECTIVES, link)})


def one_id(names: Sequence[str], dim: int, **options: Any) -> list[dict[str, Any]]:
    """Categorical features of one dim."""
    return [{"name": name, "kind": "categorical", "dim": dim, **options} for name in names]
