"""The command line: parses the arguments, calls the library, and prints the result.

The status is 0, 2 for the user's mistake, 130 after a signal, and 1 otherwise.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from girih.cli.words import Command
from girih.dense.accel import process_settings
from girih.errors import GirihError, UserError, nearest
from girih.version import __version__

UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
)  # fmt: skip
"""Errors of the operating system about a path that the user can fix."""


COMMANDS = {
    "bench": "Measure this machine, and compare girih with its peers.",
    "calibrate": "Measure this machine's links, codecs and the work of steps.",
    "check": "Check a config against its data, and estimate rows and memory.",
    "compare": "Show runs side by side: options that differ, and metrics.",
    "compile": "Compile kernels in advance, for container images.",
    "demo": "Train on a generated click log, and compare AUC with the best possible one.",
    "evaluate": "Evaluate a run's final weights.",
    "export": "Write a run's final model to a self-contained directory for servers.",
    "export-embeddings": "Write the rows of a table to Parquet: id, embedding, count.",
    "info": "Show the machine, the versions, and what runs on its GPUs.",
    "init": "Print a config for some data, guessed from a sample.",
    "inspect": "Show what a run or a checkpoint holds.",
    "plan": "Print the plan of a run.",
    "predict": "Write a run's predictions for new data, in input order.",
    "prune": "Write a run without the rows seen seldom, or long ago.",
    "published": "Show what a run published, and have servers go back to a version.",
    "report": "Draw a self-contained page per run, and one of several.",
    "scale": "Add processes to an active run, or remove some.",
    "serve": "Answer requests for predictions by HTTP: Open Inference Protocol v2.",
    "simulate": "Predict the speed of a run on other hosts, step by step.",
    "status": "Show a run's processes: alive or not, load, bottleneck.",
    "train": "Train the model of a config file.",
}
"""The commands that ``girih --help`` lists. The list imports no command."""
MODULES = {
    **dict.fromkeys(("compare", "report", "scale", "status"), "runs"),
    **dict.fromkeys(("evaluate", "export", "export-embeddings", "predict", "prune"), "final_model"),
}
"""The module of each command that shares a module with others. Other commands have a module with their name."""
LINE_WIDTH = 100
"""The width of the list of commands, so that each command has one line in any terminal."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection during imports, because each collection would search all existing objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class LazyGroup(click.Group):
    """Imports a command only when it is named, because most commands import torch."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns one command, which registers itself when it is imported."""
        if cmd_name in COMMANDS:
            with uncollected():
                importlib.import_module(f"girih.cli.{MODULES.get(cmd_name, cmd_name)}")
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See :class:`click.Group`. The error for an unknown command suggests the nearest one."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands, without importing any."""
        formatter.width = max(formatter.width, LINE_WIDTH)
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


def note(line: str) -> None:
    """Writes a line to standard error."""
    click.echo(line, err=True)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="girih")
def cli() -> None:
    """Trains deep recommender models whose embedding tables outgrow any one machine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its status.

    The status is 130 after a signal. The process runs only this command.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    process_settings.defer_dynamo()
    try:
        status = run(arguments, own_process=True)
    except KeyboardInterrupt:
        status = 130
    gc.freeze()  # the exit needs no collection, which would search all imported objects
    sys.exit(status)


def run(arguments: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """Runs one command and returns its status. A mistake prints one line on standard error.

    Args:
        own_process: True if the process runs only this command, which may then change its settings.
    """
    try:
        status = cli.main(arguments, prog_name="girih", standalone_mode=False, obj=own_process)
    except click.exceptions.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        note(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except GirihError as error:
        return _fail(str(error), 2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):  # torch's error
            raise
        remedy = "lower dim or data.batch_size, give tables an eviction with max_rows, or set store.tiers"
        return _fail(f"out of memory: {str(error) or 'an allocation failed'}; {remedy}", 2)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(
                f"no space left on the disk{f' for {error.filename}' if error.filename else ''}; free some", 2
            )
        if error.errno in UNUSABLE and error.filename:
            told = os.strerror(error.errno).lower()
            return _fail(f"{os.fspath(error.filename)}: {told}; check the path, or name another", 2)
        raise
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    note(f"girih: {' '.join(message.split())}")
    return status
