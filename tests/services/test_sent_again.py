"""What a worker sends again to an embedding server that came back: each push moves a row once."""

from contextlib import ExitStack

import numpy as np
import pytest

from girih.comm.service import answer, as_integer, connect
from girih.errors import WireError
from girih.processes.segments import new_prefix
from girih.services.embedding_server import EmbeddingServer
from girih.sparse.protocol import KEYS_MISSING, NO_TURN, DoneBatches, SparseVerb
from girih.sparse.routing.key_router import KeyRouter
from remote_site import SECRET, batch_of, running, spec_of


class Asker:
    """A worker's side of one server, played by hand: each request is the same few keys."""

    def __init__(self, stack, *, together=1, num_senders=1):
        spec = spec_of()
        role = EmbeddingServer(
            spec=spec, index=0, num_servers=1, num_contributors=together, address="shm://", secret=SECRET,
            segment=new_prefix(), num_senders=num_senders,
        )  # fmt: skip
        self._client = connect(stack.enter_context(running(role)), secret=SECRET)
        stack.callback(self._client.close)
        (group,) = spec.groups()
        self._lengths, self._keys, self._counts = (
            KeyRouter(group, 1, 1).ask(batch_of([1, 2], [3, 4])).of_place(0)
        )
        self._shape = (4, group.spec.dim)

    def look(self, sample, number=0, trainer=0, answered=0):
        """The staleness that the server tells, and the rows."""
        fields = (sample, trainer, number, 1, answered, 1)
        frame = answer(
            self._client.call(SparseVerb.LOOKUP, fields, (self._lengths, self._keys, self._counts))
        )
        return frame.fields[0], frame.arrays[0].copy()

    def push(self, sample, turn, trainer=0, *, with_keys=False):
        keys = (self._lengths, self._keys) if with_keys else ()
        fields = (sample, trainer, turn, turn, 1, as_integer(1.0))
        return self._client.call(SparseVerb.UPDATE, fields, (np.ones(self._shape, np.float32), *keys))

    def drop(self, sample, turn, trainer=0):
        return self._client.call(SparseVerb.DROP, (sample, trainer, turn, turn))


@pytest.fixture
def asker():
    with ExitStack() as stack:
        yield lambda **options: Asker(stack, **options)


def test_a_push_that_is_sent_again_is_applied_once(asker):
    own = asker()
    _, before = own.look(1)
    assert answer(own.push(1, 0)).fields == ()
    for with_keys in (False, True):
        assert answer(own.push(1, 0, with_keys=with_keys)).fields == ()
    staleness, after = own.look(2, number=1)
    assert staleness == 0
    np.testing.assert_array_equal(after, before - 1)  # SGD with lr 1


def test_gradients_of_rows_that_another_life_read_come_with_their_keys(asker):
    own = asker()
    _, before = own.look(1)
    assert answer(own.push(9, 1)).fields == (KEYS_MISSING,)
    assert answer(own.push(9, 1, with_keys=True)).fields == ()
    np.testing.assert_array_equal(own.look(2, number=2)[1], before - 1)


def test_a_part_of_a_turn_that_is_over_waits_for_nobody(asker):
    """The others' parts were answered before the server was killed, so they do not come again."""
    own = asker(together=2)
    _, before = own.look(0)
    own.look(1, trainer=1)
    pushed = [own.push(trainer, 0, trainer) for trainer in (0, 1)]
    dropped = [own.drop(sample, 1, sample - 2) for sample in (2, 3)]
    for reply in (*pushed, *dropped, own.push(7, 0, 1), own.drop(8, 1, 1)):
        assert answer(reply).fields == ()
    np.testing.assert_array_equal(own.look(9)[1], before - 2)


def test_a_server_that_does_not_come_back_refuses_what_it_did_not_read(asker):
    with pytest.raises(WireError, match="gradients of sample 9"):
        answer(asker(num_senders=None).push(9, 0))


def test_keys_that_do_not_add_up_are_refused(asker):
    own = asker()
    own._lengths = own._lengths + 1
    with pytest.raises(WireError, match="expected int64 lengths of 2 tables"):
        answer(own.push(9, 0, with_keys=True))


def test_what_is_done_is_learnt_from_any_two_sides():
    done = DoneBatches()
    done.add(5)
    assert done.count == 1
    done.reach(4)  # 0 to 3
    assert done.count == 5
    done.add(4)
    done.add(4)
    done.add(0)
    assert done.count == 6
    done.reach(3)
    done.add(7)
    assert done.count == 7
    done.reach(8)
    assert done.count == 8


def test_a_batch_that_nobody_trained_on_is_done(asker):
    own = asker()
    own.look(1, number=0)
    answer(own._client.call(SparseVerb.DROP, (1, 0, 0, NO_TURN)))
    assert own.look(2, number=1)[0] == 0
    assert own.look(3, number=2)[0] == 1
    assert own.look(4, number=3, answered=2)[0] == 1
