"""The process of one role: ``python -m girih.cluster.child ROLE``, as a launcher starts it.

The role comes through standard input, which then stays open: its end means that whoever started this is gone.
What is to be told goes to standard output, one JSON object per line.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
import threading
import traceback

from girih.cluster.launchers.local import INCARNATION, SEGMENTS
from girih.cluster.roles import MODULES, RoleName
from girih.cluster.segments import remove_segments
from girih.errors import GirihError

LAST_WORDS_S = 5.0
PARENT = os.getppid()


def main() -> int:
    """Runs the role; returns the status of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started this decides when it ends
        signal.signal(number, signal.SIG_IGN)
    telling = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is not for the one who started this
    importlib.import_module(MODULES[RoleName(sys.argv[1])])  # while whoever started this gets ready
    importlib.import_module("girih.kernels.cpu.jit").warm_up()  # of itself, this file loads no numba
    length = int.from_bytes(sys.stdin.buffer.read(8), "little")
    if not length:
        return 0  # it is not needed after all
    role = pickle.loads(sys.stdin.buffer.read(length))  # a private pipe from the parent, no socket
    role.incarnation = int(os.environ.get(INCARNATION, "0"))
    stop = threading.Event()
    threading.Thread(target=_until_left_alone, args=(stop,), name="girih-parent", daemon=True).start()

    def ready(address: str) -> None:
        print(json.dumps({"address": address}), file=telling)

    try:
        role.run(ready, stop)
    except Exception as error:
        if not stop.is_set():
            text = str(error) if isinstance(error, GirihError) else traceback.format_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {text}"}), file=telling)
            return 1
    return 0


def _until_left_alone(stop: threading.Event) -> None:
    while os.read(0, 1 << 12):  # not of sys.stdin, which a thread that waits in it keeps from being closed
        pass
    stop.set()
    threading.Event().wait(LAST_WORDS_S)
    if os.getppid() != PARENT:  # whoever started this is gone, and does not do it
        remove_segments(os.environ.get(SEGMENTS, ""))
    os._exit(1)  # something hangs, or takes too long, and nobody is there to end it


if __name__ == "__main__":
    sys.exit(main())
