"""Batches that a loader reads once more, for embedding workers that came back without their ids."""

from __future__ import annotations

from dataclasses import dataclass

from girih.data.batch import Batch
from girih.data.position import Position
from girih.data.readings import ScanCursor, SharedScans
from girih.errors import WireError


@dataclass
class _Open:
    """A reader, and the number of the share that comes next, of a pass."""

    reader: ScanCursor
    number: int
    share: int


class BatchReplay:
    """Readers that go on from share to share, one for each trainer: what one worker lost comes in turn, with others' in between.

    Methods are called by one thread.
    """

    def __init__(self, readings: SharedScans) -> None:
        self._readings = readings
        self._open: dict[int, _Open] = {}  # by trainer

    def batch(
        self,
        trainer: int,
        number: int,
        share: int,
        epoch: int,
        start: Position | None,
        *,
        most_skipped: int,
    ) -> Batch:
        """The whole batch of a share of a pass.

        Args:
            epoch, start: where the batch begins.
            most_skipped: a reader that is so many batches before it goes on to it; else another one begins there.

        Raises:
            WireError: no batch begins there.
        """
        held = self._open.get(trainer)
        if held is None or held.number != number or not 0 <= share - held.share < most_skipped:
            self.end(trainer)
            held = self._open[trainer] = _Open(self._readings.reader(epoch, start), number, share)
        try:
            while True:
                batch, _ = next(held.reader)
                held.share += 1
                if held.share > share:
                    return batch
        except StopIteration:
            self.end(trainer)
            raise WireError(f"share {share} of pass {number}: no batch begins there") from None
        except BaseException:
            self.end(trainer)
            raise

    def pass_by(self, trainer: int, share: int) -> None:
        """Lets a trainer's reader go where all that it reads comes before a share."""
        if trainer in self._open and self._open[trainer].share < share:
            self.end(trainer)

    def end(self, trainer: int) -> None:
        """Lets a trainer's reader go."""
        held = self._open.pop(trainer, None)
        if held is not None:
            held.reader.close()

    def close(self) -> None:
        """Lets all readers go."""
        for trainer in list(self._open):
            self.end(trainer)
