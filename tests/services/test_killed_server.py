"""A server that is killed amid updates comes back to rows that each update has moved once, but for one that is told."""

import os
import pickle
import random
import re
import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest

from girih.cluster.launchers.local import LocalLauncher
from girih.cluster.roles import RoleName
from girih.comm.service import answer, as_integer, connect
from girih.errors import Lost
from girih.processes.segments import new_prefix, remove_segments
from girih.services.embedding_server import EmbeddingServer
from girih.sparse.protocol import KEYS_MISSING, SparseVerb
from girih.sparse.routing.key_router import KeyRouter
from remote_site import SECRET, batch_of, spec_of

IDS = 100_000


class Killed:
    """A server in a process of its own, and a worker's side of it."""

    def __init__(self, stack):
        spec, segment = spec_of(dim=16, shards=2), new_prefix()
        stack.callback(remove_segments, segment)
        self._role = EmbeddingServer(
            spec=spec, index=0, num_servers=1, num_contributors=1, address="shm://", secret=SECRET, segment=segment, num_senders=1,
        )  # fmt: skip
        self._launcher, self.life, self.handle = LocalLauncher(), -1, None
        self.begin()
        stack.callback(self.end)
        resolve = lambda: self.handle.address  # noqa: E731
        self._client = connect(self.handle.address, secret=SECRET, resolve=resolve)
        stack.callback(self._client.close)
        (group,) = spec.groups()
        asked = KeyRouter(group, 1, 2, by_shard=True).ask(batch_of(range(IDS), range(IDS, 2 * IDS)))
        self.lengths, self.keys, self.counts = asked.of_place(0)
        self._grads = np.ones((len(self.keys), group.spec.dim), np.float32)

    def begin(self):
        """Starts the next life; gives the line on what it found."""
        self.life += 1
        self.handle = self._launcher.start(RoleName.EMBEDDING_SERVER, 0, self.life, 1)
        self.handle.begin(pickle.dumps(self._role))
        assert self.handle.wait_for_address(60), self.handle.last_words()
        return self.handle.recovery_note

    def kill(self):
        os.kill(self.handle.pid, signal.SIGKILL)
        self.end()

    def end(self):
        self.handle.kill()
        self.handle.wait()
        self.handle.close()

    def look(self, number):
        fields = (number, 0, number, 1, 0, 1)
        return answer(
            self._client.call(SparseVerb.LOOKUP, fields, (self.lengths, self.keys, self.counts))
        ).arrays[0]

    def push(self, turn, *, with_keys=False):
        keys = (self.lengths, self.keys) if with_keys else ()
        return self._client.call(
            SparseVerb.UPDATE, (turn, 0, turn, turn, 1, as_integer(1.0)), (self._grads, *keys)
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.heavy)])
def test_each_push_moves_each_row_once_however_often_the_server_is_killed(num_kills):
    chance, num_amid = random.Random(num_kills), 0
    with ExitStack() as stack:
        server = Killed(stack)
        expected = server.look(0).copy()
        start_s = time.monotonic()
        answer(server.push(0))
        update_s = time.monotonic() - start_s
        expected -= 1
        for turn in range(1, num_kills + 1):
            server.look(turn)
            pushed = server.push(turn)
            time.sleep(chance.random() * update_s)
            server.kill()
            found = server.begin()
            num_amid += "were repaired" in found
            with_keys = isinstance(pushed.exception(), Lost) or pushed.result().fields == (KEYS_MISSING,)
            if with_keys:
                answer(server.push(turn, with_keys=True))
            rows, before = server.look(turn), expected
            expected = before - 1
            for number, _ in re.findall(r"id (-?\d+) of '(\w+)'", found):
                torn = server.keys == int(number)
                assert np.isin(rows[torn] - before[torn], (0, -1)).all()
                expected[torn] = rows[torn]
            np.testing.assert_array_equal(rows, expected)
    if num_kills > 10:
        assert num_amid
