"""``signature.json`` of a directory that servers read: the model's inputs, outputs and files.

An export is such a directory, and is written once. A follower also has such a directory. It replaces this file for each
new version. The file is written last, so a directory with the file is complete. The file begins with a checksum of the
rest of its content.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint.description import ModelDescription
from girih.checkpoint.manifest import Count, Crc
from girih.config import build
from girih.data.from_memory import columns_of
from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.files.sealed import check_inside, open_file, read_sealed, refusing, seal
from girih.files.whole import write_whole
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence
from girih.store.mapped import MappedFile, MappedFileFacts
from girih.version import __version__

NAME = "signature.json"
FORMAT = 3
AGAIN = "export the model again"
LENGTHS = ".lengths"
"""The suffix of the tensor with the number of an input's values in each example."""
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A column of examples that the model reads.

    Attributes:
        name: the column in the training data.
        kind: ``ids``, ``numbers``, ``weights`` or ``times``.
        datatype: the announced datatype of the Open Inference Protocol. Ids may also be strings (BYTES) or any
            integers.
        sequence: True if examples usually have lists of values.
        features: names of the features that read it.
    """

    name: str
    kind: str
    datatype: str
    sequence: bool
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A label's predictions, FP32 [n]: probabilities, or the raw output if its loss is ``mse`` or ``huber``."""

    name: str
    label: str
    loss: str
    datatype: str = "FP32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file, with its size and checksum."""

    name: str
    bytes: Count
    crc32: Crc

    @classmethod
    def of(cls, path: Path) -> ModelFile:
        """Returns the facts of a written file."""
        with open_file(path, path.parent, AGAIN) as file:
            content = file.read()
        return cls(name=path.name, bytes=len(content), crc32=zlib.crc32(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile(ModelFile):
    """A file of rows, see :mod:`girih.store.mapped.file`, with its numbers of keys: those with a row, and those that
    are buried.
    """

    rows: Count
    buried: Count

    @property
    def keys(self) -> int:
        """The number of its keys, with a row or buried."""
        return self.rows + self.buried

    @property
    def facts(self) -> MappedFileFacts:
        """See :class:`girih.store.mapped.MappedFileFacts`."""
        return MappedFileFacts(self.bytes, self.crc32, self.rows, self.buried)

    @classmethod
    def written(cls, path: Path, facts: MappedFileFacts) -> RowsFile:
        """Returns the facts of a written file."""
        return cls(name=path.name, **facts.to_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Files of the dense half.

    Attributes:
        parameters: parameters and buffers by name, as safetensors.
        program: the operators of the net, see :mod:`girih.serving.dense_graph`. None if a class builds the net.
        onnx: the net as ONNX; None if there is none.
        inputs: the tensors that ``program`` and ``onnx`` take, in order. ``numeric`` comes first, then embeddings; see
            :mod:`girih.serving.program`.
    """

    parameters: ModelFile
    program: ModelFile | None = None
    onnx: ModelFile | None = None
    inputs: tuple[Mapping[str, Any], ...] = ()

    @property
    def files(self) -> list[ModelFile]:
        """All files of the dense half."""
        return [file for file in (self.parameters, self.program, self.onnx) if file is not None]


@dataclass(frozen=True, kw_only=True)
class Signature(ModelDescription):
    """The content of ``signature.json``.

    Attributes:
        step: number of the model's training steps.
        inputs, outputs: the inputs and outputs of the model.
        rows: files of each group, newest first, in the order of :func:`~girih.sparse.groups.pack.served_groups`.
        source: the origin of the model. An export has the checkpoint's name and the checksum of its parts. A follower
            has the log's address.
        name: the name of an export.
        final: True if the run ended with these weights.
        number: the version, or 0 for an export.
        run, epoch: the run and epoch of the publishing process.
    """

    step: Count
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    rows: tuple[tuple[RowsFile, ...], ...]
    dense: Dense
    source: Mapping[str, Any]
    name: str = ""
    final: bool = False
    number: Count = 0
    run: str = ""
    epoch: Count = 0
    format: int = FORMAT
    girih: str = __version__

    @property
    def files(self) -> list[ModelFile]:
        """All files of the model."""
        return [*self.dense.files, *(file for files in self.rows for file in files)]

    def write(self, directory: Path) -> None:
        """Writes the file as a whole. From then on, the directory holds the described version."""
        write_whole(directory / NAME, seal(asdict(self), indent=1).decode())

    @classmethod
    def read(cls, directory: Path, fix: str = AGAIN) -> Signature:
        """Reads the file, and no other files.

        Args:
            fix: the advice in errors.

        Raises:
            MissingFileError: the file is missing, so the export is not whole. CheckpointError: it is damaged, or of
                another format.
        """
        path = directory / NAME
        try:
            content = read_sealed(path, FORMAT, fix)
        except MissingFileError:
            raise MissingFileError(f"{directory}: no {NAME}, so this is not a whole exported model") from None
        with refusing(path, fix):
            signature: Signature = build(cls, content, "")
            for file in signature.files:
                check_inside(file.name)
        return signature


def check_name(name: str) -> None:
    """Refuses names of models that do not fit into the path of a request.

    Raises:
        ConfigError: the name has a slash.
    """
    if "/" in name:
        raise ConfigError(
            f"--name {name!r}: expected a name without slashes, as clients ask for /v2/models/NAME"
        )


def inputs_of(schema: Schema) -> tuple[Input, ...]:
    """Returns the columns that a schema's features read, in the order in which they are first read."""
    return tuple(_input(name, schema) for name in columns_of(schema))


def outputs_of(schema: Schema) -> tuple[Output, ...]:
    """Returns an output for each label, named like the columns of ``girih predict``."""
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


def read_file(directory: Path, facts: ModelFile) -> bytes:
    """Returns the content of a file of a model.

    Raises:
        MissingFileError: the file is gone. CheckpointError: it is damaged.
    """
    path = directory / facts.name
    with open_file(path, directory, AGAIN) as file:
        content = file.read()
    if (len(content), zlib.crc32(content)) != (facts.bytes, facts.crc32):
        raise CheckpointError(f"{path}: damaged: its size or checksum is not that in {NAME}; {AGAIN}")
    return content


def check_all(directory: Path) -> None:
    """Checks all files of a directory, without keeping them in memory.

    Raises:
        MissingFileError: a file is gone. CheckpointError: a file is damaged; names it.
    """
    signature = Signature.read(directory)
    for files in signature.rows:
        for file in files:
            MappedFile(directory / file.name, file.facts)
    for other in signature.dense.files:
        read_file(directory, other)
