"""The time by which rows expire: the wall clock when a process starts, then a monotonic clock.

Setting the system clock during training expires no row. A clock that is wrong from the start could expire all rows of
a table that counts age in seconds. Loading is refused in this case.
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
"""Clocks of two hosts may differ by less than this number of seconds without a note."""

Clock = Callable[[], float]


def clock_since(offset_s: float) -> Clock:
    """A clock of seconds since 1970: the monotonic clock, which the processes of a host share, plus ``offset_s``."""
    return lambda: offset_s + time.monotonic()


steady_clock = clock_since(time.time() - time.monotonic())
"""The clock of this process."""


def refuse_expired(
    newest: Mapping[str, int], tables: Iterable[TableSpec], clock: Clock = steady_clock
) -> None:
    """Refuses to load rows if all rows of a table would expire immediately.

    This happens if the clock is wrong, or if training paused for longer than the table keeps unused rows.

    Args:
        newest: maps each table to the time of the last use of any of its rows, in seconds since :data:`EPOCH_S`.

    Raises:
        CheckpointError: all rows of a table would expire. The message names the table, both times and the fix.
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
                f"table {table.name!r}: all of its rows would expire. Their newest use was at {_utc(now - age)}, this host's clock"
                f" says {_utc(now)}, and eviction ttl has seconds = {table.eviction.seconds}. If the clock is wrong, set it. If it is"
                f" right, set seconds to more than {age} to keep the rows, or start a new run without them"
            )


def notes_of_future(newest: Mapping[str, int], clock: Clock = steady_clock) -> list[str]:
    """Returns a note for each table with a row whose last use is later than the clock's time.

    The rows of this table expire later by the difference.
    """
    now = int(clock()) - EPOCH_S
    return [
        f"table {name!r}: its newest use, {_utc(used)}, is {used - now} s ahead of this host's clock, {_utc(now)}. Its rows expire"
        " later by as much. Set the clock if it is wrong"
        for name, used in newest.items()
        if used - now > NOTABLE_S
    ]


def _utc(seconds: int) -> str:
    return f"{datetime.fromtimestamp(EPOCH_S + seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
