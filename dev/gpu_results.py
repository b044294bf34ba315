"""A pytest plugin for ``make gpu``: appends one line to the file GPU_TESTS after each test.

A line is written at once, so a signal loses no finished test.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

LONGEST = 300
"""Characters of an error that a line keeps."""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the writer in the process that collects all results, and in no worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(os.environ["GPU_TESTS"]), os.environ["GPU_STAGE"]))


class Writer:
    """Writes the outcome of each test: that of its call, or that of a setup or teardown that did not pass.

    A file that cannot be imported has a line as well.
    """

    def __init__(self, file: Path, stage: str) -> None:
        self.file, self.stage = file, stage

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Appends a line for a test."""
        if report.when == "call" or not report.passed:
            self._write(report, seconds=round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Appends a line for a file that failed."""
        if report.failed:
            self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport, **figures: float) -> None:
        line = {"stage": self.stage, "test": report.nodeid, "outcome": report.outcome, **figures}
        if not report.passed:
            line["reason"] = " ".join(_reason(report).split())[-LONGEST:]
        with self.file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)
