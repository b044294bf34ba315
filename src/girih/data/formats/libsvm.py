"""libsvm: ``label index:value index:value …``, the i-th pair of a line being the i-th feature.

As a table: column ``label``, and for the i-th pair, from 1, ``i:index`` and ``i:value``.

Shapes: R lines.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.decode.columns import string_numbers
from girih.data.formats.delimited import split_cells
from girih.data.formats.text import Block, TextSource, read_head
from girih.data.paths import File
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import ConfigError, DataError
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence

_SPACES = bytes.maketrans(b"\t\r", b"  ")
_NO_MARKS = bytes(set(range(256)) - set(b" :\n"))
_INTEGER = re.compile(rb"-?[0-9]{1,20}")
_NO_COLON = "a word without a colon"
_TWO_COLONS = "a word with several colons"
_BAD_INDEX = "an index that is not an integer"


def as_columns(schema: Schema) -> Schema:
    """The schema with its features reading the columns ``i:index`` and ``i:value``.

    Raises:
        ConfigError: something that libsvm has no columns for.
    """
    for feature in schema.features:
        for option in ("separator", "weights", "column"):
            if getattr(feature, option, None):
                raise ConfigError(
                    f"feature {feature.name!r}: {option} does not go with libsvm:"
                    " the i-th pair of a line is the i-th feature"
                )
    if schema.labels.weight:
        raise ConfigError(
            f"labels: weight = {schema.labels.weight!r}: libsvm has no column for example weights"
        )
    plain = [name for name in schema.labels.names if name not in schema.labels.derive]
    if len(plain) > 1:
        raise ConfigError(
            f"labels: names = {plain}: libsvm has one label a line; derive the others from 'label'"
        )
    features = [_reading(feature, place) for place, feature in enumerate(schema.features, start=1)]
    return Schema(features, schema.labels)


def _reading(feature: Feature, place: int) -> Feature:
    if isinstance(feature, Numeric) or (isinstance(feature, Categorical) and feature.bucketize):
        return replace(feature, column=f"{place}:value")
    if isinstance(feature, Sequence):
        return replace(feature, column=f"{place}:index")
    return replace(feature, column=f"{place}:index", weights=f"{place}:value")


class LibsvmSource(TextSource):
    """libsvm files.

    Args:
        num_pairs: pairs on each line, one per feature.
        label: the name that the first column goes by.
    """

    kind = "libsvm"

    def __init__(self, files: tuple[File, ...], *, num_pairs: int, label: str, block_bytes: int) -> None:
        for file in files:
            read_head(file)
        super().__init__(files, [(0, 1)] * len(files), block_bytes)
        self._num_pairs = num_pairs
        self._indices = [f"{place}:index" for place in range(1, num_pairs + 1)]
        pairs = zip(self._indices, (f"{place}:value" for place in range(1, num_pairs + 1)), strict=True)
        self._names = [label, *chain.from_iterable(pairs)]

    def check(self, plan: ReadPlan) -> None:
        """Refuses columns that libsvm files do not have."""
        plan.check_names(self._names, self.files[0].address)

    def unit(self, number: int, block: Block, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into labels and pairs; lines without as many pairs as features are bad rows."""
        address = self.files[number].address
        text, lines, bad = self._regular(block)
        columns = list(dict.fromkeys([*self._indices, *plan.columns]))
        cells = text.replace(b":", b" ")
        may_be_hex = b"x" in text or b"X" in text  # 0x10, which Arrow takes for an integer
        types = {name: pa.int64() if name in self._indices else pa.float64() for name in columns}
        try:
            table, _ = split_cells(cells, self._names, columns, " ", "", address, {} if may_be_hex else types)
        except DataError:  # a cell is no number: look at each
            table, _ = split_cells(cells, self._names, columns, " ", "", address)
        arrays: dict[str, NDArray[Any]] = {}
        good = np.ones(len(lines), dtype=np.bool_)
        for column in columns:
            words = table.column(column).combine_chunks()
            if words.type == types[column]:
                arrays[column] = words.to_numpy()
                continue
            is_index = column in self._indices
            arrays[column], wrong = _integers(words) if is_index else _numbers(words)
            for row in np.flatnonzero(wrong & good).tolist():
                line, word = int(lines[row]), words[row].as_py()
                bad.append(
                    _not_index_value(line, _BAD_INDEX) if is_index else _not_a_number(line, column, word)
                )
            good &= ~wrong
        table = pa.table({name: arrays[name][good] for name in plan.columns})
        return Unit(table, address, "line", block.line, after, numbers=lines[good], bad=bad)

    def _regular(self, block: Block) -> tuple[bytes, NDArray[np.int64], list[BadRow]]:
        """The lines that can be split at spaces and colons alone, the number of each, and those that cannot."""
        text = block.data.translate(_SPACES)
        text = text if text.endswith(b"\n") else text + b"\n"
        text = re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text
        for several, one in ((b"  ", b" "), (b" \n", b"\n")):
            while several in text:
                text = text.replace(several, one)
        marks, found = b" :" * self._num_pairs, text.translate(None, _NO_MARKS)
        if found == (marks[1:] + b"\n") * block.num_lines:  # no labels
            text, found = b" " + text[:-1].replace(b"\n", b"\n ") + b"\n", (marks + b"\n") * block.num_lines
        if found == (marks + b"\n") * block.num_lines:
            return text, np.arange(block.line, block.line + block.num_lines), []
        regular, lines, bad = [], [], []
        for number, line in enumerate(text.split(b"\n"), start=block.line):
            if line.translate(None, _NO_MARKS) == marks:
                lines.append(number)
                regular.append(line)
                continue
            words = line.split()
            if not words:
                continue
            label = b"" if b":" in words[0] else words.pop(0)
            colons = {word.count(b":") for word in words}
            if colons - {1}:
                bad.append(_not_index_value(number, _NO_COLON if 0 in colons else _TWO_COLONS))
            elif len(words) != self._num_pairs:
                message = f"{len(words)} pairs: expected {self._num_pairs}, one for each feature"
                bad.append(BadRow(number, "wrong number of pairs", message))
            else:
                lines.append(number)
                regular.append(b" ".join([label, *words]))
        return b"\n".join(regular) + b"\n", np.array(lines, dtype=np.int64), bad


def _numbers(words: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """float64[R], and bool[R] where a word is not a number."""
    values, empty, unreadable = string_numbers(words)
    return values, empty if unreadable is None else empty | unreadable


def _integers(words: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """int64[R], and bool[R] where a word is not a decimal integer of 64 bits."""
    read = [int(word) if _INTEGER.fullmatch(word) else None for word in words.to_pylist()]
    wrong = [number is None or not -(1 << 63) <= number < 1 << 63 for number in read]
    integers = [0 if bad else number for number, bad in zip(read, wrong, strict=True)]
    return np.array(integers, dtype=np.int64), np.array(wrong, dtype=np.bool_)


def _not_index_value(line: int, trouble: str) -> BadRow:
    return BadRow(line, "not index:value", f"{trouble}: expected label index:value index:value …")


def _not_a_number(line: int, column: str, word: bytes) -> BadRow:
    shown = f"= {word.decode('utf-8', 'replace')!r}" if word else "is missing"
    expected = "expected a number"
    return BadRow(line, f"column {column!r}: {expected}", f"column {column!r} {shown}: {expected}")
