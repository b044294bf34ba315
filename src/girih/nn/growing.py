"""Tables that grow, as torch modules see them: options, and the way from ids to vectors and back."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from girih import config
from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.kernels.cpu import ahead
from girih.models.needs import EMBEDDING
from girih.nn.refusals import ATTRIBUTES, UNCAPTURED, UNCOPIED
from girih.optim import Adagrad, SparseOptimizer
from girih.schema import Categorical, Pooling
from girih.sparse.groups.group import CpuGroup, GroupRead
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import Group, Output
from girih.sparse.options import StoreOptions
from girih.store import SnapshotFile, shard_of, write_rows
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Admission, Dim, Dtype, Eviction, Initializer, Normal


class RowOptions(TypedDict, total=False):
    """Options that both modules share; see :class:`EmbeddingBag`."""

    optimizer: SparseOptimizer | None
    initializer: Initializer | None
    admission: Admission | None
    eviction: Eviction | None
    dtype: Dtype | None
    seed: int | None
    share: GrowingModule | None
    store: StoreOptions | None


class GrowingTable(LocalShards):
    """One table of rows, which several modules may share.

    Attributes:
        step: number of its last update.
    """

    def __init__(self, spec: GroupSpec, options: StoreOptions) -> None:
        optimizers, evictions = (
            [segment.optimizer for segment in spec.segments],
            [table.eviction for table in spec.tables],
        )
        ahead.make_ready(ahead.training([optimizers], evictions))
        group = Group(spec, np.zeros(1, np.int64), np.zeros(1, np.int32), outputs=())
        num_shards = options.num_shards([spec], torch.get_num_threads())
        super().__init__([group], replace(options, shards=num_shards))
        self.step = 0

    def group(self, mode: Pooling, *, whole: bool) -> CpuGroup:
        """A way to the rows: bags pooled by ``mode``, or every id's vector."""
        (group,), (stores,) = self.groups, self.stores
        ids = Categorical(name="ids", pooling=mode)
        output = Output.of(group.spec.segments[0], 0, [(0, ids)], whole=whole)
        return CpuGroup(replace(group, outputs=(output,)), stores, self.pool)


class _Apply(torch.autograd.Function):
    """The pooled rows as a node of autograd: backward pushes their gradients to the store."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: GrowingModule, group: CpuGroup, batch: Batch) -> Tensor:
        pulled = group.read(batch, module.table.step + 1, train=True)
        ctx.module, ctx.group, ctx.batch, ctx.pulled = module, group, batch, pulled
        return torch.from_numpy(pulled.outputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.module.push(ctx.group, ctx.pulled, ctx.batch, gradients[0])
        return torch.zeros(0), None, None, None


class GrowingModule(nn.Module):
    """A module over a table that grows: its options, and the way from ids to vectors."""

    table: GrowingTable
    dim: int

    def __init__(
        self,
        dim: int,
        *,
        optimizer: SparseOptimizer | None = None,
        initializer: Initializer | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        dtype: Dtype | None = None,
        seed: int | None = None,
        share: GrowingModule | None = None,
        store: StoreOptions | None = None,
    ) -> None:
        super().__init__()
        dim = config.build(Dim, dim, f"{type(self).__name__}: dim")
        if not isinstance(optimizer, SparseOptimizer | None):
            raise ConfigError(
                f"optimizer = {optimizer!r}: expected one of girih.optim, as girih.optim.Adagrad(lr=0.05)"
            )
        if not isinstance(share, GrowingModule | None):
            raise ConfigError(
                f"share = a {type(share).__module__}.{type(share).__qualname__}: expected a module of girih.nn;"
                " from_torch(module) takes the weights of a torch module"
            )
        if share is None:
            rows = TableSpec("rows", (initializer or Normal(),), admission, eviction)
            segment = Segment(EMBEDDING, dim, optimizer or Adagrad())
            spec = GroupSpec("rows", (rows,), (segment,), dtype or "float32", seed or 0)
            self.table = GrowingTable(spec, store or StoreOptions())
        else:
            own = (optimizer, initializer, admission, eviction, dtype, seed, store)
            if any(option is not None for option in own):
                raise ConfigError("share = module: its rows have their options already; drop the others")
            if share.dim != dim:
                raise ConfigError(f"dim = {dim}, but the shared rows have dim {share.dim}")
            self.table = share.table
        self.dim = dim
        self.lr_scale = 1.0

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
        """Rows so far."""
        return sum(self.table.rows().values())

    def push(self, group: CpuGroup, pulled: GroupRead, batch: Batch, gradient: Tensor) -> None:
        """Applies the gradient of one output; called by autograd.

        Raises:
            NonFiniteError: it has a NaN or an infinity; nothing was applied.
        """
        given = gradient.float().contiguous().view(-1, gradient.shape[-1]).numpy()
        gradients = group.gradients(pulled, [given], batch)
        if gradients is None:
            return
        if gradients.nonfinite_key >= 0:
            raise NonFiniteError(
                f"the gradient of this {type(self).__name__} is NaN or infinite; nothing was applied"
            )
        self.table.step += 1
        group.apply(pulled, gradients, self.table.step, self.lr_scale)

    def assign(self, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows: int64[n] distinct ids, float32[n, dim]; new ids get rows."""
        ids = integers(ids, "ids").flatten()
        if vectors.shape != (len(ids), self.dim):
            raise ConfigError(f"vectors: shape {tuple(vectors.shape)}, expected {(len(ids), self.dim)}")
        keys, tables = ids.numpy(), np.zeros(len(ids), np.int32)
        if len(np.unique(keys)) != len(keys):
            raise ConfigError("ids: some are repeated; expected each once")
        values = np.ascontiguousarray(vectors.detach().float().cpu().numpy())
        shards = shard_of(keys, tables, self.table.shards_each)
        for _, store in self.table.files():
            part = np.flatnonzero(shards == store.shard)
            store.assign(keys[part], tables[part], values[part])

    def read(self, group: CpuGroup, ids: Tensor, bounds: Tensor, weights: Tensor | None = None) -> Tensor:
        offsets = bounds.to(torch.int32).numpy()
        batch = Batch(
            ids=np.ascontiguousarray(ids.numpy()),
            offsets=offsets,
            numeric=np.empty((len(offsets) - 1, 0), np.float32),
            labels=np.empty((len(offsets) - 1, 0), np.float32),
            weights=None if weights is None else np.ascontiguousarray(weights.detach().numpy()),
        )
        if self.training and torch.is_grad_enabled():
            anchor = torch.zeros(0, requires_grad=True)  # autograd comes back to nodes that it leads to
            out: Tensor = _Apply.apply(anchor, self, group, batch)  # type: ignore[no-untyped-call]
        else:
            out = torch.from_numpy(group.read(batch, self.table.step + 1, train=False).outputs[0])
        return out

    def get_extra_state(self) -> dict[str, Any]:
        """Rows, optimizer state and use counts, as tensors of bytes: a part of ``state_dict()``."""
        shards = []
        for name, store in self.table.files():
            with store.snapshot() as snapshot, tempfile.TemporaryFile() as file:
                write_rows(snapshot, file, name)
                shards.append(torch.from_numpy(np.fromfile(file, np.uint8)))
        return {"step": self.table.step, "shards": shards}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`; the number of shards may differ.

        Raises:
            CheckpointError: rows of another dim, dtype or optimizer.
        """
        shards = []
        for number, shard in enumerate(state["shards"]):
            with tempfile.TemporaryFile() as file:
                file.write(shard.numpy())
                file.seek(0)
                shards.append(SnapshotFile(file, f"shard {number} of a state_dict"))
        for _, store in self.table.files():
            store.restore(shards)
        self.table.step = state["step"]

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        optimizer = self.table.groups[0].spec.segments[0].optimizer
        return f"{self.num_rows:,} rows, dim={self.dim}, optimizer={optimizer}"


def integers(ids: Tensor, name: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"{name}: {kind}, expected a tensor of int64 (or int32)")
    return ids.detach().cpu().long()
