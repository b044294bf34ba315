"""Has connections meet faults in all processes of a run that a test starts with this directory on their path.

``GIRIH_FAULTS`` names a directory with ``faults.json``: fields of :class:`support.faults.Faults`, whose seed is made one of each
process. Each fault is a line of ``met`` there. A server keeps a journal beside it, ``server-PID``, of what is told it and done: ``read TRAINER NUMBER``,
``ended TRAINER NUMBER``, ``applied STEP`` and ``anew``.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import zlib

DIRECTORY = os.environ.get("GIRIH_FAULTS", "")


def teller(name):
    """Writes lines at once: a process may be killed."""
    file = os.open(os.path.join(DIRECTORY, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda *words: os.write(file, (" ".join(map(str, words)) + "\n").encode())


def have_faults(endpoints):
    from support.faults import Faults, faulty

    with open(os.path.join(DIRECTORY, "faults.json")) as file:
        asked = json.load(file)
    who = f"{asked.pop('seed')} {sys.argv} {os.environ.get('RANK')}"
    endpoints.dialer = faulty(endpoints.dialer, Faults(**asked, seed=zlib.crc32(who.encode())), teller("met"))


def keep_journal(server):
    tell, work = teller(f"server-{os.getpid()}"), server.EmbeddingServer
    lookup, take_part, apply_turn, reset = work.on_lookup, work.on_update, work._apply_turn, work.on_reset

    def looked_up(self, request):
        _, trainer, number, _, _, train = request.frame.fields
        lookup(self, request)
        if train:
            tell("read", trainer, number)

    def took_part(self, request):
        _, trainer, number, turn = request.frame.fields[:4]
        is_over = turn == server.NO_TURN or self._was_applied(trainer, turn)
        take_part(self, request)
        if is_over:
            tell("ended", trainer, number)

    def applied_turn(self, parts):
        apply_turn(self, parts)
        self._queues.drain()  # an update ends once all shards have applied it
        updates = [request for request, _ in parts if request.frame.kind == server.SparseVerb.UPDATE]
        for request, _ in parts:
            tell("ended", *request.frame.fields[1:3])
        if updates:
            tell("applied", updates[0].frame.fields[-2])

    def began_anew(self, request):
        reset(self, request)
        tell("anew")

    work.on_lookup, work.on_update, work.on_drop = looked_up, took_part, took_part
    work._apply_turn, work.on_reset = applied_turn, began_anew


CHANGED = {
    "girih.comm.service": have_faults,
    "girih.services.embedding_server": keep_journal,
}


class Changing(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGED[name](module)

        spec.loader.exec_module = exec_module
        return spec


if DIRECTORY:
    sys.meta_path.insert(0, Changing())
