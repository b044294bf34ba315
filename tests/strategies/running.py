"""Runs under way, and the traces of their processes."""

import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

BEGIN_S = 90
END_S = 30


class Running:
    """A run under way, and the traces of its processes, which others of the machine are not mixed up with."""

    def __init__(self, words):
        self.mark, self.names = f"GIRIH_TEST={uuid.uuid4().hex}", set()
        self.start_s, self.begun_s = time.monotonic(), 0.0
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self.mark),
            start_new_session=True,
        )
        self.run = Path(words[words.index("--run") + 1]) if "--run" in words else None

    def until_it_trains(self):
        while not (self.run / "metrics.jsonl").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < self.start_s + BEGIN_S, self.abort()
            time.sleep(0.05)
        self.begun_s = time.monotonic() - self.start_s
        self.names = names_of(processes_of(self.mark))
        return json.loads((self.run / "processes.json").read_text())

    def ends(self, status, within_s=END_S):
        """Standard error of the run, after it ended in time and left nothing.

        One that has yet to begin gets the time for that too, and one that began slowly (the machine is busy) as long again.
        """
        within_s += self.begun_s or BEGIN_S
        try:
            out, error = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {within_s:.0f} s: {self.abort()}")
        assert self.process.returncode == status, (out, error)
        self.leaves_nothing()
        self.output = out
        return error

    def abort(self):
        """Ends all processes; returns what each was doing."""
        kept = {}
        for process in sorted(processes_of(self.mark), key=lambda process: int(process.name)):
            title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            with suppress(OSError):
                kept[title] = (process / "fd" / "2").open("rb", 0)  # roles write to files without a name
                os.kill(int(process.name), signal.SIGABRT)
        _, error = self.process.communicate()
        for title, file in kept.items():
            with suppress(OSError), file:
                file.seek(0)
                error += f"\n{title}: {file.read().decode(errors='replace')}"
        return error

    def leaves_nothing(self, within_s=8):
        until = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left

    def left(self):
        sockets = Path("/proc/net/unix").read_text()
        names = {name for name in self.names if os.path.exists(name) or name in sockets}
        return names | {str(process) for process in processes_of(self.mark)}


def environment(mark):
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return kept | dict([mark.split("=")]) | {"PYTHONFAULTHANDLER": "1"}


def processes_of(mark):
    """Those that were started with a mark in their environment, and by them."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue
    return found


def process_of(running, role, index):
    """The process of a role, by its command line or rank; None while there is none."""
    pids = []
    for process in processes_of(running.mark):
        words = (process / "cmdline").read_bytes().split(b"\0")
        variables = (process / "environ").read_bytes().split(b"\0")
        if (role.encode() in words and b"girih.cluster.child" in words) or (
            role == "trainer" and f"RANK={index}".encode() in variables
        ):
            pids.append(int(process.name))
    pids.sort()
    place = 0 if role == "trainer" else index
    return pids[place] if len(pids) > place else None


def names_of(processes):
    """Files in shared memory and sockets that some processes use, by name."""
    found, inodes = set(), set()
    for process in processes:
        for line in (process / "maps").read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(line[line.index("/dev/shm/") :].removesuffix(" (deleted)"))
        for file in (process / "fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[6] in inodes:
            found.add(words[7])
    return {name for name in found if "girih" in name}
