"""Writes a whole config as text, guessed from a sample, with the reason for each guess in a comment.

Names and values of columns show the label.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from girih.config.sections import build
from girih.data.decode import columns
from girih.data.decode.conditions import column_text
from girih.data.guessing.kinds import FEW, LEAST_ROWS, OUTCOME, Guess, guess_kind, named, words_of
from girih.data.guessing.sample import ROWS, Sample
from girih.data.options import DataOptions, open_dataset
from girih.data.readers import CRITEO_COLUMNS
from girih.errors import ConfigError, nearest
from girih.schema import Schema

_LABELS = r"label|labels|click|clicks|clicked|y|target|converted|conversion|purchase|purchased|buy|bought|like|liked|install|installed"
_RATINGS = r"rating|ratings|stars|score"
_YES = ("yes", "true", "y", "t", "1", "click", "clicked")
_OF_OWNERS = {"id", "user", "uid", "member", "customer", "session"}
_SHARED = 0.5
_LEAST_TIMES, _LEAST_SIDE, _LEAST_NUMBERS, _HELD_OUT = 20, 10, 3, 0.1
_LEAST_STEPS, _LEAST_BATCH, _BATCH = 50, 32, 4096
_READING = {"on_bad_row": "skip", "batch_size": _BATCH, "split": None}
_TRAINING = '\n[sparse_optimizer]\nname = "adagrad"\nlr = 0.05\n\n[dense_optimizer]\nname = "adam"\nlr = 0.001\n\n[train]\nepochs = 1\n'
_Candidate = tuple[str, dict[str, object], str]
"""A column, its section ``[labels]``, and the reason."""


class Label(NamedTuple):
    """The column to predict, its section ``[labels]``, the reason, and other candidate columns."""

    column: str
    section: dict[str, object]
    why: str
    others: frozenset[str]


def guess_label(sample: Sample, requested: str | None) -> Label:
    """Guesses the column to predict. ``requested`` is the column, if it is known.

    Raises:
        ConfigError: no column can be the label.
    """
    table = sample.table
    names = table.column_names
    if requested is not None and requested not in names:
        raise ConfigError(f"--label {requested}: no such column{nearest(requested, names)}")
    by_name = _find_candidates(table, [name for name in names if named(name, _LABELS)])
    if requested is not None:
        tries = [_find_candidates(table, [requested], numbers=True, requested=True)]
    else:
        ratings = _find_candidates(table, [name for name in names if named(name, _RATINGS)], numbers=True)
        numbers = _find_candidates(table, [name for name in names if named(name, _LABELS)], numbers=True)
        tries = [by_name, ratings, numbers, _doubted(_by_values(table, "columns" in sample.options))]
    for candidates in tries:
        if candidates:
            (name, section, why), *others = candidates
            excluded = {other for other, _, _ in (*others, *by_name) if other != name}
            if name.startswith("is_"):
                excluded |= {other for other in names if other.startswith("is_") and other != name}
            return Label(name, section, why, frozenset(excluded))
    which = "no column looks like a label (0 and 1, yes and no, a rating)"
    if requested:
        values = _distinct(columns.flat(table[requested]).drop_null())
        alone = f" ({values[0]!r} alone)" if len(values) == 1 else ""
        which = f"--label {requested}: holds neither 0 and 1, nor two words, nor numbers that differ{alone}"
    raise ConfigError(f"{which}; name one of {', '.join(names[:20])} by --label COLUMN")


def _by_values(table: pa.Table, unnamed: bool) -> list[_Candidate]:
    """Finds a label by its values: usually the last column of a table with names, or the first without names."""
    names = table.column_names
    if not unnamed:
        return _find_candidates(table, names[-1:], words=True) or _find_candidates(table, names)[:1]
    flags = _find_candidates(table, names)
    if flags and (flags[0][0] == names[0] or (len(flags) == 1 and flags[0][0] == names[-1])):
        return flags[:1]
    ratings = [name for name in names if _is_rating(columns.flat(table[name]))]
    if len(ratings) == 1:
        return _find_candidates(table, ratings, numbers=True)
    first = columns.flat(table[names[0]])
    if columns.kind_of(first.type) == "floats" and pc.count_distinct(first).as_py() > FEW:
        return _find_candidates(table, names[:1], numbers=True)
    flag = flags[-1:] if flags and flags[-1][0] == names[-1] else flags[:1]
    return flag or _find_candidates(table, names[-1:], words=True)


def _is_rating(array: pa.Array) -> bool:
    """Returns whether values are grades from 0 or 1 to 5 or 10, halves included."""
    values = [value for value in _distinct(array.drop_null()) if isinstance(value, int | float)]
    is_scale = len(values) > 2 and max(values) in (5, 10) and min(values) in (0, 0.5, 1)
    return is_scale and all(2 * value % 1 == 0 for value in values)


def _doubted(candidates: list[_Candidate]) -> list[_Candidate]:
    caveat = "; a guess by its values alone: --label COLUMN names another"
    return [(name, section, why + caveat) for name, section, why in candidates]


def _find_candidates(
    table: pa.Table, names: list[str], *, numbers: bool = False, words: bool = False, requested: bool = False
) -> list[_Candidate]:
    """Returns the columns that may be labels, each with its section and its reason."""
    candidates: list[_Candidate] = []
    for name in names:
        made = _of_label(name, columns.flat(table[name]), numbers, words or numbers, requested)
        if made is None:
            continue
        section, why = made
        if missing := table[name].null_count:
            section, why = section | {"missing": "skip"}, f"{why}; {missing:,} rows of the sample have none"
        candidates.append((name, section, why))
    return candidates


def _of_one_value(name: str, value: int) -> str:
    mend = "name another column, or take more rows"
    if value:
        mend = "add negatives ([negatives], or rows with 0), or name another column"
    return f"WARNING: {name} is {value} in the whole sample, so a model learns to predict {value} for everything: {mend}"


def _of_label(
    name: str, array: pa.Array, numbers: bool, words: bool, requested: bool
) -> tuple[dict[str, object], str] | None:
    """Returns the section and the reason if a column may be a label: 0 and 1, or two words for yes and no.

    Args:
        numbers: also accept a column of numbers. The label is its upper half.
        words: also accept any two words. The label is the rarer word.
        requested: the user named the column, so also accept only 0, or only 1.
    """
    present = array.drop_null()
    values = _distinct(present)
    if values and set(values) <= {0, 1} and (len(values) == 2 or requested or named(name, _LABELS)):
        if len(values) == 1:
            return {"names": [name]}, _of_one_value(name, int(1 in values))
        share = pc.mean(present.cast(pa.float64())).as_py()
        return {"names": [name]}, f"{name} is 0 or 1, and 1 in {share:.1%} of the sample"
    if set(values) == {-1, 1}:
        return {"names": [name], "derive": {name: f"{column_text(name)} > 0"}}, f"{name} is -1 or 1"
    if len(values) == 2 and columns.kind_of(present.type) == "strings":
        yes = next((value for value in values if str(value).lower() in _YES), None)
        if yes is not None or words:
            yes = yes or min(values, key=lambda value: pc.sum(pc.equal(present, value)).as_py())
            derived = {name: f"{column_text(name)} == {yes!r}"}
            return {"names": [name], "derive": derived}, f"{name} is one of two words, {values}"
    kind = columns.kind_of(present.type)
    if not numbers or kind not in ("integers", "floats"):
        return None
    ordered = sorted(present.to_pylist())
    cut = next((value for value in ordered[len(ordered) // 2 :] if value > ordered[0]), None)
    if cut is None:
        return None
    good, numeric = f"{name}_high", f'names = ["{name}"], loss = {{ {name} = "mse" }}'
    why = f"{name} goes from {ordered[0]} to {ordered[-1]}: its upper half is 1; choose the right bound,"
    derived = {good: f"{column_text(name)} >= {cut}"}
    return {"names": [good], "derive": derived}, f"{why} or predict the number: {numeric}"


def _distinct(present: pa.Array) -> list[object]:
    """Returns the values of a column if they are few. Arrow cannot compare lists and structs: they give none."""
    if not len(present) or pa.types.is_nested(present.type) or pc.count_distinct(present).as_py() > FEW:
        return []
    found: list[object] = pc.unique(present).to_pylist()
    return found


def config_text(sample: Sample, label: str | None = None) -> str:
    """Writes the config as TOML with comments. It can read the first rows of the data.

    Args:
        label: the column to predict; None guesses it too.

    Raises:
        ConfigError: no column is a label, or no other column is a feature.
    """
    refused: dict[str, str] = {}
    while True:
        mapping = tomllib.loads(text := _text(sample, label, refused))
        options = build(DataOptions, mapping["data"] | _READING, "[data]")
        data = open_dataset(options, Schema.from_dict(mapping, "init"), shuffle=False)
        list(itertools.islice(data, ROWS // _BATCH))
        reasons = {
            next((name for name in sample.table.column_names if why.startswith(f"column {name!r}: ")), ""):
            f"{number:,} of the first rows cannot be read: {why}" for why, number in data.skipped.by_reason.items()
        }  # fmt: skip
        if reasons.keys() <= refused.keys():
            return text
        refused |= reasons


def _text(sample: Sample, label: str | None, refused: Mapping[str, str]) -> str:
    table, target = sample.table, guess_label(sample, label)
    names = [name for name in table.column_names if name != target.column]
    numbers = CRITEO_COLUMNS[1:14] if sample.options["format"][0] == "criteo" else ()
    cells = sample.cells
    kinds = [
        guess_kind(name, columns.flat(table[name]), counts=name in numbers, cells=cells.get(name, {}))
        for name in names
    ]
    guesses = [_told_apart(_readable(guess, sample, refused), table, target) for guess in kinds]
    features = [part for guess in guesses for part in _features(guess, table)]
    left = [guess for guess in guesses if guess.kind == "left out"]
    if not features:
        why = _one_line("".join(f"; {guess.column}: {guess.why}" for guess in left))
        raise ConfigError(f"no column except {target.column!r} looks like a feature{why}")
    lines = ["# Guessed from a sample by girih init: read what each line says, then run girih check.", ""]
    by_line = refused.get("") or refused.get(target.column)
    lines += [*_data(sample, guesses, by_line), ""]
    lines += ["[defaults]", _with_comment("dim = 16", "width of embeddings"), ""]
    alike = {feature.column: _with_same_ids(feature, features, table) for feature in features}
    for feature in features:
        lines += _feature(feature, alike[feature.column])
    lines += [f"# left out: {_one_line(f'{guess.column}: {guess.why}')}" for guess in left]
    lines += [""] * bool(left)
    lines += ["[labels]", f"# {_one_line(target.why)}", *_toml(target.section), ""]
    lines += ["[model]", *_toml({"name": "deepfm", "hidden": [400, 400, 400]})]
    past = {
        feature.column: alike[feature.column][0]
        for feature in features
        if feature.kind == "sequence" and len(alike[feature.column]) == 1
    }
    if past:
        (attention,) = _toml({"attention": past})
        lines.append(f'# name = "din" and {attention} read sequences whole')
    return "\n".join([*lines, _TRAINING])


def _data(sample: Sample, guesses: Iterable[Guess], refused: str | None) -> list[str]:
    lines = ["[data]"]
    for name, (value, why) in sample.options.items():
        (line,) = _toml({name: value})
        lines.append(_with_comment(line, why) if why else line)
    if refused is not None:
        lines.append(_with_comment('on_bad_row = "skip"', refused))
    by = next((guess.column for guess in guesses if _splits(guess, sample)), None)
    trained = sample.num_rows if by is None else round((1 - 2 * _HELD_OUT) * sample.num_rows)
    batch = _BATCH
    while batch > _LEAST_BATCH and trained / batch < _LEAST_STEPS:
        batch //= 2
    told = f"examples of a step: about {trained:,} rows to train on are {-(-trained // batch):,} steps"
    lines.append(_with_comment(f"batch_size = {batch}", told))
    if by is not None:
        (line,) = _toml({"split": {"by": by, "valid": _HELD_OUT, "test": _HELD_OUT}})
        return [*lines, f"{line}  # the last rows by this time; or name files as valid and test"]
    return [
        *lines,
        '# valid = "…"',
        '# test = "…"   # no time column to split by; without these a run ends without AUC',
    ]


def _splits(guess: Guess, sample: Sample) -> bool:
    """Returns whether the values of a column show which rows are the last rows."""
    values = sample.table[guess.column]
    return guess.kind == "time" and not values.null_count and len(values.unique()) >= _LEAST_TIMES


def _features(guess: Guess, table: pa.Table) -> list[Guess]:
    """Returns the features of a column. A time becomes its hour and its weekday."""
    if guess.kind == "left out":
        return []
    if guess.kind != "time":
        return [guess]
    parts = ("weekday",) if pa.types.is_date(table[guess.column].type) else ("hour", "weekday")
    return [
        Guess(f"{guess.column}_{part}", "categorical", f"of a time: {guess.why}",
              {"column": guess.column, "transform": part, **guess.options})
        for part in parts
    ]  # fmt: skip


def _readable(guess: Guess, sample: Sample, refused: Mapping[str, str]) -> Guess:
    """Returns a feature, or leaves it out if its format cannot be read as this kind."""
    if guess.kind != "left out" and guess.column in refused:
        return replace(guess, kind="left out", why=refused[guess.column])
    if guess.kind == "numeric" and guess.column in sample.strings:
        return replace(guess, kind="left out", why="numbers as strings: cast the column to read them")
    return guess


def _told_apart(guess: Guess, table: pa.Table, label: Label) -> Guess:
    """Returns a feature, or leaves it out if it repeats the label or is another outcome."""
    if guess.kind == "left out":
        return guess
    if guess.column in label.others:
        return replace(guess, kind="left out", why=OUTCOME)
    one, other = columns.flat(table[guess.column]), columns.flat(table[label.column])
    if one.type == other.type and one.equals(other):
        why = f"it equals {label.column!r}: the model would see the answer"
        return replace(guess, kind="left out", why=why)
    if guess.kind != "time" and _tells(one, other):
        why = f"numbers up to a bound have one {label.column!r}, larger numbers have the other: the model would see the answer"
        return replace(guess, kind="left out", why=why)
    return guess


def _tells(numbers: pa.Array, label: pa.Array) -> bool:
    """Returns whether a threshold on some numbers separates the two values of the label.

    This happens if the label is derived from these numbers, such as a rating.
    """
    kind = columns.kind_of(numbers.type)
    if not (kind in ("integers", "floats") or kind.startswith("decimal")) or pa.types.is_nested(label.type):
        return False
    sides = pc.unique(label).drop_null()
    if len(sides) != 2:
        return False
    values = columns.plain(numbers).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    one, other = (
        values[pc.fill_null(pc.equal(label, side), False).to_numpy(zero_copy_only=False)] for side in sides
    )
    one, other = one[~np.isnan(one)], other[~np.isnan(other)]
    if min(len(one), len(other)) < _LEAST_SIDE or len(one) + len(other) < LEAST_ROWS:
        return False
    if len(np.unique(np.concatenate([one, other]))) < _LEAST_NUMBERS:
        return False
    return bool(one.max() < other.min() or other.max() < one.min())


def _with_same_ids(guess: Guess, features: Sequence[Guess], table: pa.Table) -> list[str]:
    """Returns the features that share the ids of a list, most likely first.

    If there is one such feature, the list shares its table. If there are several, the list may share a table. Small
    numbers occur as ids in many columns. Then names decide: one name must have a word of the list's name. Words for the
    owner of a list do not count.
    """
    if "transform" in guess.options or not _is_bag(guess, table):
        return []
    own, found = _ids(guess, table), {}
    for other in features:
        if "transform" in other.options or other.kind != "categorical" or _is_bag(other, table):
            continue
        theirs = _ids(other, table)
        if own and len(own) > FEW and len(own & theirs) > _SHARED * min(len(own), len(theirs)):
            found[other.column] = len(own & theirs) / len(own | theirs)
    words = {word.removesuffix("s") for word in words_of(guess.column)} - _OF_OWNERS
    by_name = [name for name in found if words & {word.removesuffix("s") for word in words_of(name)}]
    return by_name if len(by_name) == 1 else sorted(found, key=found.__getitem__, reverse=True)


def _is_bag(guess: Guess, table: pa.Table) -> bool:
    return "separator" in guess.options or columns.is_list(table[guess.column].type)


def _ids(guess: Guess, table: pa.Table) -> set[str]:
    array = columns.flat(table[guess.column]).drop_null()
    if "separator" in guess.options and not columns.is_list(array.type):
        array = pc.split_pattern(array, guess.options["separator"])
    values = array.flatten() if columns.is_list(array.type) else array
    return set(map(str, pc.unique(values).to_pylist()))


def _feature(guess: Guess, alike: Sequence[str]) -> list[str]:
    lines = _toml({"name": guess.column, "kind": guess.kind})
    lines[1] = _with_comment(lines[1], guess.why)
    lines += _toml(guess.options)
    if alike:
        (line,) = _toml({"table": alike[0]})
        told = "the same ids: both share rows"
        if len(alike) > 1:
            line = f"# {line}"
            told = f"or {', '.join(map(repr, alike[1:]))}: its ids occur in each; keep the one that it lists"
        lines.append(_with_comment(line, told))
    return ["[[features]]", *lines, ""]


def _with_comment(line: str, why: str) -> str:
    return f"{line + '  ' if len(line) > 38 else line:40}# {_one_line(why)}"


def _toml(options: Mapping[str, object]) -> list[str]:
    """Returns keys and values, each on its own line."""
    return [f"{_key(name)} = {_value(value)}" for name, value in options.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: object) -> str:
    """Returns a value in TOML, which is written as in JSON, except for tables."""
    if isinstance(value, dict):
        return f"{{ {', '.join(_toml(value))} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
