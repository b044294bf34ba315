"""The formats of girih as a fuzzer sees them: a directory, its files, how it is sealed, opened, and read by somebody else.

``open`` returns what girih finds, None if it says that it takes nothing; it may raise a ``GirihError``. ``read`` is the independent reader.
"""

import json
import re
import shutil

import independent
import numpy as np

import girih
from girih.checkpoint import Storage
from girih.checkpoint.state import RunState
from girih.files.sealed import seal_text, sealed_text
from girih.planner.calibration import Calibration
from girih.planner.plan import Plan
from girih.processes import segments
from girih.processes.lease import Lease
from girih.publishing.log import Log
from girih.report.record import read_run
from girih.report.status import status_of
from girih.runs import scale_requests
from girih.runs.directory import RunDirectory, read_summary
from girih.serving.follow import Follower
from girih.serving.model_directory import ModelDirectory, open_served
from girih.store import Keys
from girih.training.log import rewind
from support.resealing import seal


def bytes_of(state):
    return {name: (tuple(value.shape), value.detach().numpy().tobytes()) for name, value in state.items()}


def rows_in(stack):
    """All rows of a stack, each as a lookup of its key finds it."""
    names, rows, known = [table.name for table in stack.spec.tables], {}, set()
    for file in stack.files:
        own = {}
        for ids, tables, _ in file.chunks():
            own |= dict.fromkeys(zip(tables.tolist(), ids.tolist(), strict=True), True)
        for ids, tables in file.buried():
            own |= dict.fromkeys(zip(tables.tolist(), ids.tolist(), strict=True), False)
        keys = [key for key, there in own.items() if there and key not in known]
        known |= own.keys()
        out = np.empty((len(keys), stack.spec.dim), np.float32)
        stack.peek(
            Keys(np.array([i for _, i in keys], np.int64), np.array([t for t, _ in keys], np.int32)), out
        )
        rows |= {(names[t], i): row.tobytes() for (t, i), row in zip(keys, out, strict=True)}
    return rows


class Format:
    """A format.

    Args:
        source: a good directory of it. scratch: for whatever opening it writes.
    """

    def __init__(self, source, scratch, table):
        self.source, self.scratch, self.table = source, scratch, table

    def seal_index(self, file):
        """The checksum of one index alone: what it says of its files stays."""
        file.write_bytes(seal_text(sealed_text(file.read_bytes())))

    def files(self, directory):
        return sorted(
            path
            for path in directory.rglob("*")
            if path.suffix in (".json", ".jsonl", ".safetensors", ".lock")
        )


class CheckpointFormat(Format):
    seal = staticmethod(seal)

    def open(self, directory):
        with girih.load(directory) as loaded:
            loaded.predict(self.table)
            rows = {}
            for table in ("user", "item", "tags"):
                ids = loaded.table(table).ids
                found = loaded.embedding(table, ids)
                rows |= {(table, int(id)): row.tobytes() for id, row in zip(ids, found, strict=True)}
            return {"step": loaded.step, "dense": bytes_of(loaded.model.state_dict()), "rows": rows}

    def read(self, directory, found):
        return independent.checkpoint(directory)


class ResumedFormat(CheckpointFormat):
    """A checkpoint as a run that goes on loads it, with all state."""

    trainer = None

    def open(self, directory):
        self.trainer.load(directory)
        return {"step": self.trainer.state.step, "dense": bytes_of(self.trainer.model.state_dict())}

    def read(self, directory, found):
        return {name: independent.checkpoint(directory)[name] for name in found}


class ExportFormat(Format):
    seal = staticmethod(seal)

    def open(self, directory):
        signature, served = open_served(directory)
        served.predict(self.table_batch)
        rows = {}
        for stack in served.stacks:
            rows |= rows_in(stack)
        return {"step": signature.step, "dense": bytes_of(served.spec.module.state_dict()), "rows": rows}

    def read(self, directory, found):
        return independent.export(directory)


class LogFormat(Format):
    seal = staticmethod(seal)
    newest = 0

    def open(self, directory):
        place = self.scratch / "followed"
        shutil.rmtree(place, ignore_errors=True)
        lines = []
        with Follower(Log(Storage.at(directory)), place, lines.append) as follower:
            follower.again_s = 0.0
            for _ in range(3):
                follower.poll()
            current = follower.current
            if current is None or current.number < self.newest:
                assert not all(re.match(r"version \d+, step", line) for line in lines), lines
            if current is None:
                return None
            with np.errstate(all="ignore"):
                watched = ModelDirectory(place, verify=False)
                watched.served.predict(self.table_batch)
            rows = {}
            for stack in watched.served.stacks:
                rows |= rows_in(stack)
            parameters = bytes_of(watched.served.spec.module.state_dict())
            return {"number": current.number, "step": current.step, "dense": parameters, "rows": rows}

    def read(self, directory, found):
        return {"number": found["number"], **independent.log(directory, found["number"])}


class PlanFormat(Format):
    good = None

    def seal(self, directory):
        """Nothing to seal."""

    def seal_index(self, file):
        """Nothing to seal."""

    def open(self, directory):
        plan = Plan.read(directory / "plan.json")
        plan.check_like(self.good)
        plan.fits(self.good)
        plan.spreads_as(self.good)
        return json.loads(json.dumps(plan.to_dict()))

    def read(self, directory, found):
        return {**found, **json.loads((directory / "plan.json").read_text())}


class CalibrationFormat(PlanFormat):
    def open(self, directory):
        found = Calibration.read(directory / "calibration.json")
        if found.work is not None:
            assert found.work.flops_per_s > 0
        assert found.cores > 0
        found.over(1e6)
        return json.loads(json.dumps(found.to_dict(), allow_nan=False))

    def read(self, directory, found):
        return merged(found, json.loads((directory / "calibration.json").read_text()))


def merged(found, tree):
    """The tree of a file with the defaults that girih adds."""
    if isinstance(found, dict) and isinstance(tree, dict):
        return {**found, **{key: merged(found.get(key), item) for key, item in tree.items()}}
    if isinstance(found, list) and isinstance(tree, list) and len(found) == len(tree):
        return [merged(*pair) for pair in zip(found, tree, strict=True)]
    return float(tree) if isinstance(found, float) and type(tree) is int else tree


class LeaseFormat(PlanFormat):
    """A run directory: its lease, and the small files that others read there."""

    memory = None

    def open(self, directory):
        before = {path.name for path in self.memory.iterdir()}
        lease = Lease.of_run(directory / ".lock")
        own = set()
        if lease is not None:
            own = {name for name in before if lease.segments and name.startswith(lease.segments)}
            assert own <= {"girih-4194999.77." + segments._namespace() + "-abcd"}
        summary = errors_of(read_summary, directory)
        errors_of(scale_requests.pending, directory)
        errors_of(scale_requests.history, directory)
        errors_of(status_of, directory)
        errors_of(read_run, directory)
        errors_of(rewind, directory / "metrics.jsonl", RunState(step=2))
        with RunDirectory(directory, resume=True):
            pass
        assert before - {path.name for path in self.memory.iterdir()} <= own
        return None if summary is None else {"summary": summary}

    def read(self, directory, found):
        return {"summary": json.loads((directory / "summary.json").read_text())}


def errors_of(read, *arguments):
    """The result; None for one of girih's errors, which is one line."""
    told = ""
    try:
        return read(*arguments)
    except girih.errors.GirihError as error:
        told = str(error)
    assert len(told.splitlines()) == 1
    return None


FORMATS = {
    "checkpoint": CheckpointFormat,
    "resumed": ResumedFormat,
    "export": ExportFormat,
    "log": LogFormat,
    "plan": PlanFormat,
    "calibration": CalibrationFormat,
    "lease": LeaseFormat,
}
