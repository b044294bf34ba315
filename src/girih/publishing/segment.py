"""A segment of all trainers.

It begins between two steps, and a thread of each trainer writes it while training goes on.

Each process that holds shards writes their parts. Rank 0 adds the dense parameters, and writes the manifest last.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from girih.checkpoint.description import ModelDescription
from girih.checkpoint.save import CollectiveWrite
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.errors import CheckpointError, GirihError, StorageFullError
from girih.files.whole import disk_full
from girih.publishing.log import Log
from girih.publishing.manifest import NAME, Pointer, SegmentManifest
from girih.publishing.shards import SegmentRows


class PublishedRows(Protocol):
    """Interface of a sparse half to a log. All trainers call it together, between two steps."""

    def knows_changes(self, since: int) -> bool:
        """Returns whether all shards of this trainer know the changes since a version."""

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> SegmentRows:
        """Takes the changes since a version, or all rows if it is None. Then a new record of changes begins.

        Args:
            number: the version that the segment leads to.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentVersion:
    """The state of a segment, taken between two steps.

    Attributes:
        step: number of training steps.
        parameters: parameters and buffers of the model, for ``load_state_dict``.
    """

    step: int
    model: ModelDescription
    parameters: Mapping[str, Any]
    sparse: PublishedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Identifies a segment of a log.

    Attributes:
        number: the version that the segment leads to.
        previous: the version that the segment continues. None if the segment is a snapshot.
        run, epoch: the run that writes the segment, and its epoch of the log.
    """

    number: int
    previous: int | None
    run: str
    epoch: int


class LogSegment:
    """A segment with the state of one moment. All trainers make it together, between two steps.

    Args:
        log: the log. Only the log of rank 0 is used.
    """

    def __init__(self, log: Log, version: SegmentVersion, called: Called, ranks: TrainerGroup) -> None:
        self._write = CollectiveWrite(ranks, lambda: in_words(self._place))
        place = log.place(called.number, whole=called.previous is None).absolute()
        self._place = Storage(ranks.broadcast(place.url))
        parameters = version.parameters if ranks.first else {}
        self._tensors = {
            name: value.detach().cpu().clone().contiguous() for name, value in parameters.items()
        }
        named = {
            "number": called.number,
            "previous": called.previous,
            "run": called.run,
            "epoch": called.epoch,
        }
        self._fields: dict[str, Any] = named | {
            "step": version.step,
            "time": time.time(),
            **vars(version.model),
        }
        self._rows = version.sparse.begin_segment(self._place, called.number, called.previous)

    def write(self) -> Pointer | None:
        """Writes the segment. Returns its entry for the head, on rank 0.

        Raises:
            StorageFullError: no space is left.
            GirihError, OSError: it cannot be written. Written files stay, but nobody reads them.
        """
        advice = "no follower could take it: set it to a number"
        parts = self._write.write(self._place, self._rows, self._tensors, advice)
        if parts is None:
            return None
        manifest = SegmentManifest(**self._fields, parts=parts)
        content = manifest.to_bytes()
        with in_words(self._place):
            self._place.replace(NAME, content)
        return Pointer(
            number=manifest.number,
            step=manifest.step,
            time=manifest.time,
            manifest_crc32=zlib.crc32(content),
        )

    def wait_copied(self) -> None:
        """Returns when a checkpoint may begin."""
        self._rows.wait_copied()

    def close(self) -> None:
        """Ends the segment, written or not."""
        self._rows.close()


@contextlib.contextmanager
def in_words(place: Storage) -> Iterator[None]:
    """Turns errors of the operating system into one line that names the place.

    Raises:
        StorageFullError: no space is left. CheckpointError: this user cannot write there for another reason.
    """
    full = StorageFullError(f"{place}: no space left for a segment; free some")
    try:
        yield
    except StorageFullError:
        raise full from None
    except GirihError:
        raise
    except OSError as error:
        if disk_full(error, place.url) is not None:
            raise full from None
        raise CheckpointError(
            f"{place}: {error.strerror or error}; check the path and its permissions"
        ) from None
