"""``girih init`` on logs as programs write them: each config passes ``girih check`` and trains."""

import csv
import gzip
import io
import json
import os
import pathlib
import pickle
import struct
import tomllib
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import cli

ROWS = 240
RNG = np.random.default_rng(42)
USER, ITEM, CLICK = RNG.integers(0, 30, ROWS), RNG.integers(100, 140, ROWS), RNG.integers(0, 2, ROWS)
PRICE = np.round(RNG.gamma(2, 700, ROWS), 2)
LENGTHS = RNG.integers(0, 6, ROWS)
LISTS = [RNG.integers(1, 25, length).tolist() for length in LENGTHS]
TIME = 1_700_000_000 + np.cumsum(RNG.integers(1, 900, ROWS))
WORDS = np.array(["rouge", "vert", "jaune"])[RNG.integers(0, 3, ROWS)]


def german(value):
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


def lines(columns, separator=",", header=True, newline="\n", quoting=csv.QUOTE_MINIMAL):
    mark = separator if len(separator) == 1 else "\x1f"
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=mark, lineterminator=newline, quoting=quoting)
    if header:
        writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return sink.getvalue().replace(mark, separator).encode()


BASE = {"user_id": USER, "item_id": ITEM, "click": CLICK}


def logs():
    """Name → content of a file, and what of its config is sure: options of data, of features by name, and the label."""
    hist = ["|".join(map(str, ids)) for ids in LISTS]
    padded = [ids + [0] * (6 - len(ids)) for ids in LISTS]
    some = RNG.random(ROWS) < 0.1
    yield (
        "hive.csv",
        lines(
            BASE
            | {
                "price": ["\\N" if gone else price for gone, price in zip(some, PRICE, strict=True)],
                "word": ["\\N" if gone else word for gone, word in zip(some, WORDS, strict=True)],
            },
            "\x01",
        ),
        (
            {"null_values": ["\\N"], "separator": "\x01"},
            {"price": {"kind": "numeric"}, "word": {"kind": "categorical"}},
            "click",
        ),
    )
    yield (
        "tokens.csv",
        lines(
            BASE
            | {
                "a": ["N/A" if gone else price for gone, price in zip(some, PRICE, strict=True)],
                "b": ["-" if gone else price for gone, price in zip(some, PRICE, strict=True)],
            }
        ),
        ({"null_values": ["-", "N/A"]}, {"a": {"kind": "numeric"}, "b": {"kind": "numeric"}}, "click"),
    )
    yield (
        "pandas.csv",
        pd.DataFrame(BASE | {"hist": LISTS, "age": RNG.integers(18, 70, ROWS)}).to_csv().encode(),
        ({}, {"hist": {"kind": "sequence", "list_format": "brackets"}}, "click"),
    )
    yield (
        "words.tsv",
        lines(BASE | {"tags": [str([f"t{id}" for id in ids]) for ids in LISTS]}, "\t"),
        ({"separator": "\t"}, {"tags": {"kind": "categorical", "list_format": "brackets"}}, "click"),
    )
    yield (
        "numpy.csv",
        lines(BASE | {"seen": [str(np.array(ids)) for ids in LISTS]}),
        ({}, {"seen": {"list_format": "brackets"}}, "click"),
    )
    yield (
        "json_cells.csv",
        lines(BASE | {"tags": [json.dumps([f"é{id}" for id in ids]) for ids in LISTS]}),
        ({}, {"tags": {"list_format": "brackets"}}, "click"),
    )
    yield (
        "float_ids.csv",
        pd.DataFrame(BASE | {"user_id": np.where(some, np.nan, USER)}).to_csv(index=False).encode(),
        ({}, {"user_id": {"kind": "categorical", "float_ids": True}}, "click"),
    )
    yield (
        "weights.csv",
        lines(BASE | {"tags": [";".join(f"t{id}={id / 8}" for id in ids) for ids in LISTS]}),
        ({}, {"tags": {"separator": ";", "weight_separator": "="}}, "click"),
    )
    yield (
        "one_weight.csv",
        lines(
            BASE | {"topic": [f"{word}:{price / 7:.2f}" for word, price in zip(WORDS, PRICE, strict=True)]}
        ),
        ({}, {"topic": {"weight_separator": ":"}}, "click"),
    )
    yield (
        "padded.csv",
        lines(BASE | {"hist": [" ".join(map(str, ids)) for ids in padded]}),
        ({}, {"hist": {"kind": "sequence", "separator": " ", "padding_id": 0}}, "click"),
    )
    yield (
        "padded_in_front.csv",
        lines(BASE | {"hist": [str([-1] * (6 - len(ids)) + ids) for ids in LISTS]}),
        ({}, {"hist": {"kind": "sequence", "list_format": "brackets", "padding_id": -1}}, "click"),
    )
    yield (
        "blanks.csv",
        lines(BASE | {"hist": [text.replace("|", " | ") for text in hist]}),
        ({}, {"hist": {"kind": "sequence", "separator": "|"}}, "click"),
    )
    yield (
        "german.csv",
        lines(
            BASE
            | {
                "preis": [german(price) + " €" for price in PRICE],
                "rabatt": [german(x) + "%" for x in RNG.random(ROWS)],
                "wort": ["grün"] * 100 + ["weiß"] * (ROWS - 100),
            },
            ";",
        )
        .decode()
        .encode("cp1252"),
        (
            {"separator": ";", "encoding": "cp1252", "decimal": ",", "thousands": ".", "units": ["%", "€"]},
            {"preis": {"kind": "numeric"}, "rabatt": {"kind": "numeric"}},
            "click",
        ),
    )
    yield (
        "dollars.csv",
        lines(
            BASE
            | {"price": [f"${price:,.2f}" for price in PRICE], "ctr": [f"{x:.1%}" for x in RNG.random(ROWS)]}
        ),
        (
            {"thousands": ",", "units": ["%", "$"]},
            {"price": {"kind": "numeric"}, "ctr": {"kind": "numeric"}},
            "click",
        ),
    )
    yield (
        "utf16.csv",
        lines(BASE | {"word": WORDS}, "\t").decode().encode("utf-16"),
        ({"encoding": "utf-16", "separator": "\t"}, {"word": {"kind": "categorical"}}, "click"),
    )
    yield (
        "comments.csv",
        lines(BASE | {"word": [f'{word}\n{word}, 3"' for word in WORDS]}),
        ({"quoted_line_breaks": True}, {"word": {"kind": "categorical"}}, "click"),
    )
    yield (
        "numbers.csv",
        lines({"click": CLICK, "101": USER, "121": ITEM, "122": ITEM % 7}),
        ({}, {"101": {"kind": "categorical"}, "122": {"kind": "categorical"}}, "click"),
    )
    yield (
        "ratings.dat",
        lines({"u": USER, "i": ITEM, "r": RNG.integers(1, 6, ROWS), "t": TIME}, "::", header=False),
        (
            {"separator": "::", "columns": [f"column{place}" for place in range(1, 5)]},
            {"column4_hour": {"transform": "hour"}},
            "column3_high",
        ),
    )
    yield (
        "blanks.txt",
        lines({"y": CLICK, "u": USER, "i": ITEM}, "   ", header=False),
        ({"separator": r"\s+"}, {"column2": {"kind": "categorical"}}, "column1"),
    )
    yield (
        "target_first.txt",
        lines({"y": PRICE, "x": RNG.random(ROWS).round(4), "a": USER % 2, "b": CLICK}, " ", header=False),
        ({"separator": " "}, {"column2": {"kind": "numeric"}}, "column1_high"),
    )
    yield (
        "comma_and_blank.csv",
        lines(BASE | {"word": WORDS}, ", "),
        ({"separator": ", "}, {"word": {"kind": "categorical"}}, "click"),
    )
    yield (
        "sparse.svm",
        "".join(
            f"{2 * y - 1} " + " ".join(f"{id}:{id / 4}" for id in sorted({*ids})) + "\n"
            for y, ids in zip(CLICK, LISTS, strict=True)
        ).encode(),
        ({"format": "libsvm"}, {"features": {"kind": "categorical"}}, "label"),
    )
    yield (
        "fields.ffm",
        "".join(
            f"{y}\t0:{u}:1 1:{i}:1 2:7:{p} " + " ".join(f"3:{id}:0.5" for id in ids) + "\n"
            for y, u, i, p, ids in zip(CLICK, USER, ITEM, PRICE, LISTS, strict=True)
        ).encode(),
        (
            {"format": "libffm"},
            {"0": {"kind": "categorical"}, "2": {"kind": "numeric"}, "3": {"kind": "categorical"}},
            "label",
        ),
    )
    yield (
        "times.csv",
        lines(BASE | {"time": [str(np.datetime64(int(t), "s")).replace("T", " ") for t in TIME]}),
        ({"split": {"by": "time", "valid": 0.1, "test": 0.1}}, {"time_hour": {"transform": "hour"}}, "click"),
    )
    yield (
        "unsigned.jsonl",
        b"".join(
            json.dumps({"user": int(u) + 2**63, "hist": ids, "y": int(y)}).encode() + b"\n"
            for u, ids, y in zip(USER, LISTS, CLICK, strict=True)
        ),
        ({"format": "jsonl"}, {"user": {"kind": "categorical"}}, "y"),
    )
    yield from attacks(hist, padded, some)
    yield (
        "gzipped.csv.gz",
        gzip.compress(lines(BASE | {"hist": hist})),
        ({}, {"hist": {"kind": "sequence"}}, "click"),
    )


def attacks(hist, padded, some):
    """Logs of which a guess was wrong without a word, or failed in check."""
    pairs = [[(f"t{id}", id / 8) for id in ids] for ids in LISTS]
    brackets = {"seen": {"kind": "categorical", "list_format": "brackets"}}
    yield (
        "sets.csv",
        lines(BASE | {"seen": [str(set(ids)) for ids in LISTS], "empty": [""] * ROWS}),
        ({}, brackets, "click"),
    )
    yield (
        "scalars_of_numpy.csv",
        lines(BASE | {"seen": [f"[{', '.join(f'np.int64({id})' for id in ids)}]" for ids in LISTS]}),
        ({}, brackets, "click"),
    )
    yield (
        "long_arrays.csv",
        lines(BASE | {"seen": [str(RNG.integers(1, 2000, 60)) for _ in LISTS]}),
        ({"quoted_line_breaks": True}, brackets, "click"),
    )
    yield (
        "floats_of_numpy.csv",
        lines(BASE | {"hist": [str(np.array(ids, float)) for ids in LISTS]}),
        ({}, {"hist": {"kind": "sequence", "list_format": "brackets", "float_ids": True}}, "click"),
    )
    yield (
        "hive_maps.txt",
        lines(BASE | {"m": ["\x02".join(f"{id}\x03{w}" for id, w in row) or "\\N" for row in pairs]}, "\x01"),
        (
            {"separator": "\x01", "null_values": ["\\N"]},
            {"m": {"separator": "\x02", "weight_separator": "\x03"}},
            "click",
        ),
    )
    yield (
        "spaced_pairs.csv",
        lines(BASE | {"tags": [", ".join(f"{id}: {w:.3f}" for id, w in row) for row in pairs]}),
        ({}, {"tags": {"separator": ",", "weight_separator": ":"}}, "click"),
    )
    yield (
        "lists_of_three_digits.csv",
        lines(BASE | {"cart": [",".join(str(100 + id) for id in ids) for ids in LISTS]}),
        ({"thousands": None}, {"cart": {"kind": "categorical", "separator": ","}}, "click"),
    )
    yield (
        "not_set.csv",
        lines(BASE | {"source": np.array(["(not set)", "(direct)", "web"])[USER % 3]}),
        ({}, {"source": {"kind": "categorical", "list_format": None}}, "click"),
    )
    yield (
        "ports.csv",
        lines(BASE | {"host": [f"10.0.0.{u}:80{u % 10}" for u in USER]}),
        ({}, {"host": {"kind": "categorical", "weight_separator": None}}, "click"),
    )
    yield (
        "grouped_ids.csv",
        lines(BASE | {"user_id": [f"{u + 1000:,}" for u in USER]}),
        ({"thousands": None}, {"user_id": {"kind": "categorical", "separator": None}}, "click"),
    )
    yield (
        "notations.csv",
        lines(
            BASE
            | {
                "reach": [f"{int(price) * 37 + 1000:,}".replace(",", ".") for price in PRICE],
                "ctr": [f"{x:.3f}".replace(".", ",") for x in RNG.random(ROWS)],
                "cost": [f"CHF ({price})".replace(".", ",") for price in PRICE],
            },
            ";",
        ),
        (
            {"decimal": ",", "thousands": ".", "units": ["CHF"]},
            {name: {"kind": "numeric"} for name in ("reach", "ctr", "cost")},
            "click",
        ),
    )
    yield (
        "errors_of_excel.csv",
        lines(
            BASE
            | {
                "a": ["#DIV/0!" if gone else price for gone, price in zip(some, PRICE, strict=True)],
                "b": ["-inf" if gone else price for gone, price in zip(some, PRICE, strict=True)],
                "c": ["." if gone else price for gone, price in zip(some, PRICE, strict=True)],
            }
        ),
        (
            {"null_values": ["#DIV/0!", "-inf", "."]},
            {name: {"kind": "numeric"} for name in "abc"},
            "click",
        ),
    )
    for encoding, words in (("gbk", "红色蓝"), ("shift_jis", "青い表"), ("cp1251", "красный")):
        yield (
            f"{encoding}.csv",
            lines(BASE | {words: np.array([words, words[::-1]])[CLICK ^ 1]}).decode().encode(encoding),
            ({"encoding": encoding}, {"item_id": {"kind": "categorical"}}, "click"),
        )
    yield (
        "cut_letters.csv",
        lines(BASE | {"word": np.array(["红色", "蓝色"])[CLICK]}).replace(
            "色\n".encode(), "色\n".encode()[:-2] + b"\n", 9
        ),
        ({"encoding": None}, {"user_id": {"kind": "categorical"}}, "click"),
    )
    yield (
        "open_quotes.tsv",
        b"user\titem_id\tclick\n"
        + "".join(f'{u}\t"{word} x\t{y}\n' for u, word, y in zip(USER, WORDS, CLICK, strict=True)).encode(),
        ({"quote": "", "quoted_line_breaks": None}, {"item_id": {"kind": "categorical"}}, "click"),
    )
    for separator in ("||", "\t\t", "|,|", "~", "##", "; "):
        yield (
            f"separated{separator.encode().hex()}.txt",
            lines(BASE | {"genres": [text.replace("|", "/") for text in hist]}, separator),
            ({"separator": separator}, {"item_id": {"kind": "categorical"}}, "click"),
        )
    yield (
        "numbered.csv",
        pd.DataFrame({0: CLICK, 1: USER, 2: ITEM, 3: PRICE}).to_csv().encode(),
        ({"columns": None}, {"1": {"kind": "categorical"}, "3": {"kind": "numeric"}}, "0"),
    )
    yield (
        "no_header.tsv",
        lines(
            {"u": [f"u{u}" for u in USER], "w": WORDS, "y": np.array(["no", "yes"])[CLICK]},
            "\t",
            header=False,
        ),
        ({"columns": ["column1", "column2", "column3"]}, {"column2": {"kind": "categorical"}}, "column3"),
    )
    yield (
        "ragged.csv",
        lines(BASE) + b"1,2\n",
        ({"on_bad_row": "skip"}, {"item_id": {"kind": "categorical"}}, "click"),
    )
    yield (
        "bigquery.csv",
        lines(BASE | {"at": [f"{np.datetime64(int(t), 's')}".replace("T", " ") + " UTC" for t in TIME]}),
        ({"split": {"by": "at", "valid": 0.1, "test": 0.1}}, {"at_hour": {"transform": "hour"}}, "click"),
    )
    yield (
        "fractions_of_seconds.csv",
        lines(BASE | {"ts": [f"{t}.25" for t in TIME]}),
        ({"split": {"by": "ts", "valid": 0.1, "test": 0.1}}, {"ts_hour": {"time_unit": "s"}}, "click"),
    )
    yield (
        "all_of_64_bits.csv",
        lines(BASE | {"sign": [int(u) + 2**63 if u % 2 else -int(u) - 1 for u in USER]}),
        ({}, {"sign": {"kind": "categorical"}}, "click"),
    )


LOGS = {name: (content, wanted) for name, content, wanted in logs()}


def config_of(folder, path, capsys, *words):
    capsys.readouterr()
    assert cli.run(["init", str(path), *words]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    (folder / "config.toml").write_text(text)
    return text, tomllib.loads(text)


def check_and_train(folder, capsys):
    config = str(folder / "config.toml")
    assert cli.run(["check", config]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    options = ["model.hidden=[4]", "train.max_steps=2", "data.batch_size=32"]
    sets = [word for option in options for word in ("--set", option)]
    assert cli.run(["train", config, "--run", str(folder / "run"), *sets]) == 0, capsys.readouterr().err
    return told


@pytest.mark.parametrize("name", LOGS)
def test_a_log_becomes_a_config_that_trains(tmp_path, capsys, name):
    content, (data, features, label) = LOGS[name]
    (tmp_path / name).write_bytes(content)
    text, config = config_of(tmp_path, tmp_path / name, capsys)
    assert {key: config["data"].get(key) for key in data} == data
    found = {feature["name"]: feature for feature in config["features"]}
    for feature, options in features.items():
        assert {key: found[feature].get(key) for key in options} == options, text
    assert config["labels"]["names"] == [label]
    assert (
        "item_id" not in BASE
        or "item_id" in found
        or "click" not in config["labels"]["names"]
        or name == "numbers.csv"
    )
    told = check_and_train(tmp_path, capsys)
    assert "reads each string whole" not in told


FOLDER = pathlib.Path(os.environ.get("GIRIH_CASES", pathlib.Path(__file__).parents[3] / "shared" / "cases"))


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no logs at {FOLDER}; set GIRIH_CASES")
def test_every_log_of_a_folder_trains_or_is_named(tmp_path, capsys):
    for path in sorted(FOLDER.glob("*/*")):
        if path.suffix in (".md", ".toml"):
            continue
        if b":" in path.read_bytes()[:6] and path.name == "slots.txt":
            assert cli.run(["init", str(path)]) == 2
            assert "looks like name:value pairs" in capsys.readouterr().err
            continue
        (folder := tmp_path / path.parent.name / path.name).mkdir(parents=True)
        config_of(folder, path, capsys)
        check_and_train(folder, capsys)


def archive(member):
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as made:
        made.writestr(member, "x" * 100)
    return sink.getvalue()


UNREADABLE = {
    "TFRecord": struct.pack("<QI", 40, 123) + b"\n\x26\n\x10" + bytes(40),
    "Avro": b"Obj\x01\x04\x14avro.codec",
    "ORC": b"ORC\x01\x02\x03",
    "a pickle": pickle.dumps({"user": [1, 2]}),
    "an Excel file (xlsx)": archive("[Content_Types].xml"),
    "an Excel file (xls)": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(90),
    "a zip archive": archive("log.csv"),
    "an array of NumPy": b"\x93NUMPY\x01\x00v\x00",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "a JSON array": b'[{"user": 1, "click": 0},\n{"user": 2, "click": 1}]\n',
    "name:value pairs (slots)": b"click:0 user:3 hist:1 hist:2\nclick:1 user:4\n",
    "gzip-compressed TFRecord": gzip.compress(struct.pack("<QI", 40, 123) + b"\n\x26\n\x10" + bytes(40)),
    "name:value pairs (slots), which": b"1 user:28:1 item:117:1\n0 user:18:1 item:3:1\n",
    "Vowpal Wabbit": b"1 |u user_28 |i item_117:0.5\n-1 |u user_2 |i item_9\n",
    "HTML or XML": b"<!DOCTYPE html>\n<html><body>please, log in</body></html>\n",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
    "a dump of SQL": b"-- MySQL dump\nDROP TABLE IF EXISTS `log`;\nINSERT INTO `log` VALUES (1,2,1);\n",
    "a printed table": b" user | click \n------+-------\n    1 |     0\n    2 |     1\n",
    "CSV of Excel below a line sep=": b"sep=;\r\nuser;click\r\n1;0\r\n2;1\r\n",
    "gzip-compressed Parquet": gzip.compress(b"PAR1\x15\x04\x00\x00" + bytes(90)),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("ending", ["csv", "dat"])
def test_a_format_that_is_not_read_is_named(tmp_path, capsys, name, ending):
    (tmp_path / f"a.{ending}").write_bytes(UNREADABLE[name])
    assert cli.run(["init", str(tmp_path / f"a.{ending}")]) == 2
    err = capsys.readouterr().err
    assert f"looks like {name.removesuffix(', which')}, which girih does not read: " in err
    assert err.count("\n") == 1


def test_a_label_that_is_given_tells_of_a_header(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(lines({"7": CLICK, "8": USER, "9": ITEM}))
    _, config = config_of(tmp_path, tmp_path / "a.csv", capsys, "--label", "7")
    assert "columns" not in config["data"]
    assert config["labels"]["names"] == ["7"]
    check_and_train(tmp_path, capsys)


@pytest.mark.parametrize("gone", ["\\N", "", "NA"])
def test_a_missing_value_in_the_first_row_makes_no_header(tmp_path, capsys, gone):
    (tmp_path / "a.csv").write_bytes(lines({"y": CLICK, "u": USER, "p": [gone, *PRICE[1:]]}, header=False))
    _, config = config_of(tmp_path, tmp_path / "a.csv", capsys)
    assert config["data"]["columns"] == ["column1", "column2", "column3"]
    check_and_train(tmp_path, capsys)


def test_row_numbers_and_text_that_is_never_the_same_are_left_out(tmp_path, capsys):
    more = {"key": 7 + 3 * np.arange(ROWS), "note": [f"text {row}" for row in range(ROWS)]}
    (tmp_path / "a.csv").write_bytes(lines(BASE | more))
    text, config = config_of(tmp_path, tmp_path / "a.csv", capsys)
    assert {feature["name"] for feature in config["features"]} == {"user_id", "item_id"}
    assert "# left out: key: a different value in every row" in text
    assert "# left out: note: different text in every row" in text


def test_numbers_as_strings_of_parquet_are_left_out_with_a_reason(tmp_path, capsys):
    table = pa.table(BASE | {"price": list(map(str, PRICE)), "click": list(map(str, CLICK))})
    pq.write_table(table, tmp_path / "a.parquet")
    text, config = config_of(tmp_path, tmp_path / "a.parquet", capsys)
    assert "# left out: price: numbers as strings: cast the column" in text
    assert config["labels"] == {"names": ["click"], "derive": {"click": "click == '1'"}}
    check_and_train(tmp_path, capsys)


def test_floats_of_parquet_that_are_ids(tmp_path, capsys):
    table = pd.DataFrame(BASE | {"user_id": np.where(USER == 3, np.nan, USER)})
    table.to_parquet(tmp_path / "a.parquet")
    text, config = config_of(tmp_path, tmp_path / "a.parquet", capsys)
    assert config["features"][0] == {"name": "user_id", "kind": "categorical", "float_ids": True}
    assert "astype('Int64')" in text
    check_and_train(tmp_path, capsys)


TIMES = {
    "timestamp": (np.where(np.arange(ROWS) % 2, TIME, TIME * 1000), "left out: timestamp: times seem to count in s and in ms: mixed units"),
    "created_at": ([f"{1800 + row}-05-01" for row in range(ROWS)], "years go from 1800 to"),
    "time": (["2024-05-01 10:00:00"] * ROWS, "all times are equal"),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMES)
def test_implausible_times_are_doubted(tmp_path, capsys, name):
    values, told = TIMES[name]
    (tmp_path / "a.csv").write_bytes(lines(BASE | {name: values}))
    text, _ = config_of(tmp_path, tmp_path / "a.csv", capsys)
    assert told in text


def test_guesses_by_values_alone_say_so(tmp_path, capsys):
    text, _ = config_of(tmp_path, _written(tmp_path, "ratings.dat"), capsys)
    assert "a guess by its values alone: --label COLUMN names another" in text
    text, _ = config_of(tmp_path, _written(tmp_path, "padded.csv"), capsys)
    assert "0 seems to fill them up to one length" in text
    text, _ = config_of(tmp_path, _written(tmp_path, "german.csv"), capsys)
    assert "a guess: cp1252, cp1251, gbk, shift_jis and others are similar" in text


def _written(folder, name):
    (folder / name).write_bytes(LOGS[name][0])
    return folder / name


def test_times_as_floats_blanks_before_words_and_comments_of_pairs(tmp_path, capsys):
    (tmp_path / "a.inter").write_bytes(
        lines(
            {"user_id:token": USER, "timestamp:float": TIME.astype(float), "rating:float": CLICK * 4 + 1.0},
            "\t",
        )
    )
    _, config = config_of(tmp_path, tmp_path / "a.inter", capsys)
    assert config["data"]["split"]["by"] == "timestamp:float"
    ages = [" ?" if row % 9 == 0 else f" {20 + row % 50}" for row in range(ROWS)]
    (tmp_path / "b.csv").write_bytes(lines({"user": USER, "age": ages, "click": CLICK}))
    _, config = config_of(tmp_path, tmp_path / "b.csv", capsys)
    assert config["data"]["null_values"] == [" ?"]
    check_and_train(tmp_path, capsys)
    pairs = (
        f"{y} {''.join(f'{id}:1 ' for id in ids)}# {row}\n"
        for row, (y, ids) in enumerate(zip(CLICK, LISTS, strict=True))
    )
    (tmp_path / "c.txt").write_text("1 # none\n" + "".join(pairs))
    _, config = config_of(tmp_path, tmp_path / "c.txt", capsys)
    assert config["data"]["format"] == "libsvm"


def test_dates_that_are_not_read_are_doubted(tmp_path, capsys):
    days = [f"{1 + row % 28:02d}/05/2024" for row in range(ROWS)]
    (tmp_path / "a.csv").write_bytes(lines(BASE | {"day": days}))
    assert "dates such as these are not read as times" in config_of(tmp_path, tmp_path / "a.csv", capsys)[0]


def test_a_trained_model_reads_requests_as_its_files(tmp_path, capsys):
    some = np.arange(ROWS) % 5 == 0
    words = np.where(some, "\\N", WORDS)
    path = tmp_path / "a.csv"
    path.write_bytes(
        lines(
            BASE
            | {
                "word": words,
                "hist": [str(ids) for ids in LISTS],
                "price": np.where(some, "\\N", PRICE.astype(str)),
            }
        )
    )
    config_of(tmp_path, path, capsys)
    check_and_train(tmp_path, capsys)
    rest = {"user_id": 3, "item_id": 101}
    with girih.load(tmp_path / "run") as model:
        as_text = model.predict(rest | {"word": "\\N", "hist": "[1, 2]", "price": "\\N"})
        assert model.predict(rest | {"word": None, "hist": [1, 2], "price": None}) == as_text
        assert model.predict(rest | {"word": "rouge", "hist": [1, 2], "price": 3.5}).shape == (1,)


DOUBTS = {
    "nested lists": (lambda ids: str([[id, id + 1] for id in ids]), "not all are lists of ids: '[["),
    "objects of JSON": (lambda ids: json.dumps({f"t{id}": id / 8 for id in ids}), "not all are lists of ids"),
    "another separator": (lambda ids: f"[{'; '.join(map(str, ids))}]", "not all are lists of ids"),
    "a list cut short": (lambda ids: str(ids)[: 9 if len(ids) > 4 else 99], "not all are lists of ids"),
    "some weights": (lambda ids: ";".join(f"t{id}:0.5" if id % 3 else f"t{id}" for id in ids), "seem to be ids and weights, but not"),
    "weights beside a list": (lambda ids: "|".join(f"{id / 8}" for id in ids), "the option weights of another list may name them"),
    "versions": (lambda ids: f"{sum(ids) % 3}.{len(ids)}.1" if len(ids) % 2 else "2.0", "of the first rows cannot be read: column 'seen'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTS)
def test_cells_in_doubt_are_left_out_with_the_reason(tmp_path, capsys, name):
    write, told = DOUBTS[name]
    (tmp_path / "a.csv").write_bytes(lines(BASE | {"seen": [write(ids) for ids in LISTS]}))
    text, config = config_of(tmp_path, tmp_path / "a.csv", capsys)
    assert "seen" not in {feature["name"] for feature in config["features"]}, text
    (why,) = [line for line in text.splitlines() if line.startswith("# left out: seen: ")]
    assert told in why
    check_and_train(tmp_path, capsys)


def test_numbers_that_are_not_finite_are_left_out_of_formats_with_types(tmp_path, capsys):
    prices = pa.array(np.where(USER == 3, np.nan, PRICE))
    pq.write_table(pa.table(BASE | {"price": prices, "lists": [[[1]]] * ROWS}), tmp_path / "a.parquet")
    text, _ = config_of(tmp_path, tmp_path / "a.parquet", capsys)
    assert "# left out: price: " in text
    assert "column 'price': expected a finite number" in text
    check_and_train(tmp_path, capsys)


def test_lines_above_a_header_are_named(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(b"# exported 2024-01-01\n" + lines(BASE))
    assert cli.run(["init", str(tmp_path / "a.csv")]) == 2
    assert "line 2: 3 cells: expected 1, separated by ','" in capsys.readouterr().err


def test_ids_of_guessed_encodings_are_those_of_utf8(tmp_path, capsys):
    for encoding in ("utf-8", "gbk", "shift_jis", "cp1251"):
        word = (
            "красный" if encoding == "cp1251" else "青い表青いの" if encoding == "shift_jis" else "红色蓝色"
        )
        (tmp_path / "a.csv").write_bytes(
            lines(BASE | {"w": np.array([word, "x"])[CLICK]}).decode().encode(encoding)
        )
        _, config = config_of(tmp_path, tmp_path / "a.csv", capsys)
        schema = girih.Schema([girih.Categorical(name="w")], "click")
        read = girih.read_csv(tmp_path / "a.csv", schema, encoding=config["data"].get("encoding", "utf-8"))
        want = girih.read_arrow(pa.table({"w": [word, "x"], "click": [0, 0]}), schema)
        assert set(next(iter(read)).ids.tolist()) == set(next(iter(want)).ids.tolist())
