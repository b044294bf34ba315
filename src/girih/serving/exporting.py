"""``girih export``: the final model of a run as a directory that needs no checkpoint.

    signature.json          what goes in and out, how to make the model, checksums; written last
    rows-<i>.safetensors    a group's rows, to be mapped: see ``girih.store.mapped.file``
    dense.safetensors       parameters and buffers of the net
    dense.json              the operators of the net, if its class is the user's own
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
from girih.checkpoint.load import LoadedCheckpoint, load_model
from girih.checkpoint.load import load as load_checkpoint
from girih.checkpoint.parts import PartReader
from girih.checkpoint.recipe import recipe
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
from girih.serving.signature import (
    NAME,
    Dense,
    RowsEntry,
    Signature,
    check_name,
    facts_of,
    inputs_of,
    outputs_of,
)
from girih.sparse.groups.leaves import example_for
from girih.sparse.groups.pack import Group, served_groups
from girih.store.mapped import MappedFileFacts, MappedWriter
from girih.store.spec import Floats, Ints, Longs

PARAMETERS, PROGRAM, ONNX = "dense.safetensors", "dense.json", "dense.onnx"
_OURS = re.compile(r"rows-\d+\.safetensors|dense\.(safetensors|json|onnx)|\..*\.unfinished")


def export(opened: OpenedModel, out: Path, name: str, notify: Notify, *, programs: bool = True) -> Signature:
    """Writes a model as a directory; what stands there of an export that was cut short is replaced.

    Args:
        opened: the run's model. out: missing or empty. name: of the model, as clients will ask for it.
        notify: receives a line on what could not be made.
        programs: whether the net is written as ONNX too.

    Raises:
        RunDirectoryError: something else lies there. CheckpointError: the checkpoint is damaged.
        ConfigError: a name with a slash; or the model's class is the user's own, and torch cannot export it. StorageFullError: the disk is full.
    """
    check_name(name)
    begin(out)
    loaded = load_checkpoint(opened.place, opened.schema)
    load_model(loaded, opened.model)
    schema, model = opened.schema, opened.model.eval()
    needs = needs_of(model, schema)
    ahead.make_ready([*ahead.writing_mapped(), *ahead.serving()])
    groups = served_groups(schema, needs, opened.options.seed)
    files: dict[str, Mapping[str, int]] = {}
    rows = []
    for number, group in enumerate(groups):
        file = f"rows-{number}.safetensors"
        written = write_group(opened.place, opened.manifest, group, out / file)
        files[file] = written.to_dict()
        tables = tuple(table.name for table in group.spec.tables)
        rows.append(RowsEntry(file=file, tables=tables, num_rows=written.rows))
    made = recipe(model, opened.options)
    dense = _write_dense(model, schema, groups, out, notify, with_onnx=programs, is_own=made["model"] is None)
    for dense_file in (dense.parameters, dense.program, dense.onnx):
        if dense_file is not None:
            sync(out / dense_file)
            files[dense_file] = facts_of(out / dense_file)
    signature = Signature(
        name=name,
        step=opened.manifest.step,
        final=opened.final,
        inputs=inputs_of(schema),
        outputs=outputs_of(schema),
        schema=schema.to_dict(),
        fingerprint=schema.fingerprint(),
        needs={feature: tuple(sorted(kinds)) for feature, kinds in needs.items()},
        recipe=made,
        normalization=_normalization(loaded),
        rows=tuple(rows),
        dense=dense,
        source=source_of(opened.place, opened.manifest),
        files=files,
    )
    signature.write(out)
    sync(out / NAME)
    sync(out)
    return signature


def begin(out: Path) -> None:
    """Makes the directory, and clears it of an export that was cut short.

    Raises:
        RunDirectoryError: something else lies there.
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
    """The checkpoint's name, and a checksum by which the same one is known again."""
    parts = json.dumps(manifest.parts, sort_keys=True)
    return {"checkpoint": place.name, "crc32": zlib.crc32(parts.encode())}


def write_group(place: Storage, manifest: Manifest, group: Group, path: Path) -> MappedFileFacts:
    """Writes the rows of a group's tables, chunk by chunk, from whatever parts of a checkpoint hold them.

    Raises:
        CheckpointError: a part is damaged. StorageFullError: the disk is full.
    """
    names = [table.name for table in group.spec.tables]
    parts = {part: facts for part, facts in manifest.shards.items() if set(names) & set(facts["tables"])}
    most = sum(facts["tables"].get(name, 0) for facts in parts.values() for name in names)
    reader = PartReader(place, manifest.shards)
    with MappedWriter(path, group.spec, most) as writer:
        for part in sorted(parts):
            for ids, tables, rows in _rows_in(reader, part, group):
                if writer.add(ids, tables, rows) != len(ids):
                    raise CheckpointError(
                        f"{place}/{part}: damaged: a key is there twice; use another checkpoint"
                    )
        return writer.finish()


def _rows_in(reader: PartReader, part: str, group: Group) -> Iterator[tuple[Longs, Ints, Floats]]:
    """A part's rows of a group's tables, some at a time: ids int64[K], tables of the group int32[K], rows float32[K, W]."""
    columns = [segment.name for segment in group.spec.segments]
    file = reader.open(part)
    try:
        file.check_columns(("ids", "tables", *columns))
    except KeyError as error:
        raise CheckpointError(f"{file.where}: has no column {error}; use another checkpoint") from None
    names = [table["name"] for table in file.description["tables"]]
    own = {table.name: number for number, table in enumerate(group.spec.tables)}
    numbers = np.array([own.get(name, -1) for name in names], np.int32)
    for chunk in file.chunks():
        theirs = chunk["tables"]
        tables = numbers[theirs]
        here = np.flatnonzero(tables >= 0)
        parts = [widened(chunk[name][here], file.description["dtype"]) for name in columns]
        yield chunk["ids"][here], tables[here], np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


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
    """Writes the net's parameters, its operators if its class is the user's own, and the net as ONNX."""
    example = example_for(schema, groups, train=False)
    inputs = program.inputs_of(example[1])
    with_onnx = with_onnx and _can_write_onnx(notify)
    exported, content, tensors = None, b"", dict[str, Tensor]()
    if is_own or with_onnx:
        try:
            exported = program.export_program(model.cpu(), *example)
            if is_own:
                content, tensors = _operators(model, exported, example, len(schema.labels.names))
        except Exception as error:  # whatever torch meets in a model
            kind, reason = type(model).__name__, _reason(error)
            if is_own:
                raise ConfigError(
                    f"{kind}: a class of yours is served as what torch.export makes of it, which failed: {reason}; pad by padded(max_length=...) and use sizes"
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
        parameters=PARAMETERS,
        program=PROGRAM if is_own else None,
        onnx=ONNX if has_onnx else None,
        inputs=tuple(inputs),
    )


def _operators(
    model: nn.Module, exported: ExportedProgram, example: tuple[Tensor, Embeddings], num_labels: int
) -> tuple[bytes, dict[str, Tensor]]:
    """The content of ``dense.json`` and all its tensors, which compute what the model does.

    Raises:
        Exception: an operator that a file may not name, or other results than the model's.
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
    except Exception as error:  # whatever the converter meets in a program
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
    """The first line of an error, which may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def _normalization(loaded: LoadedCheckpoint) -> dict[str, object] | None:
    return None if loaded.normalization is None else loaded.normalization.to_dict()
