"""Checkpoints of a run in a directory, in memory and on an S3 server: the same code, the same promises."""

import json
import os
import signal
import zlib

import numpy as np
import pytest

from companions import killed
from girih import checkpoint
from girih.app.run_config import RunConfig
from girih.checkpoint import Manifest, Storage
from girih.errors import CheckpointError


def settings_of(directory, *overrides):
    return RunConfig.load(directory / "config.toml", overrides=["store.shards=2", *overrides])


def train_until_killed(pipe, directory, run, address, last):
    """Saves after every second step, and dies as it comes to a part for the second time."""
    seen = []

    def noting(original):
        def note(storage, name, *content):
            seen.append(name)
            if seen.count(last) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(storage, name, *content)

        return note

    Storage.create, Storage.replace = noting(Storage.create), noting(Storage.replace)
    settings = settings_of(directory, "checkpoint.every_steps=2", f"checkpoint.dir={address}")
    with settings.trainer(run=run) as trainer:
        trainer.fit(settings.dataset("train"))


@pytest.fixture
def saved(log_directory, address):
    """A checkpoint of three steps; returns its place, and predictions."""
    settings = settings_of(log_directory, "train.max_steps=3")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        place = Storage.at(trainer.save(address))
        return place, trainer.predict(settings.dataset("test"))


def rewrite(place, change):
    """Changes the content of a manifest, whose checksum then agrees."""
    content = json.loads(place.read("manifest.json"))
    del content["crc32"]
    change(content)
    content = {"crc32": zlib.crc32(json.dumps(content).encode()), **content}
    place.replace("manifest.json", json.dumps(content).encode())


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_any_number_of_shards_loads(saved, log_directory, shards):
    place, predictions = saved
    assert checkpoint.find(place.parent) == checkpoint.find(place) == place
    settings = settings_of(log_directory, f"store.shards={shards}")
    with settings.trainer() as trainer:
        trainer.load(place.url, resume=False)
        np.testing.assert_array_equal(trainer.predict(settings.dataset("test")), predictions)


def test_the_manifest_lists_and_covers_everything(saved):
    place, _ = saved
    manifest = Manifest.read(place)
    assert place.sizes().keys() == {"manifest.json", *manifest.parts}
    assert manifest.plan["strategy"] == "local"
    assert len(manifest.random) == 1
    for name, facts in manifest.shards.items():
        assert facts["num_shards"] == 2
        assert name.endswith(f"shard-{facts['shard']:04d}.safetensors")
    for table, rows in manifest.rows.items():
        assert rows == sum(facts["tables"].get(table, 0) for facts in manifest.shards.values())


def test_a_part_that_is_gone_is_named(saved, log_directory):
    place, _ = saved
    with settings_of(log_directory).trainer() as trainer:
        for name in Manifest.read(place).parts:
            content = place.read(name)
            place.remove(name, first="") if place.local is None else (place.local / name).unlink()
            with pytest.raises(CheckpointError, match=f"{name}: missing"):
                trainer.load(place.url)
            place.replace(name, content)
        trainer.load(place.url)


def test_a_part_that_is_damaged_is_named(saved, log_directory):
    place, _ = saved
    with settings_of(log_directory).trainer() as trainer:
        for name in Manifest.read(place).parts:
            content = place.read(name)
            for at in (12, len(content) // 2, len(content) - 1):
                place.replace(name, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
                with pytest.raises(CheckpointError, match=f"{name}: damaged"):
                    trainer.load(place.url)
            place.replace(name, content)
        trainer.load(place.url)


def test_a_manifest_that_lacks_a_shard_is_refused_with_the_part_named(saved):
    place, _ = saved
    shards = Manifest.read(place).shards
    lost = next(name for name in shards if name.endswith("0001.safetensors"))
    expected = {
        t: sum(f["tables"].get(t, 0) for n, f in shards.items() if n != lost)
        for t in ("user", "item", "tags")
    }

    def drop(content):
        del content["parts"][lost]
        content["rows"] = expected

    rewrite(place, drop)
    with pytest.raises(CheckpointError, match=rf"{lost}: missing: no part holds shard 1 of 2 of table"):
        Manifest.read(place)


def doubled(content):
    name = next(name for name in content["parts"] if name.endswith("0001.safetensors"))
    content["parts"][name]["shard"] = 0


def of_step(step):
    def change(content):
        content["step"] = content["state"]["run"]["step"] = step

    return change


CRAFTED = {
    "format 1": (lambda c: c.update(format=1), "format 1, which girih .* wrote; this girih reads format 3"),
    "a shard twice": (doubled, "shard 0 of table .* too"),
    "a part elsewhere": (lambda c: c["parts"].update({"../x": {}}), "leads out of its directory"),
    "a part at the root": (lambda c: c["parts"].update({"/etc/passwd": {}}), "leads out of its directory"),
    "no dense half": (lambda c: c["parts"].pop("dense.safetensors"), "lists no dense.safetensors"),
    "a negative step": (lambda c: c.update(step=-1), "step = -1"),
    "a fraction of a row": (lambda c: c["rows"].update(user=0.5), "rows.user = 0.5"),
    "a negative size": (
        lambda c: c["parts"]["dense.safetensors"].update(bytes=-5),
        "dense.safetensors. bytes = -5",
    ),
    "another field": (lambda c: c.update(telemetry=1), "telemetry"),
    "no parts": (lambda c: c.update(parts=[]), "damaged"),
    "no dense state": (lambda c: c.pop("dense"), "damaged"),
    "no run": (lambda c: c["state"].update(run=None), r"state.run = None: expected a table"),
    "a step that is a word": (lambda c: c["state"]["run"].update(step="x"), "state.run step = 'x'"),
    "two steps": (lambda c: c["state"]["run"].update(step=2), r"step = 1, but state.run.step = 2"),
    "a step of another directory": (of_step(9), "it is of step 9, which belongs in step-00000009"),
    "a step beyond all": (of_step(10**30), r"step = 10+: expected an integer from 0 to 2147483647"),
    "a plan that is a list": (lambda c: c.update(plan=[]), "plan"),
}


@pytest.mark.parametrize(("change", "told"), CRAFTED.values(), ids=CRAFTED)
def test_a_manifest_is_not_believed(log_directory, tmp_path, change, told):
    settings = settings_of(log_directory, "train.max_steps=1")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        place = Storage.at(trainer.save(tmp_path / "place"))
    rewrite(place, change)
    with pytest.raises(CheckpointError, match=told) as caught:
        Manifest.read(place)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_whose_checkpoints_lie_elsewhere_goes_on(log_directory, tmp_path, address):
    where = f"checkpoint.dir={address}"
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    found = []
    for run, stops in ((whole, [12]), (halves, [5, 12])):
        for stop in stops:
            words = [f"train.max_steps={stop}", "checkpoint.every_steps=2", "checkpoint.keep=2"]
            settings = settings_of(log_directory, *words, *([where] if run == halves else []))
            with settings.trainer(run=run) as trainer:
                if stop != stops[0]:
                    assert checkpoint.find(address).name == "step-00000005"
                    trainer.load(address)
                trainer.fit(settings.dataset("train"))
                found.append(trainer.predict(settings.dataset("test")))
    np.testing.assert_array_equal(found[0], found[2])
    assert not (halves / "checkpoints").exists()
    assert Storage.at(address).names() == ["step-00000010", "step-00000012"]
    with (
        settings.trainer(run=tmp_path / "new") as trainer,
        pytest.raises(Exception, match="holds an earlier run"),
    ):
        trainer.check(settings.dataset("train"))


def test_a_save_that_fails_leaves_no_checkpoint(saved, log_directory, monkeypatch):
    place, _ = saved
    settings = settings_of(log_directory)
    with settings.trainer() as trainer:
        trainer.load(place.url)
        trainer.state.step = 4
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "write", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.save(place.parent.url)
        assert place.parent.names() == [place.name]
        assert checkpoint.latest(place.parent) == place


SHARD = "tables/embedding-4-adam_first_order-1-ftrl/shard-0001.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "last"), [("directory", "dense.safetensors"), ("s3", SHARD), ("s3", "manifest.json")]
)
def test_a_kill_amid_a_save(request, log_directory, tmp_path, kind, last):
    """The first save ends, the second is killed as it comes to a part."""
    address = request.getfixturevalue("s3_address") if kind == "s3" else str(tmp_path / "place")
    run = tmp_path / "run"
    assert killed(train_until_killed, log_directory, run, address, last)
    root = Storage.at(address)
    left = root.names()
    assert [step for step, _ in checkpoint.complete(root)] == [2]
    if kind == "directory":
        assert [name for name in left if name.startswith("step-")] == ["step-00000002"]
    settings = settings_of(log_directory, f"checkpoint.dir={address}", "train.max_steps=5")
    with settings.trainer(run=run) as trainer:
        trainer.load(address)
        assert trainer.state.step == 2
        trainer.fit(settings.dataset("train"))
    assert root.names() == ["step-00000002", "step-00000005"]
