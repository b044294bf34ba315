"""The common part of modules over one table: its options, and rows that several modules share."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from girih import config
from girih.errors import ConfigError
from girih.nn.growing import GrowingModule
from girih.nn.growing_tables import GrowingTables
from girih.optim import Adagrad, SparseOptimizer
from girih.schema import Categorical, Pooling
from girih.sparse.options import StoreOptions
from girih.tables import Admission, Dim, Dtype, Eviction, Initializer, Table

ROWS = "rows"
"""Name of the table, of which initial values are a function."""


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

    def __init__(
        self,
        dim: int,
        pooling: Pooling,
        *,
        optimizer: SparseOptimizer | None = None,
        initializer: Initializer | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        dtype: Dtype | None = None,
        seed: int | None = None,
        share: TableModule | None = None,
        store: StoreOptions | None = None,
    ) -> None:
        kind = type(self).__name__
        dim = config.build(Dim, dim, f"{kind}: dim")
        check_optimizer(optimizer)
        if not isinstance(share, TableModule | None):
            raise ConfigError(
                f"share = a {type(share).__module__}.{type(share).__qualname__}: expected a module of girih.nn;"
                " from_torch(module) takes the weights of a torch module"
            )
        feature = Categorical(name=kind, table=ROWS, dim=dim, pooling=pooling)
        if share is None:
            rows = Table(
                name=ROWS, dim=dim, initializer=initializer, admission=admission, eviction=eviction,
                dtype=dtype or "float32",
            )  # fmt: skip
            made = GrowingTables(
                [feature], [rows], optimizer or Adagrad(), seed or 0, store or StoreOptions()
            )
        else:
            own = (optimizer, initializer, admission, eviction, dtype, seed, store)
            if any(option is not None for option in own):
                raise ConfigError("share = module: its rows have their options already; drop the others")
            if share.dim != dim:
                raise ConfigError(f"dim = {dim}, but the shared rows have dim {share.dim}")
            made = share.tables
        super().__init__(made, [feature])
        self.dim = dim

    def assign(self, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows: int64[n] distinct ids, float32[n, dim]; new ids get rows."""
        self.tables.assign(ROWS, ids, vectors)

    def _describe(self, feature: str) -> str:
        return self._description

    @property
    def _description(self) -> str:
        return f"{type(self).__name__}(dim={self.dim})"

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        optimizer = self.tables.groups[0].spec.segments[0].optimizer
        told = f"{self.num_rows:,} rows, dim={self.dim}, optimizer={optimizer}"
        return f"{told}, in GPU memory" if self.tables.on_gpu else told


def check_optimizer(optimizer: object) -> None:
    """Refuses what is no optimizer of rows."""
    if not isinstance(optimizer, SparseOptimizer | None):
        kind = type(optimizer)
        shown = repr(optimizer)
        if not isinstance(optimizer, str | int | float | type):  # torch's show all their options, by lines
            shown = f"a {kind.__module__}.{kind.__qualname__}"
        raise ConfigError(
            f"optimizer = {shown}: expected one of girih.optim, as girih.optim.Adagrad(lr=0.05)"
        )
