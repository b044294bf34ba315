"""The state of a run that a checkpoint holds besides rows, parameters and the plan.

A run resumes from this state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from girih.checkpoint.description import ModelDescription
from girih.checkpoint.load import LoadedCheckpoint, believed
from girih.checkpoint.save import Content, describe_model
from girih.checkpoint.state import RunState
from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import Dataset, NormalizationStats
from girih.dense.half import DenseSpec
from girih.errors import ConfigError
from girih.lifecycle.inheriting import Inherited, moments_of
from girih.planner.plan import Plan
from girih.publishing.segment import SegmentVersion
from girih.schema import Schema
from girih.training.evaluation import ProgressiveValidation
from girih.training.learning_rate import LearningRate
from girih.training.session import Session


class Normalizing:
    """The normalization of a run, the same on all trainers.

    Attributes:
        stats: None until measured or restored.
    """

    def __init__(self, schema: Schema, ranks: TrainerGroup) -> None:
        self.stats: NormalizationStats | None = None
        self._schema, self._ranks = schema, ranks
        self._kept: Mapping[str, Any] = {}  # moments from the run from which this run took its first weights

    def known(self) -> NormalizationStats:
        """Returns the normalization, which is empty if no feature is standardized.

        Raises:
            ConfigError: it is not measured yet.
        """
        if self.stats is not None:
            return self.stats
        empty = NormalizationStats.empty(self._schema)
        if empty.features:
            raise ConfigError(
                f"feature {empty.features[0]!r} is standardized by the training data: fit or load first"
            )
        return empty

    def of(self, train: Dataset) -> NormalizationStats:
        """Returns the normalization. If it is not known, rank 0 measures the data and sends the result.

        Raises:
            KeyboardInterrupt: reading was stopped.
        """
        if self.stats is not None:
            return self.stats
        local_moments = None
        if self._ranks.first:
            with contextlib.suppress(KeyboardInterrupt):
                measured = NormalizationStats.of(train, stop_requested=lambda: self._ranks.stop_requested)
                local_moments = measured.to_dict()
        reported = self._ranks.broadcast(local_moments)
        if reported is None:
            raise KeyboardInterrupt
        self.stats = NormalizationStats.from_dict({**reported, **self._kept}, self._schema)
        return self.stats

    def inherit(self, loaded: LoadedCheckpoint, inherited: Inherited, train: Dataset | None) -> None:
        """Keeps the normalization of these features from another run's checkpoint.

        Measures the rest if there are data.
        """
        self._kept = moments_of(loaded, self._schema, inherited)
        if set(self._kept) == set(NormalizationStats.empty(self._schema).features):
            self.stats = NormalizationStats.from_dict(self._kept, self._schema)
        elif train is not None:
            self.stats = None
            self.of(train)


@dataclass(kw_only=True)
class TrainerState:
    """The state of one trainer's run. All trainers call its methods together.

    Attributes:
        learning_rate: the schedule of both halves, set when the session opens.
        progressive: None unless each batch is scored before it is trained on.
        inherited: the checkpoint of another run from which this run took its first weights, if any.
    """

    schema: Schema
    options: TrainOptions
    ranks: TrainerGroup
    dense: DenseSpec
    normalizing: Normalizing
    progressive: ProgressiveValidation | None
    learning_rate: LearningRate = field(init=False)
    state: RunState = field(default_factory=RunState)
    inherited: str | None = None

    def content(self, plan: Plan, session: Session) -> Content:
        """Returns the content of a checkpoint of the current state."""
        session.sync()
        self.ranks.barrier()
        return Content(
            step=self.state.step,
            model=self._model(),
            state={
                "run": self.state.to_dict(),
                "trainers": self.ranks.gather(self.state.to_dict()),  # trainers may differ in position
                "learning_rate": self.learning_rate.state(),
                **({} if self.inherited is None else {"inherited": self.inherited}),
                **({} if self.progressive is None else {"progressive": self.progressive.state()}),
            },
            sparse=session.sparse,
            dense=session.dense,
            plan=plan.to_dict(),
            random=gather_random(
                self.ranks,
                self.dense.device,
                None if session.stateful is None else session.stateful.extra_state(),
            ),
        )

    def version(self, step: int, session: Session) -> SegmentVersion:
        """Returns the state of a segment that is published now, with the weights of a step."""
        session.sync()
        self.ranks.barrier()
        return SegmentVersion(
            step=step,
            model=self._model(),
            parameters=session.dense.state()["model"],
            sparse=session.sparse,
        )

    def check(self, loaded: LoadedCheckpoint) -> None:
        """Refuses a checkpoint that :meth:`go_on` cannot continue from.

        Raises:
            CheckpointError: the rate schedule differs, or files have the wrong content.
        """
        with believed(loaded.place):
            self.learning_rate.check(loaded.state["learning_rate"])
            check_random(loaded.random)

    def go_on(self, loaded: LoadedCheckpoint, plan: Plan) -> None:
        """Restores step, position, rates and random state from a checkpoint."""
        with believed(loaded.place):
            of_each = [RunState.from_dict(each) for each in loaded.state.get("trainers", ())]
        same_step = all(each.step == loaded.run.step for each in of_each)
        known = len(of_each) == self.ranks.size and (same_step or self.ranks.unsynchronized)
        self.state = of_each[self.ranks.rank] if known else loaded.run
        self.inherited = loaded.state.get("inherited")
        if self.progressive is not None:
            with believed(loaded.place):
                self.progressive.restore(loaded.state.get("progressive"))
        if self.options.early_stopping is None:  # there are no best weights to return to
            self.state.best_step, self.state.best_value, self.state.stopped_early = None, None, False
        with believed(loaded.place):
            self.learning_rate.restore(loaded.state["learning_rate"])
            restore_random(
                loaded.random,
                self.ranks.rank,
                alike=_draw_alike(plan.to_dict()),
                were_alike=_draw_alike(loaded.plan or {}),
                device=self.dense.device,
            )

    def _model(self) -> ModelDescription:
        return describe_model(self.dense.module, self.schema, self.options, self.normalizing.stats)


def _draw_alike(plan: Mapping[str, Any]) -> bool:
    """Returns whether all trainers draw the same masks."""
    return bool(plan.get("seeds", {}).get("dropout") == "alike")


def gather_random(
    ranks: TrainerGroup, device: torch.device, extra: Mapping[str, Tensor] | None = None
) -> list[dict[str, Tensor]]:
    """Returns the state of each trainer's generators by rank. Ranks except 0 get only their own state.

    Args:
        extra: the extra state of this trainer, see :class:`girih.training.session.Stateful`.
    """
    local = {"cpu": torch.get_rng_state().numpy()}
    local |= {name: tensor.numpy() for name, tensor in (extra or {}).items()}
    if device.type == "cuda":
        local["cuda"] = torch.cuda.get_rng_state(device).numpy()
    gathered = ranks.gather_arrays(local) or [local]
    return [{name: torch.from_numpy(array) for name, array in each.items()} for each in gathered]


def extra_state(states: Sequence[Mapping[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """Returns the ``extra`` that the trainer with a rank gave to :func:`gather_random`."""
    return {} if rank >= len(states) else {name: value for name, value in states[rank].items() if "/" in name}


def check_random(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises torch's error if :func:`restore_random` would find an invalid state of a generator."""
    for state in (states[0], *states[1:]):
        torch.Generator().set_state(state["cpu"])


def restore_random(
    states: Sequence[Mapping[str, Tensor]],
    rank: int,
    *,
    alike: bool,
    were_alike: bool,
    device: torch.device | None = None,
) -> None:
    """Restores this trainer's random state.

    Args:
        device: the device of the dense half. If it is a GPU, its generator has its own state.
        alike: whether all trainers draw the same masks. Then all restore the state of rank 0.
        were_alike: ``alike`` of the saved run. Some trainers keep the state with which they start a run: those that
            were not in the saved run, and those that drew the same masks as rank 0.
    """
    if alike:
        rank = 0
    elif rank and (were_alike or rank >= len(states)):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if "cuda" in states[rank] and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states[rank]["cuda"], device)
