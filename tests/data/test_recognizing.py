"""Files of another format than the one they are given as: what they look like, and what to set."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

import girih
from girih.data.formats.recognizing import recognized
from girih.errors import DataError

TABLE = pa.table({"user": [1, 2, 3], "price": [0.5, 1.5, 2.5], "click": [0, 1, 0]})
SCHEMA = girih.Schema([girih.Categorical(name="user"), girih.Numeric(name="price")], "click")
ALIKE = "for train, valid and test; predict and evaluate have --format"


def as_csv(separator=","):
    text = pa.BufferOutputStream()
    pacsv.write_csv(TABLE, text, pacsv.WriteOptions(delimiter=separator, quoting_style="none"))
    return text.getvalue().to_pybytes()


def as_jsonl():
    return "".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()).encode()


def as_arrow(make):
    bytes_ = pa.BufferOutputStream()
    with make(bytes_, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return bytes_.getvalue().to_pybytes()


def as_parquet():
    bytes_ = pa.BufferOutputStream()
    pq.write_table(TABLE, bytes_)
    return bytes_.getvalue().to_pybytes()


CRITEO = b"\t".join([b"0", *[b"1"] * 13, *[b"68fd1e64"] * 26]) + b"\n"
LOOKS = {
    "CSV": (as_csv(), f'CSV; set data.format = "csv" (girih.read_csv) {ALIKE}'),
    "tabs": (as_csv("\t"), f"CSV separated by '\\t'; set data.format = \"csv\" (girih.read_csv) {ALIKE}, and separator = '\\t'"),
    "JSON lines": (as_jsonl(), 'JSON lines; set data.format = "jsonl"'),
    "CSV in gzip": (gzip.compress(as_csv()), 'gzip-compressed CSV; set data.format = "csv"'),
    "JSON lines in bzip2": (bz2.compress(as_jsonl()), 'bzip2-compressed JSON lines; set data.format = "jsonl"'),
    "Parquet in gzip": (gzip.compress(as_parquet()), "gzip-compressed Parquet; decompress it, and set"),
    "libsvm": (b"1 3:1 17:0.5\n0 4:1 18:1\n", 'libsvm; set data.format = "libsvm"'),
    "Criteo": (CRITEO * 2, 'a log of Criteo; set data.format = "criteo"'),
    "Arrow file": (as_arrow(pa.ipc.new_file), "an Arrow IPC (Feather) file; write it as Parquet, or give it to girih.read_arrow"),
    "Arrow stream": (as_arrow(pa.ipc.new_stream), "an Arrow IPC stream; write it as Parquet"),
    "JSON array": (json.dumps(TABLE.to_pylist()).encode(), "a JSON array; write one object a line (JSON lines)"),
    "zip": (b"PK\x03\x04" + bytes(30), "a zip archive; unpack it"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "told"), LOOKS.values(), ids=LOOKS)
def test_given_as_parquet(tmp_path, content, told):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError) as caught:
        girih.read_parquet(tmp_path / "a.parquet", SCHEMA)
    assert str(caught.value).startswith(
        f"{tmp_path / 'a.parquet'}: not a readable Parquet file: it looks like {told}"
    )


@pytest.mark.parametrize("read", [girih.read_csv, girih.read_jsonl, girih.read_libsvm, girih.read_criteo])
def test_parquet_given_as_text(tmp_path, read):
    (tmp_path / "a").write_bytes(as_parquet())
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a", SCHEMA)
    told = (
        f'looks like Parquet, expected UTF-8 text; set data.format = "parquet" (girih.read_parquet) {ALIKE}'
    )
    assert str(caught.value) == f"{tmp_path / 'a'}: {told}"


def test_one_text_given_as_another(tmp_path):
    (tmp_path / "a").write_bytes(as_jsonl())
    (tmp_path / "b").write_bytes(as_csv())
    with pytest.raises(
        DataError, match=r'a: looks like JSON lines, expected a header; set data.format = "jsonl"'
    ):
        girih.read_csv(tmp_path / "a", SCHEMA)
    with pytest.raises(
        DataError, match=r'b, line 1: not a JSON line: .*; it looks like CSV: set data.format = "csv"'
    ):
        girih.read_jsonl(tmp_path / "b", SCHEMA)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\n",
        b"plain words\n",
        b"[data]\ntrain = 'a, b'\n",
        b"a,b\n1,2,3\n0\n1\n",
        bytes(9),
        b"PAR1\n",
        b"ORC said\n",
        b"ARROW1\n",
    ],
)
def test_what_tells_of_no_format(head):
    assert recognized(head) is None


@pytest.mark.parametrize("word", ["PAR1", "ORC", "ORCID", "ARROW1"])
def test_text_that_begins_with_the_letters_of_a_magic_is_text(tmp_path, word):
    assert recognized(f"{word},user\n1,2\n".encode()).name == "CSV"
    (tmp_path / "a.csv").write_text(f"{word},user,price,click\n5,1,0.5,1\n")
    assert sum(len(batch.labels) for batch in girih.read_csv(tmp_path / "a.csv", SCHEMA)) == 1


def test_orc_is_recognized(tmp_path):
    orc.write_table(TABLE, str(tmp_path / "a"))
    assert recognized((tmp_path / "a").read_bytes()).name == "ORC"
