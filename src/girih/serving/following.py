"""The process that follows a log for the workers of a server: ``python -m girih.serving.following``.

It ends when its input is closed, so that it does not outlive who started it; started again, it goes on with what lies in its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from girih.checkpoint.storage import Storage
from girih.errors import GirihError, RoleError
from girih.publishing.log import Log
from girih.serving.follow import Follower

READY = "ready"

LOOK_EVERY_S = 0.1
_LOOK_ELSEWHERE_EVERY_S = 0.25  # each look is two requests
_AGAIN_S = 1.0
_REFUSED = 2


class Following(contextlib.AbstractContextManager["Following"]):
    """A follower as a process of its own, which is started again where it ends; entered, it has a version.

    Args:
        log: the address. directory: for it alone. tell: receives a line where it is started again; what it says itself goes to
            standard error.

    Raises:
        RoleError: it cannot begin.
    """

    def __init__(self, log: Log, directory: Path, tell: Callable[[str], None]) -> None:
        self._told = json.dumps({"log": log.root.url, "directory": str(directory)})
        self._tell, self._ending = tell, threading.Event()
        self._process = self._started()
        try:
            if self._process.stdout.readline().strip() != READY:  # type: ignore[union-attr]
                status = self._process.wait()
                raise RoleError(f"serve: the follower ended with status {status}; see its message above")
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._look_after, name="girih-follower", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._ending.set()
        self._process.kill()
        self._process.wait()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look_after(self) -> None:
        while True:
            status = self._process.wait()
            if self._ending.wait(_AGAIN_S):
                return
            self._tell(f"the follower ended with status {status}; started another")
            self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "girih.serving.following"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # signals of the terminal reach who looks after it
        )
        process.stdin.write(self._told + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return process


def main() -> int:
    """Follows until it is told to end; returns the status of the process."""
    given = json.loads(sys.stdin.readline())
    directory = Path(given["directory"])
    threading.Thread(target=_until_closed, name="girih-parent", daemon=True).start()
    try:
        log = Log(Storage(given["log"]))
        follower = Follower(log, directory, _say)
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
        _say(" ".join(str(error).split()))
        return _REFUSED


def _say(line: str) -> None:
    print(f"girih: follow: {line}", file=sys.stderr, flush=True)


def _until_closed() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
