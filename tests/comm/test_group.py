"""What trainers tell each other: real processes, and one alone."""

import os
import socket
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from companions import together
from girih.comm.group import TrainerGroup, process_group

SIZE = 3
ARRAYS = {"scores": np.float64, "labels": np.int8, "nothing": np.float32}


def talk(ranks):
    """All there is to say, in turn."""
    warnings.simplefilter("error")  # in this process, as in that of the tests
    told, rank = {}, ranks.rank
    told["first"] = ranks.first
    told["sum"] = ranks.sum([rank, 2.0**-40 * rank, 1e300 * (rank == 1)])
    told["largest"] = ranks.largest([rank, -rank, float("-inf")])
    told["agree"] = [ranks.vote(0.5 * rank), ranks.vote(1.0, refusing=rank == 2), ranks.stopping]
    told["any"] = [ranks.any(rank == 1), ranks.any(False)]
    value = {"a": [1, "ü", None], "b": 0.1}
    told["broadcast"] = [ranks.broadcast(v if ranks.first else "not heard") for v in (value, None, "", [])]
    told["gather"] = [ranks.gather(v) for v in ({"rank": rank}, "x" * rank, None)]
    arrays = {name: np.full((rank, 2), rank, dtype) for name, dtype in ARRAYS.items()}
    arrays["nothing"] = np.empty((0, 3), np.float32)
    gathered = ranks.gather_arrays({**arrays, "turned": np.arange(6).reshape(2, 3).T})
    told["arrays"] = gathered and [
        {name: [array.dtype.str, array.tolist(), list(array.shape)] for name, array in each.items()}
        for each in gathered
    ]
    # rank r sends r numbers to rank 0, r + 1 to rank 1, none to itself
    counts = [[0 if to == of else of + to for to in range(ranks.size)] for of in range(ranks.size)]
    flat = torch.arange(sum(counts[rank]), dtype=torch.float32) + 100 * rank
    received = ranks.exchange(flat, counts[rank], [counts[of][rank] for of in range(ranks.size)])
    told["exchange"] = received.tolist()
    told["numbers"] = [ranks.next_number(), ranks.next_number()]
    ranks.put(f"note/{rank}", f"of {rank}")
    ranks.barrier()
    told["notes"] = [ranks.take(f"note/{(rank + 1) % ranks.size}") for _ in range(2)]
    told["stop"] = stop(ranks)
    told["pause"] = pause(ranks)
    told["meetings"] = meet(ranks)
    told["parts"] = part(ranks)
    return told


def part(ranks):
    """Two parts of the group beside the whole: ranks 2 and 0 in that order, and rank 1 alone."""
    own = ranks.split([1] if ranks.rank == 1 else [2, 0])
    other = ranks.split([0, 1])
    whole = ranks.sum([1.0])
    return [
        [
            own.rank,
            own.size,
            own.sum([ranks.rank]),
            own.broadcast(f"of {ranks.rank}"),
            own.gather(ranks.rank),
        ],
        other and other.sum([10.0 * ranks.rank + 1]),
        whole,
    ]


def stop(ranks):
    """In step: a stop is known once all agree, and to all in the same step."""
    if ranks.rank == 1:
        ranks.request_stop()
    seen = [ranks.stopping, ranks.stop_requested]
    ranks.poll_stop()  # says nothing to trainers in step
    seen += [ranks.stopping, ranks.rendezvous()]
    ranks.vote(0.0)
    seen += [ranks.stopping]
    ranks.forget_stop()
    ranks.vote(0.0)
    seen += [ranks.stopping, ranks.stop_requested, ranks.stop_together()]
    if ranks.rank == 2:
        ranks.request_stop()
    seen += [ranks.stop_together(), ranks.stopping]
    ranks.forget_stop()
    ranks.finish()  # returns at once
    return seen


def pause(ranks):
    """The first one has all pause; a stop that is asked for meanwhile, of any, is another matter, and is not forgotten."""
    if ranks.first:
        ranks.request_pause()
    seen = [ranks.stopping]
    ranks.vote(0.0)
    seen += [ranks.stopping, ranks.agree_on_pause()]
    if ranks.rank == 1:
        ranks.request_stop()
    seen += [ranks.agree_on_pause()]
    ranks.end_pause()
    seen += [ranks.stopping]
    ranks.vote(0.0)
    seen += [ranks.stopping, ranks.agree_on_pause()]
    ranks.forget_stop()
    ranks.vote(0.0)
    return [*seen, ranks.stopping]


def meet(ranks):
    """Out of step: rank 2 has done its last step while others come to a meeting; then rank 0 is asked to stop."""
    ranks.set_unsynchronized()
    seen = []
    if ranks.rank == 2:
        ranks.finish()
        seen += ["left", ranks.stopping]
    else:
        seen += [ranks.rendezvous(), ranks.rendezvous()]  # two meetings that one of them would miss
        ranks.finish()
        seen += ["left", ranks.stopping]
    ranks.barrier()
    if ranks.first:
        ranks.request_stop()
        ranks.poll_stop()
        ranks.finish()
        seen.append(ranks.stopping)
    else:
        while not ranks.stopping:
            ranks.poll_stop()  # between two steps
        seen.append(ranks.rendezvous() if ranks.rank == 1 else None)  # off: one leaves to stop
        ranks.finish()
    ranks.forget_stop()
    ranks.barrier()
    ranks.poll_stop()
    seen = [*seen, ranks.stopping]
    ranks.set_unsynchronized(False)
    return seen


@pytest.fixture(scope="module")
def told():
    return together(talk, SIZE)


def test_numbers_are_summed_in_float64_and_the_largest_is_found(told):
    for rank, each in enumerate(told):
        assert each["first"] == (rank == 0)
        assert each["sum"] == [3.0, 3 * 2.0**-40, 1e300]
        assert each["largest"] == [2.0, 0.0, float("-inf")]
        assert each["any"] == [True, False]


def test_ranks_agree_on_a_steps_loss_and_on_who_refuses(told):
    assert [each["agree"] for each in told] == [[[1.5, 0], [3.0, 1], False]] * SIZE


def test_what_the_first_has_reaches_all(told):
    assert [each["broadcast"] for each in told] == [[{"a": [1, "ü", None], "b": 0.1}, None, "", []]] * SIZE


def test_what_each_has_reaches_the_first(told):
    assert told[0]["gather"] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], ["", "x", "xx"], [None] * 3]
    assert [each["gather"] for each in told[1:]] == [[None] * 3] * 2
    assert [each["arrays"] for each in told[1:]] == [None, None]
    for rank, arrays in enumerate(told[0]["arrays"]):
        assert arrays["scores"] == ["<f8", [[rank, rank]] * rank, [rank, 2]]
        assert arrays["labels"] == ["|i1", [[rank, rank]] * rank, [rank, 2]]
        assert arrays["nothing"] == ["<f4", [], [0, 3]]
        assert arrays["turned"] == ["<i8", [[0, 3], [1, 4], [2, 5]], [3, 2]]


def test_parts_of_a_tensor_go_to_their_ranks(told):
    assert [each["exchange"] for each in told] == [
        [100.0, 200.0, 201.0],  # one number of rank 1, two of rank 2
        [0.0, 202.0, 203.0, 204.0],
        [1.0, 2.0, 101.0, 102.0, 103.0],
    ]


def test_notes_are_taken_once_and_numbers_count_alike(told):
    assert [each["notes"] for each in told] == [["of 1", None], ["of 2", None], ["of 0", None]]
    assert [each["numbers"] for each in told] == [[1, 2]] * SIZE


def test_trainers_in_step_stop_together_and_may_go_on(told):
    for rank, each in enumerate(told):
        asked, *seen = each["stop"][1], each["stop"][0], *each["stop"][2:]
        assert asked == (rank == 1)
        assert seen == [False, False, True, True, False, False, False, True, True]


def test_trainers_pause_together_but_for_a_stop(told):
    assert [each["pause"] for each in told] == [[False, True, True, False, False, True, False, False]] * SIZE


def test_trainers_out_of_step_meet_leave_and_heed(told):
    assert told[0]["meetings"] == [False, False, "left", False, True, False]
    assert told[1]["meetings"] == [False, False, "left", False, False, False]
    assert told[2]["meetings"] == ["left", False, None, False]


def test_a_group_is_split_into_parts_that_number_their_own_ranks(told):
    assert told[0]["parts"] == [[1, 2, [2.0], "of 2", None], [12.0], [3.0]]
    assert told[1]["parts"] == [[0, 1, [1.0], "of 1", [1]], [12.0], [3.0]]
    assert told[2]["parts"] == [[0, 2, [2.0], "of 2", [2, 0]], None, [3.0]]


def abort(ranks):
    """Rank 3 never comes to a ring of four; rank 1 aborts from another thread."""
    part = ranks.split([0, 1, 2, 3])
    took = []
    if ranks.rank == 1:
        threading.Timer(0.3, ranks.abort).start()
    for group, late in ((ranks, ranks.rank == 3), (part, False)):
        if late:
            ranks.lost.wait(30)
        start = time.monotonic()
        try:
            group.all_reduce(torch.ones(1 << 16))
        except RuntimeError as error:
            took.append([time.monotonic() - start, "gloo" in str(error)])
    ranks.close()
    return [ranks.lost.is_set(), took, dist.is_initialized()]


def test_a_group_that_is_aborted_raises_everywhere_at_once():
    for lost, took, initialized in together(abort, 4, barrier=False):
        assert lost
        assert len(took) == 2
        assert all(seconds < 5 for seconds, _ in took), took
        assert all(named for _, named in took)
        assert not initialized


def test_looking_through_sockets_leaves_no_descriptor():
    before = os.listdir("/dev/fd")
    with socket.socket():
        assert len(list(process_group._sockets())) >= 1
    assert os.listdir("/dev/fd") == before


def test_nothing_listens_but_on_loopback():
    for ports in together(listening, 2):
        assert ports
        assert {host for host, _ in ports} == {"127.0.0.1"}


def listening(ranks):
    return [
        list(each.getsockname())
        for each in process_group._sockets()
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def test_one_alone_hears_itself():
    ranks = TrainerGroup()
    assert ranks.first
    assert ranks.sum([1.0, 2.5]) == [1.0, 2.5]
    assert ranks.largest([1.0]) == [1.0]
    assert ranks.vote(0.25, refusing=True) == (0.25, 1)
    assert ranks.broadcast({"a": 1}) == {"a": 1}
    assert ranks.gather("x") == ["x"]
    arrays = {"a": np.arange(3)}
    assert ranks.gather_arrays(arrays) == [arrays]
    assert ranks.exchange(torch.arange(3), [3], [3]).tolist() == [0, 1, 2]
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.take("note") is None
    thread = threading.Thread(target=ranks.request_stop)  # as a signal handler, or a callback
    thread.start()
    thread.join()
    assert ranks.stopping
    assert ranks.stop_requested
    ranks.forget_stop()
    assert not ranks.stopping
    ranks.finish()
    ranks.barrier()
    ranks.close()


def closed_groups(ranks):
    """Threads that wait for an abort: while three parts are open, and once they are closed."""

    def watching():
        return sum(thread.name == "girih-abort" for thread in threading.enumerate())

    before = watching()
    parts = [ranks.split([0, 1]) for _ in range(3)]
    opened = watching() - before
    for part in parts:
        part.close()
    end_s = time.monotonic() + 20
    while watching() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    return [opened, watching() - before]


def test_a_group_that_is_closed_leaves_no_thread():
    assert together(closed_groups) == [[3, 0], [3, 0]]
