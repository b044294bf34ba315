"""OpenMP's idle threads, told to sleep soon: cores are for the other half meanwhile.

GNU OpenMP, which PyTorch computes with on Linux, has threads that wait for their next loop spin for milliseconds
unless told otherwise: as long as a whole look-up takes, on cores that the shards' threads want
(docs/decisions/0009-idle-threads-sleep.md).
"""

import os
import sys

SPINS = "GOMP_SPINCOUNT"
FEW_SPINS = 20_000
"""About 0.2 ms: longer than what lies between two of a network's layers, shorter than a look-up."""


def sleep_soon() -> None:
    """Sets how long idle threads spin, unless the environment says it or PyTorch, which reads it, is there already."""
    if "torch" not in sys.modules and SPINS not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ[SPINS] = str(FEW_SPINS)


def spins() -> str:
    """The setting of spins in this process's environment, in words."""
    if SPINS in os.environ:
        return f"{SPINS}={os.environ[SPINS]}"
    policy = os.environ.get("OMP_WAIT_POLICY")
    return f"OMP_WAIT_POLICY={policy}" if policy else "as OpenMP has them: import girih before torch"
