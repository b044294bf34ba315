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
from pathlib import Path

from girih.checkpoint.storage import Storage
from girih.errors import GirihError, RoleError
from girih.publishing.log import Log
from girih.serving.children import AGAIN_S, release_input, start_process
from girih.serving.follow import Follower
from girih.serving.limits import Notify

READY = "ready"

_NICE = 10
"""Answers go ahead of updates on a core that both share."""
LOOK_EVERY_S = 0.1
_LOOK_ELSEWHERE_EVERY_S = 0.25  # each look is two requests
_REFUSED = 2


class Following(contextlib.AbstractContextManager["Following"]):
    """A follower as a process of its own, which is started again where it ends; entered, it has a version.

    Args:
        log: the address. directory: for it alone. notify: receives a line where it is started again; what it says itself goes to
            standard error.

    Raises:
        RoleError: it cannot begin.
    """

    def __init__(self, log: Log, directory: Path, notify: Notify) -> None:
        self._instructions = json.dumps({"log": log.root.url, "directory": str(directory)})
        self._notify, self._ending = notify, threading.Event()
        self._process = self._start_follower()
        try:
            if self._process.stdout.readline().strip() != READY:  # type: ignore[union-attr]
                status = self._process.wait()
                raise RoleError(f"serve: the follower ended with status {status}; see its message above")
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._supervise, name="girih-follower", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._ending.set()
        self._process.kill()
        self._process.wait()
        release_input(self._process)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _supervise(self) -> None:
        while True:
            status, reason = self._process.wait(), ""
            while not self._ending.wait(AGAIN_S):
                try:
                    process = self._start_follower()
                except OSError as error:
                    if str(error) != reason:
                        reason = str(error)
                        self._notify(
                            f"the follower ended with status {status}; cannot start another: {reason}; tries again"
                        )
                    continue
                release_input(self._process)
                self._process = process
                self._notify(f"the follower ended with status {status}; started another")
                break
            if self._ending.is_set():
                self._process.kill()  # it may have been started since
                return

    def _start_follower(self) -> subprocess.Popen[str]:
        return start_process("girih.serving.following", instructions=self._instructions)


def main() -> int:
    """Follows until it is told to end; returns the status of the process."""
    os.nice(_NICE)
    instructions = json.loads(sys.stdin.readline())
    directory = Path(instructions["directory"])
    threading.Thread(target=_end_when_closed, name="girih-parent", daemon=True).start()
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


def notify(line: str) -> None:
    print(f"girih: follow: {line}", file=sys.stderr, flush=True)


def _end_when_closed() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
