"""``girih init`` and ``girih check``: a config that trains as it is printed, and what is wrong before a run begins."""

import datetime
import gzip
import json
import re
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from girih import cli

BEGIN = datetime.datetime(2024, 5, 1)
NUM_ROWS = 3000


def clicks(num_rows=NUM_ROWS):
    rng = np.random.default_rng(1)
    item = rng.integers(1000, 1400, num_rows)
    return {
        "Unnamed: 0": np.arange(num_rows),
        "user_id": rng.integers(10**6, 10**6 + 500, num_rows),
        "item": item,
        "category": [f"c{i}" for i in rng.integers(0, 9, num_rows)],
        "hist_items": [rng.integers(1000, 1400, n).tolist() for n in rng.integers(0, 6, num_rows)],
        "price": np.round(rng.exponential(30.0, num_rows) ** 2, 2),
        "age": rng.integers(18, 70, num_rows),
        "ts": 1714000000 + np.sort(rng.integers(0, 10**6, num_rows)),
        "country": ["NL"] * num_rows,
        "comment": [f"text number {i} of many" for i in range(num_rows)],
        "vector": [[0.5, 0.25]] * num_rows,
        "click": ((item % 3 == 0) & (rng.random(num_rows) < 0.8)).astype(np.int64),
        "is_liked": rng.integers(0, 2, num_rows),
    }


def as_text(columns):
    """Cells of a text file: lists joined by a bar, no vectors."""
    cells = {name: values for name, values in columns.items() if name != "vector"}
    cells["hist_items"] = ["|".join(map(str, ids)) for ids in cells["hist_items"]]
    return pa.table(cells)


def printed(capsys, *words):
    capsys.readouterr()
    assert cli.run(["init", *map(str, words)]) == 0
    return capsys.readouterr().out


def written(capsys, folder, *words):
    text = printed(capsys, *words)
    (folder / "config.toml").write_text(text)
    return text, tomllib.loads(text)


KINDS = {
    "user_id": "categorical", "item": "categorical", "category": "categorical", "hist_items": "sequence", "price": "numeric",
    "age": "numeric", "ts_hour": "categorical", "ts_weekday": "categorical",
}  # fmt: skip


def write(kind, path, columns):
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in pa.table(columns).to_pylist()))
    else:
        sink = pa.BufferOutputStream()
        pa.csv.write_csv(
            as_text(columns), sink, pa.csv.WriteOptions(delimiter="\t" if kind == "tsv.gz" else ",")
        )
        text = sink.getvalue().to_pybytes()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv.gz", "jsonl"])
def test_a_log_in_any_format_becomes_a_config_that_passes_check(tmp_path, capsys, kind):
    path = tmp_path / f"clicks.{kind}"
    write(kind, path, clicks())
    text, config = written(capsys, tmp_path, path)
    features = {feature["name"]: feature for feature in config["features"]}
    assert {name: feature["kind"] for name, feature in features.items()} == KINDS
    assert features["hist_items"]["table"] == "item"
    assert features["hist_items"].get("separator") == (None if kind in ("parquet", "jsonl") else "|")
    assert features["price"]["transform"] == ["log1p", "standardize"]
    assert features["ts_hour"] == {
        "name": "ts_hour", "kind": "categorical", "column": "ts", "transform": "hour", "time_unit": "s"
    }  # fmt: skip
    assert config["labels"] == {"names": ["click"]}
    assert "click is 0 or 1, and 1 in 2" in text
    assert config["data"]["batch_size"] == 32
    assert config["data"]["split"] == {"by": "ts", "valid": 0.1, "test": 0.1}
    for left_out in (
        "Unnamed: 0: a different value in every row",
        "country: 'NL' in every row",
        "comment: different text in every row",
        "is_liked: by its name it may be another outcome",
    ):
        assert f"# left out: {left_out}" in text
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    told = capsys.readouterr().out
    assert "test: " in told
    assert re.search(r"  item: dim 16, (39|40)[0-9] rows, [0-9.]+ KiB", told), told
    assert "ready; next: girih train" in told


def test_the_config_trains_as_printed(tmp_path, capsys):
    write("csv", tmp_path / "clicks.csv", clicks())
    written(capsys, tmp_path, tmp_path / "clicks.csv")
    assert (
        cli.run(
            [
                "train",
                str(tmp_path / "config.toml"),
                "--run",
                str(tmp_path / "run"),
                "--set",
                "model.hidden=[8]",
            ]
        )
        == 0
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_examples"] == 2400
    assert summary["auc"] > 0.6
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 0
    assert "on test" in capsys.readouterr().out


def test_ratings_words_and_unnamed_columns(tmp_path, capsys):
    rng = np.random.default_rng(2)
    ratings = {
        "user": rng.integers(0, 9, 400),
        "movie": rng.integers(0, 99, 400),
        "rating": rng.integers(1, 6, 400),
    }
    pq.write_table(pa.table(ratings), tmp_path / "a.parquet")
    _, config = written(capsys, tmp_path, tmp_path / "a.parquet")
    assert config["labels"] == {"names": ["rating_high"], "derive": {"rating_high": "rating >= 3"}}
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    words = {"user": rng.integers(0, 9, 400), "clicked": rng.choice(["yes", "no"], 400)}
    pq.write_table(pa.table(words), tmp_path / "b.parquet")
    _, config = written(capsys, tmp_path, tmp_path / "b.parquet")
    assert config["labels"]["derive"] == {"clicked": "clicked == 'yes'"}
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    (tmp_path / "c.csv").write_text("".join(f"{i % 2};{i * 7 % 13};{i % 5 / 4}\n" for i in range(100)))
    _, config = written(capsys, tmp_path, tmp_path / "c.csv")
    assert config["data"]["separator"] == ";"
    assert config["data"]["columns"] == ["column1", "column2", "column3"]
    assert config["labels"]["names"] == ["column1"]
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    capsys.readouterr()
    assert 'derive = { column3_high = "column3 >= 0.5" }' in printed(
        capsys, tmp_path / "c.csv", "--label", "column3"
    )


def test_partitions_and_folders(tmp_path, capsys):
    for month in (1, 2):
        folder = tmp_path / "d" / f"month={month}"
        folder.mkdir(parents=True)
        write("csv", folder / "a.csv", {name: values[:500] for name, values in clicks().items()})
    _, config = written(capsys, tmp_path, tmp_path / "d")
    assert config["data"]["train"] == f"{tmp_path}/d/**/*.csv"
    assert "month" in {feature["name"] for feature in config["features"]}
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    files = [
        tmp_path / "d" / f"month={month}" / "a.csv" for month in (1, 2)
    ]  # as a shell writes a pattern out
    _, config = written(capsys, tmp_path, *files)
    assert config["data"]["train"] == [str(file) for file in files]


def test_files_of_a_folder_are_those_that_end_so(tmp_path, capsys):
    """Compressed ones too, and no copies that an editor or a download left."""
    folder = tmp_path / "d"
    folder.mkdir()
    write("csv", folder / "a.csv", {name: values[:500] for name, values in clicks().items()})
    (folder / "b.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    for name in ("a.csv.bak", "a.csv~", "c.csv.gz.part"):
        (folder / name).write_text("what\nis this\n")
    _, config = written(capsys, tmp_path, folder)
    assert config["data"]["train"] == [f"{folder}/**/*.csv", f"{folder}/**/*.csv.gz"]
    assert "user_id" in {feature["name"] for feature in config["features"]}
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    (folder / "b.csv.gz").unlink()
    _, config = written(capsys, tmp_path, folder)
    assert config["data"]["train"] == f"{folder}/**/*.csv"


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (
            b"user,item\nx,y\nz,w\nu,v\n",
            (),
            "no column looks like a label (0 and 1, yes and no, a rating); name one of user, item by --label",
        ),
        (
            b"user,click\nx,1\nz,0\n",
            ("--label", "clik"),
            "--label clik: no such column; did you mean 'click'?",
        ),
        (b"click\n1\n0\n", (), "no column except 'click' looks like a feature"),
        (
            b"click:1 user:3\nclick:0 user:4\n",
            (),
            "looks like name:value pairs (slots), which girih does not read",
        ),
        (b"", (), "the file is empty"),
    ],
)
def test_data_of_which_no_config_can_be_made(tmp_path, capsys, content, words, message):
    (tmp_path / "a.txt").write_bytes(content)
    assert cli.run(["init", str(tmp_path / "a.txt"), *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_no_such_data(tmp_path, capsys):
    assert cli.run(["init", str(tmp_path / "nowhere.csv")]) == 2
    assert "no such file" in capsys.readouterr().err


CONFIG = """
[data]
train = "a.parquet"
batch_size = 1000
[[features]]
name = "user_id"
kind = "categorical"
[[features]]
name = "price"
kind = "numeric"
[labels]
names = ["click"]
[model]
name = "dnn"
hidden = [8]
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["features.user_id.column=user"], "no column 'user' (feature 'user_id')"),
        (["labels.names=['age']"], "a.parquet, row 1 (row group 1): column 'age' = "),
        (
            ["features.user_id.column=price"],
            "column 'price' (double) of feature 'user_id': ids are integers or strings",
        ),
        (
            ["features.price.column=category"],
            "column 'category' (string) of feature 'price': expected numbers",
        ),
        (["strategy={name='synchronous', trainers=0}"], "trainers = 0"),
        (["model.hiden=[8]"], "unknown option 'hiden'; did you mean 'hidden'?"),
    ],
)
def test_mistakes_are_found_before_a_run(tmp_path, capsys, overrides, message):
    write("parquet", tmp_path / "a.parquet", clicks())
    (tmp_path / "config.toml").write_text(CONFIG)
    words = [word for override in overrides for word in ("--set", override)]
    assert cli.run(["check", str(tmp_path / "config.toml"), *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_what_is_unusual_is_noted(tmp_path, capsys):
    columns = clicks() | {"click": np.zeros(NUM_ROWS), "gone": pa.nulls(NUM_ROWS, pa.int64())}
    write("parquet", tmp_path / "a.parquet", columns)
    more = '[[features]]\nname = "country"\nkind = "categorical"\n[[features]]\nname = "gone"\nkind = "categorical"\n[labels]'
    (tmp_path / "config.toml").write_text(CONFIG.replace("[labels]", more))
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    for words in ("label 'click' is 0 in all of", "'country' has one id", "'gone' is missing in 100%", "'price' reaches", "about 3 steps",
                  "neither valid nor test"):  # fmt: skip
        assert any(words in note for note in notes), words
    assert len(notes) == 6


def test_rows_are_estimated_from_a_sample():
    from girih.data import Batch
    from girih.data.dataset import Growth
    from girih.schema import Categorical, Schema

    rng, total = np.random.default_rng(0), 400_000
    ids = {
        "grows": rng.zipf(1.3, total) % (1 << 40),
        "few": rng.integers(0, 100, total),
        "new": np.arange(total),
    }
    growth = Growth(Schema([Categorical(name=name) for name in ids], "y"))
    for first in range(0, 100_000, 5000):
        rows = slice(first, first + 5000)
        growth.add(Batch(
            ids=np.concatenate([column[rows] for column in ids.values()]), offsets=np.arange(15_001, dtype=np.int32),
            numeric=np.zeros((5000, 0), np.float32), labels=np.zeros((5000, 1), np.float32),
        ))  # fmt: skip
    for name, column in ids.items():
        assert growth.rows(name, total) == pytest.approx(len(np.unique(column)), rel=0.1), name


@pytest.mark.parametrize(
    ("value", "mend"), [(1, "add negatives ([negatives], or"), (0, "name another column, or")]
)
@pytest.mark.parametrize("name", ["seen", "label"])
def test_a_label_of_one_value_is_said_to_teach_nothing(tmp_path, capsys, name, value, mend):
    columns = {"user": list(range(40)) * 2, "item": [7, 8, 9, 10] * 20, name: [value] * 80}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    text, config = written(capsys, tmp_path, tmp_path / "log.parquet", "--label", name)
    assert config["labels"] == {"names": [name]}
    assert f"# WARNING: {name} is {value} in the whole sample, so" in text
    assert mend in text
    assert config["model"]["name"] == "deepfm"
    assert cli.run(["init", str(tmp_path / "log.parquet"), "--label", "user"]) == 0


def test_a_column_of_one_word_is_no_label_and_the_word_is_said(tmp_path, capsys):
    pq.write_table(pa.table({"user": list(range(40)), "place": ["top"] * 40}), tmp_path / "log.parquet")
    assert cli.run(["init", str(tmp_path / "log.parquet"), "--label", "place"]) == 2
    assert "nor numbers that differ ('top' alone)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cells", [[[1, 2], [3]], [{"a": 1}, {"a": 2}], [[1], [1]]], ids=["lists", "structs", "alike"]
)
def test_a_column_of_lists_or_structs_is_no_label(tmp_path, capsys, cells):
    table = pa.table({"user": list(range(40)), "tags": cells * 20, "score": [0.1, 0.2] * 20})
    pq.write_table(table, tmp_path / "log.parquet")
    assert cli.run(["init", str(tmp_path / "log.parquet"), "--label", "tags"]) == 2
    assert capsys.readouterr().err == (
        "girih: --label tags: holds neither 0 and 1, nor two words, nor numbers that differ;"
        " name one of user, tags, score by --label COLUMN\n"
    )


def test_text_whose_header_begins_as_parquet_does_is_text(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("PAR1,click\n" + "5,1\n6,0\n" * 40)
    _, config = written(capsys, tmp_path, tmp_path / "a.csv")
    assert config["data"]["format"] == "csv"


def test_a_config_is_not_data(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[data]\ntrain = 'a.parquet'\n")
    assert cli.run(["init", str(tmp_path / "config.toml")]) == 2
    assert capsys.readouterr().err == (
        f"girih: {tmp_path}/config.toml: received a config file; girih init reads data and prints a config, as in girih init"
        f" 'train/*.parquet' > config.toml; girih check {tmp_path}/config.toml tries this one\n"
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("separator", [None, ",", "|"])
def test_lists_that_are_read_as_one_id_each_are_noted(tmp_path, capsys, kind, separator):
    rng = np.random.default_rng(3)
    columns = {
        "user": [f"u{i}" for i in rng.integers(0, 50, 400)],
        "tags": ["|".join(map(str, rng.integers(0, 9, 3))) for _ in range(400)],
        "click": rng.integers(0, 2, 400),
    }
    table, file = pa.table(columns), tmp_path / f"log.{kind}"
    pq.write_table(table, file) if kind == "parquet" else pa.csv.write_csv(table, file)
    (tmp_path / "config.toml").write_text(
        f"""data = {{train = "{file}", format = "{kind}"}}
        defaults = {{dim = 4}}
        features = [{{name = "user", kind = "categorical"}}, {{name = "tags", kind = "categorical"}}]
        labels = {{names = ["click"]}}
        model = {{name = "dnn", hidden = [4]}}"""
    )
    words = [] if separator is None else ["--set", f"features.tags.separator='{separator}'"]
    capsys.readouterr()
    assert cli.run(["check", str(tmp_path / "config.toml"), *words]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "reads each string whole" in line]
    if separator == "|":
        assert notes == []
        return
    (note,) = notes
    why = "it has no separator" if separator is None else "none has its separator ','"
    assert note.startswith(f"note: feature 'tags' reads each string whole, as one id ({why}), as '")
    assert note.endswith("separator = '|' would split them")


def test_a_history_shares_a_table_where_it_is_plain_which(tmp_path, capsys):
    ids = list(range(60)) * 4
    table = {
        "user_id": ids,
        "video_id": ids,
        "watch_seq": [[each, 59 - each] for each in ids],
        "click": [0, 1] * 120,
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(table), path)
    text, config = written(capsys, tmp_path, path)
    features = {feature["name"]: feature for feature in config["features"]}
    assert "table" not in features["watch_seq"]
    assert '# table = "user_id"' in text
    assert "or 'video_id': its ids occur in each" in text
    assert "attention" not in text
    pq.write_table(pa.table({name.replace("watch", "user"): column for name, column in table.items()}), path)
    assert (
        "or 'video_id': its ids occur in each" in written(capsys, tmp_path, path)[0]
    )  # whose list it is, not what of
    pq.write_table(pa.table({name.replace("watch", "video"): column for name, column in table.items()}), path)
    text, config = written(capsys, tmp_path, path)
    features = {feature["name"]: feature for feature in config["features"]}
    assert features["video_seq"]["table"] == "video_id"
    assert 'attention = { video_seq = "video_id" }' in text


def test_what_may_be_a_label_is_no_feature_of_another(tmp_path, capsys):
    table = {
        "user": list(range(60)) * 4,
        "click": [0, 1] * 120,
        "click_long": [0, 0, 0, 1] * 60,
        "rating": [1, 5] * 120,
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(table), path)
    text, config = written(capsys, tmp_path, path, "--label", "click_long")
    assert "# left out: click: by its name it may be another outcome" in text
    assert config["labels"] == {"names": ["click_long"]}


@pytest.mark.parametrize(
    ("second", "noted"), [([0, 0, 0, 1], False), ([0, 1, 1, 0], True), ([0, None, 0, 1], False)]
)
def test_a_second_label_of_esmm_outside_the_first_is_noted(tmp_path, capsys, second, noted):
    columns = {"user": list(range(60)) * 4, "click": [0, 0, 1, 1] * 60, "bought": second * 60}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    (tmp_path / "config.toml").write_text(
        f'[data]\ntrain = "{tmp_path}/log.parquet"\n[[features]]\nname = "user"\nkind = "categorical"\ndim = 4\n'
        '[labels]\nnames = ["click", "bought"]\nmissing = "skip"\n[model]\nname = "esmm"\nhidden = [4]\n'
    )
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    told = "label 'bought' is 1 in 60 of the first 240 examples where 'click' is 0"
    assert (told in capsys.readouterr().out) == noted


def test_a_rating_that_the_label_is_made_of_is_no_feature(tmp_path, capsys):
    ratings = [1, 2, 3, 4, 5, None] * 40
    liked = [None if each is None else int(each >= 4) for each in ratings]
    table = {
        "user": list(range(60)) * 4,
        "rating": ratings,
        "age": [20 + at % 31 for at in range(240)],
        "liked": liked,
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(table), path)
    text, config = written(capsys, tmp_path, path)
    assert config["labels"]["names"] == ["liked"]
    assert "# left out: rating: numbers up to a bound have one 'liked'" in text
    assert {feature["name"] for feature in config["features"]} == {"user", "age"}


def test_a_label_that_comes_late_in_a_log_is_no_reason_to_leave_columns_out(tmp_path, capsys):
    rows = 200
    table = {
        "timestamp": [1_600_000_000 + 60 * row for row in range(rows)], "user_id": [row // 2 for row in range(rows)],
        "price": [None if row % 50 else float(row) for row in range(rows)], "click": [int(row >= rows - 3) for row in range(rows)],
    }  # fmt: skip
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(table), path)
    _, config = written(capsys, tmp_path, path)
    assert {feature["name"] for feature in config["features"]} >= {"user_id", "price", "timestamp_hour"}
    table["click"] = [int(row >= rows // 2) for row in range(rows)]
    pq.write_table(pa.table(table), path)
    _, config = written(capsys, tmp_path, path)
    assert config["data"]["split"]["by"] == "timestamp"
    halves = pa.table(
        {
            "user": list(range(60)) * 4,
            "score": pa.array([1.0, 2.0, 3.0] * 80, pa.float16()),
            "click": [0, 1] * 120,
        }
    )
    pq.write_table(halves, path)
    _, config = written(capsys, tmp_path, path)
    assert "score" in {feature["name"] for feature in config["features"]}


@pytest.mark.parametrize(
    ("scale", "unit", "meant"),
    [(1, "s", None), (1, "ms", "s"), (10**3, "ms", None), (10**6, "ns", "us"), (10**9, "ns", None)],
)
def test_times_in_another_unit_than_they_count_in_are_noted(tmp_path, capsys, scale, unit, meant):
    rows = 300
    times = [str((1714000000 + 977 * row) * scale) for row in range(rows - 1)] + [None]
    table = {"user": list(range(rows)), "at": times, "click": [0, 1] * (rows // 2)}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    (tmp_path / "config.toml").write_text(
        f"""data = {{train = "{tmp_path}/log.parquet"}}
        defaults = {{dim = 4}}
        features = [{{name = "user", kind = "categorical"}}, {{name = "hour", column = "at", kind = "categorical", transform = "hour", time_unit = "{unit}"}}]
        labels = {{names = ["click"]}}
        model = {{name = "dnn", hidden = [4]}}"""
    )
    capsys.readouterr()
    assert cli.run(["check", str(tmp_path / "config.toml")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "time_unit" in line]
    if meant is None:
        assert notes == []
        return
    assert notes == [
        f"note: feature 'hour', counted in {unit}: years go from 1970 to 1970, expected 1990 to 2099 in the first 300 examples:"
        f" time_unit = {meant!r} is probably meant"
    ]
