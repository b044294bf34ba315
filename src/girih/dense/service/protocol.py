"""Requests of replicas to dense servers, each of which has a range of the flat parameters.

P numbers of a server's range of the parameters, and Q of that of the buffers; where several servers of a group have parameters, those of each are a vector of their own, averaged
with the same server's of other groups. A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise


class DenseVerb(IntEnum):
    """Requests, with the integers and arrays of each:

    BEGIN: (vector,); float32[P], the parameters of all replicas → ().
    AVERAGE: (replica, vector); float32[P], its parameters → (); float32[P], what it is to add to them: zeros where some have left.
    LEAVE: (replica, vector): rounds do not wait for it, until all replicas have met → ().
    MEET: (replica, vector); float32[P], its parameters, float32[Q], its buffers → (), once all replicas have met; float32[P], the
        model to evaluate and save, float32[Q], the mean of the buffers.
    STATS: (with spans) → text.
    """

    BEGIN = 1
    AVERAGE = 2
    LEAVE = 3
    MEET = 4
    STATS = 5


def ranges(num_numbers: int, num_servers: int) -> list[slice]:
    """The range of the flat parameters of each server: of near-equal length, in order."""
    bounds = [num_numbers * place // num_servers for place in range(num_servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
