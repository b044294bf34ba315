"""The time by which rows expire: the wall clock as a process starts, and a monotonic clock from then on.

A clock that is set while training goes on expires nothing. One that is wrong from the start would expire all rows of a table that counts its
age in seconds, so that loading them is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from girih.errors import CheckpointError
from girih.store.spec import TableSpec
from girih.tables import TTL

EPOCH_S = 1_577_836_800
"""Rows count seconds from 2020, so that they fit int32 until 2088."""
NOTABLE_S = 60
"""Clocks of hosts may differ by less without a word."""

Clock = Callable[[], float]


def clock_since(offset_s: float) -> Clock:
    """A clock of seconds since 1970 that is ``offset_s`` ahead of the monotonic one, which the processes of a host share."""
    return lambda: offset_s + time.monotonic()


steady_clock = clock_since(time.time() - time.monotonic())
"""The clock of this process."""


def refuse_expired(
    newest: Mapping[str, int], tables: Iterable[TableSpec], clock: Clock = steady_clock
) -> None:
    """Refuses rows of which a table would lose all at once: the clock is wrong, or training paused for longer than rows are kept.

    Args:
        newest: table → second of the newest use of its rows, as rows count it.

    Raises:
        CheckpointError: names the table, both times, and what to do in either case.
    """
    now = int(clock()) - EPOCH_S
    for table in tables:
        age = now - newest.get(table.name, now)
        if (
            isinstance(table.eviction, TTL)
            and table.eviction.seconds is not None
            and age > table.eviction.seconds
        ):
            raise CheckpointError(
                f"table {table.name!r}: all of its rows would expire: their newest use was at {_utc(now - age)}, this host's clock"
                f" says {_utc(now)}, and eviction ttl has seconds = {table.eviction.seconds}; if the clock is wrong, set it; if it is"
                f" right, set seconds to more than {age} to keep the rows, or start a new run without them"
            )


def notes_of_future(newest: Mapping[str, int], clock: Clock = steady_clock) -> list[str]:
    """Lines on tables whose newest use lies ahead of the clock: their rows expire later by as much."""
    now = int(clock()) - EPOCH_S
    return [
        f"table {name!r}: its newest use, {_utc(used)}, is {used - now} s ahead of this host's clock, {_utc(now)}; its rows expire"
        " later by as much; set the clock if it is wrong"
        for name, used in newest.items()
        if used - now > NOTABLE_S
    ]


def _utc(seconds: int) -> str:
    return f"{datetime.fromtimestamp(EPOCH_S + seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
