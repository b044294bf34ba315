"""Loads a checkpoint into the halves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from girih.checkpoint import save
from girih.checkpoint.manifest import DENSE, NAME, Manifest, PartFacts, Parts
from girih.checkpoint.parts import PartReader
from girih.checkpoint.save import SavedParameters, SavedRows
from girih.checkpoint.state import RunState
from girih.checkpoint.storage import Storage
from girih.data import NormalizationStats, Position
from girih.errors import CheckpointError
from girih.files.sealed import refusing
from girih.schema import Schema

_FIX = "use another checkpoint"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose manifest and parameters are in memory. :meth:`put` reads its rows.

    Attributes:
        run: the progress of the run. normalization: the normalization, or None if it was not measured yet.
        state: the saved state. random: the random states of each trainer, by rank. plan: the plan of the run.
    """

    place: Storage
    run: RunState
    normalization: NormalizationStats | None
    state: dict[str, Any]
    random: list[Any]
    plan: Mapping[str, Any] | None
    dense: Any
    shards: Parts
    schema: Schema

    def put(
        self, *, sparse: SavedRows | None, dense: SavedParameters, newest: Mapping[str, int] | None = None
    ) -> None:
        """Replaces rows and parameters. Without ``sparse``, rows stay.

        After an error, both are unchanged, with two exceptions. Rows in other processes may have changed. If several
        copies of the parameters are averaged, each copy becomes the model of the last ``sync``, with unchanged
        optimizer state.

        Raises:
            CheckpointError: rows or parameters are damaged, or belong to another model or layout. The message names the
                part.
        """
        state = dense.state()
        before = save.split(state)
        try:
            with refusing(f"{self.place}/{DENSE}", _FIX, fault="does not fit this model"):
                save.check_dtypes(self.dense.get("model", {}), state.get("model", {}))
                dense.restore(self.dense)
            if sparse is not None:
                sparse.load(
                    PartReader(self.place, self.shards, newest=newest or {}), step=self.run.num_updates
                )
        except BaseException:
            dense.restore(save.join(*before))
            raise


def load(place: Storage, schema: Schema | None) -> LoadedCheckpoint:
    """Reads a checkpoint without its rows. Replaces nothing yet.

    Args:
        schema: the expected schema. None accepts any schema.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or has another schema. The message names the part or
            feature.
    """
    manifest = Manifest.read(place)
    if schema is not None:
        check_schema(manifest, schema, place)
    tensors = _read_dense(place, manifest.parts[DENSE])
    with refusing(f"{place}/{DENSE}", _FIX):
        state, random, dense = (
            save.join(tree, tensors) for tree in (manifest.state, manifest.random, manifest.dense)
        )
    with believed(place):
        if (position := manifest.run.position) is not None:
            Position.from_dict(position)
        theirs, measured = schema or Schema.from_dict(manifest.schema, place.url), manifest.normalization
        normalization = None if measured is None else NormalizationStats.from_dict(measured, theirs)
    return LoadedCheckpoint(
        place, manifest.run, normalization, state, random, manifest.plan, dense, manifest.shards, theirs
    )


def load_model(loaded: LoadedCheckpoint, model: nn.Module) -> None:
    """Loads the parameters of a checkpoint into a module, without an optimizer's state.

    Raises:
        CheckpointError: the parameters belong to another model.
    """
    with refusing(f"{loaded.place}/{DENSE}", _FIX, fault="does not fit this model"):
        save.check_dtypes(loaded.dense["model"], model.state_dict())
        model.load_state_dict(loaded.dense["model"])


def believed(place: Storage) -> AbstractContextManager[None]:
    """Returns a context that converts exceptions caused by a checkpoint's state to an error about its manifest."""
    return refusing(f"{place}/{NAME}", f"delete {place.name} to use an older one")


def check_schema(manifest: Manifest, schema: Schema, place: Storage) -> None:
    """Refuses a checkpoint with another schema.

    Raises:
        CheckpointError: the schemas differ. The message names the first feature or label that differs.
    """
    if manifest.fingerprint == schema.fingerprint():
        return
    theirs = Schema.from_dict(manifest.schema, place.url)
    if theirs.labels.names != schema.labels.names:
        got, expected = list(theirs.labels.names), list(schema.labels.names)
        raise CheckpointError(f"{place}: its labels are {got}, the configuration's are {expected}")
    by_name = {feature.name: feature for feature in theirs.sparse}
    for ours in schema.sparse:
        match = by_name.get(ours.name)
        if match is not None and theirs.dim_of(match) != schema.dim_of(ours):
            raise CheckpointError(
                f"{place}: feature {ours.name!r} has dim {theirs.dim_of(match)} in the checkpoint, "
                f"{schema.dim_of(ours)} in the configuration; set dim = {theirs.dim_of(match)} or start a new run"
            )
    got, expected = [f.name for f in theirs.features], [f.name for f in schema.features]
    fault = "features of other kinds, tables or transforms"
    if got != expected:
        fault = f"features {got} instead of {expected}"
    raise CheckpointError(f"{place}: was trained with {fault}; use its own configuration or start a new run")


def _read_dense(place: Storage, facts: PartFacts) -> dict[str, Tensor]:
    content, where = place.read(DENSE), f"{place}/{DENSE}"
    if zlib.crc32(content) != facts["crc32"].get(""):
        raise CheckpointError(
            f"{where}: damaged (its checksum differs); delete {place.name} to use an older one"
        )
    return save.tensors_in(content, where)
