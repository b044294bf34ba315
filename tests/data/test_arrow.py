"""Data in memory and behind the Arrow C stream interface: the batches that the same rows in Parquet give."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import girih
from girih.data.formats import arrow
from girih.errors import ConfigError, DataError

NUM_ROWS = 500
SCHEMA = girih.Schema(
    [
        girih.Categorical(name="user"),
        girih.Categorical(name="site"),
        girih.Sequence(name="history"),
        girih.Numeric(name="price"),
    ],
    "click",
)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    return pa.table({
        "user": rng.integers(-9, 9, NUM_ROWS),
        "site": pa.array([f"s{i % 7}" if i % 5 else None for i in range(NUM_ROWS)]),
        "history": [[i, i + 1][: i % 3] for i in range(NUM_ROWS)],
        "price": rng.random(NUM_ROWS),
        "click": rng.integers(0, 2, NUM_ROWS),
        "note": ["never read"] * NUM_ROWS,
    })  # fmt: skip


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(arrow, "PART_ROWS", 50)


def prints(data, epoch=0, position=None):
    return [
        (batch.ids.tobytes(), batch.offsets.tobytes(), batch.numeric.tobytes(), batch.labels.tobytes(), after)
        for batch, after in data.batches(epoch, position)
    ]


def without_places(found):
    return [each[:-1] for each in found]


class Stream:
    """A container of another library: all that is known of it is the interface."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


FORMS = {
    "table": lambda table: table,
    "chunks": lambda table: pa.concat_tables([table.slice(0, 33), table.slice(33, 1), table.slice(34)]),
    "list of batches": lambda table: table.to_batches(max_chunksize=77),
    "reader": lambda table: table.to_reader(max_chunksize=77),
    "C stream": Stream,
    "dataset in memory": pads.dataset,
    "one dictionary": lambda table: table.set_column(1, "site", table["site"].dictionary_encode()),
    "a dictionary each": lambda table: pa.concat_tables(
        part.set_column(1, "site", part["site"].dictionary_encode())
        for part in (table.slice(0, 70), table.slice(70))
    ),
    "large types": lambda table: table.cast(
        pa.schema([("user", pa.int16()), ("site", pa.string_view()), ("history", pa.large_list(pa.int64())),
                   ("price", pa.float64()), ("click", pa.bool_()), ("note", pa.large_string())])
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_batches_of_parquet(table, form, tmp_path, small_parts):
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    options = {"batch_size": 64, "shuffle": True, "shuffle_rows": 120, "seed": 5}
    want = girih.read_parquet(tmp_path / "a.parquet", SCHEMA, **options)
    data = girih.read_arrow(FORMS[form](table), SCHEMA, **options)
    assert data.num_examples == NUM_ROWS
    for epoch in (0, 1):  # a stream that can be read once serves every epoch
        assert without_places(prints(data, epoch)) == without_places(prints(want, epoch))


def of_views(table):
    """The table with its strings as views."""
    views = {
        "site": pa.string_view(),
        "words": pa.list_(pa.string_view()),
        "pair": pa.list_(pa.string_view(), 2),
    }
    return table.cast(pa.schema(field.with_type(views.get(field.name, field.type)) for field in table.schema))


def as_enum(table):
    import polars

    sites = sorted(set(table["site"].drop_null().to_pylist()))
    return polars.from_arrow(table).with_columns(polars.col("site").cast(polars.Enum(sites)))


def as_categories(table):
    import polars

    frame = polars.from_arrow(table).with_columns(polars.col("site").cast(polars.Categorical))
    return polars.concat([frame[:90], frame[90:]], rechunk=False)


@pytest.mark.parametrize("form", [of_views, as_enum, as_categories], ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    "more",
    [{}, {"where": "click == 1"}, {"where": "site != 'a'"}, {"keep": ["site", "words", "pair"]}],
    ids=str,
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_views_are_strings(table, form, more, shuffle, small_parts):
    words = [["a", str(row)] for row in range(NUM_ROWS)]
    plain = table.append_column("words", pa.array(words)).append_column(
        "pair", pa.array(words, pa.list_(pa.string(), 2))
    )
    options = {"batch_size": 64, "shuffle": shuffle, "shuffle_rows": 120, **more}
    want, found = (
        [batch for batch, _ in girih.read_arrow(each, SCHEMA, **options).batches()]
        for each in (plain, form(plain))
    )
    assert sum(batch.num_examples for batch in found) == sum(batch.num_examples for batch in want) > 0
    for one, other in zip(want, found, strict=True):
        assert (one.ids == other.ids).all()
        if one.kept is not None:
            assert one.kept.to_pylist() == other.kept.to_pylist()


def test_views_of_parquet_files_are_strings(table, tmp_path):
    words = table.append_column("words", pa.array([["a", str(row)] for row in range(NUM_ROWS)]))
    pq.write_table(words, tmp_path / "plain.parquet")
    pq.write_table(of_views(words), tmp_path / "views.parquet")
    for more in ({"where": "click == 1"}, {"keep": ["site", "words"], "shuffle": True}):
        want, found = (
            [batch for batch, _ in girih.read_parquet(tmp_path / f"{name}.parquet", SCHEMA, **more).batches()]
            for name in ("plain", "views")
        )
        for one, other in zip(want, found, strict=True):
            assert (one.ids == other.ids).all()
            if one.kept is not None:
                assert one.kept.to_pylist() == other.kept.to_pylist()


def test_data_frames_and_queries_of_other_libraries(table):
    want = without_places(prints(girih.read_arrow(table, SCHEMA)))
    import polars

    frame = polars.from_arrow(table)
    for each in (frame, frame.with_columns(polars.col("site").cast(polars.Categorical))):
        assert without_places(prints(girih.read_arrow(each, SCHEMA))) == want
    with pytest.raises(ConfigError, match=r"data: polars LazyFrame: expected columns .*; collect"):
        girih.read_arrow(frame.lazy(), SCHEMA)
    assert without_places(prints(girih.read_arrow(table.to_pandas(), SCHEMA))) == want


def test_queries_of_duckdb(table):
    duckdb = pytest.importorskip(
        "duckdb", reason="DuckDB is not installed: it leaves notes on standard error as it ends"
    )
    want = without_places(prints(girih.read_arrow(table, SCHEMA)))
    with duckdb.connect() as connection:
        connection.register("clicks", table)
        assert without_places(prints(girih.read_arrow(connection.sql("from clicks"), SCHEMA))) == want


def test_datasets_of_hugging_face(table):
    datasets = pytest.importorskip(
        "datasets", reason="datasets of Hugging Face are not installed: they need forty packages"
    )
    want = without_places(prints(girih.read_arrow(table, SCHEMA)))
    data = datasets.Dataset(table)
    assert without_places(prints(girih.read_arrow(data, SCHEMA))) == want
    turned = list(range(NUM_ROWS))[::-1]
    assert without_places(prints(girih.read_arrow(data.select(turned).select(turned), SCHEMA))) == want
    for other in (datasets.DatasetDict({"train": data}), data.to_iterable_dataset()):
        with pytest.raises(ConfigError, match=r"expected columns .*; (take one|a streamed dataset)"):
            girih.read_arrow(other, SCHEMA)


def test_nothing_is_copied_on_the_way(table):
    before = pa.total_allocated_bytes()
    data = girih.read_arrow(Stream(table), SCHEMA)
    (unit,) = data.source.read(
        data.plan, np.arange(1), next(iter(data.batches(0)))[1].cursor._replace(part=0)
    )
    assert pa.total_allocated_bytes() - before < table.nbytes / 10
    assert unit.table["user"].chunk(0).buffers()[1].address == table["user"].chunk(0).buffers()[1].address


def test_resuming_at_every_batch(table, small_parts):
    options = {"batch_size": 32, "shuffle": True, "shuffle_rows": 120, "seed": 5}
    steps = prints(girih.read_arrow(table, SCHEMA, **options), epoch=2)
    for number in (0, 4, len(steps) - 2):
        assert prints(girih.read_arrow(table, SCHEMA, **options), 2, steps[number][-1]) == steps[number + 1 :]


def test_a_position_is_refused_for_rows_in_another_order(table, small_parts):
    position = prints(girih.read_arrow(table, SCHEMA, batch_size=32))[3][-1]
    turned = table.take(pa.array(np.arange(NUM_ROWS)[::-1]))
    for other in (turned, table.slice(0, 400)):
        with pytest.raises(ConfigError, match=r"position: from other files"):
            girih.read_arrow(other, SCHEMA, batch_size=32).batches(0, position)


def test_a_bad_row_is_named_by_its_number(table, small_parts):
    click = table["click"].to_numpy().copy()
    click[123] = 2
    bad = table.set_column(4, "click", pa.array(click))
    with pytest.raises(
        DataError, match=r"^the Arrow table, row 124: column 'click' = 2: expected a label in"
    ):
        list(girih.read_arrow(bad, SCHEMA))
    data = girih.read_arrow(bad, SCHEMA, on_bad_row="skip", batch_size=NUM_ROWS)
    assert [batch.num_examples for batch in data] == [NUM_ROWS - 1]
    assert data.num_skipped == 1


def test_labels_may_be_missing_and_columns_kept(table):
    (batch,) = girih.read_arrow(table.drop(["click"]), SCHEMA, with_labels=False, keep=["note"])
    assert batch.kept.column_names == ["note"]
    assert batch.labels.shape == (NUM_ROWS, 0)


@pytest.fixture
def folders(table, tmp_path):
    year = pa.array([2020 + i // 250 for i in range(NUM_ROWS)])
    pads.write_dataset(
        table.append_column("year", year), tmp_path / "d", format="parquet", max_rows_per_group=50,
        partitioning=pads.partitioning(pa.schema([("year", pa.int64())]), flavor="hive"),
    )  # fmt: skip
    return pads.dataset(tmp_path / "d", partitioning="hive")


def test_a_dataset_of_files_is_read_by_row_groups(table, folders, small_parts):
    options = {"batch_size": 64, "shuffle": True, "shuffle_rows": 120, "seed": 5}
    data = girih.read_arrow(folders, SCHEMA, **options)
    assert (data.source.num_parts, data.num_examples) == (10, NUM_ROWS)
    steps = prints(data)
    assert without_places(steps) == without_places(prints(girih.read_arrow(table, SCHEMA, **options)))
    assert prints(data, 0, steps[3][-1]) == steps[4:]
    again = pickle.loads(pickle.dumps(data))
    assert prints(again) == steps
    years = girih.Schema([girih.Categorical(name="year")], "click")
    (batch,) = girih.read_arrow(folders, years)
    assert batch.ids.tolist() == [2020] * 250 + [2021] * 250


def test_a_dataset_of_other_files_is_read_whole(table, tmp_path):
    for part in range(2):
        rows = table.slice(250 * part, 250)
        with pa.ipc.new_file(tmp_path / f"{part}.arrow", rows.schema) as file:
            file.write_table(rows)
    data = girih.read_arrow(pads.dataset(tmp_path, format="ipc"), SCHEMA)
    assert (data.source.num_parts, data.num_examples) == (2, None)
    assert without_places(prints(data)) == without_places(prints(girih.read_arrow(table, SCHEMA)))


def test_a_filtered_dataset_is_refused(folders):
    with pytest.raises(ConfigError, match=r"read_arrow: .*give the whole dataset"):
        girih.read_arrow(folders.filter(pads.field("user") > 0), SCHEMA)


class Later:
    """A query that waits to be asked."""

    def collect(self):
        raise AssertionError("nobody asked")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("clicks.parquet", r"data: str: expected columns .*; for files, use read_parquet"),
        (
            {"user": [1, 2]},
            r"data: dict: expected columns .*; pyarrow.table\(data\) makes a table from a dict of columns",
        ),
        (
            [{"user": 1}],
            r"data: list: expected columns .*; pyarrow.Table.from_pylist\(data\) makes a table from",
        ),
        ({"train": 1}, r"data: dict: expected columns .*; take one of its parts, as data\['train'\]"),
        (
            (batch for batch in ()),
            "data: generator: expected columns .*several times, and an iterator allows one pass",
        ),
        (Later(), r"data: test_arrow Later: expected columns .*; collect\(\) it"),
        (Stream(pa.chunked_array([[1, 2]])), "data: test_arrow Stream is not a table of columns: "),
        ([], "data: list: expected columns"),
        (
            [pa.table({"a": [1]}), pa.table({"b": [1]})],
            "data: list is not a table of columns: Schema at index 1 was different",
        ),
    ],
)
def test_what_holds_no_columns(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        girih.read_arrow(data, SCHEMA)
    assert "\n" not in str(caught.value)


def test_tables_that_do_not_serve(table):
    for other, message in (
        (table.slice(0, 0), "the Arrow table: no rows"),
        (table.drop(["user"]), "the Arrow table: no column 'user' .feature 'user'."),
        (table.set_column(0, "user", table["user"].cast(pa.float64())), "ids are integers or strings; cast"),
    ):
        with pytest.raises(DataError, match=message):
            girih.read_arrow(other, SCHEMA)


def test_a_table_goes_to_a_loader_only_if_it_is_small(table, monkeypatch):
    data = girih.read_arrow(table, SCHEMA)
    assert prints(pickle.loads(pickle.dumps(data))) == prints(data)
    monkeypatch.setattr(arrow, "LOADED_BYTES", 1000)
    with pytest.raises(
        ConfigError,
        match=r"cannot go to a loader, which is another process and takes at most .*use a strategy without",
    ):
        pickle.dumps(data)
