"""A progress bar in the output of a notebook's cell, which replaces itself."""

from __future__ import annotations

import html
import importlib
import time
from typing import Any

EVERY_S = 0.2


class NotebookBar:
    """Shows a bar and a line of values; IPython's own display, without widgets.

    Args:
        total: of what :meth:`show` counts; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, completed: int, done: str, values: str, *, last: bool = False) -> None:
        """Replaces what is shown, at most five times a second unless it is the last time."""
        now = time.monotonic()
        if not last and self._handle is not None and now - self._shown_at < EVERY_S:
            return
        self._shown_at = now
        display: Any = importlib.import_module("IPython.display").display
        most = "" if self._total is None else f' max="{self._total}" value="{min(completed, self._total)}"'
        page = f"<progress{most}></progress> {html.escape(done)} · {html.escape(values)}"
        bundle = {"text/plain": f"{done} · {values}", "text/html": page}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def end(self) -> None:
        """Leaves what is shown; what comes next is shown below it."""
        self._handle = None
