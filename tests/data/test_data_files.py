"""Paths, and files that cannot be used as a whole: one clear line each."""

import datetime
import decimal
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih.data import read_criteo, read_csv, read_libsvm, read_parquet
from girih.data.paths import find_files
from girih.errors import ConfigError, DataError, MissingFileError
from girih.schema import Categorical, Labels, Numeric, Schema

SCHEMA = Schema([Categorical(name="user"), Numeric(name="price")], "click")
GOOD = {"user": [1, 2], "price": [1.0, 2.0], "click": [0, 1]}


def write(path, **changes):
    columns = {name: value for name, value in (GOOD | changes).items() if value is not None}
    pq.write_table(pa.table(columns), path)
    return path


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_globs_are_sorted_lists_keep_their_order(tmp_path):
    for name in ("b.csv", "a.csv", "c.csv"):
        (tmp_path / name).write_text(name)
    names = [file.path.rsplit("/", 1)[1] for file in find_files([tmp_path / "c.csv", f"{tmp_path}/[ab].csv"])]
    assert names == ["c.csv", "a.csv", "b.csv"]


def test_a_name_with_marks_of_a_glob_is_a_name_when_it_exists(tmp_path):
    (tmp_path / "a[1].csv").write_text("x")
    assert len(find_files(tmp_path / "a[1].csv")) == 1


def test_directories_of_parquet_are_walked_but_not_what_is_hidden(tmp_path):
    for name in ("a", "sub/b", "_temporary/c", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    assert read_parquet(tmp_path, SCHEMA).num_examples == 4


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ("none.parquet", MissingFileError, "none.parquet: no such file; relative paths start at"),
        ("none-*.parquet", MissingFileError, r"none-\*.parquet: no file matches this pattern"),
        ([], ConfigError, "the list is empty"),
        ([""], ConfigError, "'' is not a path"),
        ([3], ConfigError, "3 is not a path"),
        ("s4://bucket/a.parquet", ConfigError, "s4://bucket/a.parquet: not an address.*s4"),
        ("memory://nowhere/*.parquet", MissingFileError, "no file matches"),
    ],
)
def test_paths_that_name_nothing(tmp_path, monkeypatch, paths, error, message):
    monkeypatch.chdir(tmp_path)
    for read in (read_parquet, read_csv, read_criteo, read_libsvm):
        with pytest.raises(error, match=message) as caught:
            read(paths, SCHEMA)
        one_line(caught)


def test_directories_without_data(tmp_path):
    with pytest.raises(DataError, match=r"the directory has no .parquet files"):
        read_parquet(tmp_path, SCHEMA)
    with pytest.raises(DataError, match=r"is a directory; name files"):
        read_csv(tmp_path, SCHEMA)


def truncated(path):
    write(path)
    path.write_bytes(path.read_bytes()[:-20])


def corrupted(path):
    pq.write_table(pa.table({name: value * 5000 for name, value in GOOD.items()}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:600] = b"\x77" * 596
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "the file is empty; expected Parquet"),
        (lambda path: path.write_text("user,price,click\n1,2,1\n" * 9), "not a readable Parquet file"),
        (truncated, "not a readable Parquet file"),
        (corrupted, "row group 1 cannot be read"),
        (lambda path: write(path, user=pa.array([], pa.int64()), price=[], click=[]), "no rows in the file"),
        (
            lambda path: write(path, user=None, usr=[1, 2]),
            "no column 'user' .feature 'user'.; did you mean 'usr'",
        ),
        (lambda path: write(path, click=None), "no column 'click' .label 'click'."),
        (
            lambda path: write(path, user=[1.0, 2.0]),
            "column 'user' .double. of feature 'user': ids are integers or strings; cast",
        ),
        (lambda path: write(path, user=[[1.0], [2.0]]), "ids are integers or strings; cast the column"),
        (
            lambda path: write(path, user=[datetime.datetime(2020, 1, 1)] * 2),
            r"timestamp\[us\].*ids are integers or strings",
        ),
        (lambda path: write(path, user=[decimal.Decimal("1.5")] * 2), "ids are integers or strings"),
        (lambda path: write(path, user=[{"a": 1}] * 2), "struct.*ids are integers or strings"),
        (lambda path: write(path, user=[[[1]], [[2]]]), "ids are integers or strings"),
        (
            lambda path: write(path, price=["1", "2"]),
            "column 'price' .string. of feature 'price': expected numbers",
        ),
        (lambda path: write(path, price=[[1.0], [2.0]]), "of feature 'price': expected numbers"),
        (
            lambda path: write(path, price=[datetime.date(2020, 1, 1)] * 2),
            "of feature 'price': expected numbers",
        ),
        (lambda path: write(path, click=["a", "b"]), "of label 'click': expected numbers; derive the label"),
        (lambda path: write(path, click=[[1], [0]]), "of label 'click': expected numbers"),
    ],
)
def test_parquet_files_that_do_not_serve(tmp_path, make, message):
    path = tmp_path / "a.parquet"
    make(path)
    with pytest.raises(DataError, match=message) as caught:
        list(read_parquet(path, SCHEMA))
    assert one_line(caught).startswith(str(path))


@pytest.mark.parametrize(
    ("feature", "columns", "message"),
    [
        (Categorical(name="f", separator="|"), {"f": [1, 2]}, r"separator '\|' splits strings; drop it"),
        (Categorical(name="f", separator="|"), {"f": [["a"], ["b"]]}, "splits strings"),
        (Categorical(name="f", bucketize=(1.0,)), {"f": ["a", "b"]}, "bucketize expects one number per row"),
        (
            Categorical(name="f", weights="w"),
            {"f": [[1], [2]], "w": [["a"], ["b"]]},
            "expected lists of numbers",
        ),
        (
            Categorical(name="f", weights="w"),
            {"f": [[1], [2]], "w": [1.0, 2.0]},
            "expected lists if and only if the ids are lists",
        ),
        (Categorical(name="f", weights="w"), {"f": [[1], [2]]}, "no column 'w' .weights of feature 'f'."),
        (
            Categorical(name="f", weights="w", separator="|"),
            {"f": ["1", "2"], "w": [1.0, 2.0]},
            r"expected strings to split at '\|'",
        ),
    ],
)
def test_features_that_do_not_go_with_their_columns(tmp_path, feature, columns, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns | {"y": [0, 1]}), path)
    with pytest.raises(DataError, match=message):
        read_parquet(path, Schema([feature], "y"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Labels(names=("y",), derive={"y": "price == 'a'"}), "compared with text 'a'; drop the inner quotes"),
        (Labels(names=("y",), derive={"y": "word > 4"}), "expected numbers; put the value in quotes"),
        (
            Labels(names=("y",), derive={"y": "pric > 4"}),
            "no column 'pric' .label 'y'.; did you mean 'price'",
        ),
        (Labels(names=("click",), weight="word"), "example weights are numbers"),
        (Labels(names=("click",), weight="heft"), "no column 'heft' .labels: weight."),
    ],
)
def test_labels_that_do_not_go_with_their_columns(tmp_path, labels, message):
    path = write(tmp_path / "a.parquet", word=["a", "b"])
    with pytest.raises(DataError, match=message):
        read_parquet(path, Schema([Categorical(name="user")], labels))


def test_files_that_disagree(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", user=["x", "y"])
    with pytest.raises(
        DataError, match=r"b.parquet: column 'user' has strings, but integers in .*a.parquet; cast one"
    ):
        read_parquet(tmp_path, SCHEMA)
    write(tmp_path / "b.parquet", user=pa.nulls(2), price=pa.array([1, 2], pa.int8()))
    with pytest.raises(DataError, match="'price' has integers, but floats"):
        read_parquet(tmp_path, SCHEMA)
    write(tmp_path / "b.parquet", user=pa.nulls(2), price=pa.array([1, 2], pa.float32()))
    assert read_parquet(tmp_path, SCHEMA).num_examples == 4
    write(tmp_path / "b.parquet", user=pa.array([1, 2], pa.int8()))
    with pytest.raises(DataError, match="'user' has int8, but int64"):
        read_parquet(tmp_path, SCHEMA, keep=["user"])


def test_two_contents_one_name(tmp_path):
    table = pa.table([[1], [2], [1.0], [1]], names=["user", "user", "price", "click"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="2 columns are named 'user'"):
        read_parquet(tmp_path / "a.parquet", SCHEMA)
    (tmp_path / "a.csv").write_text("user,user,price,click\n1,2,3,1\n")
    with pytest.raises(DataError, match="2 columns are named 'user'"):
        read_csv(tmp_path / "a.csv", SCHEMA)


def test_columns_that_nobody_reads_may_share_a_name(tmp_path):
    (tmp_path / "a.csv").write_text("z,user,z,price,click\n9,1,9,3,1\n")
    assert next(iter(read_csv(tmp_path / "a.csv", SCHEMA))).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\r\n\n", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"user,price,click\n", "no rows; expected at least one below the header"),
        (b"user,price,click\n\n\n", "no rows"),
        (b"1,2,1\n1,2,1\n", "no column 'user' .feature 'user'."),
        (b"user,prize,click\n1,2,1\n", "no column 'price'.*did you mean 'prize'"),
        (b"user;price;click\n1;2;1\n", "no column 'user'"),
        ("user,price,click\n1,2,1\n".encode("utf-16"), "looks like UTF-16 text, expected UTF-8"),
        (b"\xff\xfe\xfd,price\n1,2\n", "the header is not UTF-8 text"),
        (b"user,price,click\r1,2,1\r", "the first line cannot be split"),
        (b"user,price,click\n1,2,1\r2,3,1\n", "lines 2 to 2 do not all end in"),
    ],
)
def test_csv_files_that_do_not_serve(tmp_path, data, message):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        list(read_csv(path, SCHEMA))
    assert one_line(caught).startswith(str(path))


def test_damaged_gzip(tmp_path):
    path = tmp_path / "a.csv.gz"
    text = b"user,price,click\n" + b"".join(b"%d,%d,1\n" % (i, i * 7919 % 1013) for i in range(20_000))
    for data, message in [
        (b"user,price,click\n1,2,1\n", "not gzip-compressed, despite its name"),
        (b"", "the file is empty"),
        (gzip.compress(text)[:-2000], "damaged or cut short"),
        (gzip.compress(text)[:500] + b"junk" * 50 + gzip.compress(text)[700:], "damaged or cut short"),
    ]:
        path.write_bytes(data)
        with pytest.raises(DataError, match=message) as caught:
            list(read_csv(path, SCHEMA))
        assert one_line(caught).startswith(str(path))
    (tmp_path / "b.csv").write_bytes(gzip.compress(text))
    assert sum(batch.num_examples for batch in read_csv(tmp_path / "b.csv", SCHEMA)) == 20_000


def test_libsvm_files_that_do_not_serve(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("")
    with pytest.raises(DataError, match="the file is empty"):
        read_libsvm(path, SCHEMA)
    path.write_text("# nothing\n# at all\n")
    with pytest.raises(DataError, match="no rows in the files"):
        list(read_libsvm(path, SCHEMA))
    path.write_text("1 1:1 2:1\n")
    with pytest.raises(DataError, match=r"no column 'user' .keep."):
        read_libsvm(path, SCHEMA, keep=["user"])


def test_columns_to_keep_that_are_not_there(tmp_path):
    path = write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'usr' .keep.; did you mean 'user'"):
        read_parquet(path, SCHEMA, keep=["usr"])
    with pytest.raises(DataError, match=r"no column 'usr' .keep.; did you mean 'user'"):
        read_parquet(path, SCHEMA).without_labels(keep=["usr"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0: expected an integer from 1 to 2147483647"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"batch_size": True}, "batch_size = True"),
        ({"shuffle_rows": 0}, "shuffle_rows = 0"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"shuffle": "yes"}, "shuffle = 'yes'"),
        ({"on_bad_row": "ignore"}, "on_bad_row = 'ignore': expected one of 'error', 'skip'"),
        ({"separator": 'a"'}, "separator = .*: expected text without quotes and line breaks"),
        ({"separator": ""}, "separator = ''"),
        ({"quoted_line_breaks": "yes"}, "quoted_line_breaks = 'yes'"),
        ({"quoted_line_breaks": True, "quote": ""}, "expected a quote"),
        ({"separator": "\n"}, "separator"),
        ({"quote": "''"}, "quote = \"''\""),
        ({"quote": ","}, "quote = ','"),
        ({"columns": []}, "columns = "),
        ({"columns": ["a", "a"]}, "columns = "),
        ({"columns": "abc"}, "columns = 'abc'"),
        ({"block_bytes": 0}, "block_bytes = 0"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, options, message):
    path = tmp_path / "a.csv"
    path.write_text("user,price,click\n1,2,1\n")
    with pytest.raises(ConfigError, match=message):
        read_csv(path, SCHEMA, **options)


def test_a_dataset_refuses_a_bad_batch_size_and_unknown_features(tmp_path):
    dataset = read_parquet(write(tmp_path / "a.parquet"), SCHEMA)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        dataset.with_batch_size(0)
    with pytest.raises(ConfigError, match="no feature 'usr'; did you mean 'user'"):
        dataset.select(["usr"])


def test_a_parquet_file_that_goes_away_is_reported(tmp_path):
    dataset = read_parquet(write(tmp_path / "a.parquet"), SCHEMA)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(MissingFileError, match="has gone since it was listed"):
        list(dataset)


def test_a_file_that_goes_away_is_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user,price,click\n1,2,1\n")
    dataset = read_csv(path, SCHEMA)
    path.unlink()
    with pytest.raises(MissingFileError, match="has gone since it was listed"):
        list(dataset)
