"""The process of one worker of a server: ``python -m girih.serving.worker DESCRIPTOR``, as :mod:`girih.serving.server` starts it."""

from __future__ import annotations

import gc
import signal
import sys

from girih.dense.accel import process_settings
from girih.errors import GirihError
from girih.serving.server import worker


def main() -> int:
    """Answers until it is told to end; returns the status of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    process_settings.defer_dynamo()
    try:
        worker(int(sys.argv[1]), sys.stdin)
    except KeyboardInterrupt:
        return 0
    except GirihError as error:
        print(f"girih: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    gc.freeze()  # see girih.cli.main
    sys.exit(status)
