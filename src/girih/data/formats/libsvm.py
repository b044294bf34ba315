"""libsvm: ``label index:value index:value …``, the i-th pair of a line being the i-th feature.

As a table: column ``label``, and for the i-th pair, from 1, ``i:index`` and ``i:value``.

Shapes: R lines.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.decode.columns import number_of
from girih.data.formats.delimited import split_cells
from girih.data.formats.text import Block, Start, TextSource, read_head
from girih.data.paths import File
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import BadRow, Unit
from girih.errors import ConfigError, DataError
from girih.schema import Categorical, Feature, Numeric, Schema, Sequence

_SPACES = bytes.maketrans(b"\t\r", b"  ")
_NO_MARKS = bytes(set(range(256)) - set(b" :\n"))
_INTEGER = re.compile(rb"-?[0-9]{1,20}")


def as_columns(schema: Schema, form: str = "libsvm") -> Schema:
    """The schema with its features reading the columns ``i:index`` and ``i:value``; ``form`` is libsvm or libffm.

    Raises:
        ConfigError: something that libsvm has no columns for.
    """
    for feature in schema.features:
        for option in ("separator", "weights", "column", "list_format", "weight_separator"):
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
            raise ConfigError(f"labels: {option}: {form} has no other column than the label and the features")
    plain = [name for name in schema.labels.names if name not in schema.labels.derive]
    if len(plain) > 1:
        raise ConfigError(
            f"labels: names = {plain}: {form} has one label a line; derive the others from 'label'"
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
    """libsvm files whose lines hold one label and a pair per feature of the schema."""

    kind = "libsvm"

    def __init__(self, files: tuple[File, ...], schema: Schema, block_bytes: int) -> None:
        for file in files:
            read_head(file)
        places = range(1, len(schema.features) + 1)
        label = next((name for name in schema.labels.names if name not in schema.labels.derive), "label")
        self._num_pairs = len(places)
        self._indices = [f"{place}:index" for place in places]
        self._names = [label, *(f"{place}:{part}" for place in places for part in ("index", "value"))]
        super().__init__(files, [Start(0, 1, self._names)] * len(files), block_bytes)

    def unit(self, number: int, block: Block, plan: ReadPlan, after: Cursor) -> Unit:
        """Splits a block into labels and pairs; lines without as many pairs as features are bad rows."""
        address = self.files[number].address
        text, lines, bad = self._regular(block, plan.until_bad)
        cells = text.replace(b":", b" ")
        numbers = {name: pa.float64() for name in self.own_columns(plan, number) if name not in self._indices}
        types = dict.fromkeys(self._indices, pa.int64()) | numbers
        large = dict.fromkeys(self._indices, pa.uint64()) | numbers
        table = None
        for kinds in (
            (types, large) if b"x" not in cells and b"X" not in cells else ()
        ):  # Arrow reads 0x10 as 16
            with contextlib.suppress(DataError):  # a cell is no number
                table, _ = split_cells(cells, self._names, kinds, " ", "", address)
                break
        if table is None or any(column.null_count for column in table.columns):
            words, _ = split_cells(cells, self._names, dict.fromkeys(types, pa.binary()), " ", "", address)
            table, lines = _checked(words, types, lines, bad, plan.until_bad)
        table = table.select(self.own_columns(plan, number))
        return Unit(table, address, after, lines, is_text=True, bad=bad)

    def _regular(self, block: Block, until_bad: bool) -> tuple[bytes, NDArray[np.int64], list[BadRow]]:
        """The lines that can be split at spaces and colons alone, the number of each, and those that cannot.

        With ``until_bad``, what follows the first that cannot is left out.
        """
        text = block.data
        if b"\t" in text or b"\r" in text:
            text = text.translate(_SPACES)
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
        for number, line in enumerate(io.BytesIO(text), start=block.line):
            if line.translate(None, _NO_MARKS) == marks + b"\n":
                lines.append(number)
                regular.append(line)
                continue
            words = line.split()
            if not words:
                continue
            label = b"" if b":" in words[0] else words.pop(0)
            colons = {word.count(b":") for word in words}
            if colons - {1}:
                trouble = "a word without a colon" if 0 in colons else "a word with several colons"
                bad.append(_not_index_value(number, trouble))
            elif len(words) != self._num_pairs:
                message = f"{len(words)} pairs: expected {self._num_pairs}, one for each feature"
                bad.append(BadRow(number, "wrong number of pairs", message))
            else:
                lines.append(number)
                regular.append(b" ".join([label, *words]) + b"\n")
            if bad and until_bad:
                break
        return b"".join(regular), np.array(lines, dtype=np.int64), bad


def _checked(
    words: Any, types: dict[str, Any], lines: NDArray[np.int64], bad: list[BadRow], until_bad: bool
) -> tuple[Any, NDArray[np.int64]]:
    """Words read one by one as ``types``: the rows where all can be, and their lines.

    The others join ``bad``; with ``until_bad``, rows after the first of those are left out.
    """
    arrays, good = {}, np.ones(len(lines), dtype=np.bool_)
    for column, kind in types.items():
        is_index = pa.types.is_integer(kind)
        written = words.column(column).to_pylist()
        arrays[column] = pa.array(map(_integer if is_index else number_of, written), kind)
        wrong = arrays[column].is_null().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(wrong & good).tolist()
        if until_bad and rows:  # what follows need not be read
            end = rows[0] + 1
            words, wrong, good, rows = words.slice(0, end), wrong[:end], good[:end], rows[:1]
        for row in rows:
            if is_index:
                bad.append(_not_index_value(int(lines[row]), "an index that is not an integer"))
            else:
                bad.append(_not_a_number(int(lines[row]), column, written[row]))
        good &= ~wrong
    table = pa.table({column: array[: len(good)] for column, array in arrays.items()})
    return table.filter(pa.array(good)), lines[: len(good)][good]


def _integer(word: bytes | None) -> int | None:
    """The id that a word spells, an integer from -2**63 to 2**64 - 1; those above the largest int64 keep their bits."""
    number = int(word) if word and _INTEGER.fullmatch(word) else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        return None
    return number if number < 1 << 63 else number - (1 << 64)


def _not_index_value(line: int, trouble: str) -> BadRow:
    return BadRow(line, "not index:value", f"{trouble}: expected label index:value index:value …")


def _not_a_number(line: int, column: str, word: bytes | None) -> BadRow:
    shown = f"= {word.decode('utf-8', 'replace')!r}" if word else "is missing"
    expected = "expected a number"
    return BadRow(line, f"column {column!r}: {expected}", f"column {column!r} {shown}: {expected}")
