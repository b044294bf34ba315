"""Segments whose checksums are right and whose content is not: a follower stays at the version before, and goes on."""

import json
import logging
import shutil
import time
import zlib

import numpy as np
import pytest
from following import Replayed, assert_is, follower
from safetensors.numpy import load_file, save_file

from girih.errors import CheckpointError
from girih.files.sealed import seal_text, sealed_text
from girih.files.whole import write_whole
from girih.publishing.manifest import NAME
from girih.serving import model_directory
from girih.serving.model_directory import ModelDirectory
from girih.serving.signature import NAME as SIGNATURE
from girih.serving.signature import Signature
from support.resealing import seal


def part_in(place):
    return max(place.glob("tables/*/*.safetensors"), key=lambda path: path.stat().st_size)


def header(change):
    """Changes the header of a part; the bytes after it stay."""

    def craft(place):
        path = part_in(place)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        tree = json.loads(content[8 : 8 + length])
        change(tree)
        text = json.dumps(tree).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return craft


def shaped(shape):
    """Rows of no bytes, and of a shape that is none in 64 bits."""

    def craft(place):
        path = part_in(place)
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        tree = json.loads(content[8:begin])
        first, last = tree["rows"]["data_offsets"]
        path.write_bytes(content[: begin + first] + content[begin + last :])

        def change(tree):
            for name, entry in tree.items():
                if name != "__metadata__" and entry["data_offsets"][0] >= last:
                    entry["data_offsets"] = [at - (last - first) for at in entry["data_offsets"]]
            tree["rows"].update(shape=shape, data_offsets=[first, first])

        header(change)(place)

    return craft


def described(**changes):
    def change(tree):
        tree["__metadata__"]["girih"] = json.dumps(json.loads(tree["__metadata__"]["girih"]) | changes)

    return header(change)


def tensors(name, change):
    """Changes a tensor of a part."""

    def craft(place):
        path = part_in(place)
        found = {key: value.copy() for key, value in load_file(path).items()}
        content = path.read_bytes()
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        change(found[name])
        save_file(found, path, metadata)

    return craft


def dense(change):
    def craft(place):
        found = {key: value.copy() for key, value in load_file(place / "dense.safetensors").items()}
        change(found)
        save_file(found, place / "dense.safetensors")

    return craft


def manifest(**changes):
    def craft(place):
        tree = json.loads(sealed_text((place / NAME).read_bytes()))
        (place / NAME).write_bytes(seal_text(json.dumps(tree | changes)))

    return craft


def nested(place):
    (place / NAME).write_text("[" * 100_000 + "]" * 100_000)


def spoiled(make):
    def craft(place):
        path = part_in(place)
        path.unlink()
        make(path)

    return craft


NOTHING = {"model": None, "train": {"seed": 0, "precision": "float32", "dense_forward": "auto"}}
CRAFTED = {
    "a shape beyond 64 bits": shaped([2**62, 4]),
    "a shape that wraps": shaped([0, 2**63 - 1]),
    "a dim beyond floats": shaped([10**400, 0]),
    "a negative dim": shaped([-1, 5]),
    "another dtype": header(lambda tree: tree["rows"].update(dtype="I32")),
    "two tensors in one place": header(
        lambda tree: tree["ids"].update(data_offsets=tree["rows"]["data_offsets"])
    ),
    "a table twice": described(tables=["user", "user", "item"]),
    "another shard": described(shard=1, num_shards=2),
    "deep metadata": header(lambda tree: tree["__metadata__"].update(girih="[" * 100_000)),
    "rows that are NaN": tensors("rows", lambda rows: rows.fill(np.nan)),
    "equal ids": tensors("ids", lambda ids: ids.fill(7)),
    "NaN in the net": dense(lambda found: next(iter(found.values())).fill(np.nan)),
    "no tensors": dense(dict.clear),
    "a tensor less": dense(dict.popitem),
    "a schema that is empty": manifest(schema={}),
    "a recipe that is empty": manifest(recipe={}),
    "a recipe of code": manifest(recipe=NOTHING | {"model": {"name": "evil.py:M", "options": {}}}),
    "another recipe": manifest(
        recipe=NOTHING | {"model": {"name": "deepfm", "options": {"hidden": [10**9, 10**9]}}}
    ),
    "needs of unknown features": manifest(needs={"nobody": ["embedding"]}),
    "needs of an unknown kind": manifest(needs={"user": ["everything"]}),
    "a fingerprint of another schema": manifest(fingerprint="0" * 16),
    "a normalization of nobody": manifest(
        normalization={"nobody": {"count": 1.0, "mean": 0.0, "squares": 1.0}}
    ),
    "a negative number": manifest(number=-1),
    "100,000 brackets": nested,
    "a directory for a part": spoiled(lambda path: path.mkdir()),
    "a link to elsewhere": spoiled(lambda path: path.symlink_to("/etc/passwd")),
}


@pytest.fixture
def scene(patient, tmp_path):
    """A log into which that of a run comes, a follower at the version before a segment, and the number of that one."""
    run, log = patient
    replayed = Replayed(log, tmp_path / "log")
    segments, snapshots = replayed.old.numbers(whole=False), replayed.old.numbers(whole=True)
    broken = next(n for n in segments if n - 1 in segments and n not in snapshots)
    replayed.reveal(broken - 1)
    found = follower(tmp_path / "log", tmp_path / "followed")
    assert found.poll()
    replayed.bring(broken)
    replayed.say(broken)
    yield replayed, found, broken, lambda version: run / "checkpoints" / f"step-{version.step:08d}"
    found.close()


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_segment_leaves_the_version_before(scene, craft):
    replayed, found, broken, checkpoint = scene
    craft(replayed.path(broken))
    seal(replayed.target)
    for _ in range(3):
        assert not found.poll()
    assert found.current.number == broken - 1
    assert [line for line in found.lines if f"stays at {broken - 1}" in line], found.lines
    assert all(len(line) < 1000 and len(line.splitlines()) == 1 for line in found.lines)
    assert_is(found.current, found.directory, checkpoint(found.current))
    shutil.rmtree(replayed.path(broken))
    replayed.bring(broken)
    replayed.say(broken)
    assert found.poll()
    assert found.current.number == broken


@pytest.mark.parametrize("name", ["head.json", "pin.json"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, seal_text('{"number": 1e999, "format": 1}'), b"\xff", None]
)
def test_a_crafted_head_or_pin_leaves_the_version_before(scene, name, content):
    replayed, found, broken, _ = scene
    (replayed.target / name).unlink(missing_ok=True)
    if content is None:
        (replayed.target / name).mkdir()
    else:
        (replayed.target / name).write_bytes(content)
    assert not found.poll()
    assert found.current.number == broken - 1
    assert f"stays at version {broken - 1}: " in found.lines[-1]


@pytest.mark.parametrize("name", ["../dense.safetensors", "/etc/passwd", "~/x", "a\\b"])
def test_a_version_that_lies_here_names_no_file_elsewhere(scene, name):
    _, found, _, _ = scene
    tree = json.loads(sealed_text((found.directory / SIGNATURE).read_bytes()))
    for change in (
        {"dense": tree["dense"] | {"parameters": tree["dense"]["parameters"] | {"name": name}}},
        {"rows": [[each | {"name": name} for each in files] for files in tree["rows"]]},
    ):
        (found.directory / SIGNATURE).write_bytes(seal_text(json.dumps(tree | change)))
        with pytest.raises(CheckpointError, match="leads out of its directory"):
            Signature.read(found.directory)


def test_a_server_stays_at_its_version_whatever_a_follower_has(scene, caplog):
    """Its thread says so once, lives, and takes the next version."""
    _, found, broken, _ = scene
    watched, put = ModelDirectory(found.directory, verify=False), []
    good = (found.directory / SIGNATURE).read_bytes()
    caplog.set_level(logging.WARNING)
    with model_directory.watching(watched, put.append):
        for name, content in (("junk", b"junk"), ("empty", b"\2\0\0\0\0\0\0\0{}")):
            (found.directory / name).write_bytes(content)
            facts = {"name": name, "bytes": len(content), "crc32": zlib.crc32(content)}
            tree = json.loads(sealed_text(good))
            tree["dense"]["parameters"] = facts
            write_whole(found.directory / SIGNATURE, seal_text(json.dumps(tree)).decode())
            count = len(caplog.records)
            wait_until(lambda count=count: len(caplog.records) > count)
        time.sleep(4 * model_directory.LOOK_EVERY_S)
        assert len(caplog.records) == 2
        assert "stays at version" in caplog.text
        assert put == []
        assert found.poll()
        wait_until(lambda: put and put[-1].version.number == broken)
    assert watched.served.version.number == found.current.number == broken


def wait_until(there):
    until = time.monotonic() + 30
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)
