"""A drop-in module for many features: does the work of a list of ``EmbeddingBag`` in one call.

Rows are trained and read in the same way as in :class:`~girih.nn.EmbeddingBag`; see :mod:`girih.nn.embedding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from girih.errors import ConfigError
from girih.nn.embedding import check_optimizer
from girih.nn.growing import GrowingModule
from girih.nn.growing_tables import GrowingTables
from girih.nn.inputs import joined, packed
from girih.nn.refusals import COLLECTION, answers_movers, class_of, uncaptured
from girih.optim import Adagrad, SparseOptimizer
from girih.schema import Categorical
from girih.sparse.options import StoreOptions
from girih.tables import Table

_OF_DATA = (
    "column", "max_length", "separator", "bucketize", "weights", "list_format", "weight_separator", "padding_id", "float_ids",
)  # fmt: skip


class EmbeddingBagCollection(GrowingModule):
    """Bags of many features, from tables that grow: any int64 id, rows appear when ids are first seen.

    Tables of equal dim, optimizer and dtype are packed into one group, with one read and one update for all of them.

    Args:
        features: ``girih.Categorical``, with name, dim, pooling and table; features may share a table.
        tables: ``girih.Table`` for tables that differ from the defaults: optimizer, initializer, admission, eviction,
            dtype.
        optimizer: of tables without their own optimizer; None is Adagrad(lr=0.01).
        include_last_offset: offsets by name end with the number of ids. Offsets of a packed input always do.
        seed: together with the table's name, the id and the column, determines initial values.
        store: shards and memory; each shard has a thread.

    Raises:
        ConfigError: features that contradict each other; options that are unknown, out of range or for reading data.

    Examples:
        >>> import girih
        >>> import torch
        >>> features = [
        ...     girih.Categorical(name="user", dim=8),
        ...     girih.Categorical(name="tags", dim=4),
        ... ]
        >>> bags = girih.nn.EmbeddingBagCollection(
        ...     features, optimizer=girih.optim.Adagrad(lr=0.05)
        ... )
        >>> pooled = bags(
        ...     {"user": torch.tensor([[7], [8]]), "tags": torch.tensor([[1, 2], [2, 3]])}
        ... )
        >>> pooled["user"].shape, pooled["tags"].shape
        (torch.Size([2, 8]), torch.Size([2, 4]))
    """

    @answers_movers(
        answers=COLLECTION, example='EmbeddingBagCollection([girih.Categorical(name="user", dim=16)])'
    )
    def __init__(
        self,
        features: Sequence[Categorical],
        tables: Sequence[Table] = (),
        *,
        optimizer: SparseOptimizer | None = None,
        include_last_offset: bool = False,
        seed: int = 0,
        store: StoreOptions | None = None,
    ) -> None:
        _check(features)
        check_optimizer(optimizer)
        made = GrowingTables(features, tables, optimizer or Adagrad(), seed, store or StoreOptions())
        super().__init__(made, features)
        self.features = tuple(features)
        self.include_last_offset = include_last_offset
        self._names = tuple(feature.name for feature in features)
        self._one_dim = len({made.schema.dim_of(feature) for feature in features}) == 1

    @uncaptured
    def forward(
        self,
        ids: Mapping[str, tuple[Tensor, Tensor] | Tensor] | Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Mapping[str, Tensor] | Tensor | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """Pools the bags of all features, B each.

        Args:
            ids: by name, ``(ids, offsets)`` or int64[B, M], as in :class:`~girih.nn.EmbeddingBag`. Or packed, int64[N]:
                the ids of the first feature for all examples, then the ids of the second, and so on. Packed ids run no
                Python per feature.
            offsets: for packed ids, int64 or int32[F·B+1]: the bag of feature f in example b is
                ``ids[offsets[f·B+b]:offsets[f·B+b+1]]``, as in a ``KeyedJaggedTensor`` of TorchRec.
            per_sample_weights: float32[N], or by name; a feature that is left out has weights of 1. A bag is Σ w·row,
                over n or √n by its pooling. If they require a gradient, torch pools the bags, more slowly.

        Returns:
            By name, {name: float32[B, D]}; packed, float32[B, F, D], or float32[B, Σ D] if dims differ. The result is on the
            device of the rows; an empty bag is 0.

        Raises:
            ConfigError: features that are missing or unknown; shapes or types that do not fit together.
        """
        if not isinstance(ids, Mapping):
            found = self.pool(
                packed(ids, offsets, per_sample_weights, len(self._names), device=self.tables.device)
            )
            return found.stacked(self._names) if self._one_dim else found.concatenated(self._names)
        if offsets is not None:
            raise ConfigError("offsets: ids come by name; give {name: (ids, offsets)}")
        given = joined(
            ids,
            per_sample_weights,
            self._names,
            device=self.tables.device,
            last_included=self.include_last_offset,
        )
        found = self.pool(given)
        bags = {
            name: bag
            for block in found.blocks
            for name, bag in zip(block.features, block.values.unbind(1), strict=True)
        }
        return {name: bags[name] for name in self._names}

    def assign(self, table: str, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows of a table. New ids get rows.

        Args:
            table: the name of the table.
            ids: int64[n], distinct.
            vectors: float32[n, D].

        Raises:
            ConfigError: an unknown table, shapes or types that do not fit, or repeated ids.
        """
        self.tables.assign(table, ids, vectors)

    def extra_repr(self) -> str:
        """Returns the description for ``print``."""
        rows = self.tables.rows()
        lines = [
            f"{table.name}: {rows[table.name]:,} rows, dim={table.dim}" for table in self.tables.schema.tables
        ]
        where = ", in GPU memory" if self.tables.on_gpu else ""
        return "\n".join([f"features={list(self._names)}{where}", *lines])


def _check(features: Sequence[Categorical]) -> None:
    listed = features if isinstance(features, Sequence) else [features]
    others = [feature for feature in listed if not isinstance(feature, Categorical)]
    if others or listed is not features:
        raise ConfigError(
            f"features: {class_of((others or listed)[0])}; expected a list of girih.Categorical,"
            ' as [girih.Categorical(name="user", dim=16, pooling="sum")]'
        )
    for feature in features:
        for option in _OF_DATA:
            if getattr(feature, option) is not None:
                raise ConfigError(
                    f"feature {feature.name!r}: {option}: is for reading data, but modules receive ids; leave it out"
                )
