"""The standing of a run: all that a checkpoint holds beside rows, parameters and the plan, and how a run goes on from it."""

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
    """The normalization of a run, alike on all trainers.

    Attributes:
        stats: None until it is measured, or restored.
    """

    def __init__(self, schema: Schema, ranks: TrainerGroup) -> None:
        self.stats: NormalizationStats | None = None
        self._schema, self._ranks = schema, ranks
        self._kept: Mapping[str, Any] = {}  # of the run that this one began with

    def known(self) -> NormalizationStats:
        """The normalization, which is empty where no feature is standardized.

        Raises:
            ConfigError: it would have to be measured first.
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
        """The normalization; rank 0 reads the data where it is not known, and tells the others.

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
        """Keeps what another run's checkpoint has of these features; measures the rest where there are data."""
        self._kept = moments_of(loaded, self._schema, inherited)
        if set(self._kept) == set(NormalizationStats.empty(self._schema).features):
            self.stats = NormalizationStats.from_dict(self._kept, self._schema)
        elif train is not None:
            self.stats = None
            self.of(train)


@dataclass(kw_only=True)
class TrainerState:
    """The standing of one trainer's run. Methods are called by all trainers together.

    Attributes:
        learning_rate: of both halves; there once the session is open.
        progressive: None unless each batch is scored before it is trained on.
        inherited: the checkpoint of another run whose weights it began with, if any.
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
        """The content of a checkpoint made now."""
        session.sync()
        self.ranks.barrier()
        return Content(
            step=self.state.step,
            model=self._model(),
            state={
                "run": self.state.to_dict(),
                "trainers": self.ranks.gather(self.state.to_dict()),  # which may be at other places
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
        """The state that a segment published now is of, with the weights of a step."""
        session.sync()
        self.ranks.barrier()
        return SegmentVersion(
            step=step,
            model=self._model(),
            parameters=session.dense.state()["model"],
            sparse=session.sparse,
        )

    def check(self, loaded: LoadedCheckpoint) -> None:
        """Refuses what :meth:`go_on` cannot go on from.

        Raises:
            CheckpointError: another schedule of rates, or files that hold something else.
        """
        with believed(loaded.place):
            self.learning_rate.check(loaded.state["learning_rate"])
            check_random(loaded.random)

    def go_on(self, loaded: LoadedCheckpoint, plan: Plan) -> None:
        """Takes step, position, rates and random state from a checkpoint."""
        with believed(loaded.place):
            of_each = [RunState.from_dict(each) for each in loaded.state.get("trainers", ())]
        same_step = all(each.step == loaded.run.step for each in of_each)
        known = len(of_each) == self.ranks.size and (same_step or self.ranks.unsynchronized)
        self.state = of_each[self.ranks.rank] if known else loaded.run
        self.inherited = loaded.state.get("inherited")
        if self.progressive is not None:
            with believed(loaded.place):
                self.progressive.restore(loaded.state.get("progressive"))
        if self.options.early_stopping is None:  # no best weights to come back to
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
    """Whether all trainers draw the same masks."""
    return bool(plan.get("seeds", {}).get("dropout") == "alike")


def gather_random(
    ranks: TrainerGroup, device: torch.device, extra: Mapping[str, Tensor] | None = None
) -> list[dict[str, Tensor]]:
    """State of each trainer's generators by rank, on rank 0; this trainer's alone on the others.

    Args:
        extra: this trainer's, see :class:`girih.training.session.Stateful`.
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
    """Raises what torch does where :func:`restore_random` would meet no state of a generator."""
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
    """Puts this trainer's state back.

    Args:
        device: that of the dense half, whose generator has its own state where it is a GPU.
        alike: whether all trainers draw the same masks; all then take the state that rank 0 had.
        were_alike: the same of the run that was saved. A trainer that was not there, or drew as rank 0 did, keeps the
            state that it begins a run with.
    """
    if alike:
        rank = 0
    elif rank and (were_alike or rank >= len(states)):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if "cuda" in states[rank] and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states[rank]["cuda"], device)
