"""A segment of all trainers: begun between two steps, written by a thread of each while training goes on.

Each process that holds shards writes their parts; rank 0 adds the dense parameters and writes the manifest, behind all else.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from safetensors.torch import save as serialize

from girih.checkpoint.manifest import DENSE, PartFacts, Parts, check_coverage
from girih.checkpoint.storage import Storage
from girih.comm.group import TrainerGroup
from girih.errors import CheckpointError, GirihError, RoleError, StorageFullError
from girih.files.whole import disk_full
from girih.models.needs import Needs
from girih.publishing.log import Log
from girih.publishing.manifest import NAME, Pointer, SegmentManifest
from girih.publishing.shards import SegmentRows
from girih.schema import Schema
from girih.store.snapshot.tensorfile import check_tensors

PATIENCE_S = 600.0


class PublishedRows(Protocol):
    """Interface of a sparse half to a log; all trainers are asked together, between two steps."""

    def knows_changes(self, since: int) -> bool:
        """Whether all shards behind this trainer know what changed since a version."""

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> SegmentRows:
        """Takes what changed since a version, or all rows where that is None; changes are noted anew from here on.

        Args:
            number: of the version that this leads to.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentVersion:
    """State that a segment is of, taken between two steps.

    Attributes:
        step: steps of training. parameters: the model's, as ``load_state_dict`` takes them.
        needs, recipe, normalization: see :class:`~girih.publishing.manifest.SegmentManifest`.
    """

    step: int
    schema: Schema
    needs: Needs
    recipe: Mapping[str, Any]
    normalization: Mapping[str, Any] | None
    parameters: Mapping[str, Any]
    sparse: PublishedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The names of a segment: its number, that of the version before it (None for a snapshot), and who writes it."""

    number: int
    previous: int | None
    run: str
    epoch: int


class LogSegment:
    """A segment of one moment; made by all trainers between two steps.

    Args:
        log: rank 0's counts.
    """

    def __init__(self, log: Log, version: SegmentVersion, called: Called, ranks: TrainerGroup) -> None:
        self._ranks, self._note = ranks, ranks.next_number()
        place = log.place(called.number, whole=called.previous is None).absolute()
        self._place = Storage(ranks.broadcast(place.url))
        self._time = time.time()
        parameters = version.parameters if ranks.first else {}
        self._tensors = {
            name: value.detach().cpu().clone().contiguous() for name, value in parameters.items()
        }
        self._fields: dict[str, Any] = {
            "number": called.number,
            "previous": called.previous,
            "run": called.run,
            "epoch": called.epoch,
            "step": version.step,
            "time": self._time,
            "schema": version.schema.to_dict(),
            "fingerprint": version.schema.fingerprint(),
            "needs": {feature: sorted(kinds) for feature, kinds in version.needs.items()},
            "recipe": version.recipe,
            "normalization": version.normalization,
        }
        self._rows = version.sparse.begin_segment(self._place, called.number, called.previous)

    def write(self) -> Pointer | None:
        """Writes it; returns what a head says of it, on rank 0.

        Raises:
            StorageFullError: no space left. GirihError, OSError: it cannot be written. What was written stays, and nobody looks at it.
        """
        try:
            with in_words(self._place):
                parts = dict(self._rows.write())
        except BaseException as error:
            if not self._ranks.first:
                self._report_to_first({"error": f"trainer {self._ranks.rank}: {error}"})
            raise
        finally:
            self._rows.close()
        if not self._ranks.first:
            self._report_to_first({"parts": parts})
            return None
        for rank in range(1, self._ranks.size):
            parts |= self._parts_of(rank)
        check_coverage(parts, self._place.url)
        with in_words(self._place):
            return self._complete(parts)

    def wait_copied(self) -> None:
        """Returns once a checkpoint may begin."""
        self._rows.wait_copied()

    def close(self) -> None:
        """Ends it, written or not."""
        self._rows.close()

    def _complete(self, parts: dict[str, PartFacts]) -> Pointer:
        dense = serialize(self._tensors)
        check_tensors(dense, f"{self._place}/{DENSE}", "no follower could take it: set it to a number")
        self._place.make()
        self._place.replace(DENSE, dense)
        parts[DENSE] = {"bytes": len(dense), "crc32": {"": zlib.crc32(dense)}}
        manifest = SegmentManifest(**self._fields, parts=parts)
        content = manifest.to_bytes()
        self._place.replace(NAME, content)
        return Pointer(
            number=manifest.number,
            step=manifest.step,
            time=manifest.time,
            manifest_crc32=zlib.crc32(content),
        )

    def _report_to_first(self, message: Mapping[str, object]) -> None:
        """Sends rank 0 the parts that this trainer wrote, or its error."""
        self._ranks.put(f"segment/{self._note}/{self._ranks.rank}", json.dumps(message))

    def _parts_of(self, rank: int) -> Parts:
        """Waits for the parts that another trainer wrote.

        Raises:
            GirihError: it could not. RoleError: a process of the run is gone.
        """
        key, until = f"segment/{self._note}/{rank}", time.monotonic() + PATIENCE_S
        while (text := self._ranks.take(key)) is None:
            if self._ranks.lost.is_set():
                raise RoleError(f"trainer {rank} wrote no shards: a process of the run is gone")
            if time.monotonic() > until:
                raise GirihError(f"trainer {rank} wrote no shards for {PATIENCE_S:.0f} s")
            time.sleep(0.002)
        reported = json.loads(text)
        if "error" in reported:
            raise CheckpointError(reported["error"])
        return dict(reported["parts"])


@contextlib.contextmanager
def in_words(place: Storage) -> Iterator[None]:
    """Tells errors of the operating system in a line that names the place.

    Raises:
        StorageFullError: no space left. CheckpointError: whatever else keeps this user from writing there.
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
