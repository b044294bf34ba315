"""Meetings and waits as plain objects, without processes and threads."""

import random

import pytest

from girih.comm.registry import LocalRegistry
from girih.comm.service import Meeting
from girih.errors import WireError, WireTimeout


def test_the_last_member_to_come_completes_a_meeting_and_all_are_in_order():
    meeting = Meeting(4)
    for _ in range(3):
        members = list(range(4))
        random.Random(0).shuffle(members)
        for number, member in enumerate(members):
            meeting.waiting[member] = member * 10
            meeting.waiting[member] = member  # one that comes again replaces what it said
            assert meeting.is_complete == (number == 3)
        assert meeting.end() == [0, 1, 2, 3]
        assert not meeting.is_complete
        assert meeting.end() == []


def test_who_is_absent_is_not_waited_for():
    meeting = Meeting(3)
    meeting.waiting[2] = "two"
    meeting.absent.add(0)
    assert not meeting.is_complete
    meeting.absent |= {1, 2}  # one that said that it leaves may still wait
    assert meeting.is_complete
    assert meeting.end() == ["two"]
    assert meeting.is_complete  # until the absent are expected again
    meeting.absent.clear()
    assert not meeting.is_complete


def test_a_wait_is_done_once_its_last_key_is_there_in_whatever_order_they_come():
    registry = LocalRegistry()
    waits = [registry.begin_wait(keys) for keys in ("ab", "ba", "cab", ())]
    done = lambda: [wait.there.done() for wait in waits]  # noqa: E731
    assert done() == [False, False, False, True]
    registry.set("b", "1")
    assert done() == [False, False, False, True]
    registry.set("a", "1")
    assert done() == [True, True, False, True]
    registry.delete("a")
    registry.set("c", "1")
    assert not waits[2].there.done()
    registry.set("a", "2")
    assert all(done())
    assert not registry.entries._waits


def test_a_wait_that_is_ended_is_forgotten_and_all_fail_once_the_registry_is_closed():
    registry = LocalRegistry()
    gone, other = registry.begin_wait(["never"]), registry.begin_wait(["never"])
    registry.end_waits([gone])
    with pytest.raises(WireTimeout, match="never: not in the registry after 0 s"):
        registry.wait(["never"], 0.0)
    assert list(registry.entries._waits.values()) == [[other]]
    registry.close()
    assert not gone.there.done()
    with pytest.raises(WireError, match="closed"):
        other.there.result(0)
    with pytest.raises(WireError, match="closed"):
        registry.wait(["never"])
    with pytest.raises(WireError, match="expected texts"):
        registry.begin_wait([["a"]])
