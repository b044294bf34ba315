"""The config section [data]."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import config
from girih.data import DataOptions, open_dataset
from girih.data.options import DataPaths
from girih.errors import ConfigError, MissingFileError
from girih.schema import Categorical, Schema

SCHEMA = Schema([Categorical(name="c")], "y")


def build(**mapping):
    return config.build(DataOptions, mapping, "config.toml: [data]")


@pytest.fixture
def place(tmp_path):
    for split in ("train", "valid"):
        pq.write_table(pa.table({"c": [1, 2, 3], "y": [0, 1, 0]}), tmp_path / f"{split}.parquet")
    (tmp_path / "train.tsv").write_text("5\t1\n6\t0\n")
    return tmp_path


def test_splits_are_relative_to_the_config_and_only_train_is_shuffled(place):
    options = build(train=["train.parquet", f"{place}/train.parquet"], valid="valid.parquet")
    train = open_dataset(options, SCHEMA, base_dir=place, seed=4)
    assert (train.num_examples, train.shuffle, train.seed, train.batch_size) == (6, True, 4, 4096)
    valid = open_dataset(options, SCHEMA, split="valid", base_dir=place)
    assert (valid.num_examples, valid.shuffle) == (3, False)
    named = open_dataset(
        options, SCHEMA, files=DataPaths(paths=place / "valid.parquet"), with_labels=False, keep=["y"]
    )
    assert (named.num_examples, named.shuffle) == (3, False)
    with pytest.raises(ConfigError, match=r"\[data\] has no test"):
        open_dataset(options, SCHEMA, split="test", base_dir=place)
    with pytest.raises(MissingFileError):
        open_dataset(options, SCHEMA, base_dir="/nowhere", split="valid")


def test_read_ahead_reaches_the_dataset(place):
    assert girih.read_parquet(place / "train.parquet", SCHEMA).read_ahead == 4
    options = build(train="train.parquet", valid="valid.parquet", read_ahead=7)
    for split in ("train", "valid"):
        data = open_dataset(options, SCHEMA, split=split, base_dir=place)
        assert data.in_order().with_batch_size(2).read_ahead == 7


def test_csv_options_reach_the_reader(place):
    options = build(format="csv", train="train.tsv", separator="\t", columns=["c", "y"], shuffle=False)
    (batch,) = list(open_dataset(options, SCHEMA, base_dir=place))
    assert batch.ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "key 'train' is missing"),
        ({"train": "a", "trian": "b"}, "unknown key 'trian'; did you mean 'train'"),
        ({"train": "a", "format": "parket"}, "expected one of 'parquet'"),
        ({"train": ""}, "train = ''"),
        ({"train": []}, "train = ()"),
        ({"train": "a", "valid": [""]}, "valid = "),
        ({"train": 3}, "expected a string"),
        ({"train": "a", "batch_size": 0}, "batch_size = 0"),
        ({"train": "a", "batch_size": "big"}, "expected an integer"),
        ({"train": "a", "shuffle_rows": -1}, "shuffle_rows = -1"),
        ({"train": "a", "read_ahead": 0}, "read_ahead = 0"),
        ({"train": "a", "on_bad_row": "warn"}, "expected one of 'error', 'skip'"),
        ({"train": "a", "separator": ";"}, "separator: only format csv has it"),
        ({"train": "a", "format": "criteo", "columns": ["a"]}, "columns: only format csv has it"),
    ],
)
def test_options_that_cannot_be_used(mapping, message):
    with pytest.raises(ConfigError) as caught:
        build(**mapping)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.toml: [data]")


def test_a_feature_may_not_read_what_a_label_is_derived_from(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"rating": [1, 5], "user": [1, 2]}), file)
    labels = girih.Labels(names=("liked",), derive={"liked": "rating >= 4"})
    schema = girih.Schema([girih.Categorical(name="stars", column="rating")], labels)
    with pytest.raises(ConfigError, match="'stars' reads 'rating'"):
        girih.read_parquet(file, schema)


def test_a_path_that_is_absolute_starts_nowhere_and_lists_are_told_whole(tmp_path):
    for train, told in (
        (
            str(tmp_path / "a.parquet"),
            f'data.train = "{tmp_path}/a.parquet": {tmp_path}/a.parquet: no such file',
        ),
        (
            ["a.parquet", "b.parquet"],
            f"data.train = ['a.parquet', 'b.parquet']: {tmp_path}/a.parquet: no such file; relative paths start at"
            f" {tmp_path}, the directory of the config file",
        ),
    ):
        with pytest.raises(MissingFileError) as caught:
            open_dataset(build(train=train), SCHEMA, base_dir=tmp_path)
        assert str(caught.value) == told


def test_where_relative_paths_start_is_said_once_and_of_relative_ones_alone(place, monkeypatch):
    monkeypatch.chdir(place)
    absolute = str(place / "gone.parquet")
    options = build(train=["train.parquet", absolute], valid=["train.parquet", "gone-*.parquet"])
    for split, told in (
        ("train", f"data.train = ['train.parquet', '{absolute}']: {absolute}: no such file"),
        (
            "valid",
            "data.valid = ['train.parquet', 'gone-*.parquet']: ./gone-*.parquet: no file matches this pattern;"
            " relative paths start at ., the directory of the config file",
        ),
    ):
        with pytest.raises(MissingFileError) as caught:
            open_dataset(options, SCHEMA, split=split, base_dir=".")
        assert str(caught.value) == told


def test_a_file_that_goes_while_it_is_opened_is_told_without_where_paths_start(place, monkeypatch):
    def gone(paths, *given, **options):
        raise MissingFileError(f"{paths[0]}: the file has gone since it was listed")

    monkeypatch.setattr("girih.data.readers.read_parquet", gone)
    with pytest.raises(MissingFileError) as caught:
        open_dataset(build(train="train.parquet"), SCHEMA, base_dir=place)
    gone_since = f"{place}/train.parquet: the file has gone since it was listed"
    assert str(caught.value) == f'data.train = "train.parquet": {gone_since}'
