"""Files of rows that commands write: what a format cannot hold is told in a line, and no rows make a file too."""

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from girih.cli.out import write_rows
from girih.errors import ConfigError

EMPTY = pa.schema([("user", pa.string()), ("prediction", pa.float32())])


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary(2), pa.list_(pa.int64())], ids=str
)
def test_bytes_and_lists_have_no_text_to_write_as_csv(tmp_path, kind):
    value = [1, 2] if pa.types.is_list(kind) else b"\xff\xfe"
    table = pa.table({"mark": pa.array([value], kind)})
    with pytest.raises(ConfigError) as caught:
        write_rows(tmp_path / "a.csv", [table], EMPTY)
    assert str(caught.value) == (
        f"--out {tmp_path / 'a.csv'}: column 'mark' ({kind}) has no text to write as CSV; leave it out, or name a.parquet"
    )
    assert not list(tmp_path.iterdir())
    assert write_rows(tmp_path / "a.parquet", [table], EMPTY) == 1


@pytest.mark.parametrize(("name", "told"), [("a.csv", "CSV"), ("a.parquet", "Parquet")])
def test_what_arrow_refuses_to_write_is_told(tmp_path, name, told):
    table = pa.table({"took": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pytest.raises(ConfigError) as caught:
        write_rows(tmp_path / name, [table], EMPTY)
    line = str(caught.value)
    assert line.startswith(f"--out {tmp_path / name}: a column cannot be written as {told} (")
    assert line.endswith("; leave it out, or name another format")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_no_rows_make_a_file_too(tmp_path, name):
    assert write_rows(tmp_path / name, [], EMPTY) == 0
    found = pq.read_table(tmp_path / name) if name.endswith("parquet") else pacsv.read_csv(tmp_path / name)
    assert found.column_names == ["user", "prediction"]
    assert found.num_rows == 0
