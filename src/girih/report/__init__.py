"""A run as people see it: progress while it goes on, a page afterwards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from girih.report.progress import Progress

__all__ = ["Progress", "write_comparison", "write_report"]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """See :func:`girih.report.page.write_report`, which is imported on the first call: Altair is large."""
    from girih.report import page

    return page.write_report(run_dir)


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """See :func:`girih.report.page.write_comparison`."""
    from girih.report import page

    return page.write_comparison(runs, out)
