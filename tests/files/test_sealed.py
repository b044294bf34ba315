"""Files of JSON: sealed, and refused in one line for whatever is wrong with them."""

import json
import os
import zlib

import pytest

from girih.errors import CheckpointError, ConfigError, DataError, MissingFileError
from girih.files.sealed import check_inside, open_file, parse, refusing, seal, seal_text, unseal

TREE = {"format": 3, "x": [1, 2.5, None, "ü"], "y": {"z": True}}


def opened(data):
    return unseal(data, "place/file.json", 3, "write it again")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_tree_comes_back(indent):
    assert opened(seal(TREE, indent)) == TREE
    assert next(iter(json.loads(seal(TREE, indent)))) == "crc32"


def test_files_of_earlier_versions_are_read():
    """Their checksum is that of the tree as Python writes it again."""
    checksum = zlib.crc32(json.dumps(TREE).encode())
    assert opened(json.dumps({"crc32": checksum, **TREE}).encode()) == TREE


WRONG = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b'{"crc32": 1, ',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "many levels": seal_text('{"format": 3, "x": ' + "[" * 200 + "]" * 200 + "}"),
    "a key twice": seal_text('{"format": 3, "x": 1, "x": 1}'),
    "a key twice below": seal_text('{"format": 3, "x": [{"y": 1, "y": 2}]}'),
    "NaN": seal_text('{"format": 3, "x": NaN}'),
    "infinity": seal_text('{"format": 3, "x": -Infinity}'),
    "beyond floats": seal_text('{"format": 3, "x": 1e999}'),
    "a long number": seal_text('{"format": 3, "x": ' + "9" * 5000 + "}"),
    "half a character": seal_text('{"format": 3, "x": "\\ud800"}'),
    "a list": b"[1, 2]",
    "a number": b"3",
    "no checksum": json.dumps(TREE).encode(),
    "a checksum elsewhere": json.dumps(TREE | {"crc32": zlib.crc32(json.dumps(TREE).encode())}).encode(),
    "another checksum": json.dumps({"crc32": 5, **TREE}).encode(),
    "a checksum that is none": json.dumps({"crc32": [], **TREE}).encode(),
    "no format": seal({"x": 1}),
    "a format that is none": seal({"format": True}),
    "another space": seal(TREE).replace(b"2.5,", b"2.5, "),
    "the last byte cut": seal(TREE, 1)[:-1],
    "another byte": seal(TREE) + b"\n",
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_whatever_is_wrong_is_one_line(data):
    with pytest.raises(CheckpointError) as told:
        opened(data)
    assert str(told.value).startswith("place/file.json: ")
    assert str(told.value).endswith("write it again")
    assert len(str(told.value).splitlines()) == 1
    assert len(str(told.value)) < 500


def test_another_format_is_named():
    with pytest.raises(CheckpointError, match=r"format 4, which girih 9\.0 wrote; this girih reads format 3"):
        opened(seal({"format": 4, "girih": "9.0"}))


def test_nothing_that_is_not_finite_is_sealed():
    with pytest.raises(CheckpointError, match="cannot be saved"):
        seal({"format": 3, "x": [float("nan")]})


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        RecursionError(),
        MemoryError(),
        OSError(5, "no"),
        ConfigError("no"),
        ZeroDivisionError(),
    ],
)
def test_each_exception_becomes_one_error(error):
    with (
        pytest.raises(CheckpointError, match=r"^place: damaged: .*; do it again$"),
        refusing("place", "do it again"),
    ):
        raise error


def test_errors_that_say_what_is_wrong_stay():
    with pytest.raises(DataError, match=r"^no$"), refusing("place", ""):
        raise DataError("no")
    with pytest.raises(KeyboardInterrupt), refusing("place", ""):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../x", "/x", "//x", "~/x", "~", "a\\x", "a//x", "x/", "a\0", "a\nb", "./x"],
)
def test_names_that_lead_outside_are_refused(name):
    with pytest.raises(ValueError, match="leads out of its directory"):
        check_inside(name)
    check_inside("tables/user item/shard-0000.safetensors")


def test_only_regular_files_are_opened(tmp_path):
    """A pipe is not waited for, and a device is not read."""
    (inside := tmp_path / "inside").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (inside / "file").write_bytes(b"y")
    os.mkfifo(inside / "pipe")
    for name, target in (
        ("device", "/dev/zero"),
        ("outside", tmp_path / "file"),
        ("link", inside / "file"),
        ("loop", inside / "loop"),
    ):
        (inside / name).symlink_to(target)
    for name, told in (
        ("pipe", "not a regular file"),
        ("", "not a regular file"),
        ("device", "leads out"),
        ("outside", "leads out"),
        ("loop", "leads out|cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=told):
            open_file(inside / name, inside)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_file(inside / "device")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_file(inside / ("x" * 300), kind=ConfigError)
    for name in ("gone", "file/below"):
        with pytest.raises(MissingFileError, match="no such file; make one"):
            open_file(inside / name, inside, "make one")
    (tmp_path / "other").symlink_to(inside)
    for directory in (inside, tmp_path / "other"):  # the directory itself may be a link
        for name in ("file", "link"):
            with open_file(directory / name, directory) as file:
                assert file.read() == b"y"


def test_numbers_and_text_stay_what_they_are():
    tree = [0, -1, 2**70, 0.1, 1e308, "\U0001f600", {"a": []}]
    assert parse(json.dumps(tree)) == tree
