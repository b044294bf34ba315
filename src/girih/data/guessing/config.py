"""A whole config as text, guessed from a sample, with the reason for each guess beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tomli_w

from girih.data.decode import columns
from girih.data.guessing.kinds import FEW, Guess, guess_kind, named
from girih.data.guessing.sample import Sample
from girih.errors import ConfigError, nearest

_LABELS = r"label|labels|click|clicks|clicked|y|target|converted|conversion|purchase|purchased|buy|bought|like|liked|install|installed|order|is"
_RATINGS = r"rating|ratings|stars|score"
_YES = ("yes", "true", "y", "t", "1", "click", "clicked")
_SHARED = 0.5


def config_text(sample: Sample, label: str | None = None) -> str:
    """The config, as TOML with comments.

    Args:
        label: the column to predict; None guesses that too.

    Raises:
        ConfigError: no column is a label, or no other is a feature.
    """
    table = sample.table
    labels, weighs = _label(table, label)
    column = labels["column"]
    guesses = [guess_kind(name, columns.flat(table[name])) for name in table.column_names if name != column]
    guesses = [_told_apart(guess, table, column) for guess in guesses]
    when = next((guess for guess in guesses if guess.kind == "time"), None)
    features = [guess for guess in guesses if guess.kind not in ("time", "left out")]
    if not features and when is None:
        raise ConfigError(
            f"no column but {column!r} looks like a feature: {'; '.join(f'{g.column}: {g.why}' for g in guesses)}"
        )
    lines = [
        "# Guessed from a sample by girih init: check what each line says, then run girih check.",
        "",
        *_data(sample, when),
    ]
    lines += ["", "[defaults]", "dim = 16                                # width of embeddings", ""]
    for guess in features:
        lines += _feature(guess, _shared_table(guess, features, table))
    for guess in guesses:
        if guess.kind == "time":
            for part in ("hour", "weekday"):
                lines += _feature(
                    replace(
                        guess,
                        kind="categorical",
                        options={"column": guess.column, "transform": part, **guess.options},
                        why=f"of a time: {guess.why}",
                    ),
                    None,
                    f"{guess.column}_{part}",
                )
    left = [guess for guess in guesses if guess.kind == "left out"]
    lines += [f"# left out: {_one_line(guess.column)}: {_one_line(guess.why)}" for guess in left] + [
        ""
    ] * bool(left)
    lines += [
        "[labels]",
        f"# {weighs}",
        *_toml({key: value for key, value in labels.items() if key != "column"}),
        "",
    ]
    lines += ["[model]", *_toml({"name": "deepfm", "hidden": [400, 400, 400]})]
    if any(guess.kind == "sequence" for guess in features):
        lines.append('# "din" reads sequences whole: name = "din", target = the feature of what is shown now')
    lines += [
        "",
        "[sparse_optimizer]",
        *_toml({"name": "adagrad", "lr": 0.05}),
        "",
        "[dense_optimizer]",
        *_toml({"name": "adam", "lr": 0.001}),
        "",
        "[train]",
        *_toml({"epochs": 1}),
    ]
    return "\n".join(lines) + "\n"


def _data(sample: Sample, when: Guess | None) -> list[str]:
    lines = ["[data]"]
    for name, (value, why) in sample.options.items():
        (line,) = _toml({name: value})
        lines.append(f"{line:40}# {_one_line(why)}" if why else line)
    size = sample.num_rows or 0
    batch = 4096
    while size and batch > 32 and size / batch < 50:
        batch //= 2
    lines.append(
        f"{f'batch_size = {batch}':40}# examples of a step"
        + (f": {size:,} rows are {-(-size // batch):,} steps" if size else "")
    )
    if when is None:
        lines.append(
            '# valid = "…"; test = "…"            # there is no time to split by; without these a run ends without AUC'
        )
    else:
        (line,) = _toml({"split": _Inline({"by": when.column, "valid": 0.1, "test": 0.1})})
        lines.append(f"{line}  # the last rows by this time; or name files as valid and test")
    return lines


def _label(table: Any, given: str | None) -> tuple[dict[str, Any], str]:
    """The section ``[labels]`` with the column that it reads, and why."""
    names = table.column_names
    if given is not None and given not in names:
        raise ConfigError(f"--label {given}: no such column{nearest(given, names)}")
    candidates = [given] if given is not None else [name for name in names if named(name, _LABELS)]
    found = [
        (name, made)
        for name in candidates
        if (made := _of_label(name, columns.flat(table[name]), given is not None))
    ]
    if not found and given is None:
        found = [
            (name, made)
            for name in names
            if named(name, _RATINGS) and (made := _of_label(name, columns.flat(table[name]), True))
        ]
    if not found and given is None:  # an unnamed label is most often the last column, or the first
        ends = [name for name in (names[-1], names[0]) if columns.kind_of(table[name].type) != "strings"]
        found = [(name, made) for name in ends if (made := _of_label(name, columns.flat(table[name]), False))]
    if not found:
        which = (
            f"--label {given}: holds neither 0 and 1, nor two words, nor numbers"
            if given
            else "no column looks like a label (0 and 1, yes and no, a rating)"
        )
        raise ConfigError(f"{which}; name one of {', '.join(names[:20])} by --label COLUMN")
    name, (section, why) = found[0]
    others = [other for other, _ in found[1:]]
    also = (
        f"; {', '.join(map(_one_line, others))} may be outcomes too, which a model must not see: leave them out of the features"
        if others
        else ""
    )
    return {**section, "column": name}, f"{_one_line(why)}{also}"


def _of_label(name: str, array: Any, numbers: bool) -> tuple[dict[str, Any], str] | None:
    """A label of a column: 0 and 1, one of two words, or, where ``numbers`` may be one, what is in the upper half of them."""
    present = array.drop_null()
    if not len(present) or columns.is_list(present.type):
        return None
    values = pc.unique(present).to_pylist() if pc.count_distinct(present).as_py() <= FEW else []
    if values and set(values) <= {0, 1}:
        share = pc.mean(present.cast(pa.float64())).as_py()
        return {"names": [name]}, f"{name} is 0 or 1, and 1 in {share:.1%} of the sample"
    if len(values) == 2 and columns.kind_of(present.type) == "strings":
        yes = next((value for value in values if value.lower() in _YES), None)
        if yes is not None or numbers:
            yes = yes or min(values)
            return {
                "names": [name],
                "derive": {name: f"{_quoted(name)} == {yes!r}"},
            }, f"{name} is one of two words, {values}"
    kind = columns.kind_of(present.type)
    if not numbers or kind not in ("integers", "floats"):
        return None
    ordered = sorted(present.to_pylist())
    cut = next((value for value in ordered[len(ordered) // 2 :] if value > ordered[0]), None)
    if cut is None:
        return None
    good = f"{name}_high"
    return {
        "names": [good],
        "derive": {good: f"{name} >= {cut}"},
    }, f"{name} goes from {ordered[0]} to {ordered[-1]}: its upper half is 1; choose the bound that you mean"


def _quoted(name: str) -> str:
    return name


def _told_apart(guess: Guess, table: Any, label: str) -> Guess:
    """A feature, unless it is the label in other words."""
    if guess.kind == "left out" or columns.is_list(table[guess.column].type):
        return guess
    one, other = columns.flat(table[guess.column]), columns.flat(table[label])
    if one.type == other.type and one.equals(other):
        return replace(guess, kind="left out", why=f"it equals {label!r}: the model would see the answer")
    return guess


def _shared_table(guess: Guess, features: Sequence[Guess], table: Any) -> str | None:
    """The feature whose ids a list has too, so that both are to share a table."""
    if guess.kind != "sequence" and not _is_bag(guess, table):
        return None
    own = _ids(guess, table)
    for other in features:
        if other is guess or other.kind != "categorical" or _is_bag(other, table):
            continue
        theirs = _ids(other, table)
        if own and len(own) > FEW and len(own & theirs) > _SHARED * min(len(own), len(theirs)):
            return other.column
    return None


def _is_bag(guess: Guess, table: Any) -> bool:
    return "separator" in guess.options or columns.is_list(table[guess.column].type)


def _ids(guess: Guess, table: Any) -> set[str]:
    array = columns.flat(table[guess.column]).drop_null()
    if "separator" in guess.options:
        array = pc.split_pattern(array, guess.options["separator"])
    values = array.flatten() if columns.is_list(array.type) else array
    return set(map(str, pc.unique(values).to_pylist()))


def _feature(guess: Guess, shared: str | None, name: str | None = None) -> list[str]:
    options: dict[str, Any] = {"name": name or guess.column, "kind": guess.kind, **guess.options}
    if shared is not None:
        options["table"] = shared
    lines = _toml(options)
    lines[1] = f"{lines[1]:40}# {_one_line(guess.why)}"
    if shared is not None:
        lines[-1] = f"{lines[-1]:40}# the same ids: both share rows"
    return ["[[features]]", *lines, ""]


class _Inline(dict[str, Any]):
    """A table that is written in one line."""


def _toml(options: dict[str, Any]) -> list[str]:
    """Keys and values, each in a line of its own."""
    lines = []
    for name, value in options.items():
        if isinstance(value, dict):
            inner = ", ".join(line for key, each in value.items() for line in _toml({key: each}))
            lines.append(f"{_toml({name: 0})[0].removesuffix('0')}{{ {inner} }}")
        elif isinstance(value, list):
            items = ", ".join(_toml({"x": each})[0].removeprefix("x = ") for each in value)
            lines.append(f"{_toml({name: 0})[0].removesuffix('0')}[{items}]")
        else:
            lines.append(tomli_w.dumps({name: value}).rstrip("\n"))
    return lines


def _one_line(text: str) -> str:
    return " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
