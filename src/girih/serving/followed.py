"""A version as a follower has it on the disk of its machine: mapped files of rows, parameters, and one small file that says which of them are a version.

    current.json                     replaced whole whenever the version is another one, or its files are
    rows-<group>-<count>.safetensors  see ``girih.store.mapped.file``
    dense-<count>.safetensors         parameters and buffers

Whoever serves reads ``current.json``, maps what it names, and has one version whole, or asks again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from girih.config import build
from girih.errors import CheckpointError, MissingFileError
from girih.publishing.manifest import SegmentManifest, VersionFacts
from girih.runs.files import write_whole
from girih.schema import Schema
from girih.sparse.groups.pack import Group
from girih.sparse.groups.served import served_groups
from girih.store.mapped import MappedFile, Stack, Written
from girih.training.recipe import train_options

CURRENT = "current.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile:
    """A file of rows, and its facts."""

    name: str
    bytes: int
    crc32: int
    rows: int
    buried: int

    @property
    def keys(self) -> int:
        """Keys that it knows, with a row or buried."""
        return self.rows + self.buried

    @property
    def facts(self) -> Written:
        """See :class:`girih.store.mapped.Written`."""
        return Written(self.bytes, self.crc32, self.rows, self.buried)

    @classmethod
    def of(cls, name: str, written: Written) -> RowsFile:
        """A file that was written."""
        return cls(name=name, **written.to_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(VersionFacts):
    """One version as it lies on this machine.

    Attributes:
        log: the address of the log. newest: the newest number that was known there.
        rows: of each group, in the order of :func:`~girih.sparse.groups.served.served_groups`, the files of its stack, newest first.
        dense: the file of parameters. dense_crc32: its checksum.
    """

    log: str
    newest: int
    rows: tuple[tuple[RowsFile, ...], ...]
    dense: str
    dense_crc32: int
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
        return groups_of(self.schema, self.needs, self.recipe, self.log)

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
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise MissingFileError(f"{path}: no such file") from None
        if zlib.crc32(content) != self.dense_crc32:
            raise CheckpointError(f"{path}: damaged: its checksum differs")
        return content

    def write(self, directory: Path) -> None:
        """Makes it the current one."""
        text = json.dumps(asdict(self))
        write_whole(directory / CURRENT, json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}))

    @classmethod
    def read(cls, directory: Path) -> Followed | None:
        """The current version; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        path = directory / CURRENT
        try:
            sealed = json.loads(path.read_text(encoding="utf-8"))
            text = sealed["content"]
            if zlib.crc32(text.encode()) != sealed["crc32"]:
                raise ValueError("its checksum differs")
            found: Followed = build(cls, json.loads(text), str(path))
            if found.format != _FORMAT:
                raise ValueError(f"format {found.format}, expected {_FORMAT}")
            return found
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path}: damaged ({error}); delete {directory} to begin anew") from None


def groups_of(
    schema: Mapping[str, Any], needs: Mapping[str, Sequence[str]], recipe: Mapping[str, Any], where: str
) -> tuple[Group, ...]:
    """The groups in which rows of a log are served.

    Raises:
        CheckpointError: schema or recipe cannot be used.
    """
    try:
        seed = train_options(recipe.get("train") or {}).seed
        read = {feature: frozenset(kinds) for feature, kinds in needs.items()}
        return served_groups(Schema.from_dict(schema, where), read, seed)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: its schema or recipe cannot be used: {error}") from None
