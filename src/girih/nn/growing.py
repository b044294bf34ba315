"""The base of modules over tables that grow: reading and training rows by autograd, state, and moves to a GPU.

Shapes: B examples, F features, N ids, D width of a vector.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, Self, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from girih.comm.group.trainers import Vote
from girih.data.batch import Batch
from girih.errors import CheckpointError, ConfigError, NonFiniteError
from girih.models.embeddings import Block, Embeddings
from girih.models.layers.autograd import Context
from girih.models.needs import EMBEDDING, SEQUENCE
from girih.nn.growing_tables import GrowingTables, TableReader
from girih.nn.inputs import Bags
from girih.nn.refusals import ATTRIBUTES, UNCAPTURED, UNCOPIED, refuse_ranks, refuse_weights
from girih.schema import Categorical
from girih.sparse.groups.gpu_batch import GpuBatch
from girih.sparse.groups.group import EmbeddingGroup, ReadRows
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import POOLING_MODES, GroupOutput, by_group
from girih.sparse.halves.row_updates import apply_all
from girih.store import DiskFile, SnapshotFile, write_rows

_POWERS = {POOLING_MODES["sum"]: 0.0, POOLING_MODES["mean"]: -1.0, POOLING_MODES["sqrtn"]: -0.5}


class _ReadContext(Context, Protocol):
    """A read, with the data for its backward pass.

    Attributes:
        values: the result of :meth:`girih.sparse.groups.gpu_group.GpuGroup.lookup_weighted`, if weights require
            gradients.
    """

    module: GrowingModule
    learns: bool
    groups: list[Any]
    shards: LocalShards
    reads: Sequence[ReadRows]
    batch: Any
    values: Sequence[Tensor] | None


class _Apply(torch.autograd.Function):
    """The outputs of groups as a node of autograd.

    Its backward pushes gradients to the store, and computes the gradients of weights.
    """

    @staticmethod
    def forward(
        ctx: _ReadContext,
        anchor: Tensor,
        weights: Tensor | None,
        module: GrowingModule,
        reader: TableReader,
        batch: Any,
    ) -> tuple[Tensor, ...]:
        tables, step = module.tables, module.tables.step + 1
        ctx.module, ctx.learns, ctx.batch, ctx.values = module, module.learns, batch, None
        ctx.groups, ctx.shards = list(reader.groups), tables.shards
        tables.refuse_expired()
        with tables.used():
            if weights is None:
                ctx.reads = [_read(group, batch, step, train=True) for group in ctx.groups]
            else:  # the rows are on a GPU
                found = [group.lookup_weighted(batch, step, train=ctx.learns) for group in ctx.groups]
                ctx.reads, ctx.values = ([each[part] for each in found] for part in (0, 1))
        ctx.set_materialize_grads(False)  # rows of groups outside the loss do not move
        return _outputs(ctx.reads)

    @staticmethod
    def backward(
        ctx: _ReadContext, *gradients: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        if ctx.learns:
            ctx.module.push(ctx, gradients)
        weights = None if ctx.values is None else ctx.module.weight_gradients(ctx, ctx.values, gradients)
        return torch.zeros(0, device=ctx.module.tables.device), weights, None, None, None


class GrowingModule(nn.Module):
    """A module that reads growing tables for some features.

    Attributes:
        lr_scale: factor of the learning rate of later steps.
    """

    def __init__(self, tables: GrowingTables, features: Sequence[Categorical]) -> None:
        super().__init__()
        self.tables = tables
        self.lr_scale = 1.0
        self._frozen = False
        self._bags, self._vectors = (tables.read_by(features, kind) for kind in (EMBEDDING, SEQUENCE))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: {UNCOPIED}")

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script calls this for each module
        raise ConfigError(f"{type(self).__name__} {UNCAPTURED}")

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)  # a subclass may have its own attribute
        except AttributeError:
            if name not in ATTRIBUTES:
                raise
            raise AttributeError(f"{type(self).__name__} has no {name}: {ATTRIBUTES[name]}") from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GrowingModule:
        """Moves the rows to a GPU, or back, with all modules that share them.

        Called by ``to``, ``cuda``, ``cpu`` and similar methods.

        Raises:
            ConfigError: there is no such device.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            device = fn(torch.empty(0, device=self.tables.device)).device
        except (AssertionError, RuntimeError) as error:
            told = str(error).partition("\n")[0]
            raise ConfigError(
                f"{type(self).__name__}: its rows cannot be moved there: {told}; they go to a GPU that torch can use, or"
                " stay in host memory"
            ) from error
        if device.type == "cpu" or (device.type == "cuda" and not self.tables.stays):
            self.tables.move(device)
        return self

    @property
    def num_rows(self) -> int:
        """Current number of rows of all tables. Waits for a GPU."""
        return sum(self.tables.rows().values())

    @property
    def learns(self) -> bool:
        """True if rows move and new ids get rows: in training mode, unless :meth:`requires_grad_` froze the rows."""
        return self.training and not self._frozen

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes rows with False: they are then only read, like frozen parameters.

        Other modules that share these rows still train them.
        """
        self._frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def pool(self, bags: Bags) -> Embeddings:
        """Pools the bags of all features.

        In host memory, torch pools bags whose weights require a gradient, so that autograd reaches the weights.
        """
        weights = bags.weights
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled() or self.tables.on_gpu:
            found = zip(self._bags.groups, self.read(self._bags, bags), strict=True)
            return Embeddings(tuple(Block(group.group.outputs[0].names, values) for group, values in found))
        here = bags.to(self.tables.device)
        outputs = [output for group in self._vectors.groups for output in group.group.outputs]
        blocks = [
            Block(output.names, _pooled(vectors, here, output)[:, None])
            for output, vectors in zip(outputs, self.read(self._vectors, here), strict=True)
        ]
        return Embeddings(tuple(blocks))

    def read(self, reader: TableReader, bags: Bags) -> tuple[Tensor, ...]:
        """Returns the outputs of all groups, float32[·, D].

        If the module learns, autograd leads from them to the store. On a GPU it also leads to weights that require a
        gradient.
        """
        if self.learns and torch.is_grad_enabled():
            refuse_ranks(self, self._description)
        here = bags.to(self.tables.device)
        batch, weights = self._batch(here), here.weights
        pools = reader is self._bags and self.tables.on_gpu
        if not pools or (weights is not None and not weights.requires_grad):
            weights = None
        if torch.is_grad_enabled() and (self.learns or weights is not None):
            # the backward pass runs only for nodes that require a gradient, on the stream of their forward pass
            anchor = torch.zeros(0, requires_grad=self.learns, device=self.tables.device)
            out: tuple[Tensor, ...] = _Apply.apply(anchor, weights, self, reader, batch)  # type: ignore[no-untyped-call]
            return out
        with self.tables.used():
            step = self.tables.step + 1
            return _outputs([_read(group, batch, step, train=False) for group in reader.groups])

    def push(self, read: _ReadContext, gradients: Sequence[Tensor | None]) -> None:
        """Applies the gradients of all outputs as one step. Autograd calls it.

        Waits for a GPU, to check that the gradients are finite.

        Raises:
            NonFiniteError: a gradient has a NaN or an infinity; nothing was applied.
            ConfigError: rows were moved to another device after they were read.
        """
        tables = self.tables
        if read.shards is not tables.shards:
            raise ConfigError(
                f"{type(self).__name__}: its rows were moved to another device between forward and backward; move them before forward"
            )
        flat: list[Any] = _flat(gradients)
        if not tables.on_gpu:
            flat = [None if one is None else one.numpy() for one in flat]
        grouped = by_group([group.group for group in read.groups], flat)
        with tables.used():
            vote, step = Vote(), tables.step + 1
            feature_from = apply_all(read.groups, read.reads, grouped, read.batch, step, self.lr_scale, vote)
        if vote.refused:
            name = self._describe(feature_from(vote.reported.tolist()) or "?")
            raise NonFiniteError(f"the gradient of {name} is NaN or infinite")
        tables.step += 1

    def weight_gradients(
        self, read: _ReadContext, values: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """Returns the gradients of the weights of ids, float32[N], for rows on a GPU."""
        pooled = by_group([group.group for group in read.groups], _flat(gradients))
        with self.tables.used():
            weights = [
                group.weight_gradients(*parts, read.batch)
                for group, *parts in zip(read.groups, read.reads, values, pooled, strict=True)
            ]
            return weights[0] if len(weights) == 1 else torch.stack(weights).sum(0)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: object,
        strict: bool,
        *lists: list[str],
    ) -> None:
        where = f"{prefix.removesuffix('.')}: {self._description}" if prefix else self._description
        refuse_weights(self, where, state_dict, prefix)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error

    def get_extra_state(self) -> dict[str, object]:
        """Returns rows, optimizer state and use counts for ``state_dict()``, as tensors uint8[n] in host memory."""
        shards = []
        for name, store in self.tables.shards.files():
            with self.tables.used():
                snapshot = store.snapshot()
            with snapshot, tempfile.TemporaryFile() as file:
                write_rows(snapshot, DiskFile(file), name)
                shards.append(torch.from_numpy(np.fromfile(file, np.uint8)))
        return {"step": self.tables.step, "shards": shards}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverts :meth:`get_extra_state`. The number of shards may differ.

        Raises:
            CheckpointError: rows of other tables, or of another dim, dtype or optimizer; no row was replaced.
        """
        if not isinstance(state, Mapping) or not {"step", "shards"} <= set(state):
            raise CheckpointError(
                f"state_dict: its extra state is a {type(state).__name__} without step and shards; expected that of a girih.nn module"
            )
        shards = []
        for shard in state["shards"]:
            with tempfile.TemporaryFile() as file:
                file.write(shard.cpu().numpy())
                file.seek(0)
                shards.append(SnapshotFile(file, "state_dict"))
        self.tables.restore(shards)
        self.tables.step = state["step"]

    def _describe(self, feature: str) -> str:
        """Describes a feature, for errors."""
        return f"feature {feature!r} of {self._description}"

    @property
    def _description(self) -> str:
        """Describes the module, for errors."""
        return type(self).__name__

    def _batch(self, bags: Bags) -> Any:
        """Makes a batch for the groups, a ``Batch`` or a ``GpuBatch``, from bags on their device."""
        ids, offsets, weights = bags.ids.contiguous(), bags.offsets.to(torch.int32).contiguous(), bags.weights
        if weights is not None:
            weights = weights.detach().contiguous()
        if self.tables.on_gpu:
            return GpuBatch(ids, offsets, weights, bags.num_examples, bags.bounds, bags.longest)
        nothing = np.empty((bags.num_examples, 0), np.float32)
        return Batch(
            ids=ids.numpy(),
            offsets=offsets.numpy(),
            numeric=nothing,
            labels=nothing,
            weights=None if weights is None else weights.numpy(),
        )


def _read(group: EmbeddingGroup, batch: Any, step: int, *, train: bool) -> ReadRows:
    read, fill = group.lookup(batch, step, train=train)
    fill(slice(0, batch.num_examples))
    return read


def _outputs(reads: Sequence[ReadRows]) -> tuple[Tensor, ...]:
    """Returns the outputs as separate tensors. A node that held its own outputs for backward would hold itself."""
    return tuple(torch.as_tensor(output).detach() for read in reads for output in read.outputs)


def _flat(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns float32[·, D] of each output, contiguous."""
    return [None if one is None else one.float().contiguous().view(-1, one.shape[-1]) for one in gradients]


def _pooled(vectors: Tensor, bags: Bags, output: GroupOutput) -> Tensor:
    """Pools one feature's vectors with torch, to float32[B, D]."""
    feature, size = int(output.features[0]), bags.num_examples
    begin, end = (int(bags.bounds[place]) for place in (feature, feature + 1))
    own = bags.offsets[feature * size : (feature + 1) * size + 1]
    weights = None if bags.weights is None else bags.weights[begin:end]
    sums = nn.functional.embedding_bag(
        torch.arange(len(vectors), device=vectors.device), vectors, own - begin, mode="sum",
        per_sample_weights=weights, include_last_offset=True,
    )  # fmt: skip
    power = _POWERS[int(output.modes[0])]
    return sums * own.diff().clamp(min=1).float().pow(power)[:, None]
