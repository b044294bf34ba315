"""A version as a follower has it on the disk of its machine: mapped files of rows, parameters, and one small file that says which of them are a version.

    current.json                     replaced whole whenever the version is another one, or its files are
    rows-<group>-<count>.safetensors  see ``girih.store.mapped.file``
    dense-<count>.safetensors         parameters and buffers

Whoever serves reads ``current.json``, maps what it names, and has one version whole, or asks again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from girih.checkpoint.manifest import Count, Crc
from girih.checkpoint.recipe import check_recipe, train_options
from girih.config import build
from girih.data.normalization import NormalizationStats
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import check_inside, open_file, read_sealed, refusing, seal
from girih.files.whole import write_whole
from girih.models.needs import check_needs
from girih.publishing.manifest import SegmentManifest, VersionFacts
from girih.schema import Schema
from girih.sparse.groups.pack import Group, served_groups
from girih.store.mapped import MappedFile, MappedFileFacts, Stack

CURRENT = "current.json"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile:
    """A file of rows, and its facts."""

    name: str
    bytes: Count
    crc32: Crc
    rows: Count
    buried: Count

    @property
    def keys(self) -> int:
        """Keys that it knows, with a row or buried."""
        return self.rows + self.buried

    @property
    def facts(self) -> MappedFileFacts:
        """See :class:`girih.store.mapped.MappedFileFacts`."""
        return MappedFileFacts(self.bytes, self.crc32, self.rows, self.buried)

    @classmethod
    def of(cls, name: str, written: MappedFileFacts) -> RowsFile:
        """A file that was written."""
        return cls(name=name, **written.to_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(VersionFacts):
    """One version as it lies on this machine.

    Attributes:
        log: the address of the log. newest: the newest number that was known there.
        rows: of each group, in the order of :func:`~girih.sparse.groups.pack.served_groups`, the files of its stack, newest first.
        dense: the file of parameters. dense_crc32: its checksum.
    """

    log: str
    newest: Count
    rows: tuple[tuple[RowsFile, ...], ...]
    dense: str
    dense_crc32: Crc
    format: int = _FORMAT

    @classmethod
    def of(cls, manifest: SegmentManifest, **local: Any) -> Followed:
        """A version that a segment, or a snapshot, leads to."""
        shared = {each.name: getattr(manifest, each.name) for each in fields(VersionFacts)}
        return cls(**shared, **local)

    @property
    def files(self) -> set[str]:
        """Names of all its files."""
        return {self.dense, *(file.name for files in self.rows for file in files)}

    def with_rows(self, group: int, files: Sequence[RowsFile]) -> Followed:
        """The same version with other files of one group, which read alike."""
        rows = list(self.rows)
        rows[group] = tuple(files)
        return replace(self, rows=tuple(rows))

    def groups(self) -> tuple[Group, ...]:
        """The groups in which its rows are served."""
        return check_version(self, self.log)

    def stacks(self, directory: Path, *, verify: bool = False) -> list[Stack]:
        """Its rows, mapped.

        Args:
            verify: compares checksums, which reads all files.

        Raises:
            MissingFileError: a file is gone, since another version is there by now. CheckpointError: damaged.
        """
        return [
            Stack(group.spec, [MappedFile(directory / f.name, f.facts if verify else None) for f in files])
            for group, files in zip(self.groups(), self.rows, strict=True)
        ]

    def parameters(self, directory: Path) -> bytes:
        """The content of the file of parameters.

        Raises:
            MissingFileError: it is gone. CheckpointError: damaged.
        """
        path = directory / self.dense
        with open_file(path, directory) as file:
            content = file.read()
        if zlib.crc32(content) != self.dense_crc32:
            raise CheckpointError(f"{path}: damaged: its checksum differs")
        return content

    def write(self, directory: Path) -> None:
        """Makes it the current one."""
        write_whole(directory / CURRENT, seal(asdict(self)).decode())

    @classmethod
    def read(cls, directory: Path) -> Followed | None:
        """The current version; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        path, fix = directory / CURRENT, f"delete {directory} to begin again"
        try:
            content = read_sealed(path, _FORMAT, fix)
        except MissingFileError:
            return None
        with refusing(path, fix):
            found: Followed = build(cls, content, "")
            for name in found.files:
                check_inside(name)
            found.groups()
        return found


def check_version(version: VersionFacts, where: str) -> tuple[Group, ...]:
    """The groups in which rows of a version are served, if all that it says of its model can be used.

    Raises:
        CheckpointError: schema, needs, recipe or normalization cannot be used.
    """
    with refusing(where, "publish again", fault="its schema, needs, recipe or normalization cannot be used"):
        schema = Schema.from_dict(version.schema, "schema")
        if schema.fingerprint() != version.fingerprint:
            raise ValueError(f"fingerprint {version.fingerprint} of a schema that has {schema.fingerprint()}")
        check_recipe(version.recipe)
        if version.normalization is not None:
            NormalizationStats.from_dict(version.normalization, schema)
        seed = train_options(version.recipe["train"]).seed
        return served_groups(schema, check_needs(version.needs, schema, "its needs"), seed)
