"""JSON lines, compressed text and partitions in paths: the batches that the same rows in Parquet give."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih.data import NULL_ID
from girih.errors import DataError

NUM_ROWS = 120
SCHEMA = girih.Schema(
    [
        girih.Categorical(name="user"),
        girih.Categorical(name="site"),
        girih.Sequence(name="history"),
        girih.Numeric(name="price"),
    ],
    "click",
)
ROWS = [
    {
        "user": i * 7 - 30,
        "site": f"s{i % 5}",
        "history": [i, i + 1][: i % 3],
        "price": i if i < 90 else i / 8,
        "click": i % 2,
    }
    for i in range(NUM_ROWS)
]


def zstd(data):
    half = len(data) // 2  # two frames, as cat makes of two files
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


COMPRESSED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows)


def prints(data, epoch=0, position=None):
    return [
        (batch.ids.tobytes(), batch.offsets.tobytes(), batch.numeric.tobytes(), batch.labels.tobytes(), after)
        for batch, after in data.batches(epoch, position)
    ]


@pytest.fixture(scope="module")
def want():
    return [each[:-1] for each in prints(girih.read_arrow(pa.Table.from_pylist(ROWS), SCHEMA, batch_size=16))]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_lines_give_the_batches_of_a_table(tmp_path, want, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSED[suffix](lines().encode()))
    data = girih.read_jsonl(path, SCHEMA, batch_size=16, block_bytes=700)
    steps = prints(data)
    assert [each[:-1] for each in steps] == want
    for number in (0, 3, 6):  # from the middle of what is compressed
        assert prints(data, 0, steps[number][-1]) == steps[number + 1 :]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_csv_is_compressed_in_the_same_ways(tmp_path, suffix):
    schema = girih.Schema([girih.Categorical(name="user"), girih.Numeric(name="price")], "click")
    text = "user,price,click\n" + "".join(f"{r['user']},{r['price']},{r['click']}\n" for r in ROWS)
    (tmp_path / f"a.csv{suffix}").write_bytes(COMPRESSED[suffix](text.encode()))
    data = girih.read_csv(
        tmp_path / f"a.csv{suffix}",
        schema,
        batch_size=NUM_ROWS,
        block_bytes=100,
        shuffle=True,
        shuffle_rows=30,
    )
    (batch,) = data
    assert sorted(batch.ids.tolist()) == [row["user"] for row in ROWS]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_damage_is_named(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESSED[suffix](lines(ROWS * 50).encode())
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(
        DataError, match=f"a.jsonl{suffix}: the (gzip|bzip2|xz|zstd) data is damaged or cut short"
    ) as caught:
        list(girih.read_jsonl(path, SCHEMA))
    assert "\n" not in str(caught.value)
    path.write_text(lines())
    with pytest.raises(
        DataError, match=f"a.jsonl{suffix}: not (gzip|bzip2|xz|zstd)-compressed, despite its name"
    ):
        girih.read_jsonl(path, SCHEMA)


def test_what_the_first_lines_do_not_show_is_read_as_well(tmp_path):
    """Strings beside integers, ids of 64 bits without sign, keys that are missing, blank lines."""
    rows = [
        *ROWS,
        {"user": "x", "click": 1},
        {"user": 1 << 63, "site": 7, "history": ["a", 3], "price": None, "click": True},
    ]
    text = lines(rows[:60]) + "\n \n" + lines(rows[60:])
    (tmp_path / "a.jsonl").write_text(text)
    for block_bytes in (100, 5000, 1 << 20):
        (batch,) = girih.read_jsonl(tmp_path / "a.jsonl", SCHEMA, batch_size=1000, block_bytes=block_bytes)
        size = len(rows)
        assert batch.num_examples == size
        assert batch.ids[: size - 2].tolist() == [row["user"] for row in ROWS]
        words = girih.read_arrow(
            pa.table({"user": ["x", "9223372036854775808"], "click": [0, 1]}),
            girih.Schema([girih.Categorical(name="user")], "click"),
        )
        assert batch.ids[size - 2] == next(iter(words)).ids[0]
        assert batch.ids[size - 1] == -(1 << 63)
        assert batch.ids[size : 2 * size][-2:].tolist() == [NULL_ID, 7]
        assert batch.numeric[-2:, 0].tolist() == [0, 0]
        assert batch.labels[-2:, 0].tolist() == [1, 1]
        assert np.diff(batch.offsets[2 * size :])[-2:].tolist() == [0, 2]


def test_bad_lines_are_named_and_may_be_skipped(tmp_path):
    bad = [
        "{broken",
        "[1, 2]",
        '{"user": 1.5, "click": 1}',
        '{"user": 3, "click": 2}',
        '{"user": {"a": 1}, "click": 0}',
    ]
    path = tmp_path / "a.jsonl"
    schema = girih.Schema([girih.Categorical(name="user")], "click")
    path.write_text("\n".join([lines(ROWS[:3]), *bad, lines(ROWS[3:4])]))
    data = girih.read_jsonl(path, schema, on_bad_row="skip")
    assert [batch.ids.tolist() for batch in data] == [[-30, -23, -16, -9]]
    assert data.num_skipped == 5
    for number, message in enumerate(("not a JSON line: ", "expected a JSON object, not \\[1, 2\\]", "ids are integers or strings",
                                      "column 'click' = 2.0: expected a label", "ids are integers or strings")):  # fmt: skip
        path.write_text("\n".join([lines(ROWS[:3]), bad[number]]))
        with pytest.raises(DataError, match=f"a.jsonl, line 5: .*{message}"):
            list(girih.read_jsonl(path, schema))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("user,click\n1,2\n", "line 1: not a JSON line"),
        ("[1]\n", "line 1: expected a JSON object, not .1."),
        ("{}\n", "have no object with columns"),
        ('{"usr": 1, "click": 0}\n', "no column 'user' .feature 'user'.; did you mean 'usr'"),
        ('{"user": 1.5, "click": 0}\n', "ids are integers or strings; cast"),
        ('{"user": {"id": 1}, "click": 0}\n', "ids are integers or strings"),
        ('{"user": 1, "click": "yes"}\n', "of label 'click': expected numbers; derive"),
    ],
)
def test_files_that_do_not_serve(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        girih.read_jsonl(tmp_path / "a.jsonl", girih.Schema([girih.Categorical(name="user")], "click"))


PARTED = girih.Schema(
    [girih.Categorical(name="user"), girih.Categorical(name="country"), girih.Numeric(name="year")], "click"
)


@pytest.fixture
def parted(tmp_path):
    """Rows under year=…/country=…, in three formats; the last country is null."""
    for number, (year, country) in enumerate(
        [(2023, "NL"), (2024, "a%20b"), (2024, "__HIVE_DEFAULT_PARTITION__")]
    ):
        folder = tmp_path / f"year={year}" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user": [number, 9], "click": [0, 1]}), folder / "a.parquet")
        (folder / "a.csv").write_text(f"user,click\n{number},0\n9,1\n")
        (folder / "a.jsonl").write_text(f'{{"user": {number}, "click": 0}}\n{{"user": 9, "click": 1}}\n')
    return tmp_path


READERS = {"parquet": girih.read_parquet, "csv": girih.read_csv, "jsonl": girih.read_jsonl}


@pytest.mark.parametrize("kind", READERS)
def test_partitions_in_paths_are_columns(parted, kind):
    def read(**options):
        paths = parted if kind == "parquet" else f"{parted}/**/*.{kind}"
        (batch,) = READERS[kind](paths, PARTED, **options)
        return batch

    batch = read(keep=["year"])
    words = girih.read_arrow(
        pa.table({"country": ["NL", "a b"], "click": [0, 1]}),
        girih.Schema([girih.Categorical(name="country")], "click"),
    )
    nl, ab = next(iter(words)).ids.tolist()
    rows = sorted(
        zip(batch.ids[:6].tolist(), batch.ids[6:].tolist(), batch.numeric[:, 0].tolist(), strict=True)
    )
    assert rows == sorted(
        [(0, nl, 2023), (9, nl, 2023), (1, ab, 2024), (9, ab, 2024), (2, NULL_ID, 2024), (9, NULL_ID, 2024)]
    )
    assert sorted(map(str, batch.kept["year"].to_pylist())) == ["2023"] * 2 + ["2024"] * 4
    assert read(where="year > 2023 and country is not null").num_examples == 2


def test_a_column_of_the_file_goes_before_its_path(tmp_path):
    (tmp_path / "year=1999").mkdir()
    pq.write_table(
        pa.table({"user": [1], "country": ["NL"], "year": [2024], "click": [0]}),
        tmp_path / "year=1999" / "a.parquet",
    )
    (batch,) = girih.read_parquet(tmp_path, PARTED)
    assert batch.numeric[0, 0] == 2024


def test_a_file_outside_the_partitions_is_named(parted):
    pq.write_table(pa.table({"user": [1], "click": [0]}), parted / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: no column 'country' .feature 'country'."):
        girih.read_parquet(parted, PARTED)
