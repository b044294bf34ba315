"""The log of a process: a line of JSON for each record, on standard error and in the run directory.

Only processes that girih starts have this log. In a user's own process, the user's logging receives the records.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from girih.telemetry.status_file import LOGS, ProcessId, StatusTarget

FILE_BYTES = 1 << 20
"""The size of each of a log's two files, in bytes. When both are full, the older one is deleted."""
_BEGINS = '{"time": "'


class OneLine(logging.Formatter):
    """Formats a record as a JSON line: time, level, role, index, incarnation, logger, message, and any traceback."""

    def __init__(self, who: ProcessId) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._who.role,
            "index": self._who.index,
            "incarnation": self._who.incarnation,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _LogFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drops the record. The code that needs the disk reports a full disk."""


def is_line(text: str) -> bool:
    """Returns whether a line on standard error belongs to a log, and is not a message to the user."""
    return text.startswith(_BEGINS)


@contextmanager
def logging_as(who: ProcessId, place: StatusTarget, *, on_stderr: bool) -> Iterator[None]:
    """Writes the log of this process: records of girih from level "info", in the run directory if there is one.

    Args:
        on_stderr: True if the log is also written to standard error. Use False if it is the user's terminal.
    """
    logger, handlers = logging.getLogger("girih"), list[logging.Handler]()
    if on_stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    if place.run is not None and place.run.is_dir():
        with suppress(OSError):  # without disk space or write permission, the run continues without this file
            (place.run / LOGS).mkdir(exist_ok=True)
            file = place.run / LOGS / f"{who.file_name}.log"
            handlers.append(_LogFile(file, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8"))
    level, propagates = logger.level, logger.propagate
    for handler in handlers:
        handler.setFormatter(OneLine(who))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagates
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
