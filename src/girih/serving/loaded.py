"""The final model of a run, read-only: predicts data in memory, and returns rows of its tables.

The first prediction or embedding reads the rows from the checkpoint: only their embeddings and first-order weights,
without optimizer state, admission or eviction. A whole table comes from the checkpoint's files, without a store.

Shapes: n examples or ids, T labels, D dim of a table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from girih.checkpoint import Manifest, Storage
from girih.checkpoint.load import LoadedCheckpoint, load_model
from girih.checkpoint.load import load as load_checkpoint
from girih.checkpoint.parts import PartReader
from girih.comm.group import TrainerGroup
from girih.config.train import TrainOptions
from girih.data import Batch, Dataset, NormalizationStats
from girih.data.dataset import make_dataset
from girih.data.decode.columns import scalar_ids
from girih.data.formats.arrow import TableSource
from girih.data.from_memory import array_of, as_table, check_sequences, columns_as_given, columns_of
from girih.data.paths import one_line
from girih.data.read_plan import make_read_plan
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.errors import ConfigError, DataError, nearest
from girih.kernels.cpu import ahead
from girih.models import needs_of
from girih.models.needs import EMBEDDING, FIRST_ORDER, SEQUENCE
from girih.models.two_tower import TwoTower
from girih.optim import SGD
from girih.publishing.part import widened
from girih.serving.opening import OpenedModel, open_model
from girih.sparse.groups.pack import served_schema
from girih.sparse.halves.local import LocalSparse
from girih.sparse.spec import SparseSpec
from girih.store.snapshot.file import describe_header
from girih.telemetry.stats import Stats
from girih.training import evaluation
from girih.training.feeds import ExampleFeed
from girih.training.schedules import in_step
from girih.training.session import Session
from girih.training.specs import dense_spec, expect_data, gpu_of
from girih.training.summary import summary_line

COLUMNS = ("ids", "tables", "counts", EMBEDDING)


class TableRows(NamedTuple):
    """Rows of a table.

    Attributes:
        ids: int64[n].
        rows: float32[n, D], their embeddings.
        counts: int64[n], the number of times that training saw each id.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    counts: NDArray[np.int64]


def table_chunks(place: Storage, manifest: Manifest, table: str) -> Iterator[TableRows]:
    """Yields the rows of a table in chunks, in the order of the files.

    Local files are mapped, not read whole. Remote files are first copied to a temporary file. Checksums of the columns
    are verified before the first row of a file is returned.

    Raises:
        CheckpointError: a file is damaged.
    """
    reader = PartReader(place, manifest.shards)
    for name in sorted(name for name, facts in manifest.shards.items() if table in facts["tables"]):
        file = reader.open(name)
        file.verify(COLUMNS)
        names = [each["name"] for each in file.description["tables"]]
        number, dtype = names.index(table), file.description["dtype"]
        for chunk in file.chunks():
            own = np.flatnonzero(chunk["tables"] == number)
            rows, counts = widened(chunk[EMBEDDING][own], dtype), chunk["counts"][own].astype(np.int64)
            if len(own):
                yield TableRows(chunk["ids"][own], rows, counts)


def has_embeddings(place: Storage, manifest: Manifest, table: str) -> bool:
    """Returns whether the rows of a table have embeddings.

    The result is False if the model reads only their first-order weights, or nothing.
    """
    reader = PartReader(place, manifest.shards)
    names = (name for name, facts in manifest.shards.items() if table in facts["tables"])
    headers = (describe_header(reader.header(name), name) for name in names)
    return any(segment["name"] == EMBEDDING for each in headers for segment in each["segments"])


def whole_table(place: Storage, manifest: Manifest, table: str) -> TableRows:
    """Returns all rows of a table, by id; see :func:`table_chunks`."""
    chunks = list(table_chunks(place, manifest, table))
    if not chunks:
        dim = next(int(each["dim"]) for each in manifest.schema["tables"] if each["name"] == table)
        return TableRows(np.empty(0, np.int64), np.empty((0, dim), np.float32), np.empty(0, np.int64))
    ids, rows, counts = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.argsort(ids)
    return TableRows(ids[order], rows[order], counts[order])


def load(run: str | os.PathLike[str], *, model: nn.Module | str | None = None) -> LoadedModel:
    """Loads the final model of a run, for predictions.

    Args:
        run: a run directory, a directory or address of checkpoints, or one checkpoint. If the run has not ended, its
            latest checkpoint is used, or its best one under early stopping, with a warning.
        model: for a class of the caller: a module, whose weights are replaced; or ``file.py:Class``, which is built
            with the options in the run's ``config.toml`` or in the checkpoint.

    Returns:
        The model. Close it, or use it in a ``with`` block, to free the memory of its tables.

    Raises:
        MissingFileError: there is no such run or checkpoint directory.
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: the model is not one of girih's, and was not given.

    Examples:
        >>> import girih
        >>> import pyarrow as pa
        >>> schema = girih.Schema([girih.Categorical(name="user", dim=4)], labels="clicked")
        >>> data = girih.read_arrow(pa.table({"user": [7, 8], "clicked": [1, 0]}), schema)
        >>> with girih.Trainer(girih.models.DNN(schema, hidden=[8]), run="run") as trainer:
        ...     state = trainer.fit(data)
        >>> model = girih.load("run")
        >>> model.predict({"user": [7, 8, 9]}).shape
        (3,)
        >>> model.close()
    """
    return LoadedModel(open_model(run, model))


class LoadedModel(contextlib.AbstractContextManager["LoadedModel"]):
    """A trained model, made by :func:`girih.load`. One thread at a time may use it.

    Args:
        opened: the files of the model, which ``girih.load`` opens.

    Attributes:
        checkpoint: the address of the checkpoint.
        step: number of training steps of the checkpoint.
        final: True if the run ended with these weights, or its program saved them by ``Trainer.save``.
        schema: features, labels and tables.
        model: the module, in evaluation mode after the first prediction.

    Examples:
        >>> import girih
        >>> import pyarrow as pa
        >>> schema = girih.Schema([girih.Categorical(name="user", dim=4)], labels="clicked")
        >>> data = girih.read_arrow(pa.table({"user": [7, 8], "clicked": [1, 0]}), schema)
        >>> with girih.Trainer(girih.models.DNN(schema, hidden=[8]), run="run") as trainer:
        ...     state = trainer.fit(data)
        >>> with girih.load("run") as model:
        ...     print(model)
        ...     print(model.embedding("user", [7, 8, 9]).shape, model.table("user").ids)
        LoadedModel(DNN, step 1, user 2 rows)
        (3, 4) [7 8]
    """

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened
        self.checkpoint, self.schema, self.model = opened.place.url, opened.schema, opened.model
        self.step, self.final = opened.manifest.step, opened.final
        self._sparse: LocalSparse | None = None

    def __repr__(self) -> str:
        return summary_line(self, self.model, self.step, self.schema, self._opened.manifest.rows)

    def predict(self, data: object) -> NDArray[np.float32]:
        """Returns probabilities, float32[n], or float32[n, T] for several labels.

        For a label with mse or huber loss, the result has the plain output instead of a probability.

        They equal those of ``girih predict`` bit for bit, for the same examples in the same order. The same example in
        another batch may differ in its last bit, because products of other sizes are summed in another order.

        Args:
            data: a dict of columns, or of one example's values; a list of dicts; a DataFrame of pandas or polars; any
                object with Arrow's C stream interface; or a ``Dataset``. It must have the columns of the features;
                others are ignored.

        Raises:
            DataError: a column is missing or unusable, or a value is unusable.
            ConfigError: a ``Dataset`` of another schema.
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        num_labels = len(self.schema.labels.names)
        dataset = data if isinstance(data, Dataset) else self._dataset(data)
        parts = [] if dataset is None else [found for _, found in self.predictions(dataset)]
        found = np.concatenate(parts) if parts else np.empty((0, num_labels), np.float32)
        return found[:, 0] if num_labels == 1 else found

    def predictions(self, data: Dataset) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Yields each batch in order, with its probabilities float32[B, T]. Labels may be missing.

        Raises:
            ConfigError: data of another schema.
            DataError: a bad row or a damaged file.
        """
        expect_data("data", data, self.schema, labels=False)
        session, normalization = self._session
        yield from evaluation.predictions(data, session, normalization, self.schema.labels.losses)

    def outputs(self, data: object) -> NDArray[np.float32]:
        """Returns the model's outputs for all examples in order, float32[n, ...]: logits, or the outputs of both towers.

        Args:
            data: see :meth:`predict`. A column may be null throughout if the wanted output does not depend on it, for
                example the user's columns for the vectors of items.

        Raises:
            ConfigError: there are no examples, or a ``Dataset`` of another schema.
            DataError, CheckpointError: see :meth:`predict`.
        """
        has_towers = isinstance(self.model, TwoTower)
        dataset = data if isinstance(data, Dataset) else self._dataset(data, may_be_null=has_towers)
        parts = []
        if dataset is not None:
            expect_data("data", dataset, self.schema, labels=False)
            parts = [found.numpy() for _, found in evaluation.outputs_of(dataset, *self._session)]
        if not parts:
            raise ConfigError("outputs: the data have no examples")
        return np.concatenate(parts)

    def embedding(
        self, table: str, ids: Sequence[int] | Sequence[str] | NDArray[Any] | pa.Array | torch.Tensor
    ) -> NDArray[np.float32]:
        """Returns the embeddings of some ids, float32[n, D]. An id without a row has its initial value.

        Args:
            table: the name of a table, or of a feature that has one.
            ids: integers or strings, as in the data: a list, an array of numpy or Arrow, a Series, or a tensor.

        Raises:
            ConfigError: there is no such table, or the model reads no embedding of it.
            DataError: the ids are invalid.
            CheckpointError: the checkpoint is damaged.
        """
        name = self._table(table)
        if isinstance(ids, str | bytes | int | np.generic):
            raise DataError(
                f"ids of {table!r} = {ids!r}: expected integers or strings in a list or an array, as [{ids!r}]"
            )
        try:
            if isinstance(ids, torch.Tensor):
                ids = ids.numpy(force=True)
            given = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else array_of(ids)
            keys, _ = scalar_ids(given.combine_chunks() if isinstance(given, pa.ChunkedArray) else given)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise DataError(
                f"ids of {table!r}: {one_line(error)}; expected integers or strings in a list or an array"
            ) from None
        if not np.issubdtype(keys.dtype, np.int64) or (len(given) and not _are_ids(given.type)):
            raise DataError(
                f"ids of {table!r}: received {given.type}; expected integers or strings in a list or an array"
            )
        sparse = self._rows
        dim = next(each.dim or 0 for each in self.schema.tables if each.name == name)
        return sparse.peek_rows(name, np.ascontiguousarray(keys))[:, :dim]

    def table(self, table: str) -> TableRows:
        """Returns all rows of a table by ascending id: ids int64[n], rows float32[n, D], and counts int64[n].

        Args:
            table: the name of a table, or of a feature that has one.

        Raises:
            ConfigError: there is no such table, or the model reads no embedding of it.
            CheckpointError: the checkpoint is damaged.
        """
        opened = self._opened
        return whole_table(opened.place, opened.manifest, self._table(table))

    def close(self) -> None:
        """Frees the tables' memory."""
        if self._sparse is not None:
            self._sparse.close()
            self._sparse = None
        self.__dict__.pop("_session", None)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _dataset(self, data: object, *, may_be_null: bool = False) -> Dataset | None:
        """Returns the examples in memory as a dataset; None if there are none.

        Args:
            may_be_null: unneeded columns may be null. The error for a missing column then says how to give it.
        """
        columns = columns_of(self.schema)
        table = as_table(data, columns, self.schema.null_values)
        if not table.num_columns:
            raise DataError(f"data: no columns; expected {columns}")
        missing = [name for name in columns if name not in table.column_names]
        if missing and may_be_null:
            nulls = ", ".join(f"{name!r}: [None] * {table.num_rows}" for name in missing)
            raise DataError(
                f"data: no column {missing[0]!r}; give the columns of the unwanted tower too, null throughout: {nulls}"
            )
        check_sequences(self.schema, table)
        schema = columns_as_given(self.schema, table)
        if not table.num_rows:
            make_read_plan(schema, (), False).check_names(table.column_names, "data")
            return None
        source, size = TableSource(table, "data"), self._opened.batch_size
        return make_dataset(source, self.schema, schema, with_labels=False, batch_size=size)

    def _table(self, name: str) -> str:
        """Returns the name of a table whose embeddings the model reads."""
        by_feature = {feature.name: feature.table_name for feature in self.schema.sparse}
        names = {table.name for table in self.schema.tables}
        if name not in names and name not in by_feature:
            raise ConfigError(f"table {name!r}: the run has none of that name{nearest(str(name), names)}")
        found = name if name in names else by_feature[name]
        needs = needs_of(self.model, self.schema)
        read = {
            by_feature[feature]: kinds for feature, kinds in needs.items() if kinds & {EMBEDDING, SEQUENCE}
        }
        if found not in read:
            only = "only its first-order weights" if FIRST_ORDER in needs.get(name, ()) else "no embedding"
            kind = type(self.model).__name__
            raise ConfigError(f"table {found!r}: {kind} reads {only}; expected one of {sorted(read)}")
        return found

    @cached_property
    def _loaded(self) -> LoadedCheckpoint:
        """The checkpoint, with its parameters loaded into the module. Rows are still in their files."""
        loaded = load_checkpoint(self._opened.place, self.schema)
        load_model(loaded, self.model)
        return loaded

    @property
    def _rows(self) -> LocalSparse:
        """The tables, without optimizer state, admission and eviction."""
        if self._sparse is None:
            opened = self._opened
            spec = SparseSpec(
                schema=served_schema(self.schema),
                needs=needs_of(self.model, self.schema),
                optimizer=SGD(),  # SGD has no state
                store=opened.store,
                seed=opened.options.seed,
                gpu=gpu_of(self._dense_spec.device, 0),
            )
            kernels = [*ahead.training(()), *ahead.loading()]
            ahead.make_ready([*kernels, *(ahead.on_disk() if opened.store.on_ssd else ())])
            sparse = LocalSparse(spec)
            try:
                shards = PartReader(opened.place, opened.manifest.shards, optimizer_state=False)
                sparse.load(shards, step=opened.manifest.run.num_updates)
            except BaseException:
                sparse.close()
                raise
            self._sparse = sparse
        return self._sparse

    @cached_property
    def _dense_spec(self) -> DenseSpec:
        """The options for predictions: no schedule, no compiler, and a GPU only if there is one."""
        trained = self._opened.options
        options = TrainOptions(
            seed=trained.seed,
            precision=trained.precision,
            dense_forward=trained.dense_forward,
            device="cpu" if trained.device == "cpu" else "auto",
        )
        # keep requires_grad: without it torch multiplies differently, and last bits of predictions change
        return dense_spec(self.model, self.schema, options, torch.optim.SGD, Stats())

    @cached_property
    def _session(self) -> tuple[Session, NormalizationStats]:
        loaded = self._loaded
        normalization = loaded.normalization or NormalizationStats.empty(self.schema)
        dense = Replica(self._dense_spec)
        feed = ExampleFeed(TrainerGroup())
        session = Session(sparse=self._rows, dense=dense, schedule=in_step(), feed=feed)
        return session, normalization


def _are_ids(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind)
        or types.is_binary(kind) or types.is_large_binary(kind) or types.is_string_view(kind) or types.is_dictionary(kind)
    )  # fmt: skip
