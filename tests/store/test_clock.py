"""The time by which rows expire: no step of the wall clock moves it, and rows of which all would expire are refused."""

import time
import uuid

import pytest

from girih.errors import CheckpointError
from girih.store import Shared, Store, remove_arena, state
from girih.store.clock import EPOCH_S, notes_of_future, refuse_expired, steady_clock
from girih.tables import LRU, TTL
from support.store_verbs import contents, group, keys_of, look

DAY_S = 86_400
NOW = 200_000_000  # as rows count it


def clock():
    return EPOCH_S + NOW


def table(seconds=DAY_S):
    return group(eviction=TTL(seconds=seconds)).tables[0]


def test_a_step_of_the_wall_clock_moves_no_time(monkeypatch):
    store = Store(group(eviction=TTL(seconds=60)))
    look(store, *keys_of(1), 1)
    monkeypatch.setattr(time, "time", lambda: 1e11)
    before = time.monotonic()
    assert 0 <= steady_clock() - (before + steady_clock() - time.monotonic()) < 10
    look(store, *keys_of(2), 2)
    assert sorted(contents(store)["ids"].tolist()) == [1, 2]
    assert store.state.rows._clock is steady_clock


def test_memory_that_is_attached_to_goes_on_by_its_own_clock(monkeypatch):
    options = Shared(segment=f"girih-test-{uuid.uuid4().hex[:12]}", reserve_rows=1000)
    spec = group(eviction=TTL(seconds=60))
    try:
        with Store(spec, arena=options) as store:
            look(store, *keys_of(1), 1)
        later = steady_clock() + 3 * DAY_S
        monkeypatch.setattr(
            state, "steady_clock", lambda: later
        )  # that of a process that starts after a step
        with Store(spec, arena=Shared(segment=options.segment, attach=True)) as store:
            look(store, *keys_of(2), 2)
            assert store.counters()["expired"] == 0
            assert store.num_rows == 2
    finally:
        remove_arena(options)


def test_rows_that_would_all_expire_are_refused_with_both_ways_on():
    with pytest.raises(CheckpointError) as caught:
        refuse_expired({"t": NOW - 3 * DAY_S}, [table()], clock)
    told = str(caught.value)
    assert "table 't': all of its rows would expire" in told
    assert "2026-04-30 19:33:20 UTC" in told  # the newest use
    assert "2026-05-03 19:33:20 UTC" in told  # the clock
    assert "seconds = 86400" in told
    assert "set seconds to more than 259200 to keep the rows" in told
    assert "start a new run without them" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("newest", "tables"),
    [
        ({"t": NOW - DAY_S}, [table()]),  # the newest row stays
        ({"t": NOW + 90 * DAY_S}, [table()]),  # ahead of the clock
        ({"t": NOW - 3 * DAY_S}, [table(4 * DAY_S)]),
        ({"other": 0}, [table()]),
        ({}, [table()]),
        ({"t": 0}, group(eviction=TTL(steps=3)).tables),
        ({"t": 0}, group(eviction=LRU(max_rows=3)).tables),
    ],
)
def test_other_rows_are_not_refused(newest, tables):
    refuse_expired(newest, tables, clock)


def test_a_newest_use_ahead_of_the_clock_is_noted_by_how_much():
    (line,) = notes_of_future({"t": NOW + 3600, "u": NOW + 5, "v": NOW - 9}, clock)
    assert "table 't'" in line
    assert "3600 s ahead" in line


@pytest.mark.parametrize("since", [1, 50])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TTL(steps=9), TTL(seconds=9)),
        (LRU(max_rows=9), TTL(seconds=9)),
        (TTL(seconds=9), TTL(steps=9)),
        (TTL(seconds=9), LRU(max_rows=9)),
    ],
)
@pytest.mark.parametrize("verb", ["restore", "inherit"])
def test_rows_that_were_aged_otherwise_begin_their_age_anew(before, after, verb, since):
    store, new = Store(group(eviction=before), clock=clock), Store(group(eviction=after), clock=clock)
    look(store, *keys_of(1, 2), since)
    with store.snapshot() as snapshot:
        getattr(new, verb)([snapshot])
    step = since + 1 if verb == "restore" else 1
    look(new, *keys_of(3), step)
    assert new.counters()["expired"] == 0
    assert sorted(contents(new)["ids"].tolist()) == [1, 2, 3]
    assert set(contents(new)["last_used"][:2].tolist()) <= {NOW, since, 0}
