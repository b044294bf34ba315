"""Checkpoints whose checksums are right and whose content is not: one line that names the file, and nothing is replaced."""

import copy
import json
import os
import random
import shutil
import struct
import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from girih import cli
from girih.app.run_config import RunConfig
from girih.checkpoint import Storage
from girih.errors import CheckpointError, UserError
from support.resealing import seal

NESTED = json.loads("[" * 900 + "]" * 900)
WORTHLESS = [None, -1, 0, 3, 10**30, 0.5, float("nan"), True, "x", "../../x", [], {}, [[]], {"x": 1}]
CASES = 250


TABLES = "tables=[{name = 'user', eviction = {name = 'lru', max_rows = 1000}}]"


def trained(directory, steps):
    settings = RunConfig.load(
        directory / "config.toml", overrides=["store.shards=2", TABLES, f"train.max_steps={steps}"]
    )
    trainer = settings.trainer()
    trainer.fit(settings.dataset("train"))
    return trainer, settings.dataset("test")


@pytest.fixture(scope="module")
def site(log_source, tmp_path_factory):
    """A trainer, and a checkpoint of it."""
    trainer, _ = trained(log_source, 3)
    with trainer:
        yield trainer, Storage.at(trainer.save(tmp_path_factory.mktemp("crafted")))


@pytest.fixture
def crafting(site):
    """Writes a manifest, and shards, whose checksums are right; the checkpoint is whole again afterwards."""
    _, place = site
    before = {name: place.read(name) for name in place.sizes()}

    def craft(content, shards=()):
        for name, shard in dict(shards).items():
            length = struct.unpack("<Q", shard[:8])[0]
            facts = content["parts"][name]
            facts["bytes"], facts["crc32"][""] = len(shard), zlib.crc32(shard[: 8 + length])
            place.replace(name, shard)
        content.pop("crc32", None)
        text = json.dumps(content)
        content["crc32"] = zlib.crc32(text.encode())
        place.replace("manifest.json", json.dumps({"crc32": content.pop("crc32"), **content}).encode())

    yield craft, json.loads(before["manifest.json"])
    for name, content in before.items():
        place.replace(name, content)


def wrong(site):
    """Loads; says what is wrong with a refusal, which is one line that names the checkpoint and changes nothing."""
    trainer, place = site
    before = copy.deepcopy(trainer.state)
    try:
        trainer.load(place.url)
    except UserError as error:
        told = str(error)
    except Exception as error:
        return repr(error)[:200]
    else:
        return None
    is_told = place.url in told and "\n" not in told
    return "" if is_told and trainer.state == before else f"told: {told[:200]}"


def places(tree, path=()):
    """Every place in a tree of JSON."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def spoil(tree, rng):
    """Replaces something in a tree, or takes it out; returns what."""
    *way, last = rng.choice(places(tree))
    target = tree
    for key in way:
        target = target[key]
    if rng.random() < 0.2:
        del target[last]
        return (*way, last), "gone"
    target[last] = rng.choice([*WORTHLESS, NESTED])
    return (*way, last), "nested" if target[last] is NESTED else target[last]


@pytest.mark.slow
def test_any_manifest_is_loaded_whole_or_refused(site, crafting):
    craft, good = crafting
    del good["crc32"]
    rng, found = random.Random(0), []
    for _ in range(CASES):
        content = copy.deepcopy(good)
        case = spoil(content, rng)
        craft(content)
        found.append((wrong(site), case))
    assert [each for each in found if each[0]] == []
    needed = [told for told, (way, _) in found if way[:1] != ("recipe",)]  # of which loading asks nothing
    assert (
        sum(told is not None for told in needed) > len(needed) // 2
    )  # the recipe of the model is for girih.load


@pytest.mark.slow
def test_any_header_of_a_shard_is_loaded_whole_or_refused(site, crafting):
    craft, good = crafting
    _, place = site
    name = next(name for name in good["parts"] if name.endswith("0001.safetensors"))
    shard = place.read(name)
    length = struct.unpack("<Q", shard[:8])[0]
    header = json.loads(shard[8 : 8 + length])
    described = json.loads(header["__metadata__"]["girih"])
    rng, found = random.Random(1), []
    for number in range(CASES):
        bad, text = copy.deepcopy(header), copy.deepcopy(described)
        case = spoil(text if number % 2 else bad, rng)
        if number % 2:
            bad["__metadata__"]["girih"] = json.dumps(text)
        packed = json.dumps(bad).encode()
        packed += b" " * (-len(packed) % 8)
        craft(copy.deepcopy(good), {name: struct.pack("<Q", len(packed)) + packed + shard[8 + length :]})
        found.append((wrong(site), case))
    assert [each for each in found if each[0]] == []
    assert sum(told is not None for told, _ in found) > CASES // 2


DAMAGED = {
    "a list of parts": lambda c: c.update(parts=[]),
    "no run": lambda c: c["state"].update(run=None),
    "no dense state": lambda c: c.pop("dense"),
    "a part elsewhere": lambda c: c["parts"].update({"../../x": c["parts"]["dense.safetensors"]}),
    "another step": lambda c: c["state"]["run"].update(step=-5),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_commands_tell_it_in_a_line_with_status_2(site, crafting, capsys, change):
    _, place = site
    craft, content = crafting
    change(content)
    craft(content)
    assert cli.run(["inspect", place.url]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"girih: {place}/manifest.json: damaged")
    assert len(told.splitlines()) == 1


def test_a_load_that_fails_leaves_rows_and_parameters_as_they_were(site, log_source):
    _, place = site
    trainer, data = trained(log_source, 5)
    with trainer:
        before, state = trainer.predict(data), copy.deepcopy(trainer.state)
        for name in sorted(place.sizes()):
            content = place.read(name)
            place.replace(name, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            with pytest.raises(CheckpointError, match=name):
                trainer.load(place.url)
            place.replace(name, content)
        np.testing.assert_array_equal(trainer.predict(data), before)
        assert trainer.state == state
        trainer.load(place.url)
        assert (trainer.predict(data) != before).any()


def test_all_files_of_a_checkpoint_may_be_read_by_the_same_people(site):
    _, place = site
    os.umask(mask := os.umask(0))
    modes = {name: (place.local / name).stat().st_mode & 0o777 for name in place.sizes()}
    assert set(modes.values()) == {0o666 & ~mask}


def nan_in(name, at):
    """NaN in an element of the first tensor whose name begins so."""

    def change(place):
        tensors = load_file(place / "dense.safetensors")
        found = next(
            each
            for each in tensors
            if each.startswith(name) and tensors[each].dtype.kind == "f" and tensors[each].size
        )
        tensors[found] = tensors[found].copy()
        tensors[found].reshape(-1)[at] = np.nan
        save_file(tensors, place / "dense.safetensors")

    return change


def another_dtype(place):
    tensors = load_file(place / "dense.safetensors")
    name = next(each for each in tensors if each.startswith("dense.model"))
    save_file(tensors | {name: tensors[name].astype(np.int32)}, place / "dense.safetensors")


def replaced(name, make):
    def change(place):
        (place / name).unlink()
        make(place / name)

    return change


def first_rows_of_the_other_shard(place):
    """Keys of shard 0 in the file of shard 1, which no lookup of them reads."""
    one, other = (next(place.glob(f"tables/*/shard-000{number}.safetensors")) for number in (0, 1))
    content = other.read_bytes()
    metadata = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])["__metadata__"]
    tensors, theirs = ({name: each.copy() for name, each in load_file(path).items()} for path in (other, one))
    for name in ("ids", "tables"):
        tensors[name][:3] = theirs[name][:3]
    save_file(tensors, other, metadata)


SPOILED = {
    "NaN in a parameter": (nan_in("dense.model", 0), "holds NaN"),
    "NaN in the optimizer": (nan_in("dense.optimizer", -1), "holds NaN"),
    "another dtype": (another_dtype, "does not fit this model: .*int32, expected torch.float32"),
    "keys of another shard": (first_rows_of_the_other_shard, "it has a key of another shard than 1"),
    "a directory for the manifest": (replaced("manifest.json", os.mkdir), "not a regular file"),
    "a directory for the net": (replaced("dense.safetensors", os.mkdir), "dense.safetensors: missing"),
    "a pipe for the manifest": (replaced("manifest.json", os.mkfifo), "not a regular file"),
    "a device for the manifest": (
        replaced("manifest.json", lambda path: path.symlink_to("/dev/zero")),
        "leads out",
    ),
    "a manifest of brackets": (
        replaced("manifest.json", lambda path: path.write_text("[" * 100_000)),
        "damaged",
    ),
}


@pytest.mark.parametrize(("change", "told"), SPOILED.values(), ids=SPOILED)
def test_a_checkpoint_that_is_sealed_again_is_refused_in_a_line(site, tmp_path, change, told):
    trainer, place = site
    copy = tmp_path / place.name
    shutil.copytree(place.local, copy)
    change(copy)
    seal(copy)
    with pytest.raises(CheckpointError, match=told) as error:
        trainer.load(copy)
    assert len(str(error.value).splitlines()) == 1


def test_a_net_with_nan_is_not_saved(log_source, tmp_path):
    """A checkpoint with it could not be loaded."""
    trainer, _ = trained(log_source, 1)
    with trainer:
        next(trainer.model.parameters()).data[:] = np.nan
        with pytest.raises(CheckpointError, match="holds NaN; no checkpoint with it could be loaded"):
            trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
