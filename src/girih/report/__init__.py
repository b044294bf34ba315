"""What a run looks like: progress while it runs, a page afterwards."""

from __future__ import annotations

from girih.report.page import write_report
from girih.report.progress import Progress

__all__ = ["Progress", "write_report"]
