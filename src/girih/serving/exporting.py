"""``girih export``: the final model of a run as a directory that needs no checkpoint.

    signature.json          inputs and outputs, the recipe of the model, checksums; written last
    rows-<i>.safetensors    a group's rows, to be mapped: see ``girih.store.mapped.file``
    dense.safetensors       parameters and buffers of the net
    dense.json              the operators of the net, only for a user's class
    dense.onnx              the net for other runtimes, if it could be converted

Shapes: K rows of a chunk, W columns of a row.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.export import ExportedProgram

from girih.checkpoint import Manifest, Storage
from girih.checkpoint.load import load as load_checkpoint
from girih.checkpoint.load import load_model
from girih.checkpoint.parts import PartReader
from girih.checkpoint.save import describe_model
from girih.errors import CheckpointError, ConfigError, RunDirectoryError
from girih.files.whole import disk_full, sync
from girih.kernels.cpu import ahead
from girih.models import needs_of
from girih.models.embeddings import Embeddings
from girih.publishing.part import widened
from girih.schema import Schema
from girih.serving import dense_graph, program
from girih.serving.limits import Notify
from girih.serving.opening import OpenedModel
from girih.serving.row_files import write_rows
from girih.serving.signature import NAME, Dense, ModelFile, Signature, check_name, inputs_of, outputs_of
from girih.sparse.groups.leaves import example_for
from girih.sparse.groups.pack import Group, served_groups
from girih.store.spec import Floats, GroupSpec, Ints, Longs

PARAMETERS, PROGRAM, ONNX = "dense.safetensors", "dense.json", "dense.onnx"
_OURS = re.compile(r"rows-\d+\.safetensors|dense\.(safetensors|json|onnx)|\..*\.unfinished")


def export(opened: OpenedModel, out: Path, name: str, notify: Notify, *, programs: bool = True) -> Signature:
    """Writes a model as a directory. Replaces the files of an unfinished export.

    Args:
        opened: the run's model.
        out: a directory that is empty or does not exist.
        name: the model's name for clients.
        notify: receives a line for each part that could not be written.
        programs: if True, also writes the net as ONNX.

    Raises:
        RunDirectoryError: the directory holds something else. CheckpointError: the checkpoint is damaged.
        ConfigError: the name has a slash, or torch cannot export the user's class. StorageFullError: the disk is full.
    """
    check_name(name)
    begin(out)
    loaded = load_checkpoint(opened.place, opened.schema)
    load_model(loaded, opened.model)
    schema, model = opened.schema, opened.model.eval()
    described = describe_model(model, schema, opened.options, loaded.normalization)
    ahead.make_ready([*ahead.writing_mapped(), *ahead.serving()])
    groups = served_groups(schema, needs_of(model, schema), opened.options.seed)
    reader = PartReader(opened.place, opened.manifest.shards)
    parts = [_SavedPart(reader, part) for part in sorted(reader.parts)]
    rows = [
        (write_rows(out / f"rows-{number}.safetensors", group, [parts], durable=True),)
        for number, group in enumerate(groups)
    ]
    dense = _write_dense(
        model, schema, groups, out, notify, with_onnx=programs, is_own=described.recipe["model"] is None
    )
    for dense_file in dense.files:
        sync(out / dense_file.name)
    signature = Signature(
        name=name,
        step=opened.manifest.step,
        final=opened.final,
        inputs=inputs_of(schema),
        outputs=outputs_of(schema),
        rows=tuple(rows),
        dense=dense,
        source=source_of(opened.place, opened.manifest),
        **vars(described),
    )
    signature.write(out)
    sync(out / NAME)
    sync(out)
    return signature


def begin(out: Path) -> None:
    """Makes the directory, and deletes the files of an unfinished export.

    Raises:
        RunDirectoryError: the directory holds something else.
    """
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"--out {out}: is a file; name a directory that is missing or empty")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(os.listdir(out))
    others = [name for name in names if not _OURS.fullmatch(name)]
    if others:
        what = "an exported model" if NAME in others else others[0]
        raise RunDirectoryError(
            f"--out {out}: not empty (it holds {what}); name another directory, or remove it"
        )
    for name in names:
        (out / name).unlink()


def source_of(place: Storage, manifest: Manifest) -> dict[str, object]:
    """Returns the checkpoint's name and a checksum that identifies it."""
    parts = json.dumps(manifest.parts, sort_keys=True)
    return {"checkpoint": place.name, "crc32": zlib.crc32(parts.encode())}


class _SavedPart:
    """A part of a checkpoint, opened when its rows are read; see :class:`~girih.serving.row_files.RowsPart`."""

    def __init__(self, reader: PartReader, name: str) -> None:
        self._reader, self._name, self.where = reader, name, f"{reader.storage}/{name}"
        self.tables: Mapping[str, int] = reader.parts[name]["tables"]
        self.left: tuple[Longs, Ints] = np.empty(0, np.int64), np.empty(0, np.int32)

    def chunks(self, spec: GroupSpec) -> Iterator[tuple[Longs, Ints, Floats]]:
        """See :class:`~girih.serving.row_files.RowsPart`."""
        columns, file = [segment.name for segment in spec.segments], self._reader.open(self._name)
        try:
            file.check_columns(("ids", "tables", *columns))
        except KeyError as error:
            raise CheckpointError(f"{self.where}: has no column {error}; use another checkpoint") from None
        for chunk in file.chunks():
            rows = [widened(chunk[name], file.description["dtype"]) for name in columns]
            yield chunk["ids"], chunk["tables"], np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]


def _write_dense(
    model: nn.Module,
    schema: Schema,
    groups: Sequence[Group],
    out: Path,
    notify: Notify,
    *,
    with_onnx: bool,
    is_own: bool,
) -> Dense:
    """Writes the net's parameters, its operators for a user's class, and the net as ONNX."""
    example = example_for(schema, groups, train=False)
    inputs = program.inputs_of(example[1])
    with_onnx = with_onnx and _can_write_onnx(notify)
    exported, content, tensors = None, b"", dict[str, Tensor]()
    if is_own or with_onnx:
        try:
            exported = program.export_program(model.cpu(), *example)
            if is_own:
                content, tensors = _operators(model, exported, example, len(schema.labels.names))
        except Exception as error:  # torch may raise anything on a model
            kind, reason = type(model).__name__, _reason(error)
            if is_own:
                raise ConfigError(
                    f"{kind}: your class is served in the form of torch.export, which failed: {reason}; pad by padded(max_length=...) and use sizes"
                    " of tensors, not values; or girih.load(RUN), girih predict and girih serve --follow --model file.py:Class run the class itself"
                ) from None
            notify(f"no {ONNX}: torch.export cannot follow {kind}: {reason}")
    if is_own:
        _write(out / PROGRAM, content)
    tensors |= model.state_dict()
    _write(
        out / PARAMETERS,
        serialize({name: each.detach().cpu().clone().contiguous() for name, each in tensors.items()}),
    )
    has_onnx = with_onnx and exported is not None and _onnx(exported, inputs, out / ONNX, notify)
    return Dense(
        parameters=ModelFile.of(out / PARAMETERS),
        program=ModelFile.of(out / PROGRAM) if is_own else None,
        onnx=ModelFile.of(out / ONNX) if has_onnx else None,
        inputs=tuple(inputs),
    )


def _operators(
    model: nn.Module, exported: ExportedProgram, example: tuple[Tensor, Embeddings], num_labels: int
) -> tuple[bytes, dict[str, Tensor]]:
    """Returns the content of ``dense.json`` and all its tensors.

    Compares the results of the operators with the results of the model first.

    Raises:
        Exception: an operator is not allowed in files, or the results differ from the model's.
    """
    operators, tensors = dense_graph.described(exported)
    content = json.dumps(operators, allow_nan=False).encode()
    net = dense_graph.net_of(content, tensors, example, num_labels, PROGRAM)
    whole = program.FlatNet(model, program.inputs_of(example[1]))
    with torch.no_grad():
        expected = whole(example[0], *example[1].tensors())
        torch.testing.assert_close(net(*example), expected, rtol=1e-5, atol=1e-6)
    return content, tensors


def _can_write_onnx(notify: Notify) -> bool:
    missing = program.missing_for_onnx()
    if missing is not None:
        notify(f"no {ONNX}: {missing} is not installed; pip install 'girih[onnx]'")
    return missing is None


def _onnx(exported: ExportedProgram, inputs: program.Inputs, path: Path, notify: Notify) -> bool:
    try:
        program.write_onnx(exported, inputs, path)
    except Exception as error:  # the converter may raise anything
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and (full := disk_full(error, path)) is not None:
            raise full from None
        notify(f"no {ONNX}: torch.onnx cannot convert it: {_reason(error)}")
        return False
    return True


def _write(path: Path, content: bytes | memoryview) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise disk_full(error, path) or error from None


def _reason(error: Exception) -> str:
    """Returns the first line of an error, cut to 160 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
