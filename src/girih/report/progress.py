"""Progress of a run: a live bar in a terminal or a notebook, otherwise an occasional plain line."""

from __future__ import annotations

import html
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from girih.config.train import RECORDED
from girih.report.text import DASH, count, fraction, is_number, percent, short, size
from girih.runs.callbacks import Callback, Record, number_of

EVERY_S = 0.2


class NotebookBar:
    """Shows a bar and a line of values with IPython's own display, without widgets.

    Args:
        total: the final count of :meth:`show`; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, completed: float, done: str, values: str, *, last: bool = False) -> None:
        """Replaces the displayed bar and line, at most five times a second. The last call always shows."""
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
        """Keeps the current display. Later output appears below it."""
        self._handle = None


_BAR_WIDTH = 26  # the minimum width of the share and the bar; the values take the rest


class Progress(Callback):
    """Shows the records of a run as they arrive. A context manager and a callback.

    Args:
        total_examples: the number of examples that the whole run trains on; None if unknown.
        console: the output; standard error by default. Its ``is_terminal`` and ``is_jupyter`` decide between bar and
            lines.
        every_s: seconds between two plain lines. The first record and the last are always shown.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        total_examples: int | None,
        *,
        console: Console | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._total = total_examples
        self._every_s = every_s
        self._clock = clock
        self._started: tuple[float, float] | None = None  # clock and examples at the first record
        self._printed_at: float | None = None
        self._unprinted: Record | None = None
        self._bar: Bar | None = None
        self._notebook = NotebookBar(total_examples) if self._console.is_jupyter else None
        self._progressive: Record = {}
        if self._console.is_terminal:
            fill, keep = Column(ratio=1, min_width=8), Column(no_wrap=True)
            done, values = (
                TextColumn(f"{{task.fields[{name}]}}", table_column=keep) for name in ("done", "values")
            )
            self._bar = Bar(
                done, BarColumn(None, table_column=fill), values, console=self._console, expand=True
            )
            self._task = self._bar.add_task("", total=total_examples, done="", values="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._notebook is not None:
            if self._unprinted is not None:
                self._show(self._notebook, self._unprinted, last=True)
            self._notebook.end()
        elif self._unprinted is not None:
            self._print(self._unprinted)

    def update(self, record: Record) -> None:
        """Shows a training record: step, examples, loss, samples_per_s, rows, hit_rate.

        Leaves out missing values.
        """
        now = self._clock()
        if self._started is None:
            self._started = now, number_of(record, "examples")
        if self._bar is not None:
            values, room = "", self._console.width - _BAR_WIDTH
            for value, unit in self._parts(record):
                room -= len(f"  {value} {unit}")
                if room >= 0:
                    values += f"  [bold]{value}[/] {unit}"
            examples = number_of(record, "examples")
            self._bar.update(
                self._task, completed=examples, done=self._share(examples), values=values.strip()
            )
        elif self._notebook is not None:
            self._unprinted = record
            self._show(self._notebook, record)
        elif self._printed_at is None or now - self._printed_at >= self._every_s:
            self._print(record)
        else:
            self._unprinted = record

    def message(self, text: str) -> None:
        """Shows a permanent line of text above the bar."""
        self._console.print(Text(text), soft_wrap=True)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Shows the plan: micro-batches, the owner of each feature, the bytes per step.

        If another strategy may send less, the line shows its bytes too.
        """
        predicted = plan["predicted"]
        if cut := predicted.get("micro_batches"):
            self.message(f"micro-batches: {plan['schedule']['micro_batches']} ({cut['why']})")
        if not plan["placement"] or "bytes_per_step" not in predicted:
            return
        owners: dict[int, list[str]] = {}
        for feature, rank in plan["placement"].items():
            owners.setdefault(rank, []).append(feature)
        shown = []
        for rank, names in sorted(owners.items()):
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            shown.append(f"{rank} {', '.join(names[:6])}{more}")
        self.message(f"features by trainer: {'; '.join(shown)}; upper network: {predicted['dense']}")
        own, other = predicted["bytes_per_step"], predicted.get("synchronous_bytes_per_step")
        text = f"a trainer sends {size(own)} per step"
        if other is not None:
            text += f"; strategy 'synchronous' would send {size(other)}"
            if own > other:
                text += ", which is less: substitution pays if an example has many ids and the first layer is narrow"
        self.message(text)

    def on_metrics(self, record: Record) -> None:
        """See :meth:`update`."""
        self.update(record)

    def on_evaluation(self, record: Record) -> None:
        """Shows the metrics of one evaluation, on a permanent line."""
        if record["split"] == "progressive":
            self._progressive = record
            return
        names = ["auc", "gauc", "logloss", "normalized_entropy", "calibration", "mae", "rmse"]
        names += [name for name in record if name not in RECORDED]
        values = [f"{name} {fraction(record[name])}" for name in names if is_number(record.get(name))]
        shown = "  ".join(values) or "no metric is defined here"
        self.message(f"step {count(record['step'])}  {record['split']}  {shown}")

    def _share(self, examples: float) -> str:
        if self._total:
            return f"{min(100 * examples / self._total, 100):3.0f} %"
        return f"{short(examples)} examples"

    def _show(self, notebook: NotebookBar, record: Record, *, last: bool = False) -> None:
        values = "  ".join(f"{value} {unit}" for value, unit in self._parts(record))
        examples = number_of(record, "examples")
        notebook.show(examples, self._share(examples).strip(), values, last=last)

    def _print(self, record: Record) -> None:
        examples = count(record["examples"])
        if self._total:
            share = min(number_of(record, "examples") / self._total, 1.0)
            examples += f" of {count(self._total)} ({percent(share)})"
        parts = [f"{value} {unit}" for value, unit in self._parts(record)]
        self.message("  ".join([f"step {count(record['step'])}", f"examples {examples}", *parts]))
        self._printed_at, self._unprinted = self._clock(), None

    def _parts(self, record: Record) -> list[tuple[str, str]]:
        """The values of a record, each followed by its unit."""
        measure, title = ("mae", "MAE") if "mae" in self._progressive else ("auc", "AUC")
        shown = [
            (fraction(record.get("loss")), "loss"),
            (fraction(self._progressive.get(f"{measure}_last_hour")), f"{title} of the last hour"),
            (fraction(self._progressive.get(measure)), "of all"),
            (short(record.get("samples_per_s")), "samples/s"),
            (short(record.get("rows")), "rows"),
            (percent(record.get("hit_rate")), "hits"),
            (self._left(record), "left"),
        ]
        return [(value, unit) for value, unit in shown if value != DASH]

    def _left(self, record: Record) -> str:
        if not self._total or self._started is None:
            return DASH
        (then, examples), now = self._started, number_of(record, "examples")
        left = max(self._total - now, 0)
        done, seconds = now - examples, self._clock() - then
        # Over the whole run, so that evaluations and checkpoints count. At the start, only the record has a rate.
        rate = done / seconds if done > 0 and seconds > 0 else record.get("samples_per_s")
        return _clock_time(left / rate) if is_number(rate) and rate else DASH


def _clock_time(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d}"
