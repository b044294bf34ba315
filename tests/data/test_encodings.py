"""Text files in other encodings than UTF-8: the same ids, lines and positions."""

import gzip

import pytest

import girih
from girih import Categorical, Numeric, Schema
from girih.config import build
from girih.data import DataOptions, Position
from girih.errors import ConfigError, DataError

SCHEMA = Schema([Categorical(name="stadt"), Numeric(name="preis")], "klick")
WORDS = {
    "latin-1": "Köln", "cp1252": "€uro|ß", "gbk": "北京市", "gb18030": "上海𠀀", "big5": "臺北", "shift_jis": "表ソ能", "euc_kr": "서울",
    "koi8_r": "Москва", "iso2022_jp": "東京", "utf-7": "Zürich", "utf-16": "Wien é𝄞", "utf-16-le": "Oslo ø", "utf-16-be": "Oslo ø",
    "utf-32": "Rīga", "cp037": "ibm ü", "hz": "你好", "utf-8-sig": "Łódź", "U8": "Łódź",
}  # fmt: skip


def text(word, rows=200):
    lines = [f"{word}{row % 7},{row / 4},{row % 2}" for row in range(rows)]
    return "\r\n".join(["stadt,preis,klick", *lines]) + "\r\n"


def batches(path, **options):
    data = girih.read_csv(path, SCHEMA, batch_size=32, block_bytes=500, **options)
    return data, list(data.batches())


def contents(steps):
    return [(b.ids.tolist(), b.numeric.tolist(), b.labels.tolist()) for b, _ in steps]


@pytest.mark.parametrize("encoding", WORDS)
def test_ids_and_positions_are_those_of_utf8(tmp_path, encoding):
    (tmp_path / "a.csv").write_bytes(text(WORDS[encoding]).encode())
    (tmp_path / "b.csv").write_bytes(text(WORDS[encoding]).encode(encoding))
    _, want = batches(tmp_path / "a.csv", shuffle=True, shuffle_rows=50)
    data, steps = batches(tmp_path / "b.csv", shuffle=True, shuffle_rows=50, encoding=encoding)
    assert contents(steps) == contents(want)
    for place in (0, 2, 5):
        position = Position.from_dict(steps[place][1].to_dict())
        assert contents(data.batches(position=position)) == contents(steps[place + 1 :])


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_compressed_and_json_lines(tmp_path, encoding):
    rows = "".join(f'{{"stadt": "é{row}", "preis": 1, "klick": 0}}\n' for row in range(9))
    (tmp_path / "a.jsonl").write_bytes(rows.encode())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode(encoding)))
    (want,) = girih.read_jsonl(tmp_path / "a.jsonl", SCHEMA)
    (read,) = girih.read_jsonl(tmp_path / "b.jsonl.gz", SCHEMA, encoding=encoding)
    assert read.ids.tolist() == want.ids.tolist()


def test_the_line_of_a_bad_row_is_that_of_the_file(tmp_path):
    lines = text("ü").splitlines()
    lines[150] = "ü,teuer,0"
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode("utf-16"))
    with pytest.raises(DataError, match=r"a.csv, line 151: column 'preis' = 'teuer'"):
        batches(tmp_path / "a.csv", encoding="utf-16")


def test_bytes_that_an_encoding_does_not_have_name_their_line(tmp_path):
    (tmp_path / "a.csv").write_bytes(text("x").encode() + b"\xfc,1,0\n")
    with pytest.raises(DataError, match=r"a.csv, line 202: not text in ascii: .*set another data.encoding"):
        batches(tmp_path / "a.csv", encoding="ascii")


def test_a_position_holds_for_one_encoding(tmp_path):
    (tmp_path / "a.csv").write_bytes(text("x").encode())
    _, steps = batches(tmp_path / "a.csv")
    data, _ = batches(tmp_path / "a.csv", encoding="latin-1")
    with pytest.raises(ConfigError, match="position"):
        list(data.batches(position=steps[0][1]))


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("latin-17", "no such codec"),
        ("cp-1252x", "cp1252"),
        ("rot13", "not a text encoding"),
        (7, "encoding = 7"),
    ],
)
def test_unknown_encodings(tmp_path, encoding, message):
    (tmp_path / "a.csv").write_text(text("x"))
    with pytest.raises(ConfigError, match=message):
        girih.read_csv(tmp_path / "a.csv", SCHEMA, encoding=encoding)


def test_only_text_has_an_encoding():
    with pytest.raises(ConfigError, match="encoding: only formats csv, criteo, jsonl, libsvm"):
        build(DataOptions, {"train": "x.parquet", "encoding": "cp1252"}, "[data]")
    build(DataOptions, {"train": "x.csv", "format": "csv", "encoding": "cp1252"}, "[data]")
