"""The process of one role: ``python -m girih.cluster.child ROLE``, started by a launcher.

The process receives its role through a pipe, which stays open. When the pipe closes, the process must end: its launcher
closed it, or is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from girih.cluster.roles import RoleName, module_of
from girih.errors import GirihError
from girih.processes.pipe import Pipe, bind_life, from_text
from girih.processes.segments import remove_segments
from girih.telemetry.logs import logging_as
from girih.telemetry.status_file import ProcessId, StatusTarget, StatusWriter

_LOG = logging.getLogger("girih.cluster.child")  # this file is "__main__"
LAST_WORDS_S = 5.0
PARENT = os.getppid()


def main() -> int:
    """Runs the role. Returns the status of the process."""
    bind_life()
    sys.path.append("")  # the working directory, last: it may hold parts of models
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    pipe = Pipe.inherited()
    if pipe is None:
        raise SystemExit("girih: roles are started by girih train")
    try:
        hello = pipe.receive()
    except EOFError:
        return 0
    stop, told = threading.Event(), queue.SimpleQueue[dict[str, Any] | None]()
    hearing = (pipe, stop, told, hello["segments"])
    threading.Thread(target=_until_left_alone, args=hearing, name="girih-parent", daemon=True).start()
    gc.disable()  # no garbage collection during the imports
    importlib.import_module(module_of(RoleName(sys.argv[1])))  # meanwhile the launcher gets ready
    importlib.import_module("girih.kernels.cpu.jit").warm_up()  # this file alone does not load numba
    pipe.unbind_life()
    gc.freeze()  # and later collections skip the imported objects
    gc.enable()
    if (message := told.get()) is None:
        return 0  # the role is not needed after all
    role = pickle.loads(from_text(message["role"]))  # a private pipe from the parent, no socket
    role.incarnation = hello["incarnation"]
    who, place = ProcessId(role.name, role.index, role.incarnation), StatusTarget.from_hello(hello)

    def ready(address: str) -> None:
        _LOG.info("listens at %s", address)
        pipe.send({"address": address, "found": getattr(role, "recovery_note", "")})

    with logging_as(who, place, on_stderr=True):
        _LOG.info("began as process %d", os.getpid())
        try:
            with StatusWriter(who, role.stats, place):
                role.run(ready, stop)
        except Exception as error:
            if not stop.is_set():
                _LOG.exception("ends with an error")
                text = str(error) if isinstance(error, GirihError) else traceback.format_exc()
                pipe.send({"error": f"{type(error).__name__}: {text}"})
                return 1
        finally:
            _remove_if_alone(hello["segments"])
        _LOG.info("ends")
    return 0


def _until_left_alone(
    pipe: Pipe, stop: threading.Event, messages: queue.SimpleQueue[dict[str, object] | None], segments: str
) -> None:
    with contextlib.suppress(EOFError):
        while True:
            messages.put(pipe.receive())
    messages.put(None)
    stop.set()
    threading.Event().wait(LAST_WORDS_S)
    _remove_if_alone(segments)
    os._exit(1)  # something hangs or takes too long, and nobody else can end it


def _remove_if_alone(segments: str) -> None:
    """Removes the shared memory of the whole run if the launcher, which normally removes it, is gone."""
    if os.getppid() != PARENT:
        remove_segments(segments)


if __name__ == "__main__":
    status = main()
    gc.freeze()  # see girih.cli.main
    sys.exit(status)
