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
        step: batches seen, refused ones included.
        examples: examples seen.
        repeated_examples: those that were trained on, forgotten in a crash, and trained on again.
        epoch: epochs done; the one under way has this number.
        position: where the data goes on in the epoch under way; None at its start.
        refused: steps refused for a NaN or an infinity.
        evaluated_step: the last step after which the validation data was judged.
        saved_step: the last step after which a checkpoint was due, and made.
        best_step, best_value: the best evaluation so far, under early stopping.
        bad_evaluations: evaluations since then that were no better.
        stopped_early: early stopping ended the run.
        train_s: seconds spent on training steps.
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
        """Steps that moved something."""
        return self.step - self.refused

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> RunState:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: an unknown key, or a value that none can have.
        """
        state: RunState = config.build(cls, mapping, "state.run")
        return state
