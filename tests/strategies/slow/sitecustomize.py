"""Slows roles down in processes that a test starts with this directory on their path.

``GIRIH_SLOW`` names a file of JSON, ``{"roles": {role: seconds}}``: what each batch takes such a role longer. ``"spin"`` has it use a core
meanwhile, ``"rank"`` is the one trainer meant, and ``"lock"`` a file that processes of a role hold meanwhile, so that several do as much as one.
It is read for each batch: what is slow may change while a run is on.
"""

import fcntl
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from contextlib import ExitStack

WORK = {
    "girih.services.loader": ("loader", "Loader", "dispatch"),
    "girih.services.embedding_worker": ("embedding-worker", "EmbeddingWorker", "_pool_rows"),
    "girih.services.embedding_server": ("embedding-server", "EmbeddingServer", "on_lookup"),
    "girih.dense.halves.replica": ("trainer", "Replica", "compute"),
    "girih.services.group_server": ("group-server", "GroupServer", "on_forward"),
}
"""Module → the role that works there, and by which method for each batch."""


def slow(role):
    with open(os.environ["GIRIH_SLOW"]) as file:
        asked = json.load(file)
    seconds = asked["roles"].get(role, 0.0)
    if not seconds or asked.get("rank", os.environ.get("RANK")) != os.environ.get("RANK"):
        return
    with ExitStack() as stack:
        if "lock" in asked:
            fcntl.flock(stack.enter_context(open(asked["lock"], "w")), fcntl.LOCK_EX)
        until_s = time.monotonic() + seconds
        while asked.get("spin") and time.monotonic() < until_s:
            pass
        time.sleep(max(0.0, until_s - time.monotonic()))


class Slowing(importlib.abc.MetaPathFinder):
    """Has the methods of :data:`WORK` take longer, as their modules are imported."""

    def find_spec(self, name, path, target=None):
        if name not in WORK:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            role, owner, method = WORK[name]
            work = getattr(getattr(module, owner), method)

            def slowly(*words, **options):
                slow(role)
                return work(*words, **options)

            setattr(getattr(module, owner), method, slowly)

        spec.loader.exec_module = exec_module
        return spec


if "GIRIH_SLOW" in os.environ:
    sys.meta_path.insert(0, Slowing())
