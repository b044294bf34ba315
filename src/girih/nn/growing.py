"""Tables that grow, as torch modules see them: the way from ids to vectors and back, and what every module has.

Shapes: B examples, F features, N ids, D width of a vector.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.data.batch import Batch
from girih.errors import ConfigError, nearest
from girih.kernels.cpu import ahead
from girih.models.embeddings import Block, Embeddings
from girih.models.needs import EMBEDDING, SEQUENCE, of_all
from girih.nn.inputs import integers
from girih.nn.refusals import ATTRIBUTES, UNCAPTURED, UNCOPIED
from girih.optim import SparseOptimizer
from girih.schema import Categorical, Schema
from girih.sparse.groups.group import CpuGroup, GroupRead, apply_all
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import POOLING_MODES, Output, by_group, pack
from girih.sparse.options import StoreOptions
from girih.store import SnapshotFile, shard_of, write_rows
from girih.tables import Table

NO_LABEL = ""
"""Name of the one label of a schema without any: no feature can be called so."""
_POWERS = {POOLING_MODES["sum"]: 0.0, POOLING_MODES["mean"]: -1.0, POOLING_MODES["sqrtn"]: -0.5}


class GrowingTables(LocalShards):
    """The tables of some features, packed into groups; several modules may share them.

    Attributes:
        schema: features and tables.
        step: number of their last update.
    """

    def __init__(
        self,
        features: Sequence[Categorical],
        tables: Sequence[Table],
        optimizer: SparseOptimizer,
        seed: int,
        options: StoreOptions,
    ) -> None:
        self.schema = Schema(features, NO_LABEL, tables)
        self._pack = partial(pack, optimizer=optimizer, seed=seed)
        groups = self._pack(self.schema, of_all(self.schema, EMBEDDING))
        specs = [group.spec for group in groups]
        optimizers = [[segment.optimizer for segment in spec.segments] for spec in specs]
        ahead.make_ready(ahead.training(optimizers, [table.eviction for table in self.schema.tables]))
        num_shards = options.num_shards(specs, torch.get_num_threads())
        super().__init__(groups, replace(options, shards=num_shards))
        self.step = 0

    def read_by(self, features: Sequence[Categorical], kind: str) -> list[CpuGroup]:
        """The groups as some features read them: EMBEDDING gives bags, SEQUENCE the vectors of all ids of each feature."""
        schema = Schema(features, NO_LABEL, self.schema.tables)
        groups = self._pack(schema, of_all(schema, kind))
        return [CpuGroup(group, own, self.pool) for group, own in zip(groups, self.stores, strict=True)]

    def assign(self, table: str, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows of a table: int64[n] distinct ids, float32[n, D]; new ids get rows."""
        places = {
            each.name: (group, number)
            for group, packed in enumerate(self.groups)
            for number, each in enumerate(packed.spec.tables)
        }
        if table not in places:
            raise ConfigError(f"table {table!r} is not one of this module's{nearest(table, places)}")
        group, number = places[table]
        dim = self.groups[group].spec.dim
        ids = integers(ids, "ids").flatten()
        if vectors.shape != (len(ids), dim):
            raise ConfigError(f"vectors: shape {tuple(vectors.shape)}, expected {(len(ids), dim)}")
        keys, tables = ids.numpy(), np.full(len(ids), number, np.int32)
        if len(np.unique(keys)) != len(keys):
            raise ConfigError("ids: some are repeated; expected each once")
        values = np.ascontiguousarray(vectors.detach().float().cpu().numpy())
        shards = shard_of(keys, tables, self.shards_each)
        for store in self.stores[group]:
            part = np.flatnonzero(shards == store.shard)
            store.assign(keys[part], tables[part], values[part])

    def restore(self, sources: Sequence[SnapshotFile]) -> None:
        """Replaces all rows by those of shards, of any number.

        Raises:
            CheckpointError: rows of other tables, or of another dim, dtype or optimizer; no row was replaced.
        """
        known = {table.name for table in self.schema.tables}
        found = []
        for _, store in self.files():
            own = {table.name for table in store.spec.tables}
            files = [file for file in sources if own & (names := _tables_in(file)) or not known & names]
            store.check(files, elsewhere=known - own)
            found.append((store, files))
        for store, files in found:
            store.restore(files, elsewhere=known)


class _Apply(torch.autograd.Function):
    """The outputs of groups as a node of autograd: backward pushes their gradients to the store."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: GrowingModule, groups: Sequence[CpuGroup], batch: Batch
    ) -> tuple[Tensor, ...]:
        reads = [group.read(batch, module.tables.step + 1, train=True) for group in groups]
        ctx.module, ctx.groups, ctx.batch, ctx.reads = module, groups, batch, reads
        ctx.set_materialize_grads(False)  # of groups that took no part in the loss, no row moves
        return _outputs(reads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        ctx.module.push(ctx.groups, ctx.reads, ctx.batch, gradients)
        return torch.zeros(0), None, None, None


class GrowingModule(nn.Module):
    """A module that reads tables that grow by some features.

    Attributes:
        lr_scale: of later steps.
    """

    def __init__(self, tables: GrowingTables, features: Sequence[Categorical]) -> None:
        super().__init__()
        self.tables = tables
        self.lr_scale = 1.0
        self._bags, self._vectors = (tables.read_by(features, kind) for kind in (EMBEDDING, SEQUENCE))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__}: {UNCOPIED}")

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks each module for it
        raise ConfigError(f"{type(self).__name__} {UNCAPTURED}")

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__} has no {name}: {ATTRIBUTES[name]}")
        return super().__getattr__(name)

    @property
    def num_rows(self) -> int:
        """Rows so far, of all tables."""
        return sum(self.tables.rows().values())

    def pool(self, ids: Tensor, offsets: NDArray[np.int64], weights: Tensor | None) -> Embeddings:
        """Bags of all features, feature-major: int64[N], int64[F·B+1], float32[N] or None.

        They are pooled by torch where weights require a gradient, so that autograd reaches these.
        """
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled():
            found = zip(self._bags, self.read(self._bags, ids, offsets, weights), strict=True)
            return Embeddings(tuple(Block(group.group.outputs[0].names, bags) for group, bags in found))
        outputs = [output for group in self._vectors for output in group.group.outputs]
        size = (len(offsets) - 1) // len(outputs)
        blocks = []
        for output, vectors in zip(outputs, self.read(self._vectors, ids, offsets), strict=True):
            first = int(output.features[0]) * size
            bounds = offsets[first : first + size + 1]
            bags = _pooled(vectors, np.diff(bounds), weights[bounds[0] : bounds[-1]], output)
            blocks.append(Block(output.names, bags[:, None]))
        return Embeddings(tuple(blocks))

    def read(
        self,
        groups: Sequence[CpuGroup],
        ids: Tensor,
        offsets: NDArray[np.int64],
        weights: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs of all groups, which lead autograd to the store where the module trains."""
        size = (len(offsets) - 1) // sum(len(group.group.features) for group in groups)
        nothing = np.empty((size, 0), np.float32)
        batch = Batch(
            ids=np.ascontiguousarray(ids.numpy()),
            offsets=offsets.astype(np.int32),
            numeric=nothing,
            labels=nothing,
            weights=None if weights is None else np.ascontiguousarray(weights.detach().numpy()),
        )
        if self.training and torch.is_grad_enabled():
            anchor = torch.zeros(0, requires_grad=True)  # autograd comes back to nodes that it leads to
            out: tuple[Tensor, ...] = _Apply.apply(anchor, self, groups, batch)  # type: ignore[no-untyped-call]
            return out
        return _outputs([group.read(batch, self.tables.step + 1, train=False) for group in groups])

    def push(
        self,
        groups: Sequence[CpuGroup],
        reads: Sequence[GroupRead],
        batch: Batch,
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Applies the gradients of all outputs, as one step; called by autograd.

        Raises:
            NonFiniteError: one has a NaN or an infinity; nothing was applied.
        """
        flat = [
            None if one is None else one.float().contiguous().view(-1, one.shape[-1]).numpy()
            for one in gradients
        ]
        given = by_group([group.group for group in groups], flat)
        apply_all(groups, reads, given, batch, self.tables.step + 1, self.lr_scale)
        self.tables.step += 1

    def get_extra_state(self) -> dict[str, Any]:
        """Rows, optimizer state and use counts, as tensors of bytes: a part of ``state_dict()``."""
        shards = []
        for name, store in self.tables.files():
            with store.snapshot() as snapshot, tempfile.TemporaryFile() as file:
                write_rows(snapshot, file, name)
                shards.append(torch.from_numpy(np.fromfile(file, np.uint8)))
        return {"step": self.tables.step, "shards": shards}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`; the number of shards may differ.

        Raises:
            CheckpointError: rows of other tables, or of another dim, dtype or optimizer; no row was replaced.
        """
        shards = []
        for number, shard in enumerate(state["shards"]):
            with tempfile.TemporaryFile() as file:
                file.write(shard.numpy())
                file.seek(0)
                shards.append(SnapshotFile(file, f"shard {number} of a state_dict"))
        self.tables.restore(shards)
        self.tables.step = state["step"]


def _outputs(reads: Sequence[GroupRead]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(output) for read in reads for output in read.outputs)


def _pooled(vectors: Tensor, lengths: NDArray[np.int64], weights: Tensor, output: Output) -> Tensor:
    """Bags of one feature's vectors, float32[B, D], by torch."""
    counts = torch.from_numpy(lengths)
    bags = torch.repeat_interleave(torch.arange(len(counts)), counts)
    sums = torch.zeros(len(counts), vectors.shape[1]).index_add(0, bags, vectors * weights[:, None])
    return sums * counts.clamp(min=1).float().pow(_POWERS[int(output.modes[0])])[:, None]


def _tables_in(file: SnapshotFile) -> set[str]:
    return {table["name"] for table in file.description["tables"]}
