"""Turns tensors of a request into a batch, in the same way as columns of a file, without a dataset.

Most integers and numbers need no conversion and are copied directly. Strings, times, weights and transformed features
go through the decoder for files. So they have the same meaning as in files.

A tensor is a column:

    [n]        a value for each example; [n, 1] is the same
    [n, L]     a list of L values for each example
    [M]        all examples' lists one after the other; NAME.lengths, int32 or int64 [n], has the length of each list
    [1]        one value, or one list, for all examples, if other columns have n

Shapes: n examples, F categorical and sequence features, X numeric features, M values of a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.data.batch import Batch, single_bags
from girih.data.decode.batches import BagColumn, filled_weights
from girih.data.decode.columns import is_string, keep_last
from girih.data.decode.decoder import decode
from girih.data.from_memory import columns_as_given, columns_of
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan, make_read_plan
from girih.data.unit import Unit
from girih.errors import DataError, UserError, nearest
from girih.kernels.buffers import Buffers
from girih.schema import Categorical, Feature, Numeric, Schema
from girih.schema import Sequence as SequenceFeature
from girih.serving.plain import MOST_IDS, PlainReader
from girih.serving.protocol import InferRequest
from girih.serving.signature import LENGTHS, inputs_of
from girih.serving.tensors import RequestTensor, datatype_of

MOST_BYTES = 256 << 20
"""The limit in bytes of a column that is repeated for each example before it is read."""
_WHERE = "request"
_MOST_PLANS = 256


class TooLarge(UserError, ValueError):
    """A request with more examples, ids or bytes than the server accepts."""


class RequestColumn(NamedTuple):
    """A column of a request: its values, the bounds of the examples' lists, and the number of examples.

    The bounds are None if each example has one value.
    """

    values: Any
    offsets: NDArray[np.int64] | None
    num_rows: int


class RequestReader:
    """Reads requests for a schema.

    Args:
        most_examples: the limit per request.
    """

    def __init__(self, schema: Schema, most_examples: int) -> None:
        self._schema, self._most = schema, most_examples
        self._columns = columns_of(schema)
        self._ids = {column.name for column in inputs_of(schema) if column.kind == "ids"}
        self._known = {*self._columns, *(name + LENGTHS for name in self._columns)}
        listed = (f for f in schema.sparse if not isinstance(f, Categorical) or f.weights)
        self._lists = {name for feature in listed for name in _sources(feature)}
        self._plain = {f.name for f in schema.features if _is_plain(f)}
        self._quick = PlainReader(schema, self._plain, most_examples)
        self._separators: dict[str, set[str]] = {}  # the separators at which strings of a column are split
        for feature in schema.features:
            if not isinstance(feature, Numeric) and feature.separator:
                for name in _sources(feature):
                    self._separators.setdefault(name, set()).add(feature.separator)
        self._plans: dict[tuple[Any, ...], ReadPlan] = {}
        self._buffers = Buffers()

    def read_request(self, request: InferRequest) -> Batch:
        """Calls :meth:`read` with the tensors of a request, after trying the fast path for plain bytes."""
        if request.layout is not None:
            batch = self._quick.read(request.layout, request.data)
            if batch is not None:
                return batch
        return self.read(request.tensors)

    def read(self, tensors: Mapping[str, RequestTensor]) -> Batch:
        """Returns a batch of a request's examples, with numbers that are not yet standardized.

        Raises:
            DataError: an input is missing, is read by no feature, has an unusable type or value, or has a shape that
                contradicts the others. The error names the input.
            TooLarge: more examples than ``most_examples``, more than :data:`MOST_IDS` ids, or more than
                :data:`MOST_BYTES` of a shared string.
        """
        columns = self._columns_in(tensors)
        size = self._size(columns)
        features: list[tuple[Feature, int]] = []  # for the decoder, with their numbers of rows
        bags: list[BagColumn | None] = []
        for feature in self._schema.sparse:
            own = (
                self._plain_bags(feature, columns[feature.source], size)
                if feature.name in self._plain
                else None
            )
            bags.append(own)
            if own is None:
                features.append((feature, self._rows_of(feature, columns, size)))
        numeric = np.zeros((size, len(self._schema.numeric)), np.float32)
        for place, number in enumerate(self._schema.numeric):
            if number.name not in self._plain or not _fill(numeric, place, columns[number.source]):
                features.append((number, self._rows_of(number, columns, size)))
        if not np.isfinite(numeric).all() and numeric.size:  # the decoder reports the value
            features = [(f, r) for f, r in features if not isinstance(f, Numeric)]
            features += [(f, self._rows_of(f, columns, size)) for f in self._schema.numeric]
        for num_rows in {rows for _, rows in features}:
            self._decode([f for f, rows in features if rows == num_rows], columns, num_rows, bags, numeric)
        return _batch([each for each in bags if each is not None], numeric)

    def _columns_in(self, tensors: Mapping[str, RequestTensor]) -> dict[str, RequestColumn]:
        """Returns each column that the schema reads."""
        for name in tensors:
            if name not in self._known:
                raise DataError(f"input {name!r}: no feature reads it{nearest(name, self._known)}")
        found = {}
        for name in self._columns:
            tensor = tensors.get(name)
            if tensor is None:
                raise DataError(f"input {name!r} is missing; expected {', '.join(self._columns)}")
            if tensor.datatype == "BOOL" and name in self._ids:
                raise DataError(f"input {name!r}: BOOL; expected ids, which are integers or strings")
            if len(tensor.shape) == 2 and tensor.shape[0] > self._most:  # before anything large is made
                raise TooLarge(
                    f"{tensor.shape[0]:,} examples in one request; expected at most {self._most:,}: send several requests"
                )
            lengths = None if name + LENGTHS in self._columns else tensors.get(name + LENGTHS)
            found[name] = _column(tensor, lengths)
        return found

    def _size(self, columns: Mapping[str, RequestColumn]) -> int:
        """Returns n. All columns must have n examples, except columns that all examples share."""
        size = max((column.num_rows for column in columns.values()), default=0)
        largest = next(name for name, column in columns.items() if column.num_rows == size)
        if any(column.num_rows == 0 for column in columns.values()):
            raise DataError("no examples: an input has none; expected at least one")
        if size > self._most:
            raise TooLarge(
                f"{size:,} examples in one request; expected at most {self._most:,}: send several requests"
            )
        num_ids = 0
        for name, column in columns.items():
            if column.num_rows not in (1, size):
                raise DataError(
                    f"input {name!r} has {column.num_rows:,} examples, {largest!r} has {size:,}; expected as many, or 1 for all"
                    f"{self._lengths_missing(columns, name, largest)}"
                )
            num_ids += self._num_values(name, column) * (size // column.num_rows)
        if num_ids > MOST_IDS:
            raise TooLarge(
                f"{num_ids:,} values in one request; expected at most {MOST_IDS:,}: send several requests"
            )
        return size

    def _lengths_missing(self, columns: Mapping[str, RequestColumn], *names: str) -> str:
        """Describes the missing lengths, if one of the columns must have lists but none were given."""
        for name in names:
            values, offsets, _ = columns[name]
            is_split = name in self._separators and isinstance(values, pa.Array)
            if name in self._lists and offsets is None and not is_split:
                return f"; {name} has lists: {name + LENGTHS} says how many values each example has"
        return ""

    def _num_values(self, name: str, column: RequestColumn) -> int:
        """Counts the values of a column after its strings are split."""
        values, separators = column.values, self._separators.get(name)
        is_split = separators is not None and column.offsets is None
        if not (is_split and isinstance(values, pa.Array) and is_string(values.type)):
            return len(values)
        most = max(pc.sum(pc.count_substring(values, each)).as_py() or 0 for each in separators or ())
        return len(values) + most

    def _plain_bags(
        self, feature: Categorical | SequenceFeature, column: RequestColumn, size: int
    ) -> BagColumn | None:
        """Returns the ids of a feature with integer ids; None if the decoder must read them."""
        ids, offsets, num_rows = column
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
            return None
        ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)
        if offsets is not None and feature.max_length:
            ids, offsets = keep_last(ids, offsets, feature.max_length)
        return _repeated(BagColumn(ids, offsets), num_rows, size)

    def _rows_of(self, feature: Feature, columns: Mapping[str, RequestColumn], size: int) -> int:
        """Returns 1 if all examples share the feature's columns, else n."""
        return max(columns[name].num_rows for name in _sources(feature)) if size > 1 else size

    def _decode(
        self,
        features: Sequence[Feature],
        columns: Mapping[str, RequestColumn],
        num_rows: int,
        bags: list[BagColumn | None],
        numeric: NDArray[np.float32],
    ) -> None:
        """Decodes the features of columns with ``num_rows`` rows. One row is repeated for all examples."""
        names = list(dict.fromkeys(name for feature in features for name in _sources(feature)))
        table = pa.table({name: _arrow(name, columns[name], num_rows) for name in names})
        plan = self._plan([feature.name for feature in features], table)
        unit = Unit(table, _WHERE, Cursor(1), range(1, num_rows + 1))
        rows, bad = decode(unit, plan, self._buffers)
        if bad:
            raise DataError(unit.locate(bad[0]))
        size = len(numeric)
        places = {f.name: place for place, f in enumerate(self._schema.sparse)}
        for feature, own in zip(plan.schema.sparse, rows.bags, strict=True):
            bags[places[feature.name]] = _repeated(own, num_rows, size)
        places = {f.name: place for place, f in enumerate(self._schema.numeric)}
        for number, values in zip(plan.schema.numeric, rows.numeric.T, strict=True):
            numeric[:, places[number.name]] = values

    def _plan(self, names: Sequence[str], table: pa.Table) -> ReadPlan:
        """Returns the decoder's plan for a table. Makes one plan for all tables with these column types."""
        key = (*names, *table.schema.types)
        plan = self._plans.get(key)
        if plan is None:
            narrowed = columns_as_given(self._schema.narrowed(names), table)
            plan = make_read_plan(narrowed, (), False)
            try:
                plan.check_types(dict(zip(table.schema.names, table.schema.types, strict=True)), _WHERE)
            except DataError as error:
                raise DataError(_in_their_words(str(error), table.schema.types)) from None
            if len(self._plans) < _MOST_PLANS:
                self._plans[key] = plan
        return plan


def _in_their_words(message: str, kinds: Sequence[object]) -> str:
    """Rewrites an error about a column's type for clients.

    Uses datatypes of the protocol, and leaves out the advice for files.
    """
    for kind in kinds:
        message = message.replace(f" ({kind}) ", f" ({datatype_of(kind)}) ")
    return message.partition("; cast the column")[0]


def _is_plain(feature: Feature) -> bool:
    """Returns whether the feature's integers or numbers need no conversion."""
    if isinstance(feature, Numeric):
        return not set(feature.transform) - {"standardize"}
    if isinstance(feature, Categorical) and (
        feature.bucketize or feature.transform or feature.weights or feature.weight_separator
    ):
        return False
    return not feature.is_split and feature.padding_id is None


def _sources(feature: Feature) -> list[str]:
    weights = feature.weights if isinstance(feature, Categorical) else None
    return [feature.source, *([weights] if weights else [])]


def _column(tensor: RequestTensor, lengths: RequestTensor | None) -> RequestColumn:
    """Returns a tensor as a column. If it has lists, the column includes their lengths."""
    if lengths is not None:
        return RequestColumn(tensor.values, _offsets(tensor, lengths), lengths.num_values)
    num_rows = tensor.shape[0]
    if len(tensor.shape) == 1 or tensor.shape[1] == 1:
        return RequestColumn(tensor.values, None, num_rows)
    return RequestColumn(tensor.values, np.arange(num_rows + 1) * tensor.shape[1], num_rows)


def _offsets(tensor: RequestTensor, lengths: RequestTensor) -> NDArray[np.int64]:
    """Returns the bounds of each example's list, int64[n+1]."""
    given, name = lengths.values, tensor.name
    if (
        lengths.datatype not in ("INT32", "INT64")
        or not isinstance(given, np.ndarray)
        or len(lengths.shape) != 1
    ):
        raise DataError(
            f"input {lengths.name!r}: {lengths.datatype}{list(lengths.shape)}; expected INT32 or INT64 of [n]"
        )
    if len(tensor.shape) != 1:
        raise DataError(
            f"input {name!r}: a shape of {list(tensor.shape)}, but {lengths.name!r} is given; expected [M], all lists one after the other"
        )
    if len(given) and (given.min() < 0 or given.max() > tensor.num_values):
        raise DataError(
            f"input {lengths.name!r}: lengths from {given.min():,} to {given.max():,}; expected 0 to {tensor.num_values:,}"
        )
    offsets = np.zeros(len(given) + 1, np.int64)
    np.cumsum(given, out=offsets[1:])
    if offsets[-1] != tensor.num_values:
        raise DataError(
            f"input {name!r} has {tensor.num_values:,} values, {lengths.name!r} sums to {offsets[-1]:,}; expected as many"
        )
    return offsets


def _fill(numeric: NDArray[np.float32], place: int, column: RequestColumn) -> bool:
    """Writes a numeric feature's column; False if the decoder must read it."""
    values = column.values
    if column.offsets is not None or not isinstance(values, np.ndarray):
        return False
    if values.dtype.kind not in "fiu":
        return False
    if values.dtype.kind != "f":
        values = values.astype(np.float64)  # the decoder converts in the same way
    with np.errstate(over="ignore"):  # numbers beyond float32 become inf, and are found later
        numeric[:, place] = values
    return True


def _repeated(bags: BagColumn, num_rows: int, size: int) -> BagColumn:
    """Repeats the bags of one example for all; returns bags of n examples unchanged."""
    if num_rows == size:
        return bags
    ids, offsets, weights = bags
    tiled = None if weights is None else np.tile(weights, size)
    return BagColumn(np.tile(ids, size), None if offsets is None else np.arange(size + 1) * len(ids), tiled)


def _arrow(name: str, column: RequestColumn, num_rows: int) -> pa.Array:
    """Returns a column with ``num_rows`` rows as an Arrow array.

    Raises:
        TooLarge: the column is repeated, and then has more than :data:`MOST_BYTES`.
    """
    values = column.values if isinstance(column.values, pa.Array) else pa.array(column.values)
    if column.offsets is not None:
        values = pa.LargeListArray.from_arrays(pa.array(column.offsets), values)
    if column.num_rows != num_rows:
        if values.nbytes * num_rows > MOST_BYTES:
            raise TooLarge(
                f"input {name!r}: {values.nbytes:,} bytes for each of {num_rows:,} examples; expected at most {MOST_BYTES:,} in all:"
                " send several requests"
            )
        values = values.take(pa.array(np.zeros(num_rows, np.int64)))
    return values


def _batch(bags: Sequence[BagColumn], numeric: NDArray[np.float32]) -> Batch:
    """Returns a batch of the bags of all features, int64[N], and numbers, float32[n, X]."""
    size = len(numeric)
    if all(each.offsets is None for each in bags):
        offsets = single_bags(len(bags) * size)
    else:
        offsets = np.zeros(len(bags) * size + 1, np.int32)
        np.cumsum(np.concatenate([np.diff(each.bounds()) for each in bags]), out=offsets[1:])
    weights = filled_weights(bags)
    return Batch(
        ids=np.concatenate([each.ids for each in bags]) if bags else np.empty(0, np.int64),
        offsets=offsets,
        weights=None if weights is None else np.concatenate(weights),
        numeric=numeric,
        labels=np.empty((size, 0), np.float32),
    )
