"""One config file as a whole: every section checked, every part built from it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from girih import config, models, strategies
from girih.checkpoint import CheckpointOptions
from girih.cluster.cluster import Cluster
from girih.cluster.options import ClusterOptions
from girih.comm.group import TrainerGroup
from girih.config.class_record import record_classes
from girih.config.metrics import MetricsOptions
from girih.config.schedule import ScheduleOptions
from girih.config.train import TrainOptions
from girih.data import DataOptions, Dataset, NormalizationStats, open_dataset
from girih.data.negatives import NegativesOptions
from girih.data.options import SplitName
from girih.data.paths import relative_to
from girih.dense.options import OptimizerFactory, optimizer_factory
from girih.errors import ConfigError, nearest
from girih.optim import Adagrad, SparseOptimizer
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost, Facts
from girih.planner.plan import Plan
from girih.publishing.options import PublishOptions
from girih.runs.directory import RunDirectory
from girih.runs.stats import Stats
from girih.schema import Schema
from girih.sparse.access_profile import measure_access
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.strategies import Strategy, measures_of, roles_of
from girih.strategies.strategy import measures_for, spreads_net
from girih.trainer import Trainer
from girih.training.comparing import Offer, offer, offers
from girih.training.dense_cost import count_dense_cost, host_bytes
from girih.training.example import operators_of
from girih.training.placing import PlacedNet, place_net
from girih.training.planning import facts_of
from girih.training.pricing import Calibrated, measured, measured_pass, threads_of
from girih.training.specs import check_metrics, dense_spec, sparse_spec

_LOG = logging.getLogger(__name__)

SECTIONS = (
    "data", "defaults", "features", "tables", "labels", "model", "sparse_optimizer", "first_order_optimizer",
    "dense_optimizer", "checkpoint", "train", "schedule", "strategy", "store", "cluster", "metrics",
    "negatives", "publish",
)  # fmt: skip


def keys_by_section() -> dict[str, list[str]]:
    """The keys of each section that has the same ones in every config; ``[train]`` first."""
    kinds = {
        "train": TrainOptions, "data": DataOptions, "checkpoint": CheckpointOptions, "schedule": ScheduleOptions,
        "store": StoreOptions, "cluster": ClusterOptions, "metrics": MetricsOptions, "publish": PublishOptions,
        "negatives": NegativesOptions,
    }  # fmt: skip
    return {name: [each.name for each in fields(kind)] for name, kind in kinds.items()}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A config file, checked.

    Attributes:
        mapping: as it was written, overrides applied, ``${NAME}`` not expanded: what ``run/config.toml`` repeats.
        model_options: ``[model]``, expanded.
        directory: where relative paths start.
        plan: the plan to hold; None has one made.
        calibrated: the machine, to predict a run's speed by; None predicts none.
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
        overrides: Sequence[str] | Mapping[str, Any] = (),
        strategy: str | None = None,
        run: Path | None = None,
    ) -> RunConfig:
        """Reads and checks a whole config file.

        Args:
            overrides: ``section.key=value`` each, or values by ``section.key``, applied in order.
            strategy: replaces ``[strategy]`` whole, before the overrides.
            run: the directory of the run, whose own file is data.

        Raises:
            ConfigError: anything unknown, missing or of the wrong type; says what, where and how to mend it.
            MissingFileError: no such file.
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

        def section(name: str, kind: Any, default: Any) -> Any:
            return config.build(kind, mapping[name], f"{where}: [{name}]") if name in mapping else default

        if isinstance(
            mapping.get("sparse_optimizer"), Mapping
        ):  # as with [dense_optimizer], the name has a default
            mapping["sparse_optimizer"] = {"name": Adagrad.name} | mapping["sparse_optimizer"]
        directory = path.resolve().parent
        store = section("store", StoreOptions, StoreOptions())
        if store.directory is not None:
            store = replace(store, directory=relative_to(directory, store.directory))
        if store.ssd_dir is not None:
            store = replace(store, ssd_dir=relative_to(directory, store.ssd_dir))
        saves = section("checkpoint", CheckpointOptions, CheckpointOptions())
        if saves.dir is not None:
            saves = replace(saves, dir=relative_to(directory, saves.dir))
        publish = section("publish", PublishOptions, None)
        if publish is not None:
            publish = replace(publish, to=relative_to(directory, publish.to))
        return cls(
            mapping=written,
            where=where,
            directory=directory,
            schema=Schema.from_dict(mapping, where),
            model_options=mapping["model"],
            data=section("data", DataOptions, None),
            train=section("train", TrainOptions, TrainOptions()).with_functions(where, directory),
            checkpoint=saves,
            schedule=section("schedule", ScheduleOptions, ScheduleOptions()),
            store=store,
            strategy=strategies.create(mapping.get("strategy", {}), f"{where}: [strategy]", directory),
            cluster=section("cluster", ClusterOptions, ClusterOptions()),
            negatives=section("negatives", NegativesOptions, None),
            publish=publish,
            metrics=section("metrics", MetricsOptions, MetricsOptions()).below(directory),
            sparse_optimizer=section("sparse_optimizer", SparseOptimizer, Adagrad()),
            first_order_optimizer=section("first_order_optimizer", SparseOptimizer, None),
            dense_optimizer=optimizer_factory(
                mapping.get("dense_optimizer", {}), f"{where}: [dense_optimizer]"
            ),
        )

    def with_absolute_paths(self) -> dict[str, Any]:
        """The configuration as it was written, with paths that hold from anywhere: for ``run/config.toml``."""
        mapping: dict[str, Any] = config.plain(self.mapping)
        for split in ("train", "valid", "test"):
            paths = mapping["data"].get(split)
            if isinstance(paths, str):
                mapping["data"][split] = self._absolute(paths)
            elif paths is not None:
                mapping["data"][split] = [self._absolute(path) for path in paths]
        if "negatives" in mapping:
            items = mapping["negatives"]["items"]
            several = [self._absolute(path) for path in ([items] if isinstance(items, str) else items)]
            mapping["negatives"]["items"] = several[0] if isinstance(items, str) else several
        if ".py:" in self.model_options["name"]:
            mapping["model"]["name"] = self._absolute(mapping["model"]["name"])
        strategy = mapping.get("strategy", {})
        strategy = {"name": strategy} if isinstance(strategy, str) else strategy
        if ".py:" in str(strategy.get("name")):
            mapping["strategy"] = strategy | {"name": self._absolute(strategy["name"])}
        if self.train.metrics:
            names = [each for each in mapping["train"]["metrics"] if isinstance(each, str)]
            mapping["train"]["metrics"] = [self._absolute(each) if ".py:" in each else each for each in names]
        if self.store.directory is not None:
            mapping["store"]["directory"] = self._absolute(mapping["store"]["directory"])
        if self.store.ssd_dir is not None:
            mapping["store"]["ssd_dir"] = self._absolute(mapping["store"]["ssd_dir"])
        if self.metrics.targets is not None:
            mapping["metrics"]["targets"] = self._absolute(mapping["metrics"]["targets"])
        if self.checkpoint.dir is not None:
            mapping["checkpoint"]["dir"] = self._absolute(mapping["checkpoint"]["dir"])
        if self.publish is not None:
            mapping["publish"]["to"] = self._absolute(mapping["publish"]["to"])
        return mapping

    def write(self, run: Path) -> None:
        """Writes a run's ``config.toml``, and records which classes and functions it may name."""
        mapping = self.with_absolute_paths()
        config.write_toml(run / "config.toml", mapping)
        record_classes(run, config.classes_in(mapping, self.where), self.directory)

    def _absolute(self, written: str) -> str:
        """A path as it is written, below the file's directory unless it holds from anywhere once expanded."""
        read = config.expand(written, self.where)
        stays = relative_to(self.directory, read) == read
        return written if stays else os.path.join(self.directory, written)

    def model(self) -> nn.Module:
        """The model, its initial values drawn from the run's seed."""
        torch.manual_seed(self.train.seed)
        options = dict(self.model_options)
        name = options.pop("name")
        return models.create(name, self.schema, options, f"{self.where}: [model]", directory=self.directory)

    def dataset(
        self, split: SplitName, paths: Sequence[str] = (), *, format: str | None = None, **options: Any
    ) -> Dataset:
        """One split of the data, or other files read the same way (their paths start at the current directory).

        Args:
            format: of the other files; None is that of the data.
        """
        try:
            data = open_dataset(
                self.data,
                self.schema,
                split=split,
                paths=list(paths) or None,
                format=format,
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
        """All splits of the data."""
        return {split: self.dataset(split) for split in self.data.splits}

    def rehearse(self, datasets: Mapping[str, Dataset]) -> None:
        """Does all that a run does before its first step, and writes nothing; of several processes, what one can do alone.

        Raises:
            ConfigError, DataError: as the run raises them.
        """
        train, valid = datasets["train"], datasets.get("valid")
        if self.strategy.trainers > 1 or roles_of(self.strategy):
            self.planned()
            NormalizationStats.of(train)
            train.first()
            return
        with tempfile.TemporaryDirectory() as place:
            settings = replace(self, store=self.store.within(Path(place)))
            with settings.trainer() as trainer:
                trainer.rehearse(train, valid)

    def most_examples(self, train: Dataset) -> int | None:
        """The number of examples that the run trains on unless it stops early; None where nobody knows."""
        limits = []
        if train.num_epoch_examples is not None:
            limits.append(train.num_epoch_examples * self.train.epochs)
        if self.train.max_steps is not None:
            limits.append(self.train.max_steps * self.data.batch_size)
        return min(limits, default=None)

    def _items(self, options: NegativesOptions) -> Dataset:
        """The catalogue that negatives are drawn from."""
        names = [feature.name for feature in self.schema.features]
        for name in options.features:
            if name not in names:
                raise ConfigError(f"negatives: features: no feature {name!r}{nearest(name, names)}")
        paths = [options.items] if isinstance(options.items, str) else list(options.items)
        own = self.schema.narrowed(options.features)
        return open_dataset(
            self.data,
            own,
            paths=paths,
            key="negatives.items",
            base_dir=self.directory,
            with_labels=False,
        )

    def sparse(self, model: nn.Module | None = None) -> SparseSpec:
        """Tables, what the model reads of them, and how they are kept."""
        optimizers = self.sparse_optimizer, self.first_order_optimizer
        return sparse_spec(model or self.model(), self.schema, self.train, self.store, *optimizers)

    def planned(self, calibration: Calibration | None = None) -> Plan:
        """The plan of this configuration; see :meth:`planned_net`."""
        return self.planned_net(calibration)[0]

    def measured_pass(self, machines: int = 1) -> DenseCost | None:
        """The cost of a pass of the model on a trainer's share, measured here, for :meth:`planned_net` and :meth:`offer` of many configurations.

        It is the same for all whose model, share and threads are.

        Args:
            machines: that the trainers are spread over.
        """
        model = self.model()
        dense = dense_spec(model, self.schema, self.train, self.dense_optimizer, Stats())
        trainers = self.strategy.trainers
        with threads_of(trainers, machines):
            return measured_pass(self.dataset("train"), self.sparse(model), dense, TrainerGroup(), trainers)

    def planned_net(
        self, calibration: Calibration | None = None, cost: DenseCost | None = None
    ) -> tuple[Plan, PlacedNet | None]:
        """The plan of this configuration, and where operators run; rank 0's part of it is done here: the first batches are measured.

        Args:
            calibration: by which times are predicted, and what is to be chosen by it.
            cost: of :meth:`measured_pass`; None measures it, where it is needed.

        Returns:
            None for the second where all operators run on trainers.
        """
        model = self.model()
        sparse = self.sparse(model)
        dense = dense_spec(model, self.schema, self.train, self.dense_optimizer, Stats())
        try:
            check_metrics(self.train, self.schema)
            facts = facts_of(sparse, dense, self.strategy.trainers, self.schedule)
            data = self.dataset("train")
            profile = measure_access(data, sparse, facts.num_trainers)
            facts = replace(facts, batch_size=data.batch_size, profile=profile, free_bytes=host_bytes())
            if "dense_cost" in measures_for(self.schedule):
                counted = count_dense_cost(data, sparse, dense, facts, facts.num_trainers)
                facts = replace(facts, dense_cost=counted)
            if calibration is not None:
                facts = replace(facts, links=calibration.links, calibration=calibration)
                if "graph" in measures_of(self.strategy):
                    facts = replace(facts, graph=operators_of(sparse, dense, self.strategy))
            plan = self.strategy.plan(facts)
            if not spreads_net(self.strategy):
                return plan, None
            if calibration is not None:
                with threads_of(facts.num_trainers, calibration.machines):
                    facts = measured(facts, calibration, data, sparse, dense, TrainerGroup(), cost)
            placed = place_net(plan, self.strategy, facts, sparse, dense)
            return placed.plan, placed
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def offers(self, calibration: Calibration, placed: PlacedNet | None = None) -> tuple[Offer, ...]:
        """This configuration under every strategy, with the speeds that are predicted for this machine; passes of the model are measured.

        Args:
            placed: where operators run, as :meth:`planned_net` has found; else that is decided anew.
        """
        return offers(self.strategy, self._facts_by(calibration, placed))

    def offer(
        self, calibration: Calibration, placed: PlacedNet | None = None, cost: DenseCost | None = None
    ) -> Offer:
        """The first of :meth:`offers`: this configuration as it is; ``cost`` as of :meth:`planned_net`."""
        return offer(self.strategy, self._facts_by(calibration, placed, cost), own=True)

    def _facts_by(
        self, calibration: Calibration, placed: PlacedNet | None, cost: DenseCost | None = None
    ) -> Callable[[Strategy], Facts]:
        """Facts for a strategy, with all that a speed is predicted from."""
        model = self.model()
        sparse, data = self.sparse(model), self.dataset("train")
        dense = dense_spec(model, self.schema, self.train, self.dense_optimizer, Stats())
        known: dict[int, Facts] = {}

        def facts_for(strategy: Strategy) -> Facts:
            count = strategy.trainers
            if count not in known:
                facts = replace(facts_of(sparse, dense, count, self.schedule), free_bytes=host_bytes())
                with threads_of(count, calibration.machines):
                    own = cost if count == self.strategy.trainers else None
                    known[count] = measured(facts, calibration, data, sparse, dense, TrainerGroup(), own)
            facts = replace(known[count], links=calibration.links)
            if strategy is self.strategy and placed is not None:
                net = placed.facts
                return replace(facts, graph=net.graph, tagging=net.tagging, wire=net.wire)
            if spreads_net(strategy):
                return replace(facts, graph=operators_of(sparse, dense, strategy))
            return facts

        return facts_for

    def trainer(
        self,
        *,
        run: Path | RunDirectory | None = None,
        callbacks: Sequence[Any] = (),
        cluster: Cluster | None = None,
    ) -> Trainer:
        """The trainer of this configuration; without a ``run`` it writes nothing."""
        model, trains = self.model(), run is not None or cluster is not None
        try:
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
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None
