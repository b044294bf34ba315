"""A full or read-only disk gives an error and leaves no half-written file. The tests mount a small tmpfs."""

import json
import os
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

from girih import checkpoint


@pytest.fixture
def mount(tmp_path):
    """Makes a directory on a small file system of its own, given the options of a tmpfs."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root on Linux")
    places = []

    def make(*options):
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(place)]
        if subprocess.run(words, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine does not let root mount a tmpfs")
        places.append(place)
        return place

    yield make
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(directory, leave=0):
    """Takes all room of a file system but ``leave`` bytes, in a file ``ballast``."""
    free = os.statvfs(directory)
    (directory / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - leave))


def files_in(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_no_room_for_a_run_directory(site, mount):
    disk = mount("size=64k", "nr_inodes=1")
    line = site.refusal("train", site.config_file, "--run", disk / "run")
    assert line == f"{disk / 'run'}: no space left on the disk; free some and try again"


def test_no_room_for_the_config_of_a_run(site, mount):
    disk = mount("size=64k")
    fill(disk)
    line = site.refusal("train", site.config_file, "--run", disk / "run")
    assert line == f"{disk / 'run'}: no space left on the disk; free some and try again"


def test_a_disk_that_fills_up_at_a_checkpoint(site, mount):
    disk = mount("size=1m")
    run = disk / "run"
    site.configure(
        "model = {name = 'dnn', hidden = [64, 64]}\ncheckpoint.every_steps = 2\ntrain.log_every_steps = 5"
    )
    site.girih("train", site.config_file, "--run", run, "--set", "train.max_steps=2")
    fill(disk, leave=8192)
    before = files_in(run)
    line = site.refusal_after_writing("train", site.config_file, "--run", run, "--resume", before=(3, 4))
    assert line == f"{run / 'checkpoints'}: no space left for a checkpoint; free some, then --resume"
    assert files_in(run) == [
        name for name in before if name != "summary.json"
    ]  # the run goes on: it has not ended
    assert [step for step, _ in checkpoint.complete(checkpoint.Storage.at(run / "checkpoints"))] == [2]
    assert "logloss" in site.girih("evaluate", run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] > 0
    (disk / "ballast").unlink()
    assert "AUC" in site.girih("train", site.config_file, "--run", run, "--resume")


@pytest.mark.parametrize("leave", [0, 4096])
def test_a_disk_that_is_full_once_a_run_goes_on(site, mount, leave):
    disk = mount("size=256k")
    run = disk / "run"
    site.girih("train", site.config_file, "--run", run)
    metrics = (run / "metrics.jsonl").read_text()
    fill(disk, leave)
    words = ("train", site.config_file, "--run", run, "--resume", "--set", "train.epochs=3")
    line = site.refusal_after_writing(*words, before=None)
    assert "no space left" in line
    assert (run / "metrics.jsonl").read_text().startswith(metrics)
    assert not [name for name in files_in(run) if "unfinished" in name or "writing" in name or "new" in name]
    assert "logloss" in site.girih("evaluate", run)


def test_predictions_onto_a_full_disk(trained, mount):
    site = trained
    disk = mount("size=16k")
    table = pq.read_table(site / "test.parquet")
    pq.write_table(table.take(list(range(60)) * 100), site / "many.parquet")
    out = disk / "out.parquet"
    for leave in (0, 4096, 12288):
        (disk / "ballast").unlink(missing_ok=True)
        fill(disk, leave)
        words = ("predict", site / "run", "--data", site / "many.parquet", "--out", out, "--keep", "price")
        assert site.refusal(*words) == f"--out {out}: no space left on the disk; free some and try again"
        assert files_in(disk) == ["ballast"]


def test_a_report_onto_a_full_disk(trained, mount):
    disk = mount("size=256k")
    shutil.copytree(trained / "run", disk / "run")
    fill(disk)
    line = trained.refusal("report", disk / "run")
    assert line == f"{disk / 'run' / 'report.html'}: no space left on the disk; free some and try again"


def test_a_read_only_disk(trained, mount):
    site = trained
    disk = mount("size=256k")
    shutil.copytree(site / "run", disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    line = site.refusal("train", site.config_file, "--run", disk / "new")
    assert line == f"{disk / 'new'}: cannot be written (Read-only file system); choose another --run"
    line = site.refusal(
        "train", site.config_file, "--run", disk / "run", "--resume", "--set", "train.epochs=9"
    )
    assert line == f"{disk / 'run'}: cannot be written (Read-only file system); choose another --run"
    words = ("predict", disk / "run", "--data", site / "test.parquet", "--out", disk / "out.parquet")
    assert site.refusal(*words) == (
        f"--out {disk / 'out.parquet'}: cannot be written (Read-only file system); name another file"
    )
    assert "report.html" in site.refusal("report", disk / "run")
    assert "logloss" in site.girih("evaluate", disk / "run")
    assert "step 10" in site.girih("inspect", disk / "run")


def test_tables_in_files_on_a_full_disk(site, mount):
    disk = mount("size=64k")
    site.configure(f"store = {{arena = 'file', directory = '{disk}'}}")
    line = site.refusal(*site.train())
    assert "no room for " in line
    assert files_in(disk) == []


def test_tables_in_files_leave_nothing_behind(site):
    site.configure("store = {arena = 'file', directory = 'rows', shards = 2}")
    assert "AUC" in site.girih(*site.train())
    assert "logloss" in site.girih("evaluate", site / "run")
    assert "AUC" in site.girih(*site.train("--resume", "--set", "train.epochs=2"))
    assert list((site / "rows").iterdir()) == []


def test_a_tier_on_a_full_disk(site, mount):
    disk = mount("size=64k")
    site.configure(f"store = {{tiers = ['dram', 'ssd'], hot_rows = 10, ssd_dir = '{disk}'}}")
    line = site.refusal_after_writing(*site.train(), before=None)
    assert line.startswith(f"SSD tier in {disk}: no room for ")
    assert files_in(disk) == []
