"""Reports of a run for people: progress while the run continues, and a page afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from girih.errors import ConfigError, GirihError
from girih.report.progress import Progress

__all__ = ["Progress", "write_comparison", "write_report"]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Imports :func:`girih.report.page.write_report` on the first call and runs it: Altair is large.

    Raises:
        ConfigError: a package is missing, or drawing failed.
    """
    with _refused():
        from girih.report import page

        return page.write_report(run_dir)


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Runs :func:`girih.report.page.write_comparison`. See :func:`write_report` on errors."""
    with _refused():
        from girih.report import page

        return page.write_comparison(runs, out)


@contextmanager
def _refused() -> Iterator[None]:
    """Turns every failure to draw into an error of one line, so that nobody loses the result of a run."""
    try:
        yield
    except (GirihError, KeyboardInterrupt, SystemExit):
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"no report: {error.name} is not installed; pip install 'girih[report]'") from error
    except BaseException as error:  # a panic of the JavaScript engine is not an Exception
        raise ConfigError(f"no report: {type(error).__name__}: {error}") from error
