"""Drop-in modules: an ``EmbeddingBag`` and an ``Embedding`` whose tables grow, for any PyTorch loop.

Rows are no parameters. What that means:

- ``backward`` applies the rows' gradients at once, one optimizer step a use of the module; there is
  nothing for ``optimizer.step()`` to do. Two uses in one forward are two steps, in the order in which
  autograd comes back to them; two backwards (``retain_graph=True``, or two losses) apply both.
- ``torch.nn.utils.clip_grad_norm_`` and weight decay of a torch optimizer do not see rows. Scale
  the loss, or set ``module.lr_scale``; ``l2`` belongs to the module's own optimizer.
- ``torch.amp.GradScaler`` must not be used: rows would take the scaled gradients, at once.
- Under ``torch.no_grad()`` or after ``module.eval()`` rows are only read: a new id gives its
  initial value, gets no row, and nothing learns.
- ``state_dict()`` holds the rows with their optimizer state, ``load_state_dict()`` puts them back.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from girih.data.batch import Batch
from girih.errors import ConfigError, NonFiniteError
from girih.models.needs import EMBEDDING
from girih.optim import Adagrad, SparseOptimizer
from girih.sparse.gather import GroupPulled, GroupTile
from girih.sparse.options import StoreOptions
from girih.sparse.pack import POOLING_MODES, Group, Output
from girih.store import read_snapshot, shard_of, write_snapshot
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Admission, Dtype, Eviction, Initializer, Normal, check_dim


class RowOptions(TypedDict, total=False):
    """Options that both modules share; see :class:`EmbeddingBag`."""

    optimizer: SparseOptimizer | None
    initializer: Initializer | None
    admission: Admission | None
    eviction: Eviction | None
    dtype: Dtype | None
    seed: int | None
    share: _Growing | None
    store: StoreOptions | None


class _Rows:
    """One table of rows, which several modules may share."""

    def __init__(self, spec: GroupSpec, options: StoreOptions) -> None:
        self.spec = spec
        self.stores = [options.open_store(spec, shard) for shard in range(options.shards)]
        self.pool = ThreadPoolExecutor(options.shards, "girih-shard") if options.shards > 1 else None
        self.step = 0


class _Apply(torch.autograd.Function):
    """The pooled rows as a node of autograd: backward pushes their gradients to the store."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: _Growing, tile: GroupTile, batch: Batch) -> Tensor:
        pulled = tile.read(batch, module.rows.step + 1, train=True)
        ctx.module, ctx.tile, ctx.batch, ctx.pulled = module, tile, batch, pulled
        return pulled.leaves[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.module.push(ctx.tile, ctx.pulled, ctx.batch, gradients[0])
        return torch.zeros(0), None, None, None


class _Growing(nn.Module):
    """What both modules share: a table, its options, and the way from ids to vectors."""

    rows: _Rows
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
        share: _Growing | None = None,
        store: StoreOptions | None = None,
    ) -> None:
        super().__init__()
        check_dim(type(self).__name__, dim)
        if not isinstance(optimizer, SparseOptimizer | None):
            raise ConfigError(
                f"optimizer = {optimizer!r}: expected one of girih.optim, as girih.optim.Adagrad(lr=0.05)"
            )
        if share is None:
            table = TableSpec("rows", (initializer or Normal(),), admission, eviction)
            segment = Segment(EMBEDDING, dim, optimizer or Adagrad())
            spec = GroupSpec("rows", (table,), (segment,), dtype or "float32", seed or 0)
            self.rows = _Rows(spec, store or StoreOptions())
        else:
            own = (optimizer, initializer, admission, eviction, dtype, seed, store)
            if any(option is not None for option in own):
                raise ConfigError("share = module: its rows have their options already; drop the others")
            if share.dim != dim:
                raise ConfigError(f"dim = {dim}, but the shared rows have dim {share.dim}")
            self.rows = share.rows
        self.dim = dim
        self.lr_scale = 1.0

    def _tile(self, mode: str, *, whole: bool) -> GroupTile:
        """A way to the rows: bags pooled by ``mode``, or every id's vector."""
        output = Output(
            segment=self.rows.spec.segments[0],
            first_column=0,
            features=np.zeros(1, np.int64),
            names=("ids",),
            modes=np.array([POOLING_MODES[mode]], np.int8),
            whole=whole,
        )
        group = Group(self.rows.spec, np.zeros(1, np.int64), np.zeros(1, np.int32), (output,))
        return GroupTile(group, self.rows.stores, self.rows.pool)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__}: rows have one owner and are not copied; use state_dict()")

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return sum(store.num_rows for store in self.rows.stores)

    def push(self, tile: GroupTile, pulled: GroupPulled, batch: Batch, gradient: Tensor) -> None:
        """Applies the gradient of one output; called by autograd.

        Raises:
            NonFiniteError: it has a NaN or an infinity; nothing was applied.
        """
        pulled.leaves[0].grad = gradient.float()
        gradients = tile.gradients(pulled, batch)
        if gradients is None:
            return
        if tile.first_nonfinite(pulled, gradients, batch) is not None:
            raise NonFiniteError(
                f"the gradient of this {type(self).__name__} is NaN or infinite; nothing was applied"
            )
        self.rows.step += 1
        tile.apply(pulled, gradients, self.rows.step, self.lr_scale)

    def assign(self, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows: int64[n] distinct ids, float32[n, dim]; new ids get rows."""
        ids = _integers(ids, "ids").flatten()
        if vectors.shape != (len(ids), self.dim):
            raise ConfigError(f"vectors: shape {tuple(vectors.shape)}, expected {(len(ids), self.dim)}")
        keys, tables = ids.numpy(), np.zeros(len(ids), np.int32)
        if len(np.unique(keys)) != len(keys):
            raise ConfigError("ids: some are repeated; expected each once")
        values = np.ascontiguousarray(vectors.detach().float().numpy())
        shards = shard_of(keys, tables, len(self.rows.stores))
        for number, store in enumerate(self.rows.stores):
            part = np.flatnonzero(shards == number)
            store.assign(keys[part], tables[part], values[part])

    def _read(self, tile: GroupTile, ids: Tensor, bounds: Tensor, weights: Tensor | None = None) -> Tensor:
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
            out: Tensor = _Apply.apply(anchor, self, tile, batch)  # type: ignore[no-untyped-call]
        else:
            out = tile.read(batch, self.rows.step + 1, train=False).leaves[0]
        return out

    def get_extra_state(self) -> dict[str, Any]:
        """Rows, optimizer state and use counts, as tensors of bytes: a part of ``state_dict()``."""
        shards = []
        with tempfile.TemporaryDirectory() as directory:
            for store in self.rows.stores:
                file = Path(directory, "shard.safetensors")
                write_snapshot(store, file)
                shards.append(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
        return {"step": self.rows.step, "shards": shards}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`; the number of shards may differ.

        Raises:
            CheckpointError: rows of another dim, dtype or optimizer.
        """
        with tempfile.TemporaryDirectory() as directory:
            files = []
            for number, shard in enumerate(state["shards"]):
                files.append(Path(directory, f"{number}.safetensors"))
                files[-1].write_bytes(shard.numpy().tobytes())
            for store in self.rows.stores:
                store.restore([read_snapshot(file) for file in files])
        self.rows.step = state["step"]

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        optimizer = self.rows.spec.segments[0].optimizer
        return f"{self.num_rows:,} rows, dim={self.dim}, optimizer={optimizer}"


class EmbeddingBag(_Growing):
    """``torch.nn.EmbeddingBag`` without ``num_embeddings``: any int64 id, rows appear as they are seen.

    Args:
        dim: width of a row.
        mode: "mean", "sum", or "sqrtn" (the sum over √n).
        include_last_offset: offsets end with the number of ids.
        padding_idx: an id that counts as absent: it adds nothing, has no row, and does not count in a mean.
        optimizer: one of ``girih.optim``; Adagrad(lr=0.01) where None.
        initializer, admission, eviction, dtype: of the rows; see ``girih.tables``.
        seed: of the initial values.
        share: another module whose rows this one uses.
        store: shards and memory; each shard has a thread.

    Raises:
        ConfigError: an option out of range, or ``share`` together with options of rows.
    """

    def __init__(
        self,
        dim: int,
        mode: Literal["sum", "mean", "sqrtn"] = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **rows: Unpack[RowOptions],
    ) -> None:
        if mode not in POOLING_MODES:
            raise ConfigError(f"mode = {mode!r}: expected 'sum', 'mean' or 'sqrtn'")
        super().__init__(dim, **rows)
        self._pooled, self._vectors = self._tile(mode, whole=False), self._tile("sum", whole=True)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools bags.

        Args:
            input: ids, int64[N] with ``offsets``, or int64[B, M]: B bags of M ids.
            offsets: int64[B] (or [B+1] with ``include_last_offset``), where each bag begins.
            per_sample_weights: float32 of the shape of ``input``: a bag is Σ w·row, over n or √n by ``mode``.
                Where they require a gradient, bags are pooled by torch, more slowly.

        Returns:
            float32[B, dim] in host memory; an empty bag is 0.

        Raises:
            ConfigError: shapes or types that do not go together.
        """
        ids = _integers(input, "input")
        if ids.dim() == 2:
            if offsets is not None:
                raise ConfigError("offsets: an input of two dimensions is bags already; drop offsets")
            bounds = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        elif ids.dim() == 1:
            bounds = _bounds(offsets, len(ids), last_included=self.include_last_offset)
        else:
            raise ConfigError(f"input: {ids.dim()} dimensions, expected 1 (with offsets) or 2")
        weights = per_sample_weights
        if weights is not None:
            if weights.shape != ids.shape:
                raise ConfigError(
                    f"per_sample_weights: shape {tuple(weights.shape)}, expected {tuple(ids.shape)}"
                )
            weights = weights.cpu().flatten().float()
        ids = ids.flatten()
        if self.padding_idx is not None:
            ids, bounds, weights = _without(self.padding_idx, ids, bounds, weights)
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return self._pool(ids, bounds, weights)
        return self._read(self._pooled, ids, bounds, weights).flatten(1)

    def _pool(self, ids: Tensor, bounds: Tensor, weights: Tensor) -> Tensor:
        """Pools in torch, so that autograd reaches the weights."""
        vectors = self._read(self._vectors, ids, torch.tensor([0, len(ids)]))
        counts = bounds.diff()
        bags = torch.repeat_interleave(torch.arange(len(counts)), counts)
        sums = torch.zeros(len(counts), self.dim).index_add(0, bags, vectors * weights[:, None])
        power = {"sum": 0.0, "mean": -1.0, "sqrtn": -0.5}[self.mode]
        return sums * counts.clamp(min=1).float().pow(power)[:, None]

    @classmethod
    def from_torch(
        cls,
        module: nn.EmbeddingBag | nn.Embedding,
        mode: Literal["sum", "mean", "sqrtn"] | None = None,
        **rows: Unpack[RowOptions],
    ) -> EmbeddingBag:
        """Takes the weights of a torch module: its ids 0 … n-1 become rows, and more may come.

        Its ``mode``, ``padding_idx`` and ``include_last_offset`` are taken too.

        Raises:
            ConfigError: a mode or an option of the torch module that has no counterpart here.
        """
        _check_options(module)
        own: Any = getattr(module, "mode", "mean")
        bag = cls(
            module.embedding_dim,
            mode or own,
            include_last_offset=getattr(module, "include_last_offset", False),
            padding_idx=module.padding_idx,
            **rows,
        )
        _take_weights(bag, module)
        return bag


class Embedding(_Growing):
    """``torch.nn.Embedding`` without ``num_embeddings``: any int64 id, rows appear as they are seen.

    Arguments are those of :class:`EmbeddingBag`, without pooling; ``padding_idx`` gives zeros and learns nothing.
    """

    def __init__(self, dim: int, *, padding_idx: int | None = None, **rows: Unpack[RowOptions]) -> None:
        super().__init__(dim, **rows)
        self._vectors = self._tile("sum", whole=padding_idx is None)
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Ids, int64 of any shape, to float32[*shape, dim] in host memory.

        Raises:
            ConfigError: ids that are not integers.
        """
        ids = _integers(input, "input")
        flat = ids.flatten()
        if self.padding_idx is None:
            bounds = torch.tensor([0, len(flat)])
        else:
            flat, bounds, _ = _without(self.padding_idx, flat, torch.arange(len(flat) + 1), None)
        return self._read(self._vectors, flat, bounds).reshape(*ids.shape, self.dim)

    @classmethod
    def from_torch(cls, module: nn.Embedding, **rows: Unpack[RowOptions]) -> Embedding:
        """Takes the weights of a torch module: its ids 0 … n-1 become rows, and more may come.

        Raises:
            ConfigError: an option of the torch module that has no counterpart here.
        """
        _check_options(module)
        embedding = cls(module.embedding_dim, padding_idx=module.padding_idx, **rows)
        _take_weights(embedding, module)
        return embedding


def _check_options(module: nn.EmbeddingBag | nn.Embedding) -> None:
    for name, without in (("max_norm", None), ("scale_grad_by_freq", False)):
        value = getattr(module, name)
        if value != without:
            raise ConfigError(f"{name} = {value!r}: rows here know no such option; set it to {without}")


def _take_weights(target: _Growing, module: nn.EmbeddingBag | nn.Embedding) -> None:
    ids = torch.arange(module.num_embeddings)
    kept = ids[ids != module.padding_idx] if module.padding_idx is not None else ids
    target.assign(kept, module.weight.detach()[kept])


def _integers(ids: Tensor, name: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"{name}: {kind}, expected a tensor of int64 (or int32)")
    return ids.detach().cpu().long()


def _bounds(offsets: Tensor | None, num_ids: int, *, last_included: bool) -> Tensor:
    if offsets is None:
        raise ConfigError("offsets: missing; an input of one dimension needs them (or give it two)")
    offsets = _integers(offsets, "offsets")
    if offsets.dim() != 1:
        raise ConfigError(f"offsets: {offsets.dim()} dimensions, expected 1")
    bounds = offsets if last_included else torch.cat([offsets, torch.tensor([num_ids])])
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_ids or (bounds.diff() < 0).any():
        raise ConfigError(f"offsets: {bounds.tolist()[:8]}…: expected to rise from 0 to the {num_ids} ids")
    return bounds


def _without(
    absent: int, ids: Tensor, bounds: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    kept = ids != absent
    before = torch.cat([torch.zeros(1, dtype=torch.long), kept.long().cumsum(0)])
    return ids[kept], before[bounds], None if weights is None else weights[kept]
