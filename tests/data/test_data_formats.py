"""What the values of a file become, and that every format says the same."""

import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from girih.data import NULL_ID, read_criteo, read_csv, read_libsvm, read_parquet
from girih.errors import ConfigError, DataError
from girih.schema import Categorical, Labels, Numeric, Schema, Sequence
from reference import xxh64


def whole(dataset):
    """The one batch of a small dataset."""
    (batch,) = list(dataset.with_batch_size(1000))
    return batch


def bag(batch, feature, row):
    size = batch.num_examples
    first, last = batch.offsets[feature * size + row], batch.offsets[feature * size + row + 1]
    return batch.ids[first:last].tolist()


def bags(batch, feature):
    return [bag(batch, feature, row) for row in range(batch.num_examples)]


def parquet(path, columns, **options):
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def same(one, two):
    for name in ("ids", "offsets", "weights", "numeric", "labels", "example_weights"):
        left, right = getattr(one, name), getattr(two, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right, err_msg=name)


SCHEMA = Schema(
    [
        Categorical(name="user"),
        Categorical(name="site"),
        Categorical(name="tags", separator="|", max_length=2, weights="tag_weights"),
        Sequence(name="history", separator=" "),
        Categorical(name="bucket", column="price", bucketize=(0.0, 1.0, 10.0)),
        Numeric(name="price", transform="log1p"),
        Numeric(name="age"),
    ],
    Labels(names=("click", "liked"), derive={"liked": "rating >= 4"}, weight="importance"),
)
TEXT = """\
user,site,tags,tag_weights,history,price,age,click,rating,importance
7,"a,b",x|3,0.5|2,1 2 3,2.5,30,1,5,1
-7,09,,,,,,0,3,0.25
9223372036854775808,,5,1,x,-1,1e2,0.5,4,2
,9,a|b|c,1|2|3,-9 +9,1,0,0,1,1
"""


def table(strings):
    rows = [dict(zip(TEXT.split("\n")[0].split(","), row, strict=True)) for row in [
        ("7", "a,b", "x|3", "0.5|2", "1 2 3", 2.5, 30.0, 1.0, 5, 1.0),
        ("-7", "09", None, None, None, None, None, 0.0, 3, 0.25),
        ("9223372036854775808", None, "5", "1", "x", -1.0, 100.0, 0.5, 4, 2.0),
        (None, "9", "a|b|c", "1|2|3", "-9 +9", 1.0, 0.0, 0.0, 1, 1.0),
    ]]  # fmt: skip
    made = pa.Table.from_pylist(rows)
    for name in ("user", "site", "tags", "tag_weights", "history"):
        place = made.schema.get_field_index(name)
        made = made.set_column(place, name, made[name].cast(strings))
    return made


@pytest.mark.parametrize(
    "strings", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_csv_and_parquet_agree(tmp_path, strings):
    (tmp_path / "a.csv").write_text(TEXT)
    from_csv = whole(read_csv(tmp_path / "a.csv", SCHEMA))
    same(from_csv, whole(read_parquet(parquet(tmp_path / "a.parquet", table(strings)), SCHEMA)))


def test_values_of_csv(tmp_path):
    (tmp_path / "a.csv").write_text(TEXT)
    batch = whole(read_csv(tmp_path / "a.csv", SCHEMA))
    assert bags(batch, 0) == [[7], [-7], [-(2**63)], [NULL_ID]]
    assert bags(batch, 1) == [[xxh64(b"a,b")], [xxh64(b"09")], [NULL_ID], [9]]
    assert bags(batch, 2) == [[xxh64(b"x"), 3], [], [5], [xxh64(b"b"), xxh64(b"c")]]
    assert bags(batch, 3) == [[1, 2, 3], [], [xxh64(b"x")], [-9, xxh64(b"+9")]]
    assert bags(batch, 4) == [[2], [NULL_ID], [0], [2]]
    size = batch.num_examples
    assert batch.weights[batch.offsets[2 * size] : batch.offsets[3 * size]].tolist() == [0.5, 2, 1, 2, 3]
    assert (batch.weights[: batch.offsets[2 * size]] == 1).all()
    np.testing.assert_array_equal(batch.numeric[:, 0], np.float32([np.log1p(2.5), 0, 0, np.log1p(1)]))
    assert batch.numeric[:, 1].tolist() == [30, 0, 100, 0]
    assert batch.labels.tolist() == [[1, 1], [0, 0], [0.5, 1], [0, 0]]
    assert batch.example_weights.tolist() == [1, 0.25, 2, 1]
    assert [batch.ids.dtype, batch.offsets.dtype, batch.numeric.dtype] == [np.int64, np.int32, np.float32]
    assert batch.num_features == 5


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_endings_marks_and_gzip(tmp_path, ending, last, mark):
    text = mark + TEXT.rstrip("\n").replace("\n", ending).encode() + (ending.encode() if last else b"")
    (tmp_path / "a.csv").write_text(TEXT)
    (tmp_path / "b.csv").write_bytes(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text))
    want = whole(read_csv(tmp_path / "a.csv", SCHEMA))
    same(want, whole(read_csv(tmp_path / "b.csv", SCHEMA)))
    same(want, whole(read_csv(tmp_path / "b.csv.gz", SCHEMA)))


def test_headerless_files_and_other_separators(tmp_path):
    header, _, rest = TEXT.partition("\n")
    (tmp_path / "a.csv").write_text(TEXT)
    (tmp_path / "b.tsv").write_text(rest.replace('"a,b"', "a_b").replace(",", ";").replace("a_b", "a,b"))
    names = header.split(",")
    want = whole(read_csv(tmp_path / "a.csv", SCHEMA))
    same(want, whole(read_csv(tmp_path / "b.tsv", SCHEMA, separator=";", columns=names)))
    same(
        want, whole(read_csv(tmp_path / "a.csv", SCHEMA, columns=names))
    )  # a header, in spite of what was said


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint32(),
        pa.string(),
        pa.string_view(),
        pa.binary(2),
    ],
    ids=str,
)
def test_ids_do_not_depend_on_the_columns_type(tmp_path, kind):
    values = pa.array([17, 99, None, 23])
    column = (
        values.cast(pa.string()).cast(pa.binary()).cast(kind) if kind == pa.binary(2) else values.cast(kind)
    )
    schema = Schema([Categorical(name="c")], "y")
    path = parquet(tmp_path / "a.parquet", {"c": column, "y": [0, 1, 0, 1]})
    assert whole(read_parquet(path, schema)).ids.tolist() == [17, 99, NULL_ID, 23]


def test_extreme_and_odd_ids(tmp_path):
    schema = Schema([Categorical(name=name) for name in "ubn"], "y")
    columns = {
        "u": pa.array([0, 2**64 - 1, 2**63], pa.uint64()),
        "b": pa.array([True, None, False]),
        "n": pa.nulls(3),
        "y": [0, 1, 0],
    }
    batch = whole(read_parquet(parquet(tmp_path / "a.parquet", columns), schema))
    assert batch.ids.tolist() == [0, -1, -(2**63), 1, NULL_ID, 0, NULL_ID, NULL_ID, NULL_ID]


def test_null_id_is_the_hash_it_is_documented_to_be():
    assert xxhash.xxh64_intdigest(b"girih.null") == NULL_ID == 3308892442114646408


LISTS = [[1, 2, 3], None, [], [4, None], [5]]
WANTED = [[1, 2, 3], [], [], [4, NULL_ID], [5]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.string())], ids=str
)
def test_lists_are_bags_and_sequences(tmp_path, kind):
    values = (
        [row and [i if i is None else str(i) for i in row] for row in LISTS]
        if "string" in str(kind)
        else LISTS
    )
    columns = {"c": pa.array(values, kind), "s": pa.array(values, kind), "y": [0, 1, 0, 1, 0]}
    schema = Schema([Categorical(name="c"), Sequence(name="s", max_length=2)], "y")
    batch = whole(read_parquet(parquet(tmp_path / "a.parquet", columns), schema))
    assert bags(batch, 0) == WANTED
    assert bags(batch, 1) == [row[-2:] for row in WANTED]


@pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 26, reason="pyarrow 26 is the first to read null lists of fixed size"
)
def test_fixed_size_lists(tmp_path):
    column = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    schema = Schema([Categorical(name="c")], "y")
    batch = whole(read_parquet(parquet(tmp_path / "a.parquet", {"c": column, "y": [0, 1, 0]}), schema))
    assert bags(batch, 0) == [[1, 2], [], [3, NULL_ID]]


def test_a_scalar_column_is_a_sequence_of_one(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"s": [5, 6], "y": [0, 1]})
    assert bags(whole(read_parquet(path, Schema([Sequence(name="s")], "y"))), 0) == [[5], [6]]


def test_weights_of_one_are_left_out(tmp_path):
    schema = Schema([Categorical(name="c", weights="w")], "y")
    columns = {"c": [[1, 2], [3]], "w": [[1.0, 1.0], [1.0]], "y": [0, 1]}
    assert whole(read_parquet(parquet(tmp_path / "a.parquet", columns), schema)).weights is None
    columns["w"] = [[1.0, 2.0], [1.0]]
    assert whole(read_parquet(parquet(tmp_path / "b.parquet", columns), schema)).weights.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    "kind", [pa.float32(), pa.float64(), pa.int16(), pa.uint64(), pa.decimal128(9, 2)], ids=str
)
def test_numbers_of_any_type(tmp_path, kind):
    columns = {"x": pa.array([1, None, 3], pa.int16()).cast(kind), "y": pa.array([True, False, True])}
    schema = Schema([Numeric(name="x"), Numeric(name="z", column="x", transform="standardize")], "y")
    batch = whole(read_parquet(parquet(tmp_path / "a.parquet", columns), schema))
    np.testing.assert_array_equal(batch.numeric, np.float32([[1, 1], [0, np.nan], [3, 3]]))
    assert batch.labels.tolist() == [[1], [0], [1]]
    assert batch.num_features == 0


def test_long_decimals_are_read_as_arrow_reads_them(tmp_path):
    values = np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-20, 30).repeat(10)
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{value!r},1\n" for value in values.tolist()))
    batch = whole(read_csv(tmp_path / "a.csv", Schema([Numeric(name="x")], "y")))
    np.testing.assert_array_equal(batch.numeric[:, 0], values.astype(np.float32))


@pytest.mark.parametrize(
    ("condition", "want"),
    [
        ("rating >= 4", [0, 1, 1]), ("rating == 5", [0, 1, 0]), ("rating != 5", [1, 0, 1]),
        ("rating<4", [1, 0, 0]), ("rating > 4.5", [0, 1, 0]),
        ("rating <= 3", [1, 0, 0]), ("rating in [3, 4]", [1, 0, 1]),
        ("word == 'b'", [0, 1, 0]), ("word in ('a', 'c')", [1, 0, 1]), ("word >= \"b\"", [0, 1, 1]),
        ("flag == true", [1, 0, 1]), ("a b:c > 1", [0, 1, 1]), ("big == 9007199254740993", [1, 0, 0]),
    ],
)  # fmt: skip
def test_derived_labels(tmp_path, condition, want):
    columns = {
        "rating": [3, 5, 4],
        "word": ["a", "b", "c"],
        "flag": [True, False, True],
        "a b:c": [1.0, 2.0, 3.0],
        "big": [2**53 + 1, 2**53, 0],
        "user": [1, 2, 3],
    }
    path = parquet(tmp_path / "a.parquet", columns)
    schema = Schema([Categorical(name="user")], Labels(names=("y",), derive={"y": condition}))
    assert whole(read_parquet(path, schema)).labels[:, 0].tolist() == want
    if "flag" not in condition and "big" not in condition:
        (tmp_path / "a.csv").write_text("rating,word,a b:c,user\n3,a,1,1\n5,b,2,2\n4,c,3,3\n")
        assert whole(read_csv(tmp_path / "a.csv", schema)).labels[:, 0].tolist() == want


@pytest.mark.parametrize(
    "text",
    ["", "rating", "rating >= ", "rating => 4", "rating >= x", "rating in 4", "rating in []",
     "rating in [1, 'a']",     "rating >= [1]", "rating == None", "rating >= nan", "rating ~ 4"],
)  # fmt: skip
def test_conditions_that_are_none(tmp_path, text):
    path = parquet(tmp_path / "a.parquet", {"rating": [1], "user": [1]})
    schema = Schema([Categorical(name="user")], Labels(names=("y",), derive={"y": text}))
    with pytest.raises(ConfigError, match="derive 'y'"):
        read_parquet(path, schema)


def test_criteo(tmp_path):
    ints, words = [str(i) for i in range(-1, 12)], [f"{i:08x}" for i in range(26)]
    lines = ["\t".join(["1", *ints, *words]), "\t".join(["0", *[""] * 13, *[""] * 26])]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    schema = Schema(
        [Categorical(name="C1"), Categorical(name="C26"), Numeric(name="I1"), Numeric(name="I13")], "label"
    )
    batch = whole(read_criteo(tmp_path / "a.tsv", schema))
    assert batch.ids.tolist() == [xxh64(b"00000000"), NULL_ID, xxh64(b"00000019"), NULL_ID]
    assert batch.numeric.tolist() == [[-1, 11], [0, 0]]
    assert batch.labels.tolist() == [[1], [0]]
    (tmp_path / "b.tsv").write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    unlabelled = whole(read_criteo(tmp_path / "b.tsv", schema, with_labels=False))
    assert unlabelled.ids.tolist() == batch.ids.tolist()
    assert unlabelled.labels.shape == (2, 0)
    with pytest.raises(DataError, match=r"b.tsv, line 1: 39 cells: expected 40"):
        whole(read_criteo(tmp_path / "b.tsv", schema))


def test_libsvm_agrees_with_parquet(tmp_path):
    (tmp_path / "a.txt").write_text("1 5:1 7:0.5 9:2.5 # why\n\n0 -6:1 8:2 9:-3\r\n# nothing\n")
    labels = Labels(names=("click",))
    schema = Schema(
        [Categorical(name="a"), Categorical(name="b"), Numeric(name="x", transform="log1p")], labels
    )
    columns = {"a": [5, -6], "b": [[7], [8]], "bw": [[0.5], [2.0]], "x": [2.5, -3.0], "click": [1, 0]}
    weighted = Schema([schema.features[0], Categorical(name="b", weights="bw"), schema.features[2]], labels)
    want = whole(read_parquet(parquet(tmp_path / "a.parquet", columns), weighted))
    same(want, whole(read_libsvm(tmp_path / "a.txt", schema)))
    (tmp_path / "b.txt").write_text("5:1 7:0.5 9:2.5\n-6:1 8:2 9:-3\n")
    unlabelled = whole(read_libsvm(tmp_path / "b.txt", schema, with_labels=False))
    assert unlabelled.ids.tolist() == want.ids.tolist()
    (tmp_path / "c.txt").write_text("1 5:1 7:1 9:1\n")
    assert whole(read_libsvm(tmp_path / "c.txt", schema)).weights is None


def test_libsvm_refuses_what_it_has_no_columns_for(tmp_path):
    (tmp_path / "a.txt").write_text("1 5:1\n")
    for schema in (
        Schema([Categorical(name="a", separator="|")], "y"),
        Schema([Categorical(name="a", column="b")], "y"),
        Schema([Categorical(name="a")], ["y", "z"]),
        Schema([Categorical(name="a")], Labels(names=("y",), weight="w")),
    ):
        with pytest.raises(ConfigError, match="libsvm"):
            read_libsvm(tmp_path / "a.txt", schema)


def test_kept_columns_follow_their_rows(tmp_path):
    columns = {"c": [1, 2, 3, 4], "name": ["a", None, "ü", "d"], "x": [1.0, float("nan"), 3.0, 4.0]}
    schema = Schema([Categorical(name="c"), Numeric(name="x")], "y")
    options = {"with_labels": False, "keep": ["name", "c"], "on_bad_row": "skip", "batch_size": 2}
    batches = list(read_parquet(parquet(tmp_path / "a.parquet", columns), schema, **options))
    assert [batch.kept.to_pydict() for batch in batches] == [
        {"name": ["a", "ü"], "c": [1, 3]},
        {"name": ["d"], "c": [4]},
    ]
    (tmp_path / "a.csv").write_text("c,name,x\n1,a,1\n2,,nan\n3,ü,3\n4,,4\n")
    batches = list(read_csv(tmp_path / "a.csv", schema, **options))
    assert [batch.kept.to_pydict() for batch in batches] == [
        {"name": ["a", "ü"], "c": ["1", "3"]},
        {"name": [None], "c": ["4"]},
    ]
    variant = read_csv(tmp_path / "a.csv", schema, with_labels=False, on_bad_row="skip").without_labels(
        keep=["x"]
    )
    assert whole(variant).kept.to_pydict() == {"x": ["1", "3", "4"]}


def test_only_needed_columns_are_read(tmp_path, monkeypatch):
    read = []
    original = pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **options):
        read.append(columns)
        return original(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    path = parquet(tmp_path / "a.parquet", {"c": [1], "other": ["x"], "y": [1], "x": [1.0]})
    dataset = read_parquet(path, Schema([Categorical(name="c"), Numeric(name="x")], "y"))
    whole(dataset)
    whole(dataset.select(["x"]))
    assert read == [["c", "x", "y"], ["x"]]


def test_other_file_systems(tmp_path):
    memory = fsspec.filesystem("memory")
    columns = pa.table({"c": [1, 2], "y": [0, 1]})
    schema = Schema([Categorical(name="c")], "y")
    for name in ("b", "a"):
        with memory.open(f"/girih-formats/{name}.parquet", "wb") as file:
            pq.write_table(columns, file)
    with memory.open("/girih-formats/a.csv.gz", "wb") as file:
        file.write(gzip.compress(b"c,y\n1,0\n2,1\n"))
    try:
        assert read_parquet("memory://girih-formats/*.parquet", schema).num_examples == 4
        assert read_parquet("memory://girih-formats", schema).num_examples == 4
        assert whole(read_csv("memory://girih-formats/a.csv.gz", schema)).ids.tolist() == [1, 2]
    finally:
        memory.rm("/girih-formats", recursive=True)
    parquet(tmp_path / "a.parquet", columns)
    assert read_parquet(f"file://{tmp_path}/a.parquet", schema).num_examples == 2


def test_dictionary_reading_changes_nothing(tmp_path):
    words = [f"w{i % 7}" for i in range(5000)]
    columns = {"c": words, "y": [0] * 5000}
    schema = Schema([Categorical(name="c")], "y")
    one = next(iter(read_parquet(parquet(tmp_path / "a.parquet", columns), schema)))
    two = next(iter(read_parquet(parquet(tmp_path / "b.parquet", columns, use_dictionary=False), schema)))
    same(one, two)
    assert one.ids[:8].tolist() == [xxh64(word.encode()) for word in words[:8]]


def test_dictionaries_that_overflow_and_those_of_pandas(tmp_path):
    words = [f"w{i % 5}" for i in range(9000)] + [f"unique-{i}" for i in range(1000)]
    columns = {
        "c": words,
        "k": pa.array(words).dictionary_encode(),
        "l": [[word] for word in words],
        "y": [0] * 10_000,
    }
    options = {"dictionary_pagesize_limit": 500, "row_group_size": 4000, "data_page_size": 500}
    schema = Schema([Categorical(name="c"), Categorical(name="k"), Categorical(name="l")], "y")
    dataset = read_parquet(
        parquet(tmp_path / "a.parquet", columns, **options), schema, keep=["k"], batch_size=6000
    )
    want = [xxh64(word.encode()) for word in words]
    begin = 0
    for batch in dataset:
        end = begin + batch.num_examples
        assert batch.ids.tolist() == want[begin:end] * 3
        assert batch.kept["k"].to_pylist() == words[begin:end]
        begin = end
    assert begin == 10_000


def test_positions_survive_json(tmp_path):
    from girih.data import Position

    path = parquet(tmp_path / "a.parquet", {"c": [1, 2, 3], "y": [0, 1, 0]})
    dataset = read_parquet(path, Schema([Categorical(name="c")], "y"), batch_size=2)
    (_, position), *_ = dataset.batches(3)
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position
    with pytest.raises(ConfigError, match="unknown key"):
        Position.from_dict({"epoc": 1})
    for damaged in ([1], None, {"offsets": [1]}, {"offsets": {"one": 1}}, {"offsets": {"0": -1}}):
        with pytest.raises(ConfigError, match="position"):
            Position.from_dict(damaged)
