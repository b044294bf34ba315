"""State of a run: everything that is neither a row nor a parameter. JSON goes in and out."""

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
    """Counters of a run, as a checkpoint holds them.

    Attributes:
        step: batches seen, including refused ones.
        examples: examples seen.
        repeated_examples: examples whose training was lost in a crash, and repeated.
        epoch: epochs done, which is the number of the current epoch.
        position: the position in the current epoch; None at its start.
        refused: steps refused for a NaN or an infinity.
        evaluated_step: the last step after which the validation data was evaluated.
        saved_step: the last step after which a checkpoint was due, and made.
        best_step, best_value: the best evaluation so far, under early stopping.
        bad_evaluations: evaluations since then that were no better.
        stopped_early: early stopping ended the run.
        train_s: seconds spent on training steps.
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
            ConfigError: an unknown key, or an impossible value.
        """
        state: RunState = config.build(cls, mapping, "state.run")
        return state
