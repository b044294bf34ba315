"""Lines of a label and any number of pairs: libffm, ``label field:index:value …``, and libsvm as one bag.

As a table: the label, and for the i-th feature, from 1, ``i:index`` and ``i:value``: lists of text, or one text of numbers.

Shapes: R lines, P pairs of all lines.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.data.formats.text import Block, Start, TextSource, read_head
from girih.data.paths import File
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.schema import Categorical, Numeric, Schema

_BLANKS = bytes.maketrans(b"\t\r", b"  ")
_INTEGER = "^-?[0-9]{1,20}$"


def is_bag(schema: Schema) -> bool:
    """True if the one feature of a schema takes all pairs of a libsvm line."""
    return len(schema.features) == 1 and not _is_number(schema.features[0])


def _is_number(feature: Any) -> bool:
    return isinstance(feature, Numeric) or (isinstance(feature, Categorical) and bool(feature.bucketize))


class PairsSource(TextSource):
    """Files whose lines have any number of pairs.

    Args:
        schema: a feature of libffm takes the pairs of the field that it names by ``column``, or by its name.
        with_fields: whether the files are libffm.
    """

    kind = "pairs"

    def __init__(
        self, files: tuple[File, ...], schema: Schema, block_bytes: int, *, with_fields: bool
    ) -> None:
        for file in files:
            read_head(file)
        label = next((name for name in schema.labels.names if name not in schema.labels.derive), "label")
        self._label, self._num_parts = label, 3 if with_fields else 2
        self._features = list(enumerate(schema.features, start=1))
        names = [f"{place}:{part}" for place, _ in self._features for part in ("index", "value")]
        super().__init__(files, [Start(0, 1, [label, *names])] * len(files), block_bytes)

    def unit(self, number: int, block: Block, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into labels and pairs; lines with anything else are bad rows."""
        text = block.data.translate(_BLANKS)
        lines = (re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text).split(b"\n")
        filled = np.array([bool(line.strip()) for line in lines])
        numbers = np.flatnonzero(filled) + block.line
        split = pc.split_pattern(pa.array(lines, pa.large_binary()).filter(pa.array(filled)), " ")
        words, rows = split.flatten(), pc.list_parent_indices(split).to_numpy()
        kept = pc.binary_length(words).to_numpy() > 0
        words, rows = words.filter(pa.array(kept)), rows[kept]
        colons = pc.count_substring(words, ":").to_numpy()
        is_label = (colons == 0) & (np.diff(rows, prepend=-1) > 0)
        has_label = np.full(len(numbers), -1)
        has_label[rows[is_label]] = np.flatnonzero(is_label)
        labels = words.take(pa.array(has_label, mask=has_label < 0))
        wrong = ~is_label & (colons != self._num_parts - 1)
        is_pair = ~is_label & ~wrong
        parts = pc.split_pattern(words.filter(pa.array(is_pair)), ":").flatten()
        *fields, index, value = (
            parts.take(pa.array(np.arange(part, len(parts), self._num_parts)))
            for part in range(self._num_parts)
        )
        rows_of_pairs = rows[is_pair]
        no_index = ~pc.match_substring_regex(index, _INTEGER).to_numpy(zero_copy_only=False)
        bad: dict[int, str] = {}
        for rows_of_bad, trouble in (
            (rows[wrong], f"a word without {self._num_parts - 1} colons"),
            (rows_of_pairs[no_index], "an index that is not an integer"),
        ):
            for row in rows_of_bad.tolist():
                bad.setdefault(row, trouble)
        found: dict[str, Any] = {self._label: labels}
        for place, feature in self._features:
            mine = np.ones(len(index), np.bool_)
            if fields:
                mine = pc.equal(fields[0], feature.source.encode()).to_numpy(zero_copy_only=False)
            counts = np.bincount(rows_of_pairs[mine], minlength=len(numbers))
            offsets = np.concatenate([[0], np.cumsum(counts)])
            for part, array in (("index", index), ("value", value)):
                found[f"{place}:{part}"] = pa.LargeListArray.from_arrays(
                    pa.array(offsets), array.filter(pa.array(mine))
                )
            if _is_number(feature):
                first = pa.array(offsets[:-1], mask=counts == 0)
                found[f"{place}:value"] = value.filter(pa.array(mine)).take(first)
                for row in np.flatnonzero(counts > 1).tolist():
                    bad.setdefault(row, f"{counts[row]} pairs of field {feature.source}, which is one number")
        table = pa.table(found).select(self.own_columns(plan, number))
        good = np.ones(len(numbers), np.bool_)
        good[list(bad)] = False
        form = "label field:index:value …" if fields else "label index:value …"
        told = [
            BadRow(int(numbers[row]), "not pairs", f"{trouble}: expected {form}")
            for row, trouble in bad.items()
        ]
        if told:
            table = table.filter(pa.array(good))
        return Unit(table, self.files[number].address, after, numbers[good], is_text=True, bad=told)
