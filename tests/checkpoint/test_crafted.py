"""Checkpoints whose checksums are right and whose content is not: one line that names the file, and nothing is replaced."""

import copy
import json
import os
import random
import struct
import zlib

import numpy as np
import pytest

from girih import cli
from girih.checkpoint import Storage
from girih.config.file import RunConfig
from girih.errors import CheckpointError, UserError

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
    needed = [
        told for told, (way, _) in found if way[:2] != ("state", "recipe")
    ]  # of which loading asks nothing
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
