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
from girih.serving.children import AGAIN_S, let_go, started
from girih.serving.follow import Follower

READY = "ready"

_NICE = 10
"""Answers go ahead of updates on a core that both share."""
LOOK_EVERY_S = 0.1
_LOOK_ELSEWHERE_EVERY_S = 0.25  # each look is two requests
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
        self._instructions = json.dumps({"log": log.root.url, "directory": str(directory)})
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
        let_go(self._process)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look_after(self) -> None:
        while True:
            status, told = self._process.wait(), ""
            while not self._ending.wait(AGAIN_S):
                try:
                    process = self._started()
                except OSError as error:
                    if str(error) != told:
                        told = str(error)
                        self._tell(
                            f"the follower ended with status {status}; cannot start another: {told}; tries again"
                        )
                    continue
                let_go(self._process)
                self._process = process
                self._tell(f"the follower ended with status {status}; started another")
                break
            if self._ending.is_set():
                self._process.kill()  # it may have been started since
                return

    def _started(self) -> subprocess.Popen[str]:
        return started("girih.serving.following", instructions=self._instructions)


def main() -> int:
    """Follows until it is told to end; returns the status of the process."""
    os.nice(_NICE)
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
