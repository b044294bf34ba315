"""Warnings about data and options that are probably mistakes, because a model learns little from them.

Each note is one line, a warning of the logger ``girih.training.notes``. ``girih train`` shows it with the progress.

Shapes: B examples, T labels.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from girih.comm.group import TrainerGroup
from girih.data import Batch, Position
from girih.kernels.cpu.arrays import F32
from girih.metrics import Scores

_LOG = logging.getLogger(__name__)
MANY_ABSENT = 0.2
"""An evaluation leads to a note if the fraction of looked-up ids without a row is at least this."""


def say(message: str) -> None:
    """Writes a message of a run to standard error."""
    print(f"girih: {message}", file=sys.stderr, flush=True)


@dataclass
class Notes:
    """Notes about one run. The first trainer logs each note once.

    Attributes:
        label_names: names of the T labels.
        compared: True if the loss compares examples with each other, so that all labels may be 1.
    """

    ranks: TrainerGroup
    label_names: Sequence[str]
    compared: bool = False
    _told: set[tuple[str, str]] = field(default_factory=set)

    def log(self, text: str) -> None:
        """Logs a line each time that it is called."""
        if self.ranks.first:
            _LOG.warning("%s", text)

    def first_epoch(
        self, batches: Iterable[tuple[Batch, Position]], batch_size: int
    ) -> Iterator[tuple[Batch, Position]]:
        """Yields an epoch's batches. At the end, logs a note if the epoch was one step, or if a label never changed."""
        low = high = np.empty((0, len(self.label_names)), np.float32)
        num_batches = num_examples = 0
        for batch, position in batches:
            num_batches, num_examples = num_batches + 1, num_examples + batch.num_examples
            if not len(low) or not (low < high).all():
                low, high = _range([low, high, _counted(batch.labels, batch.label_weights)])
            yield batch, position
        if num_batches == 1:
            text = f"batch_size = {batch_size:,}: an epoch is one step; smaller steps learn more"
            self.log_note("train", "step", text)
        if self.compared:
            return
        owner = "" if self.ranks.size == 1 else " of trainer 0"
        self._constant(
            "train", f"all {num_examples:,} training examples{owner}", low, high, "there is nothing to learn"
        )

    def evaluation(self, data: str, scores: Scores | None, peeks: int, absent: int) -> None:
        """Notes if a label never changes in some data, or if many of its ids have no row.

        Args:
            data: the path of its first file.
            peeks: keys that the evaluation looked up; 0 if unknown. absent: how many of them had no row.
        """
        if scores is None or not scores.num_examples:
            return
        arrays = scores.arrays()
        low, high = _range([_counted(arrays["labels"], arrays.get("label_weights"))])
        self._constant(
            data, f"all {scores.num_examples:,} examples of {data}", low, high, "AUC is not defined"
        )
        if absent > MANY_ABSENT * peeks:
            self.log_note(
                data,
                "ids",
                f"{data}: {absent / peeks:.0%} of the ids have no row and read initial values; are they new, or encoded"
                " differently from the training data?",
            )

    def _constant(self, data: str, where: str, low: F32, high: F32, so: str) -> None:
        for name, least, most in zip(self.label_names, low.ravel(), high.ravel(), strict=False):
            if np.isnan(least):
                self.log_note(data, name, f"label {name!r} does not count in any of {where}: {so}")
            if least == most:
                self.log_note(data, name, f"label {name!r} is {least:g} in {where}: {so}")

    def log_note(self, data: str, subject: str, text: str) -> None:
        """Logs a line, unless this data had a note with this subject."""
        if (data, subject) not in self._told:
            self._told.add((data, subject))
            self.log(text)


def _counted(labels: F32, weights: F32 | None) -> F32:
    """Returns the labels, float32[B, T], with NaN for labels that do not count."""
    return labels if weights is None else np.where(weights > 0, labels, np.float32(np.nan))


def _range(labels: Sequence[F32]) -> tuple[F32, F32]:
    """Returns the minimum and the maximum of each label, float32[1, T], or [0, T] without labels.

    The numbers of a label are NaN if all of its values are NaN.
    """
    every = np.concatenate(labels)
    if not len(every):
        return every, every
    return np.fmin.reduce(every)[None], np.fmax.reduce(every)[None]
