"""Strangers at a server: who waits to be heard, who has to make room for others, and what is said of those refused."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from girih.comm.rpc.transport import SilentPeer, Stranger

_LOG = logging.getLogger(__name__)
_MOST_TOLD: Final = 100


class Strangers:
    """All who connected to a server and have not proved that they know the secret.

    Args:
        address: the server's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._until_s: dict[Stranger, float] = {}  # in the order in which they came
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, stranger: Stranger) -> bool:
        return stranger in self._until_s

    def __iter__(self) -> Iterator[Stranger]:
        return iter(list(self._until_s))

    def add(self, stranger: Stranger, patience_s: float) -> None:
        """Takes one in, who has so long to be heard."""
        self._until_s[stranger] = time.monotonic() + patience_s

    def remove(self, stranger: Stranger) -> None:
        """Forgets one."""
        del self._until_s[stranger]

    def late(self) -> list[Stranger]:
        """Those whose time is over."""
        now = time.monotonic()
        return [stranger for stranger, until_s in self._until_s.items() if now > until_s]

    def first_to_leave(self) -> Stranger:
        """The one who waits longest, of the host that most are from: a crowd from there keeps no other host out."""
        crowds = Counter(stranger.origin for stranger in self._until_s)
        crowd = crowds.most_common(1)[0][0]
        return next(stranger for stranger in self._until_s if stranger.origin == crowd)

    def tell(self, stranger: Stranger, why: object) -> None:
        """Says who was refused: the first time for each host, and for so many hosts."""
        origin, said = stranger.origin, "%s: refused a connection from %s, which changes nothing: %s%s"
        known = origin in self._told or len(self._told) >= _MOST_TOLD
        if known or isinstance(why, SilentPeer):
            _LOG.debug(said, self._address, origin, why, "")
            return
        self._told.add(origin)
        others = "there" if len(self._told) < _MOST_TOLD else "anywhere"
        _LOG.warning(said, self._address, origin, why, f"; further ones from {others} are not told")
