"""``girih compile``."""

from __future__ import annotations

import click

from girih.cli import cli, note
from girih.errors import ConfigError


@cli.command("compile")
@click.option("--all", "everything", is_flag=True, help="Compile all kernels, for every strategy and tier.")
def compile_kernels(everything: bool) -> int:
    """Compile kernels in advance, for container images.

    Without --all, these are the kernels of one process that trains, evaluates, loads, predicts, exports and serves.
    """
    from girih.kernels.cpu import ahead
    from girih.kernels.cpu.jit import CACHE_DIRECTORY, CACHE_WARNING, JIT_DISABLED, KERNELS

    if JIT_DISABLED:
        raise ConfigError("compile: NUMBA_DISABLE_JIT is set, so that kernels run as plain Python; unset it")
    if CACHE_DIRECTORY is None:
        raise ConfigError(f"compile: nothing was compiled: {CACHE_WARNING}")
    names = list(KERNELS) if everything else ahead.usual()
    seconds = ahead.make_ready(names, lambda line: note(f"girih: {line}"))
    num_kept = sum(map(ahead.is_kept, names))
    click.echo(f"{num_kept} of {len(names)} kernels in {CACHE_DIRECTORY}, compiled in {seconds:.1f} s")
    return 0 if num_kept == len(names) else 1
