"""Logs that real runs wrote, and what followers have of them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from patience import patient
from safetensors.numpy import load

from girih import cli
from girih.checkpoint import Storage
from girih.errors import MissingFileError
from girih.publishing.log import Log, name_of
from girih.publishing.manifest import Pointer
from girih.serving.follow import Follower
from girih.serving.signature import Signature, read_file
from girih.sparse.groups.pack import served_groups
from girih.store import Keys
from girih.store.mapped import MappedFile, Stack
from girih.training.publisher import Publisher
from support.store_verbs import read_snapshot

EVERY = ["train.max_steps=12", "data.batch_size=64", "checkpoint.every_steps=1", "checkpoint.keep=50"]
SMALL = "tables=[{name='user',eviction={name='lru',max_rows=60}},{name='item',eviction={name='ttl',steps=3}}]"
"""So small that most rows leave again."""


OPEN = []
"""Followers that the test at hand opened; conftest.py closes them."""


def merge_all(follower):
    """Wait until the stacks of a follower are as short as they get."""
    follower._merge()
    while not follower._merging.is_idle:
        time.sleep(0.001)
        follower._apply_merged()
        follower._merge()


def words(config, run, log, *overrides, resume=False, strategy="local"):
    options = ["store.shards=1", "train.log_every_steps=1", f"publish.to={log}", *overrides]
    sets = [word for each in options for word in ("--set", each)]
    command = [sys.executable, "-m", "girih", "train", config, "--strategy", strategy, "--run", run, *sets]
    return [str(word) for word in [*command, *(["--resume"] if resume else [])]]


def patiently():
    """The environment of processes that wait for each segment, so that none is skipped."""
    path = [str(Path(__file__).parent / "patient"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def publish(config, run, log, *overrides, resume=False, strategy="local", status=0):
    """Trains in processes of its own, which wait for each segment; returns the run, or what went wrong where that is expected."""
    command = words(config, run, log, *overrides, resume=resume, strategy=strategy)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=patiently(), check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return run if status == 0 else done.stderr


@contextlib.contextmanager
def patience():
    """Has runs of this process wait for each segment, so that none is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        for method, patiently in patient(Publisher):
            patch.setattr(Publisher, method, patiently)
        yield


def publish_here(config, run, log, *overrides, resume=False, status=0):
    """Trains in this process, and waits for each segment."""
    with patience():
        given = [str(word) for word in words(config, run, log, *overrides, resume=resume)[3:]]
        assert cli.run(given) == status
    return run


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


class Lines(list):
    """What a follower says."""

    def __call__(self, line):
        self.append(line)


def follower(log, directory, **options):
    lines = Lines()
    found = Follower(Log(Storage.at(log)), directory, lines, **options)
    found.lines, found.again_s = lines, 0.0
    OPEN.append(found)
    return found


def version_in(directory):
    """What a follower has; None before its first version."""
    with contextlib.suppress(MissingFileError):
        return Signature.read(directory)


def stacks_in(version, directory):
    """Its rows, mapped."""
    checked = version.checked("signature")
    groups = served_groups(checked.schema, checked.needs, checked.options.seed)
    return [
        Stack(group.spec, [MappedFile(directory / file.name) for file in files])
        for group, files in zip(groups, version.rows, strict=True)
    ]


def rows_in(version, directory):
    """All rows of a version, by (table, id): those of embedding and first-order weight side by side, as bytes."""
    rows = {}
    for stack in stacks_in(version, directory):
        names = [table.name for table in stack.spec.tables]
        known = set()
        for file in stack.files:
            own = {}
            for ids, tables, values in file.chunks():
                for key, row in zip(zip(tables.tolist(), ids.tolist(), strict=True), values, strict=True):
                    own[key] = row.tobytes()
            for ids, tables in file.buried():
                own |= dict.fromkeys(zip(tables.tolist(), ids.tolist(), strict=True))
            for key, row in own.items():
                if key not in known and row is not None:
                    rows[names[key[0]], key[1]] = row
            known |= own.keys()
        for (table, number), row in rows.items():  # as whoever asks for it reads it
            if table in names:
                out = np.empty((1, stack.spec.dim), np.float32)
                stack.peek(Keys(np.array([number]), np.array([names.index(table)], np.int32)), out)
                assert out.tobytes() == row
    return rows


def rows_of(checkpoint):
    """The same of a checkpoint's directory."""
    rows = {}
    for file in sorted(checkpoint.glob("tables/*/*.safetensors")):
        snapshot = read_snapshot(file)
        names = [table["name"] for table in snapshot.description["tables"]]
        columns = [snapshot.column(segment["name"]) for segment in snapshot.description["segments"]]
        values = np.concatenate(columns, axis=1)
        keys = zip(snapshot.column("tables").tolist(), snapshot.column("ids").tolist(), strict=True)
        rows |= {(names[t], i): row.tobytes() for (t, i), row in zip(keys, values, strict=True)}
    return rows


def dense_in(version, directory):
    """Parameters of a version, as bytes by name."""
    return {
        name: value.tobytes() for name, value in load(read_file(directory, version.dense.parameters)).items()
    }


def dense_of(checkpoint):
    tensors = load((checkpoint / "dense.safetensors").read_bytes())
    prefix = "dense.model."
    return {n.removeprefix(prefix): v.tobytes() for n, v in tensors.items() if n.startswith(prefix)}


def assert_is(version, directory, checkpoint):
    """A version has the rows and parameters of a checkpoint, and no others."""
    assert rows_in(version, directory) == rows_of(checkpoint)
    assert dense_in(version, directory) == dense_of(checkpoint)


class Replayed:
    """A log that another one comes into, as if it were being written now."""

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.old, self.new = Log(Storage.at(source)), Log(Storage.at(target))
        self.head = self.old.head()

    def bring(self, number, *, whole=False):
        """Brings a segment, or a snapshot."""
        kind = "snapshots" if whole else "segments"
        shutil.copytree(
            self.source / kind / name_of(number), self.path(number, whole=whole), dirs_exist_ok=True
        )

    def path(self, number, *, whole=False):
        return self.target / ("snapshots" if whole else "segments") / name_of(number)

    def say(self, number, snapshot=None):
        """Says in the head that a version is the newest."""
        wholes = [
            n for n in self.old.numbers(whole=True) if n <= number and self.path(n, whole=True).exists()
        ]
        snapshot = snapshot or wholes[-1]
        self.new.write_head(
            replace(
                self.head, newest=self._pointer(number, snapshot), snapshot=self._pointer(snapshot, snapshot)
            )
        )

    def reveal(self, number):
        """Brings all up to a version, and says so."""
        for whole in (True, False):
            for each in self.old.numbers(whole=whole):
                if each <= number and not self.path(each, whole=whole).exists():
                    self.bring(each, whole=whole)
        self.say(number)

    def _pointer(self, number, snapshot):
        whole = not (self.source / "segments" / name_of(number)).exists() or number == snapshot
        place = self.old.place(number, whole=whole)
        manifest = self.old.read(number, whole=whole)
        crc = zlib.crc32(place.read("manifest.json"))
        return Pointer(number=number, step=manifest.step, time=manifest.time, manifest_crc32=crc)
