"""One config file as a whole: checks every section, and builds every part from it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from girih import config, models, strategies
from girih.checkpoint import CheckpointOptions
from girih.cluster.cluster import Cluster
from girih.cluster.options import ClusterOptions
from girih.comm.group import TrainerGroup
from girih.config.train import MetricsOptions, ScheduleOptions, TrainOptions
from girih.config.user_code import record_classes
from girih.data import DataOptions, Dataset, open_dataset
from girih.data.negatives import NegativesOptions
from girih.data.options import DataPaths, SplitName
from girih.data.paths import relative_to
from girih.dense.half import DenseSpec
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.errors import ConfigError, nearest
from girih.lifecycle.dense_cost import count_dense_cost, host_bytes
from girih.lifecycle.planning import (
    Calibrated,
    PlacedNet,
    facts_of,
    joined,
    measure_access,
    measured,
    place_net,
    threads_of,
)
from girih.optim import Adagrad, SparseOptimizer
from girih.planner.calibration import Calibration
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.publishing.log import PublishOptions
from girih.report.comparing import flat
from girih.report.progress import Progress
from girih.report.record import masked
from girih.runs.callbacks import Callback, Record
from girih.runs.directory import RunDirectory
from girih.schema import Schema
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.strategies import Strategy
from girih.strategies.strategy import facts_for_schedule
from girih.telemetry.stats import Stats
from girih.trainer import Trainer
from girih.training.specs import check_metrics, dense_spec, sparse_spec

_LOG = logging.getLogger(__name__)

KINDS = {
    "train": TrainOptions, "data": DataOptions, "checkpoint": CheckpointOptions, "schedule": ScheduleOptions,
    "store": StoreOptions, "cluster": ClusterOptions, "metrics": MetricsOptions, "publish": PublishOptions,
    "negatives": NegativesOptions,
}  # fmt: skip
"""Section → its options, for sections that have the same keys in every config."""
SECTIONS = (
    *KINDS, "defaults", "features", "tables", "labels", "model", "sparse_optimizer", "first_order_optimizer",
    "dense_optimizer", "strategy",
)  # fmt: skip
OPTIONAL = ("publish", "negatives")
"""Sections that are optional: without the section, the feature is off."""
PATHS = {
    "data": ("train", "valid", "test"), "negatives": ("items",), "store": ("directory", "ssd_dir"),
    "checkpoint": ("dir",), "publish": ("to",), "metrics": ("targets",),
}  # fmt: skip
"""Section → keys with a path, or a list of paths, relative to the file's directory."""


def keys_by_section() -> dict[str, list[str]]:
    """Returns the keys of each section that has the same keys in every config; ``[train]`` first."""
    return {name: [each.name for each in fields(kind)] for name, kind in KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class CheckedConfig:
    """A checked config file: its options, model and data.

    Attributes:
        mapping: the file as written, with overrides, for ``run/config.toml``. ``${NAME}`` is not expanded.
        model_options: the section ``[model]``, with ``${NAME}`` expanded.
        directory: the base of relative paths.
        plan: the plan to use; None makes a plan.
        calibrated: the calibration to predict the run's speed from; None predicts no speed.
    """

    mapping: Mapping[str, Any]
    where: str
    directory: Path
    schema: Schema
    model_options: Mapping[str, Any]
    data: DataOptions
    train: TrainOptions
    checkpoint: CheckpointOptions
    schedule: ScheduleOptions
    store: StoreOptions
    strategy: Strategy
    cluster: ClusterOptions
    metrics: MetricsOptions
    sparse_optimizer: SparseOptimizer
    first_order_optimizer: SparseOptimizer | None
    dense_optimizer: OptimizerFactory
    negatives: NegativesOptions | None = None
    publish: PublishOptions | None = None
    plan: Plan | None = None
    calibrated: Calibrated | None = None
    _cuts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        overrides: Sequence[str] | Mapping[str, object] = (),
        strategy: str | None = None,
        run: Path | None = None,
    ) -> Self:
        """Reads and checks a whole config file.

        Args:
            overrides: each ``section.key=value``, or values by ``section.key``, applied in order.
            strategy: replaces all of ``[strategy]``, before the overrides.
            run: the directory of the run. Files in it count as data, not as code.

        Raises:
            ConfigError: an unknown or missing key, or a wrong type; says what, where and how to fix it.
            MissingFileError: the file does not exist.
        """
        where = str(path)
        written = config.with_overrides(path, overrides, strategy, run)
        if dropped := config.dropped_options(config.read_toml(path, expanded=False), written):
            name, options = written["model"].get("name"), ", ".join(dropped)
            _LOG.warning("%s: [model] %s: dropped %s of the old model", where, name, options)
        mapping = config.expand(written, where)
        for name in mapping:
            if name not in SECTIONS:
                raise ConfigError(f"{where}: unknown section [{name}]{nearest(name, SECTIONS)}")
        if "data" not in mapping:
            raise ConfigError(f"{where}: section [data] is missing")
        if not isinstance(mapping.get("model", {}), Mapping) or "name" not in mapping.get("model", {}):
            raise ConfigError(f"{where}: section [model] needs a name{nearest('', models.BY_NAME)}")

        directory = path.resolve().parent

        def section(name: str, kind: Any, default: Any) -> Any:
            return config.build(kind, mapping[name], f"{where}: [{name}]") if name in mapping else default

        built = {
            name: section(name, kind, None if name in OPTIONAL or name in mapping else kind())
            for name, kind in KINDS.items()
        }
        for name in ("store", "checkpoint", "publish"):
            paths = {key: getattr(built[name], key, None) for key in PATHS[name]}
            there = {key: relative_to(directory, value) for key, value in paths.items() if value is not None}
            built[name] = replace(built[name], **there) if there else built[name]
        optimizer = mapping.get("sparse_optimizer")
        if isinstance(optimizer, Mapping):  # the name has a default, the same as in [dense_optimizer]
            mapping["sparse_optimizer"] = {"name": Adagrad.name, **optimizer}
        built["train"] = built["train"].with_functions(where, directory)
        built["metrics"] = built["metrics"].below(directory)
        return cls(
            mapping=written,
            where=where,
            directory=directory,
            schema=Schema.from_dict(mapping, where),
            model_options=mapping["model"],
            strategy=strategies.create(mapping.get("strategy", {}), f"{where}: [strategy]", directory),
            sparse_optimizer=section("sparse_optimizer", SparseOptimizer, Adagrad()),
            first_order_optimizer=section("first_order_optimizer", SparseOptimizer, None),
            dense_optimizer=optimizer_factory(
                mapping.get("dense_optimizer", {}), f"{where}: [dense_optimizer]"
            ),
            **built,
        )

    def with_absolute_paths(self) -> dict[str, object]:
        """Returns the configuration as written, but with absolute paths, for ``run/config.toml``."""
        mapping: dict[str, Any] = config.plain(self.mapping)
        for section in PATHS.keys() & mapping.keys():
            options = mapping[section]
            for key in PATHS[section]:
                if isinstance(written := options.get(key), str):
                    options[key] = self._absolute(written)
                elif written is not None:
                    options[key] = [self._absolute(path) for path in written]
        if ".py:" in self.model_options["name"]:
            mapping["model"]["name"] = self._absolute(mapping["model"]["name"])
        strategy = mapping.get("strategy", {})
        strategy = {"name": strategy} if isinstance(strategy, str) else strategy
        if ".py:" in str(strategy.get("name")):
            mapping["strategy"] = strategy | {"name": self._absolute(strategy["name"])}
        if self.train.metrics:
            names = [name for name in mapping["train"]["metrics"] if isinstance(name, str)]
            mapping["train"]["metrics"] = [self._absolute(name) if ".py:" in name else name for name in names]
        return mapping

    def write(self, run: Path) -> None:
        """Writes a run's ``config.toml``, and records the classes and functions that this file may name."""
        mapping = self.with_absolute_paths()
        config.write_toml(run / "config.toml", mapping)
        record_classes(run, config.classes_in(mapping, self.where), self.directory)

    def _absolute(self, written: str) -> str:
        """Joins a written path to the file's directory, unless it is absolute after expansion."""
        read = config.expand(written, self.where)
        stays = relative_to(self.directory, read) == read
        return written if stays else os.path.join(self.directory, written)

    def model(self) -> nn.Module:
        """Builds the model, with initial values from the run's seed."""
        torch.manual_seed(self.train.seed)
        options = dict(self.model_options)
        name = options.pop("name")
        return models.create(name, self.schema, options, f"{self.where}: [model]", directory=self.directory)

    def dataset(
        self, split: SplitName, paths: Sequence[str] = (), *, format: str | None = None, **options: Any
    ) -> Dataset:
        """Returns one split of the data, or other files read in the same way, with paths relative to the current directory.

        Args:
            format: the format of the other files; None means the format of the data.
        """
        try:
            data = open_dataset(
                self.data,
                self.schema,
                split=split,
                files=DataPaths(paths=list(paths), format=format) if paths else None,
                base_dir=None if paths else self.directory,
                seed=self.train.seed,
                cuts=self._cuts,
                **options,
            )
            if self.negatives is None or split != "train" or paths:
                return data
            return data.with_negatives(self._items(self.negatives), self.negatives.per_step)
        except ConfigError as error:
            if paths:
                raise
            raise ConfigError(f"{self.where}: {error}") from None

    def datasets(self) -> dict[str, Dataset]:
        """Returns all splits of the data."""
        return {split: self.dataset(split) for split in self.data.splits}

    def most_examples(self, train: Dataset) -> int | None:
        """Returns the number of examples that the run trains on unless it stops early; None if unknown."""
        limits = []
        if train.num_epoch_examples is not None:
            limits.append(train.num_epoch_examples * self.train.epochs)
        if self.train.max_steps is not None:
            limits.append(self.train.max_steps * self.data.batch_size)
        return min(limits, default=None)

    def _items(self, options: NegativesOptions) -> Dataset:
        """Returns the catalogue from which negatives are drawn."""
        names = self.schema.names
        for name in options.features:
            if name not in names:
                raise ConfigError(f"negatives: features: no feature {name!r}{nearest(name, names)}")
        paths = [options.items] if isinstance(options.items, str) else list(options.items)
        schema = self.schema.narrowed(options.features)
        return open_dataset(
            self.data,
            schema,
            files=DataPaths(paths=paths, key="negatives.items"),
            base_dir=self.directory,
            with_labels=False,
        )

    def sparse(self, model: nn.Module | None = None) -> SparseSpec:
        """Returns the spec of the sparse half: tables, the model's needs, and storage."""
        optimizers = self.sparse_optimizer, self.first_order_optimizer
        return sparse_spec(model or self.model(), self.schema, self.train, self.store, *optimizers)


class RunConfig(CheckedConfig):
    """A checked config file. Its methods plan a run, predict its speed under every strategy, and make its trainer."""

    def rehearse(self, datasets: Mapping[str, Dataset]) -> None:
        """Does everything that a run does before its first step, and computes the loss of the first batch. Writes nothing.

        A strategy with several processes is planned, and ``local`` computes the loss.

        Raises:
            ConfigError, DataError: the same as in a run.
        """
        settings = self
        if self.strategy.trainers > 1 or self.strategy.roles:
            self.planned()
            settings = replace(self, strategy=strategies.create("local", ""), schedule=ScheduleOptions())
        with (
            tempfile.TemporaryDirectory() as place,
            replace(settings, store=self.store.within(Path(place))).trainer() as trainer,
        ):
            trainer.rehearse(datasets["train"], datasets.get("valid"))

    def planned(self, calibration: Calibration | None = None) -> Plan:
        """Returns the plan of this configuration; see :meth:`planned_net`."""
        return self.planned_net(calibration)[0]

    def halves(self) -> tuple[SparseSpec, DenseSpec]:
        """Returns the specifications of one trainer's halves."""
        model = self.model()
        return self.sparse(model), dense_spec(model, self.schema, self.train, self.dense_optimizer, Stats())

    def planned_net(self, calibration: Calibration | None = None) -> tuple[Plan, PlacedNet | None]:
        """Returns the plan and the placed operators. Measures the first batches, as rank 0 of a run would do.

        Args:
            calibration: predicts times, and decides options that depend on a calibration.

        Returns:
            The second value is None if all operators run on trainers.
        """
        sparse, dense = self.halves()
        with config.located(self.where):
            check_metrics(self.train, self.schema)
            facts = facts_of(sparse, dense, self.strategy.trainers, self.schedule)
            data = self.dataset("train")
            profile = measure_access(data, sparse, facts.num_trainers)
            facts = replace(facts, batch_size=data.batch_size, profile=profile, free_bytes=host_bytes())
            if "dense_cost" in facts_for_schedule(self.schedule):
                counted = count_dense_cost(data, sparse, dense, facts, facts.num_trainers)
                facts = replace(facts, dense_cost=counted)
            if calibration is not None:
                facts = replace(facts, links=calibration.links, calibration=calibration)
                if "graph" in self.strategy.required_facts:
                    facts = replace(facts, graph=self.strategy.operator_graph(sparse, dense))
            plan = self.strategy.plan(facts)
            if not self.strategy.places_operators:
                return plan, None
            if calibration is not None:
                with threads_of(facts.num_trainers, calibration.machines):
                    facts = measured(facts, calibration, data, sparse, dense, TrainerGroup())
            placed = place_net(plan, self.strategy, facts, sparse, dense)
            return placed.plan, placed

    def facts_by(
        self, calibration: Calibration, placed: PlacedNet | None = None
    ) -> Callable[[Strategy], Facts]:
        """Returns the facts for a strategy, with all inputs of a predicted speed. Measures passes of the model.

        Args:
            placed: the placed operators from :meth:`planned_net`; None places them again.
        """
        (sparse, dense), data = self.halves(), self.dataset("train")
        known: dict[int, Facts] = {}

        def facts_for(strategy: Strategy) -> Facts:
            count = strategy.trainers
            if count not in known:
                facts = replace(facts_of(sparse, dense, count, self.schedule), free_bytes=host_bytes())
                with threads_of(count, calibration.machines):
                    known[count] = measured(facts, calibration, data, sparse, dense, TrainerGroup())
            facts = replace(known[count], links=calibration.links)
            if strategy is self.strategy and placed is not None:
                net = placed.facts
                return replace(facts, graph=net.graph, tagging=net.tagging, wire=net.wire)
            if strategy.places_operators:
                return replace(facts, graph=strategy.operator_graph(sparse, dense))
            return facts

        return facts_for

    def trainer(
        self,
        *,
        run: Path | RunDirectory | None = None,
        callbacks: Sequence[Callback] = (),
        cluster: Cluster | None = None,
    ) -> Trainer:
        """Makes the trainer of this configuration. Without a ``run``, the trainer writes nothing."""
        model, trains = self.model(), run is not None or cluster is not None
        with config.located(self.where):
            return Trainer(
                model,
                sparse_optimizer=self.sparse_optimizer,
                dense_optimizer=self.dense_optimizer,
                first_order_optimizer=self.first_order_optimizer,
                strategy=self.strategy,
                schema=self.schema,
                schedule=self.schedule,
                options=self.train if run is not None else replace(self.train, tensorboard=False),
                store=self.store,
                checkpoints=self.checkpoint if run is not None else replace(self.checkpoint, dir=None),
                run=run,
                callbacks=callbacks,
                cluster=cluster,
                plan=self.plan,
                calibrated=self.calibrated,
                where=str(self.where),
                metrics=self.metrics if trains else None,
                publish=self.publish if trains else None,
            )

    def trainer_with_data(
        self, run: Path | None, callbacks: Sequence[Callback], *, progress: bool
    ) -> Trainer:
        """Makes the trainer of :meth:`girih.Trainer.from_config`, with its data."""
        data = self.datasets()
        bar = Progress(self.most_examples(data["train"]))
        callbacks = [*callbacks, bar] if progress else list(callbacks)
        if run is not None:
            callbacks = [*callbacks, _KeepsConfig(run, self)]
        cluster = joined(self.strategy, self.cluster)
        trainer = self.trainer(run=run, callbacks=callbacks, cluster=cluster)
        trainer.data = data
        for callback in callbacks if cluster.ranks.first else ():
            if isinstance(callback, Callback):
                callback.on_config(flat(masked(self.with_absolute_paths())))
        if progress and cluster.ranks.first:
            trainer.showing = bar
        return trainer


@dataclass
class _KeepsConfig(Callback):
    """Writes a run's ``config.toml`` once, when the run begins and owns its directory.

    A scaled run continues with a new plan, but does not write the file again. The file already has the new numbers.
    """

    run: Path
    settings: CheckedConfig
    is_written: bool = field(default=False, init=False)

    def on_plan(self, plan: Record) -> None:
        """See :class:`Callback`."""
        if not self.is_written:
            self.settings.write(self.run)
            self.is_written = True
