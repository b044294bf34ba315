"""Drop-in modules: an ``EmbeddingBag`` and an ``Embedding`` whose tables grow, for any PyTorch loop.

Rows are not parameters:

- ``backward`` applies the rows' gradients immediately, one optimizer step per use of the module. ``optimizer.step()``
  does nothing for rows. Two uses in one forward are two steps, in the order of autograd's backward pass. Two backwards
  (``retain_graph=True``, or two losses) apply both.
- ``torch.nn.utils.clip_grad_norm_`` and weight decay of a torch optimizer do not see rows. Scale the loss, or set
  ``module.lr_scale``; ``l2`` belongs to the module's own optimizer.
- ``torch.amp.GradScaler`` must not be used: rows would receive the scaled gradients immediately.
- Under ``torch.no_grad()`` or after ``module.eval()``, rows are only read: a new id gives its initial value, gets no
  row, and nothing is trained. The same holds after ``module.requires_grad_(False)``, even in training mode.
- ``module.cuda()``, or ``to("cuda")`` of the surrounding model, moves the rows to the memory of the GPU, with their
  optimizer state, and ``cpu()`` moves them back. Outputs are on the device of the rows. With
  ``store=girih.StoreOptions(tiers=("gpu",))`` rows are created there, and with ``tiers=("dram",)`` they stay in host
  memory.
- ``state_dict()`` holds the rows with their optimizer state, and ``load_state_dict()`` restores them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from girih import config
from girih.errors import ConfigError
from girih.nn.growing import GrowingModule
from girih.nn.growing_tables import GrowingTables
from girih.nn.inputs import flat, integers, uniform, without
from girih.nn.refusals import answers_movers, class_of, uncaptured
from girih.optim import Adagrad, SparseOptimizer
from girih.schema import Categorical, Pooling
from girih.sparse.groups.pack import POOLING_MODES
from girih.sparse.options import StoreOptions
from girih.tables import Admission, Dim, Dtype, Eviction, Initializer, Table

ROWS = "rows"
"""Name of the table. Initial values depend on it."""


class RowOptions(TypedDict, total=False):
    """Options that both modules share; see :class:`~girih.nn.EmbeddingBag`."""

    optimizer: SparseOptimizer | None
    initializer: Initializer | None
    admission: Admission | None
    eviction: Eviction | None
    dtype: Dtype | None
    seed: int | None
    share: TableModule | None
    store: StoreOptions | None


class TableModule(GrowingModule):
    """A module over one table.

    Attributes:
        dim: width of a row.
    """

    dim: int

    def __init__(self, dim: int, pooling: Pooling, **rows: Unpack[RowOptions]) -> None:
        kind, share = type(self).__name__, rows.pop("share", None)
        dim = config.build(Dim, dim, f"{kind}: dim")
        check_optimizer(rows.get("optimizer"))
        if not isinstance(share, TableModule | None):
            raise ConfigError(
                f"share = {class_of(share)}: expected a module of girih.nn;"
                " from_torch(module) takes the weights of a torch module"
            )
        feature = Categorical(name=kind, table=ROWS, dim=dim, pooling=pooling)
        if share is None:
            table = Table(
                name=ROWS, dim=dim, initializer=rows.get("initializer"), admission=rows.get("admission"),
                eviction=rows.get("eviction"), dtype=rows.get("dtype") or "float32",
            )  # fmt: skip
            optimizer, store = rows.get("optimizer") or Adagrad(), rows.get("store") or StoreOptions()
            made = GrowingTables([feature], [table], optimizer, rows.get("seed") or 0, store)
        else:
            if any(option is not None for option in rows.values()):
                raise ConfigError("share = module: its rows have their options already; drop the others")
            if share.dim != dim:
                raise ConfigError(f"dim = {dim}, but the shared rows have dim {share.dim}")
            made = share.tables
        super().__init__(made, [feature])
        self.dim = dim

    def assign(self, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows. New ids get rows.

        Args:
            ids: int64[n], distinct.
            vectors: float32[n, dim].

        Raises:
            ConfigError: shapes or types that do not fit, or repeated ids.
        """
        self.tables.assign(ROWS, ids, vectors)

    def _describe(self, feature: str) -> str:
        return self._description

    @property
    def _description(self) -> str:
        return f"{type(self).__name__}(dim={self.dim})"

    def extra_repr(self) -> str:
        """Returns the description for ``print``."""
        optimizer = self.tables.groups[0].spec.segments[0].optimizer
        told = f"{self.num_rows:,} rows, dim={self.dim}, optimizer={optimizer}"
        return f"{told}, in GPU memory" if self.tables.on_gpu else told


def check_optimizer(optimizer: object) -> None:
    """Refuses anything that is not an optimizer of rows."""
    if not isinstance(optimizer, SparseOptimizer | None):
        plain = isinstance(optimizer, str | int | float | type)  # torch's optimizers show many lines
        shown = repr(optimizer) if plain else class_of(optimizer)
        raise ConfigError(
            f"optimizer = {shown}: expected one of girih.optim, as girih.optim.Adagrad(lr=0.05)"
        )


Module = TypeVar("Module", bound=TableModule)


class EmbeddingBag(TableModule):
    """``torch.nn.EmbeddingBag`` without ``num_embeddings``: any int64 id, rows appear when ids are first seen.

    Args:
        dim: width of a row.
        mode: "mean", "sum", or "sqrtn" (the sum over √n).
        include_last_offset: True if offsets end with the number of ids.
        padding_idx: an id that counts as absent: it adds nothing, has no row, and does not count in a mean.
        optimizer: one of ``girih.optim``; None is Adagrad(lr=0.01).
        initializer: initial values of rows; None means ``Normal(0, 0.01)``, see ``girih.tables``.
        admission: ids that get a row; None admits each id.
        eviction: rows that leave; None keeps all rows.
        dtype: "float32", or "bfloat16" or "float16", which halve the bytes of stored rows.
        seed: seed of the initial values.
        share: another module whose rows this module also uses.
        store: shards and memory; each shard has a thread.

    Raises:
        ConfigError: an option that is unknown or out of range, or ``share`` together with options of rows.

    Examples:
        Two bags, of the ids 7 and 8, and of a large id alone:

        >>> import girih
        >>> import torch
        >>> bag = girih.nn.EmbeddingBag(8, mode="sum", optimizer=girih.optim.Adam(lr=0.01))
        >>> bag(torch.tensor([7, 8, 10**12]), torch.tensor([0, 2])).shape
        torch.Size([2, 8])
        >>> bag.num_rows
        3
    """

    @answers_movers(RowOptions.__annotations__)
    def __init__(
        self,
        dim: int,
        mode: Pooling = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **rows: Unpack[RowOptions],
    ) -> None:
        if mode not in POOLING_MODES:
            raise ConfigError(f"mode = {mode!r}: expected 'sum', 'mean' or 'sqrtn'")
        super().__init__(dim, mode, **rows)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx

    @uncaptured
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools bags.

        Args:
            input: ids, int64[N] with ``offsets``, or int64[B, M]: B bags of M ids.
            offsets: int64[B] (or [B+1] with ``include_last_offset``), the start of each bag.
            per_sample_weights: float32 of the shape of ``input``: a bag is Σ w·row, over n or √n by ``mode``. If they
                require a gradient, torch pools the bags, more slowly.

        Returns:
            float32[B, dim], on the device of the rows; an empty bag is 0.

        Raises:
            ConfigError: shapes or types that do not fit together.
        """
        flat_bags = flat(
            input,
            offsets,
            per_sample_weights,
            device=self.tables.device,
            last_included=self.include_last_offset,
        )
        if self.padding_idx is not None:
            flat_bags = without(self.padding_idx, flat_bags)
        (bags,) = self.pool(flat_bags).blocks
        return bags.values.flatten(1)

    @classmethod
    def from_torch(
        cls, module: nn.EmbeddingBag | nn.Embedding, mode: Pooling | None = None, **rows: Unpack[RowOptions]
    ) -> EmbeddingBag:
        """Takes the weights of a torch module: its ids 0 … n-1 become rows, and more ids may follow.

        Also takes its ``mode``, ``padding_idx`` and ``include_last_offset``.

        Args:
            module: its weight is float[n, dim].
            mode: replaces the module's mode.
            rows: options of rows, as in the constructor.

        Raises:
            ConfigError: not a torch module of embeddings, or a mode or an option without a counterpart here.
        """
        own: Any = getattr(module, "mode", "mean")
        last_included = getattr(module, "include_last_offset", False)
        return _with_weights_of(
            module, partial(cls, mode=mode or own, include_last_offset=last_included, **rows)
        )


class Embedding(TableModule):
    """``torch.nn.Embedding`` without ``num_embeddings``: any int64 id, rows appear when ids are first seen.

    Args:
        dim: width of a row.
        padding_idx: an id that gives zeros and is not trained.
        rows: the options of rows of :class:`EmbeddingBag`, from ``optimizer`` to ``store``.

    Raises:
        ConfigError: an option that is unknown or out of range, or ``share`` together with options of rows.

    Examples:
        >>> import girih
        >>> import torch
        >>> embedding = girih.nn.Embedding(8, eviction=girih.tables.LRU(max_rows=1_000_000))
        >>> embedding(torch.tensor([[7, 8, 7]])).shape, embedding.num_rows
        (torch.Size([1, 3, 8]), 2)
    """

    @answers_movers(RowOptions.__annotations__)
    def __init__(self, dim: int, *, padding_idx: int | None = None, **rows: Unpack[RowOptions]) -> None:
        super().__init__(dim, "sum", **rows)
        self.padding_idx = padding_idx

    @uncaptured
    def forward(self, input: Tensor) -> Tensor:
        """Maps ids, int64 of any shape, to float32[*shape, dim], on the device of the rows.

        Raises:
            ConfigError: ids that are not integers.
        """
        ids = integers(input, "input").flatten()
        if self.padding_idx is None:
            (vectors,) = self.read(self._vectors, uniform(ids, 1, len(ids)))
        else:
            (vectors,) = self.read(self._bags, without(self.padding_idx, uniform(ids, len(ids), 1)))
        return vectors.reshape(*input.shape, self.dim)

    @classmethod
    def from_torch(cls, module: nn.Embedding, **rows: Unpack[RowOptions]) -> Embedding:
        """Takes the weights of a torch module: its ids 0 … n-1 become rows, and more ids may follow.

        Args:
            module: its weight is float[n, dim].
            rows: options of rows, as in the constructor.

        Raises:
            ConfigError: not a torch module of embeddings, or an option without a counterpart here.
        """
        return _with_weights_of(module, partial(cls, **rows))


def _with_weights_of(module: nn.EmbeddingBag | nn.Embedding, make: Callable[..., Module]) -> Module:
    if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
        raise ConfigError(
            f"from_torch: {class_of(module)}, expected a torch.nn.Embedding or"
            " torch.nn.EmbeddingBag; share=module uses the rows of a module of girih.nn"
        )
    for name, unused in (("max_norm", None), ("scale_grad_by_freq", False)):
        value = getattr(module, name)
        if value != unused:
            raise ConfigError(f"{name} = {value!r}: is not supported; set it to {unused}")
    made = make(dim=module.embedding_dim, padding_idx=module.padding_idx)
    ids = torch.arange(module.num_embeddings)
    kept = ids[ids != module.padding_idx] if module.padding_idx is not None else ids
    made.assign(kept, module.weight.detach()[kept])
    return made
