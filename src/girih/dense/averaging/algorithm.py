"""Interface of averaging algorithms: arithmetic on flat parameters.

Shapes: R replicas of a round, P numbers of all parameters, or of a range of them.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.dense.averaging.bmuf import BMUF
from girih.dense.averaging.easgd import EASGD
from girih.dense.averaging.ma import MA


class Averaging(Protocol):
    """One algorithm, with what it keeps of the rounds so far.

    Attributes:
        together: whether a round takes the parameters of all replicas; else each replica has rounds of its own.
    """

    together: ClassVar[bool]

    def begin(self, model: NDArray[np.float32]) -> None:
        """Begins anew, float32[P]: all replicas have these parameters."""
        ...

    def round(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """One round, float32[R, P]; returns float32[R, P], what each replica is to add to its parameters."""
        ...

    def model(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """The model that is evaluated and saved, float32[P], while the replicas have float32[R, P]; nothing moves."""
        ...


BY_NAME: dict[str, type[EASGD | MA | BMUF]] = {"easgd": EASGD, "ma": MA, "bmuf": BMUF}
"""Algorithms by their name in ``[strategy]``: each is made of the number of replicas and the elastic rate, or None."""
