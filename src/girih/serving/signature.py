"""``signature.json`` of an exported model: what goes in, what comes out, and how the rest of the directory is read.

It is written last: a directory is whole when it is there. A checksum of all else in it comes first.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint.manifest import Count
from girih.config import build
from girih.data.from_memory import columns_of
from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.files.sealed import check_inside, open_file, read_sealed, refusing, seal
from girih.files.whole import write_whole
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence
from girih.store.mapped import MappedFile, MappedFileFacts
from girih.version import __version__

NAME = "signature.json"
FORMAT = 2
AGAIN = "export the model again"
LENGTHS = ".lengths"
"""Behind the name of an input: the tensor that says how many values each example has of it."""
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A column of examples that the model reads.

    Attributes:
        name: the column, as in the data that it was trained on.
        kind: ``ids``, ``numbers``, ``weights`` or ``times``.
        datatype: of the Open Inference Protocol, as it is announced; ids may be strings (BYTES) or integers of any width.
        sequence: whether examples have lists of it, as a rule.
        features: names of the features that read it.
    """

    name: str
    kind: str
    datatype: str
    sequence: bool
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A label's predictions, FP32 [n]: probabilities, or the output itself where its loss is ``mse`` or ``huber``."""

    name: str
    label: str
    loss: str
    datatype: str = "FP32"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsEntry:
    """A group of tables and its file of rows, see :mod:`girih.store.mapped.file`; ``rows`` of them by table."""

    file: str
    tables: tuple[str, ...]
    num_rows: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Files of the dense half.

    Attributes:
        parameters: parameters and buffers by name, as safetensors.
        program: the operators of the net, see :mod:`girih.serving.dense_graph`; None if girih's own class makes it.
        onnx: the net as ONNX; None if there is none.
        inputs: the tensors that both take, in order: ``numeric``, then embeddings; see :mod:`girih.serving.program`.
    """

    parameters: str
    program: str | None
    onnx: str | None
    inputs: tuple[Mapping[str, Any], ...]

    @property
    def files(self) -> list[str]:
        """The names of all of them."""
        return [name for name in asdict(self).values() if isinstance(name, str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """``signature.json``.

    Attributes:
        name: of the model. step: steps that it was trained for. final: whether the run ended with these weights.
        inputs, outputs: see above.
        schema: as ``Schema.to_dict`` gives it; fingerprint: of that schema.
        needs: feature → what the model reads of it, see :mod:`girih.models.needs`.
        recipe: how to make the module again, and how to compute with it; ``model`` is None for a class of the user's own.
        normalization: mean and deviation of standardized features, None where there are none.
        rows: each group's, in the order of :func:`~girih.sparse.groups.pack.served_groups`.
        source: the checkpoint's name, and a checksum of its parts.
        files: name → ``bytes`` and ``crc32``, and for rows how many keys have one and how many are buried.
    """

    name: str
    step: Count
    final: bool
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    schema: Mapping[str, Any]
    fingerprint: str
    needs: Mapping[str, tuple[str, ...]]
    recipe: Mapping[str, Any]
    normalization: Mapping[str, Any] | None
    rows: tuple[RowsEntry, ...]
    dense: Dense
    source: Mapping[str, Any]
    files: Mapping[str, Mapping[str, int]]
    format: int = FORMAT
    girih: str = __version__

    def write(self, directory: Path) -> None:
        """Writes it whole."""
        write_whole(directory / NAME, seal(asdict(self), indent=1).decode())

    @classmethod
    def read(cls, directory: Path) -> Signature:
        """Reads it; the other files are not looked at.

        Raises:
            MissingFileError: there is none, so this is no whole export. CheckpointError: damaged, or of another format.
        """
        file = directory / NAME
        try:
            content = read_sealed(file, FORMAT, AGAIN)
        except MissingFileError:
            raise MissingFileError(f"{directory}: no {NAME}, so this is not a whole exported model") from None
        with refusing(file, AGAIN):
            signature: Signature = build(cls, content, "")
            signature._check_files()
        return signature

    def _check_files(self) -> None:
        """Refuses files that lie elsewhere, are not used, or have no facts."""
        used = [*self.dense.files, *(rows.file for rows in self.rows)]
        if sorted(used) != sorted(self.files):
            raise ValueError(f"it lists files {sorted(self.files)}, and uses {sorted(used)}")
        for name in used:
            check_inside(name)
        for rows in self.rows:
            facts: MappedFileFacts = build(MappedFileFacts, self.files[rows.file], f"file {rows.file!r}")
            if facts.rows != rows.num_rows:
                raise ValueError(f"{rows.num_rows} rows, of which {rows.file} has {facts.rows}")


def check_name(name: str) -> None:
    """Refuses names of models that no path of a request can hold.

    Raises:
        ConfigError: it has a slash.
    """
    if "/" in name:
        raise ConfigError(
            f"--name {name!r}: expected a name without slashes, as clients ask for /v2/models/NAME"
        )


def inputs_of(schema: Schema) -> tuple[Input, ...]:
    """The columns that a schema's features read, in the order in which they are first read."""
    return tuple(_input(name, schema) for name in columns_of(schema))


def outputs_of(schema: Schema) -> tuple[Output, ...]:
    """An output for each label, named as the columns of ``girih predict``."""
    labels, losses = schema.labels.names, schema.labels.losses
    names = [PREDICTION] if len(labels) == 1 else [f"{PREDICTION}_{label}" for label in labels]
    return tuple(
        Output(name=name, label=label, loss=loss)
        for name, label, loss in zip(names, labels, losses, strict=True)
    )


def _input(name: str, schema: Schema) -> Input:
    readers = [feature for feature in schema.features if feature.source == name]
    features = tuple(feature.name for feature in readers)
    if not readers:
        weighted = [f for f in schema.features if isinstance(f, Categorical) and f.weights == name]
        text = weighted[0].is_split
        return Input(
            name=name, kind="weights", datatype="BYTES" if text else "FP32", sequence=not text,
            features=tuple(feature.name for feature in weighted),
        )  # fmt: skip
    kind, datatype, sequence = _kind_of(readers[0])
    return Input(name=name, kind=kind, datatype=datatype, sequence=sequence, features=features)


def _kind_of(feature: Feature) -> tuple[str, str, bool]:
    if not isinstance(feature, Sequence) and feature.part_of_time:
        return "times", "INT64", False
    if isinstance(feature, Numeric):
        return "numbers", "FP32", False
    if isinstance(feature, Categorical) and feature.bucketize:
        return "numbers", "FP64", False
    if feature.is_split or (isinstance(feature, Categorical) and feature.weight_separator):
        return "ids", "BYTES", False
    bags = isinstance(feature, Categorical) and bool(feature.weights)
    return "ids", "INT64", bags or isinstance(feature, Sequence)


_PIECE = 16 << 20


def facts_of(file: Path) -> dict[str, int]:
    """``bytes`` and ``crc32`` of a file."""
    crc, size = 0, 0
    with open_file(file, file.parent, AGAIN) as opened:
        while piece := opened.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}


def check_file(directory: Path, name: str, files: Mapping[str, Mapping[str, int]]) -> Path:
    """The path of a file that is as the signature says.

    Raises:
        MissingFileError: it is gone. CheckpointError: damaged.
    """
    path = directory / name
    for what, expected in facts_of(path).items():
        if files[name][what] != expected:
            raise CheckpointError(
                f"{path}: damaged: its {what} are {expected}, the signature says {files[name][what]}; export the model again"
            )
    return path


def check_all(directory: Path) -> Signature:
    """Reads all files of an exported directory, and nothing into memory.

    Raises:
        MissingFileError: one is gone. CheckpointError: one is damaged; names it.
    """
    signature = Signature.read(directory)
    for rows in signature.rows:
        MappedFile(directory / rows.file, signature.files[rows.file])
    for name in signature.dense.files:
        check_file(directory, name, signature.files)
    return signature
