"""libsvm: ``label index:value index:value …``, the i-th pair of a line being the i-th feature.

As a table: column ``label``, and for the i-th pair, from 1, ``i:index`` and ``i:value``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.columns import string_numbers
from girih.data.paths import File
from girih.data.plan import Plan
from girih.data.position import Cursor
from girih.data.text import Block, read_blocks, read_head
from girih.data.units import BadRow, Unit
from girih.errors import ConfigError
from girih.kernels.cpu import libsvm
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence


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


class PairSource:
    """libsvm files; see :class:`girih.data.units.Source`.

    Args:
        num_pairs: pairs on each line, one a feature.
        label: the name that the first column goes by.
    """

    def __init__(self, files: tuple[File, ...], *, num_pairs: int, label: str, block_bytes: int) -> None:
        self.files = files
        self._num_pairs = num_pairs
        self._label = label
        self._block_bytes = block_bytes
        for file in files:
            read_head(file)

    @property
    def num_parts(self) -> int:
        """The files."""
        return len(self.files)

    @property
    def num_rows(self) -> None:
        """Unknown: nobody has counted the lines."""
        return None

    @property
    def identity(self) -> str:
        """Digest of the sizes of all files, and of the blocks they are cut into."""
        sizes = ",".join(str(file.size) for file in self.files)
        return f"libsvm/{self._block_bytes}/" + hashlib.sha256(sizes.encode()).hexdigest()[:16]

    def check(self, plan: Plan) -> None:
        """Refuses columns that libsvm files do not have."""
        plan.check_names([self._label, *self._pair_columns()], self.files[0].address)

    def read(self, plan: Plan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields the blocks of the files in the order given, from ``start`` on."""
        columns = plan.columns
        for part in range(start.part, len(order)):
            file = self.files[order[part]]
            resumes = part == start.part and start.line > 0
            byte, line = (start.byte, start.line) if resumes else (0, 1)
            for block in read_blocks(file, byte, line, self._block_bytes):
                after = Cursor(part, block.byte + len(block.data), block.line + block.num_lines)
                yield self._unit(file, block, columns, after)

    def _pair_columns(self) -> list[str]:
        return [f"{place}:{part}" for place in range(1, self._num_pairs + 1) for part in ("index", "value")]

    def _unit(self, file: File, block: Block, columns: dict[str, str], after: Cursor) -> Unit:
        data = np.frombuffer(block.data, dtype=np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        if not block.data.endswith(b"\n"):
            ends = np.append(ends, len(data))
        num_lines, pairs = len(ends), self._num_pairs
        starts = np.concatenate([[0], ends[:-1] + 1])
        labels = np.zeros((num_lines, 2), dtype=np.int64)
        indices, value_starts, value_ends = (np.zeros((pairs, num_lines), dtype=np.int64) for _ in range(3))
        counts, status = np.zeros(num_lines, dtype=np.int64), np.zeros(num_lines, dtype=np.uint8)
        libsvm.split_pairs(data, starts, ends, labels, indices, value_starts, value_ends, counts, status)
        bad = [
            self._bad(block, int(row), int(status[row]), int(counts[row]))
            for row in np.flatnonzero(status > libsvm.BLANK)
        ]
        arrays: dict[str, Any] = {}
        unreadable = np.zeros(num_lines, dtype=np.bool_)
        for column in columns:
            first, last = labels[:, 0], labels[:, 1]
            if column != self._label:
                place, _, part = column.partition(":")
                if part == "index":
                    arrays[column] = indices[int(place) - 1]
                    continue
                first, last = value_starts[int(place) - 1], value_ends[int(place) - 1]
            values, empty, not_numbers = string_numbers(
                data, np.ascontiguousarray(first), np.ascontiguousarray(last)
            )
            not_numbers = empty if not_numbers is None else not_numbers | empty
            new = not_numbers & (status == libsvm.OK) & ~unreadable
            bad += [self._not_a_number(block, int(row), column, first, last) for row in np.flatnonzero(new)]
            unreadable |= new
            arrays[column] = values
        good = np.flatnonzero((status == libsvm.OK) & ~unreadable)
        table = pa.table(
            {name: array if len(good) == num_lines else array[good] for name, array in arrays.items()}
        )
        return Unit(table, file.address, "line", block.line, after, numbers=good + block.line, bad=bad)

    def _bad(self, block: Block, row: int, status: int, count: int) -> BadRow:
        reason = {
            libsvm.PAIR_COUNT: f"{count} pairs: expected {self._num_pairs}, one for each feature",
            libsvm.NO_COLON: "a word without a colon: expected label index:value index:value …",
            libsvm.BAD_INDEX: "an index that is not an integer: expected label index:value index:value …",
        }[status]
        kind = "wrong number of pairs" if status == libsvm.PAIR_COUNT else "not index:value"
        return BadRow(block.line + row, kind, reason)

    def _not_a_number(
        self, block: Block, row: int, column: str, first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> BadRow:
        word = block.data[first[row] : last[row]].decode("utf-8", "replace")
        shown = f"= {word!r}" if word else "is missing"
        return BadRow(
            block.line + row,
            f"column {column!r}: expected a number",
            f"column {column!r} {shown}: expected a number",
        )
