"""Reading a checkpoint back into the halves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse
from torch import Tensor

from girih.checkpoint import trees
from girih.checkpoint.manifest import DENSE, Manifest
from girih.checkpoint.parts import PartReader
from girih.checkpoint.save import SavedParameters, SavedRows
from girih.checkpoint.storage import Storage
from girih.errors import CheckpointError
from girih.schema import Schema


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint besides rows and parameters.

    Attributes:
        state: as it was saved. random: of each trainer, by rank. plan: what its run was built from.
    """

    state: dict[str, Any]
    random: list[Any]
    plan: Mapping[str, Any] | None


def load(place: Storage, *, schema: Schema, sparse: SavedRows, dense: SavedParameters) -> Loaded:
    """Puts a checkpoint's rows and parameters into the halves; returns the rest.

    Raises:
        CheckpointError: incomplete, damaged, or of another schema or model; names the part or feature.
    """
    manifest = Manifest.read(place)
    check_schema(manifest, schema, place)
    tensors = _read_dense(place, manifest.parts[DENSE])
    try:
        state, random, theirs = (
            trees.join(tree, tensors) for tree in (manifest.state, manifest.random, manifest.dense)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{place}/{DENSE}: damaged: it lacks {error}") from None
    try:
        dense.restore(theirs)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{place}/{DENSE}: does not fit this model: {reason}") from None
    run = state["run"]
    sparse.load(PartReader(place, manifest.shards), step=run["step"] - run["refused"])
    return Loaded(state, random, manifest.plan)


def check_schema(manifest: Manifest, schema: Schema, place: Storage) -> None:
    """Refuses a checkpoint whose rows or inputs mean something else, and says what differs.

    Raises:
        CheckpointError: names the first feature or label that differs.
    """
    if manifest.fingerprint == schema.fingerprint():
        return
    theirs = Schema.from_dict(manifest.schema, place.url)
    if theirs.labels.names != schema.labels.names:
        got, expected = list(theirs.labels.names), list(schema.labels.names)
        raise CheckpointError(f"{place}: its labels are {got}, the configuration's are {expected}")
    for ours in schema.sparse:
        match = next((f for f in theirs.sparse if f.name == ours.name), None)
        if match is not None and theirs.dim_of(match) != schema.dim_of(ours):
            raise CheckpointError(
                f"{place}: feature {ours.name!r} has dim {theirs.dim_of(match)} in the checkpoint, "
                f"{schema.dim_of(ours)} in the configuration; set dim = {theirs.dim_of(match)} or start a new run"
            )
    got, expected = [f.name for f in theirs.features], [f.name for f in schema.features]
    what = "features of other kinds, tables or transforms"
    if got != expected:
        what = f"features {got} instead of {expected}"
    raise CheckpointError(f"{place}: was trained with {what}; use its own configuration or start a new run")


def _read_dense(place: Storage, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    content = place.read(DENSE)
    if zlib.crc32(content) != facts["crc32"].get(""):
        raise CheckpointError(
            f"{place}/{DENSE}: damaged (its checksum differs); delete {place.name} to use an older one"
        )
    try:
        return parse(content)
    except SafetensorError as error:
        raise CheckpointError(f"{place}/{DENSE}: damaged: {error}; use another checkpoint") from None
