"""Lines of a label and pairs: libsvm, ``label index:value …``, and libffm, ``label field:index:value …``.

The table has a column ``label``. The i-th feature, counted from 1, has the columns ``i:index`` and ``i:value``. A
feature reads the i-th pair of each line. Or it reads a list: all pairs of a line, or the pairs of its field.

Shapes: R lines that are not blank, P pairs of all lines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from girih.data.batch import offsets_of
from girih.data.decode.columns import scalar_ids
from girih.data.formats.text import LineBlock, RowsStart, TextSource, read_head
from girih.data.paths import DataFile
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import ConfigError
from girih.kernels.cpu import pairs
from girih.kernels.cpu.arrays import I64, U8, Bools, sealed
from girih.kernels.cpu.strings import ids_of_strings
from girih.schema import Categorical, Feature, Numeric, Schema

Form = Literal["libsvm", "libffm"]
_OTHER_PAIRS, _SEVERAL = 6, 7
_OPTIONS = ("separator", "weights", "column", "list_format", "weight_separator")


def as_columns(schema: Schema, form: Form = "libsvm") -> Schema:
    """Returns the schema with features that read the columns ``i:index`` and ``i:value``.

    Raises:
        ConfigError: the schema needs a column that the format does not have.
    """
    for feature in schema.features:
        for option in _OPTIONS:
            if getattr(feature, option, None) and not (option == "column" and form == "libffm"):
                told = "the i-th pair of a line is the i-th feature, or one feature takes all pairs"
                told = told if form == "libsvm" else "a feature takes the pairs of its field"
                raise ConfigError(f"feature {feature.name!r}: {option} does not go with {form}: {told}")
    if schema.labels.weight:
        raise ConfigError(
            f"labels: weight = {schema.labels.weight!r}: {form} has no column for example weights"
        )
    for option in ("mask", "label_weight"):
        if getattr(schema.labels, option):
            raise ConfigError(f"labels: {option}: {form} has no columns except the label and the features")
    plain = [name for name in schema.labels.names if name not in schema.labels.derive]
    if len(plain) > 1:
        raise ConfigError(
            f"labels: names = {plain}: {form} has one label a line; derive the others from 'label'"
        )
    features = [_reading(feature, place) for place, feature in enumerate(schema.features, start=1)]
    return Schema(features, schema.labels)


def _reading(feature: Feature, place: int) -> Feature:
    if _is_number(feature):
        return replace(feature, column=f"{place}:value")
    if isinstance(feature, Categorical):
        return replace(feature, column=f"{place}:index", weights=f"{place}:value")
    return replace(feature, column=f"{place}:index")


def _is_number(feature: Feature) -> bool:
    return isinstance(feature, Numeric) or (isinstance(feature, Categorical) and bool(feature.bucketize))


class PairsSource(TextSource):
    """Files of pairs.

    In libsvm, a single feature that is not a number takes all pairs of a line. Otherwise each line has one pair per
    feature.

    Args:
        schema: in libffm, a feature takes the pairs of the field named by its ``column``, or by its name.
    """

    kind = "libsvm"

    def __init__(
        self, files: tuple[DataFile, ...], schema: Schema, block_bytes: int, form: Form = "libsvm"
    ) -> None:
        for file in files:
            read_head(file)
        self._features = list(enumerate(schema.features, start=1))
        self._has_fields = form == "libffm"
        self._is_bag = len(schema.features) == 1 and not _is_number(schema.features[0])
        self._label = next(
            (name for name in schema.labels.names if name not in schema.labels.derive), "label"
        )
        names = [f"{place}:{part}" for place, _ in self._features for part in ("index", "value")]
        super().__init__(files, [RowsStart(0, 1, [self._label, *names])] * len(files), block_bytes)
        self.identity += "" if form == "libsvm" else f"/{form}"

    def unit(self, number: int, block: LineBlock, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into labels and pairs. Lines with anything else are bad rows."""
        text = block.data if block.data.endswith(b"\n") else block.data + b"\n"
        data, colons = sealed(np.frombuffer(text, np.uint8)), 2 if self._has_fields else 1
        most, size = text.count(b":"), block.num_lines
        labels, faults = np.zeros((size, 2), np.int64), np.full(size, pairs.BLANK, np.uint8)
        rows, cuts, ids = np.empty(most, np.int64), np.empty((most, 4), np.int64), np.empty(most, np.int64)
        num_pairs = pairs.split_pairs(data, colons, labels, faults, rows, cuts, ids)
        rows, cuts, ids = rows[:num_pairs], cuts[:num_pairs], ids[:num_pairs]
        fields = None
        if self._has_fields:
            fields, _ = ids_of_strings(data, sealed(cuts[:, 0].copy()), sealed(cuts[:, 1] - 1))
        self._find_other_faults(rows, faults, fields)
        counts = np.bincount(rows, minlength=size)
        bad = [BadRow(block.line + int(row), *self._describe_fault(int(faults[row]), int(counts[row])))
               for row in np.flatnonzero(faults > pairs.BLANK)[: 1 if plan.until_bad else None]]  # fmt: skip
        good = faults == pairs.GOOD
        if bad and plan.until_bad:
            good[bad[0].number - block.line :] = False
        numbers = np.flatnonzero(good)
        if not good.all():
            kept = good[rows]
            rows, cuts, ids = (np.cumsum(good) - 1)[rows[kept]], cuts[kept], ids[kept]
            fields = None if fields is None else fields[kept]
        table = {self._label: _words(data, labels[numbers, 0], labels[numbers, 1])}
        for place, feature in self._features:
            mine = self._pairs_of(place, feature, fields)
            values = _words(data, cuts[mine, 2], cuts[mine, 3])
            counts = np.bincount(rows[mine], minlength=len(numbers))
            bounds = pa.array(offsets_of(counts))
            index = pa.array(ids[mine])
            if _is_number(feature):
                values = values.take(pa.array(bounds.to_numpy()[:-1], mask=counts == 0))
            elif fields is not None or self._is_bag:
                index, values = (pa.LargeListArray.from_arrays(bounds, each) for each in (index, values))
            table |= {f"{place}:value": values}
            if not _is_number(feature):
                table |= {f"{place}:index": index}
        made = pa.table({name: table[name] for name in self.own_columns(plan, number)})
        return Unit(made, self.files[number].address, after, numbers + block.line, is_text=True, bad=bad)

    def _pairs_of(self, place: int, feature: Feature, fields: I64 | None) -> Bools | slice:
        """Selects the pairs of a feature among the good lines."""
        if fields is not None:
            mine: Bools = fields == _field(feature)
            return mine
        return slice(None) if self._is_bag else slice(place - 1, None, len(self._features))

    def _find_other_faults(self, rows: I64, faults: U8, fields: I64 | None) -> None:
        """Marks lines whose number of pairs differs from the number of features, or with several pairs for a number."""
        if fields is None and not self._is_bag:
            counts = np.bincount(rows, minlength=len(faults))
            faults[(faults == pairs.GOOD) & (counts != len(self._features))] = _OTHER_PAIRS
        for _, feature in self._features if fields is not None else ():
            if _is_number(feature):
                counts = np.bincount(rows[fields == _field(feature)], minlength=len(faults))
                faults[(faults == pairs.GOOD) & (counts > 1)] = _SEVERAL

    def _describe_fault(self, fault: int, num_pairs: int) -> tuple[str, str]:
        """Returns the kind of a fault, and its message."""
        if fault == _OTHER_PAIRS:
            expected = f"expected {len(self._features)}, one for each feature"
            return "wrong number of pairs", f"{num_pairs} pairs: {expected}"
        form = "field:index:value" if self._has_fields else "index:value"
        trouble = {
            pairs.NO_COLON: "a word without a colon",
            pairs.COLONS: "a word with one colon, or with more than two" if self._has_fields else "a word with several colons",
            pairs.NO_INTEGER: "an index that is not an integer",
            pairs.NO_VALUE: "a value that is missing",
            _SEVERAL: "several pairs in the field of a number",
        }[fault]  # fmt: skip
        return f"not {form}", f"{trouble}: expected label {form} {form} …"


def _field(feature: Feature) -> int:
    return int(scalar_ids(pa.array([feature.source]))[0][0])


def _words(data: U8, starts: I64, ends: I64) -> pa.Array:
    """Returns words of a text as an array of bytes, null for an empty word."""
    starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
    offsets, missing = np.zeros(len(starts) + 1, np.int64), starts == ends
    out = np.empty(int((ends - starts).sum()), np.uint8)
    pairs.copy_words(data, starts, ends, offsets, out)
    validity = pa.array(~missing).buffers()[1] if missing.any() else None
    return pa.Array.from_buffers(
        pa.large_binary(), len(starts), [validity, pa.py_buffer(offsets), pa.py_buffer(out)]
    )
