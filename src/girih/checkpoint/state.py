"""The progress of a run: its counters and data position, which are saved as JSON in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from girih import config
from girih.config.bounds import Bounds

Count = Annotated[int, Bounds(0, (1 << 62) - 1)]
Step = Annotated[int, Bounds(0, (1 << 31) - 1)]


@dataclass
class RunState:
    """The counters of a run that a checkpoint saves.

    Attributes:
        step: the number of batches seen, including refused batches.
        examples: the number of examples seen.
        repeated_examples: the number of examples whose training was lost in a crash and repeated.
        epoch: the number of complete epochs, which is the number of the current epoch.
        position: the position in the current epoch, or None at its start.
        refused: the number of steps that were refused because of a NaN or an infinity.
        evaluated_step: the last step after which the validation data was evaluated.
        saved_step: the last step after which a checkpoint was due and was made.
        best_step, best_value: the step and the metric of the best evaluation so far, under early stopping.
        bad_evaluations: the number of evaluations since the best evaluation.
        stopped_early: True if early stopping ended the run.
        train_s: the seconds spent on training steps.
        staleness_max, staleness_sum: the maximum staleness of a batch so far, and the sum over all batches.
    """

    step: Step = 0
    examples: Count = 0
    repeated_examples: Count = 0
    epoch: Count = 0
    position: dict[str, Any] | None = None
    refused: Count = 0
    evaluated_step: Step | None = None
    saved_step: Step | None = None
    best_step: Step | None = None
    best_value: float | None = None
    bad_evaluations: Count = 0
    stopped_early: bool = False
    train_s: float = 0.0
    staleness_max: Count = 0
    staleness_sum: Count = 0

    @property
    def num_updates(self) -> int:
        """The number of steps that were not refused."""
        return self.step - self.refused

    def to_dict(self) -> dict[str, object]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> RunState:
        """Reverses :meth:`to_dict`.

        Raises:
            ConfigError: a key is unknown, or a value is impossible.
        """
        state: RunState = config.build(cls, mapping, "state.run")
        return state
