"""The process that follows a log for the workers of a server: ``python -m girih.serving.following``.

It ends when its input is closed, so it does not outlive its parent. When it is restarted, it continues with the files
in its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from girih.checkpoint.storage import Storage
from girih.errors import GirihError
from girih.publishing.log import Log
from girih.serving.children import READY, ChildProcess, end_with_parent
from girih.serving.follow import Follower
from girih.serving.limits import Notify

_NICE = 5
"""The priority of the process. Answers have priority over updates on a shared core, and updates get a quarter of it."""
LOOK_EVERY_S = 0.1
_LOOK_ELSEWHERE_EVERY_S = 0.25  # each look is two requests
_REFUSED = 2


class Following(contextlib.AbstractContextManager["Following"]):
    """A follower as a separate process, restarted when it ends. On entry it has a version.

    Args:
        log: the address of the log.
        directory: a directory that no other follower uses.
        notify: receives a line at each restart. The follower's own lines go to standard error.

    Raises:
        RoleError: the follower cannot begin.
    """

    def __init__(self, log: Log, directory: Path, notify: Notify) -> None:
        instructions = json.dumps({"log": log.root.url, "directory": str(directory)})
        self._child = ChildProcess("the follower", ["girih.serving.following"], instructions, notify)
        self._ending = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="girih-follower", daemon=True)
        try:
            self._child.wait_until_ready()
        except BaseException:
            self._child.close(0.0)
            raise
        self._supervisor.start()

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._supervisor.join()
        self._child.close(0.0)

    def _supervise(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            self._child.look()


def main() -> int:
    """Follows a log until it must end. Returns the status of the process."""
    _yield_to_servers()
    instructions = json.loads(sys.stdin.readline())
    directory = Path(instructions["directory"])
    end_with_parent(sys.stdin)
    try:
        log = Log(Storage(instructions["log"]))
        follower = Follower(log, directory, notify)
        is_ready = False
        while True:
            follower.poll()
            if follower.current is not None and not is_ready:
                is_ready = True
                print(READY, flush=True)
            time.sleep(LOOK_EVERY_S if log.root.local is not None else _LOOK_ELSEWHERE_EVERY_S)
    except KeyboardInterrupt:
        return 0
    except GirihError as error:
        notify(" ".join(str(error).split()))
        return _REFUSED


def _yield_to_servers() -> None:
    """Lets servers run before this process if both need a core.

    Linux may share cores by sessions first. Then niceness only counts within a session, and a session has a niceness of
    its own.
    """
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # another system, or a group of its own in a container
        Path("/proc/self/autogroup").write_text(str(_NICE))


def notify(line: str) -> None:
    print(f"girih: follow: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
