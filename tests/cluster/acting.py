"""A role that does as it is told, for the processes of tests."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from girih.cluster import HostSpec
from girih.errors import ConfigError

PLACE = HostSpec(environment={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])})
"""Where a process finds this module."""


@dataclass
class Acting:
    """``act`` says what it does once it was given its role; ``told`` is where it says that it listens."""

    act: str
    index: int = 0
    told: str = "there"
    name: str = "loader"

    def run(self, ready, stop):
        if self.act == "refuse":
            raise ConfigError("there is nothing to load")
        if self.act == "vanish":
            os._exit(7)
        print("what anybody prints")
        variables = ("RANK", "OMP_NUM_THREADS", "GIRIH_TEST_PLACE")
        ready(self.told or " ".join(f"{name}={os.environ.get(name)}" for name in variables))
        if self.act == "raise":
            raise ValueError("a thing went wrong")
        if self.act == "exit":
            print("its last words", file=sys.stderr, flush=True)
            os._exit(3)
        if self.act == "deaf":
            threading.Event().wait()
        stop.wait()


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
